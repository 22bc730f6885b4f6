//! The f32 sums that several cubes add to, and their conversion to gradients.

use crate::backward::blueprint::DkdvBlueprint;
use crate::matrix::ptx::value;
use crate::pattern::position::query_shift;
use cubecl::prelude::*;

/// Adds to the f32 that `to` begins with, in global memory. The order of such additions is not fixed.
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

/// Adds to both elements of the pair of f32 that `to` begins with, in the same way.
#[cube]
pub(crate) fn add_pair<O: Float>(to: &mut [Vector<O, Const<2>>], x: f32, y: f32) {
    let p = unsafe { to.as_ptr_unchecked() };
    gpu_asm!(
        "{{ .reg .u64 g; cvta.to.global.u64 g, {p}; red.relaxed.gpu.global.add.f32 [g], {x}; red.relaxed.gpu.global.add.f32 [g+4], {y}; }}",
        p = mem_inout(_) p,
        x = in(_) value::<f32>(x),
        y = in(_) value::<f32>(y),
        options(explicit_mem)
    );
}

/// [`add_pair`] in one instruction, which devices before Hopper lack.
#[cube]
pub(crate) fn add_pair_at_once<O: Float>(to: &mut [Vector<O, Const<2>>], x: f32, y: f32) {
    let p = unsafe { to.as_ptr_unchecked() };
    gpu_asm!(
        "{{ .reg .u64 g; cvta.to.global.u64 g, {p}; red.relaxed.gpu.global.add.v2.f32 [g], {{{x}, {y}}}; }}",
        p = mem_inout(_) p,
        x = in(_) value::<f32>(x),
        y = in(_) value::<f32>(y),
        options(explicit_mem)
    );
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

/// Whether any position attends to the key of `interval`.
#[cube]
fn lives(interval: Vector<u32, Const<2>>) -> bool {
    interval.extract(0usize) < interval.extract(1usize)
}

/// Sizes of a launch of [`clear_sums_kernel`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct ClearedSums {
    /// Vectors of each of the tensors.
    pub vectors: usize,
    pub q_len: usize,
    pub k_len: usize,
    /// Queries of a chunk.
    pub chunk: usize,
}

#[cube]
impl ClearedSums {
    /// Whether the queries that attend to the key are of one chunk, whose cube then writes its sums.
    fn is_of_one_chunk(&self, interval: Vector<u32, Const<2>>, #[comptime] causal: bool) -> bool {
        let mut of_one = false;
        if comptime!(causal) {
            let shift = query_shift(self.q_len, self.k_len);
            let from = max(interval.extract(0usize) as i32 + shift, 0i32);
            let to = min(interval.extract(1usize) as i32 + shift, self.q_len as i32);
            of_one = from < to && from as usize / self.chunk == (to - 1i32) as usize / self.chunk;
        }
        of_one
    }
}

/// Zeroes the sums of the keys that some position attends to, except those whose queries are all of one chunk: one unit
/// per four elements of `sums_k` and of `sums_v`, contiguous `[batch, kv_heads, k_len, head_dim]`. The sums of the other
/// keys stay undefined.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn clear_sums_kernel(
    intervals: &[Vector<u32, Const<2>>],
    sums_k: &mut [Vector<f32, Const<4>>],
    sums_v: &mut [Vector<f32, Const<4>>],
    sizes: &ClearedSums,
    #[comptime] head_dim: usize,
    #[comptime] causal: bool,
) {
    let at = ABSOLUTE_POS;
    if at < sizes.vectors {
        let interval = intervals[at / comptime!(head_dim / 4)];
        if lives(interval) && !sizes.is_of_one_chunk(interval, causal) {
            sums_k[at] = Vector::new(0.0f32);
            sums_v[at] = Vector::new(0.0f32);
        }
    }
}

/// Rounds the sums of both tensors to the gradients' type; zeros for the keys that nothing attends to. Layout and
/// units as in [`clear_sums_kernel`]; the gradients are overwritten.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn round_sums_kernel<E: Float>(
    intervals: &[Vector<u32, Const<2>>],
    sums_k: &[Vector<f32, Const<4>>],
    sums_v: &[Vector<f32, Const<4>>],
    grad_k: &mut [Vector<E, Const<4>>],
    grad_v: &mut [Vector<E, Const<4>>],
    vectors: usize,
    #[comptime] head_dim: usize,
    #[define(E)] _element: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < vectors {
        let mut k = Vector::<f32, Const<4>>::new(0.0f32);
        let mut v = Vector::<f32, Const<4>>::new(0.0f32);
        if lives(intervals[at / comptime!(head_dim / 4)]) {
            k = sums_k[at];
            v = sums_v[at];
        }
        grad_k[at] = Vector::cast_from(k);
        grad_v[at] = Vector::cast_from(v);
    }
}
