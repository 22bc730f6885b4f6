//! Host side of the backward pass.

use crate::args::{Gradients, Inputs, Saved};
use crate::backward::blueprint::MmaBlueprints;
use crate::backward::matrix;
use crate::host::check::{
    Layout, address_type, check_device, check_tensor, elem_type, rows_are_chunks, vector_size,
};
use crate::host::engine::Engine;
use crate::host::fill::fill;
use crate::host::scratch::{bytes, one_unit_each, scratch};
use crate::matrix::wgmma::boxes::takes_boxes;
use crate::pattern::intervals::order::{OrderedKeys, by_death};
use crate::pattern::intervals::slices::{for_each_slice, slice_bytes};
use crate::pattern::intervals::tiles::QueryTiles;
use crate::pattern::intervals::{LiveKeys, live_keys};
use crate::pattern::kind::{Bias, Pattern};
use crate::portable::blueprint::{Blueprint, Pass};
use crate::portable::delta::delta_kernel;
use crate::portable::launch::{KeyTensors, PortableLaunch, SavedTensors};
use cubecl::client::Client;
use cubecl::ir::HardwareProperties;
use cubecl::prelude::*;
use flash_dma_problem::{AttentionError, MaskedProblem, Problem, TensorName};

/// The most buffers of any kernel.
const BINDINGS: u32 = 13;

/// Comptime configurations of the two large kernels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blueprints {
    pub dq: Blueprint,
    pub dkdv: Blueprint,
}

impl Blueprints {
    pub(crate) fn choose(
        problem: &Problem,
        hardware: &HardwareProperties,
    ) -> Result<Self, AttentionError> {
        Ok(Self {
            dq: Blueprint::choose(Pass::GradQuery, problem, hardware)?,
            dkdv: Blueprint::choose(Pass::GradKeyValue, problem, hardware)?,
        })
    }

    /// As [`choose`](Self::choose) for a mask and a bias.
    pub(crate) fn choose_masked(
        problem: &MaskedProblem,
        hardware: &HardwareProperties,
    ) -> Result<Self, AttentionError> {
        let pattern = Pattern::masked(problem, Bias::strided(problem));
        let Self { dq, dkdv } = Self::choose(&problem.attention, hardware)?;
        Ok(Self {
            dq: dq.with_pattern(pattern),
            dkdv: dkdv.with_pattern(pattern),
        })
    }

    /// The bytes of the buffers that [`launch_portable`] holds at once at most.
    pub(crate) fn workspace(&self, problem: &Problem) -> usize {
        let dkdv = OrderedKeys::bytes(problem);
        let dq = slice_bytes(problem, self.dq.outer_rows());
        LiveKeys::bytes(problem) + bytes(problem.lse_shape()) + dq.max(dkdv)
    }
}

/// The gradients of q, k, v and the scores, all contiguous and overwritten; exactly zero where no pair
/// contributes. The selection is a constant: no gradient flows through it.
///
/// Runs asynchronously on the client's stream, on the engine of [`backward_engine`].
///
/// Memory besides the arguments is O(N): one f32 per query row, the key lists, and, on the tensor-core engines, f32
/// sums of the gradients of k and v, `8 * batch * kv_heads * k_len * head_dim` bytes, unless there are no scores or the
/// window covers all queries. Cubes add to these by atomics, in any order. If the problem requests determinism, cubes
/// write their parts separately, which takes twice the memory, and a second kernel sums them in a fixed order.
/// [`Engine::Portable`] is deterministic and has no sums.
///
/// # Errors
///
/// [`AttentionError`] if a tensor does not fit the problem, `selection` or the gradient of the scores is missing
/// although the problem has scores or is given although it has none, the device lacks what the kernels need, or
/// [`ENGINE_VARIABLE`](crate::host::engine::ENGINE_VARIABLE) names no engine. Nothing is launched in that case.
pub fn backward(
    client: &Client,
    problem: &Problem,
    inputs: Inputs,
    saved: Saved,
    grads: Gradients,
) -> Result<(), AttentionError> {
    let (_, plan) = Plan::choose(client, problem, &inputs, &saved)?;
    backward_with(client, problem, inputs, saved, grads, plan)
}

