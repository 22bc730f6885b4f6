//! Dropout of the pairs of a lane's two rows and the columns of an accumulator, of which either may be the queries.
//!
//! A word of each query and of each key is made once, not per pair: the words of a tile's columns lie in its stage in
//! shared memory. A pair then takes one multiplication, one comparison and one selection.

use crate::dropout::{DropoutArg, DropoutSeed, head_word, row_word};
use crate::host::engine::Instruction;
use crate::matrix::blueprint::MmaBlueprint;
use crate::matrix::ptx::{read_pair, shared_address, value};
use crate::matrix::rows::{CubeTile, RowPair, TileRow};
use cubecl::prelude::*;

/// The dropout mask of the two queries whose elements a lane holds in an accumulator, see [`RowPair`].
#[derive(CubeType, Clone, Copy)]
pub(crate) struct LaneMask {
    upper: u32,
    lower: u32,
    /// `wgmma` only: the address in shared memory of the words of the stages' columns, this lane's first. Read through
    /// it, the words take no registers before their use.
    columns: u32,
    seed: DropoutSeed,
    #[cube(comptime)]
    bp: MmaBlueprint,
}

/// The dropout mask of two rows of an accumulator and two neighbouring columns.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct PairMask {
    pub upper: u32,
    pub lower: u32,
    pub columns: Vector<u32, Const<2>>,
    pub seed: DropoutSeed,
}

/// The dropout mask of a lane's queries, if there is dropout; `words` are those of the
/// [stages](crate::matrix::stages::Stages::columns).
#[cube]
pub(crate) fn lane_mask(
    dropout: &DropoutArg,
    words: &ComptimeOption<Shared<[u32]>>,
    own: &CubeTile,
    rows: &RowPair,
) -> ComptimeOption<LaneMask> {
    dropout.as_ref().map(|seed| LaneMask {
        upper: word_of(seed, own, &rows.upper),
        lower: word_of(seed, own, &rows.lower),
        columns: match comptime!(own.bp.instruction) {
            Instruction::Mma => 0u32.runtime(),
            Instruction::Wgmma => {
                shared_address(&words.as_ref().unwrap()[0..1]) + UNIT_POS_X % 4 * 8
            }
        },
        seed: seed.copied(),
        bp: own.bp,
    })
}

#[cube]
pub(crate) fn word_of(seed: &DropoutSeed, own: &CubeTile, row: &TileRow) -> u32 {
    let head = head_word(own.batch * own.q_heads + row.head, seed);
    row_word(head, row.query, own.q_len, own.k_len)
}

/// The dropout mask of columns `first + column + 2 quad` and the next of key tile `tile`; `words` are those of the
/// [stages](crate::matrix::stages::Stages::columns).
#[cube]
pub(crate) fn pair_mask(
    rows: &ComptimeOption<LaneMask>,
    words: &ComptimeOption<Shared<[u32]>>,
    tile: usize,
    first: usize,
    #[comptime] column: usize,
) -> ComptimeOption<PairMask> {
    rows.as_ref().map(|rows| {
        let bp = comptime!(rows.bp);
        let stage = tile % comptime!(bp.stages) * comptime!(bp.key_tile);
        let at = stage + first + column;
        PairMask {
            upper: rows.upper,
            lower: rows.lower,
            columns: match comptime!(bp.instruction) {
                Instruction::Mma => {
                    pair_at(words.as_ref().unwrap(), at + UNIT_POS_X as usize % 4 * 2)
                }
                Instruction::Wgmma => read_pair(rows.columns + at as u32 * 4),
            },
            seed: rows.seed.copied(),
        }
    })
}

#[cube]
pub(crate) fn pair_at(words: &Shared<[u32]>, at: usize) -> Vector<u32, Const<2>> {
    let mut pair = Vector::<u32, Const<2>>::new(words[at]);
    pair.insert(1usize, words[at + 1]);
    pair
}

#[cube]
impl PairMask {
    fn row(&self, #[comptime] lower: bool) -> u32 {
        if comptime!(lower) {
            self.lower
        } else {
            self.upper
        }
    }

    /// `p` of a pair; times 0 if it is dropped.
    fn times_kept(&self, p: f32, #[comptime] e: usize, #[comptime] lower: bool) -> f32 {
        let out: f32;
        gpu_asm!(
            "{{ .reg .pred d; .reg .u32 w; .reg .f32 t; mul.lo.u32 w, {row}, {column}; setp.lo.u32 d, w, {threshold}; \
             mov.f32 t, {p}; @d mul.f32 t, t, 0f00000000; mov.f32 {out}, t; }}",
            row = in(_) value::<u32>(self.row(lower)),
            column = in(_) value::<u32>(self.columns.extract(e)),
            threshold = in(_) value::<u32>(self.seed.threshold),
            p = in(_) value::<f32>(p),
            out = out(_) out,
            options(pure, nomem)
        );
        out
    }

    /// True if the pair of column `e` and one of the rows (the `lower` one, or else the upper) is dropped.
    pub(crate) fn drops(&self, #[comptime] e: usize, #[comptime] lower: bool) -> bool {
        (self.seed).drops(self.row(lower), self.columns.extract(e))
    }

