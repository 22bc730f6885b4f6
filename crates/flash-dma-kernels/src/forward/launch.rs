//! Host side of the forward pass.

use crate::args::Inputs;
use crate::forward::matrix;
use crate::host::check::{Layout, check_device, check_tensor, elem_type};
use crate::host::engine::Engine;
use crate::host::fill::fill;
use crate::matrix::blueprint::MmaBlueprint;
use crate::pattern::intervals::slices::{for_each_slice, slice_bytes};
use crate::pattern::intervals::tiles::QueryTiles;
use crate::pattern::intervals::{LiveKeys, live_keys};
use crate::pattern::kind::Pattern;
use crate::portable::blueprint::{Blueprint, Pass};
use crate::portable::launch::{KeyTensors, PortableLaunch};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::{AttentionError, Problem, TensorName};

/// The most buffers of any kernel.
const BINDINGS: u32 = 9;

/// Attention of every query over its selected keys: writes `out` (`[batch, q_heads, q_len, head_dim]`,
/// the problem's element type) and `lse` (`[batch, q_heads, q_len]`, f32, natural logarithm), both
/// contiguous and overwritten. A query that selects nothing gets zeros and −∞.
///
/// Runs asynchronously on the client's stream, on the fastest engine that supports the problem: the first of
/// [`Engine::Wgmma`], [`Engine::Mma`] and [`Engine::Portable`] that does. Memory besides the arguments is O(N): lists
/// of the keys of each query tile, in slices of bounded size. If there are fewer query tiles than multiprocessors, the
/// tensor-core engines split the keys of each tile; that takes at most 35 MB more on 132 multiprocessors.
///
/// # Errors
///
/// [`AttentionError`] if a tensor does not fit the problem, `selection` is missing although the problem has scores or
/// is given although it has none, the device lacks what the kernel needs, or
/// [`ENGINE_VARIABLE`](crate::host::engine::ENGINE_VARIABLE) names no engine. Nothing is launched in that case.
pub fn forward(
    client: &Client,
    problem: &Problem,
    inputs: Inputs,
    out: TensorBinding,
    lse: TensorBinding,
) -> Result<(), AttentionError> {
    let (_, plan) = Plan::choose(client, problem, &inputs)?;
    forward_with(client, problem, inputs, out, lse, plan)
}

/// The engine that [`forward`] runs on: the first of [`Engine::Wgmma`], [`Engine::Mma`] and [`Engine::Portable`] that
/// supports the problem and that [`ENGINE_VARIABLE`](crate::host::engine::ENGINE_VARIABLE) does not exclude.
#[must_use]
pub fn forward_engine(client: &Client, problem: &Problem, inputs: &Inputs) -> Engine {
    Plan::choose(client, problem, inputs).map_or(Engine::Portable, |(engine, _)| engine)
}

/// [`forward`] on a given engine.
///
/// # Errors
///
/// As [`forward`], plus [`AttentionError::Unsupported`] if the engine does not support the problem.
pub fn forward_on(
    engine: Engine,
    client: &Client,
    problem: &Problem,
    inputs: Inputs,
    out: TensorBinding,
    lse: TensorBinding,
) -> Result<(), AttentionError> {
    let plan = Plan::of(engine, client, problem, &inputs)?;
    forward_with(client, problem, inputs, out, lse, plan)
}

/// The bytes that [`forward`] needs on the device besides its arguments, known before it is called: the peak total of
/// the buffers that it holds at once, each at its requested size. These are the lists of keys if there are scores, and
/// the parts if keys are split.
///
/// A buffer is free for the next request on the stream once the launches that use it are enqueued, so consecutive calls
/// need as much as the largest of them. The client's pool rounds sizes up and keeps its memory.
///
/// # Errors
///
/// As [`forward`], but for the checks of the tensors' buffers: only the strides are used here.
pub fn forward_workspace(
    client: &Client,
    problem: &Problem,
    inputs: &Inputs,
) -> Result<usize, AttentionError> {
    let (_, plan) = Plan::choose(client, problem, inputs)?;
    plan.check(client, problem)?;
    Ok(plan.workspace(problem))
}

/// The bytes that [`forward_on`] needs, as [`forward_workspace`] counts them.
///
/// # Errors
///
/// As [`forward_workspace`], plus [`AttentionError::Unsupported`] if the engine does not support the problem.
pub fn forward_workspace_on(
    engine: Engine,
    client: &Client,
    problem: &Problem,
    inputs: &Inputs,
) -> Result<usize, AttentionError> {
    let plan = Plan::of(engine, client, problem, inputs)?;
    plan.check(client, problem)?;
    Ok(plan.workspace(problem))
}

/// The choices of [`forward_on`] for the tensor-core engines that tests and benchmarks may fix.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Tuning {
    /// Warps per cube, which determine the number of queries per tile.
    pub warps: Option<usize>,
    /// Parts into which the keys of a query tile are split; 1 does not split.
    pub parts: Option<usize>,
}

/// [`forward_on`] with some choices fixed.
///
/// # Errors
///
/// As [`forward_on`], plus [`AttentionError::Unsupported`] if the engine does not have this choice.
#[doc(hidden)]
pub fn forward_tuned(
    engine: Engine,
    tuning: Tuning,
    client: &Client,
    problem: &Problem,
    inputs: Inputs,
    out: TensorBinding,
    lse: TensorBinding,
) -> Result<(), AttentionError> {
    let plan = Plan::of(engine, client, problem, &inputs)?.tuned(tuning)?;
    forward_with(client, problem, inputs, out, lse, plan)
}

/// An engine and its configuration.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Plan {
    Portable(Blueprint),
    /// The comptime configuration, and the parts of a tile's keys.
    Mma(MmaBlueprint, usize),
}

