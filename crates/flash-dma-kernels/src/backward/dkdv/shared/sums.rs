//! The f32 sums that several cubes add to, and their conversion to gradients.

use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::host::engine::Instruction;
use crate::matrix::ptx::value;
use crate::pattern::intervals::classes::QueryChunks;
use cubecl::prelude::*;

/// Adds to the first f32 of `to`, in global memory. The order of such additions is not fixed.
#[cube]
pub(crate) fn add_to(to: &mut [f32], x: f32) {
    let p = unsafe { to.as_ptr_unchecked() };
    gpu_asm!(
        "{{ .reg .u64 g; cvta.to.global.u64 g, {p}; red.relaxed.gpu.global.add.f32 [g], {x}; }}",
        p = mem_inout(_) p,
        x = in(_) value::<f32>(x),
        options(explicit_mem)
    );
}

/// Adds to the first pair of f32 of `to` in the same way; in one instruction if `instruction` is Hopper's.
#[cube]
pub(crate) fn add_pair(
    to: &mut [Vector<f32, Const<2>>],
    pair: Vector<f32, Const<2>>,
    #[comptime] instruction: Instruction,
) {
    let p = unsafe { to.as_ptr_unchecked() };
    let (x, y) = (pair.extract(0usize), pair.extract(1usize));
    match instruction {
        Instruction::Mma => gpu_asm!(
            "{{ .reg .u64 g; cvta.to.global.u64 g, {p}; red.relaxed.gpu.global.add.f32 [g], {x}; red.relaxed.gpu.global.add.f32 [g+4], {y}; }}",
            p = mem_inout(_) p,
            x = in(_) value::<f32>(x),
            y = in(_) value::<f32>(y),
            options(explicit_mem)
        ),
        Instruction::Wgmma => gpu_asm!(
            "{{ .reg .u64 g; cvta.to.global.u64 g, {p}; red.relaxed.gpu.global.add.v2.f32 [g], {{{x}, {y}}}; }}",
            p = mem_inout(_) p,
            x = in(_) value::<f32>(x),
            y = in(_) value::<f32>(y),
            options(explicit_mem)
        ),
    }
}

/// Writes the gradient `sum` of the score of row `at`, or with `bp.shared_keys` adds to it.
#[cube]
pub(crate) fn write_score(grad: &mut [f32], at: usize, sum: f32, #[comptime] bp: DkdvBlueprint) {
    if comptime!(bp.shared_keys) {
        add_to(&mut grad[at..at + 1], sum);
    } else {
        grad[at] = sum;
    }
}

/// True if some position attends to the key of `interval`.
#[cube]
fn lives(interval: Vector<u32, Const<2>>) -> bool {
    interval.extract(0usize) < interval.extract(1usize)
}

/// The rows whose sums are cleared or rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SumRows {
    pub head_dim: usize,
    pub causal: bool,
}

/// Zeroes the sums of the keys that some position attends to, except those whose queries are all in one chunk: one unit
/// per four elements of `sums_k` and of `sums_v`, contiguous `[batch, kv_heads, k_len, head_dim]`. The sums of the
/// other keys stay undefined.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn clear_sums_kernel(
    intervals: &[Vector<u32, Const<2>>],
    sums_k: &mut [Vector<f32, Const<4>>],
    sums_v: &mut [Vector<f32, Const<4>>],
    chunks: &QueryChunks,
    vectors: usize,
    #[comptime] rows: SumRows,
) {
    let at = ABSOLUTE_POS;
    if at < vectors {
        let interval = intervals[at / comptime!(rows.head_dim / 4)];
        if lives(interval) && chunks.share(interval, rows.causal) {
            sums_k[at] = Vector::new(0.0f32);
            sums_v[at] = Vector::new(0.0f32);
        }
    }
}

/// Rounds the sums of both tensors to the gradients' type; zeros for the keys that nothing attends to. Layout and units
/// as in [`clear_sums_kernel`]; the gradients are overwritten, except those of keys whose queries are all in one chunk.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn round_sums_kernel<E: Float>(
    intervals: &[Vector<u32, Const<2>>],
    sums_k: &[Vector<f32, Const<4>>],
    sums_v: &[Vector<f32, Const<4>>],
    grad_k: &mut [Vector<E, Const<4>>],
    grad_v: &mut [Vector<E, Const<4>>],
    chunks: &QueryChunks,
    vectors: usize,
    #[comptime] rows: SumRows,
    #[define(E)] _element: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < vectors {
        let interval = intervals[at / comptime!(rows.head_dim / 4)];
        if !lives(interval) {
            grad_k[at] = Vector::new(E::from_int(0));
            grad_v[at] = Vector::new(E::from_int(0));
        } else if chunks.share(interval, rows.causal) {
            grad_k[at] = Vector::cast_from(sums_k[at]);
            grad_v[at] = Vector::cast_from(sums_v[at]);
        }
    }
}
