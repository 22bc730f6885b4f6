//! The attention layers of a model that reads a part of a sequence.

use super::carry_gradient::{CarryGradient, Charge};
use super::checkpointing::resumed;
use super::neighbours::Neighbours;
use super::parts::Parts;
use crate::functions::selector::row_sums;
use crate::nn::{Carry, DynamicMaskAttention, PartDocuments, PartPass, PartRanks, PartSelection};
use crate::validate::expect;
use burn::tensor::{DType, FloatDType, Gradients, Tensor};
use flash_dma_problem::AttentionError;

/// The attention layers of a model that reads a part of a sequence, in the order in which it calls them.
pub struct PartLayers {
    layers: Vec<LayerInParts>,
    /// Layers called for this part.
    called: usize,
    /// Tokens of a sequence.
    tokens: usize,
    documents: Option<PartDocuments>,
    reading: Reading,
}

/// How the parts are read.
enum Reading {
    /// One after the other.
    InTime {
        part: usize,
        /// True once a part is done.
        is_known: bool,
        has_graph: bool,
    },
    /// Each by a device of its own: this one's, between two others.
    OnDevice(Box<Neighbours>),
}

#[derive(Default)]
struct LayerInParts {
    /// The carry that each part begins with.
    carries: Vec<Carry>,
    /// Selections of the parts without a graph.
    selections: Vec<PartSelection>,
    pass: Option<Pass>,
    /// The layer, and the gradient of the carry that the part leaves, by later parts.
    asked: Option<(DynamicMaskAttention, CarryGradient)>,
}

/// A layer's pass over a part with a graph.
struct Pass {
    layer: DynamicMaskAttention,
    /// Keys and values of the carry: leaves.
    given: [Tensor<4>; 2],
    pass: PartPass,
    /// Gradient of the keys by later parts, those of the carry first.
    asked: Option<CarryGradient>,
    /// If the pass begins with leaves in place of the projections of its tokens.
    projected: Option<Projected>,
}

/// Queries, keys and values.
struct Projected {
    /// With the graph of the tokens.
    tracked: [Tensor<4>; 3],
    /// Leaves of the same values.
    leaves: [Tensor<4>; 3],
}

impl PartLayers {
    pub(super) fn in_time() -> Self {
        Self::reading(Reading::InTime {
            part: 0,
            is_known: false,
            has_graph: false,
        })
    }

    /// For the part of this number.
    pub(super) fn on_device(neighbours: Neighbours, parts: &Parts, part: usize) -> Self {
        Self {
            tokens: parts.len(),
            documents: Some(PartDocuments::new(parts.documents(), &parts.ranges()[part])),
            ..Self::reading(Reading::OnDevice(neighbours.into()))
        }
    }

