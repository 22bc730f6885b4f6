//! Host side of a decode step.

use crate::args::scaling;
use crate::decode::append::plan as plan_moves;
use crate::decode::args::{Cache, Pages, Slots, Tokens};
use crate::decode::finish::{Outputs, finish_pages, finish_slots};
use crate::decode::kernel::decode_kernel;
use crate::decode::keys::DecodeBlueprint;
use crate::decode::mma::blueprint::{DecodeMmaBlueprint, PartGrid};
use crate::decode::mma::kernel::decode_mma_kernel;
use crate::decode::parts::{part_shapes, parts};
use crate::decode::tensors::StepTensorsLaunch;
use crate::host::check::{
    Layout, address_type, check_grid, check_tensor, check_type, elem_type, rows_are_chunks,
    vector_size,
};
use crate::host::engine::Engine;
use crate::host::scratch::scratch;
use crate::pattern::kind::Pattern;
use crate::portable::blueprint::Blueprint;
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::{AttentionError, DecodeProblem, Storage, TensorName};

/// Buffers of the kernel of a step that has the most, [`finish_slots`]'s.
const BINDINGS: u32 = 13;

/// A decode step over a cache of slots: writes `out` (`[batch, q_heads, tokens, head_dim]`, the cache's element type)
/// and `lse` (`[batch, q_heads, tokens]`, f32, natural logarithm), both contiguous and overwritten, and appends the
/// tokens. `q` is `[batch, q_heads, tokens, head_dim]` of any strides with a contiguous last axis.
///
/// Query `t` attends to the `window` best of all tokens that its sequence has been given, its own included; later
/// tokens of the step do not affect it. A query that sees nothing gets zeros and −∞.
///
/// It takes three asynchronous launches; nothing waits for the host and the launches depend on the problem alone, so
/// that a step may be captured in a graph and replayed. Scratch comes from the client's pool: the outputs of the parts
/// of the keys in f32, `4 * parts * (head_dim + 1)` bytes per row, and the plan.
///
/// # Errors
///
/// [`AttentionError`] if a tensor does not fit the problem, the problem's cache has no slots or the device lacks what
/// the kernel needs. Nothing is launched in that case, and the cache is as it was.
pub fn decode(
    client: &Client,
    problem: &DecodeProblem,
    q: TensorBinding,
    slots: Slots,
    tokens: Tokens,
    out: TensorBinding,
    lse: TensorBinding,
) -> Result<(), AttentionError> {
    let cache = Cache::Slots(slots);
    step(client, problem, q, cache, tokens, out, lse)
}

/// A decode step over a cache of pages, as [`decode`]: query `t` attends to all tokens that its sequence holds and to
/// the new tokens up to its own. It takes two launches.
///
/// # Errors
///
/// As [`decode`]; the problem's cache must have pages.
pub fn decode_pages(
    client: &Client,
    problem: &DecodeProblem,
    q: TensorBinding,
    pages: Pages,
    tokens: Tokens,
    out: TensorBinding,
    lse: TensorBinding,
) -> Result<(), AttentionError> {
    let cache = Cache::Pages(pages);
    step(client, problem, q, cache, tokens, out, lse)
}

fn step(
    client: &Client,
    problem: &DecodeProblem,
    q: TensorBinding,
    cache: Cache,
    tokens: Tokens,
    out: TensorBinding,
    lse: TensorBinding,
) -> Result<(), AttentionError> {
    let plan = Plan::choose(client, problem, &q, &tokens)?;
    let step = Step {
        q,
        cache,
        tokens,
        out,
        lse,
    };
    step.run(client, problem, plan)
}

/// [`decode`] or [`decode_pages`] on a given engine.
///
/// # Errors
///
/// As these, plus [`AttentionError::Unsupported`] if the engine does not support the problem. There is no
/// [`Engine::Wgmma`] for decoding: a step is bound by memory.
pub fn decode_on(
    engine: Engine,
    client: &Client,
    problem: &DecodeProblem,
    q: TensorBinding,
    cache: Cache,
    tokens: Tokens,
    out: TensorBinding,
    lse: TensorBinding,
) -> Result<(), AttentionError> {
    let tuning = DecodeTuning::default();
    decode_tuned(engine, tuning, client, problem, q, cache, tokens, out, lse)
}

/// The engine that [`decode`] and [`decode_pages`] run on: [`Engine::Mma`] if it supports the problem and
/// [`ENGINE_VARIABLE`](crate::host::engine::ENGINE_VARIABLE) does not exclude it, otherwise [`Engine::Portable`].
#[must_use]
pub fn decode_engine(
    client: &Client,
    problem: &DecodeProblem,
    q: &TensorBinding,
    tokens: &Tokens,
) -> Engine {
    match Plan::choose(client, problem, q, tokens) {
        Ok(Plan::Mma(..)) => Engine::Mma,
        _ => Engine::Portable,
    }
}

/// The choices of [`decode_on`] that tests and benchmarks may fix.
#[doc(hidden)]
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

