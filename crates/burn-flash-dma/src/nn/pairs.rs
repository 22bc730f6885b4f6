//! The layer under a mask that differs between queries: the same rule, applied per pair.

use super::attention::DynamicMaskAttention;
use super::input::Tokens;
use crate::documents::Documents;
use crate::functions::masked::MaskedAttention;
use crate::functions::selection::Origin;
use crate::functions::sink::try_learnable_sink;
use crate::mask::polarity::AttentionMask;
use crate::mask::ranges::KeyRanges;
use crate::validate::is_tracked;
use burn::tensor::{Bool, Device, Tensor, TensorData};
use flash_dma_problem::{AttentionError, AttentionOptions, ScoreRole, SelectionRule};

/// Replaces NaN in a ranking: below every number except −∞.
const LEAST: f32 = f32::MIN;

impl DynamicMaskAttention {
    /// Attention of encoded q over k and v, restricted to the keys that the layer's rule keeps among those `mask`
    /// shows each query. `scores` are −∞ for hidden keys; `options` are the layer's for this call.
    pub(super) fn attend_pairs(
        &self,
        [q, k, v]: [Tensor<4>; 3],
        scores: Tensor<3>,
        tokens: &Tokens,
        mask: AttentionMask,
        mut options: AttentionOptions,
    ) -> Result<Tensor<4>, AttentionError> {
        let adds_scores = self.score_role() == ScoreRole::RankAndBias;
        if !adds_scores && is_tracked(&scores) {
            let what = "training scores that only rank";
            return Err(AttentionError::MaskedSelection { what });
        }
        let rule = (options.keep_window.take()).map(|window| self.rule(window));
        if let (Some(what), Some(_), true) = (self.ranked_keys(), &rule, is_tracked(&scores)) {
            return Err(AttentionError::MaskedSelection { what });
        }
        let documents = tokens.documents.as_ref();
        let mask = seen(&scores, documents, options.causal, mask)?;
        let mask = match rule {
            None => mask,
            Some(rule) => kept(scores.clone(), documents, &rule, mask),
        };
        let attention = MaskedAttention::new(q, k, v).mask(mask).options(options);
        let attention = match adds_scores {
            true => attention.bias(scores.unsqueeze_dim::<4>(2)),
            false => attention,
        };
        match &self.sink_logits {
            None => attention.try_forward(),
            Some(logits) => {
                let (out, lse) = attention.try_forward_with_lse()?;
                Ok(try_learnable_sink(out, lse, logits.val())?.0)
            }
        }
    }
}

/// The pairs `mask` shows, without keys of score −∞, of other documents or after the query: `[batch, kv_heads, len,
/// len]`.
fn seen(
    scores: &Tensor<3>,
    documents: Option<&Documents>,
    causal: bool,
    mask: AttentionMask,
) -> Result<AttentionMask, AttentionError> {
    let device = scores.device();
    let [_, _, len] = scores.dims();
    let shown = scores.clone().detach().not_equal_elem(f32::NEG_INFINITY);
    let mask = mask.and(AttentionMask::visible(shown.unsqueeze_dim(2)));
    Ok(match documents {
        None if causal => mask.and(AttentionMask::causal([len, len], &device)),
        None => mask,
        Some(documents) => {
            let ranges = KeyRanges::try_packed([documents, documents], causal, &device)?;
            mask.and(ranges.into_mask(len))
        }
    })
}

/// The pairs that a rule keeps among those each query sees.
fn kept(
    scores: Tensor<3>,
    documents: Option<&Documents>,
    rule: &SelectionRule,
    seen: AttentionMask,
) -> AttentionMask {
    let device = scores.device();
    let [batch, heads, len] = scores.dims();
    let ranks = scores.detach();
    let ranks = ranks.clone().mask_fill(ranks.is_nan(), LEAST);
    let ranks = match rule.sinks {
        0 => ranks,
        _ => {
            let sinks = sinks(documents, rule.sinks, [batch, len], &device);
            ranks.mask_fill(sinks.expand([batch, heads, len]), f32::INFINITY)
        }
    };
    let best = |among| AttentionMask::top(ranks.unsqueeze_dim(2), rule.ranked(), len, Some(among));
    if rule.recent == 0 {
        return best(seen);
    }
    let recent = AttentionMask::sliding_window([len, len], rule.recent, &device);
    let older = AttentionMask::hidden(recent.clone().into_visible());
    let recent = recent.and(seen.clone());
    match rule.ranked() {
        0 => recent,
        _ => recent.or(best(older.and(seen))),
    }
}

