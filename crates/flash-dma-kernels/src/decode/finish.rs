//! The end of a decode step: merges the parts of the keys and writes the new rows into the cache, in one launch.

use crate::decode::args::{Pages, Slots, Tokens};
use crate::decode::commit::{commit_vector, write_page_vector};
use crate::decode::merge::merge_row;
use crate::decode::tensors::{MergedParts, MergedPartsLaunch, NewTokens, PageTensors, SlotTensors};
use crate::host::check::{address_type, elem_type, vector_size};
use crate::host::scratch::cubes;
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::{Appending, DecodeProblem, Storage};

/// The least and the most units per cube.
const LEAST_UNITS: usize = 128;
const MOST_UNITS: usize = 1024;

/// The first `rows` cubes merge a row of the outputs each ([`merge_row`]), the following cubes write the tokens of one
/// (sequence, kv head) each ([`commit_kernel`](crate::decode::commit::commit_kernel)), with entries of one token each.
#[cube(launch_unchecked, address_type = "dynamic")]
fn finish_slots_kernel<E: Float, N: Size>(
    merged: &mut MergedParts<E>,
    tokens_in: &NewTokens<E, N>,
    cache: &mut SlotTensors<E, N>,
    parts: u32,
    rows: u32,
    #[comptime] pairs: usize,
    #[comptime] units: usize,
    #[define(E)] _element: ElemType,
) {
    let (parts, rows) = (parts as usize, rows as usize);
    if CUBE_POS < rows {
        merge_row::<E>(merged, parts, rows, CUBE_POS, pairs, units);
    } else {
        let row = CUBE_POS - rows;
        let tokens = tokens_in.k.shape(2);
        let vectors = cache.k.shape(3) / tokens_in.k.vector_size().comptime();
        let mut item = UNIT_POS as usize;
        while row < cache.k.shape(0) * cache.k.shape(1) && item < tokens * vectors {
            let (entry, vector) = (item / vectors, item % vectors);
            commit_vector::<E, N>(tokens_in, cache, tokens as u32, row, entry, vector, true);
            item += units;
        }
    }
}

/// As [`finish_slots_kernel`]; the cubes after the rows write the tokens of one sequence each
/// ([`write_pages_kernel`](crate::decode::commit::write_pages_kernel)), and then its length.
#[cube(launch_unchecked, address_type = "dynamic")]
fn finish_pages_kernel<E: Float, N: Size>(
    merged: &mut MergedParts<E>,
    tokens_in: &NewTokens<E, N>,
    cache: &mut PageTensors<E, N>,
    parts: u32,
    rows: u32,
    #[comptime] pairs: usize,
    #[comptime] units: usize,
    #[define(E)] _element: ElemType,
) {
    let (parts, rows) = (parts as usize, rows as usize);
    if CUBE_POS < rows {
        merge_row::<E>(merged, parts, rows, CUBE_POS, pairs, units);
    } else if CUBE_POS - rows < tokens_in.k.shape(0) {
        let batch = CUBE_POS - rows;
        let (heads, tokens) = (tokens_in.k.shape(1), tokens_in.k.shape(2));
        let vectors = cache.k.shape(3) / tokens_in.k.vector_size().comptime();
        let held = cache.pages.lengths[batch] as usize;
        let mut item = UNIT_POS as usize;
        while item < heads * tokens * vectors {
            let (at, vector) = (item / vectors, item % vectors);
            write_page_vector::<E, N>(
                tokens_in,
                cache,
                held,
                batch * heads + at / tokens,
                at % tokens,
                vector,
            );
            item += units;
        }
        // Every unit has read the length.
        sync_cube();
        if UNIT_POS == 0 {
            cache.pages.lengths[batch] += tokens as i32;
        }
    }
}

/// Units of a cube that merges `parts` rows of `pairs` pairs: about four parts per unit, as far as the device allows; a
/// power of two.
fn units(client: &Client, parts: usize, pairs: usize) -> usize {
    let hardware = &client.properties().hardware;
    if hardware.plane_size_max <= 1 {
        return 1;
    }
    let most = 1 << (hardware.max_units_per_cube as usize).ilog2();
    let wanted = (parts.div_ceil(4) * pairs).next_power_of_two();
    wanted.clamp(LEAST_UNITS, MOST_UNITS).min(most)
}

