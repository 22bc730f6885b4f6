//! The numbers of a problem, from its seed.
//!
//! Rows are pieces of one table of normal numbers: a problem with thousands of keys would take longer to draw number by
//! number than to compute.

use super::selection::{Selected, most_live};
use super::spec::{Spec, What};
use crate::case::expected;
use crate::expected::{Expected, expected_of_runners_up};
use crate::masked::{MaskedCall, MaskedCase};
use crate::{Call, Layout, Raw, problem};
use flash_dma_problem::{AttentionOptions, ElementType};
use flash_dma_reference::generate::Scores;
use flash_dma_reference::masked::{Broadcast, MaskedInputs};
use flash_dma_reference::round::round;
use flash_dma_reference::{Inputs, Rng};
use std::sync::OnceLock;

/// Seeds at which the naive implementation's error is measured, beside the problem's own, before a number counts as
/// wrong. The tolerance is a multiple of that implementation's greatest error in a tensor. For a small tensor one seed
/// yields a handful of roundings, and among thousands of problems some have been lucky in all of them. The other seeds
/// draw v and the gradients alone: how much a rounding of `out` moves a gradient depends on the probabilities, which q,
/// k and what is added to their products make. (With all inputs drawn anew 4 of 100 000 problems in bf16 were out of
/// bounds, each by one element of a row that one key dominates, as it did at no other seed.)
pub const YARDSTICKS: u64 = 32;

/// Length of the table.
const TABLE: usize = 1 << 18;

/// Normal numbers, each of them an f32.
fn table() -> &'static [f64] {
    static NUMBERS: OnceLock<Vec<f64>> = OnceLock::new();
    NUMBERS.get_or_init(|| {
        let mut rng = Rng::new(0x0074_6162_6c65);
        (0..TABLE).map(|_| f64::from(rng.normal() as f32)).collect()
    })
}

/// Rows of normal numbers of a type.
fn rows(count: usize, width: usize, spread: f64, element: ElementType, rng: &mut Rng) -> Vec<f64> {
    let mut values = Vec::with_capacity(count * width);
    for _ in 0..count {
        let from = rng.below(TABLE - width);
        let row = &table()[from..from + width];
        values.extend(row.iter().map(|x| round(spread * x, element)));
    }
    values
}

/// The seeds of the yardsticks.
fn other_seeds(spec: &Spec) -> impl Iterator<Item = u64> {
    (1..=YARDSTICKS).map(|n| spec.seed.wrapping_add(n << 32))
}

/// q, k, v and the gradients.
struct Rows {
    tensors: [Vec<f64>; 4],
    grad_lse: Option<Vec<f64>>,
}

impl Rows {
    /// The rows of a seed; the values repeat as their places require.
    fn new(spec: &Spec, rng: &mut Rng) -> Self {
        let (dim, e) = (spec.head_dim, spec.element);
        let q = [spec.batch, spec.q_heads(), spec.q_len, dim];
        let kv = [spec.batch, spec.kv_heads, spec.k_len, dim];
        let mut draw = |place: usize, shape: [usize; 4], spread| {
            let count = shape[..3].iter().product();
            let mut values = rows(count, dim, spread, e, rng);
            spec.places[place].repeat(&mut values, &shape);
            values
        };
        let tensors = [
            draw(Spec::Q, q, spec.deviation),
            draw(Spec::K, kv, spec.deviation),
            draw(Spec::V, kv, spec.deviation),
            draw(Spec::GRAD_OUT, q, 1.0),
        ];
        let count = q[..3].iter().product();
        let grad_lse = rows(count, 1, 1.0, ElementType::F32, rng);
        Self {
            tensors,
            grad_lse: spec.grad_lse.then_some(grad_lse),
        }
    }
}

/// A problem with scores, or without scores and mask.
pub(super) struct Drawn {
    pub(super) inputs: Inputs,
    /// What orders the keys, if it is not the scores of the inputs.
    rank: Option<Vec<f64>>,
    /// The intervals, unless they are those of a window alone.
    pub(super) selected: Option<Selected>,
    grad_out: Vec<f64>,
    grad_lse: Option<Vec<f64>>,
}

impl Drawn {
    /// The problem.
    pub(super) fn new(spec: &Spec) -> Self {
        Self::at(spec, spec.seed, spec.scores())
    }

