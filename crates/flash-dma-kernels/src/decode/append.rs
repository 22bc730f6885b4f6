//! Host side of appending.

use crate::decode::args::{Cache, Pages, Slots, Tokens};
use crate::decode::choose::choose_kernel;
use crate::decode::commit::{ENTRY, commit_kernel, lengthen_kernel, write_pages_kernel};
use crate::decode::place::place_kernel;
use crate::decode::tensors::{ContendersLaunch, SlotRuleLaunch};
use crate::host::check::{address_type, check_type, elem_type, vector_size};
use crate::host::range::range;
use crate::host::scratch::{cubes, one_unit_each, scratch};
use crate::team::Team;
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::{AppendProblem, AttentionError, MAX_DECODE_TOKENS, SelectionRule, Storage};

/// Planes per cube that finds the worst of a head's slots.
const PLACE_PLANES: usize = 8;

/// Planes of a cube that reads all new scores of a head.
const CHOOSE_PLANES: usize = 32;

/// Appends tokens to a cache of slots: it then holds, for each kv head, those of the tokens given before and the new
/// tokens that the cache's rule keeps at the position of the last one, by the order of selection (greater scores first,
/// a tie to the lower position, NaN below every number, −∞ never).
///
/// Any number of tokens may be appended, in any pieces, with the same result. It takes two asynchronous launches;
/// nothing waits for the host. Scratch is `12 * min(tokens, window)` bytes per kv head, from the client's pool.
///
/// # Errors
///
/// [`AttentionError`] if a tensor does not fit the problem or the problem's cache has no slots. Nothing is launched in
/// that case, and the cache is as it was.
pub fn append(
    client: &Client,
    problem: &AppendProblem,
    slots: Slots,
    tokens: Tokens,
) -> Result<(), AttentionError> {
    append_to(client, problem, Cache::Slots(slots), tokens)
}

/// Appends tokens to a cache of pages, after the tokens that each sequence holds, in two asynchronous launches.
///
/// # Errors
///
/// [`AttentionError`] if a tensor does not fit the problem or the problem's cache has no pages. Nothing is launched in
/// that case, and the cache is as it was.
pub fn append_pages(
    client: &Client,
    problem: &AppendProblem,
    pages: Pages,
    tokens: Tokens,
) -> Result<(), AttentionError> {
    append_to(client, problem, Cache::Pages(pages), tokens)
}

fn append_to(
    client: &Client,
    problem: &AppendProblem,
    cache: Cache,
    tokens: Tokens,
) -> Result<(), AttentionError> {
    check_type(client, problem.cache.element)?;
    cache.check(&problem.cache)?;
    tokens.check(problem)?;
    if problem.cache.batch * problem.tokens > 0 {
        let _range = range!("append");
        let target = Target::new(client, problem, cache, &tokens);
        commit(client, problem, target, tokens);
    }
    Ok(())
}

/// A cache, and the places of new tokens in it.
pub(crate) enum Target {
    /// Slots, and the moves of tokens into them: `[rows, entries, ENTRY]`.
    Slots(Slots, TensorBinding),
    /// Pages, and the most pages of a sequence.
    Pages(Pages, usize),
}

impl Target {
    /// The places of `tokens`, at least one, in a checked cache. Chooses their slots, in one launch.
    pub(crate) fn new(
        client: &Client,
        problem: &AppendProblem,
        cache: Cache,
        tokens: &Tokens,
    ) -> Self {
        match (cache, problem.cache.storage) {
            (Cache::Slots(slots), Storage::Slots { rule, .. }) => {
                let moves = moves(client, problem, &slots, rule, tokens);
                Self::Slots(slots, moves)
            }
            (Cache::Pages(pages), Storage::Pages { max_pages, .. }) => {
                Self::Pages(pages, max_pages)
            }
            _ => unreachable!("the cache was checked to be of the problem's kind"),
        }
    }

    /// The cache's keys and values, and those of the tokens.
    pub(crate) fn typed<'a>(&'a self, tokens: &'a Tokens) -> [&'a TensorBinding; 4] {
        let (k, v) = match self {
            Self::Slots(slots, _) => (&slots.k, &slots.v),
            Self::Pages(pages, _) => (&pages.k, &pages.v),
        };
        [k, v, &tokens.k, &tokens.v]
    }

    pub(crate) fn scores(&self) -> Option<&TensorBinding> {
        match self {
            Self::Slots(slots, _) => Some(&slots.score),
            Self::Pages(pages, _) => pages.scores.as_ref(),
        }
    }

    /// The largest tensors of words: scores, and the moves or the table of pages.
    pub(crate) fn words<'a>(&'a self, tokens: &'a Tokens) -> Vec<&'a TensorBinding> {
        let places = match self {
            Self::Slots(_, moves) => moves,
            Self::Pages(pages, _) => &pages.table,
        };
        let scores = self.scores().into_iter().chain(&tokens.scores);
        scores.chain([places]).collect()
    }
}