/// The data that both kinds of cache have in common: the parts, `[parts, rows, head_dim]` and twice `[parts, rows]` in
/// f32, and the outputs, all contiguous.
pub(crate) struct Outputs {
    pub parts: usize,
    pub part_out: TensorBinding,
    pub part_lse: TensorBinding,
    pub part_rest: TensorBinding,
    pub out: TensorBinding,
    pub lse: TensorBinding,
}

/// What the cubes behind the rows of the outputs write: as many cubes as `writers` and the tokens, or no cubes and none
/// of the tokens if these are appended later. The grid may have more cubes than it needs, and they write nothing then.
fn writes(problem: &DecodeProblem, writers: usize, tokens: Tokens) -> (usize, Tokens) {
    match problem.appending {
        Appending::Now => (writers, tokens),
        Appending::Later => (0, tokens.none()),
    }
}

/// Merges the parts; carries out `moves` (one entry per token) and counts the tokens as seen, unless they are appended
/// later.
pub(crate) fn finish_slots(
    client: &Client,
    problem: &DecodeProblem,
    outputs: Outputs,
    slots: Slots,
    tokens: Tokens,
    moves: TensorBinding,
) {
    let cache = problem.append.cache;
    let rows = problem.lse_shape().iter().product::<usize>();
    let units = units(client, outputs.parts, cache.head_dim / 2);
    let dim = CubeDim::new_1d(units as u32);
    let typed = [&tokens.k, &tokens.v, &slots.k, &slots.v];
    let mut words = vec![&outputs.part_out, &outputs.part_lse, &slots.score];
    words.extend(&tokens.scores);
    let address = address_type(&typed, cache.element.size()).max(address_type(&words, 4));
    let vector = vector_size(&typed, cache.element.size());
    let (writers, tokens) = writes(problem, cache.batch * cache.kv_heads, tokens);
    // SAFETY: cubes past the rows and heads do nothing; the parts hold `parts` times the rows of the outputs, moves
    // hold slots and tokens of the problem, and the tensors were checked to hold their shapes and strides.
    unsafe {
        finish_slots_kernel::launch_unchecked(
            client,
            cubes(client, rows + writers, dim),
            dim,
            address,
            vector,
            MergedPartsLaunch::new(
                outputs.part_out.into_buffer_arg(),
                outputs.part_lse.into_buffer_arg(),
                outputs.part_rest.into_buffer_arg(),
                outputs.out.into_buffer_arg(),
                outputs.lse.into_buffer_arg(),
            ),
            tokens.into_launch(),
            slots.into_launch(moves),
            outputs.parts as u32,
            rows as u32,
            cache.head_dim / 2,
            units,
            elem_type(cache.element),
        );
    }
}

/// Merges the parts; writes the tokens into the pages and adds them to the lengths, unless they are appended later.
pub(crate) fn finish_pages(
    client: &Client,
    problem: &DecodeProblem,
    outputs: Outputs,
    pages: Pages,
    tokens: Tokens,
) {
    let cache = problem.append.cache;
    let Storage::Pages { max_pages, .. } = cache.storage else {
        unreachable!("the cache was checked to have pages");
    };
    let rows = problem.lse_shape().iter().product::<usize>();
    let units = units(client, outputs.parts, cache.head_dim / 2);
    let dim = CubeDim::new_1d(units as u32);
    let typed = [&tokens.k, &tokens.v, &pages.k, &pages.v];
    let vector = vector_size(&typed, cache.element.size());
    let mut words = vec![&outputs.part_out, &outputs.part_lse];
    words.extend(pages.scores.iter().chain(&tokens.scores));
    let address = address_type(&typed, cache.element.size()).max(address_type(&words, 4));
    let (writers, tokens) = writes(problem, cache.batch, tokens);
    // SAFETY: as in `finish_slots`; the table was checked by its owner to name pages, and the sequences have room for
    // the tokens.
    unsafe {
        finish_pages_kernel::launch_unchecked(
            client,
            cubes(client, rows + writers, dim),
            dim,
            address,
            vector,
            MergedPartsLaunch::new(
                outputs.part_out.into_buffer_arg(),
                outputs.part_lse.into_buffer_arg(),
                outputs.part_rest.into_buffer_arg(),
                outputs.out.into_buffer_arg(),
                outputs.lse.into_buffer_arg(),
            ),
            tokens.into_launch(),
            pages.into_launch(max_pages),
            outputs.parts as u32,
            rows as u32,
            cache.head_dim / 2,
            units,
            elem_type(cache.element),
        );
    }
}
