//! `flash-dma-kernels` through a CubeCL client, without Burn.

use super::buffers::{Output, binding, bytes_of, contiguous, values_of};
use super::{Pass, SENTINEL};
use crate::{Call, Engine, Gradients, Layout, Outputs, Passes, Raw, Refused, Size};
use cubecl::client::Client;
use cubecl::ir::features::TypeUsage;
use cubecl::ir::{ElemType, FloatKind, UIntKind};
use cubecl::prelude::TensorBinding;
use cubecl::server::{CopyDescriptor, Handle};
use flash_dma_kernels::product::{self, Choice, Operands};
use flash_dma_kernels::{self as engine, Backward as _, Forward as _};
use flash_dma_problem::{AttentionError, ElementType, Interval, KeptKeys, Problem};
use std::marker::PhantomData;

/// A runtime and its device.
pub trait Target: Send + Sync + 'static {
    /// Its name in the names of the tests.
    const NAME: &'static str;
    /// The size that its cases are limited to.
    const SIZE: Size;

    /// The matrix engine to force where the kernels have a choice; `None` leaves the choice to them.
    const ENGINE: Option<engine::Engine> = None;

    /// The device.
    fn device() -> cubecl::Device;
}

/// The kernels on one runtime.
pub struct Kernels<T> {
    pub(crate) client: Client,
    target: PhantomData<T>,
}

/// The engine that a pass runs on: the one that the target forces, if it must support such a problem, otherwise the one
/// that the kernels choose.
fn engine_of<T: Target>(choice: engine::Engine, p: &Problem) -> engine::Engine {
    use engine::Engine::{Mma, Portable, Wgmma};
    match T::ENGINE {
        Some(Portable) => Portable,
        // Of the problems that tensor cores support, `mma` takes head dimensions that are multiples of 32.
        Some(Mma) if choice != Portable && p.head_dim.is_multiple_of(32) => Mma,
        Some(Wgmma) if choice == Wgmma => Wgmma,
        _ => choice,
    }
}

/// The engine of a plan; for a refused one, the engine that supports everything.
pub(crate) fn planned<O>(plan: &Result<engine::Plan<'_, O>, AttentionError>) -> engine::Engine {
    (plan.as_ref()).map_or(engine::Engine::Portable, engine::Plan::engine)
}

/// Records which engine of the kernels runs a pass.
pub(crate) fn ran(pass: Pass, engine: engine::Engine) {
    let name = match engine {
        engine::Engine::Portable => "portable",
        engine::Engine::Mma => "mma",
        engine::Engine::Wgmma => "wgmma",
        other => unreachable!("{other:?} has no name here"),
    };
    super::note(pass, name);
}

pub(crate) struct Ran {
    pub out: Output,
    pub lse: Output,
    /// The rounding errors of `out` and of `lse`, if a backward pass is to read them; f32 has no residual.
    pub residual: Option<Output>,
    pub lse_rest: Option<Output>,
}

impl Ran {
    /// The buffers as `output` makes them; `for_backward` also those that a backward pass reads.
    pub(crate) fn new(
        p: &Problem,
        for_backward: bool,
        output: impl Fn(&[usize], ElementType) -> Output,
    ) -> Self {
        let residual = p.residual_shape().filter(|_| for_backward);
        let of_rows = || output(&p.lse_shape(), ElementType::F32);
        Self {
            out: output(&p.q_shape(), p.element),
            lse: of_rows(),
            residual: residual.map(|shape| output(&shape, p.element)),
            lse_rest: for_backward.then(of_rows),
        }
    }

    pub(crate) fn outputs(&self) -> engine::Outputs {
        engine::Outputs {
            out: self.out.binding(),
            residual: self.residual.as_ref().map(Output::binding),
            lse: self.lse.binding(),
            lse_rest: self.lse_rest.as_ref().map(Output::binding),
        }
    }

    /// The tensors that a backward pass reads, with the gradients of the results.
    pub(crate) fn saved(
        &self,
        grad_out: TensorBinding,
        grad_lse: Option<TensorBinding>,
    ) -> engine::Saved {
        let engine::Outputs {
            out,
            residual,
            lse,
            lse_rest,
        } = self.outputs();
        engine::Saved {
            out,
            residual,
            lse,
            lse_rest,
            grad_out,
            grad_lse,
        }
    }
}

/// The plan of a pass on the engine that runs it: `plan`, by the library's choice, or the plan that `plan_on` makes.
fn on_engine_of<'a, T: Target, O>(
    pass: Pass,
    p: &Problem,
    plan: Result<engine::Plan<'a, O>, AttentionError>,
    plan_on: impl FnOnce(engine::Engine) -> Result<engine::Plan<'a, O>, AttentionError>,
) -> Result<engine::Plan<'a, O>, AttentionError> {
    let choice = planned(&plan);
    let serves = engine_of::<T>(choice, p);
    ran(pass, serves);
    if serves == choice {
        plan
    } else {
        plan_on(serves)
    }
}

