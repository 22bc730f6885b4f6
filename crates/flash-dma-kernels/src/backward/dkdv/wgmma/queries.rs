//! The shared memory of the dk/dv kernel: its key tile, and the query tiles that stream past it as boxes.

use crate::backward::dkdv::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::args::QueryBoxes;
use crate::backward::dkdv::shared::queries::{QueryRows, Step, all_finite};
use crate::backward::dkdv::shared::room_if;
use crate::backward::dkdv::shared::steps::{Cursor, KeyBounds};
use crate::finite::{NO_NUMBER, exponent_bits, is_finite};
use crate::matrix::logit_scale::is_large_scaled;
use crate::matrix::ptx::{any_lane, shared_address, uniform, uniform_bool, unit_position};
use crate::matrix::wgmma::boxes::{BoxPlace, copy_boxes, copy_words};
use crate::matrix::wgmma::panel::{Panels, publish};
use crate::matrix::wgmma::ring::Ring;
use crate::vectors::Segment;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

/// The shared memory of a cube's warpgroups.
#[derive(CubeType)]
pub(crate) struct Tiles<E: Float> {
    /// `[warpgroups, head_dim / 64, 64 keys, 64]`, panels.
    pub k: Shared<[Segment<E>]>,
    /// `[warpgroups, head_dim / 64, 64 keys, 64]`, panels.
    pub v: Shared<[Segment<E>]>,
    /// `[stages, head_dim / 64, rows, 64]`, panels; rows past the last query are zero.
    pub q: Shared<[Segment<E>]>,
    /// `[stages, head_dim / 64, rows, 64]`, panels; rows past the last query are zero.
    pub grad_out: Shared<[Segment<E>]>,
    /// `[stages, rows / 2]`: for each of two rows, `-log2(e)` times the LSE and the row sum.
    pub rows: Shared<[Vector<f32, Const<4>>]>,
    /// `[stages, rows]`: the rows' words of the dropout mask, if there is dropout.
    pub words: ComptimeOption<Shared<[u32]>>,
    /// `[group]`: the ALiBi slopes, if there are any.
    pub slopes: ComptimeOption<Shared<[f32]>>,
    pub bounds: KeyBounds,
    /// `[2]`: see [`found_large`](Self::found_large) and [`found_not_finite`](Self::found_not_finite).
    found: Shared<[u32]>,
}

#[cube]
impl<E: Float> Tiles<E> {
    pub(crate) fn new(#[comptime] bp: DkdvBlueprint) -> Tiles<E> {
        let key_segments = comptime!(bp.keys() * bp.segments());
        let segments = comptime!(bp.stages * bp.rows * bp.segments());
        Tiles::<E> {
            k: Shared::<[Segment<E>]>::new_aligned_slice(key_segments, 1024usize),
            v: Shared::<[Segment<E>]>::new_aligned_slice(key_segments, 1024usize),
            q: Shared::<[Segment<E>]>::new_aligned_slice(segments, 1024usize),
            grad_out: Shared::<[Segment<E>]>::new_aligned_slice(segments, 1024usize),
            rows: Shared::<[Vector<f32, Const<4>>]>::new_aligned_slice(
                comptime!(bp.stages * bp.rows / 2),
                128usize,
            ),
            words: room_if::<u32>(bp.dropout, comptime!(bp.stages * bp.rows)),
            slopes: room_if::<f32>(comptime!(bp.slopes > 0), comptime!(bp.slopes)),
            bounds: KeyBounds::new(bp),
            found: Shared::<[u32]>::new_slice(2usize),
        }
    }

    /// Notes that no step has been seen; the caller synchronises.
    pub(crate) fn forget(&mut self) {
        if UNIT_POS == 0 {
            self.found[0usize] = 0u32;
            self.found[1usize] = 0u32;
        }
    }

    /// True if a step that this unit has seen had a row with a large LSE. Every unit sees all steps, so after the last
    /// one they agree without a barrier. A variable would take a register from all steps.
    pub(crate) fn found_large(&self) -> bool {
        uniform_bool(self.found[0usize] == 1u32)
    }

