//! Training on a sequence in parts, one after the other, by the gradient of the whole.

use super::checkpointing::{add_gradients, resumed, untracked};
use crate::Documents;
use crate::nn::{Carry, DynamicMaskAttention, PartDocuments, PartPass, PartRanks, PartSelection};
use crate::validate::expect;
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{DType, FloatDType, Gradients, Tensor};
use flash_dma_problem::AttentionError;
use std::ops::Range;

/// Where sequences are cut, for [`try_in_parts`].
#[derive(Clone, Debug)]
pub struct Parts {
    ranges: Vec<Range<usize>>,
    documents: Documents,
}

impl Parts {
    /// Parts of `part` tokens of each of `batch` sequences of `len` tokens; the last may be shorter.
    ///
    /// # Panics
    ///
    /// If one of them is 0.
    #[must_use]
    pub fn new(batch: usize, len: usize, part: usize) -> Self {
        let all = [batch, len, part];
        assert!(
            !all.contains(&0),
            "{batch} sequences of {len} tokens in parts of {part}"
        );
        let ranges = (0..len).step_by(part);
        let end = |start: usize| len.min(start.saturating_add(part));
        Self {
            ranges: ranges.map(|start| start..end(start)).collect(),
            documents: Documents::from_lengths(vec![vec![len]; batch]),
        }
    }

    /// The documents that are packed into each sequence: any part may begin and end within one.
    ///
    /// # Errors
    ///
    /// [`AttentionError::DocumentBatch`] or [`AttentionError::DocumentTokens`] if they are not those of sequences of this number and
    /// length, [`AttentionError::Unsupported`] if there is padding behind them.
    pub fn try_with_documents(self, documents: Documents) -> Result<Self, AttentionError> {
        let batch = self.documents.lengths().len();
        documents.check([batch, 1, self.len()])?;
        if documents.has_padding() {
            let what = "padding in sequences that are read in parts".to_owned();
            return Err(AttentionError::Unsupported { what });
        }
        Ok(Self { documents, ..self })
    }

    fn len(&self) -> usize {
        self.ranges.last().map_or(0, |range| range.end)
    }
}

/// The loss and the gradients of a model that reads sequences in parts: those of a pass over the whole sequences, up to
/// rounding, however long they are.
///
/// Behind a boundary between parts, a layer that keeps `window` keys needs at most that many of the earlier ones, and the
/// runners-up. So memory holds one part with its graph, and for every boundary and layer these rows. Each part is computed
/// without a graph first, and a second time, from the last part to the first, with one; gradients cross a boundary in f32.
///
/// - `features(model, tokens, layers)` computes the output of the last block for a part, the tokens of this range. It calls
///   all attention layers in the same order for every part, by [`PartLayers::attend`] in place of their `forward`.
/// - `loss(model, tokens, x)` computes the part's share of the loss, `[1]`, from that output, by which alone it may depend
///   on the layers. The shares add up to the returned loss.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::module::Module;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_flash_dma::nn::{DynamicMaskAttention, DynamicMaskAttentionConfig, Selection};
/// use burn_flash_dma::train::{Parts, try_in_parts};
///
/// let device = Device::flex().autodiff();
/// let config = DynamicMaskAttentionConfig::new(32, 4).with_selection(Selection::keep(8));
/// let layer = config.init(&device);
/// let x = Tensor::<3>::random([1, 100, 32], Distribution::Default, &device);
///
/// // 100 tokens in parts of 25.
/// let (loss, gradients) = try_in_parts(
///     &layer,
///     &Parts::new(1, 100, 25),
///     |layer: &DynamicMaskAttention, tokens, layers| {
///         layers.try_attend(layer, x.clone().narrow(1, tokens.start, tokens.len()))
///     },
///     |_, _, out| Ok(out.powi_scalar(2).sum() / 100.0),
/// )?;
///
/// let whole = layer.forward(x.clone()).powi_scalar(2).sum() / 100.0;
/// assert!((loss - whole).abs().into_scalar::<f32>() < 1e-5);
/// assert!(gradients.get::<2>(layer.q_proj.weight.id).is_some());
/// # }
/// # Ok::<(), burn_flash_dma::AttentionError>(())
/// ```
///
/// # Errors
///
/// Those of `features` and `loss`.
///
/// # Panics
///
/// If parts call different numbers of layers, or the loss has no graph.
pub fn try_in_parts<M: Module>(
    model: &M,
    parts: &Parts,
    features: impl Fn(&M, Range<usize>, &mut PartLayers) -> Result<Tensor<3>, AttentionError>,
    loss: impl Fn(&M, Range<usize>, Tensor<3>) -> Result<Tensor<1>, AttentionError>,
) -> Result<(Tensor<1>, GradientsParams), AttentionError> {
    let mut layers = PartLayers::new();
    let untracked = untracked(model);
    let last = parts.ranges.len() - 1;
    for part in 0..last {
        layers.begin(parts, part, false);
        features(&untracked, parts.ranges[part].clone(), &mut layers)?;
    }
    let mut gradients = GradientsParams::new();
    let mut losses = Vec::with_capacity(parts.ranges.len());
    for (part, range) in parts.ranges.iter().enumerate().rev() {
        layers.begin(parts, part, true);
        let x = features(model, range.clone(), &mut layers)?;
        let loss = loss(model, range.clone(), x)?;
        losses.push(loss.clone().detach());
        let loss = sum(layers.asked().into_iter().chain([loss])).expect("a loss");
        let mut grads = loss.backward();
        let scores = layers.take_gradients(&mut grads)?;
        add_gradients(model, grads, &mut gradients);
        if let Some(zero) = scores {
            add_gradients(model, zero.backward(), &mut gradients);
        }
    }
    if let Some(zero) = layers.charged()? {
        add_gradients(model, zero.backward(), &mut gradients);
    }
    Ok((Tensor::cat(losses, 0).sum(), gradients))
}

