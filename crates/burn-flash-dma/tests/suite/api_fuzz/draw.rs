//! Random choices of a case: sizes, element types, extreme options, tensors that often fit and sometimes do not.

use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_flash_dma::engines::{Engine, EngineChoice};
use burn_flash_dma::{AlibiSlopes, AttentionMask, AttentionOptions, Documents, Dropout};
use flash_dma_reference::Rng;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::{Debug, Display};
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};

thread_local! {
    /// True while this thread makes a call whose panic is a finding.
    static CALLING: Cell<bool> = const { Cell::new(false) };
}

/// Silences the panics of calls, which are collected along with the case that led to them.
pub fn print_no_findings() {
    let print = take_hook();
    set_hook(Box::new(move |panic| {
        if !CALLING.get() {
            print(panic);
        }
    }));
}

/// Random choices of one case, and the outcome of its calls.
pub struct Draw {
    rng: Rng,
    pub device: Device,
    /// Element type of most tensors.
    pub dtype: DType,
    /// Description of the case: everything drawn so far.
    log: Vec<String>,
    /// Calls and refusals of each function.
    pub counts: BTreeMap<String, [usize; 2]>,
    pub findings: Vec<String>,
}

/// Sizes of an attention.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub batch: usize,
    pub q_heads: usize,
    pub kv_heads: usize,
    pub q_len: usize,
    pub k_len: usize,
    pub dim: usize,
}

impl Sizes {
    pub fn q(&self) -> [usize; 4] {
        [self.batch, self.q_heads, self.q_len, self.dim]
    }

    pub fn kv(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.k_len, self.dim]
    }

    pub fn scores(&self) -> [usize; 3] {
        [self.batch, self.kv_heads, self.k_len]
    }

    pub fn lse(&self) -> [usize; 3] {
        [self.batch, self.q_heads, self.q_len]
    }
}

impl Draw {
    pub fn new(case: u64) -> Self {
        let mut rng = Rng::new(case);
        let autodiff = rng.below(2) == 0;
        let flex = Device::flex();
        let types = [DType::F16, DType::BF16, DType::F64];
        let dtype = *types.get(rng.below(8)).unwrap_or(&DType::F32);
        Self {
            rng,
            device: if autodiff { flex.autodiff() } else { flex },
            dtype,
            log: vec![format!("case {case}, autodiff {autodiff}")],
            counts: BTreeMap::new(),
            findings: Vec::new(),
        }
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.rng.below(n)
    }