impl Plan {
    /// The first engine that supports the problem.
    fn choose(
        client: &Client,
        problem: &Problem,
        inputs: &Inputs,
    ) -> Result<(Engine, Self), AttentionError> {
        Engine::first(|engine| Self::of(engine, client, problem, inputs))
    }

    fn of(
        engine: Engine,
        client: &Client,
        problem: &Problem,
        inputs: &Inputs,
    ) -> Result<Self, AttentionError> {
        let properties = client.properties();
        match engine {
            Engine::Portable => {
                return Blueprint::choose(Pass::Forward, problem, &properties.hardware)
                    .map(Self::Portable);
            }
            Engine::Mma => MmaBlueprint::choose(problem, properties),
            Engine::Wgmma => MmaBlueprint::choose_wgmma(problem, properties),
        }
        .filter(|_| inputs.rows_are_chunks(problem.element.size()))
        .map(|blueprint| {
            let hardware = &properties.hardware;
            let processors = hardware.num_streaming_multiprocessors.unwrap_or(1) as usize;
            let (blueprint, parts) =
                blueprint.split(problem, processors, hardware.max_shared_memory_size);
            Self::Mma(blueprint, parts)
        })
        .ok_or_else(|| engine.refusal("", problem))
    }

    fn tuned(self, tuning: Tuning) -> Result<Self, AttentionError> {
        let (blueprint, parts) = match self {
            Self::Mma(blueprint, parts) => (blueprint, parts),
            Self::Portable(_) => return Ok(self),
        };
        let warps = tuning.warps.unwrap_or(blueprint.warps);
        let parts = tuning.parts.unwrap_or(parts);
        if !blueprint.sizes().contains(&warps) || parts == 0 {
            return Err(AttentionError::Unsupported {
                what: format!("{warps} warps per cube and keys in {parts} parts"),
            });
        }
        let (blueprint, parts) = MmaBlueprint { warps, ..blueprint }.in_parts(parts);
        Ok(Self::Mma(blueprint, parts))
    }

    /// Queries per tile.
    fn queries(&self) -> usize {
        match self {
            Self::Portable(blueprint) => blueprint.outer_rows(),
            Self::Mma(blueprint, _) => blueprint.queries(),
        }
    }

    /// The peak number of bytes in buffers that a pass holds at once.
    fn workspace(&self, problem: &Problem) -> usize {
        if problem.batch * problem.q_len * problem.k_len == 0 {
            return 0;
        }
        let live = LiveKeys::bytes(problem);
        live + match self {
            Self::Portable(_) => slice_bytes(problem, self.queries()),
            Self::Mma(blueprint, parts) => matrix::workspace(problem, *blueprint, *parts),
        }
    }

    /// Checks that the device has what the kernels need.
    fn check(&self, client: &Client, problem: &Problem) -> Result<(), AttentionError> {
        let tiles = problem.q_len.div_ceil(self.queries());
        check_device(client, problem, BINDINGS, self.cubes(tiles, problem))
    }

    /// Cubes along each axis, given the cubes along the first.
    fn cubes(&self, tiles: usize, problem: &Problem) -> [usize; 3] {
        match self {
            Self::Portable(_) => [tiles, problem.q_heads, problem.batch],
            Self::Mma(blueprint, parts) => {
                let heads = problem.batch * problem.q_heads / blueprint.heads;
                [tiles, heads, *parts]
            }
        }
    }
}

/// [`forward`] with a given plan.
pub(crate) fn forward_with(
    client: &Client,
    problem: &Problem,
    inputs: Inputs,
    out: TensorBinding,
    lse: TensorBinding,
    plan: Plan,
) -> Result<(), AttentionError> {
    let size = problem.element.size();
    inputs.check(problem)?;
    check_tensor(
        TensorName::Out,
        &out,
        &problem.q_shape(),
        size,
        Layout::Contiguous,
    )?;
    check_tensor(
        TensorName::Lse,
        &lse,
        &problem.lse_shape(),
        4,
        Layout::Contiguous,
    )?;
    plan.check(client, problem)?;
    if problem.batch * problem.q_len == 0 {
        return Ok(());
    }
    if problem.k_len == 0 {
        fill(client, &out, 0.0, elem_type(problem.element));
        fill(client, &lse, f32::NEG_INFINITY, f32::elem_type_native());
        return Ok(());
    }
    let tiles = QueryTiles::new(problem, plan.queries());
    let live = (inputs.selection.as_ref()).map(|selection| live_keys(client, problem, selection));
    let live = live.as_ref();
    match plan {
        Plan::Portable(blueprint) => {
            launch_portable(
                client, problem, &inputs, live, &tiles, &out, &lse, blueprint,
            );
        }
        Plan::Mma(blueprint, parts) => {
            matrix::launch(
                client, problem, &inputs, live, &tiles, &out, &lse, blueprint, parts,
            );
        }
    }
    Ok(())
}

fn launch_portable(
    client: &Client,
    problem: &Problem,
    inputs: &Inputs,
    live: Option<&LiveKeys>,
    tiles: &QueryTiles,
    out: &TensorBinding,
    lse: &TensorBinding,
    blueprint: Blueprint,
) {
    let results = [out, lse];
    for_each_slice(client, problem, inputs, live, tiles, &results, |slice| {
        let keys = match blueprint.pattern {
            Pattern::Intervals => KeyTensors::Intervals(slice.selection),
            _ => KeyTensors::All,
        };
        let kernel = PortableLaunch {
            client,
            problem,
            q: &inputs.q,
            k: &inputs.k,
            v: &inputs.v,
            keys,
            bias: None,
            blueprint,
        };
        kernel.forward(slice.first_tile, slice.tiles, out, lse);
    });
}