    fn at(spec: &Spec, seed: u64, scores: Option<Scores>) -> Self {
        let q = [spec.batch, spec.q_heads(), spec.q_len, spec.head_dim];
        let kv = [spec.batch, spec.kv_heads, spec.k_len, spec.head_dim];
        let mut rng = Rng::new(seed);
        let Rows { tensors, grad_lse } = Rows::new(spec, &mut rng);
        let mut draw = |kind: Scores| {
            let heads = 0..spec.batch * spec.kv_heads;
            let mut scores: Vec<f64> = heads
                .flat_map(|_| kind.head(spec.k_len, &mut rng))
                .collect();
            spec.places[Spec::SCORES].repeat(&mut scores, &kv[..3]);
            scores
        };
        let mut scores = scores.map(&mut draw);
        let selecting = spec.selecting();
        let apart = selecting.is_some_and(|selecting| selecting.apart);
        let rank = scores.clone().filter(|_| apart);
        if rank.is_some() {
            scores = Some(draw(Scores::Normal));
        }
        let mut options = spec.options();
        let selected = selecting.zip(rank.as_ref().or(scores.as_ref()));
        let selected = selected.map(|(_, rank)| spec.selected(rank));
        if let Some(selected) = &selected {
            options.keep_window = Some(most_live(spec, &selected.intervals).max(1));
        }
        let problem = problem(q, kv, scores.is_some(), spec.element, &options);
        let [q, k, v, grad_out] = tensors;
        let inputs = Inputs {
            problem,
            q,
            k,
            v,
            scores,
        };
        Self {
            inputs,
            rank,
            selected,
            grad_out,
            grad_lse,
        }
    }

    /// Problems of the same probabilities; without NaN, which leaves few elements to measure by.
    pub(super) fn others(spec: &Spec) -> impl Iterator<Item = Self> {
        let own = Self::new(spec);
        let (scores, clean) = match spec.scores() {
            Some(Scores::Nan) => (Some(Scores::Normal), false),
            scores => (scores, true),
        };
        other_seeds(spec).map(move |seed| {
            let mut other = Self::at(spec, seed, scores);
            other.inputs.q.clone_from(&own.inputs.q);
            other.inputs.k.clone_from(&own.inputs.k);
            if clean {
                other.inputs.scores.clone_from(&own.inputs.scores);
                other.inputs.problem = own.inputs.problem;
                other.selected.clone_from(&own.selected);
            }
            other
        })
    }

    /// The results by definition. The gradient of the rank is `apart`, or in that of the scores.
    pub(super) fn expected(&self, apart: bool) -> Expected {
        let grad_lse = self.grad_lse.as_deref();
        let Some(selected) = &self.selected else {
            return expected(&self.inputs, &self.grad_out, grad_lse);
        };
        let p = &self.inputs.problem;
        let keys = |shown: &dyn Fn(usize, i64) -> bool| {
            let heads = (0..p.batch * p.kv_heads).map(|head| head * p.k_len);
            let rows = heads.flat_map(|key| (0..p.q_len).map(move |i| (key, p.position(i))));
            let shown = rows.flat_map(|(key, position)| {
                (key..key + p.k_len).map(move |key| shown(key, position))
            });
            Broadcast {
                shape: [p.batch, p.kv_heads, p.q_len, p.k_len],
                values: shown.collect(),
            }
        };
        let intervals = &selected.intervals;
        let visible = keys(&|key, position| intervals[key].contains(position));
        let runners_up = selected.far.as_ref().map(|far| {
            keys(&|key, position| {
                (i64::from(intervals[key].end)..i64::from(far[key])).contains(&position)
            })
        });
        let inputs = self.masked(visible);
        let grads = (&self.grad_out[..], grad_lse);
        expected_of_runners_up(&inputs, runners_up.as_ref(), grads, apart)
    }

    /// The same under a mask.
    fn masked(&self, visible: Broadcast<bool>) -> MaskedInputs {
        let (p, inputs) = (&self.inputs.problem, &self.inputs);
        let options = AttentionOptions {
            keep_window: None,
            causal: p.causal,
            scale: Some(p.scale),
            softcap: p.softcap,
            alibi: p.alibi,
            deterministic: p.deterministic,
            dropout: p.dropout,
            ..AttentionOptions::new()
        };
        let scores = inputs.scores.clone().expect("a selection has scores");
        MaskedInputs {
            problem: problem(p.q_shape(), p.kv_shape(), false, p.element, &options),
            q: inputs.q.clone(),
            k: inputs.k.clone(),
            v: inputs.v.clone(),
            visible: Some(visible),
            bias: Some(Broadcast {
                shape: [p.batch, p.kv_heads, 1, p.k_len],
                values: scores,
            }),
        }
    }

