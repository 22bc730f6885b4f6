//! Host side of the backward pass under a mask and a bias.

use crate::args::Saved;
use crate::backward::Backward;
use crate::backward::bias::blueprint::BiasBlueprint;
use crate::backward::bias::launch::BiasGradient;
use crate::backward::bias::rows::{row_bias_bytes, row_bias_gradient};
use crate::backward::blueprint::{DkdvBlueprint, MmaBlueprints};
use crate::backward::launch::{BINDINGS, Blueprints, launch_delta};
use crate::backward::matrix::masked::{MaskLists, launch_masked};
use crate::backward::matrix::pass::{RowSums, row_sums_bytes};
use crate::host::check::elem_type;
use crate::host::engine::{Engine, Instruction, Refusal};
use crate::host::fill::fill;
use crate::host::pass::{Config, ConfigOf, Pass, Plan, Rows};
use crate::host::scratch::{bytes, scratch};
use crate::matrix::wgmma::boxes::takes_boxes;
use crate::pattern::mask::args::{MaskedGradients, MaskedInputs};
use crate::pattern::mask::listed::listed_bytes;
use crate::pattern::mask::query_lists::{QueryLists, lists_fit, query_lists, sum_heads};
use crate::portable::blueprint::Blueprint;
use crate::portable::launch::{PortableKeys, PortableLaunch, SavedTensors, bias_cubes};
use cubecl::client::Client;
use cubecl::ir::{DeviceProperties, HardwareProperties};
use cubecl::prelude::*;
use flash_dma_problem::{AttentionError, MaskedProblem, Obstacle, PassKind, Problem};

/// The backward pass of a problem with a mask and a bias.
struct MaskedBackward<'a> {
    problem: &'a MaskedProblem,
    inputs: &'a MaskedInputs,
    saved: &'a Saved,
}

impl Backward for MaskedProblem {
    type Gradients = MaskedGradients;

    fn plan_backward<'a>(
        &'a self,
        client: &'a Client,
        inputs: &'a MaskedInputs,
        saved: &'a Saved,
        engine: Option<Engine>,
    ) -> Result<Plan<'a, MaskedGradients>, AttentionError> {
        let pass = MaskedBackward {
            problem: self,
            inputs,
            saved,
        };
        Plan::new(client, engine, pass)
    }
}

/// A kernel that computes only the gradient of a bias.
pub(crate) enum BiasPlan {
    Portable(Blueprints),
    Wgmma(BiasBlueprint),
}