    /// The factor of this pair's probability.
    pub(crate) fn weight(&self, #[comptime] e: usize, #[comptime] lower: bool) -> f32 {
        (self.seed).weight(self.row(lower), self.columns.extract(e))
    }
}

/// A probability of one of the rows (the `lower` one, or else the upper) and column `e` of two; 0 if the pair is
/// dropped. Kept ones lack their factor, which the output gets.
#[cube]
pub(crate) fn kept(
    mask: &ComptimeOption<PairMask>,
    p: f32,
    #[comptime] e: usize,
    #[comptime] lower: bool,
) -> f32 {
    #[comptime]
    match mask {
        // A probability that is NaN is also in the sum that divides the output.
        ComptimeOption::Some(mask) => select(mask.drops(e, lower), 0.0f32, p),
        ComptimeOption::None => p,
    }
}

/// [`kept`] by a predicated product with 0 instead of a selection: a multiprocessor starts twice as many products of
/// floats as selections or comparisons. It takes registers that only the forward pass on `wgmma` has left.
#[cube]
pub(crate) fn kept_by_product(
    mask: &ComptimeOption<PairMask>,
    p: f32,
    #[comptime] e: usize,
    #[comptime] lower: bool,
) -> f32 {
    #[comptime]
    match mask {
        ComptimeOption::Some(mask) => mask.times_kept(p, e, lower),
        ComptimeOption::None => p,
    }
}

#[cube]
pub(crate) fn weighed(
    mask: &ComptimeOption<PairMask>,
    p: f32,
    #[comptime] e: usize,
    #[comptime] lower: bool,
) -> f32 {
    #[comptime]
    match mask {
        ComptimeOption::Some(mask) => p * mask.weight(e, lower),
        ComptimeOption::None => p,
    }
}

/// `m dp - delta`, where `m` is the factor of the pair's probability.
#[cube]
pub(crate) fn without_delta(
    mask: &ComptimeOption<PairMask>,
    dp: f32,
    delta: f32,
    #[comptime] e: usize,
    #[comptime] lower: bool,
) -> f32 {
    #[comptime]
    match mask {
        ComptimeOption::Some(mask) => fma(mask.weight(e, lower), dp, -delta),
        ComptimeOption::None => dp - delta,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dropout::dropout;
    use crate::pattern::kind::Pattern;
    use crate::testing::{client, problem, read_u32, zeros};
    use flash_dma_problem::{AttentionOptions, Dropout, ElementType, dropout as host};

    /// Unit `UNIT_POS` writes the word of that row of tile `CUBE_POS_X` of the heads from `CUBE_POS_Y * bp.heads` on.
    #[cube(launch_unchecked)]
    fn rows_kernel(
        words: &mut Tensor<u32>,
        dropout: &DropoutArg,
        k_len: usize,
        #[comptime] bp: MmaBlueprint,
    ) {
        let (q_heads, q_len) = (words.shape(1), words.shape(2));
        let head = CUBE_POS_Y as usize * comptime!(bp.heads);
        let own = CubeTile {
            batch: head / q_heads,
            q_heads,
            q_len,
            k_len,
            first_head: head % q_heads,
            kv_head: 0usize,
            kv_row: 0usize,
            tile: CUBE_POS_X as usize,
            local: 0usize,
            bp,
        };
        let row = TileRow::new(UNIT_POS as usize, &own);
        #[comptime]
        match dropout {
            ComptimeOption::Some(seed) => {
                if row.valid {
                    let at = (own.batch * q_heads + row.head) * q_len + row.query;
                    words[at] = word_of(seed, &own, &row);
                }
            }
            ComptimeOption::None => {}
        }
    }

    #[test]
    fn rows_of_a_tile_have_the_words_of_their_heads_and_positions() {
        let client = client();
        for (heads, group, q_len, k_len) in [(1, 1, 20, 9), (3, 3, 11, 40), (2, 4, 9, 9)] {
            let (q, kv) = ([2, 2 * group, q_len, 64], [2, k_len]);
            let given = Dropout::new(0.5, 77).unwrap();
            let options = AttentionOptions::new().with_dropout(given);
            let p = problem(q, kv, false, ElementType::Bf16, &options);
            let bp = MmaBlueprint::of(Instruction::Mma, &p, Pattern::scored(&p), heads, 1);
            let words = zeros(&client, &[2, 2 * group, q_len]);
            let tiles = q_len.div_ceil(bp.queries()) as u32;
            // SAFETY: rows without a query write nothing.
            unsafe {
                rows_kernel::launch_unchecked(
                    &client,
                    CubeCount::Static(tiles, (4 * group / heads) as u32, 1),
                    CubeDim::new_1d(bp.tile_rows() as u32),
                    words.clone().into_tensor_arg(),
                    dropout(&p).into(),
                    k_len,
                    bp,
                );
            }
            let mask = given.mask();
            let expected: Vec<u32> = (0..4 * group)
                .flat_map(|head| (0..q_len).map(move |query| (head, query)))
                .map(|(head, query)| {
                    host::row_word(mask.head_word(head), p.dropout_position(query))
                })
                .collect();
            assert_eq!(read_u32(&client, words), expected);
        }
    }
}
