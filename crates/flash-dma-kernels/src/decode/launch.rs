//! Host side of a decode step.

use crate::args::scaling;
use crate::decode::append::{Target, moves_shape};
use crate::decode::args::{StepInputs, StepOutputs};
use crate::decode::finish::{Outputs, finish};
use crate::decode::kernel::decode_kernel;
use crate::decode::keys::DecodeBlueprint;
use crate::decode::mma::blueprint::{DecodeMmaBlueprint, ROWS};
use crate::decode::mma::kernel::decode_mma_kernel;
use crate::decode::parts::{part_shapes, parts};
use crate::decode::tensors::{StepScoresLaunch, StepTensorsLaunch};
use crate::host::check::{
    Layout, address_type, check_segments, check_tensor, elem_type, vector_size,
};
use crate::host::engine::{Engine, Instruction, Refusal};
use crate::host::pass::{Config, ConfigOf, Pass, Plan, Rows};
use crate::host::scratch::{bytes, scratch};
use crate::pattern::kind::Pattern;
use crate::portable::blueprint::Blueprint;
use cubecl::client::Client;
use cubecl::ir::{DeviceProperties, HardwareProperties};
use cubecl::prelude::*;
use flash_dma_problem::{
    AttentionError, DecodeProblem, EngineChoice, Obstacle, PassKind, Storage, TensorName,
};

/// A decode step: writes the attention of the tokens' queries and appends the tokens to the cache, unless the problem
/// [appends later](flash_dma_problem::Appending). It runs on [`Engine::Mma`] if that supports the problem and
/// [`ENGINE_VARIABLE`](crate::ENGINE_VARIABLE) does not exclude it, otherwise on [`Engine::Portable`].
///
/// Over slots, query `t` attends to those of all tokens that its sequence has been given, its own included, that the
/// cache's rule keeps at its position; over pages, to all tokens that its sequence holds and to the new tokens up to
/// its own. Later tokens of the step do not affect it. A query that sees nothing gets zeros and −∞.
///
/// It takes three asynchronous launches, over pages two; nothing waits for the host and the launches depend on the
/// problem alone, so that a step may be captured in a graph and replayed. Scratch comes from the client's pool: the
/// outputs of the parts of the keys in f32, `4 * parts * (head_dim + 2)` bytes per row, and the moves of the slots. It
/// depends on the capacity of the cache, not on its content.
///
/// # Errors
///
/// [`AttentionError`] if the device lacks what the kernels need. Only the inputs' strides and offsets are used here;
/// the plan checks the rest and the cache when it runs, and after an error the cache is unchanged.
pub fn plan<'a>(
    client: &'a Client,
    problem: &'a DecodeProblem,
    inputs: &'a StepInputs,
) -> Result<Plan<'a, StepOutputs>, AttentionError> {
    Plan::new(client, None, DecodeStep::new(problem, inputs))
}

/// [`plan`] on a given engine.
///
/// # Errors
///
/// The errors of [`plan`], and [`AttentionError::Unsupported`] if the engine does not support the problem. There is no
/// [`Engine::Wgmma`] for decoding: a step is bound by memory.
pub fn plan_on<'a>(
    engine: Engine,
    client: &'a Client,
    problem: &'a DecodeProblem,
    inputs: &'a StepInputs,
) -> Result<Plan<'a, StepOutputs>, AttentionError> {
    Plan::new(client, Some(engine), DecodeStep::new(problem, inputs))
}

/// The choices that tests and benchmarks may fix.
#[derive(Clone, Copy, Debug, Default)]
pub struct DecodeTuning {
    /// Cubes that share the keys of a kv head (and a tile of query rows).
    pub cubes: Option<usize>,
    /// Warps per cube; this and the following fields apply to [`Engine::Mma`] only.
    pub warps: Option<usize>,
    /// Keys per tile, 16 or 32.
    pub key_tile: Option<usize>,
    /// Tiles per warp in shared memory, at least 2.
    pub stages: Option<usize>,
}

/// [`plan_on`] with some choices fixed.
///
/// # Errors
///
/// The errors of [`plan_on`], and [`AttentionError::Unsupported`] if the engine does not have this choice.
#[cfg(any(test, feature = "internals"))]
pub fn decode_tuned<'a>(
    engine: Engine,
    tuning: DecodeTuning,
    client: &'a Client,
    problem: &'a DecodeProblem,
    inputs: &'a StepInputs,
) -> Result<Plan<'a, StepOutputs>, AttentionError> {
    let pass = DecodeStep {
        tuning,
        ..DecodeStep::new(problem, inputs)
    };
    Plan::new(client, Some(engine), pass)
}