impl BiasPlan {
    fn choose(
        properties: &DeviceProperties,
        problem: &MaskedProblem,
        inputs: &MaskedInputs,
    ) -> Result<Self, AttentionError> {
        let size = problem.attention.element.size();
        let boxed = [&inputs.k, &inputs.v].map(|rows| takes_boxes(rows, size));
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

impl Pass for MaskedBackward<'_> {
    type Outputs = MaskedGradients;
    type Portable = Blueprints;
    /// The second computes the gradient of a bias that is not one of keys and differs from key to key.
    type Matrix = (MmaBlueprints, Option<BiasPlan>);

    const BINDINGS: u32 = BINDINGS;
    const KIND: PassKind = PassKind::Backward;

    fn rows(&self) -> Rows {
        (&self.problem.attention).into()
    }

    fn portable(&self, hardware: &HardwareProperties) -> Result<Blueprints, AttentionError> {
        Blueprints::choose_masked(self.problem, hardware)
    }

    fn matrix(
        &self,
        instruction: Instruction,
        properties: &DeviceProperties,
    ) -> Result<Self::Matrix, Refusal> {
        let (problem, inputs, saved) = (self.problem, self.inputs, self.saved);
        let blueprints = MmaBlueprints::choose_masked(instruction, problem, properties)?;
        inputs.check_segments(problem)?;
        saved.check_rows(instruction, &inputs.q, problem.attention.element.size())?;
        if !lists_fit(problem, blueprints.dkdv.step_shape()) {
            return Err(Obstacle::Lists.into());
        }
        let of_pairs = blueprints.dkdv.pattern.has_pair_bias() && !problem.has_row_bias();
        let bias = of_pairs.then(|| BiasPlan::choose(properties, problem, inputs));
        Ok((blueprints, bias.transpose()?))
    }

    fn cubes(&self, config: &ConfigOf<Self>) -> [usize; 3] {
        let p = &self.problem.attention;
        let (cubes, of_bias) = match config {
            Config::Matrix((blueprints, bias)) => {
                let of_bias = bias.as_ref().map(|bias| bias.cubes(self.problem));
                (blueprints.cubes(p), of_bias)
            }
            Config::Portable(blueprints) => {
                let bias = (self.problem.bias).filter(|_| !self.problem.has_row_bias());
                let of_bias = bias.map(|bias| bias_cubes(bias, blueprints.dkdv));
                (blueprints.cubes(p), of_bias)
            }
        };
        let of_bias = of_bias.unwrap_or([1; 3]);
        [0, 1, 2].map(|axis| cubes[axis].max(of_bias[axis]))
    }

    fn workspace_bytes(&self, config: &ConfigOf<Self>) -> usize {
        let (problem, p) = (self.problem, &self.problem.attention);
        let rest = self.saved.rest_bytes(p);
        let rows = (problem.bias).filter(|_| problem.has_row_bias());
        let with_rows = bytes(p.lse_shape()) + rows.map_or(0, |shape| row_bias_bytes(p, shape));
        let Config::Matrix((blueprints, _)) = config else {
            return with_rows.max(bytes(p.lse_shape()) + rest);
        };
        let steps = match problem.plan {
            Some(_) => QueryLists::bytes(problem, blueprints.dkdv.step_shape()),
            None => 0,
        };
        let [lists, making] = listed_bytes(problem, blueprints.dq.tile.queries());
        let parts = bias_parts(p, blueprints.dkdv).map_or(0, bytes);
        let sums = parts + row_sums_bytes(p, *blueprints) + rest;
        (steps + lists + making.max(sums)).max(with_rows)
    }

    fn check(&self, grads: &MaskedGradients) -> Result<(), AttentionError> {
        self.inputs.check(self.problem)?;
        self.saved.check(&self.problem.attention)?;
        grads.check(self.problem)
    }

    fn launch_empty(&self, client: &Client, grads: MaskedGradients) {
        let element = elem_type(self.problem.attention.element);
        for grad in [&grads.q, &grads.k, &grads.v] {
            fill(client, grad, 0.0, element);
        }
        if let Some(bias) = &grads.bias {
            fill(client, bias, 0.0, f32::elem_type_native());
        }
    }

    fn launch(&self, client: &Client, config: ConfigOf<Self>, mut grads: MaskedGradients) {
        let &Self {
            problem,
            inputs,
            saved,
        } = self;
        let of_rows = grads.bias.take_if(|_| problem.has_row_bias());
        let portable = |sums: RowSums, blueprints| PortablePass {
            client,
            problem,
            inputs,
            saved,
            grads: &grads,
            sums,
            blueprints,
        };
        let delta = match config {
            Config::Portable(blueprints) => {
                let delta = launch_delta(client, &problem.attention, saved);
                let sums = RowSums {
                    delta: delta.clone(),
                    lse_rest: saved.rest_or_zeros(client, &problem.attention),
                };
                let pass = portable(sums, blueprints);
                pass.launch_rows();
                pass.launch_bias();
                delta
            }
            Config::Matrix((blueprints, bias)) => {
                let of_pairs = match &bias {
                    Some(BiasPlan::Wgmma(blueprint)) => Some(*blueprint),
                    _ => None,
                };
                let sums = launch_mma(client, problem, inputs, saved, &grads, blueprints, of_pairs);
                let delta = sums.delta.clone();
                if let Some(BiasPlan::Portable(blueprints)) = bias {
                    portable(sums, blueprints).launch_bias();
                }
                delta
            }
        };
        if let Some(bias) = &of_rows {
            row_bias_gradient(client, &problem.attention, saved, &delta, bias);
        }
    }
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
) -> RowSums {
    let p = &problem.attention;
    let (steps, capacity) = match &inputs.plan {
        Some(plan) => {
            let lists = query_lists(client, problem, plan, blueprints.dkdv.step_shape());
            (Some([lists.list, lists.counts]), lists.capacity)
        }
        None => (None, p.k_len),
    };
    let lists = MaskLists {
        blocks: inputs.listed(client, problem, blueprints.dq.tile.queries(), &inputs.k),
        steps,
        capacity,
    };
    let parts = bias_parts(p, blueprints.dkdv).map(|shape| scratch(client, shape));
    if let Some(parts) = (parts.as_ref()).filter(|_| blueprints.dkdv.pattern.has_head_bias()) {
        fill(client, parts, 0.0, f32::elem_type_native());
    }
    let biases = inputs.bias.as_ref().zip(grads.bias.as_ref());
    let of_pairs = biases.zip(bias).map(|((bias, grad), blueprint)| {
        let plan = inputs.plan.as_ref();
        (BiasGradient { bias, plan, grad }, blueprint)
    });
    let sums = launch_masked(
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
    if let Some((parts, bias)) = parts.as_ref().zip(grads.bias.as_ref()) {
        sum_heads(client, parts, bias);
    }
    sums
}

/// The shape of the gradients of a bias per key before summing over the sequences and heads that share one. The kernel
/// sums over the queries, and over the heads of a group if they share a bias.
fn bias_parts(p: &Problem, blueprint: DkdvBlueprint) -> Option<[usize; 3]> {
    let heads = match blueprint.pattern.has_head_bias() {
        false => p.kv_heads,
        true => p.q_heads,
    };
    (blueprint.pattern.has_key_bias()).then_some([p.batch, heads, p.k_len])
}

/// The portable kernels of a checked, non-empty problem.
struct PortablePass<'a> {
    client: &'a Client,
    problem: &'a MaskedProblem,
    inputs: &'a MaskedInputs,
    saved: &'a Saved,
    grads: &'a MaskedGradients,
    sums: RowSums,
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
            keys: PortableKeys::of_mask(inputs.plan.as_ref()),
            bias: inputs.bias.as_ref(),
            blueprint,
        }
    }

    fn saved_rows(&self) -> SavedTensors<'_> {
        SavedTensors {
            grad_out: &self.saved.grad_out,
            lse: &self.saved.lse,
            lse_rest: &self.sums.lse_rest,
            delta: &self.sums.delta,
        }
    }
}