/// The engine that [`backward`] runs on: the first that supports the problem. [`Engine::Wgmma`] takes f16 and bf16 with
/// a head dimension of 64 or 128 on sm_90, [`Engine::Mma`] head dimensions that are multiples of 32 on sm_80 and newer,
/// both rows of `q`, `k`, `v`, `out` and `grad_out` that begin at multiples of 16 bytes (for [`Engine::Wgmma`], also
/// without rows of `q` and `grad_out` repeated by a stride of 0); [`Engine::Portable`] everything. The environment
/// variable [`ENGINE_VARIABLE`](crate::host::engine::ENGINE_VARIABLE) excludes engines.
#[must_use]
pub fn backward_engine(
    client: &Client,
    problem: &Problem,
    inputs: &Inputs,
    saved: &Saved,
) -> Engine {
    Plan::choose(client, problem, inputs, saved).map_or(Engine::Portable, |(engine, _)| engine)
}

/// [`backward`] on a given engine.
///
/// # Errors
///
/// As [`backward`], plus [`AttentionError::Unsupported`] if the engine does not support the problem.
pub fn backward_on(
    engine: Engine,
    client: &Client,
    problem: &Problem,
    inputs: Inputs,
    saved: Saved,
    grads: Gradients,
) -> Result<(), AttentionError> {
    let plan = Plan::of(engine, client, problem, &inputs, &saved)?;
    backward_with(client, problem, inputs, saved, grads, plan)
}

/// An engine and its comptime configuration.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Plan {
    Portable(Blueprints),
    Mma(MmaBlueprints),
}

impl Plan {
    /// The first engine that supports the problem, by the rule of [`backward_engine`].
    pub(crate) fn choose(
        client: &Client,
        problem: &Problem,
        inputs: &Inputs,
        saved: &Saved,
    ) -> Result<(Engine, Self), AttentionError> {
        Engine::first(|engine| Self::of(engine, client, problem, inputs, saved))
    }

    pub(crate) fn of(
        engine: Engine,
        client: &Client,
        problem: &Problem,
        inputs: &Inputs,
        saved: &Saved,
    ) -> Result<Self, AttentionError> {
        let properties = client.properties();
        let size = problem.element.size();
        let chunks = || inputs.rows_are_chunks(size) && saved.rows_are_chunks(size);
        let boxes = || saved.takes_boxes(&inputs.q, size);
        let plan = match engine {
            Engine::Portable => {
                return Blueprints::choose(problem, &properties.hardware).map(Self::Portable);
            }
            Engine::Mma if chunks() => MmaBlueprints::choose(problem, properties).map(Self::Mma),
            Engine::Wgmma if chunks() && boxes() => {
                MmaBlueprints::choose_wgmma(problem, properties).map(Self::Mma)
            }
            _ => None,
        };
        plan.ok_or_else(|| engine.refusal("the backward pass on ", problem))
    }

    /// Checks that the device has what the kernels need.
    pub(crate) fn check(&self, client: &Client, problem: &Problem) -> Result<(), AttentionError> {
        check_device(client, problem, BINDINGS, self.cubes(problem))
    }

    /// Cubes along each axis.
    fn cubes(&self, problem: &Problem) -> [usize; 3] {
        match self {
            Self::Portable(blueprints) => {
                let tiles = problem.q_len.div_ceil(blueprints.dq.outer_rows());
                let key_tiles = problem.k_len.div_ceil(blueprints.dkdv.outer_rows());
                [tiles.max(key_tiles), problem.q_heads, problem.batch]
            }
            Self::Mma(blueprints) => blueprints.cubes(problem),
        }
    }
}