/// Rows of slots: the kv heads of all sequences.
fn rows(problem: &AppendProblem) -> usize {
    problem.cache.batch * problem.cache.kv_heads
}

/// True if the slots are chosen token by token, so that there is a move for each.
fn in_order(problem: &AppendProblem) -> bool {
    problem.tokens <= MAX_DECODE_TOKENS
}

/// The shape of the moves, `[rows, entries, ENTRY]`.
pub(crate) fn moves_shape(problem: &AppendProblem) -> [usize; 3] {
    let entries = match in_order(problem) {
        true => problem.tokens,
        false => problem.tokens.min(problem.cache.capacity()),
    };
    [rows(problem), entries, ENTRY]
}

/// The moves of tokens into slots. With more than [`MAX_DECODE_TOKENS`] tokens, the kept ones come first.
fn moves(
    client: &Client,
    problem: &AppendProblem,
    slots: &Slots,
    rule: SelectionRule,
    tokens: &Tokens,
) -> TensorBinding {
    let shape = moves_shape(problem);
    let [rows, entries, _] = shape;
    let moves = scratch(client, shape);
    let scores = tokens.scores.clone().expect("slots have scores");
    // One argument list, because both kernels begin with the same arguments.
    macro_rules! launch {
        ($kernel:ident, $planes:expr $(, $ptx:expr)?) => {{
            let team = Team::new(client, $planes);
            // SAFETY: cubes past the rows return; at most `entries` tokens take slots; the tensors were checked to hold
            // their shapes and strides.
            unsafe {
                $kernel::launch_unchecked(
                    client,
                    cubes(client, rows, team.cube_dim()),
                    team.cube_dim(),
                    address_type(&[&slots.score, &scores, &moves], size_of::<f32>()),
                    ContendersLaunch::new(
                        slots.score.clone().into_buffer_arg(),
                        slots.position.clone().into_buffer_arg(),
                        slots.seen.clone().into_buffer_arg(),
                        scores.into_tensor_arg(),
                    ),
                    moves.clone().into_buffer_arg(),
                    SlotRuleLaunch::new(rule.window as u32, rule.recent as i32, rule.sinks as i32),
                    entries as u32,
                    rows as u32,
                    team,
                    $($ptx,)?
                );
            }
        }};
    }
    if in_order(problem) {
        launch!(place_kernel, PLACE_PLANES);
    } else {
        let ptx = client.properties().features.copy_async;
        launch!(choose_kernel, CHOOSE_PLANES, ptx);
    }
    moves
}

/// Writes the tokens, at least one, to their places, and counts them as seen.
fn commit(client: &Client, problem: &AppendProblem, target: Target, tokens: Tokens) {
    let element = problem.cache.element;
    let typed = target.typed(&tokens);
    let vector = vector_size(&typed, element.size());
    let words = address_type(&target.words(&tokens), size_of::<f32>());
    let address = address_type(&typed, element.size()).max(words);
    let vectors = problem.cache.head_dim / vector;
    match target {
        Target::Slots(slots, moves) => {
            let entries = moves.shape[1];
            let (count, dim) = one_unit_each(client, rows(problem) * entries * vectors);
            // SAFETY: units past the entries return; moves hold slots and tokens of the problem, and the tensors were
            // checked to hold their shapes and strides.
            unsafe {
                commit_kernel::launch_unchecked(
                    client,
                    count,
                    dim,
                    address,
                    vector,
                    tokens.into_launch(),
                    slots.into_launch(moves),
                    entries as u32,
                    in_order(problem),
                    elem_type(element),
                );
            }
        }
        Target::Pages(pages, max_pages) => {
            let lengths = pages.lengths.clone();
            let (count, dim) = one_unit_each(client, rows(problem) * problem.tokens * vectors);
            // SAFETY: units past the rows return; the table was checked by its owner to name pages, the sequences have
            // room for the tokens, and the tensors were checked to hold their shapes and strides.
            unsafe {
                write_pages_kernel::launch_unchecked(
                    client,
                    count,
                    dim,
                    address,
                    vector,
                    tokens.into_launch(),
                    pages.into_launch(max_pages),
                    elem_type(element),
                );
            }
            let batch = problem.cache.batch;
            let (count, dim) = one_unit_each(client, batch);
            // SAFETY: units past the sequences return.
            unsafe {
                lengthen_kernel::launch_unchecked(
                    client,
                    count,
                    dim,
                    lengths.into_buffer_arg(),
                    batch as u32,
                    problem.tokens as u32,
                );
            }
        }
    }
}
