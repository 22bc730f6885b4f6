//! Scores of keys.

use crate::fallback::scores as fallback;
use crate::types::OptionalFloat;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};

/// Maximum number of tokens that count as a step over a cache: their scores are one operation, and their norms wait
/// for nothing.
pub(crate) const FEW_TOKENS: usize = 64;

/// Scores of a few tokens in one operation, as for a step over a cache.
///
/// Most users want [`zoh_scores`](crate::zoh_scores()), which validates, and uses this operation where it pays. The
/// default body is plain Burn operations, which autodiff differentiates.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait ScoreOps: Backend {
    /// `exp(a * softplus(values . dt_projᵀ + bias))`, `[batch, kv_heads, len]` in f32: `values` `[batch, kv_heads,
    /// len, head_dim]`, `dt_proj` `[kv_heads, kv_heads * head_dim]`, `bias` and `a` `[kv_heads]`, each f32, f16 or
    /// bf16. No size is 0, and arithmetic is f32.
    #[fusion(dtype = burn::tensor::DType::F32, shape = {
        let [batch, heads, len, _] = values.dims();
        [batch, heads, len].into()
    })]
    fn zoh_scores_of_few(
        values: FloatTensor<Self>,
        dt_proj: FloatTensor<Self>,
        #[extension_type] bias: OptionalFloat<Self>,
        a: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        fallback::zoh::<Self>(values, dt_proj, bias, a)
    }
}
