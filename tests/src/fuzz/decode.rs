//! Decoding a problem's tokens over a cache, in its pieces.

use super::spec::{Decoding, MAX_STEP, Spec};
use crate::call::picked;
use crate::engines::Cpu;
use crate::{Engine, Outputs};
use core::ops::Range;
use flash_dma_problem::Problem;
use flash_dma_reference::Inputs;

mod cpu;
#[cfg(feature = "kernels")]
mod kernels;

/// The results of a step.
#[derive(Clone, Debug)]
pub struct Step {
    /// The tokens of the step.
    pub tokens: Range<usize>,
    /// Their outputs.
    pub outputs: Outputs,
    /// The positions of the keys that the cache then holds, ascending, for each sequence and head; with slots only.
    pub live: Option<Vec<Vec<usize>>>,
}

/// An engine that may decode.
pub trait Decoder: Engine {
    /// True if it decodes.
    fn decodes(&self) -> bool;

    /// Appends the prefill to an empty cache and takes the steps.
    fn decode(&self, spec: &Spec, decoding: &Decoding, all: &Inputs) -> Result<Vec<Step>, String>;
}

impl Decoder for Cpu {
    fn decodes(&self) -> bool {
        true
    }

    fn decode(&self, spec: &Spec, decoding: &Decoding, all: &Inputs) -> Result<Vec<Step>, String> {
        cpu::decode(spec, decoding, all)
    }
}

/// Its caches are tested by the suite; the fuzzer does not drive them.
#[cfg(feature = "burn")]
impl<B: crate::engines::Backend> Decoder for crate::engines::Burn<B> {
    fn decodes(&self) -> bool {
        false
    }

    fn decode(&self, _: &Spec, _: &Decoding, _: &Inputs) -> Result<Vec<Step>, String> {
        Err("the fuzzer does not decode on Burn".into())
    }
}

/// The expected results of a step of these tokens: the last rows of one pass over everything up to its end.
pub fn prefix(spec: &Spec, all: &Inputs, step: &Range<usize>) -> Inputs {
    let (p, len, dim) = (&all.problem, spec.k_len, spec.head_dim);
    let q = [p.batch, p.q_heads, step.len(), dim];
    let k = [p.batch, p.kv_heads, step.end, dim];
    let scores = p.has_scores.then_some(&k[..3]);
    let problem = Problem::new(&q, &k, &k, scores, p.element, &spec.options());
    let held = 0..step.end;
    Inputs {
        problem: problem.expect("a part of a problem is one"),
        q: picked(&all.q, len, dim, step.clone()),
        k: picked(&all.k, len, dim, held.clone()),
        v: picked(&all.v, len, dim, held.clone()),
        scores: (all.scores.as_ref()).map(|z| picked(z, len, 1, held.clone())),
    }
}

/// Number of wrong tokens after those of a piece, in a sequence of `len` tokens; `None` for a piece that is no guess.
fn wrong_behind(decoding: &Decoding, piece: usize, len: usize) -> Option<usize> {
    let room = MAX_STEP.checked_sub(piece)?;
    Some(decoding.wrong?.min(room).min(len))
}

pub(super) fn steps(decoding: &Decoding) -> impl Iterator<Item = Range<usize>> {
    let pieces = decoding.pieces.iter();
    pieces.scan(decoding.prefill, |held, piece| {
        let from = *held;
        *held += piece;
        Some(from..*held)
    })
}
