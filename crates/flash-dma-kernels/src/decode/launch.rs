//! Host side of a decode step.

use super::append::{commit, commit_pages, plan as plan_moves};
use super::args::{Pages, Slots, Tokens};
use super::kernel::decode_kernel;
use super::keys::DecodeBlueprint;
use super::merge::merge;
use crate::scratch::scratch;
use crate::tile::{
    Blueprint, Layout, address_type, check_grid, check_tensor, check_type, elem_type, vector_size,
};
use cubecl::client::Client;
use cubecl::ir::HardwareProperties;
use cubecl::prelude::*;
use flash_dma_problem::{AttentionError, DecodeProblem, Storage, TensorName};

/// Buffers of [`decode_kernel`].
const BINDINGS: u32 = 11;

/// Keys that are worth a cube of their own.
const LEAST_KEYS: usize = 64;

/// A decode step over a cache of slots: writes `out` (`[batch, q_heads, tokens, head_dim]`, the cache's element type)
/// and `lse` (`[batch, q_heads, tokens]`, f32, natural logarithm), both contiguous and overwritten, and appends the
/// tokens. `q` is `[batch, q_heads, tokens, head_dim]` of any strides with a contiguous last axis.
///
/// Query `t` attends to the `window` best of all that its sequence has been given, its own token included; tokens
/// that come later in the step do not matter to it. A query that sees nothing gets zeros and −∞.
///
/// Four launches, asynchronously; nothing waits for the host and the launches depend on the problem alone, so that
/// a step may be captured in a graph and replayed. Scratch is of the client's pool: the outputs of the parts of the
/// keys in f32, `4 * parts * (head_dim + 1)` bytes a row, and the plan.
///
/// # Errors
///
/// [`AttentionError`] if a tensor does not fit the problem, the problem's cache has no slots or the device lacks
/// what the kernel needs. Nothing is launched then, and the cache is as it was.
pub fn decode(
    client: &Client,
    problem: &DecodeProblem,
    q: TensorBinding,
    slots: Slots,
    tokens: Tokens,
    out: TensorBinding,
    lse: TensorBinding,
) -> Result<(), AttentionError> {
    let step = Step::slots(q, slots, tokens, out, lse);
    let plan = Plan::choose(client, problem, &step)?;
    step.run(client, problem, plan)
}

/// A decode step over a cache of pages, as [`decode`]: query `t` attends to all that its sequence holds and to the
/// new tokens up to its own. Four launches.
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
    let step = Step::pages(q, pages, tokens, out, lse);
    let plan = Plan::choose(client, problem, &step)?;
    step.run(client, problem, plan)
}

/// The cache of a step.
#[derive(Clone, Debug)]
pub(super) enum Cached {
    Slots(Slots),
    Pages(Pages),
}

/// The tensors of a step.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub q: TensorBinding,
    pub cached: Cached,
    pub tokens: Tokens,
    pub out: TensorBinding,
    pub lse: TensorBinding,
}

/// An engine's configuration, and into how many parts the keys are split.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub blueprint: DecodeBlueprint,
    pub parts: usize,
}

impl Plan {
    pub(super) fn choose(
        client: &Client,
        problem: &DecodeProblem,
        _step: &Step,
    ) -> Result<Self, AttentionError> {
        let hardware = &client.properties().hardware;
        let cache = problem.append.cache;
        let rows = problem.group() * problem.append.tokens;
        let tile = Blueprint::choose_rows(
            rows,
            cache.head_dim,
            cache.has_scores(),
            problem.softcap.is_some(),
            hardware,
        )?;
        let cubes = cache.batch * cache.kv_heads * rows.div_ceil(tile.outer_rows());
        Ok(Self {
            blueprint: DecodeBlueprint {
                tile,
                paged: !cache.has_scores(),
            },
            parts: parts(cache.capacity(), cubes, 4, hardware),
        })
    }
}

/// Parts of the keys of every kv head: enough that `cubes` of one part each become `resident` a multiprocessor, but
/// none of less than [`LEAST_KEYS`] keys. They follow from what the cache has room for, not from what it holds, so that
/// the launches of a step never change.
pub(super) fn parts(
    capacity: usize,
    cubes: usize,
    resident: usize,
    hardware: &HardwareProperties,
) -> usize {
    let processors = hardware.num_streaming_multiprocessors.unwrap_or(1) as usize;
    let places = processors * resident;
    (places / cubes.max(1))
        .min(capacity.div_ceil(LEAST_KEYS))
        .max(1)
}

impl Step {
    pub(super) fn slots(
        q: TensorBinding,
        slots: Slots,
        tokens: Tokens,
        out: TensorBinding,
        lse: TensorBinding,
    ) -> Self {
        Self {
            q,
            cached: Cached::Slots(slots),
            tokens,
            out,
            lse,
        }
    }

