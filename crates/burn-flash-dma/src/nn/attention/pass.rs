//! A pass over whole sequences: projections, scores, and attention to the keys that they select.

use super::DynamicMaskAttention;
use crate::documents::Documents;
use crate::functions::attention::Attention;
use crate::functions::product::try_product;
use crate::functions::qkv::try_split_heads;
use crate::functions::selection::Intervals;
use crate::functions::selector::Selector;
use crate::nn::by_position::First;
use crate::nn::heads::{
    Starts, check_positions, check_type, encode, encode_by, merge, project, split,
};
use crate::nn::input::{DynamicMaskInput, Tokens};
use crate::nn::scorer::Learns;
use crate::validate::{check_shape, element_type, is_tracked};
use burn::nn::{Linear, RmsNorm};
use burn::tensor::{DType, Tensor};
use flash_dma_problem::{AttentionError, AttentionOptions, Dropout, ScoreRole, TensorName};

impl DynamicMaskAttention {
    /// Refuses tokens of another width or element type.
    pub(in crate::nn) fn check_tokens(&self, x: &Tensor<3>) -> Result<(), AttentionError> {
        let shape @ [batch, len, _] = x.dims();
        check_shape(TensorName::Tokens, &shape, &[batch, len, self.d_model])?;
        check_type(x, &self.q_norm)
    }

    pub(super) fn tokens(&self, input: DynamicMaskInput) -> Result<Tokens, AttentionError> {
        let [batch, len, _] = input.x.dims();
        self.check_tokens(&input.x)?;
        check_positions(&self.rope, len)?;
        if let Some(documents) = &input.documents {
            documents.check([batch, self.n_kv_heads, len])?;
            if !self.options.causal {
                return Err(AttentionError::SelectionNotCausal);
            }
        }
        input.try_into_tokens(self.n_kv_heads)
    }

    /// Scores of a pass over whole sequences, with the values `v`.
    pub(super) fn scores_with_values(
        &self,
        tokens: &Tokens,
        v: &Tensor<4>,
    ) -> Result<Tensor<3>, AttentionError> {
        let (x, learns) = (&tokens.x, self.learns(tokens));
        let make = || self.scores_from(x, First::At(0), learns, || Ok(v.clone()));
        self.unless_idle(x, learns, make)
    }

    /// The scores from `make`, or zeros if scores only rank and there is nothing to rank or learn.
    pub(in crate::nn) fn unless_idle(
        &self,
        x: &Tensor<3>,
        learns: Learns,
        make: impl FnOnce() -> Result<Tensor<3>, AttentionError>,
    ) -> Result<Tensor<3>, AttentionError> {
        let device = x.device();
        let ranks = self.score_role() == ScoreRole::Rank;
        let learns_nothing = learns == Learns::Nothing || !device.is_autodiff();
        if ranks && learns_nothing && self.ranking_window().is_none() {
            let [batch, len, _] = x.dims();
            let shape = [batch, self.n_kv_heads, len];
            return Ok(Tensor::zeros(shape, (&device, DType::F32)));
        }
        make()
    }

    /// Scores of tokens, padding included, with what depends on positions (counted from `first`). The values are made
    /// only for the kind of scores that reads them.
    pub(in crate::nn) fn scores_from(
        &self,
        x: &Tensor<3>,
        first: First<'_>,
        learns: Learns,
        values: impl FnOnce() -> Result<Tensor<4>, AttentionError>,
    ) -> Result<Tensor<3>, AttentionError> {
        let (scorer, role) = (&self.scorer.0, self.score_role());
        let scores = scorer.scores(role, learns, || x.clone(), values)?;
        Ok(match &self.by_position {
            Some(by_position) => by_position.added(scores, first, self.ranking_window()),
            None => scores,
        })
    }

    pub(super) fn scores_of(&self, tokens: &Tokens) -> Result<Tensor<3>, AttentionError> {
        let values = || {
            let v = project(&self.v_proj, &tokens.x, self.n_kv_heads)?;
            Ok(v.swap_dims(1, 2))
        };
        let learns = self.learning.by_themselves();
        Ok(tokens.hidden(self.scores_from(&tokens.x, First::At(0), learns, values)?))
    }

