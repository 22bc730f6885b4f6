//! The forward pass: [`Forward::plan_forward`] chooses its engine, [`Plan::run`] launches it.

pub(crate) mod launch;
pub(crate) mod masked;
pub(crate) mod matrix;
pub(crate) mod merge;
pub(crate) mod mma;
pub(crate) mod split;
#[cfg(test)]
mod tests;
pub(crate) mod wgmma;

use crate::args::Outputs;
use crate::host::engine::Engine;
use crate::host::pass::Plan;
use cubecl::client::Client;
use flash_dma_problem::AttentionError;

/// Problems that have a forward pass: [`Problem`](crate::Problem), whose queries attend to the keys selected by scores
/// or to all, and [`MaskedProblem`](crate::MaskedProblem), whose queries attend to the keys shown by a mask, with a
/// bias.
pub trait Forward {
    /// The problem's inputs.
    type Inputs;

    /// Attention of every query over the keys that it selects or sees, on the given engine or, with `None`, on the
    /// fastest that supports the problem: the first of [`Engine::Wgmma`], [`Engine::Mma`] and [`Engine::Portable`] that
    /// does and that [`ENGINE_VARIABLE`](crate::ENGINE_VARIABLE) does not exclude. The tensor-core engines support the
    /// same problems with and without a mask; a bias per key that all queries share must be contiguous along the keys.
    ///
    /// The plan's [`run`](Plan::run) overwrites all [`Outputs`]. A query that selects or sees nothing gets zeros and −∞.
    ///
    /// The pass allocates O(N) memory: lists of the keys of each query tile, in slices of bounded size. If there are fewer
    /// query tiles than multiprocessors, the tensor-core engines split the keys of each tile; that takes at most 35 MB more
    /// on 132 multiprocessors. Under a mask the lists hold the visible keys of each query tile on the tensor cores, and
    /// [`Engine::Portable`] has none: blocks of the mask's plan that a query tile does not see are skipped, and blocks that
    /// it sees completely are not tested.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the device lacks what the kernels need, [`ENGINE_VARIABLE`](crate::ENGINE_VARIABLE) names
    /// no engine, or the given engine does not support the problem. Only the inputs' strides and offsets are used here;
    /// the plan checks the rest when it runs.
    fn plan_forward<'a>(
        &'a self,
        client: &'a Client,
        inputs: &'a Self::Inputs,
        engine: Option<Engine>,
    ) -> Result<Plan<'a, Outputs>, AttentionError>;
}