/// [`decode_on`] with some choices fixed.
///
/// # Errors
///
/// As [`decode_on`], plus [`AttentionError::Unsupported`] if the engine does not have this choice.
#[doc(hidden)]
pub fn decode_tuned(
    engine: Engine,
    tuning: DecodeTuning,
    client: &Client,
    problem: &DecodeProblem,
    q: TensorBinding,
    cache: Cache,
    tokens: Tokens,
    out: TensorBinding,
    lse: TensorBinding,
) -> Result<(), AttentionError> {
    let plan = Plan::of(engine, client, problem, &q, &tokens, tuning)?;
    let step = Step {
        q,
        cache,
        tokens,
        out,
        lse,
    };
    step.run(client, problem, plan)
}

/// The tensors of a step.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub q: TensorBinding,
    pub cache: Cache,
    pub tokens: Tokens,
    pub out: TensorBinding,
    pub lse: TensorBinding,
}

/// An engine, its configuration and its cubes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Plan {
    /// The number of parts into which the keys are split.
    Portable(DecodeBlueprint, usize),
    Mma(DecodeMmaBlueprint, PartGrid),
}

impl Plan {
    pub(crate) fn choose(
        client: &Client,
        problem: &DecodeProblem,
        q: &TensorBinding,
        tokens: &Tokens,
    ) -> Result<Self, AttentionError> {
        let of = |engine| Self::of(engine, client, problem, q, tokens, Default::default());
        if Engine::tensor_cores()?.contains(&Engine::Mma)
            && let Ok(plan) = of(Engine::Mma)
        {
            return Ok(plan);
        }
        of(Engine::Portable)
    }

    pub(crate) fn of(
        engine: Engine,
        client: &Client,
        problem: &DecodeProblem,
        q: &TensorBinding,
        tokens: &Tokens,
        tuning: DecodeTuning,
    ) -> Result<Self, AttentionError> {
        let rows = problem.group() * problem.append.tokens;
        let plan = match engine {
            Engine::Portable => return Self::portable(client, problem, rows, tuning),
            Engine::Mma => Self::mma(client, problem, rows, tuning),
            Engine::Wgmma => None,
        };
        let size = problem.append.cache.element.size();
        let cache = problem.append.cache;
        plan.filter(|_| {
            [q, &tokens.k, &tokens.v]
                .iter()
                .all(|tensor| rows_are_chunks(tensor, size))
        })
        .ok_or_else(|| AttentionError::Unsupported {
            what: format!(
                "the {engine:?} engine for decoding {} of head dimension {}",
                cache.element, cache.head_dim
            ),
        })
    }

    fn portable(
        client: &Client,
        problem: &DecodeProblem,
        rows: usize,
        tuning: DecodeTuning,
    ) -> Result<Self, AttentionError> {
        let hardware = &client.properties().hardware;
        let cache = problem.append.cache;
        let pattern = Pattern::scored_if(cache.has_scores());
        let softcap = problem.softcap.is_some();
        let tile = Blueprint::choose_rows(rows, cache.head_dim, pattern, softcap, hardware)?;
        let blueprint = DecodeBlueprint {
            tile,
            paged: matches!(cache.storage, Storage::Pages { .. }),
        };
        let cubes = cache.batch * cache.kv_heads * rows.div_ceil(tile.outer_rows());
        let parts = parts(cache.capacity(), cubes, hardware);
        Ok(Self::Portable(blueprint, tuning.cubes.unwrap_or(parts)))
    }

    fn mma(
        client: &Client,
        problem: &DecodeProblem,
        rows: usize,
        tuning: DecodeTuning,
    ) -> Option<Self> {
        let properties = client.properties();
        let chosen = DecodeMmaBlueprint::choose(problem, properties)?;
        let blueprint = DecodeMmaBlueprint {
            warps: tuning.warps.unwrap_or(chosen.warps),
            key_tile: tuning.key_tile.unwrap_or(chosen.key_tile),
            stages: tuning.stages.unwrap_or(chosen.stages),
            ..chosen
        };
        if !blueprint.serves(problem, &properties.hardware) {
            return None;
        }
        let mut grid = blueprint.grid(problem, rows, &properties.hardware);
        grid.cubes = tuning.cubes.unwrap_or(grid.cubes);
        Some(Self::Mma(blueprint, grid))
    }

    /// Parts of the keys.
    pub(crate) fn parts(&self) -> usize {
        match self {
            Self::Portable(_, parts) => *parts,
            Self::Mma(_, grid) => grid.parts(),
        }
    }

    /// Checks that the device has what the kernels need.
    pub(crate) fn check(
        &self,
        client: &Client,
        problem: &DecodeProblem,
    ) -> Result<(), AttentionError> {
        check_type(client, problem.append.cache.element)?;
        check_grid(client, BINDINGS, self.cubes(problem))
    }

    /// Cubes along each axis.
    fn cubes(&self, problem: &DecodeProblem) -> [usize; 3] {
        match self {
            Self::Portable(blueprint, parts) => {
                let cache = problem.append.cache;
                let rows = problem.group() * problem.append.tokens;
                let tiles = rows.div_ceil(blueprint.tile.outer_rows());
                [*parts, cache.batch * cache.kv_heads, tiles]
            }
            Self::Mma(_, grid) => grid.cube_count(),
        }
    }
}