impl<T: Target> Kernels<T> {
    /// The client of its device.
    pub fn client(&self) -> &Client {
        &self.client
    }

    pub(crate) fn buffer(&self, bytes: &[u8]) -> Handle {
        // A runtime may not support empty buffers; nothing is read from this one.
        self.client
            .create_from_slice(if bytes.is_empty() { &[0; 16] } else { bytes })
    }

    /// True if the device has byte buffers: WGSL has none.
    pub(crate) fn stores_bytes(&self) -> bool {
        let byte = ElemType::UInt(UIntKind::U8);
        let usage = self.client.properties().type_usage(byte);
        usage.contains(TypeUsage::Buffer)
    }

    /// A contiguous tensor of integers.
    pub(crate) fn words(&self, shape: &[usize], values: &[i32]) -> TensorBinding {
        contiguous(&self.buffer(bytemuck::cast_slice(values)), shape)
    }

    /// The content of a contiguous tensor of elements of `size` bytes.
    pub(crate) fn read_bytes(&self, tensor: &TensorBinding, size: usize) -> Vec<u8> {
        let descriptor = CopyDescriptor {
            handle: tensor.handle.clone(),
            shape: tensor.shape.clone(),
            strides: tensor.strides.clone(),
            elem_size: size,
        };
        self.client.read_one_unchecked_tensor(descriptor).to_vec()
    }

    pub(crate) fn tensor(
        &self,
        values: &[f64],
        shape: &[usize],
        element: ElementType,
    ) -> TensorBinding {
        contiguous(&self.buffer(&bytes_of(values, element)), shape)
    }

    pub(crate) fn upload(&self, raw: &Raw) -> TensorBinding {
        let handle = self.buffer(&bytes_of(&raw.values, raw.element));
        binding(&handle, &raw.shape, &raw.strides)
    }

    pub(crate) fn output(&self, shape: &[usize], element: ElementType, missing: usize) -> Output {
        self.output_behind(0, shape, element, missing)
    }

    fn result(&self, call: &Call, shape: &[usize], element: ElementType) -> Output {
        let before = match call.layout {
            Layout::Behind => 2,
            _ => 0,
        };
        self.output_behind(before, shape, element, call.missing)
    }

    fn output_behind(
        &self,
        before: usize,
        shape: &[usize],
        element: ElementType,
        missing: usize,
    ) -> Output {
        let len = before + shape.iter().product::<usize>() - missing;
        let handle = self.buffer(&bytes_of(&vec![SENTINEL; len], element));
        Output {
            handle: handle.offset_start((before * element.size()) as u64),
            shape: shape.into(),
            element,
        }
    }

    pub(crate) fn read(&self, output: &Output) -> Vec<f64> {
        let len: usize = output.shape.iter().product();
        if len == 0 {
            return Vec::new();
        }
        let bytes = self
            .client
            .read_one(output.handle.clone())
            .expect("the launch failed");
        let mut values = values_of(&bytes, output.element);
        values.truncate(len);
        values
    }

    pub(crate) fn is_untouched(&self, outputs: &[&Output]) -> bool {
        outputs
            .iter()
            .all(|x| self.read(x).iter().all(|&x| x == SENTINEL))
    }

    fn inputs(&self, call: &Call) -> engine::Inputs {
        let p = &call.problem;
        engine::Inputs {
            q: self.upload(&call.q),
            k: self.upload(&call.k),
            v: self.upload(&call.v),
            selection: call.scores.as_ref().map(|scores| {
                let intervals = call.intervals.as_deref().unwrap_or_default();
                let words = |words: &[u32], shape: &[usize]| {
                    contiguous(&self.buffer(bytemuck::cast_slice(words)), shape)
                };
                let of_keys = |positions| words(positions, &p.scores_shape());
                let pairs: Vec<u32> = intervals.iter().flat_map(|i| [i.first, i.end]).collect();
                engine::Selection {
                    scores: self.upload(scores),
                    intervals: words(&pairs, &p.intervals_shape()),
                    learning: (call.runner_up_ends.as_ref()).map(|ends| engine::RankLearning {
                        ends: of_keys(ends),
                        max_live: call.most_until_far(),
                        kept_from: call.kept_from.as_deref().map(of_keys),
                    }),
                }
            }),
        }
    }

