//! The cache of the drop-in attention.

use super::input::{MhaInput, rows_from};
use super::module::MultiHeadAttention;
use super::output::MhaOutput;
use crate::functions::product::try_linear;
use crate::nn::heads::merge;
use crate::validate::check_shape;
use burn::tensor::{DType, Tensor};
use flash_dma_problem::{AttentionError, TensorName};

/// Keys, values and outputs of the tokens so far, for decoding. Burn's cache, without the queries.
///
/// It grows with the sequence. [`DynamicMaskAttention`](crate::nn::DynamicMaskAttention) has caches of constant size.
#[derive(Clone, Debug)]
pub struct MhaCache {
    /// True if keys and values of the first call are kept for good (cross-attention).
    context: bool,
    rows: Option<[Tensor<4>; 2]>,
    output: Option<Tensor<3>>,
}

impl MhaCache {
    /// An empty cache for a sequence that attends to itself.
    #[must_use]
    pub fn autoregressive() -> Self {
        Self {
            context: false,
            rows: None,
            output: None,
        }
    }

    /// An empty cache for a sequence that attends to another one, whose keys and values come from the first call.
    #[must_use]
    pub fn autoregressive_cross_attention() -> Self {
        Self {
            context: true,
            ..Self::autoregressive()
        }
    }

    /// Refuses tokens of another type than the earlier ones.
    fn check(&self, input: &MhaInput) -> Result<(), AttentionError> {
        let fits = |name, tokens: &Tensor<3>, expected: DType| match tokens.dtype() == expected {
            true => Ok(()),
            false => Err(AttentionError::ElementType {
                tensor: name,
                expected: expected.name().into(),
                actual: tokens.dtype().name().into(),
            }),
        };
        if let Some(output) = &self.output {
            fits(TensorName::Query, &input.query, output.dtype())?;
        }
        match &self.rows {
            Some([k, v]) if !self.context => {
                fits(TensorName::Key, &input.key, k.dtype())?;
                fits(TensorName::Value, &input.value, v.dtype())
            }
            _ => Ok(()),
        }
    }

    fn queries(&self) -> usize {
        self.output.as_ref().map_or(0, |output| output.dims()[1])
    }
}

impl MultiHeadAttention {
    twin! {
        /// [`forward`](Self::forward) that computes only the rows the cache does not have. As with Burn's, input and
        /// context hold the whole sequence so far. Several new tokens, such as a prompt, see the keys that the masks
        /// leave; use [`MhaInput::causal`].
        pub fn forward_cache(&self, input: MhaInput, cache: &mut MhaCache) -> MhaOutput
            = Self::try_forward_cache;
    }

    /// Like [`forward_cache`](Self::forward_cache), but returns the error.
    ///
    /// # Errors
    ///
    /// Errors of [`try_forward`](Self::try_forward), or [`AttentionError`] if the input has another batch than the
    /// cache, or no new token. The cache is unchanged then.
    pub fn try_forward_cache(
        &self,
        input: MhaInput,
        cache: &mut MhaCache,
    ) -> Result<MhaOutput, AttentionError> {
        self.check(&input)?;
        cache.check(&input)?;
        let [batch, q_len, d_model] = input.query.dims();
        let seen = cache.queries();
        if let Some(output) = &cache.output {
            let held = output.dims();
            check_shape(
                TensorName::Tokens,
                &[batch, q_len, d_model],
                &[held[0], q_len, held[2]],
            )?;
            new_tokens(seen, q_len, 1)?;
        }
        let rows = match &cache.rows {
            Some(rows) if cache.context => rows.clone(),
            None => self.keys_and_values(&input, 0)?,
            Some([k, v]) => {
                let ([_, _, held, _], [_, k_len, _]) = (k.dims(), input.key.dims());
                match new_tokens(held, k_len, 0)? {
                    0 => [k.clone(), v.clone()],
                    _ => {
                        let [new_k, new_v] = self.keys_and_values(&input, held)?;
                        [(k, new_k), (v, new_v)]
                            .map(|(old, new)| Tensor::cat(vec![old.clone(), new], 2))
                    }
                }
            }
        };
        let query = rows_from(input.query, seen);
        let q = self.heads(try_linear(&self.query, query)?);
        let [k, v] = rows.clone();
        let (out, logits) = self.attend([q, k, v], input.hidden.rows_from(seen))?;
        let context = merge(out, &self.output)?;
        let context = match cache.output.take() {
            Some(output) => Tensor::cat(vec![output, context], 1),
            None => context,
        };
        cache.rows = Some(rows);
        cache.output = Some(context.clone());
        Ok(MhaOutput { context, logits })
    }

    fn keys_and_values(
        &self,
        input: &MhaInput,
        first: usize,
    ) -> Result<[Tensor<4>; 2], AttentionError> {
        let rows = |layer, tokens: &Tensor<3>| {
            let tokens = rows_from(tokens.clone(), first);
            Ok(self.heads(try_linear(layer, tokens)?))
        };
        Ok([
            rows(&self.key, &input.key)?,
            rows(&self.value, &input.value)?,
        ])
    }
}

/// How many of `len` tokens a cache that holds `held` lacks, at least `least`.
fn new_tokens(held: usize, len: usize, least: usize) -> Result<usize, AttentionError> {
    if held + least <= len {
        return Ok(len - held);
    }
    Err(AttentionError::WholeSequence {
        held,
        expected: held + least,
        tokens: len,
    })
}
