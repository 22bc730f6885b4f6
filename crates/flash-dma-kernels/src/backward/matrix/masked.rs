//! Host side of the tensor-core backward pass under a mask and a bias.

use crate::args::Saved;
use crate::backward::bias::blueprint::BiasBlueprint;
use crate::backward::bias::launch::BiasGradient;
use crate::backward::blueprint::MmaBlueprints;
use crate::backward::dkdv::shared::args::GradientTensors;
use crate::backward::matrix::pass::{KeyLists, MmaPass, RowSums};
use crate::host::check::elem_type;
use crate::matrix::args::TileLaunch;
use crate::pattern::tensors::{KeyTensors, SourceTensors};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::MaskedProblem;

/// The keys and biases that the kernels read.
pub(crate) struct MaskLists {
    /// Those of the tiles of the dq kernel.
    pub blocks: SourceTensors,
    /// With a tile plan, the steps of the key tiles of the dk/dv kernel, as
    /// [`KeyTilePlan`](crate::backward::dkdv::shared::args::KeyTilePlan) says.
    pub steps: Option<[TensorBinding; 2]>,
    /// Capacity of a list of `steps`, in entries.
    pub capacity: usize,
}

/// Launches dq and dk/dv, and on `wgmma` the gradient `of_pairs` of a bias, of a checked, non-empty problem whose rows
/// begin at multiples of 16 bytes.
///
/// `rows` are q, k and v, `grads` their gradients. `grad_bias` is given if the blueprints have a bias per key:
/// contiguous `[batch, kv_heads, k_len]`, f32, overwritten, or, if every query head has its own,
/// `[batch, q_heads, k_len]`, added to. Returns the row sums.
pub(crate) fn launch_masked(
    client: &Client,
    problem: &MaskedProblem,
    rows: [&TensorBinding; 3],
    saved: &Saved,
    lists: MaskLists,
    grads: [&TensorBinding; 3],
    grad_bias: Option<TensorBinding>,
    of_pairs: Option<(BiasGradient, BiasBlueprint)>,
    blueprints: MmaBlueprints,
) -> RowSums {
    let p = &problem.attention;
    let pass = MmaPass::new(client, p, rows, saved, blueprints);
    let bias = lists.blocks.bias.clone();
    let planned = (lists.blocks.bits().cloned()).zip(lists.steps);
    let tiles = TileLaunch {
        source: lists.blocks,
        first: 0,
        count: p.q_len.div_ceil(blueprints.dq.tile.queries()),
    };
    let [grad_q, grad_k, grad_v] = grads;
    pass.launch_dq(tiles, grad_q, blueprints.dq);
    let keys = KeyLists {
        source: SourceTensors {
            bias,
            keys: planned.map_or(KeyTensors::All, |(bits, [list, counts])| {
                KeyTensors::Planned([bits, list, counts])
            }),
        },
        capacity: lists.capacity,
        chunks: 1,
        tiles: p.k_len.div_ceil(blueprints.dkdv.keys()),
    };
    let grads = [grad_k, grad_v].map(GradientTensors::of);
    pass.launch_dkdv(keys, grads, grad_bias, elem_type(p.element), blueprints);
    if let Some((bias, blueprint)) = of_pairs {
        pass.launch_bias(problem, bias, blueprint);
    }
    pass.into_sums()
}
