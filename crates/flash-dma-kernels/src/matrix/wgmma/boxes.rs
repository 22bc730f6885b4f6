//! Tiles that the tensor memory accelerator (TMA) copies: boxes of a tensor, through a tensor map made on the host.

use crate::host::check::elem_type;
use crate::matrix::ptx::value;
use crate::matrix::wgmma::panel::{Panels, panel_width};
use crate::matrix::wgmma::ring::Ring;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;
use flash_dma_problem::ElementType;

/// The tensor map of `tensor`, `[batch, heads, len, head_dim]`, in boxes of `rows` rows of `heads` heads and one
/// panel's columns; the host must have checked [`takes_boxes`].
pub(crate) fn boxes_of(
    tensor: &TensorBinding,
    element: ElementType,
    heads: usize,
    rows: usize,
) -> TensorMapArg<Tiled> {
    let mut tensor = tensor.clone();
    for axis in 0..3 {
        // The stride of an axis of one element is never used, but must be a valid one.
        if tensor.shape[axis] == 1 {
            tensor.strides[axis] = tensor.shape[3];
        }
    }
    let width = panel_width(tensor.shape[3]);
    let swizzle = match width {
        64 => TensorMapSwizzle::B128,
        32 => TensorMapSwizzle::B64,
        _ => TensorMapSwizzle::B32,
    };
    let boxes = TiledArgs {
        tile_size: [1, heads, rows, width].into(),
    };
    TensorMapArg::new(boxes, tensor.into_tensor_arg(), elem_type(element))
        .with_swizzle(swizzle)
        .with_prefetch(TensorMapPrefetch::B256)
}

/// True if the TMA accepts a tensor's strides. Rows start at multiples of 16 bytes; the stride of repeated rows is 0.
pub(crate) fn takes_boxes(tensor: &TensorBinding, element_size: usize) -> bool {
    (0..3).all(|axis| {
        let bytes = tensor.strides[axis] * element_size;
        tensor.shape[axis] <= 1 || (bytes > 0 && bytes < 1 << 40)
    })
}

/// The tensor map of the contiguous f32 `tensor`, `[batch, heads, words]`: boxes of `words` (16 bytes or more) by
/// `heads`.
pub(crate) fn word_boxes_of(
    tensor: &TensorBinding,
    heads: usize,
    words: usize,
) -> TensorMapArg<Tiled> {
    let boxes = TiledArgs {
        tile_size: [1, heads, words].into(),
    };
    let word = f32::elem_type_native();
    TensorMapArg::new(boxes, tensor.clone().into_tensor_arg(), word)
}

/// The address of an operand's tensor map; 0 if it has none.
#[cube]
pub(crate) fn map_address<E: Float>(map: &ComptimeOption<TensorMap<E, Tiled>>) -> u64 {
    #[comptime]
    match map {
        ComptimeOption::Some(map) => tensor_map_address::<E, Tiled>(map),
        ComptimeOption::None => 0u64.runtime(),
    }
}

/// The row of a tensor at which boxes begin.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct BoxPlace {
    pub batch: usize,
    pub head: usize,
    pub row: usize,
}

/// Starts the copy of the box at `[batch, head, row]` to the panels `to` of `rows` rows and `columns` columns; rows
/// past the last become zeros. The stage's full barrier tracks the copy. Only one unit calls it.
#[cube]
pub(crate) fn copy_boxes(
    map: u64,
    from: &BoxPlace,
    to: &Panels,
    ring: &Ring,
    stage: usize,
    #[comptime] rows: usize,
    #[comptime] columns: usize,
) {
    let width = comptime!(panel_width(columns));
    #[unroll]
    for panel in 0..comptime!(columns / width) {
        gpu_asm!(
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [{}], [{}, {{{}, {}, {}, {}}}], [{}];",
            in(_) value::<u32>(16 * (to.address + comptime!((panel * rows * width / 8) as u32))),
            in(_) value::<u64>(map),
            in(_) value::<u32>(comptime!((panel * width) as u32).runtime()),
            in(_) value::<u32>(from.row as u32),
            in(_) value::<u32>(from.head as u32),
            in(_) value::<u32>(from.batch as u32),
            in(_) value::<u32>(ring.full(stage)),
            options(explicit_mem, reads_address_space shared, writes_address_space shared)
        );
    }
}

/// [`copy_boxes`] for the box of words at `[batch, head, word]`, to `place` in shared memory.
#[cube]
pub(crate) fn copy_words(
    map: u64,
    batch: usize,
    head: usize,
    word: usize,
    place: u32,
    ring: &Ring,
    stage: usize,
) {
    gpu_asm!(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [{}], [{}, {{{}, {}, {}}}], [{}];",
        in(_) value::<u32>(place),
        in(_) value::<u64>(map),
        in(_) value::<u32>(word as u32),
        in(_) value::<u32>(head as u32),
        in(_) value::<u32>(batch as u32),
        in(_) value::<u32>(ring.full(stage)),
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}
