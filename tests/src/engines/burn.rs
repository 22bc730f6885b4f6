//! `burn-flash-dma` through `Tensor`s and autodiff.

use crate::tensors::{dtype, floats, grad, outputs};
use crate::{Call, Competing, Engine, Gradients, Outputs, Passes, Raw, Refused, Size};
use burn::backend::Dispatch;
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_flash_dma::ops::{DynamicMaskOps, OptionalInt, RankLearning, Selection, Wanted};
use burn_flash_dma::{Attention, Documents, Intervals, Selector, try_learnable_sink, try_select};
use flash_dma_problem::{AttentionOptions, ElementType, Interval, KeptKeys, SelectionRule};
use std::marker::PhantomData;

/// A Burn backend and its device.
pub trait Backend: Send + Sync + 'static {
    /// Its name in the names of the tests.
    const NAME: &'static str;
    /// The size that its cases are limited to.
    const SIZE: Size;

    /// The device.
    fn device() -> Device;
}

/// The extension on one backend.
pub struct Burn<B> {
    pub(crate) device: Device,
    backend: PhantomData<B>,
}

impl<B> Burn<B> {
    /// The device of its tensors.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

/// The tensor in its memory layout: the buffer in stride order, gaps included, then views that give it its shape.
pub(crate) fn upload<const R: usize>(raw: &Raw, device: &Device) -> Tensor<R> {
    place(raw, |values, stored| {
        let data = TensorData::new(values, stored);
        Tensor::from_data(data, (device, dtype(raw.element)))
    })
}

/// [`upload`] for booleans: nonzero values are `true`.
pub(crate) fn upload_bool<const R: usize>(raw: &Raw, device: &Device) -> Tensor<R, Bool> {
    place(raw, |values, stored| {
        let values: Vec<bool> = values.iter().map(|&x| x != 0.0).collect();
        Tensor::from_data(TensorData::new(values, stored), device)
    })
}

fn place<const R: usize, K: Basic>(
    raw: &Raw,
    store: impl Fn(Vec<f32>, [usize; R]) -> Tensor<R, K>,
) -> Tensor<R, K> {
    let shape: [usize; R] = raw.shape[..].try_into().expect("Burn's ranks are fixed");
    if shape.contains(&0) {
        return store(Vec::new(), shape);
    }
    // The axes from the outermost in memory to the innermost; those with a stride of 0 have one index there.
    let mut axes: [usize; R] = std::array::from_fn(|axis| axis);
    axes.sort_by_key(|&axis| match raw.strides[axis] {
        0 => std::cmp::Reverse((usize::MAX, 0)),
        // An axis of one index has the stride of the axis inside it or around it.
        stride => std::cmp::Reverse((stride, shape[axis])),
    });
    let sizes: [usize; R] = std::array::from_fn(|axis| match raw.strides[axis] {
        0 => 1,
        _ => shape[axis],
    });
    let used: [usize; R] = axes.map(|axis| sizes[axis]);
    // Including the gaps that an axis has after its indices.
    let mut stored = used;
    for (depth, pair) in axes.windows(2).enumerate() {
        let (outer, inner) = (raw.strides[pair[0]], raw.strides[pair[1]]);
        if outer > 0 && inner > 0 {
            stored[depth + 1] = outer / inner;
        }
    }
    let mut values: Vec<f32> = raw.values.iter().map(|&x| x as f32).collect();
    values.resize(stored.iter().product(), f32::NAN);
    let tensor = (0..R).fold(store(values, stored), |tensor, depth| {
        match stored[depth] > used[depth] {
            true => tensor.narrow(depth, 0, used[depth]),
            false => tensor,
        }
    });
    let mut order = [0isize; R];
    for (at, &axis) in axes.iter().enumerate() {
        order[axis] = at as isize;
    }
    let tensor = tensor.permute(order);
    if sizes == shape {
        tensor
    } else {
        tensor.expand(shape)
    }
}

struct Tensors {
    rows: [Tensor<4>; 3],
    scores: Option<Tensor<3>>,
    sink: Option<Tensor<1>>,
}

impl Tensors {
    fn new(call: &Call, device: &Device) -> Self {
        Self {
            rows: [&call.q, &call.k, &call.v].map(|raw| upload(raw, device)),
            scores: call.scores.as_ref().map(|z| upload(z, device)),
            sink: (call.sink.as_ref()).map(|logits| floats(logits, [logits.len()], device)),
        }
    }

    fn tracked(self) -> Self {
        Self {
            rows: self.rows.map(Tensor::require_grad),
            scores: self.scores.map(Tensor::require_grad),
            sink: self.sink.map(Tensor::require_grad),
        }
    }