    /// Runs the forward pass; `for_backward` also with the results that a backward pass reads.
    fn run_forward(&self, call: &Call, for_backward: bool) -> Result<Ran, Refused> {
        let (client, p, inputs) = (&self.client, &call.problem, self.inputs(call));
        let ran = Ran::new(p, for_backward, |shape, e| self.result(call, shape, e));
        let plan = p.plan_forward(client, &inputs, None);
        let plan = on_engine_of::<T, _>(Pass::Forward, p, plan, |engine| {
            p.plan_forward(client, &inputs, Some(engine))
        });
        self.run(plan, ran)
    }

    pub(crate) fn run(
        &self,
        plan: Result<engine::Plan<'_, engine::Outputs>, AttentionError>,
        ran: Ran,
    ) -> Result<Ran, Refused> {
        let result = plan.and_then(|plan| plan.run(ran.outputs()));
        let untouched = || self.is_untouched(&[&ran.out, &ran.lse]);
        result.map_err(|error| Refused::new(error, untouched()))?;
        Ok(ran)
    }

    pub(crate) fn outputs(&self, ran: &Ran) -> Outputs {
        Outputs {
            out: self.read(&ran.out),
            lse: self.read(&ran.lse),
        }
    }
}

impl<T: Target> Kernels<T> {
    /// The forward pass of one matrix engine, with some of its choices fixed.
    pub fn forward_tuned(
        &self,
        call: &Call,
        engine: engine::Engine,
        tuning: engine::internals::Tuning,
    ) -> Result<Outputs, AttentionError> {
        let (client, p, inputs) = (&self.client, &call.problem, self.inputs(call));
        let ran = Ran::new(p, false, |shape, e| self.result(call, shape, e));
        engine::internals::forward_tuned(engine, tuning, client, p, &inputs)?.run(ran.outputs())?;
        Ok(self.outputs(&ran))
    }

    /// Products of `wgmma` in isolation, of whole numbers, as returned by
    /// [`products_alone`](engine::internals::products_alone).
    ///
    /// # Errors
    ///
    /// If the device has none.
    pub fn products_alone(
        &self,
        element: ElementType,
        boxes: bool,
        [a, b]: [&[f64]; 2],
        sums: &[f64],
    ) -> Result<(Vec<f64>, Vec<f64>), AttentionError> {
        let (rows, columns) = (64, a.len() / 64);
        let [a, b] = [a, b].map(|values| self.tensor(values, &[1, 1, rows, columns], element));
        let sums = self.tensor(sums, &[rows, columns], ElementType::F32);
        let products = self.output(&[2, rows, rows], ElementType::F32, 0);
        let results = self.output(&[rows, columns], ElementType::F32, 0);
        let (p, r) = (products.binding(), results.binding());
        engine::internals::products_alone(&self.client, element, boxes, [a, b], sums, p, r)?;
        Ok((self.read(&products), self.read(&results)))
    }

    /// The product of two matrices, `[m, n]` in `out`, by one choice alone or by the rule.
    pub fn product(
        &self,
        [a, b]: [&Raw; 2],
        out: ElementType,
        choice: Option<Choice>,
    ) -> Result<Vec<f64>, AttentionError> {
        let operands = Operands {
            a: self.upload(a),
            b: self.upload(b),
            element: a.element,
        };
        let result = self.output(&[a.shape[0], b.shape[1]], out, 0);
        let (client, to) = (&self.client, result.binding());
        match choice {
            None => product::product(client, &operands, &to, out)?,
            Some(choice) => product::product_by(client, &operands, &to, out, choice)?,
        }
        Ok(self.read(&result))
    }
}

impl<T: Target> Engine for Kernels<T> {
    const NAME: &'static str = T::NAME;
    const SIZE: Size = T::SIZE;

    fn new() -> Self {
        Self {
            client: T::device().client(),
            target: PhantomData,
        }
    }

    fn supports(&self, element: ElementType) -> bool {
        let kind = match element {
            ElementType::F32 => FloatKind::F32,
            ElementType::F16 => FloatKind::F16,
            ElementType::Bf16 => FloatKind::BF16,
        };
        self.client
            .properties()
            .supports_type(ElemType::Float(kind))
    }

    fn select(&self, scores: &Raw, kept: impl Into<KeptKeys>) -> Result<Vec<Interval>, Refused> {
        let sentinel = [u32::MAX; 2];
        let shape: Vec<usize> = scores.shape.iter().copied().chain([2]).collect();
        let len: usize = scores.shape.iter().product();
        let handle = self.buffer(bytemuck::cast_slice(&vec![sentinel; len]));
        let output = contiguous(&handle, &shape);
        let result = engine::select(&self.client, self.upload(scores), kept, output);
        let words: Vec<[u32; 2]> = match len {
            0 => Vec::new(),
            _ => {
                let bytes = self.client.read_one(handle).expect("the launch failed");
                let pairs = bytes.chunks_exact(8);
                pairs.map(bytemuck::pod_read_unaligned).collect()
            }
        };
        result.map_err(|error| Refused::new(error, words.iter().all(|&w| w == sentinel)))?;
        let interval = |[first, end]: [u32; 2]| Interval { first, end };
        Ok(words.into_iter().map(interval).collect())
    }

