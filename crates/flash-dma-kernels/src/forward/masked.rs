//! Host side of the forward pass.

use crate::forward::matrix;
use crate::host::check::{Layout, check_device, check_tensor, elem_type};
use crate::host::engine::Engine;
use crate::host::fill::fill;
use crate::matrix::blueprint::MmaBlueprint;
use crate::pattern::intervals::slices::Slice;
use crate::pattern::kind::{Bias, Pattern};
use crate::pattern::mask::args::MaskedInputs;
use crate::pattern::mask::listed::listed_bytes;
use crate::portable::blueprint::{Blueprint, Pass};
use crate::portable::launch::{KeyTensors, PortableLaunch};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::{AttentionError, MaskedProblem, TensorName};

/// The most buffers of any kernel.
const BINDINGS: u32 = 9;

/// Attention of every query over the keys it sees: writes `out` (`[batch, q_heads, q_len, head_dim]`, the
/// problem's element type) and `lse` (`[batch, q_heads, q_len]`, f32, natural logarithm), both contiguous and
/// overwritten. A query that sees nothing gets zeros and −∞.
///
/// Runs asynchronously on the client's stream, on the engine of [`masked_forward_engine`]. Blocks of the plan that a
/// query tile does not see are skipped; blocks that it sees completely are not tested.
///
/// # Errors
///
/// [`AttentionError`] if a tensor does not fit the problem or the device lacks what the kernel needs. Nothing is
/// launched in that case.
pub fn masked_forward(
    client: &Client,
    problem: &MaskedProblem,
    inputs: MaskedInputs,
    out: TensorBinding,
    lse: TensorBinding,
) -> Result<(), AttentionError> {
    let (_, plan) = ForwardPlan::choose(client, problem, &inputs)?;
    forward_with(client, problem, inputs, out, lse, plan)
}

/// [`masked_forward`] on a given engine.
///
/// # Errors
///
/// As [`masked_forward`], plus [`AttentionError::Unsupported`] if the engine does not support the problem.
pub fn masked_forward_on(
    engine: Engine,
    client: &Client,
    problem: &MaskedProblem,
    inputs: MaskedInputs,
    out: TensorBinding,
    lse: TensorBinding,
) -> Result<(), AttentionError> {
    let plan = ForwardPlan::of(engine, client, problem, &inputs)?;
    forward_with(client, problem, inputs, out, lse, plan)
}

/// The bytes that [`masked_forward`] needs on the device besides its arguments, known before it is called: the peak
/// total of the buffers that it holds at once, each at its requested size. On the tensor cores these are the lists of
/// visible keys of each query tile; [`Engine::Portable`] needs none.
///
/// # Errors
///
/// As [`masked_forward`], but for the checks of the tensors' buffers: only the strides are used here.
pub fn masked_forward_workspace(
    client: &Client,
    problem: &MaskedProblem,
    inputs: &MaskedInputs,
) -> Result<usize, AttentionError> {
    let (_, plan) = ForwardPlan::choose(client, problem, inputs)?;
    plan.check(client, problem)?;
    Ok(plan.workspace(problem))
}

/// The bytes that [`masked_forward_on`] needs, as [`masked_forward_workspace`] counts them.
///
/// # Errors
///
/// As [`masked_forward_workspace`], plus [`AttentionError::Unsupported`] if the engine does not support the problem.
pub fn masked_forward_workspace_on(
    engine: Engine,
    client: &Client,
    problem: &MaskedProblem,
    inputs: &MaskedInputs,
) -> Result<usize, AttentionError> {
    let plan = ForwardPlan::of(engine, client, problem, inputs)?;
    plan.check(client, problem)?;
    Ok(plan.workspace(problem))
}