/// The attention layers of a model that reads a sequence [in parts](try_in_parts), in the order in which it calls them.
pub struct PartLayers {
    layers: Vec<LayerInParts>,
    /// True once a part is done.
    is_known: bool,
    /// Layers called for this part.
    called: usize,
    part: usize,
    /// Tokens of a sequence.
    tokens: usize,
    documents: Option<PartDocuments>,
    has_graph: bool,
}

#[derive(Default)]
struct LayerInParts {
    /// The carry that each part begins with.
    carries: Vec<Carry>,
    /// Selections of the parts without a graph.
    selections: Vec<PartSelection>,
    pass: Option<Pass>,
    /// Gradient of the carry that the part leaves, by later parts.
    asked: Option<CarryGradient>,
    /// The layer, and the sums of its heads.
    charge: Option<(DynamicMaskAttention, Charge)>,
}

/// A layer's pass over a part with a graph.
struct Pass {
    layer: DynamicMaskAttention,
    /// Keys and values of the carry: leaves.
    given: [Tensor<4>; 2],
    pass: PartPass,
    /// Gradient of the keys by later parts, those of the carry first.
    asked: Option<CarryGradient>,
}

/// Gradients of rows, in f32, `[batch, kv_heads, rows, ..]`.
struct CarryGradient {
    /// Of keys and values.
    rows: [Tensor<4>; 2],
    /// Of the ranks, and the positions at which these learn, `[.., 2]`.
    ranks: Tensor<4>,
}

/// Sums over the keys of a head, which ranks that compete are charged by.
struct Charge {
    /// Of the gradients of ranks, `[batch, kv_heads, 1]`.
    gain: Tensor<3>,
    /// Of the positions at which a rank learns.
    positions: Tensor<3>,
    /// Of the tokens, each times its positions: `[batch, kv_heads, d_model]`.
    tokens: Tensor<3>,
}

impl PartLayers {
    fn new() -> Self {
        Self {
            layers: Vec::new(),
            is_known: false,
            called: 0,
            part: 0,
            tokens: 0,
            documents: None,
            has_graph: false,
        }
    }