    fn forward(&self, call: &Call) -> Result<Outputs, Refused> {
        Ok(self.outputs(&self.run_forward(call, false)?))
    }

    fn backward(&self, call: &Call) -> Passes {
        let (client, p, inputs) = (&self.client, &call.problem, self.inputs(call));
        let whole = Call {
            missing: 0,
            ..call.clone()
        };
        let forwarded = self.run_forward(&whole, true)?;
        let outputs = self.outputs(&forwarded);
        let placed = Raw::new(&outputs.out, &p.q_shape(), p.element, call.layout);
        let q = self.result(call, &p.q_shape(), p.element);
        let [k, v] = [(); 2].map(|()| self.result(call, &p.kv_shape(), p.element));
        let of_keys =
            |has: bool| has.then(|| self.result(call, &p.scores_shape(), ElementType::F32));
        let (scores, rank) = (
            of_keys(p.scores_learn),
            of_keys(call.runner_up_ends.is_some()),
        );
        let grad_lse = call.grad_lse.as_ref();
        let grad_lse = grad_lse.map(|g| self.tensor(g, &p.lse_shape(), ElementType::F32));
        let saved = engine::Saved {
            out: self.upload(&placed),
            ..forwarded.saved(self.upload(&call.grad_out), grad_lse)
        };
        let gradients = engine::Gradients {
            q: q.binding(),
            k: k.binding(),
            v: v.binding(),
            scores: scores.as_ref().map(Output::binding),
            rank: rank.as_ref().map(Output::binding),
        };
        let plan = p.plan_backward(client, &inputs, &saved, None);
        let plan = on_engine_of::<T, _>(Pass::Backward, p, plan, |engine| {
            p.plan_backward(client, &inputs, &saved, Some(engine))
        });
        plan.and_then(|plan| plan.run(gradients)).map_err(|error| {
            let all = [&q, &k, &v].into_iter().chain(&scores).chain(&rank);
            Refused::new(error, self.is_untouched(&all.collect::<Vec<_>>()))
        })?;
        let grads = Gradients {
            q: self.read(&q),
            k: self.read(&k),
            v: self.read(&v),
            scores: scores.as_ref().map(|z| self.read(z)),
            rank: rank.as_ref().map(|z| self.read(z)),
            ..Gradients::default()
        };
        Ok((outputs, grads))
    }
}

macro_rules! targets {
    ($([$($condition:tt)*] $target:ident, $kernels:ident:
        $name:literal, $size:ident, $device:ident($($number:expr)?) $(, $engine:ident)?;)*) => {$(
        #[doc = concat!("The device of ", $name, ".")]
        #[cfg($($condition)*)]
        #[derive(Debug)]
        pub struct $target;

        #[cfg($($condition)*)]
        impl Target for $target {
            const NAME: &'static str = $name;
            const SIZE: Size = Size::$size;
            $(const ENGINE: Option<engine::Engine> = Some(engine::Engine::$engine);)?

            fn device() -> cubecl::Device {
                let device = cubecl::Device::$device($($number)?);
                device.expect("the build is for this device, so the machine must have it")
            }
        }

        #[doc = concat!("The engine ", $name, ".")]
        #[cfg($($condition)*)]
        pub type $kernels = Kernels<$target>;
    )*};
}

// The sizes of wgpu are small, because the driver may run on a CPU.
targets! {
    [feature = "cpu"]
    CpuTarget, KernelsOnCpu: "kernels_cpu", Small, cpu();

    [feature = "cuda"]
    CudaTarget, KernelsOnCuda: "kernels_cuda", Large, cuda(0);

    [feature = "cuda"]
    CudaMmaTarget, KernelsOnCudaMma: "kernels_cuda_mma", Large, cuda(0), Mma;

    [feature = "cuda"]
    CudaWgmmaTarget, KernelsOnCudaWgmma: "kernels_cuda_wgmma", Large, cuda(0), Wgmma;

    [feature = "cuda"]
    CudaPortableTarget, KernelsOnCudaPortable: "kernels_cuda_portable", Large, cuda(0), Portable;

    [all(feature = "wgpu", not(feature = "vulkan"))]
    WgpuTarget, KernelsOnWgpu: "kernels_wgpu", Small, wgpu(Default::default());

    [feature = "vulkan"]
    VulkanTarget, KernelsOnVulkan: "kernels_vulkan", Small, vulkan(Default::default());
}
