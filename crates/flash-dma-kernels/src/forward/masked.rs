//! Host side of the forward pass under a mask and a bias.

use crate::args::Outputs;
use crate::forward::launch::{BINDINGS, select_nothing};
use crate::forward::{Forward, matrix};
use crate::host::engine::{Engine, Instruction, Refusal};
use crate::host::pass::{Config, ConfigOf, Pass, Plan, Rows};
use crate::matrix::args::TileLaunch;
use crate::matrix::blueprint::MmaBlueprint;
use crate::pattern::kind::{Bias, Pattern};
use crate::pattern::mask::args::MaskedInputs;
use crate::pattern::mask::listed::listed_bytes;
use crate::portable::blueprint::{Blueprint, Kernel};
use crate::portable::launch::{PortableKeys, PortableLaunch};
use cubecl::client::Client;
use cubecl::ir::{DeviceProperties, HardwareProperties};
use flash_dma_problem::{AttentionError, MaskedProblem, PassKind};

/// The forward pass of a problem with a mask and a bias.
struct MaskedForward<'a> {
    problem: &'a MaskedProblem,
    inputs: &'a MaskedInputs,
}

impl Forward for MaskedProblem {
    type Inputs = MaskedInputs;

    fn plan_forward<'a>(
        &'a self,
        client: &'a Client,
        inputs: &'a MaskedInputs,
        engine: Option<Engine>,
    ) -> Result<Plan<'a, Outputs>, AttentionError> {
        let pass = MaskedForward {
            problem: self,
            inputs,
        };
        Plan::new(client, engine, pass)
    }
}

/// Queries per tile.
fn queries(config: &ConfigOf<MaskedForward<'_>>) -> usize {
    match config {
        Config::Portable(blueprint) => blueprint.outer_rows(),
        Config::Matrix(blueprint) => blueprint.queries(),
    }
}

impl Pass for MaskedForward<'_> {
    type Outputs = Outputs;
    type Portable = Blueprint;
    type Matrix = MmaBlueprint;

    const BINDINGS: u32 = BINDINGS;
    const KIND: PassKind = PassKind::Forward;

    fn rows(&self) -> Rows {
        (&self.problem.attention).into()
    }

    fn portable(&self, hardware: &HardwareProperties) -> Result<Blueprint, AttentionError> {
        let pattern = Pattern::masked(self.problem, Bias::strided(self.problem));
        Blueprint::choose(Kernel::Forward, &self.problem.attention, hardware)
            .map(|blueprint| blueprint.with_pattern(pattern))
    }

    fn matrix(
        &self,
        instruction: Instruction,
        properties: &DeviceProperties,
    ) -> Result<MmaBlueprint, Refusal> {
        let blueprint = MmaBlueprint::choose_masked(instruction, self.problem, properties)?;
        self.inputs.check_segments(self.problem)?;
        Ok(blueprint)
    }

    fn cubes(&self, config: &ConfigOf<Self>) -> [usize; 3] {
        let p = &self.problem.attention;
        let tiles = p.q_len.div_ceil(queries(config));
        match config {
            Config::Portable(_) => [tiles, p.q_heads, p.batch],
            Config::Matrix(blueprint) => [tiles, p.batch * p.q_heads / blueprint.heads, 1],
        }
    }

    fn workspace_bytes(&self, config: &ConfigOf<Self>) -> usize {
        match config {
            Config::Portable(_) => 0,
            Config::Matrix(blueprint) => {
                listed_bytes(self.problem, blueprint.queries()).iter().sum()
            }
        }
    }

    fn check(&self, outputs: &Outputs) -> Result<(), AttentionError> {
        self.inputs.check(self.problem)?;
        outputs.check(&self.problem.attention)
    }

    fn launch_empty(&self, client: &Client, outputs: Outputs) {
        select_nothing(client, &self.problem.attention, &outputs);
    }

    fn launch(&self, client: &Client, config: ConfigOf<Self>, outputs: Outputs) {
        let (problem, inputs) = (self.problem, self.inputs);
        let p = &problem.attention;
        let tiles = p.q_len.div_ceil(queries(&config));
        match config {
            Config::Portable(blueprint) => {
                launch_portable(client, problem, inputs, &outputs, tiles, blueprint);
            }
            Config::Matrix(blueprint) => {
                let tiles = TileLaunch {
                    source: inputs.listed(client, problem, blueprint.queries(), &inputs.v),
                    first: 0,
                    count: tiles,
                };
                let rows = [&inputs.q, &inputs.k, &inputs.v].map(Clone::clone);
                let blueprint = MmaBlueprint {
                    residual: outputs.residual.is_some(),
                    rest: outputs.lse_rest.is_some(),
                    ..blueprint
                };
                matrix::launch_slice(client, p, rows, tiles, &outputs, blueprint, 1);
            }
        }
    }
}

fn launch_portable(
    client: &Client,
    problem: &MaskedProblem,
    inputs: &MaskedInputs,
    outputs: &Outputs,
    tiles: usize,
    blueprint: Blueprint,
) {
    let kernel = PortableLaunch {
        client,
        problem: &problem.attention,
        q: &inputs.q,
        k: &inputs.k,
        v: &inputs.v,
        keys: PortableKeys::of_mask(inputs.plan.as_ref()),
        bias: inputs.bias.as_ref(),
        blueprint,
    };
    kernel.forward(0, tiles, outputs);
}