    /// True if a step had rows that may not be finite, which [`clean_stage`] has zeroed.
    pub(crate) fn found_not_finite(&self) -> bool {
        self.found[1usize] == 1u32
    }
}

/// The copies of a step's queries, output gradients and rows.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct StepCopies {
    /// Addresses of the tensor maps.
    q: u64,
    grad_out: u64,
    rows: u64,
    /// Addresses of the first stages: in units of [`Panels`], and in bytes.
    q_panels: u32,
    o_panels: u32,
    places: u32,
    /// The copies of the words of rows, if there is dropout.
    words: ComptimeOption<WordCopies>,
    /// The sequence, and the first head of the group.
    batch: usize,
    head: usize,
}

/// The tensor map of the words of rows, and the address of their first stage in bytes.
#[derive(CubeType, Clone, Copy)]
struct WordCopies {
    map: u64,
    places: u32,
}

#[cube]
fn word_copies<E: Float>(boxes: &QueryBoxes<E>, tiles: &Tiles<E>) -> ComptimeOption<WordCopies> {
    #[comptime]
    match &boxes.words {
        ComptimeOption::Some(map) => {
            let words = tiles.words.as_ref().unwrap();
            ComptimeOption::new_Some(WordCopies {
                map: tensor_map_address::<f32, Tiled>(map),
                places: uniform(shared_address(&words[0..1]) as usize) as u32,
            })
        }
        ComptimeOption::None => ComptimeOption::new_None(),
    }
}

#[cube]
impl StepCopies {
    pub(crate) fn new<E: Float>(
        boxes: &QueryBoxes<E>,
        tiles: &Tiles<E>,
        batch: usize,
        queries: &QueryRows,
    ) -> StepCopies {
        StepCopies {
            q: tensor_map_address::<E, Tiled>(&boxes.q),
            grad_out: tensor_map_address::<E, Tiled>(&boxes.grad_out),
            rows: tensor_map_address::<f32, Tiled>(&boxes.rows),
            q_panels: Panels::at::<E>(&tiles.q[0..1]).address,
            o_panels: Panels::at::<E>(&tiles.grad_out[0..1]).address,
            places: uniform(shared_address(&tiles.rows[0..1]) as usize) as u32,
            words: word_copies::<E>(boxes, tiles),
            batch,
            head: queries.head,
        }
    }

    pub(crate) fn queries(&self, stage: usize, #[comptime] bp: DkdvBlueprint) -> Panels {
        let address = self.q_panels + stage as u32 * comptime!((bp.rows * bp.segments()) as u32);
        Panels { address }
    }

    pub(crate) fn grad_out(&self, stage: usize, #[comptime] bp: DkdvBlueprint) -> Panels {
        let address = self.o_panels + stage as u32 * comptime!((bp.rows * bp.segments()) as u32);
        Panels { address }
    }

    /// Starts the copies of step `step`, at `cursor`, into its stage. Only one unit calls it.
    pub(crate) fn start(
        &self,
        ring: &Ring,
        cursor: &Cursor,
        step: usize,
        #[comptime] bp: DkdvBlueprint,
    ) {
        let stage = step % comptime!(bp.stages);
        let query = cursor.tile * comptime!(bp.queries());
        let (batch, head) = (self.batch, self.head + cursor.head);
        let (rows, columns) = comptime!((bp.rows, bp.head_dim));
        let row_bytes = comptime!(if bp.dropout { 12 } else { 8 });
        ring.arrive_expecting(
            stage,
            comptime!(2 * bp.stage_bytes() + row_bytes * bp.rows as u32),
        );
        #[comptime]
        match &self.words {
            ComptimeOption::Some(words) => {
                let to = words.places + stage as u32 * comptime!(4 * bp.rows as u32);
                copy_words(words.map, batch, head, query, to, ring, stage);
            }
            ComptimeOption::None => {}
        }
        let word = 2 * query;
        let to = self.places + stage as u32 * comptime!(8 * bp.rows as u32);
        copy_words(self.rows, batch, head, word, to, ring, stage);
        let to = self.queries(stage, bp);
        let from = BoxPlace {
            batch,
            head,
            row: query,
        };
        copy_boxes(self.q, &from, &to, ring, stage, rows, columns);
        let (map, to) = (self.grad_out, self.grad_out(stage, bp));
        copy_boxes(map, &from, &to, ring, stage, rows, columns);
    }
}

