//! Host side of the forward pass without a mask.

use crate::args::{Inputs, Outputs};
use crate::forward::Forward;
use crate::forward::matrix::{MatrixForward, outputs_of_parts, workspace};
use crate::forward::merge::merge;
use crate::host::check::{check_inputs, check_outputs, check_segments, elem_type};
use crate::host::engine::{Engine, Instruction, Refusal};
use crate::host::fill::fill;
use crate::host::pass::{Config, Pass, Plan, Rows};
use crate::matrix::blueprint::{MmaBlueprint, processors};
use crate::pattern::intervals::LiveKeys;
use crate::pattern::intervals::slices::{SelectedKeys, slice_bytes};
use crate::portable::blueprint::{Blueprint, Kernel};
use crate::portable::launch::{PortableKeys, PortableLaunch};
use cubecl::client::Client;
use cubecl::ir::{DeviceProperties, HardwareProperties};
use cubecl::prelude::*;
use flash_dma_problem::{AttentionError, PassKind, Problem};

/// The most buffers of any kernel. A residual is one more; calls with one precede a backward pass, which has 14.
pub(crate) const BINDINGS: u32 = 11;

/// The choices on tensor cores that tests and benchmarks may fix.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tuning {
    /// Warps per cube, which determine the number of queries per tile.
    pub warps: Option<usize>,
    /// Parts into which the keys of a query tile are split; 1 does not split.
    pub parts: Option<usize>,
}

pub(crate) struct ScoredForward<'a> {
    pub problem: &'a Problem,
    pub inputs: &'a Inputs,
    pub tuning: Tuning,
}

impl Forward for Problem {
    type Inputs = Inputs;

    fn plan_forward<'a>(
        &'a self,
        client: &'a Client,
        inputs: &'a Inputs,
        engine: Option<Engine>,
    ) -> Result<Plan<'a, Outputs>, AttentionError> {
        let pass = ScoredForward {
            problem: self,
            inputs,
            tuning: Tuning::default(),
        };
        Plan::new(client, engine, pass)
    }
}

/// [`Forward::plan_forward`] on an engine, with some choices fixed.
///
/// # Errors
///
/// The errors of [`Forward::plan_forward`], and [`AttentionError::Unsupported`] if the engine does not have this choice.
#[cfg(feature = "internals")]
pub fn forward_tuned<'a>(
    engine: Engine,
    tuning: Tuning,
    client: &'a Client,
    problem: &'a Problem,
    inputs: &'a Inputs,
) -> Result<Plan<'a, Outputs>, AttentionError> {
    let pass = ScoredForward {
        problem,
        inputs,
        tuning,
    };
    Plan::new(client, Some(engine), pass)
}

impl Tuning {
    /// Replaces the parts of a choice that are fixed.
    fn apply(
        self,
        (blueprint, parts): (MmaBlueprint, usize),
    ) -> Result<(MmaBlueprint, usize), AttentionError> {
        let warps = self.warps.unwrap_or(blueprint.warps);
        let parts = self.parts.unwrap_or(parts);
        if !blueprint.sizes().contains(&warps) || parts == 0 {
            return Err(AttentionError::Unsupported {
                what: format!("{warps} warps per cube and keys in {parts} parts"),
            });
        }
        Ok(MmaBlueprint { warps, ..blueprint }.in_parts(parts))
    }
}

/// The configuration of a forward pass; on tensor cores the blueprint and the number of parts of a tile's keys.
pub(crate) type ForwardConfig = Config<Blueprint, (MmaBlueprint, usize)>;

impl ForwardConfig {
    pub(crate) fn queries(&self) -> usize {
        match self {
            Self::Portable(blueprint) => blueprint.outer_rows(),
            Self::Matrix((blueprint, _)) => blueprint.queries(),
        }
    }

