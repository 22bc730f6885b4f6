//! Sums in f32 that several cubes add to, and what becomes of them.

use crate::tile::mma::value;
use cubecl::prelude::*;

/// Adds to the f32 that `to` begins with, in global memory. The order of such additions is not fixed.
#[cube]
pub(in crate::backward) fn add_to(to: &mut [f32], x: f32) {
    let p = unsafe { to.as_ptr_unchecked() };
    gpu_asm!(
        "{{ .reg .u64 g; cvta.to.global.u64 g, {p}; red.relaxed.gpu.global.add.f32 [g], {x}; }}",
        p = mem_inout(_) p,
        x = in(_) value::<f32>(x),
        options(explicit_mem)
    );
}

/// Adds to both elements of the pair of f32 that `to` begins with, likewise.
#[cube]
pub(super) fn add_pair<O: Float>(to: &mut [Vector<O, Const<2>>], x: f32, y: f32) {
    let p = unsafe { to.as_ptr_unchecked() };
    gpu_asm!(
        "{{ .reg .u64 g; cvta.to.global.u64 g, {p}; red.relaxed.gpu.global.add.f32 [g], {x}; red.relaxed.gpu.global.add.f32 [g+4], {y}; }}",
        p = mem_inout(_) p,
        x = in(_) value::<f32>(x),
        y = in(_) value::<f32>(y),
        options(explicit_mem)
    );
}

/// Rounds sums to the gradients' type: one unit four elements. `sums` and `grads` are contiguous and of
/// one shape; `grads` is overwritten.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(in crate::backward) fn round_sums_kernel<E: Float>(
    sums: &[Vector<f32, Const<4>>],
    grads: &mut [Vector<E, Const<4>>],
    vectors: usize,
    #[define(E)] _element: ElemType,
) {
    if ABSOLUTE_POS < vectors {
        grads[ABSOLUTE_POS] = Vector::cast_from(sums[ABSOLUTE_POS]);
    }
}
