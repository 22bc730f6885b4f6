//! Host side of the tensor-core backward pass under a mask and a bias.

use crate::args::Saved;
use crate::backward::bias::blueprint::BiasBlueprint;
use crate::backward::bias::launch::BiasGradient;
use crate::backward::blueprint::MmaBlueprints;
use crate::backward::matrix::pass::{KeyLists, MmaPass};
use crate::host::check::elem_type;
use crate::matrix::args::{SourceTensors, TileLaunch};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::MaskedProblem;

/// The keys that the kernels read. The `steps` of a problem without a mask are arbitrary buffers.
pub(crate) struct MaskLists {
    /// Those of the tiles of the dq kernel.
    pub blocks: SourceTensors,
    /// The steps of the key tiles of the dk/dv kernel, as [`mask`](crate::backward::dkdv::shared::mask) says.
    pub steps: [TensorBinding; 2],
    /// Capacity of a list of `steps`, in entries.
    pub capacity: usize,
}

/// Launches dq and dk/dv, and on `wgmma` the gradient `of_pairs` of a bias, of a checked, non-empty problem whose rows
/// begin at multiples of 16 bytes.
///
/// `rows` are q, k and v, `grads` their gradients; `grad_bias`, contiguous `[batch, kv_heads, k_len]`, f32, is
/// overwritten if the blueprints have a bias of keys, or added to if every query head has one:
/// `[batch, q_heads, k_len]`. Returns the row sums, `[batch, q_heads, q_len]`, f32.
pub(crate) fn launch_masked(
    client: &Client,
    problem: &MaskedProblem,
    rows: [&TensorBinding; 3],
    saved: &Saved,
    lists: MaskLists,
    grads: [&TensorBinding; 3],
    grad_bias: TensorBinding,
    of_pairs: Option<(BiasGradient, BiasBlueprint)>,
    blueprints: MmaBlueprints,
) -> TensorBinding {
    let p = &problem.attention;
    let pass = MmaPass::new(client, p, rows, saved, blueprints);
    let none = || rows[0].clone();
    let bias = lists.blocks.bias.clone().unwrap_or_else(none);
    let bits = lists.blocks.bits().cloned().unwrap_or_else(none);
    let tiles = TileLaunch {
        source: lists.blocks,
        first: 0,
        count: p.q_len.div_ceil(blueprints.dq.tile.queries()),
    };
    let [grad_q, grad_k, grad_v] = grads;
    pass.launch_dq(tiles, grad_q, blueprints.dq);
    let [list, counts] = lists.steps;
    let keys = KeyLists {
        scores: bias,
        intervals: bits,
        list,
        counts,
        capacity: lists.capacity,
        chunks: 1,
        tiles: p.k_len.div_ceil(blueprints.dkdv.keys()),
    };
    let grads = [grad_k.clone(), grad_v.clone(), grad_bias];
    pass.launch_dkdv(keys, grads, elem_type(p.element), blueprints);
    if let Some((bias, blueprint)) = of_pairs {
        pass.launch_bias(problem, bias, blueprint);
    }
    pass.delta()
}
