//! Host side of the forward pass under a mask and a bias.

use crate::args::Outputs;
use crate::forward::Forward;
use crate::forward::launch::{BINDINGS, ForwardConfig, select_nothing};
use crate::forward::matrix::MatrixForward;
use crate::host::check::check_outputs;
use crate::host::engine::{Engine, Instruction, Refusal};
use crate::host::pass::{Config, Pass, Plan, Rows};
use crate::matrix::blueprint::MmaBlueprint;
use crate::pattern::kind::{Bias, Pattern};
use crate::pattern::mask::args::MaskedInputs;
use crate::pattern::mask::listed::listed_bytes;
use crate::pattern::tensors::TileLaunch;
use crate::portable::blueprint::{Blueprint, Kernel};
use crate::portable::launch::PortableLaunch;
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

impl Pass for MaskedForward<'_> {
    type Outputs = Outputs;
    type Portable = Blueprint;
    type Matrix = (MmaBlueprint, usize);

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
    ) -> Result<Self::Matrix, Refusal> {
        let blueprint = MmaBlueprint::choose_masked(instruction, self.problem, properties)?;
        self.inputs.check_segments(self.problem)?;
        Ok((blueprint, 1))
    }

    fn cubes(&self, config: &ForwardConfig) -> [usize; 3] {
        config.cubes(&self.problem.attention)
    }

    fn workspace_bytes(&self, config: &ForwardConfig) -> usize {
        match config {
            Config::Portable(_) => 0,
            Config::Matrix(_) => listed_bytes(self.problem, config.queries()).iter().sum(),
        }
    }

    fn check(&self, outputs: &Outputs) -> Result<(), AttentionError> {
        self.inputs.check(self.problem)?;
        check_outputs(&self.problem.attention, outputs)
    }

    fn launch_empty(&self, client: &Client, outputs: Outputs) {
        select_nothing(client, &self.problem.attention, &outputs);
    }

    fn launch(&self, client: &Client, config: ForwardConfig, outputs: Outputs) {
        let (problem, inputs) = (self.problem, self.inputs);
        let p = &problem.attention;
        let (queries, [count, ..]) = (config.queries(), config.cubes(p));
        match config {
            Config::Portable(blueprint) => {
                let kernel = PortableLaunch::masked(client, problem, inputs, blueprint);
                kernel.forward(0, count, &outputs);
            }
            Config::Matrix((blueprint, parts)) => {
                let pass = MatrixForward {
                    client,
                    problem: p,
                    rows: inputs.rows(),
                    blueprint: blueprint.with_outputs(&outputs),
                    parts,
                };
                let tiles = TileLaunch {
                    source: inputs.listed(client, problem, queries, &inputs.v),
                    first: 0,
                    count,
                };
                pass.launch(tiles, &outputs);
            }
        }
    }
}
