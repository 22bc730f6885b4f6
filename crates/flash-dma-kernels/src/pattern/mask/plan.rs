//! Host side of tile plans.

use crate::host::check::{Layout, address_type, begins_at, check_tensor};
use crate::host::range::range;
use crate::host::scratch::{cubes, one_unit_each};
use crate::pattern::mask::args::MaskBits;
use crate::pattern::mask::pack::{count_kernel, pack_kernel};
use crate::pattern::mask::pack_rows::{RowsBlueprint, RowsSizesLaunch, rows_kernel};
use crate::pattern::mask::ranges::{KeyRangesLaunch, QUERIES, RangeSizesLaunch, ranges_kernel};
use crate::pattern::position::position_shift;
use cubecl::client::Client;
use cubecl::ir::features::TypeUsage;
use cubecl::ir::{ElemType, UIntKind};
use cubecl::prelude::*;
use flash_dma_problem::{AttentionError, PlanGeometry, TensorName};

/// Bytes that are read at once where the mask allows it.
const VECTOR: usize = 16;
/// The most units per cube that packs rows: 4096 keys.
const UNITS: usize = 128;

/// Writes the tile plan of a mask. `mask` has the geometry's shape, any strides, and elements of `size` bytes (1 or 4);
/// a nonzero element shows its key, or hides it if `hidden`. `plan` is overwritten.
///
/// A mask with all queries and keys whose last axis is contiguous is read once, in one launch, which is fastest if it
/// has a multiple of 32 keys. Any other mask is packed and then counted.
///
/// # Errors
///
/// [`AttentionError`] if a tensor does not fit the geometry, or the mask has one-byte elements without such rows, and
/// the device has no byte buffers (WGSL has none). Nothing is launched in that case.
pub fn plan(
    client: &Client,
    geometry: &PlanGeometry,
    mask: TensorBinding,
    size: usize,
    hidden: bool,
    plan: MaskBits,
) -> Result<(), AttentionError> {
    if size != 1 && size != 4 {
        return Err(AttentionError::ElementType {
            tensor: TensorName::Mask,
            expected: "of 1 or 4 bytes".into(),
            actual: format!("of {size}"),
        });
    }
    let any = Layout::Broadcast;
    check_tensor(TensorName::Mask, &mask, &geometry.mask, size, any)?;
    plan.check(geometry)?;
    let units = cube_units(client, geometry);
    let of_rows = units > 1 && is_rows(geometry, &mask);
    let byte = client.properties().type_usage(ElemType::UInt(UIntKind::U8));
    if size == 1 && !of_rows && !byte.contains(TypeUsage::Buffer) {
        return Err(AttentionError::Unsupported {
            what: "masks of bytes whose rows are not whole".into(),
        });
    }
    let _range = range!("tile_plan");
    if of_rows {
        let blueprint = RowsBlueprint {
            units,
            size,
            hidden,
            causal: geometry.causal,
            aligned: is_aligned(&mask, size),
        };
        pack_rows(client, geometry, mask, plan, blueprint);
    } else {
        pack_any(client, geometry, mask, size, hidden, plan);
    }
    Ok(())
}

/// Writes the tile plan of the mask that shows query `i` the keys `first <= j < end`, in one launch. `first` and `end`
/// are 32-bit signed integers `[batch, heads, q_len | 1, 1]` with any strides: the geometry's mask with one key. `plan`
/// is overwritten.
///
/// # Errors
///
/// [`AttentionError`], before any launch, if a tensor does not fit the geometry, or the geometry's mask lacks keys.
pub fn plan_ranges(
    client: &Client,
    geometry: &PlanGeometry,
    first: TensorBinding,
    end: TensorBinding,
    plan: MaskBits,
) -> Result<(), AttentionError> {
    let shape @ [batch, heads, queries, _] = geometry.ranges_shape()?;
    let any = Layout::Broadcast;
    check_tensor(TensorName::FirstKeys, &first, &shape, 4, any)?;
    check_tensor(TensorName::EndKeys, &end, &shape, 4, any)?;
    plan.check(geometry)?;
    let _range = range!("tile_plan");
    let [_, _, query_blocks, key_blocks] = geometry.counts_shape();
    // A mask with one query for all has bits even if there are no queries.
    let padded_queries = query_blocks.max(1) * QUERIES;
    let items = match queries {
        0 => 0,
        _ => batch * heads * key_blocks.div_ceil(QUERIES) * padded_queries,
    };
    if items == 0 {
        return Ok(());
    }
    let (count, dim) = one_unit_each(client, items);
    let address = address_type(&[&first, &end, &plan.bits, &plan.counts], 4);
    // SAFETY: units past the items return; the buffers were checked to hold what is indexed.
    unsafe {
        ranges_kernel::launch_unchecked(
            client,
            count,
            dim,
            address,
            KeyRangesLaunch::new(first.into_tensor_arg(), end.into_tensor_arg()),
            plan.bits.into_tensor_arg(),
            plan.counts.into_tensor_arg(),
            RangeSizesLaunch::new(
                items,
                padded_queries,
                geometry.q_len,
                geometry.k_len,
                position_shift(geometry),
            ),
            geometry.causal,
            geometry.k_len == 1,
        );
    }
    Ok(())
}

