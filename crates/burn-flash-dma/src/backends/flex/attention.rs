//! Dynamic-mask attention of Burn's Flex backend on the CPU engine: strided views in, contiguous tensors out, copied
//! only if the engine cannot address them (a reversed axis, or a last axis that is not contiguous).

use super::packed::RowGradients;
use super::tensors::{Stored, addressable, buffer, by_element, contiguous, run, tensor, view};
use crate::ops::attention::DynamicMaskOps;
use crate::spans::span;
use crate::types::{AttentionGrads, Forwarded, Saved, Selection, Wanted};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Flex, TensorMetadata};
use burn_flex::FlexTensor;
use flash_dma_cpu::{Element, Inputs};
use flash_dma_problem::tensors::{self, Gradients, Outputs};
use flash_dma_problem::{AttentionError, Interval, KeptKeys, Problem};

impl DynamicMaskOps for Flex {
    fn dynamic_mask_select(scores: FloatTensor<Self>, kept: KeptKeys) -> IntTensor<Self> {
        let _span = span!("select", engine = "cpu");
        let scores = addressable(scores);
        let mut intervals = vec![Interval { first: 0, end: 0 }; scores.shape().num_elements()];
        run(flash_dma_cpu::select(view(&scores), kept, &mut intervals));
        let mut shape = scores.shape().to_vec();
        shape.push(2);
        let values = intervals
            .iter()
            .flat_map(|i| [i.first as i32, i.end as i32]);
        tensor::<i32>(values.collect(), shape)
    }

    fn dynamic_mask_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        selection: Selection<Self>,
        problem: Problem,
        wanted: Wanted,
    ) -> Forwarded<Self> {
        let _span = span!("forward", engine = "cpu");
        let call = Call::new([q, k, v], selection, problem);
        by_element!(call.rows[0].dtype(), E => call.forward::<E>(wanted))
    }

    fn dynamic_mask_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        selection: Selection<Self>,
        saved: Saved<Self>,
        problem: Problem,
    ) -> AttentionGrads<Self> {
        let _span = span!("backward", engine = "cpu");
        let call = Call::new([q, k, v], selection, problem);
        by_element!(call.rows[0].dtype(), E => call.backward::<E>(saved))
    }
}

/// The results of `forward` that are wanted.
pub(super) fn forwarded<E: Element + Stored>(
    problem: &Problem,
    wanted: Wanted,
    forward: impl FnOnce(flash_dma_cpu::Outputs<'_, E>) -> Result<(), AttentionError>,
) -> Forwarded<Flex> {
    let saved = wanted == Wanted::Saved;
    let shape = problem.residual_shape().filter(|_| saved);
    let mut results: Outputs<Vec<E>, Vec<f32>> = Outputs {
        out: buffer(problem.q_shape()),
        residual: shape.map(buffer),
        lse: buffer(problem.lse_shape()),
        lse_rest: saved.then(|| buffer(problem.lse_shape())),
    };
    run(forward(
        results.as_mut().map(Vec::as_mut_slice, Vec::as_mut_slice),
    ));
    let rows = |rows| tensor(rows, problem.q_shape());
    Forwarded::from_tensors(results.map(rows, |words| tensor(words, problem.lse_shape())))
}

/// Tensors saved by a forward pass, in a form the engine can address.
pub(super) fn addressable_saved(saved: Saved<Flex>) -> tensors::Saved<FlexTensor> {
    (saved.into_tensors()).map(addressable, |words| words.to_contiguous())
}

pub(super) fn view_saved<E: Element + Stored>(
    saved: &tensors::Saved<FlexTensor>,
) -> flash_dma_cpu::Saved<'_, E> {
    saved.as_ref().map(view, contiguous)
}

fn positions(tensor: &FlexTensor) -> Vec<u32> {
    let tensor = tensor.to_contiguous();
    let values: &[i32] = contiguous(&tensor);
    values.iter().map(|&position| position as u32).collect()
}

/// The intervals of a tensor of the engine's.
fn intervals(tensor: &FlexTensor) -> Vec<Interval> {
    let tensor = tensor.to_contiguous();
    let pairs = contiguous::<i32>(&tensor).chunks_exact(2);
    let interval = |pair: &[i32]| Interval {
        first: pair[0] as u32,
        end: pair[1] as u32,
    };
    pairs.map(interval).collect()
}

/// Tensors of a call in a form the engine can address.
struct Call {
    rows: [FlexTensor; 3],
    selection: Option<tensors::Selection<FlexTensor, Vec<Interval>, Vec<u32>>>,
    problem: Problem,
}

impl Call {
    fn new(rows: [FlexTensor; 3], selection: Selection<Flex>, problem: Problem) -> Self {
        let addressed = |selection: tensors::Selection<FlexTensor>| {
            selection.map(addressable, |t| intervals(&t), |t| positions(&t))
        };
        Self {
            rows: rows.map(addressable),
            selection: selection.into_tensors().map(addressed),
            problem,
        }
    }

    fn inputs<E: Element + Stored>(&self) -> Inputs<'_, E> {
        let [q, k, v] = self.rows.each_ref().map(view);
        Inputs {
            q,
            k,
            v,
            selection: (self.selection.as_ref())
                .map(|selection| selection.as_ref().map(view, Vec::as_slice, Vec::as_slice)),
        }
    }

    fn forward<E: Element + Stored>(self, wanted: Wanted) -> Forwarded<Flex> {
        forwarded::<E>(&self.problem, wanted, |outputs| {
            flash_dma_cpu::forward(&self.problem, self.inputs(), outputs)
        })
    }

    fn backward<E: Element + Stored>(self, saved: Saved<Flex>) -> AttentionGrads<Flex> {
        let problem = &self.problem;
        let saved = addressable_saved(saved);
        let mut rows = RowGradients::<E>::new(&self.rows, problem);
        let [q, k, v] = rows.slices();
        let mut scores = (problem.scores_learn).then(|| buffer(problem.scores_shape()));
        let learns = (self.selection.as_ref()).is_some_and(|s| s.learning.is_some());
        let mut rank = learns.then(|| buffer(problem.scores_shape()));
        run(flash_dma_cpu::backward(
            problem,
            self.inputs(),
            view_saved(&saved),
            Gradients {
                q,
                k,
                v,
                scores: scores.as_deref_mut(),
                rank: rank.as_deref_mut(),
            },
        ));
        let words = |words: Vec<f32>| tensor(words, problem.scores_shape());
        let [q, k, v] = rows.into_tensors(problem);
        AttentionGrads::from_tensors(Gradients {
            q,
            k,
            v,
            scores: scores.map(words),
            rank: rank.map(words),
        })
    }
}
