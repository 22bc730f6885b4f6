//! Training on a sequence in parts, one after the other, by the gradient of the whole.

use crate::nn::{Carry, DynamicMaskAttention, PartPass, PartSelection};
use crate::ops::TrainingOps;
use burn::backend::Dispatch;
use burn::tensor::{DType, Device, FloatDType, Gradients, Tensor};
use flash_dma_problem::AttentionError;

/// The attention layers of a model that reads a sequence in parts, in the order in which it calls them.
///
/// Any number of tokens takes the memory of one part, and what each boundary between parts keeps: per layer as many rows of
/// keys and values as a query keeps and has runners-up. The gradient is that of the whole sequence: a part is computed once
/// without a graph, and again, from the last part to the first, with one.
///
/// A model calls [`attend`](Self::attend) where it would call a layer's `forward`. `flash-dma-models`' `Decoder` has a
/// method that does all of this.
#[derive(Debug)]
pub struct StreamedLayers {
    layers: Vec<StreamedLayer>,
    next: usize,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    /// Parts in order.
    Forward,
    /// The part of this number, with a graph.
    Backward(usize),
}

#[derive(Debug)]
struct StreamedLayer {
    /// What each part begins with; in the first stage also what follows the last.
    carries: Vec<Carry>,
    selections: Vec<PartSelection>,
    /// What later parts ask of the rows that the part leaves.
    asked: Option<CarryGradient>,
    /// The pass of the part that is computed with a graph.
    pass: Option<Pass>,
    charge: Option<Charge>,
}

/// Gradients of a carry, in f32.
#[derive(Debug)]
struct CarryGradient {
    rows: [Tensor<4>; 2],
    /// Of the ranks, and the positions at which they learn: `[batch, kv_heads, rows, 2]`.
    ranks: Tensor<4>,
}

struct Pass {
    /// Keys and values of the carry: leaves.
    given: [Tensor<4>; 2],
    pass: PartPass,
    /// What later parts ask of the keys, those of the carry first.
    asked: Option<CarryGradient>,
}

impl std::fmt::Debug for Pass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pass").finish_non_exhaustive()
    }
}

/// Sums over all keys of a head, for ranks that compete.
#[derive(Debug)]
struct Charge {
    /// Of the gradients of ranks, `[batch, kv_heads, 1]`.
    gain: Tensor<3>,
    /// Of the positions at which a rank learns.
    positions: Tensor<3>,
    /// Of the tokens, each times its positions: `[batch, kv_heads, d_model]`.
    tokens: Tensor<3>,
}

