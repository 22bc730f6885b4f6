//! The numbers of a problem, from its seed.
//!
//! Rows are pieces of one table of normal numbers: a problem with thousands of keys would take longer to draw number by
//! number than to compute.

use super::large;
use super::selection::{Selected, most_live};
use super::sink::Sink;
use super::spec::{Place, Spec, What};
use crate::case::expected;
use crate::expected::{Expected, Learning, attended, expected_of_rank, masked, pairs, runners_up};
use crate::masked::{MaskedCall, MaskedCase};
use crate::{Call, Grads, Layout, Raw, problem};
use flash_dma_problem::ElementType;
use flash_dma_reference::generate::Scores;
use flash_dma_reference::masked::{Broadcast, MaskedInputs};
use flash_dma_reference::round::round;
use flash_dma_reference::{Inputs, Rng};
use std::sync::OnceLock;

/// The number of seeds, in addition to the problem's own, at which the naive implementation's error is measured before
/// a number counts as wrong. The tolerance is a multiple of that implementation's greatest error in a tensor. For a
/// small tensor one seed yields a handful of roundings, and among thousands of problems some have been lucky in all of
/// them. The other seeds draw only v and the gradients: how much a rounding of `out` moves a gradient depends on the
/// probabilities, which are made by q, k and the numbers added to their products. (With all inputs drawn anew 4 of 100
/// 000 problems in bf16 were out of bounds, each by one element of a row that one key dominates, as it did at no other
/// seed.)
pub const YARDSTICKS: u64 = 32;

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

fn other_seeds(spec: &Spec) -> impl Iterator<Item = u64> + use<> {
    let seed = spec.seed;
    (1..=YARDSTICKS).map(move |n| seed.wrapping_add(n << 32))
}

/// The problem at whose other seeds the naive implementation is measured: with a row of v for each key, where all keys of
/// a head read one.
///
/// With one row for all, `dO . v` is the same for all keys of a query, and so is their mean δ under the probabilities p: all
/// that a gradient p (dO . v - δ) has is the error of δ, which is a sum over the keys of p's roundings, each up to
/// u |dO| . |v| for the rounding u of the element type. They are independent: of n keys of like weight the sum is about
/// u |dO . v| / √n. The naive implementation rounds it away: it takes δ from the stored output, and an average of equal
/// rows that is wrong by a part of u is stored as that row, so its error is 0 by luck, which is that of an engine that
/// does not keep what the rounding of the output loses. With a row for each key its δ is wrong by the rounding of an output of the size
/// |v| / √n, which is u |dO . v| / √n as well. So that measures what rounding probabilities costs, and the factor of the
/// tolerance covers what is left of it.
fn measured(spec: &Spec) -> Spec {
    let mut spec = spec.clone();
    if spec.places[Spec::V] == Place::Tokens {
        spec.places[Spec::V] = Place::Contiguous;
    }
    spec
}

/// q, k, v and the gradients.
struct Rows {
    qkv: [Vec<f64>; 3],
    grads: Grads,
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
        let mut qkv = [
            draw(Spec::Q, q, spec.deviation),
            draw(Spec::K, kv, spec.deviation),
            draw(Spec::V, kv, spec.deviation),
        ];
        let out = draw(Spec::GRAD_OUT, q, 1.0);
        if let (Some(large), [q, k, _]) = (spec.large, &mut qkv) {
            large.fit_rows([q, k], spec);
        }
        let lse = rows(q[..3].iter().product(), 1, 1.0, ElementType::F32, rng);
        let lse = spec.grad_lse.then_some(lse);
        Self {
            qkv,
            grads: Grads { out, lse },
        }
    }
}

/// Gives all sequences of `[batch, kv_heads, k_len, ..]` the first `tokens` of the first one.
fn begin_alike(values: &mut [f64], spec: &Spec, tokens: usize) {
    let heads = spec.batch * spec.kv_heads;
    let Some(head) = values.len().checked_div(heads).filter(|_| spec.k_len > 0) else {
        return;
    };
    let part = tokens * (head / spec.k_len);
    for at in spec.kv_heads..heads {
        let first = at % spec.kv_heads * head;
        values.copy_within(first..first + part, at * head);
    }
}

