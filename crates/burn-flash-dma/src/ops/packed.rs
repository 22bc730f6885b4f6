//! q, k and v in one tensor.

use crate::fallback::packed as fallback;
use crate::types::PackedRows;
#[cfg(feature = "fusion")]
use crate::types::{OptionalFloatMetadata, PackedRowsMetadata};
#[cfg(feature = "fusion")]
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};

/// Parts of a packed tensor `[batch, len, parts, heads, head_dim]`: two, k and v, or three, with q before them.
///
/// An engine that gets parts of one tensor returns their gradients as parts of one buffer, so that neither operation
/// has to copy. The default bodies copy where the backend's slices do.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion"),
)]
pub trait PackedOps: Backend {
    /// The parts of `x`, `[batch, heads, len, head_dim]` each: views if the backend has them. Under autodiff their
    /// gradients are joined.
    #[fusion(meta = |x| {
        let [batch, len, parts, heads, head_dim] = x.shape.dims();
        let part = TensorSpec::new([batch, heads, len, head_dim].into(), x.dtype);
        PackedRowsMetadata {
            q: match parts {
                3 => OptionalFloatMetadata::Some(part.clone()),
                _ => OptionalFloatMetadata::None,
            },
            k: part.clone(),
            v: part,
        }
    })]
    fn packed_split(x: FloatTensor<Self>) -> PackedRows<Self> {
        fallback::split::<Self>(x)
    }

    /// The packed tensor of such parts: without a copy if they lie in one buffer, at equal distances and in order.
    /// Under autodiff a tracked part panics with the text of
    /// [`AttentionError::SecondOrder`](crate::AttentionError::SecondOrder).
    #[fusion(meta = |rows| {
        let [batch, heads, len, head_dim] = rows.k.shape.dims();
        let parts = match rows.q {
            OptionalFloatMetadata::None => 2,
            OptionalFloatMetadata::Some(_) => 3,
        };
        TensorSpec::new([batch, len, parts, heads, head_dim].into(), rows.k.dtype)
    })]
    fn packed_join(#[extension_type] rows: PackedRows<Self>) -> FloatTensor<Self> {
        fallback::join::<Self>(rows)
    }
}