impl Step {
    fn check(&self, problem: &DecodeProblem) -> Result<(), AttentionError> {
        let cache = &problem.append.cache;
        problem.check_tokens()?;
        match &self.cache {
            Cache::Slots(slots) => slots.check(cache)?,
            Cache::Pages(pages) => pages.check(cache)?,
        }
        self.tokens.check(&problem.append)?;
        let (size, shape) = (cache.element.size(), problem.q_shape());
        check_tensor(TensorName::Query, &self.q, &shape, size, Layout::Strided)?;
        check_tensor(TensorName::Out, &self.out, &shape, size, Layout::Contiguous)?;
        let shape = problem.lse_shape();
        check_tensor(TensorName::Lse, &self.lse, &shape, 4, Layout::Contiguous)
    }

    /// Checks and launches.
    pub(crate) fn run(
        self,
        client: &Client,
        problem: &DecodeProblem,
        plan: Plan,
    ) -> Result<(), AttentionError> {
        self.check(problem)?;
        let append = &problem.append;
        plan.check(client, problem)?;
        if append.cache.batch * append.tokens == 0 {
            return Ok(());
        }
        let moves = match &self.cache {
            Cache::Slots(slots) => Some(plan_moves(client, append, slots, &self.tokens)),
            Cache::Pages(_) => None,
        };
        let parts = plan.parts();
        let (out_shape, lse_shape) = part_shapes(problem, parts);
        let part_out = scratch(client, out_shape);
        let part_lse = scratch(client, lse_shape);
        self.launch(client, problem, plan, moves.as_ref(), &part_out, &part_lse);
        let outputs = Outputs {
            parts,
            part_out,
            part_lse,
            out: self.out,
            lse: self.lse,
        };
        match (self.cache, moves) {
            (Cache::Slots(slots), Some(moves)) => {
                finish_slots(client, problem, outputs, slots, self.tokens, moves);
            }
            (Cache::Pages(pages), _) => finish_pages(client, problem, outputs, pages, self.tokens),
            (Cache::Slots(_), None) => unreachable!("slots have a plan"),
        }
        Ok(())
    }

    fn launch(
        &self,
        client: &Client,
        problem: &DecodeProblem,
        plan: Plan,
        moves: Option<&TensorBinding>,
        part_out: &TensorBinding,
        part_lse: &TensorBinding,
    ) {
        let append = &problem.append;
        let element = append.cache.element;
        // Buffers that a kind of cache lacks are replaced by others that the kernel does not read.
        let (k, v, score, new_scores, places, lengths, max_pages) = match &self.cache {
            Cache::Slots(slots) => (
                &slots.k,
                &slots.v,
                &slots.score,
                self.tokens.scores.as_ref().expect("slots have scores"),
                moves.expect("slots have a plan"),
                &slots.seen,
                0,
            ),
            Cache::Pages(pages) => {
                let Storage::Pages { max_pages, .. } = append.cache.storage else {
                    unreachable!("the cache was checked to have pages");
                };
                let none = part_lse;
                (
                    &pages.k,
                    &pages.v,
                    pages.scores.as_ref().unwrap_or(none),
                    self.tokens.scores.as_ref().unwrap_or(none),
                    &pages.table,
                    &pages.lengths,
                    max_pages,
                )
            }
        };
        let (new_k, new_v) = (&self.tokens.k, &self.tokens.v);
        let typed = [&self.q, k, v, new_k, new_v];
        let size = element.size();
        let words = [part_out, part_lse, score, new_scores, places];
        let address = address_type(&typed, size).max(address_type(&words, 4));
        let [x, y, z] = plan.cubes(problem).map(|n| n as u32);
        let grid = CubeCount::Static(x, y, z);
        // One argument list, because both kernels take the same arguments.
        macro_rules! launch {
    ($kernel:ident, $dim:expr, [$($vector:expr)?], $out:ident, $blueprint:expr) => {
        // SAFETY: every buffer was checked to hold the shape and strides that the kernels index by, the parts
        // hold the rows of the outputs, and the plan holds slots of the cache.
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
                    score.clone().into_buffer_arg(),
                    new_scores.clone().into_tensor_arg(),
                    places.clone().into_buffer_arg(),
                    lengths.clone().into_buffer_arg(),
                ),
                part_out.clone().$out(),
                part_lse.clone().into_buffer_arg(),
                scaling(problem.scale, problem.softcap),
                max_pages as u32,
                $blueprint,
                elem_type(element),
            )
        }
    };
}
        match plan {
            Plan::Portable(blueprint, _) => {
                let (dim, vector) = (blueprint.tile.cube_dim(), vector_size(&typed, size));
                launch!(decode_kernel, dim, [vector], into_tensor_arg, blueprint);
            }
            Plan::Mma(blueprint, _) => {
                let dim = blueprint.cube_dim();
                launch!(decode_mma_kernel, dim, [], into_buffer_arg, blueprint);
            }
        }
    }
}