/// Units per cube that packs rows: a power of two, two per key block; 1 if cubes cannot have two.
fn cube_units(client: &Client, geometry: &PlanGeometry) -> usize {
    let most = client.properties().hardware.max_units_per_cube as usize;
    let wanted = 2 * geometry.k_len.div_ceil(PlanGeometry::KEY_BLOCK);
    1 << most
        .min(UNITS)
        .min(wanted.next_power_of_two())
        .max(1)
        .ilog2()
}

/// True if a mask has a row for every query and an element for every key, with contiguous rows.
fn is_rows(geometry: &PlanGeometry, mask: &TensorBinding) -> bool {
    let [_, _, queries, keys] = geometry.mask;
    queries == geometry.q_len
        && keys == geometry.k_len
        && keys > 1
        && mask.strides[3] == 1
        && begins_at(mask, 4)
}

/// True if the rows of such a mask are whole words of bits and begin at multiples of the vector.
fn is_aligned(mask: &TensorBinding, size: usize) -> bool {
    mask.shape[3].is_multiple_of(32)
        && begins_at(mask, VECTOR)
        && (mask.strides[..3].iter().zip(&mask.shape[..3]))
            .all(|(stride, &len)| len <= 1 || (stride * size).is_multiple_of(VECTOR))
}

fn pack_rows(
    client: &Client,
    geometry: &PlanGeometry,
    mask: TensorBinding,
    plan: MaskBits,
    blueprint: RowsBlueprint,
) {
    let [batch, heads, query_blocks, key_blocks] = geometry.counts_shape();
    let items = batch * heads * query_blocks * key_blocks.div_ceil(blueprint.blocks());
    if items == 0 {
        return;
    }
    let address =
        address_type(&[&mask], blueprint.size).max(address_type(&[&plan.bits, &plan.counts], 4));
    let reach = mask.shape.iter().zip(mask.strides.iter());
    let last = reach.map(|(len, stride)| (len - 1) * stride).sum::<usize>();
    let last_word = last * blueprint.size / 4;
    let dim = CubeDim::new_1d(blueprint.units as u32);
    // SAFETY: cubes past the items return; the buffers were checked to hold what is indexed. Aligned rows are whole
    // vectors; in other rows no word after that of the last element is read, and buffers are whole words.
    unsafe {
        rows_kernel::launch_unchecked(
            client,
            cubes(client, items, dim),
            dim,
            address,
            if blueprint.aligned { 4 } else { 1 },
            mask.into_tensor_arg(),
            plan.bits.into_tensor_arg(),
            plan.counts.into_tensor_arg(),
            RowsSizesLaunch::new(
                items,
                geometry.q_len,
                geometry.k_len,
                position_shift(geometry),
                last_word,
            ),
            blueprint,
        );
    }
}

/// A mask of any shape and strides, in two launches.
fn pack_any(
    client: &Client,
    geometry: &PlanGeometry,
    mask: TensorBinding,
    size: usize,
    hidden: bool,
    plan: MaskBits,
) {
    let MaskBits { bits, counts } = plan;
    let words: usize = geometry.bits_shape().iter().product();
    let items: usize = geometry.counts_shape().iter().product();
    let address = address_type(&[&mask], size).max(address_type(&[&bits, &counts], 4));
    let element = ElemType::UInt(match size {
        1 => UIntKind::U8,
        _ => UIntKind::U32,
    });
    if words > 0 {
        let (count, dim) = one_unit_each(client, words);
        // SAFETY: units past the words return; the buffers were checked to hold what is indexed.
        unsafe {
            pack_kernel::launch_unchecked(
                client,
                count,
                dim,
                address,
                mask.into_tensor_arg(),
                bits.clone().into_tensor_arg(),
                words,
                position_shift(geometry),
                hidden,
                // Only a mask with a row for each query has words that causal masking hides.
                geometry.causal && geometry.mask[2] == geometry.q_len,
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
}
