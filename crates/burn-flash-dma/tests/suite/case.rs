//! A problem with its inputs and the oracle's answers, and helpers of the tests.

use burn::tensor::{Bool, DType, Device, Distribution, Element, Int, Tensor, TensorData};
use burn_flash_dma::{
    AlibiSlopes, Attention, AttentionError, AttentionOptions, Dropout, ElementType, Problem,
};
use flash_dma_reference::compare::{GRADIENT, OUTPUT, compare, compare_lse};
use flash_dma_reference::generate::{self, Scores};
use flash_dma_reference::{Inputs, Rng};
use std::fmt::Display;
#[cfg(feature = "cpu")]
use std::sync::{Mutex, MutexGuard, PoisonError};

/// `[batch, q_heads, kv_heads, q_len, k_len, head_dim]`.
pub type Sizes = [usize; 6];

pub struct Case {
    pub name: String,
    pub inputs: Inputs,
    pub options: AttentionOptions,
    pub grad_out: Vec<f64>,
    pub grad_lse: Vec<f64>,
}

/// The four inputs on a device; `scores` is `None` for plain attention.
#[derive(Clone)]
pub struct Tensors {
    pub q: Tensor<4>,
    pub k: Tensor<4>,
    pub v: Tensor<4>,
    pub scores: Option<Tensor<3>>,
}

impl Case {
    pub fn new(
        sizes: Sizes,
        scores: Option<Scores>,
        element: ElementType,
        options: AttentionOptions,
        seed: u64,
    ) -> Self {
        let [batch, q_heads, kv_heads, q_len, k_len, head_dim] = sizes;
        let q = [batch, q_heads, q_len, head_dim];
        let kv = [batch, kv_heads, k_len, head_dim];
        let scores_shape = scores.map(|_| &kv[..3]);
        let problem = Problem::new(&q, &kv, &kv, scores_shape, element, &options).unwrap();
        let inputs = generate::inputs(problem, scores.unwrap_or(Scores::Normal), 1.0, seed);
        let (grad_out, grad_lse) = generate::gradients(&problem, seed);
        Self {
            name: format!("{sizes:?} {scores:?} {element} {options:?}"),
            inputs,
            options,
            grad_out,
            grad_lse,
        }
    }

    pub fn problem(&self) -> &Problem {
        &self.inputs.problem
    }

    pub fn tensors(&self, device: &Device) -> Tensors {
        let (p, scores) = (self.problem(), self.inputs.scores.as_ref());
        let element = p.element;
        Tensors {
            q: tensor(&self.inputs.q, p.q_shape(), element, device),
            k: tensor(&self.inputs.k, p.kv_shape(), element, device),
            v: tensor(&self.inputs.v, p.kv_shape(), element, device),
            scores: scores.map(|z| tensor(z, p.scores_shape(), ElementType::F32, device)),
        }
    }

    pub fn grad_out(&self, device: &Device) -> Tensor<4> {
        let p = self.problem();
        tensor(&self.grad_out, p.q_shape(), p.element, device)
    }

    pub fn grad_lse(&self, device: &Device) -> Tensor<3> {
        let p = self.problem();
        tensor(&self.grad_lse, p.lse_shape(), ElementType::F32, device)
    }

    /// A loss whose gradients are those of the case: of the output, and optionally of the LSE.
    pub fn loss(&self, tensors: &Tensors, with_lse: bool) -> Tensor<1> {
        if with_lse {
            return self.loss_of(tensors.attend_with_lse(self.options));
        }
        let grad_out = self.grad_out(&tensors.q.device());
        loss(tensors.attend(self.options), grad_out)
    }

    fn loss_of(&self, (out, lse): (Tensor<4>, Tensor<3>)) -> Tensor<1> {
        let device = out.device();
        loss(out, self.grad_out(&device)) + loss(lse, self.grad_lse(&device))
    }