    /// What orders the keys, as an engine gets it.
    pub(super) fn rank(&self, spec: &Spec) -> Option<Raw> {
        let rank = self.rank.as_ref().or(self.inputs.scores.as_ref())?;
        let shape = self.inputs.problem.scores_shape();
        let mut raw = Raw::new(rank, &shape, ElementType::F32, Layout::Contiguous);
        spec.places[Spec::SCORES].place(&mut raw);
        Some(raw)
    }

    /// What orders the keys.
    pub(super) fn ranks(&self) -> Option<&[f64]> {
        self.rank.as_deref().or(self.inputs.scores.as_deref())
    }

    /// The call, without the intervals.
    pub(super) fn call(&self, spec: &Spec) -> Call {
        let grads = (&self.grad_out[..], self.grad_lse.as_deref());
        let mut call = Call::new(&self.inputs, Layout::Contiguous, grads);
        for (place, raw) in [
            (Spec::Q, &mut call.q),
            (Spec::K, &mut call.k),
            (Spec::V, &mut call.v),
            (Spec::GRAD_OUT, &mut call.grad_out),
        ] {
            spec.places[place].place(raw);
        }
        if let Some(raw) = &mut call.scores {
            spec.places[Spec::SCORES].place(raw);
        }
        call.layout = spec.places[Spec::GRAD_OUT].layout();
        if let Some(selected) = &self.selected {
            call.intervals = Some(selected.intervals.clone());
            call.far.clone_from(&selected.far);
            call.given = true;
        }
        call
    }
}

/// A problem under a mask or bias.
pub(super) struct DrawnMasked {
    pub(super) inputs: MaskedInputs,
    case: MaskedCase,
    grad_out: Vec<f64>,
    grad_lse: Option<Vec<f64>>,
}

impl DrawnMasked {
    /// The problem.
    pub(super) fn new(spec: &Spec) -> Self {
        Self::at(spec, spec.seed, None)
    }

    /// The problem, with the given mask if there is one.
    fn at(spec: &Spec, seed: u64, known: Option<&Broadcast<bool>>) -> Self {
        let mut rng = Rng::new(seed);
        let Rows { tensors, grad_lse } = Rows::new(spec, &mut rng);
        let case = spec.masked_case();
        let visible = known.cloned().or_else(|| {
            let mut mask = case.visible(&mut rng)?;
            spec.places[Spec::MASK].repeat(&mut mask.values, &mask.shape);
            Some(mask)
        });
        let bias = case.bias.map(|shape| {
            let count = shape[..3].iter().product();
            let mut values = match shape[3] {
                n if n < TABLE => rows(count, n, 1.0, ElementType::F32, &mut rng),
                n => panic!("a bias of {n} keys"),
            };
            if let What::Masked {
                bias: Some((_, true)),
                ..
            } = spec.what
            {
                let hidden = values.iter_mut().filter(|_| rng.below(10) == 0);
                hidden.for_each(|x| *x = f64::NEG_INFINITY);
            }
            spec.places[Spec::SCORES].repeat(&mut values, &shape);
            Broadcast { shape, values }
        });
        let [q, k, v, grad_out] = tensors;
        let inputs = MaskedInputs {
            problem: case.problem(),
            q,
            k,
            v,
            visible,
            bias,
        };
        Self {
            inputs,
            case,
            grad_out,
            grad_lse,
        }
    }

    /// Problems of the same probabilities.
    pub(super) fn others(&self, spec: &Spec) -> Vec<Expected> {
        let of = |seed| {
            let mut other = Self::at(spec, seed, self.inputs.visible.as_ref());
            other.inputs.q.clone_from(&self.inputs.q);
            other.inputs.k.clone_from(&self.inputs.k);
            other.inputs.bias.clone_from(&self.inputs.bias);
            other.expected()
        };
        other_seeds(spec).map(of).collect()
    }

    pub(super) fn expected(&self) -> Expected {
        let grad_lse = self.grad_lse.as_deref();
        self.case.expected(&self.inputs, &self.grad_out, grad_lse)
    }

    pub(super) fn call(&self, spec: &Spec) -> MaskedCall {
        let grads = (&self.grad_out[..], self.grad_lse.as_deref());
        let mut call = MaskedCall::new(&self.inputs, Layout::Contiguous, self.case.hidden, grads);
        for (place, raw) in [
            (Spec::Q, Some(&mut call.q)),
            (Spec::K, Some(&mut call.k)),
            (Spec::V, Some(&mut call.v)),
            (Spec::GRAD_OUT, Some(&mut call.grad_out)),
            (Spec::SCORES, call.bias.as_mut()),
            (Spec::MASK, call.mask.as_mut()),
        ] {
            if let Some(raw) = raw {
                spec.places[place].place(raw);
            }
        }
        call
    }
}