/// [`backward`] with a given plan.
pub(crate) fn backward_with(
    client: &Client,
    problem: &Problem,
    inputs: Inputs,
    saved: Saved,
    grads: Gradients,
    plan: Plan,
) -> Result<(), AttentionError> {
    inputs.check(problem)?;
    saved.check(problem)?;
    grads.check(problem)?;
    plan.check(client, problem)?;
    if problem.q_len == 0 || problem.k_len == 0 {
        zero(client, problem, &grads);
        fill(client, &grads.q, 0.0, elem_type(problem.element));
        return Ok(());
    }
    if problem.batch == 0 {
        return Ok(());
    }
    match plan {
        Plan::Portable(blueprints) => {
            launch_portable(client, problem, &inputs, &saved, &grads, blueprints);
        }
        Plan::Mma(blueprints) => {
            matrix::launch::launch(client, problem, &inputs, &saved, &grads, blueprints);
        }
    }
    Ok(())
}

fn launch_portable(
    client: &Client,
    problem: &Problem,
    inputs: &Inputs,
    saved: &Saved,
    grads: &Gradients,
    blueprints: Blueprints,
) {
    if problem.has_scores {
        // Keys that no query attends to are never visited.
        zero(client, problem, grads);
    }
    let delta = launch_delta(client, problem, saved);
    let live = (inputs.selection.as_ref()).map(|selection| live_keys(client, problem, selection));
    let pass = BackwardPass {
        client,
        problem,
        inputs,
        saved,
        delta: &delta,
        live: live.as_ref(),
    };
    let tiles = QueryTiles::new(problem, blueprints.dq.outer_rows());
    pass.launch_dq(grads, &tiles, blueprints.dq);
    pass.launch_dkdv(grads, blueprints.dkdv);
}

/// Zeroes the gradients of k, v and the scores.
fn zero(client: &Client, problem: &Problem, grads: &Gradients) {
    let element = elem_type(problem.element);
    fill(client, &grads.k, 0.0, element);
    fill(client, &grads.v, 0.0, element);
    if let Some(scores) = &grads.scores {
        fill(client, scores, 0.0, f32::elem_type_native());
    }
}

impl Saved {
    /// Whether the rows of both tensors have the alignment that the tensor-core engines need.
    pub(crate) fn rows_are_chunks(&self, size: usize) -> bool {
        let rows = [&self.out, &self.grad_out];
        rows.iter().all(|rows| rows_are_chunks(rows, size))
    }

    /// Whether the rows of dO and of `q` can be copied as boxes.
    pub(crate) fn takes_boxes(&self, q: &TensorBinding, size: usize) -> bool {
        takes_boxes(q, size) && takes_boxes(&self.grad_out, size)
    }

    pub(crate) fn check(&self, problem: &Problem) -> Result<(), AttentionError> {
        let (size, rows, lse) = (
            problem.element.size(),
            problem.q_shape(),
            problem.lse_shape(),
        );
        check_tensor(TensorName::Out, &self.out, &rows, size, Layout::Strided)?;
        check_tensor(TensorName::Lse, &self.lse, &lse, 4, Layout::Contiguous)?;
        check_tensor(
            TensorName::GradOut,
            &self.grad_out,
            &rows,
            size,
            Layout::Strided,
        )?;
        match &self.grad_lse {
            Some(grad) => check_tensor(TensorName::GradLse, grad, &lse, 4, Layout::Contiguous),
            None => Ok(()),
        }
    }
}

impl Gradients {
    fn check(&self, problem: &Problem) -> Result<(), AttentionError> {
        let (size, kv, contiguous) = (
            problem.element.size(),
            problem.kv_shape(),
            Layout::Contiguous,
        );
        let q = problem.q_shape();
        check_tensor(TensorName::GradQuery, &self.q, &q, size, contiguous)?;
        check_tensor(TensorName::GradKey, &self.k, &kv, size, contiguous)?;
        check_tensor(TensorName::GradValue, &self.v, &kv, size, contiguous)?;
        match &self.scores {
            Some(scores) if problem.has_scores => {
                let shape = problem.scores_shape();
                check_tensor(TensorName::GradScores, scores, &shape, 4, contiguous)
            }
            None if !problem.has_scores => Ok(()),
            _ => Err(AttentionError::ScoresGradient),
        }
    }
}