    /// Forward and backward on a device with autodiff, through the output and the LSE.
    pub fn check(&self, device: &Device) {
        let tensors = self.tensors(device).track([true; 4]);
        let (out, lse) = tensors.attend_with_lse(self.options);
        self.check_forward(out.clone(), lse.clone());
        // Where the LSE is infinite so is its product; only the gradient matters.
        let grads = self.loss_of((out, lse)).backward();
        self.check_gradients(tensors.gradients(&grads), true);
    }

    /// The oracle's tolerance rule: twice the naive implementation's error.
    pub fn check_forward(&self, out: Tensor<4>, lse: Tensor<3>) {
        let p = self.problem();
        assert_eq!(out.dtype(), dtype(p.element), "{}", self.name);
        assert_eq!(lse.dtype(), DType::F32, "{}", self.name);
        assert_eq!(out.dims(), p.q_shape(), "{}", self.name);
        assert_eq!(lse.dims(), p.lse_shape(), "{}", self.name);
        let (exact, naive) = (self.inputs.forward(), self.inputs.naive_forward());
        let (q, out) = (p.q_shape(), values(out));
        compare("out", &q, &out, &exact.out, &naive.out, p.element, OUTPUT)
            .and_then(|_| compare_lse(&p.lse_shape(), &values(lse), &exact.lse))
            .unwrap_or_else(|error| panic!("{}: {error}", self.name));
    }

    /// The oracle's tolerance rule for gradients: three times the naive implementation's error. `None` is not
    /// compared.
    pub fn check_gradients(&self, grads: Gradients, with_lse: bool) {
        let p = self.problem();
        let grad_lse = with_lse.then_some(&self.grad_lse[..]);
        let exact = self.inputs.backward(&self.grad_out, grad_lse);
        let naive = self.inputs.naive_backward(&self.grad_out, grad_lse);
        let check =
            |name, shape: &[usize], actual: Option<Vec<f64>>, exact, naive: &[f64], element| {
                if let Some(actual) = actual {
                    compare(name, shape, &actual, exact, naive, element, GRADIENT)
                        .unwrap_or_else(|error| panic!("{}: {error}", self.name));
                }
            };
        let kv = p.kv_shape();
        check("dq", &p.q_shape(), grads.q, &exact.q, &naive.q, p.element);
        check("dk", &kv, grads.k, &exact.k, &naive.k, p.element);
        check("dv", &kv, grads.v, &exact.v, &naive.v, p.element);
        if let (Some(exact), Some(naive)) = (&exact.scores, &naive.scores) {
            let (shape, element) = (p.scores_shape(), ElementType::F32);
            check("dscores", &shape, grads.scores, exact, naive, element);
        }
    }
}

/// Gradients read back; `None` where there is none.
#[derive(Debug, PartialEq)]
pub struct Gradients {
    pub q: Option<Vec<f64>>,
    pub k: Option<Vec<f64>>,
    pub v: Option<Vec<f64>>,
    pub scores: Option<Vec<f64>>,
}

impl Tensors {
    /// Tracks q, k, v and scores according to the four flags.
    pub fn track(self, [q, k, v, scores]: [bool; 4]) -> Self {
        fn set<const D: usize>(tensor: Tensor<D>, track: bool) -> Tensor<D> {
            if track { tensor.require_grad() } else { tensor }
        }
        Self {
            q: set(self.q, q),
            k: set(self.k, k),
            v: set(self.v, v),
            scores: self.scores.map(|t| set(t, scores)),
        }
    }

    pub fn gradients(&self, grads: &burn::tensor::Gradients) -> Gradients {
        Gradients {
            q: self.q.grad(grads).map(values),
            k: self.k.grad(grads).map(values),
            v: self.v.grad(grads).map(values),
            scores: self.scores.as_ref().and_then(|t| t.grad(grads)).map(values),
        }
    }

    /// The functions on `Tensor`, with or without scores.
    pub fn attend(&self, options: AttentionOptions) -> Tensor<4> {
        let Self { q, k, v, scores } = self.clone();
        match scores {
            None => Attention::new(q, k, v).options(options).forward(),
            Some(z) => burn_flash_dma::dynamic_mask_attention(q, k, v, z, options),
        }
    }

