//! Dynamic-mask attention of Burn's Flex backend on the CPU engine: strided views in, contiguous tensors out, copied
//! only if the engine cannot address them (a reversed axis, or a last axis that is not contiguous).

use super::packed::RowGradients;
use super::tensors::{Stored, addressable, buffer, by_element, contiguous, run, tensor, view};
use crate::ops::attention::DynamicMaskOps;
use crate::ops::types::{AttentionGrads, Forwarded, OptionalFloat, RunnersUp, Saved, Selection};
use crate::spans::span;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Flex, TensorMetadata};
use burn_flex::FlexTensor;
use flash_dma_cpu::{Element, Gradients, Inputs, Outputs};
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
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let _span = span!("forward", engine = "cpu");
        let call = Call::new([q, k, v], selection, problem);
        let results = by_element!(call.rows[0].dtype(), E => call.forward::<E>(false));
        (results.out, results.lse)
    }

    fn dynamic_mask_forward_with_residual(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        selection: Selection<Self>,
        problem: Problem,
    ) -> Forwarded<Self> {
        let _span = span!("forward", engine = "cpu");
        let call = Call::new([q, k, v], selection, problem);
        by_element!(call.rows[0].dtype(), E => call.forward::<E>(true))
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

pub(super) struct Results<E> {
    out: Vec<E>,
    residual: Option<Vec<E>>,
    lse: Vec<f32>,
    lse_rest: Vec<f32>,
}

impl<E: Element + Stored> Results<E> {
    /// With a residual if it is wanted and there is one.
    pub(super) fn new(problem: &Problem, residual: bool) -> Self {
        let shape = problem.residual_shape().filter(|_| residual);
        Self {
            out: buffer(problem.q_shape()),
            residual: shape.map(buffer),
            lse: buffer(problem.lse_shape()),
            lse_rest: buffer(problem.lse_shape()),
        }
    }

    /// Fills them by `forward`.
    pub(super) fn forwarded(
        mut self,
        problem: &Problem,
        forward: impl FnOnce(Outputs<'_, E>) -> Result<(), AttentionError>,
    ) -> Forwarded<Flex> {
        run(forward(Outputs {
            out: &mut self.out,
            residual: self.residual.as_deref_mut(),
            lse: &mut self.lse,
            lse_rest: Some(&mut self.lse_rest),
        }));
        let residual = self.residual.map(|t| tensor(t, problem.q_shape()));
        Forwarded {
            out: tensor(self.out, problem.q_shape()),
            residual: OptionalFloat::from_option(residual),
            lse: tensor(self.lse, problem.lse_shape()),
            lse_rest: tensor(self.lse_rest, problem.lse_shape()),
        }
    }
}

/// Tensors saved by a forward pass, in a form the engine can address.
pub(super) fn addressable_saved(saved: Saved<Flex>) -> Saved<Flex> {
    Saved {
        out: addressable(saved.out),
        residual: saved.residual.map(addressable),
        lse: saved.lse.to_contiguous(),
        lse_rest: saved.lse_rest.map(|t| t.to_contiguous()),
        grad_out: addressable(saved.grad_out),
        grad_lse: saved.grad_lse.map(|t| t.to_contiguous()),
    }
}

pub(super) fn view_saved<E: Element + Stored>(saved: &Saved<Flex>) -> flash_dma_cpu::Saved<'_, E> {
    flash_dma_cpu::Saved {
        out: view(&saved.out),
        residual: saved.residual.as_option().map(view),
        lse: contiguous(&saved.lse),
        lse_rest: saved.lse_rest.as_option().map(contiguous),
        grad_out: view(&saved.grad_out),
        grad_lse: saved.grad_lse.as_option().map(contiguous),
    }
}

struct Selected {
    scores: FlexTensor,
    intervals: Vec<Interval>,
    /// Ends of the runners-up.
    far: Option<Vec<u32>>,
    left_out: Option<Vec<u32>>,
}

impl Selected {
    fn view(&self) -> flash_dma_cpu::Selection<'_> {
        flash_dma_cpu::Selection {
            scores: view(&self.scores),
            intervals: &self.intervals,
            far: self.far.as_ref().map(|ends| flash_dma_cpu::Far {
                ends,
                left_out: self.left_out.as_deref(),
            }),
        }
    }
}

fn positions(tensor: &FlexTensor) -> Vec<u32> {
    let tensor = tensor.to_contiguous();
    let values: &[i32] = contiguous(&tensor);
    values.iter().map(|&position| position as u32).collect()
}

/// Tensors of a call in a form the engine can address.
struct Call {
    rows: [FlexTensor; 3],
    selection: Option<Selected>,
    problem: Problem,
}

impl Call {
    fn new(rows: [FlexTensor; 3], selection: Selection<Flex>, problem: Problem) -> Self {
        let selection = match selection {
            Selection::All => None,
            Selection::Scored {
                scores,
                intervals,
                runners_up,
            } => {
                let intervals = intervals.to_contiguous();
                let values: &[i32] = contiguous(&intervals);
                let intervals = values.chunks_exact(2).map(|pair| Interval {
                    first: pair[0] as u32,
                    end: pair[1] as u32,
                });
                let (far, left_out) = match runners_up {
                    RunnersUp::None => (None, None),
                    RunnersUp::Some { far, left_out, .. } => {
                        (Some(positions(&far)), left_out.into_option())
                    }
                };
                Some(Selected {
                    scores: addressable(scores),
                    intervals: intervals.collect(),
                    far,
                    left_out: left_out.map(|from| positions(&from)),
                })
            }
        };
        Self {
            rows: rows.map(addressable),
            selection,
            problem,
        }
    }

    fn inputs<E: Element + Stored>(&self) -> Inputs<'_, E> {
        let [q, k, v] = self.rows.each_ref().map(view);
        Inputs {
            q,
            k,
            v,
            selection: self.selection.as_ref().map(Selected::view),
        }
    }

    fn forward<E: Element + Stored>(self, residual: bool) -> Forwarded<Flex> {
        let results = Results::<E>::new(&self.problem, residual);
        results.forwarded(&self.problem, |outputs| {
            flash_dma_cpu::forward(&self.problem, self.inputs(), outputs)
        })
    }

    fn backward<E: Element + Stored>(self, saved: Saved<Flex>) -> AttentionGrads<Flex> {
        let problem = &self.problem;
        let saved = addressable_saved(saved);
        let mut rows = RowGradients::<E>::new(&self.rows, problem);
        let [q, k, v] = rows.slices();
        let mut scores = (problem.has_scores).then(|| buffer(problem.scores_shape()));
        let far = self.selection.as_ref().and_then(|s| s.far.as_ref());
        let mut rank = far.map(|_| buffer(problem.scores_shape()));
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
        let words =
            |words: Option<Vec<f32>>| words.map(|words| tensor(words, problem.scores_shape()));
        let [q, k, v] = rows.into_tensors(problem);
        AttentionGrads {
            q,
            k,
            v,
            scores: OptionalFloat::from_option(words(scores)),
            rank: OptionalFloat::from_option(words(rank)),
        }
    }
}
