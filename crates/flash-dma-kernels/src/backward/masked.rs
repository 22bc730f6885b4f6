//! Host side of the backward pass.

use crate::args::Saved;
use crate::backward::bias::blueprint::BiasBlueprint;
use crate::backward::bias::launch::BiasGradient;
use crate::backward::blueprint::{DkdvBlueprint, MmaBlueprints};
use crate::backward::launch::{Blueprints, launch_delta};
use crate::backward::matrix::masked::{MaskLists, launch_masked};
use crate::backward::matrix::pass::row_sums_bytes;
use crate::host::check::{check_device, elem_type};
use crate::host::engine::{Engine, Instruction};
use crate::host::fill::fill;
use crate::host::scratch::{bytes, scratch};
use crate::matrix::wgmma::boxes::takes_boxes;
use crate::pattern::mask::args::{MaskedGradients, MaskedInputs};
use crate::pattern::mask::listed::listed_bytes;
use crate::pattern::mask::query_lists::{QueryLists, lists_fit, query_lists, sum_heads};
use crate::portable::blueprint::Blueprint;
use crate::portable::launch::{KeyTensors, PortableLaunch, SavedTensors, bias_cubes};
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::{AttentionError, MaskedProblem, Problem};

/// The most buffers of any kernel.
const BINDINGS: u32 = 13;

/// The gradients of [`masked_forward`](crate::forward::masked::masked_forward), contiguous and overwritten; exactly
/// zero where no pair contributes. The gradient of the bias is summed in f32 over every axis that it broadcasts, in a
/// fixed order.
///
/// Runs asynchronously on the client's stream, on the engine of [`masked_backward_engine`]. Memory besides the
/// arguments: a few f32 per query row; on the tensor cores also two lists of the active tiles of the mask, and four
/// bytes per key for every head that has a bias.
///
/// # Errors
///
/// [`AttentionError`] if a tensor does not fit the problem, the device lacks what the kernels need, or
/// [`ENGINE_VARIABLE`](crate::host::engine::ENGINE_VARIABLE) names no engine. Nothing is launched in that case.
pub fn masked_backward(
    client: &Client,
    problem: &MaskedProblem,
    inputs: MaskedInputs,
    saved: Saved,
    grads: MaskedGradients,
) -> Result<(), AttentionError> {
    let (_, plan) = BackwardPlan::choose(client, problem, &inputs, &saved)?;
    backward_with(client, problem, inputs, saved, grads, plan)
}

/// The engine that [`masked_backward`] runs on: the first of [`Engine::Wgmma`], [`Engine::Mma`] and
/// [`Engine::Portable`] that supports the problem. The tensor-core engines support what they support in the
/// [forward](crate::forward::masked::masked_forward_engine) if `out` and `grad_out`, too, have rows that begin at
/// multiples of 16 bytes: [`Engine::Wgmma`] where the head dimension is 64 or 128 and no rows of `q` and `grad_out` are
/// repeated by a stride of 0, [`Engine::Mma`] where all queries share the bias, if the device has enough shared memory
/// (99 KiB suffice for head dimensions up to 128). On [`Engine::Wgmma`] the portable kernel computes one gradient: the
/// gradient of a bias that is the same for all keys, or of one with all queries and keys if `k` or `v` repeat rows by a
/// stride of 0. [`ENGINE_VARIABLE`](crate::host::engine::ENGINE_VARIABLE) excludes engines.
#[must_use]
pub fn masked_backward_engine(
    client: &Client,
    problem: &MaskedProblem,
    inputs: &MaskedInputs,
    saved: &Saved,
) -> Engine {
    BackwardPlan::choose(client, problem, inputs, saved)
        .map_or(Engine::Portable, |(engine, _)| engine)
}

/// [`masked_backward`] on a given engine.
///
/// # Errors
///
/// As [`masked_backward`], plus [`AttentionError::Unsupported`] if the engine does not support the problem.
pub fn masked_backward_on(
    engine: Engine,
    client: &Client,
    problem: &MaskedProblem,
    inputs: MaskedInputs,
    saved: Saved,
    grads: MaskedGradients,
) -> Result<(), AttentionError> {
    let plan = BackwardPlan::of(engine, client, problem, &inputs, &saved)?;
    backward_with(client, problem, inputs, saved, grads, plan)
}