    /// Parts that learn through the scores in a pass over whole sequences.
    fn learns(&self, tokens: &Tokens) -> Learns {
        if tokens.pairs.is_some() {
            // Learning from ranks is refused under such a mask.
            return self.learning.by_themselves();
        }
        // Where nothing is evicted, only kept keys learn from ranks.
        let learns = self.learning.kept || !self.keeps_all(tokens);
        let window = self.options.keep_window.filter(|_| learns);
        self.learning.in_training(self.kind, window)
    }

    pub(super) fn attend(
        &self,
        [q, k, v]: [Tensor<4>; 3],
        scores: Tensor<3>,
        tokens: &Tokens,
        dropout: Option<Dropout>,
    ) -> Result<Tensor<3>, AttentionError> {
        let options = self.options.with_dropout(dropout);
        let scores = tokens.hidden(scores);
        if let Some(mask) = tokens.pairs.clone() {
            let out = self.attend_pairs([q, k, v], scores, tokens, mask, options)?;
            return Ok(tokens.zeroed(merge(out, &self.o_proj)?));
        }
        if self.evicts_nothing(&scores, tokens) {
            // There may be nothing to select.
            let scores = match self.score_role() {
                ScoreRole::RankAndBias => scores,
                ScoreRole::Rank => only_hiding(scores),
            };
            let attention = Attention::new(q, k, v).scores(scores).options(options);
            return Ok(tokens.zeroed(merge(self.with_sink(attention)?, &self.o_proj)?));
        }
        let selector = self.selector(tokens.documents.clone());
        let intervals = selector.try_select(scores.clone())?;
        self.attend_to(&intervals, [q, k, v], scores, tokens, options)
    }

    /// True if every query keeps all keys it sees and no kept key learns from its rank.
    fn evicts_nothing(&self, scores: &Tensor<3>, tokens: &Tokens) -> bool {
        let learns = self.options.keep_window.is_some() && self.learning.kept;
        self.keeps_all(tokens) && !(learns && is_tracked(scores))
    }

    /// True if every query keeps all keys it sees.
    fn keeps_all(&self, tokens: &Tokens) -> bool {
        let [_, len, _] = tokens.x.dims();
        let window = self.options.keep_window.unwrap_or(usize::MAX);
        tokens.documents.is_none() && window >= len
    }

    /// The output and its selection, the given one if any.
    pub(crate) fn select_and_attend(
        &self,
        input: DynamicMaskInput,
        given: Option<&Intervals>,
        dropout: Option<Dropout>,
    ) -> Result<(Tensor<3>, Intervals), AttentionError> {
        let tokens = self.tokens(input)?;
        if tokens.pairs.is_some() {
            let what = "a selection to use again";
            return Err(AttentionError::MaskedSelection { what });
        }
        let rows @ [_, _, v] = &self.project(tokens.x.clone(), Starts::Positions(&[]))?;
        let scores = tokens.hidden(self.scores_with_values(&tokens, v)?);
        let intervals = match given {
            Some(intervals) => intervals.clone().ranked_by(&scores),
            None => {
                // Track the scores here: the selection may be reused, with its runners-up, when they are tracked.
                let tracked = match scores.device().is_autodiff() {
                    true => scores.clone().detach().set_require_grad(true),
                    false => scores.clone(),
                };
                let selector = self.selector(tokens.documents.clone());
                selector.try_select(tracked)?.ranked_by(&scores)
            }
        };
        let options = self.options.with_dropout(dropout);
        let out = self.attend_to(&intervals, rows.clone(), scores.clone(), &tokens, options)?;
        Ok((out, intervals.ranked_by(&scores.detach())))
    }

    fn attend_to(
        &self,
        intervals: &Intervals,
        [q, k, v]: [Tensor<4>; 3],
        scores: Tensor<3>,
        tokens: &Tokens,
        options: AttentionOptions,
    ) -> Result<Tensor<3>, AttentionError> {
        let attention = Attention::new(q, k, v).options(options);
        let out = match self.score_role() {
            ScoreRole::RankAndBias => {
                self.with_sink(attention.scores(scores).intervals(intervals))?
            }
            ScoreRole::Rank => self.with_sink(attention.intervals(intervals))?,
        };
        Ok(tokens.zeroed(merge(out, &self.o_proj)?))
    }

    /// Output of an attention, with the layer's sink logits if it has any.
    pub(super) fn with_sink<S>(
        &self,
        attention: Attention<S>,
    ) -> Result<Tensor<4>, AttentionError> {
        match &self.sink_logits {
            None => attention.try_forward(),
            Some(logits) => Ok(attention.try_forward_with_sink(logits.val())?.0),
        }
    }

