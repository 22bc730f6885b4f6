//! Implementations of dynamic-mask attention, as seen from the host.

use crate::{Call, Grads, Layout, Raw};
use flash_dma_problem::{AttentionError, ElementType, Interval, KeptKeys, SelectionRule};
use flash_dma_reference::Inputs;
use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::io::Write;
use std::sync::Mutex;

/// How large the cases of an engine may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Size {
    /// An interpreter-like device: a few thousand pairs per call.
    Small,
    /// A CPU at full speed.
    Medium,
    /// A GPU.
    Large,
}

/// The results of the forward pass, contiguous.
#[derive(Clone, Debug, PartialEq)]
pub struct Outputs {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub out: Vec<f64>,
    /// `[batch, q_heads, q_len]`.
    pub lse: Vec<f64>,
}

/// The results of the backward pass, contiguous.
#[derive(Clone, Debug, Default)]
pub struct Gradients {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: Vec<f64>,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub k: Vec<f64>,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub v: Vec<f64>,
    /// `[batch, kv_heads, k_len]`; given exactly if the problem has scores that learn.
    pub scores: Option<Vec<f64>>,
    /// `[batch, kv_heads, k_len]`: the gradient of the rank; given exactly if the call has runners-up and the engine
    /// returns it separately (under autodiff it is part of that of the scores).
    pub rank: Option<Vec<f64>>,
    /// `[q_heads]`: the gradient of the sink logits; given exactly if the call has them.
    pub sink: Option<Vec<f64>>,
    /// In the bias's own shape; given exactly if the call has a bias and requests its gradient.
    pub bias: Option<Vec<f64>>,
}

impl Gradients {
    /// The gradients that are given: those of q, k and v, then in the order of the fields.
    pub fn given(&self) -> Vec<&[f64]> {
        let rest = [&self.scores, &self.rank, &self.sink, &self.bias];
        let rows = [&self.q, &self.k, &self.v].into_iter();
        rows.chain(rest.into_iter().flatten())
            .map(|x| &x[..])
            .collect()
    }
}

/// A call that was refused.
#[derive(Clone, Debug)]
pub struct Refused {
    /// The reason.
    pub error: AttentionError,
    /// True if a result's buffer was written nevertheless.
    pub written: bool,
}

impl Refused {
    pub(crate) fn new(error: AttentionError, untouched: bool) -> Self {
        Self {
            error,
            written: !untouched,
        }
    }
}

/// A refusal by an engine that allocates its results, so that nothing was written.
impl From<AttentionError> for Refused {
    fn from(error: AttentionError) -> Self {
        Self::new(error, true)
    }
}

/// The results of both passes, or the engine's refusal.
pub type Passes = Result<(Outputs, Gradients), Refused>;

/// A rule that selects keys by scores, whose ranks compete.
#[derive(Clone, Debug)]
pub struct Competing {
    /// The rule of each key/value head.
    pub rules: Vec<SelectionRule>,
    /// The lengths of the documents of every sequence, if there are some.
    pub documents: Option<Vec<usize>>,
    /// Number of runners-up per query: keys that just miss the window.
    pub runners_up: usize,
    /// True if kept keys learn.
    pub left_out: bool,
}

/// An implementation under test. The error of a call is the engine's refusal.
pub trait Engine: Sized + Send + Sync + 'static {
    /// Its name in the names of the tests.
    const NAME: &'static str;
    /// The size that its cases are limited to.
    const SIZE: Size;
    /// True if it has ranks that compete.
    const COMPETES: bool = false;
    /// True if a softmax may have sink logits, without keys.
    const SINKS: bool = false;

    /// The engine on its device.
    fn new() -> Self;

    /// True if its device supports this type.
    fn supports(&self, element: ElementType) -> bool;

    /// True if its device lacks this type: then a skipped test is reported.
    fn lacks(&self, element: ElementType) -> bool {
        let lacks = !self.supports(element);
        if lacks {
            skip::<Self>(&element.to_string());
        }
        lacks
    }

    /// The cases whose type its device supports: a skipped test is reported for each of the others.
    fn supported<C>(
        &self,
        cases: impl IntoIterator<Item = C>,
        element: impl Fn(&C) -> ElementType,
    ) -> Vec<C> {
        let has = |case: &C| !self.lacks(element(case));
        cases.into_iter().filter(has).collect()
    }

    /// Scores to intervals.
    fn select(&self, scores: &Raw, kept: impl Into<KeptKeys>) -> Result<Vec<Interval>, Refused>;

    /// Scores to the intervals of a rule for each head, inside documents of these lengths, the same for every sequence;
    /// `None` if the engine only has [`select`](Self::select).
    fn compose(
        &self,
        _scores: &Raw,
        _rules: &[SelectionRule],
        _documents: Option<&[usize]>,
    ) -> Option<Result<Vec<Interval>, Refused>> {
        None
    }

    /// The forward pass.
    fn forward(&self, call: &Call) -> Result<Outputs, Refused>;

    /// The forward pass and then the backward pass.
    fn backward(&self, call: &Call) -> Passes;

    /// [`backward`](Self::backward) for the keys selected by a rule and the scores; `None` if ranks do not compete.
    fn compete(&self, _call: &Call, _rule: &Competing) -> Option<Passes> {
        None
    }

    /// The cases that the device runs in reasonable time: as many of the lists as its size allows.
    fn cases<T>(
        small: impl IntoIterator<Item = T>,
        medium: impl IntoIterator<Item = T>,
        large: impl IntoIterator<Item = T>,
    ) -> Vec<T> {
        let mut cases: Vec<T> = small.into_iter().collect();
        if Self::SIZE >= Size::Medium {
            cases.extend(medium);
        }
        if Self::SIZE >= Size::Large {
            cases.extend(large);
        }
        cases
    }

    /// [`cases`](Self::cases), except that a GPU runs only its own list: it compiles some five kernels for every head
    /// dimension, element type, group and option, so a test combines two or three of these there.
    fn cases_or_device<T>(
        small: impl IntoIterator<Item = T>,
        medium: impl IntoIterator<Item = T>,
        device: impl IntoIterator<Item = T>,
    ) -> Vec<T> {
        match Self::SIZE {
            Size::Large => device.into_iter().collect(),
            Size::Small | Size::Medium => Self::cases(small, medium, []),
        }
    }

    /// The call of the oracle's inputs, with the engine's own selection.
    fn call(&self, inputs: &Inputs, layout: Layout, grads: &Grads) -> Call {
        let mut call = Call::new(inputs, layout, grads);
        let select = |z: &Raw| self.select(z, inputs.problem.window).expect("select");
        call.intervals = call.scores.as_ref().map(select);
        call
    }
}

/// The one instance of an engine that all tests share: a device is set up once.
pub fn shared<E: Engine>() -> &'static E {
    static ENGINES: Mutex<Option<HashMap<TypeId, &'static (dyn Any + Send + Sync)>>> =
        Mutex::new(None);
    let mut engines = ENGINES
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    let engine = *engines
        .get_or_insert_default()
        .entry(TypeId::of::<E>())
        .or_insert_with(|| Box::leak(Box::new(E::new())));
    engine.downcast_ref().expect("stored under its own type")
}

/// Reports a skipped test, bypassing the capture of test output.
pub fn skip<E: Engine>(what: &str) {
    // A closed stderr is no reason to fail.
    let _ = writeln!(std::io::stderr(), "skipped: {what} on {}", E::NAME);
}