    pub fn attend_with_lse(&self, options: AttentionOptions) -> (Tensor<4>, Tensor<3>) {
        let Self { q, k, v, scores } = self.clone();
        let attention = Attention::new(q, k, v).options(options);
        match scores {
            None => attention.forward_with_lse(),
            Some(z) => attention.scores(z).forward_with_lse(),
        }
    }
}

pub fn dtype(element: ElementType) -> DType {
    match element {
        ElementType::F32 => DType::F32,
        ElementType::F16 => DType::F16,
        ElementType::Bf16 => DType::BF16,
    }
}

/// Locks CubeCL's CPU runtime for one test at a time: its workers wait by yielding, so those of several tests starve
/// each other, and a test that observes launches would see those of others.
#[cfg(feature = "cpu")]
pub fn alone() -> MutexGuard<'static, ()> {
    static RUNTIME: Mutex<()> = Mutex::new(());
    // A failed test has reported itself.
    RUNTIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Every device that records a graph, on Flex.
pub fn recording() -> [Device; 2] {
    let device = Device::flex().autodiff();
    [device.clone(), device.gradient_checkpointing()]
}

/// Standard normal numbers of the device's generator.
pub fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

/// [`random`], tracked on a device with autodiff.
pub fn tracked<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    random(shape, device).set_require_grad(device.is_autodiff())
}

/// Numbers from 0 to 1 of the device's generator.
pub fn uniform<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Default, device)
}

/// Random bools, two thirds of which are true.
pub fn coin<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D, Bool> {
    uniform(shape, device).greater_elem(0.35)
}

/// Standard normal f32 from the test's own generator: that of a device is shared by all threads.
pub fn normal<const D: usize>(rng: &mut Rng, shape: [usize; D], device: &Device) -> Tensor<D> {
    let numbers = (0..shape.iter().product()).map(|_| rng.normal() as f32);
    Tensor::from_data(data(numbers, shape), device)
}

/// The elements of a tensor in order.
pub fn data<E: Element, const D: usize>(
    elements: impl IntoIterator<Item = E>,
    shape: [usize; D],
) -> TensorData {
    TensorData::new(elements.into_iter().collect(), shape)
}

/// The values are of the element type already, so the cast is exact.
pub fn tensor<const D: usize>(
    values: &[f64],
    shape: [usize; D],
    element: ElementType,
    device: &Device,
) -> Tensor<D> {
    let values = data(values.iter().map(|&x| x as f32), shape);
    Tensor::<D>::from_data(values, device).cast(dtype(element))
}

pub fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    let data = tensor.cast(DType::F32).into_data();
    data.iter::<f64>().collect()
}

pub fn ints<const D: usize>(tensor: Tensor<D, Int>) -> Vec<i64> {
    tensor.into_data().iter().collect()
}

/// Gradient of a tracked tensor.
pub fn grad<const D: usize>(tensor: &Tensor<D>, grads: &burn::tensor::Gradients) -> Vec<f64> {
    values(tensor.grad(grads).expect("the tensor is tracked"))
}

/// The greatest magnitude.
pub fn size(numbers: &[f64]) -> f64 {
    numbers.iter().fold(0.0, |most, x| most.max(x.abs()))
}

/// Checks that no element is further than `bound` from the expected one.
#[track_caller]
pub fn within(actual: &[f64], expected: &[f64], bound: f64, what: impl Display) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    for (at, (a, e)) in actual.iter().zip(expected).enumerate() {
        let near = (a - e).abs() <= bound;
        assert!(near, "{what}, element {at}: {a} is not {e} within {bound}");
    }
}

/// Checks that no element is further from the expected one than `tolerance` of it and one.
#[track_caller]
pub fn near(actual: &[f64], expected: &[f64], tolerance: f64, what: impl Display) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    for (at, (a, e)) in actual.iter().zip(expected).enumerate() {
        let near = (a - e).abs() <= tolerance * (1.0 + e.abs());
        assert!(near, "{what}, element {at}: {a} is not {e}");
    }
}