/// A problem with scores, or without scores and mask.
pub(super) struct Drawn {
    pub(super) inputs: Inputs,
    /// The numbers that rank the keys, if they are not the scores of the inputs.
    rank: Option<Vec<f64>>,
    /// The intervals, unless they are those of a window alone.
    pub(super) selected: Option<Selected>,
    /// True if kept keys learn.
    left_out: bool,
    competes: bool,
    /// True if logits are great numbers.
    is_large: bool,
    grads: Grads,
    sink: Option<Vec<f64>>,
}

impl Drawn {
    pub(super) fn new(spec: &Spec) -> Self {
        Self::at(spec, spec.seed, spec.scores())
    }

    fn at(spec: &Spec, seed: u64, scores: Option<Scores>) -> Self {
        let q = [spec.batch, spec.q_heads(), spec.q_len, spec.head_dim];
        let kv = [spec.batch, spec.kv_heads, spec.k_len, spec.head_dim];
        let mut rng = Rng::new(seed);
        let Rows { qkv, grads } = Rows::new(spec, &mut rng);
        let mut draw = |kind: Scores| {
            let heads =
                (0..spec.batch * spec.kv_heads).flat_map(|_| kind.head(spec.k_len, &mut rng));
            let mut scores: Vec<f64> = heads.collect();
            spec.places[Spec::SCORES].repeat(&mut scores, &kv[..3]);
            scores
        };
        let large = |scores: &mut Vec<f64>| {
            if let Some(large) = spec.large {
                large.add(scores, spec);
            }
        };
        let mut scores = scores.map(&mut draw);
        let selecting = spec.selecting();
        let apart = selecting.is_some_and(|selecting| selecting.apart);
        let rank = scores.clone().filter(|_| apart);
        if rank.is_some() {
            scores = Some(draw(Scores::Normal));
        }
        scores.iter_mut().for_each(large);
        let mut options = spec.options();
        let selected = selecting.zip(rank.as_ref().or(scores.as_ref()));
        let selected = selected.map(|(_, rank)| spec.selected(rank));
        if let Some(selected) = &selected {
            options.keep_window = Some(most_live(spec, &selected.intervals).max(1));
        }
        let mut problem = problem(q, kv, scores.is_some(), spec.element, &options);
        if selecting.is_some_and(|selecting| selecting.has_constant_scores()) {
            problem = problem.with_constant_scores();
        }
        let [q, mut k, mut v] = qkv;
        if let What::Decoded(decoding) = &spec.what {
            let shared = decoding.shared.min(decoding.prefill);
            for tensor in [&mut k, &mut v].into_iter().chain(&mut scores) {
                begin_alike(tensor, spec, shared);
            }
        }
        let inputs = Inputs {
            problem,
            q,
            k,
            v,
            scores,
        };
        let sink = spec.sink.then(|| {
            let logit = |_| f64::from((3.0 * rng.normal()) as f32);
            (0..spec.q_heads()).map(logit).collect()
        });
        Self {
            sink,
            inputs,
            rank,
            selected,
            left_out: selecting.is_some_and(|selecting| selecting.left_out),
            competes: selecting.is_some_and(|selecting| selecting.competes),
            is_large: spec.large.is_some(),
            grads,
        }
    }

    /// Problems of the same probabilities; without NaN, which leaves few elements to measure by.
    pub(super) fn others(spec: &Spec) -> impl Iterator<Item = Self> {
        let own = Self::new(spec);
        let spec = measured(spec);
        let (scores, clean) = match spec.scores() {
            Some(Scores::Nan) => (Some(Scores::Normal), false),
            scores => (scores, true),
        };
        other_seeds(&spec).map(move |seed| {
            let mut other = Self::at(&spec, seed, scores);
            other.inputs.q.clone_from(&own.inputs.q);
            other.inputs.k.clone_from(&own.inputs.k);
            other.sink.clone_from(&own.sink);
            if clean {
                other.inputs.scores.clone_from(&own.inputs.scores);
                other.inputs.problem = own.inputs.problem;
                other.selected.clone_from(&own.selected);
            }
            other
        })
    }

    /// The results by definition. The gradient of the rank is separate if `apart`, otherwise in that of the scores, which
    /// it replaces if they are constant.
    pub(super) fn expected(&self, apart: bool) -> Expected {
        let p = &self.inputs.problem;
        match p.has_scores && !p.scores_learn {
            true => self.expected_of_all(true).without("dscores"),
            false => self.expected_of_all(apart),
        }
    }

    fn expected_of_all(&self, apart: bool) -> Expected {
        let of_keys = self.expected_of_keys(&self.grads, apart);
        match &self.sink {
            None => of_keys,
            Some(logits) => {
                let sink = Sink::new(&of_keys, &self.inputs.problem, logits, &self.grads);
                let of_keys = self.expected_of_keys(sink.gradients(), apart);
                sink.added_to(of_keys)
            }
        }
    }