    fn forward(&self, call: &Call) -> Result<(Tensor<4>, Tensor<3>), Refused> {
        let (out, lse) = self.forward_of_keys(call)?;
        match self.sink.clone() {
            None => Ok((out, lse)),
            Some(logits) => Ok(try_learnable_sink(out, lse, logits)?),
        }
    }

    fn forward_of_keys(&self, call: &Call) -> Result<(Tensor<4>, Tensor<3>), Refused> {
        if let Some(ends) = &call.runner_up_ends {
            return Ok(self.forward_with_runners_up(call, ends));
        }
        let [q, k, v] = self.rows.clone();
        let attention = Attention::new(q, k, v).options(options(call));
        let results = match self.scores.clone() {
            None => attention.try_forward_with_lse(),
            Some(z) if call.given => {
                let intervals = Intervals::try_from_tensor(pairs(call, &z.device()))?;
                let attention = attention.scores(z).intervals(&intervals);
                attention.try_forward_with_lse()
            }
            Some(z) => attention.scores(z).try_forward_with_lse(),
        };
        Ok(results?)
    }

    /// Runs attention over the keys that a rule selects.
    fn compete(&self, call: &Call, rule: &Competing) -> Result<(Tensor<4>, Tensor<3>), Refused> {
        let scores = self.scores.clone().expect("ranks are scores");
        let selector = selector(&rule.rules, rule.documents.as_deref(), call.problem.batch);
        let intervals = selector
            .runners_up(rule.runners_up)
            .leave_one_out(rule.left_out)
            .compete(true)
            .try_select(scores.clone())?;
        let options = AttentionOptions {
            keep_window: None,
            ..options(call)
        };
        let [q, k, v] = self.rows.clone();
        let attention = Attention::new(q, k, v).scores(scores);
        let attention = attention.intervals(&intervals).options(options);
        Ok(attention.try_forward_with_lse()?)
    }

    /// By the operation below the `Tensor` API, which takes any ends.
    fn forward_with_runners_up(&self, call: &Call, ends: &[u32]) -> (Tensor<4>, Tensor<3>) {
        let p = &call.problem;
        let device = self.rows[0].device();
        let of_keys = |positions: &[u32]| {
            let positions = positions.iter().map(|&position| position as i32);
            let positions = TensorData::new(positions.collect::<Vec<_>>(), p.scores_shape());
            Tensor::<3, Int>::from_data(positions, (&device, DType::I32)).into_dispatch()
        };
        let scores = self.scores.clone().expect("runners-up have scores");
        let selection = Selection::Scored {
            intervals: pairs(call, &device).into_dispatch(),
            learning: RankLearning::Some {
                ends: of_keys(ends),
                max_live: call.most_until_far(),
                // One tensor for both gets both gradients.
                rank: scores.clone().into_dispatch(),
                kept_from: match &call.kept_from {
                    None => OptionalInt::None,
                    Some(from) => OptionalInt::Some(of_keys(from)),
                },
            },
            scores: scores.into_dispatch(),
        };
        let [q, k, v] = self.rows.clone().map(Tensor::into_dispatch);
        let wanted = Wanted::OutAndLse;
        let results = Dispatch::dynamic_mask_forward(q, k, v, selection, *p, wanted);
        let [out, lse] = [results.out, results.lse];
        (Tensor::from_dispatch(out), Tensor::from_dispatch(lse))
    }
}

fn options(call: &Call) -> AttentionOptions {
    let p = &call.problem;
    AttentionOptions {
        keep_window: p.has_scores.then_some(p.window),
        ..crate::masked::options(p)
    }
}

/// The selector of a rule for each head, inside documents of these lengths, the same for every sequence.
fn selector(rules: &[SelectionRule], documents: Option<&[usize]>, batch: usize) -> Selector {
    let windows: Vec<usize> = rules.iter().map(|rule| rule.window).collect();
    let selector = Selector::top(windows)
        .recent(rules[0].recent)
        .sinks(rules[0].sinks);
    match documents {
        None => selector,
        Some(lengths) => selector.documents(Documents::from_lengths(vec![lengths.to_vec(); batch])),
    }
}

fn read(intervals: Intervals) -> Vec<Interval> {
    let words = intervals.into_tensor().into_data_as::<i32>();
    let words: Vec<i32> = words.iter().collect();
    let pair = |w: &[i32]| Interval {
        first: w[0] as u32,
        end: w[1] as u32,
    };
    words.chunks_exact(2).map(pair).collect()
}

/// The intervals of a call, as a tensor.
fn pairs(call: &Call, device: &Device) -> Tensor<4, Int> {
    let intervals = call.intervals.iter().flatten();
    let words = intervals.flat_map(|i| [i.first as i32, i.end as i32]);
    let data = TensorData::new(words.collect::<Vec<_>>(), call.problem.intervals_shape());
    Tensor::from_data(data, (device, DType::I32))
}

impl<B: Backend> Engine for Burn<B> {
    const NAME: &'static str = B::NAME;
    const SIZE: Size = B::SIZE;
    const COMPETES: bool = true;
    const SINKS: bool = true;

