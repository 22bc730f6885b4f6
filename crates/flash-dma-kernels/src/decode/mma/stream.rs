//! The keys of a warp, copied into its own stages ahead of their use.

use crate::decode::commit::ENTRY;
use crate::decode::mma::blueprint::{DecodeMmaBlueprint, SEGMENT};
use crate::decode::tensors::StepTensors;
use crate::matrix::fragment::swizzle;
use crate::matrix::ptx::{copy_or_zero, shared_address, shuffle, value};
use crate::vectors::Segment;
use cubecl::prelude::*;

/// The stages of a cube in shared memory; each warp has its own.
#[derive(CubeType)]
pub(crate) struct WarpStages<E: Float> {
    /// `[warps, stages, key_tile, segments]`, segments placed by [`swizzle`].
    k: Shared<[Segment<E>]>,
    /// `[warps, stages, key_tile, segments]`, segments placed by [`swizzle`].
    v: Shared<[Segment<E>]>,
    /// `[warps, stages, key_tile]`; if `bp.scored`. −∞ for keys that not all rows attend to.
    scores: Shared<[f32]>,
}

#[cube]
impl<E: Float> WarpStages<E> {
    pub(crate) fn new(#[comptime] bp: DecodeMmaBlueprint) -> WarpStages<E> {
        let tiles = comptime!(bp.warps * bp.stages);
        let segments = comptime!(bp.warps * bp.stages * bp.stage_segments());
        WarpStages::<E> {
            k: Shared::<[Segment<E>]>::new_aligned_slice(segments, 128usize),
            v: Shared::<[Segment<E>]>::new_aligned_slice(segments, 128usize),
            scores: Shared::<[f32]>::new_aligned_slice(comptime!(tiles * bp.key_tile), 128usize),
        }
    }

    /// The address of stage `stage` of this warp in the keys.
    pub(crate) fn k_address(&self, stage: usize, #[comptime] bp: DecodeMmaBlueprint) -> u32 {
        let first = own_stage(stage, bp) * comptime!(bp.stage_segments());
        shared_address(&self.k[first..first + 1])
    }

    /// The address of stage `stage` of this warp in the values.
    pub(crate) fn v_address(&self, stage: usize, #[comptime] bp: DecodeMmaBlueprint) -> u32 {
        let first = own_stage(stage, bp) * comptime!(bp.stage_segments());
        shared_address(&self.v[first..first + 1])
    }

    /// The score of key `col` of stage `stage` of this warp.
    pub(crate) fn score(
        &self,
        stage: usize,
        col: usize,
        #[comptime] bp: DecodeMmaBlueprint,
    ) -> f32 {
        self.scores[own_stage(stage, bp) * comptime!(bp.key_tile) + col]
    }
}

#[cube]
fn own_stage(stage: usize, #[comptime] bp: DecodeMmaBlueprint) -> usize {
    UNIT_POS_Y as usize * comptime!(bp.stages) + stage
}

/// The keys in the cache of one (sequence, kv head).
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Held {
    pub batch: usize,
    pub head: usize,
    /// Number of keys in the cache: its slots, or the tokens in its pages.
    pub len: usize,
    pub tokens: usize,
    /// With slots: the head's first entry of the moves. With pages: the sequence's first page in the table.
    pub first_place: usize,
    /// The head's first slot; with pages, its first row within page 0.
    row: usize,
    /// Rows from one page to the next.
    page_rows: usize,
    pub group: usize,
}

#[cube]
impl Held {
    /// The keys of kv head `CUBE_POS_X`, counted over all sequences.
    pub(crate) fn of_cube<E: Float>(
        q: &Tensor<Vector<E, Const<2>>>,
        tensors: &StepTensors<E, Const<8>>,
    ) -> Held {
        let (k, new_k) = (&tensors.k, &tensors.new_k);
        let heads = new_k.shape(1);
        let at = CUBE_POS_X as usize;
        let (batch, head) = (at / heads, at % heads);
        let tokens = new_k.shape(2);
        let page_len = k.shape(2);
        let mut len = page_len;
        let mut first_place = at * tokens * ENTRY;
        let mut row = at * page_len;
        #[comptime]
        if let ComptimeOption::Some(pages) = &tensors.pages {
            len = pages.lengths[batch] as usize;
            first_place = batch * pages.max_pages as usize;
            row = head * page_len;
        }
        Held {
            batch,
            head,
            len,
            tokens,
            first_place,
            row,
            page_rows: heads * page_len,
            group: q.shape(1) / new_k.shape(1),
        }
    }

    /// The row of slot `slot`; of the head in all of `k`, and of the scores.
    pub(crate) fn slot_row(&self, slot: usize) -> usize {
        self.row + slot
    }

    /// The row of key `first`, which begins a tile; on page `page`.
    fn tile_row<E: Float>(
        &self,
        k: &Tensor<Segment<E>>,
        page: i32,
        first: usize,
        #[comptime] bp: DecodeMmaBlueprint,
    ) -> usize {
        let mut row = self.row + first;
        if comptime!(bp.paged) {
            row = self.row + page as usize * self.page_rows + first % k.shape(2);
        }
        row
    }