    /// Cubes along each axis; along the first, query tiles.
    pub(crate) fn cubes(&self, p: &Problem) -> [usize; 3] {
        let tiles = p.q_len.div_ceil(self.queries());
        match self {
            Self::Portable(_) => [tiles, p.q_heads, p.batch],
            Self::Matrix((blueprint, parts)) => {
                [tiles, p.batch * p.q_heads / blueprint.heads, *parts]
            }
        }
    }
}

impl Pass for ScoredForward<'_> {
    type Outputs = Outputs;
    type Portable = Blueprint;
    type Matrix = (MmaBlueprint, usize);

    const BINDINGS: u32 = BINDINGS;
    const KIND: PassKind = PassKind::Forward;

    fn rows(&self) -> Rows {
        self.problem.into()
    }

    fn portable(&self, hardware: &HardwareProperties) -> Result<Blueprint, AttentionError> {
        Blueprint::choose(Kernel::Forward, self.problem, hardware)
    }

    fn matrix(
        &self,
        instruction: Instruction,
        properties: &DeviceProperties,
    ) -> Result<Self::Matrix, Refusal> {
        let blueprint = MmaBlueprint::choose(instruction, self.problem, properties)?;
        check_segments(self.inputs.rows(), self.problem.element.size())?;
        let max_shared = properties.hardware.max_shared_memory_size;
        let chosen = blueprint.split(self.problem, processors(properties), max_shared);
        Ok(self.tuning.apply(chosen)?)
    }

    fn cubes(&self, config: &ForwardConfig) -> [usize; 3] {
        config.cubes(self.problem)
    }

    fn workspace_bytes(&self, config: &ForwardConfig) -> usize {
        let of_slice = match config {
            Config::Portable(blueprint) => slice_bytes(self.problem, blueprint.outer_rows()),
            Config::Matrix((blueprint, parts)) => workspace(self.problem, *blueprint, *parts),
        };
        LiveKeys::bytes(self.problem) + of_slice
    }

    fn check(&self, outputs: &Outputs) -> Result<(), AttentionError> {
        check_inputs(self.problem, self.inputs)?;
        check_outputs(self.problem, outputs)
    }

    fn launch_empty(&self, client: &Client, outputs: Outputs) {
        select_nothing(client, self.problem, &outputs);
    }

    fn launch(&self, client: &Client, config: ForwardConfig, outputs: Outputs) {
        let (problem, inputs) = (self.problem, self.inputs);
        let queries = config.queries();
        let keys = SelectedKeys::new(client, problem, inputs);
        match config {
            Config::Portable(blueprint) => {
                for tiles in keys.slices(queries, outputs.all()) {
                    let keys = PortableKeys::of_tiles(tiles.source);
                    let kernel = PortableLaunch::scored(client, problem, inputs, keys, blueprint);
                    kernel.forward(tiles.first, tiles.count, &outputs);
                }
            }
            Config::Matrix((blueprint, parts)) => {
                let of_parts = (blueprint.split).then(|| outputs_of_parts(client, problem, parts));
                let written = of_parts.as_ref().unwrap_or(&outputs);
                let pass = MatrixForward {
                    client,
                    problem,
                    rows: inputs.rows(),
                    blueprint: blueprint.with_outputs(&outputs),
                    parts,
                };
                for tiles in keys.slices(queries, written.all()) {
                    pass.launch(tiles, written);
                }
                if let Some(of_parts) = of_parts {
                    merge(client, problem, parts, of_parts, &outputs);
                }
            }
        }
    }
}

pub(crate) fn select_nothing(client: &Client, problem: &Problem, outputs: &Outputs) {
    for rows in [&outputs.out].into_iter().chain(&outputs.residual) {
        fill(client, rows, 0.0, elem_type(problem.element));
    }
    let word = f32::elem_type_native();
    fill(client, &outputs.lse, f32::NEG_INFINITY, word);
    if let Some(rest) = &outputs.lse_rest {
        fill(client, rest, 0.0, word);
    }
}
