//! The end of a decode step: merges the parts of the keys and writes the new rows into the cache, in one launch.

use crate::decode::append::Target;
use crate::decode::args::Tokens;
use crate::decode::commit::{commit_vector, write_page_vector};
use crate::decode::merge::merge_row;
use crate::decode::tensors::{MergedParts, MergedPartsLaunch, NewTokens, PageTensors, SlotTensors};
use crate::host::check::{address_type, elem_type, vector_size};
use crate::host::scratch::cubes;
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::{Appending, DecodeProblem};

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

/// [`finish_slots_kernel`] for pages; the cubes after the rows write the tokens of one sequence each
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
            let (row, token) = (batch * heads + at / tokens, at % tokens);
            write_page_vector::<E, N>(tokens_in, cache, held, row, token, vector);
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

/// The parts, `[parts, rows, head_dim]` and twice `[parts, rows]` in f32, and the merged outputs, all contiguous.
pub(crate) struct Outputs {
    pub parts: usize,
    pub part_out: TensorBinding,
    pub part_lse: TensorBinding,
    pub part_rest: TensorBinding,
    pub out: TensorBinding,
    pub lse: TensorBinding,
}

/// Merges the parts, writes the tokens into the cache and counts them, unless they are appended later.
pub(crate) fn finish(
    client: &Client,
    problem: &DecodeProblem,
    outputs: Outputs,
    target: Target,
    tokens: Tokens,
) {
    let cache = problem.append.cache;
    let rows = problem.lse_shape().iter().product::<usize>();
    let (parts, pairs) = (outputs.parts, cache.head_dim / 2);
    let units = units(client, parts, pairs);
    let dim = CubeDim::new_1d(units as u32);
    let typed = target.typed(&tokens);
    let vector = vector_size(&typed, cache.element.size());
    let mut words = target.words(&tokens);
    words.extend([&outputs.part_out, &outputs.part_lse]);
    let address = address_type(&typed, cache.element.size()).max(address_type(&words, 4));
    // The grid may have more cubes than it needs, and they write nothing if there are no tokens.
    let (writers, tokens) = match (problem.appending, &target) {
        (Appending::Later, _) => (0, tokens.none()),
        (Appending::Now, Target::Slots(..)) => (cache.batch * cache.kv_heads, tokens),
        (Appending::Now, Target::Pages(..)) => (cache.batch, tokens),
    };
    // One argument list, because both kernels take the same arguments.
    macro_rules! launch {
        ($kernel:ident, $cache:expr) => {
            // SAFETY: cubes past the rows and the writers do nothing; the parts hold `parts` times the rows of the
            // outputs, moves hold slots and tokens of the problem, the table was checked by its owner to name pages, the
            // sequences have room for the tokens, and the tensors were checked to hold their shapes and strides.
            unsafe {
                $kernel::launch_unchecked(
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
                    $cache,
                    parts as u32,
                    rows as u32,
                    pairs,
                    units,
                    elem_type(cache.element),
                );
            }
        };
    }
    match target {
        Target::Slots(slots, moves) => launch!(finish_slots_kernel, slots.into_launch(moves)),
        Target::Pages(pages, most) => launch!(finish_pages_kernel, pages.into_launch(most)),
    }
}
