//! Host side of tile plans.

use super::args::{MaskBits, check_broadcast};
use super::pack::{count_kernel, pack_kernel};
use crate::scratch::one_unit_each;
use crate::tile::{Layout, address_type, check_tensor};
use cubecl::client::Client;
use cubecl::ir::{ElemType, UIntKind};
use cubecl::prelude::*;
use flash_dma_problem::{AttentionError, PlanGeometry, TensorName};

/// Elements that are read at once where the mask allows it.
const VECTOR: usize = 16;

/// Writes the tile plan of a mask, in two launches. `mask` has the geometry's shape, any strides, and elements of
/// `size` bytes (1 or 4); one that is not 0 shows its key, or hides it if `hidden`. `plan` is overwritten.
///
/// # Errors
///
/// [`AttentionError`] if a tensor does not fit the geometry. Nothing is launched then.
pub fn plan(
    client: &Client,
    geometry: &PlanGeometry,
    mask: TensorBinding,
    size: usize,
    hidden: bool,
    plan: MaskBits,
) -> Result<(), AttentionError> {
    let element = match size {
        1 => ElemType::UInt(UIntKind::U8),
        4 => ElemType::UInt(UIntKind::U32),
        _ => {
            return Err(AttentionError::ElementType {
                tensor: TensorName::Mask,
                expected: "of 1 or 4 bytes".into(),
                actual: format!("of {size}"),
            });
        }
    };
    check_broadcast(TensorName::Mask, &mask, &geometry.mask, size)?;
    let (bits_shape, counts_shape) = (geometry.bits_shape(), geometry.counts_shape());
    let MaskBits { bits, counts } = plan;
    let contiguous = Layout::Contiguous;
    check_tensor(TensorName::Plan, &bits, &bits_shape, 4, contiguous)?;
    check_tensor(TensorName::Plan, &counts, &counts_shape, 4, contiguous)?;
    let words: usize = bits_shape.iter().product();
    let items: usize = counts_shape.iter().product();
    let vector = if is_vector(&mask, size) { VECTOR } else { 1 };
    // Only a mask with a row for each query has words that causal masking hides.
    let causal = geometry.causal && geometry.mask[2] == geometry.q_len;
    let shift = geometry.k_len as i64 - geometry.q_len as i64;
    let address = address_type(&[&mask], size).max(address_type(&[&bits, &counts], 4));
    if words > 0 {
        let (count, dim) = one_unit_each(client, words);
        // SAFETY: units past the words return; the buffers were checked to hold what is indexed.
        unsafe {
            pack_kernel::launch_unchecked(
                client,
                count,
                dim,
                address,
                vector,
                mask.into_tensor_arg(),
                bits.clone().into_tensor_arg(),
                words,
                shift as i32,
                hidden,
                causal,
                geometry.mask[3] == 1,
                element,
            );
        }
    }
    if items > 0 {
        let (count, dim) = one_unit_each(client, items);
        // SAFETY: as above.
        unsafe {
            count_kernel::launch_unchecked(
                client,
                count,
                dim,
                address,
                bits.into_tensor_arg(),
                counts.into_tensor_arg(),
                items,
                geometry.q_len,
                geometry.k_len,
                geometry.causal,
            );
        }
    }
    Ok(())
}

/// Whether words of the mask are whole vectors, of which rows begin at multiples.
fn is_vector(mask: &TensorBinding, size: usize) -> bool {
    let offset = mask.handle.offset_start.unwrap_or(0) as usize;
    size == 1
        && mask.shape[3].is_multiple_of(32)
        && mask.strides[3] == 1
        && offset.is_multiple_of(VECTOR)
        && (mask.strides[..3].iter().zip(&mask.shape[..3]))
            .all(|(stride, &len)| len <= 1 || stride.is_multiple_of(VECTOR))
}