/// A decode step before its cache is known.
pub(crate) struct DecodeStep<'a> {
    problem: &'a DecodeProblem,
    inputs: &'a StepInputs,
    tuning: DecodeTuning,
}

impl<'a> DecodeStep<'a> {
    pub(crate) fn new(problem: &'a DecodeProblem, inputs: &'a StepInputs) -> Self {
        Self {
            problem,
            inputs,
            tuning: DecodeTuning::default(),
        }
    }

    /// Query rows per kv head.
    fn group_rows(&self) -> usize {
        self.problem.group() * self.problem.append.tokens
    }
}

/// The parts into which the keys are split.
fn parts_of(config: &ConfigOf<DecodeStep<'_>>) -> usize {
    match config {
        Config::Portable((_, parts)) => *parts,
        Config::Matrix((blueprint, cubes)) => blueprint.parts(*cubes),
    }
}

impl Pass for DecodeStep<'_> {
    type Outputs = StepOutputs;
    /// The number of parts into which the keys are split.
    type Portable = (DecodeBlueprint, usize);
    /// The number of cubes that share the keys of a kv head.
    type Matrix = (DecodeMmaBlueprint, usize);

    /// The buffers of [`finish`] with slots.
    const BINDINGS: u32 = 14;
    const KIND: PassKind = PassKind::Decode;

    fn rows(&self) -> Rows {
        let append = &self.problem.append;
        Rows {
            element: append.cache.element,
            choice: EngineChoice::Fastest,
            paired: append.cache.batch * append.tokens > 0,
            alibi: 0,
        }
    }

    fn portable(&self, hardware: &HardwareProperties) -> Result<Self::Portable, AttentionError> {
        let (rows, cache) = (self.group_rows(), self.problem.append.cache);
        let pattern = Pattern::scored_if(cache.has_scores());
        let softcap = self.problem.softcap.is_some();
        let tile = Blueprint::choose_rows(rows, cache.head_dim, pattern, softcap, hardware)?;
        let blueprint = DecodeBlueprint {
            tile,
            paged: matches!(cache.storage, Storage::Pages { .. }),
            only_ranked: cache.has_scores() && !cache.adds_scores(),
            windowed: cache.page_window().is_some(),
        };
        let cubes = cache.batch * cache.kv_heads * rows.div_ceil(tile.outer_rows());
        let parts = parts(cache.capacity(), cubes, hardware);
        Ok((blueprint, self.tuning.cubes.unwrap_or(parts)))
    }

    fn matrix(
        &self,
        instruction: Instruction,
        properties: &DeviceProperties,
    ) -> Result<Self::Matrix, Refusal> {
        let (problem, tuning) = (self.problem, self.tuning);
        let chosen = match instruction {
            Instruction::Mma => DecodeMmaBlueprint::choose(problem, properties)?,
            Instruction::Wgmma => return Err(Obstacle::Pass.into()),
        };
        let StepInputs { q, tokens } = self.inputs;
        check_segments(
            [q, &tokens.k, &tokens.v],
            problem.append.cache.element.size(),
        )?;
        let blueprint = DecodeMmaBlueprint {
            warps: tuning.warps.unwrap_or(chosen.warps),
            key_tile: tuning.key_tile.unwrap_or(chosen.key_tile),
            stages: tuning.stages.unwrap_or(chosen.stages),
            ..chosen
        };
        let hardware = &properties.hardware;
        blueprint.check(problem, hardware)?;
        let cubes = blueprint.cubes(problem, self.group_rows(), hardware);
        Ok((blueprint, tuning.cubes.unwrap_or(cubes)))
    }

    fn cubes(&self, config: &ConfigOf<Self>) -> [usize; 3] {
        let cache = self.problem.append.cache;
        let (parts, rows) = match config {
            Config::Portable((blueprint, parts)) => (*parts, blueprint.tile.outer_rows()),
            // The newcomers' cubes are the first along the parts.
            Config::Matrix((_, cubes)) => (cubes + 1, ROWS),
        };
        let tiles = self.group_rows().div_ceil(rows);
        [cache.batch * cache.kv_heads, parts, tiles]
    }

    fn workspace_bytes(&self, config: &ConfigOf<Self>) -> usize {
        let append = &self.problem.append;
        let (out, lse) = part_shapes(self.problem, parts_of(config));
        let moves = match append.cache.storage {
            Storage::Slots { .. } => bytes(moves_shape(append)),
            _ => 0,
        };
        bytes(out) + 2 * bytes(lse) + moves
    }

    fn check(&self, outputs: &StepOutputs) -> Result<(), AttentionError> {
        let (problem, cache) = (self.problem, &self.problem.append.cache);
        problem.check_tokens()?;
        outputs.cache.check(cache)?;
        let StepInputs { q, tokens } = self.inputs;
        tokens.check(&problem.append)?;
        let (size, shape) = (cache.element.size(), problem.q_shape());
        check_tensor(TensorName::Query, q, &shape, size, Layout::Strided)?;
        let contiguous = Layout::Contiguous;
        check_tensor(TensorName::Out, &outputs.out, &shape, size, contiguous)?;
        let shape = problem.lse_shape();
        check_tensor(TensorName::Lse, &outputs.lse, &shape, 4, contiguous)
    }

    /// Does nothing: there are no tokens.
    fn launch_empty(&self, _client: &Client, _outputs: StepOutputs) {}

    fn launch(&self, client: &Client, config: ConfigOf<Self>, outputs: StepOutputs) {
        let StepOutputs { cache, out, lse } = outputs;
        let tokens = &self.inputs.tokens;
        let target = Target::new(client, &self.problem.append, cache, tokens);
        let parts = parts_of(&config);
        let (out_shape, lse_shape) = part_shapes(self.problem, parts);
        let outputs = Outputs {
            parts,
            part_out: scratch(client, out_shape),
            part_lse: scratch(client, lse_shape),
            part_rest: scratch(client, lse_shape),
            out,
            lse,
        };
        self.attend(client, config, &target, &outputs);
        finish(client, self.problem, outputs, target, tokens.clone());
    }
}