/// The bytes that [`masked_backward`] needs on the device besides its arguments, known before it is called: the peak
/// total of the buffers that it holds at once, each at its requested size, whether or not the gradient of the bias is
/// requested.
///
/// # Errors
///
/// As [`masked_backward`], but for the checks of the tensors' buffers: only the strides are used here.
pub fn masked_backward_workspace(
    client: &Client,
    problem: &MaskedProblem,
    inputs: &MaskedInputs,
    saved: &Saved,
) -> Result<usize, AttentionError> {
    let (_, plan) = BackwardPlan::choose(client, problem, inputs, saved)?;
    check_device(client, &problem.attention, BINDINGS, plan.cubes(problem))?;
    Ok(plan.workspace(problem))
}

/// The bytes that [`masked_backward_on`] needs, as [`masked_backward_workspace`] counts them.
///
/// # Errors
///
/// As [`masked_backward_workspace`], plus [`AttentionError::Unsupported`] if the engine does not support the problem.
pub fn masked_backward_workspace_on(
    engine: Engine,
    client: &Client,
    problem: &MaskedProblem,
    inputs: &MaskedInputs,
    saved: &Saved,
) -> Result<usize, AttentionError> {
    let plan = BackwardPlan::of(engine, client, problem, inputs, saved)?;
    check_device(client, &problem.attention, BINDINGS, plan.cubes(problem))?;
    Ok(plan.workspace(problem))
}

/// An engine and its configurations.
enum BackwardPlan {
    Portable(Blueprints),
    /// The second field computes the gradient of a bias that is not one of keys.
    Mma(MmaBlueprints, Option<BiasPlan>),
}

/// A kernel that computes only the gradient of a bias.
enum BiasPlan {
    Portable(Blueprints),
    Wgmma(BiasBlueprint),
}

impl BiasPlan {
    fn choose(
        client: &Client,
        problem: &MaskedProblem,
        inputs: &MaskedInputs,
    ) -> Result<Self, AttentionError> {
        let (p, properties) = (&problem.attention, client.properties());
        let boxed = [&inputs.k, &inputs.v].map(|rows| takes_boxes(rows, p.element.size()));
        match BiasBlueprint::choose(problem, properties) {
            Some(blueprint) if boxed == [true; 2] => Ok(Self::Wgmma(blueprint)),
            _ => Blueprints::choose_masked(problem, &properties.hardware).map(Self::Portable),
        }
    }

    /// Cubes along each axis of the largest grid.
    fn cubes(&self, problem: &MaskedProblem) -> [usize; 3] {
        match (self, problem.bias) {
            (Self::Portable(blueprints), Some(bias)) => bias_cubes(bias, blueprints.dkdv),
            (Self::Wgmma(_), Some(bias)) => BiasBlueprint::most_cubes(bias),
            (_, None) => [1; 3],
        }
    }
}

impl BackwardPlan {
    fn choose(
        client: &Client,
        problem: &MaskedProblem,
        inputs: &MaskedInputs,
        saved: &Saved,
    ) -> Result<(Engine, Self), AttentionError> {
        Engine::first(|engine| Self::of(engine, client, problem, inputs, saved))
    }

    fn of(
        engine: Engine,
        client: &Client,
        problem: &MaskedProblem,
        inputs: &MaskedInputs,
        saved: &Saved,
    ) -> Result<Self, AttentionError> {
        let (p, properties) = (&problem.attention, client.properties());
        let size = p.element.size();
        let Some(instruction) = engine.instruction() else {
            return Blueprints::choose_masked(problem, &properties.hardware).map(Self::Portable);
        };
        let served = inputs.rows_are_chunks(problem)
            && saved.rows_are_chunks(size)
            && (instruction == Instruction::Mma || saved.takes_boxes(&inputs.q, size));
        MmaBlueprints::choose_masked(instruction, problem, properties)
            .filter(|blueprints| served && lists_fit(problem, blueprints.dkdv.step_shape()))
            .map(|blueprints| {
                let of_pairs = blueprints.dkdv.pattern.has_pair_bias();
                let bias = of_pairs.then(|| BiasPlan::choose(client, problem, inputs));
                bias.transpose().map(|bias| Self::Mma(blueprints, bias))
            })
            .ok_or_else(|| engine.refusal("gradients under masks and biases on ", p))?
    }