    fn new() -> Self {
        Self {
            device: B::device(),
            backend: PhantomData,
        }
    }

    fn supports(&self, element: ElementType) -> bool {
        self.device.supports_dtype(dtype(element))
    }

    fn select(&self, scores: &Raw, kept: impl Into<KeptKeys>) -> Result<Vec<Interval>, Refused> {
        let (kept, scores) = (kept.into(), upload(scores, &self.device));
        let selected = match kept.recent {
            0 => try_select(scores, kept.best),
            recent => Selector::top(kept.best + recent)
                .recent(recent)
                .try_select(scores),
        };
        Ok(read(selected?))
    }

    fn compose(
        &self,
        scores: &Raw,
        rules: &[SelectionRule],
        documents: Option<&[usize]>,
    ) -> Option<Result<Vec<Interval>, Refused>> {
        rules.first()?;
        let selector = selector(rules, documents, scores.shape[0]);
        let intervals = selector.try_select(upload(scores, &self.device));
        Some(intervals.map(read).map_err(Refused::from))
    }

    fn forward(&self, call: &Call) -> Result<Outputs, Refused> {
        Ok(outputs(Tensors::new(call, &self.device).forward(call)?))
    }

    fn backward(&self, call: &Call) -> Passes {
        let tensors = Tensors::new(call, &self.device.clone().autodiff()).tracked();
        let results = tensors.forward(call)?;
        Ok(tensors.backward(call, results))
    }

    fn compete(&self, call: &Call, rule: &Competing) -> Option<Passes> {
        let tensors = Tensors::new(call, &self.device.clone().autodiff()).tracked();
        let results = tensors.compete(call, rule);
        Some(results.map(|results| tensors.backward(call, results)))
    }
}

/// A loss whose gradients are the given ones, exactly: the upcast is lossless.
pub(crate) fn loss(
    (out, lse): &(Tensor<4>, Tensor<3>),
    grad_out: &Raw,
    grad_lse: Option<&[f64]>,
) -> Tensor<1> {
    let device = out.device();
    let grad_out = upload::<4>(grad_out, &device).cast(DType::F32);
    let loss = (out.clone().cast(DType::F32) * grad_out).sum();
    let Some(grad_lse) = grad_lse else {
        return loss;
    };
    loss + (lse.clone() * floats(grad_lse, lse.dims(), &device)).sum()
}

impl Tensors {
    fn backward(&self, call: &Call, results: (Tensor<4>, Tensor<3>)) -> (Outputs, Gradients) {
        let grads = loss(&results, &call.grad_out, call.grad_lse.as_deref()).backward();
        let [q, k, v] = self.rows.each_ref().map(|x| grad(x, &grads));
        let gradients = Gradients {
            q,
            k,
            v,
            scores: self.scores.as_ref().map(|z| grad(z, &grads)),
            sink: self.sink.as_ref().map(|logits| grad(logits, &grads)),
            ..Gradients::default()
        };
        (outputs((results.0.inner(), results.1.inner())), gradients)
    }
}

macro_rules! backends {
    ($([$($condition:tt)*] $backend:ident, $burn:ident:
        $name:literal, $size:ident, $device:ident($($number:expr)?);)*) => {$(
        #[doc = concat!("The device of ", $name, ".")]
        #[cfg($($condition)*)]
        #[derive(Debug)]
        pub struct $backend;

        #[cfg($($condition)*)]
        impl Backend for $backend {
            const NAME: &'static str = $name;
            const SIZE: Size = Size::$size;

            fn device() -> Device {
                Device::$device($($number)?)
            }
        }

        #[doc = concat!("The engine ", $name, ".")]
        #[cfg($($condition)*)]
        pub type $burn = Burn<$backend>;
    )*};
}

backends! {
    [feature = "flex"] FlexBackend, BurnOnFlex: "burn_flex", Medium, flex();
    [feature = "cpu"] CpuBackend, BurnOnCpu: "burn_cpu", Small, cpu();
    [feature = "cuda"] CudaBackend, BurnOnCuda: "burn_cuda", Large, cuda(0);
    [feature = "wgpu"] WgpuBackend, BurnOnWgpu: "burn_wgpu", Small, wgpu(Default::default());
}