/// True for sinks, `[batch, 1, len]`.
fn sinks(
    documents: Option<&Documents>,
    sinks: usize,
    [batch, len]: [usize; 2],
    device: &Device,
) -> Tensor<3, Bool> {
    let origin = Origin {
        sinks,
        documents: documents.cloned(),
        ..Origin::default()
    };
    let values = (0..batch).flat_map(|sequence| origin.sinks_of(sequence, len));
    Tensor::from_data(TensorData::new(values.collect(), [batch, 1, len]), device)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::tensor::Distribution;

    /// Keys that query `i` of one head keeps, by definition; its document begins at `start`.
    fn by_definition(
        (scores, seen): (&[f32], &[bool]),
        start: usize,
        rule: &SelectionRule,
        i: usize,
    ) -> Vec<bool> {
        let hidden = |j: usize| !seen[j] || scores[j] == f32::NEG_INFINITY;
        let border = (i + 1).saturating_sub(rule.recent).max(start);
        let mut older: Vec<usize> = (start..border).filter(|&j| !hidden(j)).collect();
        // Sinks first, whatever their scores; NaN last.
        let place = |j: usize| match scores[j] {
            _ if j < start + rule.sinks => f32::NEG_INFINITY,
            score if score.is_nan() => f32::INFINITY,
            score => -score,
        };
        older.sort_by(|&a, &b| place(a).total_cmp(&place(b)));
        older.truncate(rule.window - rule.recent);
        let recent = (border..=i).filter(|&j| !hidden(j));
        let mut kept = vec![false; scores.len()];
        older.into_iter().chain(recent).for_each(|j| kept[j] = true);
        kept
    }

    #[test]
    fn the_kept_pairs_are_those_of_the_definition() {
        let device = Device::flex();
        let (lengths, len, heads) = ([14, 0, 9, 17], 40, 2);
        let documents = Documents::from_lengths([lengths.to_vec(), vec![len]]);
        let random = Tensor::<3>::random([2, heads, len], Distribution::Default, &device);
        // With ties, a hidden key and a NaN.
        let scores = (random * 6.0).round();
        let mut values: Vec<f32> = scores.into_data().iter().collect();
        (values[5], values[20]) = (f32::NEG_INFINITY, f32::NAN);
        let data = TensorData::new(values.clone(), [2, heads, len]);
        let scores = Tensor::<3>::from_data(data, &device);
        let coin = Tensor::<4>::random([1, heads, len, len], Distribution::Default, &device);
        let mask = coin.greater_elem(0.3);
        let shown: Vec<bool> = mask.clone().into_data().iter().collect();
        for [window, recent, sinks] in [[5, 0, 0], [7, 3, 2], [4, 4, 0], [6, 0, 3], [100, 1, 1]] {
            let rule = SelectionRule {
                window,
                recent,
                sinks,
            };
            let mask = AttentionMask::visible(mask.clone());
            let seen = seen(&scores, Some(&documents), true, mask).expect("they fit");
            let kept = kept(scores.clone(), Some(&documents), &rule, seen).into_visible();
            let kept: Vec<bool> = kept.into_data().iter().collect();
            for (row, kept) in kept.chunks(len).enumerate() {
                let (head, i) = (row / len, row % len);
                let own = documents.lengths()[head / heads].iter();
                let borders = own.scan(0, |end, n| {
                    *end += n;
                    Some(*end)
                });
                let start = borders.filter(|&border| border <= i).max().unwrap_or(0);
                let shown = &shown[(head % heads * len + i) * len..][..len];
                let scores = &values[head * len..(head + 1) * len];
                let expected = by_definition((scores, shown), start, &rule, i);
                assert_eq!(kept, expected, "{rule:?}, row {row}");
            }
        }
    }
}
