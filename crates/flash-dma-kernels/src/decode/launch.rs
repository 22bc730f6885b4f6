//! Host side of a decode step.

use crate::args::scaling;
use crate::decode::append::{moves_shape, place};
use crate::decode::args::{Cache, StepInputs, StepOutputs, Tokens};
use crate::decode::finish::{Outputs, finish_pages, finish_slots};
use crate::decode::kernel::decode_kernel;
use crate::decode::keys::DecodeBlueprint;
use crate::decode::mma::blueprint::{DecodeMmaBlueprint, PartGrid};
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
/// [appends later](flash_dma_problem::Appending), on [`Engine::Mma`] if that supports the problem and
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
/// [`AttentionError`] if the device lacks what the kernels need. Of the inputs only strides and offsets are used here;
/// the plan checks the rest and the cache when it runs, and after an error the cache is as it was.
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
/// As [`plan`], plus [`AttentionError::Unsupported`] if the engine does not support the problem. There is no
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
/// As [`plan_on`], plus [`AttentionError::Unsupported`] if the engine does not have this choice.
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
        Config::Matrix((_, grid)) => grid.parts(),
    }
}

impl Pass for DecodeStep<'_> {
    type Outputs = StepOutputs;
    /// The number of parts into which the keys are split.
    type Portable = (DecodeBlueprint, usize);
    type Matrix = (DecodeMmaBlueprint, PartGrid);

    /// Those of [`finish_slots`].
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
        let mut grid = blueprint.grid(problem, self.group_rows(), hardware);
        grid.cubes = tuning.cubes.unwrap_or(grid.cubes);
        Ok((blueprint, grid))
    }

    fn cubes(&self, config: &ConfigOf<Self>) -> [usize; 3] {
        match config {
            Config::Portable((blueprint, parts)) => {
                let cache = self.problem.append.cache;
                let tiles = self.group_rows().div_ceil(blueprint.tile.outer_rows());
                [cache.batch * cache.kv_heads, *parts, tiles]
            }
            Config::Matrix((_, grid)) => grid.cube_count(),
        }
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
        match &outputs.cache {
            Cache::Slots(slots) => slots.check(cache)?,
            Cache::Pages(pages) => pages.check(cache)?,
        }
        let StepInputs { q, tokens } = self.inputs;
        tokens.check(&problem.append)?;
        let (size, shape) = (cache.element.size(), problem.q_shape());
        check_tensor(TensorName::Query, q, &shape, size, Layout::Strided)?;
        let contiguous = Layout::Contiguous;
        check_tensor(TensorName::Out, &outputs.out, &shape, size, contiguous)?;
        let shape = problem.lse_shape();
        check_tensor(TensorName::Lse, &outputs.lse, &shape, 4, contiguous)
    }

    /// There are no tokens.
    fn launch_empty(&self, _client: &Client, _outputs: StepOutputs) {}

    fn launch(&self, client: &Client, config: ConfigOf<Self>, outputs: StepOutputs) {
        let (problem, append) = (self.problem, &self.problem.append);
        let StepInputs { q, tokens } = self.inputs.clone();
        let StepOutputs { cache, out, lse } = outputs;
        let moves = match &cache {
            Cache::Slots(slots) => Some(place(client, append, slots, &tokens)),
            Cache::Pages(_) => None,
        };
        let (parts, cubes) = (parts_of(&config), self.cubes(&config));
        let (out_shape, lse_shape) = part_shapes(problem, parts);
        let part_out = scratch(client, out_shape);
        let part_lse = scratch(client, lse_shape);
        let part_rest = scratch(client, lse_shape);
        let step = Step { q, cache, tokens };
        let moved = moves.as_ref();
        let to = [&part_out, &part_lse, &part_rest];
        step.launch(client, problem, config, cubes, moved, to);
        let Step { cache, tokens, .. } = step;
        let outputs = Outputs {
            parts,
            part_out,
            part_lse,
            part_rest,
            out,
            lse,
        };
        match (cache, moves) {
            (Cache::Slots(slots), Some(moves)) => {
                finish_slots(client, problem, outputs, slots, tokens, moves);
            }
            (Cache::Pages(pages), _) => finish_pages(client, problem, outputs, pages, tokens),
            (Cache::Slots(_), None) => unreachable!("slots have moves"),
        }
    }
}

/// What the attention of a step reads.
struct Step {
    q: TensorBinding,
    cache: Cache,
    tokens: Tokens,
}

impl Step {
    /// Launches attention over the cache as it was and the new tokens, into the outputs of the parts.
    fn launch(
        &self,
        client: &Client,
        problem: &DecodeProblem,
        config: ConfigOf<DecodeStep<'_>>,
        cubes: [usize; 3],
        moves: Option<&TensorBinding>,
        [part_out, part_lse, part_rest]: [&TensorBinding; 3],
    ) {
        let append = &problem.append;
        let element = append.cache.element;
        let (k, v, cached) = match &self.cache {
            Cache::Slots(slots) => (&slots.k, &slots.v, Some(&slots.score)),
            Cache::Pages(pages) => (&pages.k, &pages.v, pages.scores.as_ref()),
        };
        let table = match (&self.cache, append.cache.storage) {
            (Cache::Pages(pages), Storage::Pages { max_pages, .. }) => Some((pages, max_pages)),
            _ => None,
        };
        // More keys than positions are all keys.
        let window = append.cache.page_window();
        let window = window.map(|keys| keys.min(i32::MAX as usize) as u32);
        let scores = cached.zip(self.tokens.scores.as_ref());
        let (new_k, new_v) = (&self.tokens.k, &self.tokens.v);
        let typed = [&self.q, k, v, new_k, new_v];
        let size = element.size();
        let mut words = vec![part_out, part_lse];
        words.extend(moves);
        words.extend(table.map(|(pages, _)| &pages.table));
        words.extend(scores.into_iter().flat_map(|(cached, new)| [cached, new]));
        let address = address_type(&typed, size).max(address_type(&words, 4));
        let [x, y, z] = cubes.map(|n| n as u32);
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
                self.q.clone().into_tensor_arg(),
                StepTensorsLaunch::new(
                    k.clone().into_tensor_arg(),
                    v.clone().into_tensor_arg(),
                    new_k.clone().into_tensor_arg(),
                    new_v.clone().into_tensor_arg(),
                    scores
                        .map(|(cached, new)| {
                            let (cached, new) = (cached.clone(), new.clone());
                            StepScoresLaunch::new(cached.into_buffer_arg(), new.into_tensor_arg())
                        })
                        .into(),
                    moves.map(|moves| moves.clone().into_buffer_arg()).into(),
                    table.map(|(pages, most)| pages.table_launch(most)).into(),
                    window.into(),
                ),
                part_out.clone().$out(),
                part_lse.clone().into_buffer_arg(),
                part_rest.clone().into_buffer_arg(),
                scaling(problem.scale, problem.softcap),
                $blueprint,
                elem_type(element),
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
