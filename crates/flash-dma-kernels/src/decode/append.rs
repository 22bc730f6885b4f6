//! Host side of appending.

use crate::decode::args::{Pages, Slots, Tokens};
use crate::decode::choose::choose_kernel;
use crate::decode::commit::{ENTRY, commit_kernel, lengthen_kernel, write_pages_kernel};
use crate::decode::place::place_kernel;
use crate::decode::tensors::{ContendersLaunch, SlotRuleLaunch, rule_launch};
use crate::host::check::{address_type, check_type, elem_type, vector_size};
use crate::host::range::range;
use crate::host::scratch::{cubes, one_unit_each, scratch};
use crate::team::Team;
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::{AppendProblem, AttentionError, MAX_DECODE_TOKENS, Storage};

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
    check_type(client, problem.cache.element)?;
    slots.check(&problem.cache)?;
    tokens.check(problem)?;
    if problem.cache.batch * problem.tokens == 0 {
        return Ok(());
    }
    let _range = range!("append");
    let moves = if problem.tokens <= MAX_DECODE_TOKENS {
        place(client, problem, &slots, &tokens)
    } else {
        choose(client, problem, &slots, &tokens)
    };
    commit(client, problem, slots, tokens, moves);
    Ok(())
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
    check_type(client, problem.cache.element)?;
    pages.check(&problem.cache)?;
    tokens.check(problem)?;
    let _range = range!("append");
    if problem.cache.batch * problem.tokens > 0 {
        commit_pages(client, problem, pages, tokens);
    }
    Ok(())
}

/// Rows of slots: the kv heads of all sequences.
fn rows(problem: &AppendProblem) -> usize {
    problem.cache.batch * problem.cache.kv_heads
}

/// The shape of what [`place`] returns.
pub(crate) fn moves_shape(problem: &AppendProblem) -> [usize; 3] {
    [rows(problem), problem.tokens, ENTRY]
}

/// The moves of up to [`MAX_DECODE_TOKENS`] tokens, `[rows, tokens, ENTRY]`: one entry per token.
pub(crate) fn place(
    client: &Client,
    problem: &AppendProblem,
    slots: &Slots,
    tokens: &Tokens,
) -> TensorBinding {
    let rows = rows(problem);
    let moves = scratch(client, moves_shape(problem));
    let scores = tokens.scores.clone().expect("slots have scores");
    let team = Team::new(client, PLACE_PLANES);
    // SAFETY: cubes past the rows return; the tensors were checked to hold their shapes and strides.
    unsafe {
        place_kernel::launch_unchecked(
            client,
            cubes(client, rows, team.cube_dim()),
            team.cube_dim(),
            address_type(&[&slots.score, &scores, &moves], size_of::<f32>()),
            contenders(slots, scores),
            moves.clone().into_buffer_arg(),
            rule_of(problem),
            problem.tokens as u32,
            rows as u32,
            team,
        );
    }
    moves
}

/// The rule of a cache that was checked to have slots.
fn rule_of(problem: &AppendProblem) -> SlotRuleLaunch {
    rule_launch(problem.cache.rule().expect("the cache has slots"))
}

/// The arguments of the kernels that choose slots; `scores` are those of the new tokens.
fn contenders(slots: &Slots, scores: TensorBinding) -> ContendersLaunch {
    ContendersLaunch::new(
        slots.score.clone().into_buffer_arg(),
        slots.position.clone().into_buffer_arg(),
        slots.seen.clone().into_buffer_arg(),
        scores.into_tensor_arg(),
    )
}

/// The moves of any number of tokens, `[rows, min(tokens, window), ENTRY]`: the kept tokens first.
fn choose(
    client: &Client,
    problem: &AppendProblem,
    slots: &Slots,
    tokens: &Tokens,
) -> TensorBinding {
    let rows = rows(problem);
    let entries = problem.tokens.min(problem.cache.capacity());
    let moves = scratch(client, [rows, entries, ENTRY]);
    let scores = tokens.scores.clone().expect("slots have scores");
    let team = Team::new(client, CHOOSE_PLANES);
    // SAFETY: as in `place`; at most `entries` tokens stay.
    unsafe {
        choose_kernel::launch_unchecked(
            client,
            cubes(client, rows, team.cube_dim()),
            team.cube_dim(),
            address_type(&[&slots.score, &scores, &moves], size_of::<f32>()),
            contenders(slots, scores),
            moves.clone().into_buffer_arg(),
            rule_of(problem),
            entries as u32,
            rows as u32,
            team,
            client.properties().features.copy_async,
        );
    }
    moves
}

/// Carries out `moves`, `[rows, entries, ENTRY]`, and counts the tokens as seen.
fn commit(
    client: &Client,
    problem: &AppendProblem,
    slots: Slots,
    tokens: Tokens,
    moves: TensorBinding,
) {
    let (element, entries) = (problem.cache.element, moves.shape[1]);
    let typed = [&tokens.k, &tokens.v, &slots.k, &slots.v];
    let vector = vector_size(&typed, element.size());
    let mut words = vec![&slots.score, &moves];
    words.extend(&tokens.scores);
    let address = address_type(&typed, element.size()).max(address_type(&words, size_of::<f32>()));
    let vectors = problem.cache.head_dim / vector;
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
            problem.tokens <= MAX_DECODE_TOKENS,
            elem_type(element),
        );
    }
}

/// Writes the tokens, at least one, into the pages and adds them to the lengths.
fn commit_pages(client: &Client, problem: &AppendProblem, pages: Pages, tokens: Tokens) {
    let element = problem.cache.element;
    let Storage::Pages { max_pages, .. } = problem.cache.storage else {
        unreachable!("the cache was checked to have pages");
    };
    let typed = [&tokens.k, &tokens.v, &pages.k, &pages.v];
    let vector = vector_size(&typed, element.size());
    let mut words = vec![&pages.table];
    words.extend(pages.scores.iter().chain(&tokens.scores));
    let address = address_type(&typed, element.size()).max(address_type(&words, size_of::<i32>()));
    let vectors = problem.cache.head_dim / vector;
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