    fn reading(reading: Reading) -> Self {
        Self {
            layers: Vec::new(),
            called: 0,
            tokens: 0,
            documents: None,
            reading,
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
    /// Errors of [`DynamicMaskAttention::check_in_parts`], or [`AttentionError`] if the tokens do not fit, or the device of
    /// another part does not answer.
    ///
    /// # Panics
    ///
    /// If parts call different numbers of layers.
    pub fn try_attend(
        &mut self,
        layer: &DynamicMaskAttention,
        x: Tensor<3>,
    ) -> Result<Tensor<3>, AttentionError> {
        self.called += 1;
        match self.reading {
            Reading::InTime { .. } => self.attend_in_time(layer, x),
            Reading::OnDevice(_) => self.attend_on_device(layer, x),
        }
    }

    /// Layers called for this part so far.
    pub(super) fn called(&self) -> usize {
        self.called
    }

    fn documents(&self) -> &PartDocuments {
        self.documents.as_ref().expect("a part has begun")
    }

    /// Begins a part, in time.
    pub(super) fn begin(&mut self, parts: &Parts, part: usize, has_graph: bool) {
        let count = self.layers.len();
        assert_eq!(self.called, count, "the number of layers of a part");
        self.reading = Reading::InTime {
            part,
            is_known: count > 0,
            has_graph,
        };
        self.called = 0;
        self.tokens = parts.len();
        self.documents = Some(PartDocuments::new(parts.documents(), &parts.ranges()[part]));
        if has_graph {
            for layer in &mut self.layers {
                layer.carries.truncate(part + 1);
                layer.selections.truncate(part + 1);
            }
        }
    }

    fn attend_in_time(
        &mut self,
        layer: &DynamicMaskAttention,
        x: Tensor<3>,
    ) -> Result<Tensor<3>, AttentionError> {
        let Reading::InTime {
            part,
            is_known,
            has_graph,
        } = self.reading
        else {
            unreachable!("parts in time")
        };
        let nth = self.called - 1;
        if nth == self.layers.len() {
            assert!(!is_known, "more layers than in the first part");
            let carries = vec![layer.try_carry(&x, self.tokens)?];
            self.layers.push(LayerInParts {
                carries,
                ..LayerInParts::default()
            });
        }
        let state = &self.layers[nth];
        let Carry { rows, ranks, seen } = state.carries[part].clone();
        let [q, k, v] = layer.try_project_part(&x, seen)?;
        let documents = self.documents();
        if !has_graph {
            // Ranks that autodiff tracked would have a graph, which it keeps until the next backward pass.
            let [q, k, v] = [q, k, v].map(Tensor::without_autodiff);
            let (x, carry) = (x.without_autodiff(), Carry { rows, ranks, seen });
            let pass = layer.try_select_part(x, [k, v], &carry, documents, None)?;
            let out = layer.try_attend_part(q, &pass)?;
            let state = &mut self.layers[nth];
            state.carries.push(pass.next_carry());
            state.selections.push(pass.selection);
            return Ok(out.detach());
        }
        let given = rows.map(leaf);
        // The last part has not been computed before.
        let selection = state.selections.get(part);
        let carry = Carry {
            rows: given.clone(),
            ranks,
            seen,
        };
        let pass = layer.try_select_part(x, [k, v], &carry, documents, selection)?;
        let out = layer.try_attend_part(q, &pass)?;
        let state = &mut self.layers[nth];
        let asked = state.asked.take();
        state.pass = Some(Pass {
            layer: layer.clone(),
            given,
            asked: asked.map(|(_, asked)| asked.of_keys(&pass)),
            pass,
            projected: None,
        });
        Ok(out)
    }

    fn attend_on_device(
        &mut self,
        layer: &DynamicMaskAttention,
        x: Tensor<3>,
    ) -> Result<Tensor<3>, AttentionError> {
        let none = layer.try_carry(&x, self.tokens)?;
        // Before the carry: all devices do this at the same time.
        let tracked = layer.try_project_part(&x, self.documents().start())?;
        let leaves = (tracked.clone()).map(|tensor| leaf(tensor.without_autodiff()));
        let Carry { rows, ranks, seen } = self.neighbours().carry(none)?;
        let given = rows.map(leaf);
        let carry = Carry {
            rows: given.clone(),
            ranks,
            seen,
        };
        let documents = self.documents();
        let [q, k, v] = leaves.clone();
        let pass = layer.try_select_part(x, [k, v], &carry, documents, None)?;
        // Before the attention: the next device waits for it.
        self.neighbours().give(|| pass.next_carry())?;
        let out = layer.try_attend_part(q, &pass)?;
        self.layers.push(LayerInParts {
            pass: Some(Pass {
                layer: layer.clone(),
                given,
                pass,
                asked: None,
                projected: Some(Projected { tracked, leaves }),
            }),
            ..LayerInParts::default()
        });
        Ok(out)
    }

    fn neighbours(&self) -> &Neighbours {
        match &self.reading {
            Reading::OnDevice(neighbours) => neighbours,
            Reading::InTime { .. } => unreachable!("parts on devices"),
        }
    }

    /// A zero whose backward pass brings what later parts ask of the keys and values of this one.
    pub(super) fn asked(&self) -> Option<Tensor<1>> {
        let passes = self.layers.iter().filter_map(|layer| layer.pass.as_ref());
        let asked = passes.filter_map(|pass| Some((pass, pass.asked.as_ref()?)));
        sum(asked.flat_map(|(pass, asked)| {
            let each = pass.pass.rows.iter().enumerate();
            each.map(|(at, rows)| resumed(rows.clone(), asked.of_part(at, rows)))
        }))
    }

    /// Takes the gradients of the carries, and keeps them for the part before. Returns a zero whose backward pass gives those
    /// of the scores' parameters; `None` if no score learns.
    pub(super) fn take_gradients(
        &mut self,
        gradients: &mut Gradients,
    ) -> Result<Option<Tensor<1>>, AttentionError> {
        let mut zeros = Vec::new();
        for state in &mut self.layers {
            let pass = state.pass.take().expect("the part called every layer");
            let layer = pass.layer.clone();
            let (asked, scores) = pass.take_gradients(gradients)?;
            zeros.extend(scores);
            state.asked = Some((layer, asked));
        }
        Ok(sum(zeros))
    }

    /// After all parts, a zero whose backward pass takes from the gradients of the scores' parameters what ranks that compete
    /// are charged; `None` if none do.
    pub(super) fn charged(&self) -> Result<Option<Tensor<1>>, AttentionError> {
        let asked = self.layers.iter().filter_map(|layer| layer.asked.as_ref());
        let zeros = asked.filter_map(|(layer, asked)| asked.charge.as_ref()?.of(layer).transpose());
        Ok(sum(zeros.collect::<Result<Vec<_>, _>>()?))
    }

    /// Takes the gradients of the last layer on this device that has not been asked yet, once those of later parts are here, and
    /// sends the part before its own. Returns zeros whose backward passes bring them to the layer's tokens, and to the parameters of
    /// the scores.
    pub(super) fn pass_back(
        &mut self,
        gradients: &mut Gradients,
    ) -> Result<[Option<Tensor<1>>; 2], AttentionError> {
        let mut pass = self
            .layers
            .pop()
            .and_then(|layer| layer.pass)
            .expect("a layer for each block");
        let asked = self.neighbours().asked()?;
        pass.asked = asked.map(|asked| asked.of_keys(&pass.pass));
        let tokens = pass.resumed(gradients);
        let layer = pass.layer.clone();
        let (asked, scores) = pass.take_gradients(gradients)?;
        let charged = match (&asked.charge, self.neighbours().is_first()) {
            (Some(charge), true) => charge.of(&layer)?,
            _ => None,
        };
        self.neighbours().ask(asked)?;
        Ok([tokens, sum(scores.into_iter().chain(charged))])
    }
}

impl Pass {
    /// A zero whose backward pass gives the projections of the tokens the gradients of their leaves, and what later parts ask.
    fn resumed(&self, gradients: &mut Gradients) -> Option<Tensor<1>> {
        let Projected { tracked, leaves } = self.projected.as_ref().expect("leaves");
        let each = tracked.iter().zip(leaves).enumerate();
        sum(each.filter_map(|(nth, (tracked, leaf))| {
            let own = leaf.grad_remove(gradients);
            let asked = match (&self.asked, nth) {
                (Some(asked), 1 | 2) => Some(asked.of_part(nth - 1, leaf)),
                _ => None,
            };
            let all = own
                .into_iter()
                .chain(asked)
                .reduce(|own, asked| own + asked);
            Some(resumed(tracked.clone(), all?))
        }))
    }

    /// The gradient of the carry, and a zero whose backward pass gives those of the scores' parameters; `None` if they do
    /// not learn.
    fn take_gradients(
        self,
        gradients: &mut Gradients,
    ) -> Result<(CarryGradient, Option<Tensor<1>>), AttentionError> {
        let Self {
            layer,
            given,
            pass,
            asked,
            ..
        } = self;
        let [batch, heads, first, _] = given[0].dims();
        let (asked, asked_of_ranks, charge) = match asked {
            Some(CarryGradient {
                rows,
                ranks,
                charge,
            }) => (Some(rows), Some(ranks), charge),
            None => (None, None, None),
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
        let Some(ranks) = pass.ranks else {
            let options = (&rows[0].device(), DType::F32);
            let ranks = Tensor::zeros([batch, heads, first, 2], options);
            return Ok((
                CarryGradient {
                    rows,
                    ranks,
                    charge,
                },
                None,
            ));
        };
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
        let scores = resumed(layer.try_projected_scores(tokens.clone())?, gradient);
        // Their parameters may be frozen.
        let scores = Some(scores).filter(Tensor::is_tracked);
        let charge = layer.competes().then(|| {
            let own = Charge::sums(gain, positions, &tokens);
            match charge {
                Some(later) => later.plus(own),
                None => own,
            }
        });
        let ranks = all.narrow(2, 0, first);
        Ok((
            CarryGradient {
                rows,
                ranks,
                charge,
            },
            scores,
        ))
    }
}

/// A leaf of autodiff.
fn leaf(rows: Tensor<4>) -> Tensor<4> {
    rows.autodiff().set_require_grad(true)
}

/// Gradients of the ranks of all keys in a part: the sum of a head, and gradient and positions of each key, `[.., 2]`.
fn learned(ranks: PartRanks, gradients: &mut Gradients) -> (Tensor<3>, Tensor<4>) {
    let values = ranks.all.clone().without_autodiff();
    let gradient = ranks.all.grad_remove(gradients);
    let gradient = gradient.unwrap_or_else(|| values.zeros_like());
    // Sinks learn nothing.
    let gradient = gradient.mask_fill(values.equal_elem(f32::INFINITY), 0);
    let gain = row_sums(gradient.clone());
    let both = [gradient, ranks.positions].map(|numbers| numbers.unsqueeze_dim::<4>(3));
    (gain, Tensor::cat(both.into(), 3))
}

pub(super) fn sum(zeros: impl IntoIterator<Item = Tensor<1>>) -> Option<Tensor<1>> {
    zeros.into_iter().reduce(|zeros, zero| zeros + zero)
}