    /// The first key tile of part `part` of `parts`.
    pub(crate) fn tiles_of(
        &self,
        part: usize,
        parts: usize,
        #[comptime] bp: DecodeMmaBlueprint,
    ) -> usize {
        // The first parts get one tile more.
        let tiles = self.len.div_ceil(bp.key_tile);
        part * (tiles / parts) + min(part, tiles % parts)
    }
}

/// A lane's data on a tile before it starts the copies, read one tile ahead so that the copies do not wait.
#[derive(CubeType)]
pub(crate) struct NextTile {
    /// If `bp.scored`: the score of the tile's key `lane`.
    score: f32,
    /// Pages: the tile's page. Slots: unused.
    page: i32,
    /// Slots: the slot that token `lane` takes, if there is such a token.
    taken: i32,
}

#[cube]
impl NextTile {
    pub(crate) fn new<E: Float>(held: &Held, tensors: &StepTensors<E, Const<8>>) -> NextTile {
        let lane = UNIT_POS_X as usize;
        let mut taken = i32::new(-1);
        #[comptime]
        match &tensors.moves {
            ComptimeOption::Some(moves) => {
                if lane < held.tokens {
                    taken = moves[held.first_place + lane * ENTRY];
                }
            }
            ComptimeOption::None => {}
        }
        NextTile {
            score: f32::new(f32::NEG_INFINITY),
            page: i32::new(0),
            taken,
        }
    }

    pub(crate) fn read<E: Float>(
        &mut self,
        tensors: &StepTensors<E, Const<8>>,
        held: &Held,
        tile: usize,
        #[comptime] bp: DecodeMmaBlueprint,
    ) {
        let first = tile * comptime!(bp.key_tile);
        #[comptime]
        match &tensors.pages {
            ComptimeOption::Some(pages) => {
                if first < held.len {
                    self.page = pages.table[held.first_place + first / tensors.k.shape(2)];
                }
            }
            ComptimeOption::None => {}
        }
        #[comptime]
        if let ComptimeOption::Some(scores) = &tensors.scores {
            let key = first + UNIT_POS_X as usize;
            self.score = f32::new(f32::NEG_INFINITY);
            if UNIT_POS_X < comptime!(bp.key_tile as u32) && key < held.len {
                let row = held.tile_row(&tensors.k, self.page, first, bp);
                self.score = scores.cached[row + UNIT_POS_X as usize];
            }
        }
    }
}

/// Starts the copies of tile `tile` into stage `stage` of this warp. Missing keys, and keys that not all rows of the
/// step attend to, become zeros of score −∞.
#[cube]
pub(crate) fn start_copies<E: Float>(
    tensors: &StepTensors<E, Const<8>>,
    held: &Held,
    next: &NextTile,
    tile: usize,
    stage: usize,
    stages: &mut WarpStages<E>,
    #[comptime] bp: DecodeMmaBlueprint,
) {
    let (k, v) = (&tensors.k, &tensors.v);
    let lane = UNIT_POS_X as usize;
    let segments = comptime!(bp.segments());
    let first = tile * comptime!(bp.key_tile);
    let own = own_stage(stage, bp);
    let row = held.tile_row(k, next.page, first, bp);
    let mut there = u32::new(0);
    if comptime!(bp.scored) {
        let none = f32::new(f32::NEG_INFINITY);
        let mut score = next.score;
        if comptime!(!bp.paged) {
            for token in 0..held.tokens {
                let taken = shuffle(next.taken as u32, token as u32);
                score = select(taken == (first + lane) as u32, none, score);
            }
        }
        there = ballot(score != none);
        if comptime!(bp.only_ranked) {
            score = select(score == none, none, 0.0f32);
        }
        if UNIT_POS_X < comptime!(bp.key_tile as u32) {
            stages.scores[own * comptime!(bp.key_tile) + lane] = score;
        }
    }
    #[unroll]
    for c in 0..comptime!(bp.copies()) {
        let at = lane + comptime!(c * 32);
        let (key, col) = (at / segments, at % segments);
        let mut copied = first + key < held.len;
        if comptime!(bp.scored) {
            copied = (there >> key as u32) & 1u32 == 1u32;
        }
        let from = (row + key) * segments + col;
        let to = own * comptime!(bp.stage_segments()) + swizzle(key, col, segments);
        let bytes = comptime!(2 * SEGMENT as u32);
        copy_or_zero(&k[from..from + 1], &mut stages.k[to..to + 1], copied, bytes);
        copy_or_zero(&v[from..from + 1], &mut stages.v[to..to + 1], copied, bytes);
    }
}

/// One bit per lane: whether its `flag` is set. All 32 lanes take part.
#[cube]
fn ballot(flag: bool) -> u32 {
    let word = u32::cast_from(flag);
    let out: u32;
    gpu_asm!(
        "{{ .reg .pred p; setp.ne.u32 p, {}, 0; vote.sync.ballot.b32 {}, p, -1; }}",
        in(_) value::<u32>(word),
        out(_) out,
        options(nomem)
    );
    out
}