    /// The next layer on its tokens of the part, `[batch, len, d_model]` to the same shape.
    ///
    /// # Panics
    ///
    /// If [`try_attend`](Self::try_attend) returns an error, with that error's text, or parts call different numbers of
    /// layers.
    pub fn attend(&mut self, layer: &DynamicMaskAttention, x: Tensor<3>) -> Tensor<3> {
        expect(self.try_attend(layer, x))
    }

    /// Like [`attend`](Self::attend), but returns the error.
    ///
    /// # Errors
    ///
    /// Those of [`DynamicMaskAttention::check_in_parts`], or [`AttentionError`] if the tokens do not fit.
    ///
    /// # Panics
    ///
    /// If parts call different numbers of layers.
    pub fn try_attend(
        &mut self,
        layer: &DynamicMaskAttention,
        x: Tensor<3>,
    ) -> Result<Tensor<3>, AttentionError> {
        let (called, part) = (self.called, self.part);
        if called == self.layers.len() {
            assert!(!self.is_known, "more layers than in the first part");
            let carries = vec![layer.try_carry(&x, self.tokens)?];
            self.layers.push(LayerInParts {
                carries,
                ..LayerInParts::default()
            });
        }
        self.called += 1;
        let documents = self.documents.as_ref().expect("a part has begun");
        let state = &mut self.layers[called];
        let Carry { rows, ranks, seen } = state.carries[part].clone();
        if !self.has_graph {
            let carry = Carry { rows, ranks, seen };
            let (out, pass) = layer.try_forward_part(x, &carry, documents, None)?;
            state.carries.push(pass.next_carry());
            state.selections.push(pass.selection);
            return Ok(out.detach());
        }
        let rows = rows.map(|rows| rows.autodiff().set_require_grad(true));
        let given = rows.clone();
        // The last part has not been computed before.
        let selection = state.selections.get(part);
        let carry = Carry { rows, ranks, seen };
        let (out, pass) = layer.try_forward_part(x, &carry, documents, selection)?;
        let live = pass.selection.live();
        let asked = state.asked.take().map(|asked| CarryGradient {
            rows: asked.rows.map(|rows| live.asked_of_keys(rows)),
            ranks: live.asked_of_keys(asked.ranks),
        });
        state.pass = Some(Pass {
            layer: layer.clone(),
            given,
            pass,
            asked,
        });
        Ok(out)
    }

    fn begin(&mut self, parts: &Parts, part: usize, has_graph: bool) {
        assert_eq!(
            self.called,
            self.layers.len(),
            "the number of layers of a part"
        );
        self.is_known = !self.layers.is_empty();
        (self.called, self.part, self.has_graph) = (0, part, has_graph);
        self.tokens = parts.len();
        self.documents = Some(PartDocuments::new(&parts.documents, &parts.ranges[part]));
        if has_graph {
            for layer in &mut self.layers {
                layer.carries.truncate(part + 1);
                layer.selections.truncate(part + 1);
            }
        }
    }

    /// A zero whose backward pass brings what later parts ask of the keys and values of this one.
    fn asked(&self) -> Option<Tensor<1>> {
        let passes = self.layers.iter().filter_map(|layer| layer.pass.as_ref());
        let asked = passes.filter_map(|pass| Some((pass, pass.asked.as_ref()?)));
        sum(asked.flat_map(|(Pass { given, pass, .. }, asked)| {
            let first = given[0].dims()[2];
            let each = asked.rows.iter().zip(&pass.rows);
            each.map(move |(asked, rows)| {
                let [_, _, len, _] = rows.dims();
                let asked = asked.clone().narrow(2, first, len);
                resumed(rows.clone(), asked.cast(rows.dtype()))
            })
        }))
    }