    pub(super) fn pages(
        q: TensorBinding,
        pages: Pages,
        tokens: Tokens,
        out: TensorBinding,
        lse: TensorBinding,
    ) -> Self {
        Self {
            q,
            cached: Cached::Pages(pages),
            tokens,
            out,
            lse,
        }
    }

    fn check(&self, client: &Client, problem: &DecodeProblem) -> Result<(), AttentionError> {
        let cache = &problem.append.cache;
        check_type(client, cache.element)?;
        match &self.cached {
            Cached::Slots(slots) => slots.check(cache)?,
            Cached::Pages(pages) => pages.check(cache)?,
        }
        self.tokens.check(&problem.append)?;
        let (size, shape) = (cache.element.size(), problem.q_shape());
        check_tensor(TensorName::Query, &self.q, &shape, size, Layout::Strided)?;
        check_tensor(TensorName::Out, &self.out, &shape, size, Layout::Contiguous)?;
        let shape = problem.lse_shape();
        check_tensor(TensorName::Lse, &self.lse, &shape, 4, Layout::Contiguous)
    }

    /// Checks and launches.
    pub(super) fn run(
        self,
        client: &Client,
        problem: &DecodeProblem,
        plan: Plan,
    ) -> Result<(), AttentionError> {
        self.check(client, problem)?;
        let append = &problem.append;
        let rows = problem.group() * append.tokens;
        let tiles = rows.div_ceil(plan.blueprint.tile.outer_rows());
        let heads = append.cache.batch * append.cache.kv_heads;
        check_grid(client, BINDINGS, [plan.parts, heads, tiles])?;
        if append.cache.batch * append.tokens == 0 {
            return Ok(());
        }
        let moves = match &self.cached {
            Cached::Slots(slots) => Some(plan_moves(client, append, slots, &self.tokens)),
            Cached::Pages(_) => None,
        };
        let [batch, heads, len, dim] = problem.q_shape();
        let part_out = scratch(client, [plan.parts, batch, heads, len, dim]);
        let part_lse = scratch(client, [plan.parts, batch, heads, len]);
        self.launch(client, problem, plan, moves.as_ref(), &part_out, &part_lse);
        let parts = [part_out, part_lse];
        merge(client, problem, plan.parts, parts, self.out, self.lse);
        match (self.cached, moves) {
            (Cached::Slots(slots), Some(moves)) => {
                commit(client, append, slots, self.tokens, moves);
            }
            (Cached::Pages(pages), _) => commit_pages(client, append, pages, self.tokens),
            (Cached::Slots(_), None) => unreachable!("slots have a plan"),
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
        // What a kind of cache does not have stands for what the kernel does not read.
        let (k, v, score, new_scores, places, lengths, max_pages) = match &self.cached {
            Cached::Slots(slots) => (
                &slots.k,
                &slots.v,
                &slots.score,
                self.tokens.scores.as_ref().expect("slots have scores"),
                moves.expect("slots have a plan"),
                &slots.seen,
                0,
            ),
            Cached::Pages(pages) => {
                let Storage::Pages { max_pages, .. } = append.cache.storage else {
                    unreachable!("the cache was checked to have pages");
                };
                let none = part_lse;
                let (table, lengths) = (&pages.table, &pages.lengths);
                (&pages.k, &pages.v, none, none, table, lengths, max_pages)
            }
        };
        let (new_k, new_v) = (&self.tokens.k, &self.tokens.v);
        let typed = [&self.q, k, v, new_k, new_v];
        let size = element.size();
        let words = [part_out, part_lse, score, new_scores, places];
        let address = address_type(&typed, size).max(address_type(&words, 4));
        let rows = problem.group() * append.tokens;
        let tile = plan.blueprint.tile;
        let grid = CubeCount::Static(
            plan.parts as u32,
            (append.cache.batch * append.cache.kv_heads) as u32,
            rows.div_ceil(tile.outer_rows()) as u32,
        );
        // SAFETY: every buffer was checked to hold the shape and strides that the kernel indexes by, and the parts
        // hold the rows of the outputs.
        unsafe {
            decode_kernel::launch_unchecked(
                client,
                grid,
                tile.cube_dim(),
                address,
                vector_size(&typed, size),
                self.q.clone().into_tensor_arg(),
                k.clone().into_tensor_arg(),
                v.clone().into_tensor_arg(),
                new_k.clone().into_tensor_arg(),
                new_v.clone().into_tensor_arg(),
                score.clone().into_buffer_arg(),
                new_scores.clone().into_tensor_arg(),
                places.clone().into_buffer_arg(),
                lengths.clone().into_buffer_arg(),
                part_out.clone().into_tensor_arg(),
                part_lse.clone().into_buffer_arg(),
                problem.scale,
                problem.softcap.unwrap_or(1.0),
                max_pages as u32,
                plan.blueprint,
                elem_type(element),
            );
        }
    }
}
