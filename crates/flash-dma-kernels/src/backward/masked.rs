//! Host side of the backward pass under a mask and a bias.

use crate::args::Saved;
use crate::backward::Backward;
use crate::backward::bias::blueprint::BiasBlueprint;
use crate::backward::bias::rows::{row_bias_bytes, row_bias_gradient};
use crate::backward::blueprint::MmaBlueprints;
use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::args::GradientTensors;
use crate::backward::launch::{BINDINGS, Blueprints, check_rows};
use crate::backward::matrix::pass::{KeyLists, MmaPass, row_sums_bytes};
use crate::host::check::{check_saved, elem_type};
use crate::host::engine::{Engine, Instruction, Refusal};
use crate::host::fill::fill;
use crate::host::pass::{Config, ConfigOf, Pass, Plan, Rows};
use crate::host::scratch::{bytes, scratch};
use crate::matrix::wgmma::boxes::takes_boxes;
use crate::pattern::mask::args::{MaskedGradients, MaskedInputs};
use crate::pattern::mask::listed::listed_bytes;
use crate::pattern::mask::query_lists::{QueryLists, lists_fit, query_lists, sum_heads};
use crate::pattern::tensors::{KeyTensors, SourceTensors, TileLaunch};
use crate::portable::launch::{PortableLaunch, SavedTensors, bias_cubes};
use crate::row_sums::{RowSums, rest_bytes};
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
            (Self::Wgmma(_), Some(bias)) => BiasBlueprint::cubes_of(bias, 1),
            (_, None) => [1; 3],
        }
    }
}

impl Pass for MaskedBackward<'_> {
    type Outputs = MaskedGradients;
    type Portable = Blueprints;
    /// The second is the kernel for a bias that is not per key and differs from key to key.
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
        check_rows(
            saved,
            instruction,
            &inputs.q,
            problem.attention.element.size(),
        )?;
        if !lists_fit(problem, blueprints.dkdv.tiles.step_shape()) {
            return Err(Obstacle::Lists.into());
        }
        let of_pairs = blueprints.dkdv.tiles.pattern.has_pair_bias() && !problem.has_row_bias();
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
        let rest = rest_bytes(p, self.saved);
        let rows = (problem.bias).filter(|_| problem.has_row_bias());
        let with_rows = bytes(p.lse_shape()) + rows.map_or(0, |shape| row_bias_bytes(p, shape));
        let Config::Matrix((blueprints, _)) = config else {
            return with_rows.max(bytes(p.lse_shape()) + rest);
        };
        let steps = match problem.plan {
            Some(_) => QueryLists::bytes(problem, blueprints.dkdv.tiles.step_shape()),
            None => 0,
        };
        let [lists, making] = listed_bytes(problem, blueprints.dq.tile.queries());
        let parts = bias_parts(p, blueprints.dkdv.tiles).map_or(0, bytes);
        let sums = parts + row_sums_bytes(p, *blueprints) + rest;
        (steps + lists + making.max(sums)).max(with_rows)
    }

    fn check(&self, grads: &MaskedGradients) -> Result<(), AttentionError> {
        self.inputs.check(self.problem)?;
        check_saved(&self.problem.attention, self.saved)?;
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
        let of_rows = grads.bias.take_if(|_| self.problem.has_row_bias());
        let delta = self.launch_pairs(client, config, &grads);
        if let Some(bias) = &of_rows {
            row_bias_gradient(client, &self.problem.attention, self.saved, &delta, bias);
        }
    }
}

impl MaskedBackward<'_> {
    /// Computes all gradients except that of a bias that all keys share. Returns the row sums `delta`.
    fn launch_pairs(
        &self,
        client: &Client,
        config: ConfigOf<Self>,
        grads: &MaskedGradients,
    ) -> TensorBinding {
        let (problem, saved, p) = (self.problem, self.saved, &self.problem.attention);
        let sums = match &config {
            Config::Portable(_) => RowSums::portable(client, p, saved),
            Config::Matrix((blueprints, bias)) => {
                self.launch_matrix(client, *blueprints, bias.as_ref(), grads)
            }
        };
        let rows = SavedTensors { saved, sums: &sums };
        let kernel = |blueprint| PortableLaunch::masked(client, problem, self.inputs, blueprint);
        if let Config::Portable(Blueprints { dq, dkdv }) = config {
            let tiles = p.q_len.div_ceil(dq.outer_rows());
            kernel(dq).dq(rows, 0, tiles, &grads.q);
            let tiles = p.k_len.div_ceil(dkdv.outer_rows());
            kernel(dkdv).dkdv(rows, tiles, [&grads.k, &grads.v], None);
        }
        let of_bias = match config {
            Config::Portable(blueprints)
            | Config::Matrix((_, Some(BiasPlan::Portable(blueprints)))) => Some(blueprints.dkdv),
            Config::Matrix(_) => None,
        };
        if let (Some(blueprint), Some(grad), Some(shape)) = (of_bias, &grads.bias, problem.bias) {
            kernel(blueprint).bias_gradient(rows, grad, shape);
        }
        sums.delta
    }

    /// Launches the kernels on tensor cores; `bias` computes the gradient of a bias, if it is one of them.
    fn launch_matrix(
        &self,
        client: &Client,
        blueprints: MmaBlueprints,
        bias: Option<&BiasPlan>,
        grads: &MaskedGradients,
    ) -> RowSums {
        let (problem, inputs, p) = (self.problem, self.inputs, &self.problem.attention);
        let (dq, dkdv) = (blueprints.dq, blueprints.dkdv.tiles);
        let (keys, capacity) = match &inputs.plan {
            Some(plan) => {
                let lists = query_lists(client, problem, plan, dkdv.step_shape());
                let tensors = [plan.bits.clone(), lists.list, lists.counts];
                (KeyTensors::Planned(tensors), lists.capacity)
            }
            None => (KeyTensors::All, p.k_len),
        };
        let key_lists = KeyLists {
            source: SourceTensors {
                bias: inputs.bias.clone(),
                keys,
                kept_from: None,
            },
            capacity,
            chunks: 1,
            tiles: p.k_len.div_ceil(dkdv.keys()),
        };
        let queries = dq.tile.queries();
        let tiles = TileLaunch {
            source: inputs.listed(client, problem, queries, &inputs.k),
            first: 0,
            count: p.q_len.div_ceil(queries),
        };
        let parts = bias_parts(p, dkdv).map(|shape| scratch(client, shape));
        if let Some(parts) = (parts.as_ref()).filter(|_| dkdv.pattern.has_head_bias()) {
            fill(client, parts, 0.0, f32::elem_type_native());
        }
        let pass = MmaPass::new(client, p, inputs.rows(), self.saved, blueprints);
        pass.launch_dq(tiles, &grads.q);
        let to = [&grads.k, &grads.v].map(GradientTensors::of);
        pass.launch_dkdv(key_lists, to, parts.clone(), elem_type(p.element));
        if let (Some(BiasPlan::Wgmma(blueprint)), Some(grad)) = (bias, &grads.bias) {
            pass.launch_bias(problem, inputs, grad, *blueprint);
        }
        if let Some((parts, bias)) = parts.as_ref().zip(grads.bias.as_ref()) {
            sum_heads(client, parts, bias);
        }
        pass.data.sums
    }
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