impl StreamedLayers {
    /// The layers of a model, before the first part. `batch` sequences are read in activations of a type.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Unsupported`] for a layer that keeps all keys, is not causal, has ALiBi or dropout, adds scores to the
    /// logits, or whose tokens learn through scores.
    pub fn try_new<'a>(
        layers: impl IntoIterator<Item = &'a DynamicMaskAttention>,
        batch: usize,
        dtype: FloatDType,
        device: &Device,
    ) -> Result<Self, AttentionError> {
        let layers = layers.into_iter().map(|layer| {
            Ok(StreamedLayer {
                carries: vec![layer.try_carry(batch, dtype, device)?],
                selections: Vec::new(),
                asked: None,
                pass: None,
                charge: None,
            })
        });
        Ok(Self {
            layers: layers.collect::<Result<_, _>>()?,
            next: 0,
            stage: Stage::Forward,
        })
    }

    /// The next layer on its tokens of a part, `[batch, len, d_model]` to the same shape.
    ///
    /// # Errors
    ///
    /// See [`DynamicMaskAttention::try_forward`].
    ///
    /// # Panics
    ///
    /// If there are more layers, or more parts, than before.
    pub fn try_attend(
        &mut self,
        layer: &DynamicMaskAttention,
        x: Tensor<3>,
    ) -> Result<Tensor<3>, AttentionError> {
        let state = self
            .layers
            .get_mut(self.next)
            .expect("as many layers as before");
        self.next += 1;
        match self.stage {
            Stage::Forward => {
                let carry = state.carries.last().expect("one was made first");
                let (out, next, pass) = layer.try_forward_part(x, carry, None)?;
                state.carries.push(next);
                state.selections.push(pass.selection);
                Ok(out.detach())
            }
            Stage::Backward(part) => {
                let Carry { rows, ranks, seen } = state.carries[part].clone();
                let given = rows.map(|rows| rows.autodiff().set_require_grad(true));
                let carry = Carry {
                    rows: given.clone(),
                    ranks,
                    seen,
                };
                // The last part has no first pass.
                let selection = state.selections.get(part);
                let (out, _, pass) = layer.try_forward_part(x, &carry, selection)?;
                let live = pass.selection.live();
                let asked = state.asked.take().map(|asked| CarryGradient {
                    rows: asked.rows.map(|rows| live.asked_of_keys(rows)),
                    ranks: live.asked_of_keys(asked.ranks),
                });
                state.pass = Some(Pass { given, pass, asked });
                Ok(out)
            }
        }
    }

    /// Begins the next part of the first stage.
    pub fn begin_part(&mut self) {
        self.next = 0;
    }

    /// Begins the second stage for a part, counted from 0: the last one first.
    pub fn begin_backward(&mut self, part: usize) {
        (self.next, self.stage) = (0, Stage::Backward(part));
        for layer in &mut self.layers {
            layer.carries.truncate(part + 1);
            layer.selections.truncate(part + 1);
        }
    }

    /// A zero, `[1]`, to be added to the loss of the part: its backward pass brings what later parts ask of this one.
    #[must_use]
    pub fn asked(&self) -> Option<Tensor<1>> {
        let passes = self.layers.iter().filter_map(|layer| layer.pass.as_ref());
        let zeros = passes.flat_map(|Pass { given, pass, asked }| {
            let first = given[0].dims()[2];
            let asked = asked.iter().flat_map(|asked| &asked.rows);
            asked.zip(&pass.rows).map(move |(asked, rows)| {
                let len = rows.dims()[2];
                resumed(
                    rows.clone(),
                    asked.clone().narrow(2, first, len).cast(rows.dtype()),
                )
            })
        });
        zeros.reduce(|zeros, zero| zeros + zero)
    }

    /// Takes the gradients of the carries from those of the part's loss, with [`asked`](Self::asked), and keeps them for the
    /// part before. Returns a zero, `[1]`, whose backward pass gives the gradients of the scores' parameters; `None` if no score
    /// learns.
    ///
    /// # Errors
    ///
    /// Errors of the scores.
    pub fn try_take_gradients<'a>(
        &mut self,
        layers: impl IntoIterator<Item = &'a DynamicMaskAttention>,
        gradients: &mut Gradients,
    ) -> Result<Option<Tensor<1>>, AttentionError> {
        let mut zeros = Vec::new();
        for (of_model, layer) in layers.into_iter().zip(&mut self.layers) {
            let Pass { given, pass, asked } = layer.pass.take().expect("a pass of every layer");
            let first = given[0].dims()[2];
            let f32s = |tensor: Tensor<4>| tensor.cast(FloatDType::F32);
            let rows = [0, 1].map(|at| {
                let own = given[at].grad_remove(gradients).map(f32s);
                let own =
                    own.unwrap_or_else(|| f32s(given[at].clone().without_autodiff()).zeros_like());
                match &asked {
                    Some(asked) => own + asked.rows[at].clone().narrow(2, 0, first),
                    None => own,
                }
            });
            let [batch, heads, _, _] = given[0].dims();
            let ranks = match pass.ranks {
                None => Tensor::zeros([batch, heads, first, 2], (&rows[0].device(), DType::F32)),
                Some(ranks) => {
                    let own = ranks.all.grad_remove(gradients);
                    let values = ranks.all.without_autodiff();
                    let own = own.unwrap_or_else(|| values.zeros_like());
                    let sinks = values.equal_elem(f32::INFINITY);
                    let own = own.mask_fill(sinks, 0);
                    let gain = own.clone().sum_dim(2);
                    let own = [own, ranks.positions];
                    let own = Tensor::cat(own.map(|t| t.unsqueeze_dim::<4>(3)).into(), 3);
                    let all = match &asked {
                        Some(asked) => own + asked.ranks.clone(),
                        None => own,
                    };
                    let len = ranks.tokens.dims()[1];
                    let of_part = |at: usize| {
                        let part = all.clone().narrow(2, first, len).narrow(3, at, 1);
                        part.reshape([batch, heads, len])
                    };
                    let positions = of_part(1);
                    let scores = of_model.try_projected_scores(ranks.tokens.clone())?;
                    zeros.push(resumed(scores, of_part(0)));
                    let charge = Charge {
                        gain,
                        tokens: positions.clone().matmul(ranks.tokens.cast(FloatDType::F32)),
                        positions: positions.sum_dim(2),
                    };
                    layer.charge = Some(match layer.charge.take() {
                        None => charge,
                        Some(sum) => Charge {
                            gain: sum.gain + charge.gain,
                            positions: sum.positions + charge.positions,
                            tokens: sum.tokens + charge.tokens,
                        },
                    });
                    all.narrow(2, 0, first)
                }
            };
            layer.asked = Some(CarryGradient { rows, ranks });
        }
        Ok(zeros.into_iter().reduce(|zeros, zero| zeros + zero))
    }

    /// After all parts: a zero, `[1]`, whose backward pass takes from the gradients of the scores' parameters what ranks that
    /// compete are charged; `None` if none do.
    ///
    /// # Errors
    ///
    /// Errors of the scores.
    pub fn try_charged<'a>(
        &self,
        layers: impl IntoIterator<Item = &'a DynamicMaskAttention>,
    ) -> Result<Option<Tensor<1>>, AttentionError> {
        let mut zeros: Option<Tensor<1>> = None;
        for (layer, state) in layers.into_iter().zip(&self.layers) {
            let (true, Some(charge)) = (layer.competes(), &state.charge) else {
                continue;
            };
            let scores = layer.try_projected_scores(charge.tokens.clone())?;
            let [_, heads, _] = scores.dims();
            let none = charge.positions.clone().equal_elem(0);
            let share = charge.gain.clone() / charge.positions.clone().mask_fill(none, 1);
            let own = Tensor::<2>::eye(heads, &share.device()).unsqueeze::<3>();
            let zero = resumed(scores, own * share * -1);
            zeros = Some(match zeros {
                Some(zeros) => zeros + zero,
                None => zero,
            });
        }
        Ok(zeros)
    }
}

fn resumed<const D: usize>(output: Tensor<D>, gradient: Tensor<D>) -> Tensor<1> {
    let zero = Dispatch::training_resume(output.into_dispatch(), gradient.into_dispatch());
    Tensor::from_dispatch(zero)
}