fn forward_with(
    client: &Client,
    problem: &MaskedProblem,
    inputs: MaskedInputs,
    out: TensorBinding,
    lse: TensorBinding,
    engine: ForwardPlan,
) -> Result<(), AttentionError> {
    let p = &problem.attention;
    let size = p.element.size();
    inputs.check(problem)?;
    check_tensor(
        TensorName::Out,
        &out,
        &p.q_shape(),
        size,
        Layout::Contiguous,
    )?;
    check_tensor(TensorName::Lse, &lse, &p.lse_shape(), 4, Layout::Contiguous)?;
    engine.check(client, problem)?;
    if p.batch * p.q_len == 0 {
        return Ok(());
    }
    if p.k_len == 0 {
        fill(client, &out, 0.0, elem_type(p.element));
        fill(client, &lse, f32::NEG_INFINITY, f32::elem_type_native());
        return Ok(());
    }
    let tiles = p.q_len.div_ceil(engine.queries());
    match engine {
        ForwardPlan::Portable(blueprint) => {
            launch_portable(client, problem, &inputs, &out, &lse, tiles, blueprint);
        }
        ForwardPlan::Mma(blueprint) => {
            let selection = inputs.listed(client, problem, blueprint.queries(), &inputs.v);
            let slice = Slice {
                selection,
                first_tile: 0,
                tiles,
            };
            let rows = [inputs.q, inputs.k, inputs.v];
            matrix::launch_slice(client, p, rows, slice, &out, &lse, blueprint, 1);
        }
    }
    Ok(())
}

/// The engine that [`masked_forward`] runs on: the first of [`Engine::Wgmma`], [`Engine::Mma`] and [`Engine::Portable`]
/// that supports the problem and that [`ENGINE_VARIABLE`](crate::host::engine::ENGINE_VARIABLE) does not exclude. The
/// tensor-core engines support what they support without a mask; a bias of keys that all queries share must be
/// contiguous along the keys.
#[must_use]
pub fn masked_forward_engine(
    client: &Client,
    problem: &MaskedProblem,
    inputs: &MaskedInputs,
) -> Engine {
    ForwardPlan::choose(client, problem, inputs).map_or(Engine::Portable, |(engine, _)| engine)
}

/// An engine and its configuration.
enum ForwardPlan {
    Portable(Blueprint),
    Mma(MmaBlueprint),
}

impl ForwardPlan {
    fn choose(
        client: &Client,
        problem: &MaskedProblem,
        inputs: &MaskedInputs,
    ) -> Result<(Engine, Self), AttentionError> {
        Engine::first(|engine| Self::of(engine, client, problem, inputs))
    }

    fn of(
        engine: Engine,
        client: &Client,
        problem: &MaskedProblem,
        inputs: &MaskedInputs,
    ) -> Result<Self, AttentionError> {
        let (p, properties) = (&problem.attention, client.properties());
        let Some(instruction) = engine.instruction() else {
            let pattern = Pattern::masked(problem, Bias::strided(problem));
            return Blueprint::choose(Pass::Forward, p, &properties.hardware)
                .map(|blueprint| Self::Portable(blueprint.with_pattern(pattern)));
        };
        MmaBlueprint::choose_masked(instruction, problem, properties)
            .filter(|_| inputs.rows_are_chunks(problem))
            .map(Self::Mma)
            .ok_or_else(|| engine.refusal("masks and biases on ", p))
    }

    /// The peak number of bytes in buffers that a pass holds at once.
    fn workspace(&self, problem: &MaskedProblem) -> usize {
        let p = &problem.attention;
        match self {
            Self::Mma(blueprint) if p.batch * p.q_len * p.k_len > 0 => {
                listed_bytes(problem, blueprint.queries()).iter().sum()
            }
            _ => 0,
        }
    }

    /// Checks that the device has what the kernels need.
    fn check(&self, client: &Client, problem: &MaskedProblem) -> Result<(), AttentionError> {
        let p = &problem.attention;
        let tiles = p.q_len.div_ceil(self.queries());
        let cubes = match self {
            Self::Portable(_) => [tiles, p.q_heads, p.batch],
            Self::Mma(blueprint) => [tiles, p.batch * p.q_heads / blueprint.heads, 1],
        };
        check_device(client, p, BINDINGS, cubes)
    }

    /// Queries per tile.
    fn queries(&self) -> usize {
        match self {
            Self::Portable(blueprint) => blueprint.outer_rows(),
            Self::Mma(blueprint) => blueprint.queries(),
        }
    }
}

fn launch_portable(
    client: &Client,
    problem: &MaskedProblem,
    inputs: &MaskedInputs,
    out: &TensorBinding,
    lse: &TensorBinding,
    tiles: usize,
    blueprint: Blueprint,
) {
    let kernel = PortableLaunch {
        client,
        problem: &problem.attention,
        q: &inputs.q,
        k: &inputs.k,
        v: &inputs.v,
        keys: KeyTensors::of_mask(inputs.plan.as_ref()),
        bias: inputs.bias.as_ref(),
        blueprint,
    };
    kernel.forward(0, tiles, out, lse);
}