/// The row sums `delta` in a new buffer `[batch, q_heads, q_len]`, f32.
pub(crate) fn launch_delta(client: &Client, problem: &Problem, saved: &Saved) -> TensorBinding {
    let delta = scratch(client, problem.lse_shape());
    let rows = problem.lse_shape().iter().product();
    let (cube_count, cube_dim) = one_unit_each(client, rows);
    let size = problem.element.size();
    let typed = [&saved.out, &saved.grad_out];
    let grad_lse = saved.grad_lse.as_ref().unwrap_or(&saved.lse);
    // SAFETY: units past the rows return; the buffers were checked to hold what is indexed.
    unsafe {
        delta_kernel::launch_unchecked(
            client,
            cube_count,
            cube_dim,
            address_type(&typed, size).max(address_type(&[&delta], 4)),
            vector_size(&typed, size),
            saved.out.clone().into_tensor_arg(),
            saved.grad_out.clone().into_tensor_arg(),
            grad_lse.clone().into_tensor_arg(),
            delta.clone().into_tensor_arg(),
            problem.head_dim,
            saved.grad_lse.is_some(),
            elem_type(problem.element),
        );
    }
    delta
}

/// The inputs of both large kernels.
struct BackwardPass<'a> {
    client: &'a Client,
    problem: &'a Problem,
    inputs: &'a Inputs,
    saved: &'a Saved,
    delta: &'a TensorBinding,
    live: Option<&'a LiveKeys>,
}

impl<'a> BackwardPass<'a> {
    fn launch_dq(&self, grads: &Gradients, tiles: &QueryTiles, blueprint: Blueprint) {
        let (client, problem, inputs) = (self.client, self.problem, self.inputs);
        let results = [&grads.q];
        for_each_slice(
            client,
            problem,
            inputs,
            self.live,
            tiles,
            &results,
            |slice| {
                let keys = match blueprint.pattern {
                    Pattern::Intervals => KeyTensors::Intervals(slice.selection),
                    _ => KeyTensors::All,
                };
                let kernel = self.kernel(keys, blueprint);
                kernel.dq(self.saved(), slice.first_tile, slice.tiles, &grads.q);
            },
        );
    }

    fn launch_dkdv(&self, grads: &Gradients, blueprint: Blueprint) {
        let (keys, listed) = match (&self.inputs.selection, self.live) {
            (Some(selection), Some(live)) => {
                let ordered = by_death(self.client, self.problem, live);
                let scores = selection.scores.clone();
                let tensors = [scores, ordered.keys, ordered.ends, ordered.counts];
                (KeyTensors::Intervals(tensors), ordered.capacity)
            }
            _ => (KeyTensors::All, self.problem.k_len),
        };
        let key_tiles = listed.div_ceil(blueprint.outer_rows());
        let kernel = self.kernel(keys, blueprint);
        let rows = [&grads.k, &grads.v];
        kernel.dkdv(self.saved(), key_tiles, rows, grads.scores.as_ref());
    }

    fn kernel(&self, keys: KeyTensors, blueprint: Blueprint) -> PortableLaunch<'a> {
        let Inputs { q, k, v, .. } = self.inputs;
        PortableLaunch {
            client: self.client,
            problem: self.problem,
            q,
            k,
            v,
            keys,
            bias: None,
            blueprint,
        }
    }

    fn saved(&self) -> SavedTensors<'a> {
        SavedTensors {
            grad_out: &self.saved.grad_out,
            lse: &self.saved.lse,
            delta: self.delta,
        }
    }
}

/// The bytes of the placeholder for the gradient of the scores if there is none.
pub(crate) fn no_scores_bytes(problem: &Problem) -> usize {
    if problem.has_scores { 0 } else { bytes([1]) }
}