    /// Takes the gradients of the carries, and keeps them for the part before. Returns a zero whose backward pass gives those
    /// of the scores' parameters; `None` if no score learns.
    fn take_gradients(
        &mut self,
        gradients: &mut Gradients,
    ) -> Result<Option<Tensor<1>>, AttentionError> {
        let mut zeros = Vec::new();
        for state in &mut self.layers {
            let pass = state.pass.take().expect("the part called every layer");
            let Pass {
                layer,
                given,
                pass,
                asked,
            } = pass;
            let [batch, heads, first, _] = given[0].dims();
            let (asked, asked_of_ranks) = match asked {
                Some(CarryGradient { rows, ranks }) => (Some(rows), Some(ranks)),
                None => (None, None),
            };
            let rows = [0, 1].map(|at| {
                let values = given[at].clone().without_autodiff();
                let own = given[at].grad_remove(gradients);
                let own = own
                    .unwrap_or_else(|| values.zeros_like())
                    .cast(FloatDType::F32);
                match &asked {
                    Some(asked) => own + asked[at].clone().narrow(2, 0, first),
                    None => own,
                }
            });
            let ranks = match pass.ranks {
                None => Tensor::zeros([batch, heads, first, 2], (&rows[0].device(), DType::F32)),
                Some(ranks) => {
                    let tokens = ranks.tokens.clone();
                    let (gain, own) = learned(ranks, gradients);
                    let all = match asked_of_ranks {
                        Some(asked) => own + asked,
                        None => own,
                    };
                    let [_, len, _] = tokens.dims();
                    let [gradient, positions] = [0, 1].map(|at| {
                        let part = all.clone().narrow(2, first, len).narrow(3, at, 1);
                        part.reshape([batch, heads, len])
                    });
                    zeros.push(resumed(
                        layer.try_projected_scores(tokens.clone())?,
                        gradient,
                    ));
                    if layer.competes() {
                        let charge = Charge::of(gain, positions, tokens);
                        let charge = match state.charge.take() {
                            Some((_, earlier)) => earlier.plus(charge),
                            None => charge,
                        };
                        state.charge = Some((layer, charge));
                    }
                    all.narrow(2, 0, first)
                }
            };
            state.asked = Some(CarryGradient { rows, ranks });
        }
        Ok(sum(zeros))
    }

    /// After all parts, a zero whose backward pass takes from the gradients of the scores' parameters what ranks that compete
    /// are charged; `None` if none do.
    fn charged(&self) -> Result<Option<Tensor<1>>, AttentionError> {
        let charges = self.layers.iter().filter_map(|layer| layer.charge.as_ref());
        let zeros = charges.map(|(layer, charge)| {
            // The scores are linear in the tokens: that of a sum is the sum of theirs.
            let scores = layer.try_projected_scores(charge.tokens.clone())?;
            let [_, heads, _] = scores.dims();
            let none = charge.positions.clone().equal_elem(0);
            let share = charge.gain.clone() / charge.positions.clone().mask_fill(none, 1);
            let own_head = Tensor::<2>::eye(heads, &share.device());
            let own_head = own_head.cast(FloatDType::F32).unsqueeze::<3>();
            Ok(resumed(scores, own_head * share * -1))
        });
        Ok(sum(zeros.collect::<Result<Vec<_>, _>>()?))
    }
}

impl Charge {
    fn of(gain: Tensor<3>, positions: Tensor<3>, tokens: Tensor<3>) -> Self {
        Self {
            gain,
            tokens: positions.clone().matmul(tokens.cast(FloatDType::F32)),
            positions: positions.sum_dim(2),
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            gain: self.gain + other.gain,
            positions: self.positions + other.positions,
            tokens: self.tokens + other.tokens,
        }
    }
}

/// Gradients of the ranks of all keys in a part: the sum of a head, and gradient and positions of each key, `[.., 2]`.
fn learned(ranks: PartRanks, gradients: &mut Gradients) -> (Tensor<3>, Tensor<4>) {
    let values = ranks.all.clone().without_autodiff();
    let gradient = ranks.all.grad_remove(gradients);
    let gradient = gradient.unwrap_or_else(|| values.zeros_like());
    // Sinks learn nothing.
    let gradient = gradient.mask_fill(values.equal_elem(f32::INFINITY), 0);
    let gain = gradient.clone().sum_dim(2);
    let both = [gradient, ranks.positions].map(|numbers| numbers.unsqueeze_dim::<4>(3));
    (gain, Tensor::cat(both.into(), 3))
}

fn sum(zeros: impl IntoIterator<Item = Tensor<1>>) -> Option<Tensor<1>> {
    zeros.into_iter().reduce(|zeros, zero| zeros + zero)
}