    /// The peak number of bytes in buffers that a pass holds at once.
    fn workspace(&self, problem: &MaskedProblem) -> usize {
        let p = &problem.attention;
        if p.batch * p.q_len * p.k_len == 0 {
            return 0;
        }
        let Self::Mma(blueprints, _) = self else {
            return bytes(p.lse_shape());
        };
        let steps = match problem.plan {
            Some(_) => QueryLists::bytes(problem, blueprints.dkdv.step_shape()),
            None => 0,
        };
        let [lists, making] = listed_bytes(problem, blueprints.dq.tile.queries());
        let sums = bytes(bias_parts(p, blueprints.dkdv)) + row_sums_bytes(p, *blueprints);
        steps + lists + making.max(sums)
    }

    /// Cubes along each axis of the largest grids.
    fn cubes(&self, problem: &MaskedProblem) -> [usize; 3] {
        let p = &problem.attention;
        match self {
            Self::Mma(blueprints, bias) => {
                let [x, y, z] = blueprints.cubes(p);
                let [bias_x, bias_y, bias_z] =
                    (bias.as_ref()).map_or([1; 3], |bias| bias.cubes(problem));
                [x.max(bias_x), y.max(bias_y), z.max(bias_z)]
            }
            Self::Portable(Blueprints { dq, dkdv }) => {
                let tiles = p.q_len.div_ceil(dq.outer_rows());
                let key_tiles = p.k_len.div_ceil(dkdv.outer_rows());
                let [x, y, z] = problem.bias.map_or([1; 3], |bias| bias_cubes(bias, *dkdv));
                [
                    tiles.max(key_tiles).max(x),
                    p.q_heads.max(y),
                    p.batch.max(z),
                ]
            }
        }
    }
}

fn backward_with(
    client: &Client,
    problem: &MaskedProblem,
    inputs: MaskedInputs,
    saved: Saved,
    grads: MaskedGradients,
    plan: BackwardPlan,
) -> Result<(), AttentionError> {
    let p = &problem.attention;
    inputs.check(problem)?;
    saved.check(p)?;
    grads.check(problem)?;
    check_device(client, p, BINDINGS, plan.cubes(problem))?;
    if p.batch * p.q_len * p.k_len == 0 {
        let element = elem_type(p.element);
        for grad in [&grads.q, &grads.k, &grads.v] {
            fill(client, grad, 0.0, element);
        }
        if let Some(bias) = &grads.bias {
            fill(client, bias, 0.0, f32::elem_type_native());
        }
        return Ok(());
    }
    let portable = |delta: TensorBinding, blueprints| PortablePass {
        client,
        problem,
        inputs: &inputs,
        saved: &saved,
        grads: &grads,
        delta,
        blueprints,
    };
    match plan {
        BackwardPlan::Portable(blueprints) => {
            let pass = portable(launch_delta(client, p, &saved), blueprints);
            pass.launch_rows();
            pass.launch_bias();
        }
        BackwardPlan::Mma(blueprints, bias) => {
            let of_pairs = match &bias {
                Some(BiasPlan::Wgmma(blueprint)) => Some(*blueprint),
                _ => None,
            };
            let delta = launch_mma(
                client, problem, &inputs, &saved, &grads, blueprints, of_pairs,
            );
            if let Some(BiasPlan::Portable(blueprints)) = bias {
                portable(delta, blueprints).launch_bias();
            }
        }
    }
    Ok(())
}

