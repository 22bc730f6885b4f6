//! The backward pass: [`Backward::plan_backward`] chooses its engine, [`Plan::run`] launches it. First come the row
//! sums, then dq (which owns queries) and dk, dv and dscores (which own keys). Each recomputes the probabilities from
//! the LSE. `rank` owns the keys whose ranks learn: runners-up, which the forward pass leaves out, and then, if they
//! learn, kept keys.
//!
//! On tensor cores `dq` owns query tiles and streams the keys of their lists; `dkdv` owns key tiles within chunks of
//! queries and streams the queries. Neither needs atomics for dq.

pub(crate) mod bias;
pub(crate) mod blueprint;
pub(crate) mod delta;
pub(crate) mod dkdv;
pub(crate) mod dq;
pub(crate) mod launch;
pub(crate) mod masked;
pub(crate) mod matrix;
pub(crate) mod products;
pub(crate) mod rank;
pub(crate) mod repair;
#[cfg(test)]
mod tests;

use crate::args::Saved;
use crate::forward::Forward;
use crate::host::engine::Engine;
use crate::host::pass::Plan;
use cubecl::client::Client;
use flash_dma_problem::AttentionError;

/// Problems that have a backward pass: those that have a [forward](Forward) one.
pub trait Backward: Forward {
    /// The problem's gradients.
    type Gradients;

    /// The gradients of a [forward pass](Forward::plan_forward), on the given engine or, with `None`, on the first that
    /// supports the problem and that [`ENGINE_VARIABLE`](crate::ENGINE_VARIABLE) does not exclude. The plan's
    /// [`run`](Plan::run) writes them, all contiguous and overwritten; exactly zero where no pair contributes. The
    /// selection is a constant: no gradient flows through it. The gradient of a bias is summed in f32 over every axis
    /// that it broadcasts, in a fixed order.
    ///
    /// [`Engine::Wgmma`] takes f16 and bf16 with a head dimension of 64 or 128 on sm_90, [`Engine::Mma`] head dimensions
    /// that are multiples of 32 on sm_80 and newer. For both, rows of `q`, `k`, `v`, `out` and `grad_out` must begin at
    /// multiples of 16 bytes; for [`Engine::Wgmma`], rows of `q` and `grad_out` must not be repeated by a stride of 0.
    /// [`Engine::Portable`] takes everything.
    ///
    /// Under a mask and a bias the tensor-core engines have the forward pass's requirements, too, and [`Engine::Mma`] takes
    /// only a bias that all queries share and needs enough shared memory (99 KiB suffice for head dimensions up to 128). On
    /// [`Engine::Wgmma`] the portable kernel computes one gradient: the gradient of a bias that is the same for all keys,
    /// or of one with all queries and keys if `k` or `v` repeat rows by a stride of 0.
    ///
    /// The gradient of a rank is a separate pass over runners-up, and another one over kept keys that learn. With
    /// `options.deterministic` each of its cubes owns its keys; otherwise chunks of queries add to them.
    ///
    /// The pass allocates O(N) memory: one or three f32 per query row, the key lists, and, on the tensor-core engines, f32
    /// sums of the gradients of k and v, `8 * batch * kv_heads * k_len * head_dim` bytes, unless there are no scores or the
    /// window covers all queries. Cubes add to these by atomics, in any order. If the problem requests determinism, cubes
    /// write their parts separately, which takes twice the memory, and a second kernel sums them in a fixed order.
    /// [`Engine::Portable`] is deterministic and has no sums. Under a mask there are no sums either; the tensor cores need
    /// two lists of the active tiles of the mask, and four bytes per key for every head that has a bias, whether or not its
    /// gradient is requested.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the device lacks what the kernels need, [`ENGINE_VARIABLE`](crate::ENGINE_VARIABLE) names no
    /// engine, or the given engine does not support the problem. Only the tensors' strides and offsets are used here; the
    /// plan checks the rest when it runs.
    fn plan_backward<'a>(
        &'a self,
        client: &'a Client,
        inputs: &'a Self::Inputs,
        saved: &'a Saved,
        engine: Option<Engine>,
    ) -> Result<Plan<'a, Self::Gradients>, AttentionError>;
}