    /// [`expected`](Self::expected) without a sink, for these gradients.
    fn expected_of_keys(&self, grads: &Grads, apart: bool) -> Expected {
        let Some(selected) = &self.selected else {
            if !self.is_large {
                return expected(&self.inputs, grads);
            }
            let inputs = masked(&self.inputs, None, None);
            return large::expected(&inputs, "", (&Learning::default(), false), grads);
        };
        let (p, intervals) = (&self.inputs.problem, &selected.intervals);
        let far = selected.far.as_ref();
        let kept = selected.from.as_ref().filter(|_| self.left_out);
        let learning = Learning {
            runners_up: far.map(|far| runners_up(p, intervals, far)),
            kept: kept.map(|from| {
                pairs(p, |key, position| {
                    intervals[key].contains(position) && i64::from(from[key]) <= position
                })
            }),
            shares: self.competes.then(|| selected.shares(p.k_len)),
        };
        let scores = self.inputs.scores.as_ref();
        let inputs = masked(&self.inputs, Some(attended(p, intervals)), scores);
        if self.is_large {
            return large::expected(&inputs, "dscores", (&learning, apart), grads);
        }
        expected_of_rank(&inputs, &learning, grads, apart)
    }

    /// The rank, in the form an engine gets it.
    pub(super) fn rank(&self, spec: &Spec) -> Option<Raw> {
        let rank = self.rank.as_ref().or(self.inputs.scores.as_ref())?;
        let shape = self.inputs.problem.scores_shape();
        let mut raw = Raw::new(rank, &shape, ElementType::F32, Layout::Contiguous);
        spec.places[Spec::SCORES].place(&mut raw);
        Some(raw)
    }

    pub(super) fn ranks(&self) -> Option<&[f64]> {
        self.rank.as_deref().or(self.inputs.scores.as_deref())
    }

    /// The call, without the intervals.
    pub(super) fn call(&self, spec: &Spec) -> Call {
        let mut call = Call::new(&self.inputs, Layout::Contiguous, &self.grads);
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
        call.sink.clone_from(&self.sink);
        if let Some(selected) = &self.selected {
            call.intervals = Some(selected.intervals.clone());
            call.runner_up_ends.clone_from(&selected.far);
            call.kept_from = selected.from.clone().filter(|_| self.left_out);
            call.given = true;
        }
        call
    }
}

/// A problem under a mask or bias.
pub(super) struct DrawnMasked {
    pub(super) inputs: MaskedInputs,
    case: MaskedCase,
    is_large: bool,
    grads: Grads,
}

impl DrawnMasked {
    pub(super) fn new(spec: &Spec) -> Self {
        Self::at(spec, spec.seed, None)
    }

    /// The problem, with the given mask if there is one.
    fn at(spec: &Spec, seed: u64, known: Option<&Broadcast<bool>>) -> Self {
        let mut rng = Rng::new(seed);
        let Rows { qkv, grads } = Rows::new(spec, &mut rng);
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
            if let Some(large) = spec.large.filter(|_| shape[3] == spec.k_len) {
                large.add(&mut values, spec);
            }
            Broadcast { shape, values }
        });
        let [q, k, v] = qkv;
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
            is_large: spec.large.is_some(),
            grads,
        }
    }

    /// Problems of the same probabilities.
    pub(super) fn others(&self, spec: &Spec) -> Vec<Expected> {
        let measured = measured(spec);
        let of = |seed| {
            let mut other = Self::at(&measured, seed, self.inputs.visible.as_ref());
            other.inputs.q.clone_from(&self.inputs.q);
            other.inputs.k.clone_from(&self.inputs.k);
            other.inputs.bias.clone_from(&self.inputs.bias);
            other.expected()
        };
        other_seeds(spec).map(of).collect()
    }

    pub(super) fn expected(&self) -> Expected {
        if self.is_large {
            let none = (&Learning::default(), false);
            return large::expected(&self.inputs, "dbias", none, &self.grads);
        }
        self.case.expected(&self.inputs, &self.grads)
    }

    pub(super) fn call(&self, spec: &Spec) -> MaskedCall {
        let hidden = self.case.hidden;
        let mut call = MaskedCall::new(&self.inputs, Layout::Contiguous, hidden, &self.grads);
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