/// Returns the row sums.
fn launch_mma(
    client: &Client,
    problem: &MaskedProblem,
    inputs: &MaskedInputs,
    saved: &Saved,
    grads: &MaskedGradients,
    blueprints: MmaBlueprints,
    bias: Option<BiasBlueprint>,
) -> TensorBinding {
    let p = &problem.attention;
    let (steps, capacity) = match &inputs.plan {
        Some(plan) => {
            let lists = query_lists(client, problem, plan, blueprints.dkdv.step_shape());
            ([lists.list, lists.counts], lists.capacity)
        }
        None => ([inputs.q.clone(), inputs.q.clone()], p.k_len),
    };
    let lists = MaskLists {
        blocks: inputs.listed(client, problem, blueprints.dq.tile.queries(), &inputs.k),
        steps,
        capacity,
    };
    let of_keys = blueprints.dkdv.pattern.has_key_bias();
    let parts = scratch(client, bias_parts(p, blueprints.dkdv));
    if blueprints.dkdv.pattern.has_head_bias() {
        fill(client, &parts, 0.0, f32::elem_type_native());
    }
    let plan = match &inputs.plan {
        Some(plan) => [plan.bits.clone(), plan.counts.clone()],
        None => [inputs.q.clone(), inputs.q.clone()],
    };
    let of_pairs = (grads.bias.as_ref().zip(bias)).map(|(grad, blueprint)| {
        let gradient = BiasGradient {
            bias: inputs.bias.as_ref().unwrap_or(&inputs.q),
            plan,
            grad,
        };
        (gradient, blueprint)
    });
    let delta = launch_masked(
        client,
        problem,
        [&inputs.q, &inputs.k, &inputs.v],
        saved,
        lists,
        [&grads.q, &grads.k, &grads.v],
        parts.clone(),
        of_pairs,
        blueprints,
    );
    if let Some(bias) = grads.bias.as_ref().filter(|_| of_keys) {
        sum_heads(client, &parts, bias);
    }
    delta
}

/// The shape of the gradients of the biases of keys before summing over the sequences and heads that share one; one
/// word without biases. The kernel sums over the queries, and over the heads of a group if they share a bias.
fn bias_parts(p: &Problem, blueprint: DkdvBlueprint) -> [usize; 3] {
    match (
        blueprint.pattern.has_key_bias(),
        blueprint.pattern.has_head_bias(),
    ) {
        (false, _) => [1; 3],
        (true, false) => [p.batch, p.kv_heads, p.k_len],
        (true, true) => [p.batch, p.q_heads, p.k_len],
    }
}

/// The portable kernels of a checked, non-empty problem.
struct PortablePass<'a> {
    client: &'a Client,
    problem: &'a MaskedProblem,
    inputs: &'a MaskedInputs,
    saved: &'a Saved,
    grads: &'a MaskedGradients,
    /// The row sums.
    delta: TensorBinding,
    blueprints: Blueprints,
}

impl<'a> PortablePass<'a> {
    /// The gradients of q, k and v.
    fn launch_rows(&self) {
        let p = &self.problem.attention;
        let (Blueprints { dq, dkdv }, grads) = (self.blueprints, self.grads);
        let tiles = p.q_len.div_ceil(dq.outer_rows());
        (self.kernel(dq)).dq(self.saved_rows(), 0, tiles, &grads.q);
        let tiles = p.k_len.div_ceil(dkdv.outer_rows());
        (self.kernel(dkdv)).dkdv(self.saved_rows(), tiles, [&grads.k, &grads.v], None);
    }

    /// The gradient of the bias, if it is requested.
    fn launch_bias(&self) {
        if let (Some(grad), Some(shape)) = (&self.grads.bias, self.problem.bias) {
            let kernel = self.kernel(self.blueprints.dkdv);
            kernel.bias_gradient(self.saved_rows(), grad, shape);
        }
    }

    fn kernel(&self, blueprint: Blueprint) -> PortableLaunch<'a> {
        let inputs = self.inputs;
        PortableLaunch {
            client: self.client,
            problem: &self.problem.attention,
            q: &inputs.q,
            k: &inputs.k,
            v: &inputs.v,
            keys: KeyTensors::of_mask(inputs.plan.as_ref()),
            bias: inputs.bias.as_ref(),
            blueprint,
        }
    }

    fn saved_rows(&self) -> SavedTensors<'_> {
        SavedTensors {
            grad_out: &self.saved.grad_out,
            lse: &self.saved.lse,
            delta: &self.delta,
        }
    }
}