/// [`within`] `tolerance` of the greatest expected element.
#[track_caller]
pub fn close(actual: &[f64], expected: &[f64], tolerance: f64) {
    within(actual, expected, tolerance * size(expected), "of all");
}

/// Checks that a call is refused by an error of this kind.
#[track_caller]
pub fn refused<T>(result: Result<T, AttentionError>, kind: &str) {
    let error = result.map(drop).expect_err("it is refused");
    assert_eq!(error.kind(), kind, "{error}");
}

/// Checks that a call is refused with this text.
#[track_caller]
pub fn refused_as<T>(result: Result<T, AttentionError>, text: &str) {
    let error = result.map(drop).expect_err("it is refused");
    assert_eq!(error.to_string(), text);
}

/// Bits of the numbers, by which a NaN equals a NaN.
pub fn bits<const D: usize>(tensor: Tensor<D>) -> Vec<u64> {
    let canonical = |number: f64| if number.is_nan() { f64::NAN } else { number };
    let numbers = values(tensor).into_iter();
    numbers.map(|number| canonical(number).to_bits()).collect()
}

/// A loss whose gradient for a tensor is the given one. (In f32: the sum itself does not matter.)
pub fn loss<const D: usize>(tensor: Tensor<D>, grad: Tensor<D>) -> Tensor<1> {
    (tensor.cast(DType::F32) * grad.cast(DType::F32)).sum()
}

/// Problems for every engine: grouped heads, lengths off every tile, both alignments.
pub fn cases(elements: &[ElementType]) -> Vec<Case> {
    use Scores::*;
    let causal = AttentionOptions::new();
    let full = causal.with_causal(false);
    let top = |window| causal.with_keep_window(window);
    let dropout = |options: AttentionOptions, rate| {
        options.with_dropout(Dropout::new(rate, 0x1234_5678_9abc).expect("a rate"))
    };
    let alibi = |options: AttentionOptions, heads| options.with_alibi(AlibiSlopes::standard(heads));
    let capped = top(7).with_softcap(2.0).with_scale(1.5);
    let soft = causal.with_softcap(2.0);
    let table: [(Sizes, Option<Scores>, AttentionOptions); 18] = [
        ([1, 1, 1, 1, 1, 8], Some(Normal), top(1)),
        ([2, 4, 2, 17, 17, 16], Some(Normal), top(5)),
        ([1, 4, 1, 33, 65, 32], Some(Ties), top(9)),
        ([1, 2, 2, 40, 23, 8], Some(Padded), top(4)),
        ([1, 2, 1, 19, 70, 24], Some(Nan), full.with_keep_window(16)),
        ([1, 2, 2, 9, 9, 8], Some(AllPadded), top(3)),
        ([1, 2, 1, 65, 65, 16], Some(Increasing), top(1)),
        ([2, 2, 1, 31, 64, 64], Some(Recency), causal),
        ([1, 3, 3, 30, 30, 16], Some(Normal), capped),
        ([1, 4, 2, 25, 25, 40], None, causal),
        ([1, 2, 1, 12, 37, 8], None, full.with_softcap(1.0)),
        ([1, 2, 2, 50, 21, 8], None, causal),
        ([2, 4, 2, 33, 65, 16], Some(Normal), dropout(top(9), 0.3)),
        ([1, 4, 1, 30, 30, 8], Some(Nan), dropout(soft, 0.1)),
        ([1, 2, 1, 37, 12, 8], None, dropout(full, 0.75)),
        ([2, 4, 2, 33, 65, 16], Some(Normal), alibi(top(9), 4)),
        ([1, 3, 1, 40, 23, 8], None, alibi(soft, 3)),
        ([2, 2, 1, 37, 12, 8], None, alibi(full, 2)),
    ];
    let mut cases = Vec::new();
    for &element in elements {
        for (seed, &(sizes, scores, options)) in table.iter().enumerate() {
            cases.push(Case::new(sizes, scores, element, options, seed as u64 + 1));
        }
    }
    cases
}

pub const ELEMENTS: [ElementType; 3] = [ElementType::F32, ElementType::F16, ElementType::Bf16];