    pub(super) fn selector(&self, documents: Option<Documents>) -> Selector {
        let selector = match self.options.keep_window {
            Some(window) => {
                let rule = self.rule(window);
                let selector = Selector::top(window).recent(rule.recent).sinks(rule.sinks);
                self.learning.taught(selector, window)
            }
            None => Selector::top(usize::MAX),
        };
        match documents {
            Some(documents) => selector.documents(documents),
            None => selector,
        }
    }

    /// q, k and v of `[batch, len, d_model]`, with q and k normalised and rotated: `[batch, heads, len, head_dim]`.
    pub(in crate::nn) fn project(
        &self,
        x: Tensor<3>,
        starts: Starts<'_>,
    ) -> Result<[Tensor<4>; 3], AttentionError> {
        let [q, k, v] = self.heads(x)?;
        Ok([
            self.place(q, &self.q_norm, starts)?,
            self.place(k, &self.k_norm, starts)?,
            v.swap_dims(1, 2),
        ])
    }

    /// q, k and v of `[batch, len, d_model]`, straight from the projections: `[batch, len, heads, head_dim]`.
    fn heads(&self, x: Tensor<3>) -> Result<[Tensor<4>; 3], AttentionError> {
        let layers = [&self.q_proj, &self.k_proj, &self.v_proj];
        let heads = [self.n_heads, self.n_kv_heads, self.n_kv_heads];
        match joint_weight(layers, &x) {
            Some(weight) => {
                let all = split(try_product(x, weight)?, heads.iter().sum());
                try_split_heads(all, heads)
            }
            None => {
                let [q, k, v] = [0, 1, 2].map(|n| project(layers[n], &x, heads[n]));
                Ok([q?, k?, v?])
            }
        }
    }

    /// Normalises `[batch, len, heads, head_dim]` and rotates it by the positions from `starts` on: `[batch, heads,
    /// len, head_dim]`.
    fn place(
        &self,
        heads: Tensor<4>,
        norm: &Option<RmsNorm>,
        starts: Starts<'_>,
    ) -> Result<Tensor<4>, AttentionError> {
        let [batch, _, _, _] = heads.dims();
        let starts = match starts {
            Starts::Positions(starts) => starts,
            Starts::Angles(angles) => return encode_by(heads, norm, angles),
        };
        let at = |heads, start| encode(heads, norm, &self.rope, start);
        let start = starts.first().copied().unwrap_or(0);
        // A cache with another number of sequences is refused later.
        if starts.len() != batch || starts.iter().all(|&other| other == start) {
            return at(heads, start);
        }
        let sequence =
            |(index, &start): (usize, &usize)| at(heads.clone().narrow(0, index, 1), start);
        let placed: Result<Vec<_>, _> = starts.iter().enumerate().map(sequence).collect();
        Ok(Tensor::cat(placed?, 0))
    }
}

/// Weights of several projections of `x` side by side, `[d_model, ..]`, for a single product. `None` if that does not
/// pay or is not equivalent: few tokens, a bias, differing or unsupported element types.
fn joint_weight<const N: usize>(layers: [&Linear; N], x: &Tensor<3>) -> Option<Tensor<2>> {
    let [batch, len, d_model] = x.dims();
    let weights = layers.map(|layer| layer.weight.val());
    let dtype = weights[0].dtype();
    let alike = layers.iter().all(|layer| layer.bias.is_none())
        && weights.iter().all(|weight| weight.dtype() == dtype)
        && element_type(TensorName::Weight, &weights[0]).is_ok()
        && element_type(TensorName::Tokens, x).is_ok();
    // Rounded first: fewer bytes are laid side by side, and fewer are split for the gradients.
    let joint = || Tensor::cat(weights.map(|weight| weight.cast(x.dtype())).into(), 1);
    // With fewer tokens, copying the weights costs more than reading the tokens again.
    (alike && batch * len >= d_model).then(joint)
}

/// Effect of scores that only rank where nothing is evicted: −∞ hides a key, all others add nothing.
fn only_hiding(scores: Tensor<3>) -> Tensor<3> {
    let scores = scores.detach();
    let hidden = scores.clone().equal_elem(f32::NEG_INFINITY);
    scores.zeros_like().mask_fill(hidden, f32::NEG_INFINITY)
}