impl DecodeStep<'_> {
    /// Launches attention over the cache before the step and the new tokens, into the parts.
    fn attend(&self, client: &Client, config: ConfigOf<Self>, target: &Target, to: &Outputs) {
        let StepInputs { q, tokens } = self.inputs;
        let cache = self.problem.append.cache;
        let [k, v, new_k, new_v] = target.typed(tokens);
        let typed = [q, k, v, new_k, new_v];
        let size = cache.element.size();
        let mut words = target.words(tokens);
        words.extend([&to.part_out, &to.part_lse]);
        let address = address_type(&typed, size).max(address_type(&words, 4));
        let (moves, pages) = match target {
            Target::Slots(_, moves) => (Some(moves.clone().into_buffer_arg()), None),
            Target::Pages(pages, most) => (None, Some(pages.table_launch(*most))),
        };
        // A window beyond the last position keeps all keys.
        let window = cache.page_window();
        let window = window.map(|keys| keys.min(i32::MAX as usize) as u32);
        let scores = target.scores().zip(tokens.scores.as_ref());
        let scores = scores.map(|(cached, new)| {
            let (cached, new) = (cached.clone(), new.clone());
            StepScoresLaunch::new(cached.into_buffer_arg(), new.into_tensor_arg())
        });
        let [x, y, z] = self.cubes(&config).map(|n| n as u32);
        let grid = CubeCount::Static(x, y, z);
        // One argument list, because both kernels take the same arguments.
        macro_rules! launch {
    ($kernel:ident, $dim:expr, [$($vector:expr)?], $out:ident, $blueprint:expr) => {
        // SAFETY: every buffer was checked to hold the shape and strides that the kernels index by, the parts
        // hold the rows of the outputs, and the moves name slots of the cache.
        unsafe {
            $kernel::launch_unchecked(
                client,
                grid,
                $dim,
                address,
                $($vector,)?
                q.clone().into_tensor_arg(),
                StepTensorsLaunch::new(
                    k.clone().into_tensor_arg(),
                    v.clone().into_tensor_arg(),
                    new_k.clone().into_tensor_arg(),
                    new_v.clone().into_tensor_arg(),
                    scores.into(),
                    moves.into(),
                    pages.into(),
                    window.into(),
                ),
                to.part_out.clone().$out(),
                to.part_lse.clone().into_buffer_arg(),
                to.part_rest.clone().into_buffer_arg(),
                scaling(self.problem.scale, self.problem.softcap),
                $blueprint,
                elem_type(cache.element),
            )
        }
    };
}
        match config {
            Config::Portable((blueprint, _)) => {
                let (dim, vector) = (blueprint.tile.cube_dim(), vector_size(&typed, size));
                launch!(decode_kernel, dim, [vector], into_tensor_arg, blueprint);
            }
            Config::Matrix((blueprint, _)) => {
                let dim = blueprint.cube_dim();
                launch!(decode_mma_kernel, dim, [], into_buffer_arg, blueprint);
            }
        }
    }
}