/// The step from query `query` of head `head` of the group, its tile in `stage`; `full` if its queries see all keys.
#[cube]
pub(crate) fn step_at<E: Float>(
    stage: usize,
    query: usize,
    head: usize,
    full: bool,
    tiles: &mut Tiles<E>,
    #[comptime] bp: DkdvBlueprint,
) -> Step {
    // This lane's two of 64 rows.
    let rows = tiles.rows[stage * comptime!(bp.rows / 2) + UNIT_POS_X as usize];
    let bits = max(
        max(
            exponent_bits(rows.extract(0usize)),
            exponent_bits(rows.extract(1usize)),
        ),
        max(
            exponent_bits(rows.extract(2usize)),
            exponent_bits(rows.extract(3usize)),
        ),
    );
    let mut boundary = !full;
    let mut large = false;
    let mut not_finite = false;
    // Rare: non-finite elements of Q or dO make the row sum non-finite, or the LSE -inf; a large LSE is scaled to -inf.
    if any_lane(bits == NO_NUMBER) {
        large = any_lane(
            is_large_scaled(rows.extract(0usize)) || is_large_scaled(rows.extract(2usize)),
        );
        if large {
            tiles.found[0usize] = 1u32;
        }
        let none = f32::new(f32::INFINITY);
        let empty = any_lane(rows.extract(0usize) == none || rows.extract(2usize) == none);
        boundary = boundary || empty || large;
        let mut unknown = empty;
        if comptime!(bp.pattern.is_planned()) {
            // Queries that see nothing are common there; non-finite queries are not.
            unknown = empty && any_lane(!all_finite::<E>(&tiles.q, stage, bp));
        }
        not_finite = boundary
            && (unknown
                || any_lane(!is_finite(rows.extract(1usize)) || !is_finite(rows.extract(3usize))));
    }
    if comptime!(bp.softcap) {
        // A capped logit does not reveal an infinite query.
        if boundary {
            not_finite = not_finite || any_lane(!all_finite::<E>(&tiles.q, stage, bp));
        }
    }
    Step {
        query,
        head,
        boundary,
        large,
        not_finite,
    }
}

/// Zeroes the non-finite elements of Q and dO in `stage`. All units cooperate; the stage is published.
#[cube]
pub(crate) fn clean_stage<E: Float>(
    tiles: &mut Tiles<E>,
    stage: usize,
    #[comptime] bp: DkdvBlueprint,
) {
    tiles.found[1usize] = 1u32;
    sync_cube();
    zero_not_finite::<E>(&mut tiles.q, stage, bp);
    zero_not_finite::<E>(&mut tiles.grad_out, stage, bp);
    publish();
    sync_cube();
}

/// Zeroes the elements of a stage of queries or output gradients that are not finite.
#[cube]
fn zero_not_finite<E: Float>(
    rows: &mut Shared<[Segment<E>]>,
    stage: usize,
    #[comptime] bp: DkdvBlueprint,
) {
    let mut at = unit_position();
    while at < comptime!(bp.rows * bp.segments()) {
        let place = stage * comptime!(bp.rows * bp.segments()) + at;
        let mut values = rows[place];
        #[unroll]
        for e in 0..8usize {
            if !is_finite(f32::cast_from(values.extract(e))) {
                values.insert(e, E::from_int(0));
            }
        }
        rows[place] = values;
        at += comptime!(bp.units());
    }
}

/// The query of row `row` of a step's tile, if it `counts`, otherwise -1.
#[cube]
pub(crate) fn query_of(
    counts: bool,
    row: usize,
    step: &Step,
    #[comptime] bp: DkdvBlueprint,
) -> i32 {
    let query = (step.query + row % comptime!(bp.queries())) as i32;
    select(counts, query, i32::new(-1))
}