    /// True once in `n` draws.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())].clone()
    }

    /// [`pick`](Self::pick), with an entry in the description.
    pub fn choose<T: Clone + Debug>(&mut self, name: &str, of: &[T]) -> T {
        let value = self.pick(of);
        self.log.push(format!("{name} {value:?}"));
        value
    }

    /// A value, or `None` in half of the cases.
    pub fn maybe<T>(&mut self, value: impl FnOnce(&mut Self) -> T) -> Option<T> {
        (!self.one_in(2)).then(|| value(self))
    }

    /// A value once in `n` draws, otherwise `None`.
    pub fn rarely<T>(&mut self, n: usize, value: impl FnOnce(&mut Self) -> T) -> Option<T> {
        self.one_in(n).then(|| value(self))
    }

    pub fn note(&mut self, value: impl Debug) {
        self.log.push(format!("{value:?}"));
    }

    /// A number of tokens or keys.
    pub fn len(&mut self) -> usize {
        self.pick(&[0, 0, 1, 1, 2, 3, 4, 5, 7, 17, 33])
    }

    pub fn batch(&mut self) -> usize {
        self.pick(&[0, 1, 1, 1, 2, 2, 3])
    }

    /// An extreme size, or a small one.
    pub fn end(&mut self, name: &str) -> usize {
        self.choose(name, &[0, 1, 2, 3, 8, usize::MAX - 1, usize::MAX])
    }

    /// A small number of keys or tokens, or once in ten an extreme one. None is so large that a device would try to
    /// allocate it, which ends the process where memory is short.
    pub fn count(&mut self, name: &str) -> usize {
        match self.below(20) {
            0 => self.end(name),
            1 => self.choose(name, &[i32::MAX as usize + 1]),
            _ => self.choose(name, &[1, 1, 2, 3, 4, 8]),
        }
    }

    /// A usual value of an option, or once in ten an extreme one.
    pub fn number(&mut self, name: &str, usual: &[f64]) -> f64 {
        let (nan, most, all) = (f64::NAN, f64::MAX, f64::INFINITY);
        let ends = [0.0, -0.0, -1.0, 1e-60, 1e60, nan, all, -all, most];
        match self.one_in(10) {
            true => self.choose(name, &ends),
            false => self.choose(name, usual),
        }
    }

    pub fn sizes(&mut self) -> Sizes {
        let kv_heads = self.pick(&[1, 1, 2, 2, 3]);
        let mut sizes = Sizes {
            batch: self.batch(),
            q_heads: kv_heads * self.pick(&[1, 2, 3]),
            kv_heads,
            q_len: self.len(),
            k_len: self.len(),
            dim: self.pick(&[8, 8, 16, 24]),
        };
        if !self.one_in(3) {
            sizes.q_len = sizes.k_len;
        }
        if self.one_in(12) {
            match self.below(3) {
                0 => sizes.q_heads = self.pick(&[0, 1, 5]),
                1 => sizes.kv_heads = self.pick(&[0, 4]),
                _ => sizes.dim = self.pick(&[0, 1, 12, 264]),
            }
        }
        self.note(sizes);
        sizes
    }

    /// A shape with another size on one axis, once in thirty.
    fn shape<const D: usize>(&mut self, mut shape: [usize; D]) -> [usize; D] {
        if D > 0 && self.one_in(30) {
            let axis = self.below(D);
            shape[axis] = self.pick(&[0, 1, 2, 3, 9]);
        }
        shape
    }

    /// A tensor, mostly in the type of the case.
    pub fn tensor<const D: usize>(&mut self, name: &str, shape: [usize; D]) -> Tensor<D> {
        let dtype = self.dtype;
        self.tensor_in(name, shape, dtype)
    }

    pub fn tensor_in<const D: usize>(
        &mut self,
        name: &str,
        shape: [usize; D],
        dtype: DType,
    ) -> Tensor<D> {
        let shape = self.shape(shape);
        let dtype = match self.one_in(30) {
            true => self.pick(&[DType::F32, DType::F16, DType::BF16, DType::F64]),
            false => dtype,
        };
        let special = self.one_in(8);
        let number = |rng: &mut Rng| match (special, rng.below(6)) {
            (true, 0) => f32::NEG_INFINITY,
            (true, 1) => f32::NAN,
            (true, 2) => 1e30,
            _ => rng.normal() as f32,
        };
        let values = (0..shape.iter().product()).map(|_| number(&mut self.rng));
        let values = values.collect::<Vec<_>>();
        let device = match self.one_in(10) {
            true => Device::flex(),
            false => self.device.clone(),
        };
        // Contiguous, or a view with its first two axes swapped.
        let tensor = match D > 1 && self.one_in(4) {
            false => Tensor::<D>::from_data(TensorData::new(values, shape), &device),
            true => {
                let mut stored = shape;
                stored.swap(0, 1);
                Tensor::<D>::from_data(TensorData::new(values, stored), &device).swap_dims(0, 1)
            }
        };
        let tensor = tensor.cast(dtype);
        let tracked = device.is_autodiff() && !self.one_in(3);
        let which = if tracked { ", tracked" } else { "" };
        let name = format!("{name} {shape:?} {}{which}", dtype.name());
        self.log.push(name);
        tensor.set_require_grad(tracked)
    }

    /// Numbers from 0 to less than `below`.
    pub fn ints<const D: usize>(
        &mut self,
        name: &str,
        shape: [usize; D],
        below: usize,
    ) -> Tensor<D, Int> {
        let shape = self.shape(shape);
        let values: Vec<i64> = (0..shape.iter().product())
            .map(|_| self.below(below.max(1)) as i64)
            .collect();
        self.log.push(format!("{name} {shape:?} {values:?}"));
        let dtype = self.pick(&[DType::I64, DType::I32]);
        Tensor::<D, Int>::from_data(TensorData::new(values, shape), &self.device).cast(dtype)
    }

    pub fn bools<const D: usize>(&mut self, name: &str, shape: [usize; D]) -> Tensor<D, Bool> {
        let shape = self.shape(shape);
        self.log.push(format!("{name} {shape:?}"));
        let values = (0..shape.iter().product()).map(|_| self.rng.below(3) > 0);
        let values: Vec<bool> = values.collect();
        Tensor::from_data(TensorData::new(values, shape), &self.device)
    }

    /// A shape that broadcasts to another one.
    pub fn part_of(&mut self, shape: [usize; 4]) -> [usize; 4] {
        shape.map(|size| self.pick(&[1, size, size]))
    }

    /// A shape that broadcasts to that of the logits.
    pub fn broadcast(&mut self, sizes: &Sizes) -> [usize; 4] {
        let heads = self.pick(&[sizes.q_heads, sizes.kv_heads]);
        self.part_of([sizes.batch, heads, sizes.q_len, sizes.k_len])
    }

    pub fn mask(&mut self, shape: [usize; 4]) -> AttentionMask {
        let bools = self.bools("mask", shape);
        match self.one_in(2) {
            true => AttentionMask::visible(bools),
            false => AttentionMask::hidden(bools),
        }
    }

    /// Documents of each sequence, which mostly add up.
    pub fn documents(&mut self, batch: usize, len: usize) -> Documents {
        let batch = if self.one_in(30) { batch + 1 } else { batch };
        let documents = match self.one_in(2) {
            true => {
                let lengths: Vec<usize> = (0..batch).map(|_| self.below(len + 1)).collect();
                Documents::try_from_padded(lengths, len).expect("they are at most as long")
            }
            false => {
                let cut = |draw: &mut Self| {
                    let at = draw.below(len + 1);
                    let rest = len - at + usize::from(draw.one_in(30));
                    match draw.one_in(4) {
                        true => vec![len],
                        false => vec![at, 0, rest],
                    }
                };
                Documents::from_lengths((0..batch).map(|_| cut(self)).collect::<Vec<_>>())
            }
        };
        self.note(&documents);
        documents
    }

    /// Options, with a window if there are scores (`window`).
    pub fn options(&mut self, q_heads: usize, window: bool) -> AttentionOptions {
        let mut options = AttentionOptions::new();
        if window != self.one_in(15) {
            options.keep_window = self.maybe(|draw| draw.count("window"));
        }
        options.causal = !self.one_in(3);
        options.scale = self.rarely(4, |draw| draw.number("scale", &[0.5, 1.0]) as f32);
        options.softcap = self.rarely(4, |draw| draw.number("softcap", &[5.0, 30.0]) as f32);
        options.alibi = self.rarely(6, |draw| {
            AlibiSlopes::standard(if draw.one_in(10) { 5 } else { q_heads })
        });
        if self.one_in(6) {
            let rate = self.number("rate", &[0.1, 0.5]) as f32;
            options.dropout = Dropout::new(rate, 7).ok();
        }
        options.deterministic = self.one_in(4);
        if self.one_in(20) {
            let engine = self.pick(&[Engine::Portable, Engine::Mma, Engine::Wgmma]);
            options.engine = EngineChoice::Only(engine);
        }
        self.note(options);
        options
    }

    /// Makes a call that may refuse and must not panic.
    pub fn call<T, E: Display>(
        &mut self,
        name: &str,
        call: impl FnOnce() -> Result<T, E>,
    ) -> Option<T> {
        self.log.push(format!("{name}?"));
        match self.run(name, call)? {
            Ok(value) => Some(value),
            Err(error) => {
                self.counts.entry(name.into()).or_default()[1] += 1;
                let (text, all) = (error.to_string(), usize::MAX.to_string());
                // It stands for something else, unless the case drew it.
                if text.contains(&all) && !self.log.iter().any(|drawn| drawn.contains(&all)) {
                    self.found(name, &text);
                }
                self.log.push(format!("refused: {text}"));
                None
            }
        }
    }

    /// Makes a call that must not panic.
    pub fn run<T>(&mut self, name: &str, call: impl FnOnce() -> T) -> Option<T> {
        self.counts.entry(name.into()).or_default()[0] += 1;
        CALLING.set(true);
        let result = catch_unwind(AssertUnwindSafe(call));
        CALLING.set(false);
        match result {
            Ok(value) => Some(value),
            Err(panic) => {
                let text = (panic.downcast_ref::<String>().cloned())
                    .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).into()))
                    .unwrap_or_default();
                self.found(name, &text);
                None
            }
        }
    }

    /// Records a fault of a call, with the case that led to it.
    fn found(&mut self, name: &str, text: &str) {
        let log = self.log.join("; ");
        self.findings.push(format!("{name}: {text}\n    {log}"));
    }

    /// Reads the results of a call, and computes their gradients if they have any: of the sum of all, as a graph
    /// serves one backward pass.
    pub fn finish(&mut self, results: impl Results) {
        let sums = self.run("reading a result", || results.sums());
        let tracked = sums.into_iter().flatten().filter(Tensor::is_tracked);
        if let Some(sum) = tracked.reduce(|a, b| a + b) {
            self.log.push("gradients".into());
            self.run("a backward pass", || drop(sum.backward()));
        }
    }
}

/// Float tensors that a call returns.
pub trait Results {
    /// Sum of each tensor in f32, which reads all elements.
    fn sums(self) -> Vec<Tensor<1>>;
}

impl<const D: usize> Results for Tensor<D> {
    fn sums(self) -> Vec<Tensor<1>> {
        drop(self.to_data());
        vec![self.sum().cast(DType::F32)]
    }
}

impl<A: Results, B: Results> Results for (A, B) {
    fn sums(self) -> Vec<Tensor<1>> {
        [self.0.sums(), self.1.sums()].concat()
    }
}

impl<const N: usize, const D: usize> Results for [Tensor<D>; N] {
    fn sums(self) -> Vec<Tensor<1>> {
        self.into_iter().flat_map(Results::sums).collect()
    }
}

impl<R: Results> Results for Option<R> {
    fn sums(self) -> Vec<Tensor<1>> {
        self.map(Results::sums).unwrap_or_default()
    }
}
