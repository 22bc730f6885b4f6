//! The comptime configuration of the kernels that own key tiles, dk/dv and rank, and its choice.

use crate::host::engine::Instruction;
use crate::matrix::blueprint::heads_per_tile;
use crate::matrix::logit_scale::LogitForm;
use crate::matrix::mma::Shape;
use crate::pattern::kind::{Bias, Pattern};
use crate::pattern::mask::query_lists::StepShape;
use cubecl::CubeDim;
use flash_dma_problem::{ElementType, MaskedProblem, Obstacle, Problem};

/// Compile-time configuration of a kernel that owns key tiles, with the length of its query chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ChunkedBlueprint {
    pub tiles: DkdvBlueprint,
    /// Queries per chunk, a multiple of `tiles.queries()`.
    pub chunk: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DkdvBlueprint {
    pub instruction: Instruction,
    /// f16 or bf16.
    pub element: ElementType,
    /// A multiple of 32.
    pub head_dim: usize,
    /// Warps of each of the two roles.
    pub role_warps: usize,
    /// Groups of 16 keys that a warp owns with `mma`; warpgroups of 64 keys each with `wgmma`.
    pub fragments: usize,
    /// Rows per query tile; the last rows may belong to no query.
    pub rows: usize,
    /// Query tiles in shared memory. `mma`: the tile whose probabilities are computed, the previous tile, whose
    /// contribution to the keys' gradients is computed, and the tile in flight. `wgmma`: the tile in use, one more
    /// because a warpgroup may lag by one, and two in flight.
    pub stages: usize,
    /// Query heads of one kv head that share the rows of a tile.
    pub heads: usize,
    pub causal: bool,
    /// The keys that the kernel owns, and their biases. Only `wgmma` reads biases per pair; another kernel computes
    /// their gradient.
    pub pattern: Pattern,
    pub softcap: bool,
    /// True if pairs are dropped out. Pairs that train the rank never are.
    pub dropout: bool,
    /// True if the dk/dv kernel sums what kept keys learn, in place of the gradients of constant scores. Only with `wgmma`.
    pub kept: bool,
    /// Number of ALiBi slopes that a cube reads, one per query head of its kv head; 0 without ALiBi.
    pub slopes: usize,
    /// True if several cubes may add to a key's gradients: f32 sums, and atomics for keys with queries in several
    /// chunks.
    pub shared_keys: bool,
    /// True if every chunk writes its keys' gradients to its own f32 rows, in the order of its list.
    pub parts: bool,
    /// The work that two `mma` warps with the same keys divide.
    pub divided: Divided,
}

/// The work that two `mma` warps with the same keys divide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Divided {
    /// The gradients: one warp has dV, the other dK and the gradients of the scores.
    Gradients,
    /// The rows of every query tile, one half each. Used by the rank kernel, which has only sums per key.
    Rows,
}

/// The head dimensions of `wgmma`; wider heads leave too few registers and too little shared memory.
const WGMMA_DIMS: [usize; 2] = [64, 128];

pub(crate) fn check_wgmma_dim(head_dim: usize) -> Result<(), Obstacle> {
    match WGMMA_DIMS.contains(&head_dim) {
        true => Ok(()),
        false => Err(Obstacle::HeadDim {
            head_dim,
            served: "64 and 128",
        }),
    }
}

/// An `mma` tile: warps of each role, groups of 16 keys that a warp owns, and rows of a query tile.
type MmaTile = (usize, usize, usize);

/// Tiles of the dk/dv kernel, the largest first.
const MMA_TILES: [MmaTile; 5] = [(4, 2, 64), (4, 2, 32), (4, 1, 64), (4, 1, 32), (4, 1, 16)];

/// Tiles of the rank kernel, the largest first.
const MMA_RANK_TILES: [MmaTile; 5] = [(4, 2, 64), (4, 2, 32), (4, 1, 64), (4, 1, 32), (2, 1, 32)];

/// Queries of the shortest chunk; shorter chunks would write the keys' gradients too often.
const MIN_CHUNK: usize = 1024;

/// Queries of the shortest and the longest chunk of the rank kernel. All cubes that run at the same time are at about
/// the same chunk, whose queries then come from the second-level cache; shorter chunks would gather the keys of their
/// tiles too often, longer ones would have too few tiles to end together.
const RANK_CHUNKS: [usize; 2] = [512, 1024];

impl ChunkedBlueprint {
    pub(crate) fn chunks(&self, problem: &Problem) -> usize {
        problem.q_len.div_ceil(self.chunk)
    }
}

/// The number of heads of a group, at most `most`, for which a tile of 16, 32 or 64 rows has a power of two of queries.
fn whole_heads(problem: &Problem, most: usize) -> usize {
    let mut all = [32, 16, 8, 4, 2].into_iter();
    let fits = |n: &usize| *n <= most && problem.group().is_multiple_of(*n);
    all.find(fits).unwrap_or(1)
}

impl DkdvBlueprint {
    /// The form of its logits.
    pub(crate) fn logit_form(&self) -> LogitForm {
        LogitForm {
            capped: self.softcap,
            scored: self.pattern.adds_scores() || self.slopes > 0,
        }
    }

    pub(crate) fn choose(
        instruction: Instruction,
        problem: &Problem,
        max_shared: usize,
    ) -> Result<Self, Obstacle> {
        let base = Self::of(instruction, problem);
        match instruction {
            Instruction::Mma => {
                base.choose_mma(MMA_TILES, max_shared, |rows| heads_per_tile(problem, rows))
            }
            Instruction::Wgmma => base.choose_wgmma(max_shared, |rows| whole_heads(problem, rows)),
        }
    }

    /// [`choose`](Self::choose) for masks and biases. Heads with different masks or biases have separate tiles.
    pub(crate) fn choose_masked(
        instruction: Instruction,
        problem: &MaskedProblem,
        max_shared: usize,
    ) -> Result<Self, Obstacle> {
        let p = &problem.attention;
        let apart = |shape: [usize; 4]| problem.heads_each(shape[1]) < p.group();
        let shapes = [problem.plan.map(|plan| plan.mask), problem.bias];
        let heads = |most: usize| match shapes.into_iter().flatten().any(apart) {
            true => 1,
            false => whole_heads(p, most),
        };
        let bias = match Bias::of(problem) {
            Bias::Key if problem.bias.is_some_and(apart) => Bias::HeadKey,
            bias => bias,
        };
        let base = Self::of(instruction, p);
        let blueprint = match instruction {
            Instruction::Mma => base.choose_mma(MMA_TILES, max_shared, |rows| heads(rows / 2)),
            Instruction::Wgmma => base.choose_wgmma(max_shared, heads),
        }?;
        Ok(Self {
            pattern: Pattern::masked(problem, bias),
            ..blueprint
        })
    }

    /// The rank kernel's configuration that goes with this one of the dk/dv kernel, on its instruction: the same tiles
    /// with `wgmma`, the largest that fit with `mma`. There a warp keeps the fragments of its keys and values,
    /// `fragments * head_dim / 2` registers per lane. One tile of queries is in use, the other in flight. The smallest
    /// tiles fit wherever any of [`choose`](Self::choose) do.
    pub(crate) fn choose_rank(
        self,
        problem: &Problem,
        max_shared: usize,
    ) -> Result<Self, Obstacle> {
        let base = Self {
            dropout: false,
            ..self
        };
        match self.instruction {
            Instruction::Mma => Self {
                stages: 2,
                divided: Divided::Rows,
                ..base
            }
            .choose_mma(MMA_RANK_TILES, max_shared, |rows| {
                heads_per_tile(problem, rows)
            }),
            Instruction::Wgmma => Ok(base),
        }
    }

    /// The configuration with the largest tiles, and everything else as the problem determines it.
    fn of(instruction: Instruction, problem: &Problem) -> Self {
        Self {
            instruction,
            element: problem.element,
            head_dim: problem.head_dim,
            role_warps: 4,
            fragments: 2,
            rows: 64,
            stages: match instruction {
                Instruction::Mma => 3,
                Instruction::Wgmma => 4,
            },
            heads: 1,
            causal: problem.causal,
            pattern: Pattern::scored(problem),
            softcap: problem.softcap.is_some(),
            dropout: problem.dropout.is_some(),
            kept: false,
            slopes: problem.alibi.map_or(0, |_| problem.group()),
            shared_keys: false,
            parts: false,
            divided: Divided::Gradients,
        }
    }

    /// The first of these tiles that fits, with `heads` heads sharing its rows. A warp's accumulators of dk or dv take
    /// `fragments * head_dim / 2` registers per lane, its products with a query tile `fragments * rows / 2`.
    fn choose_mma(
        self,
        tiles: [MmaTile; 5],
        max_shared: usize,
        heads: impl Fn(usize) -> usize,
    ) -> Result<Self, Obstacle> {
        (tiles.into_iter())
            .filter(|(_, fragments, _)| fragments * self.head_dim <= 256)
            .map(|(role_warps, fragments, rows)| Self {
                role_warps,
                fragments,
                rows,
                heads: heads(rows),
                ..self
            })
            .find(|blueprint| blueprint.shared_bytes() <= max_shared)
            .ok_or(Obstacle::SharedMemory)
    }

    /// Two warpgroups of 255 registers: dK, dV and two products with a query tile take 192 at a head dimension of 128.
    /// One warpgroup is used for problems with few key tiles, see [`MmaBlueprints::choose`]. `heads` limits the number
    /// of heads.
    fn choose_wgmma(
        self,
        max_shared: usize,
        heads: impl Fn(usize) -> usize,
    ) -> Result<Self, Obstacle> {
        check_wgmma_dim(self.head_dim)?;
        // Boxes hold whole query tiles, at least 16 bytes of a head: two queries, or four words of the dropout mask.
        let queries = if self.dropout { 4 } else { 2 };
        let heads = heads(self.rows / queries);
        Some(Self { heads, ..self })
            .filter(|blueprint| blueprint.shared_bytes() + 4096 <= max_shared)
            .ok_or(Obstacle::SharedMemory)
    }

    /// Cuts the queries into chunks of about a window. Without scores a key is attended to by a contiguous range of
    /// queries to the end, one chunk. Contributions of several chunks to one key are added by atomics, or, if a fixed
    /// order is requested, written separately.
    pub(crate) fn with_chunks(self, problem: &Problem) -> ChunkedBlueprint {
        let tile = self.queries();
        let all = problem.q_len.div_ceil(tile).max(1) * tile;
        if !problem.has_scores {
            return ChunkedBlueprint {
                tiles: self,
                chunk: all,
            };
        }
        let target = problem.window.max(MIN_CHUNK);
        // At least one tile, even if there are no queries.
        let chunk = (target.min(problem.q_len.max(1)).div_ceil(tile) * tile).min(all);
        let several = chunk < all;
        ChunkedBlueprint {
            tiles: Self {
                shared_keys: several && !problem.deterministic,
                parts: several && problem.deterministic,
                ..self
            },
            chunk,
        }
    }

    /// Cuts the queries of the rank kernel into chunks that add to a key by atomics; no chunks if a fixed order is
    /// requested.
    pub(crate) fn with_rank_chunks(self, problem: &Problem) -> ChunkedBlueprint {
        let tile = self.queries();
        let all = problem.q_len.div_ceil(tile).max(1) * tile;
        let [least, most] = RANK_CHUNKS;
        let target = (problem.q_len / 16).clamp(least, most);
        let chunk = match problem.deterministic {
            true => all,
            false => (target.div_ceil(tile) * tile).min(all),
        };
        ChunkedBlueprint {
            tiles: Self {
                shared_keys: chunk < all,
                ..self
            },
            chunk,
        }
    }

    /// Rows of a query tile that a warp multiplies with its keys.
    pub(crate) fn product_rows(&self) -> usize {
        match self.divided {
            Divided::Gradients => self.rows,
            Divided::Rows => self.rows / 2,
        }
    }

    /// The shape of the products of a warp's keys with its rows of a query tile, which are the products' columns.
    pub(crate) fn products(&self) -> Shape {
        Shape {
            element: self.element,
            fragments: self.fragments,
            blocks: (self.product_rows() / 16).min(2),
            columns: self.head_dim,
            transposed: false,
            column: 0,
            cleaned: false,
        }
    }

    /// The shape of the sums over a query tile; its columns are the row elements.
    pub(crate) fn sums(&self) -> Shape {
        Shape {
            blocks: 2,
            transposed: true,
            ..self.products()
        }
    }

    /// Bytes per stage of queries or output gradients.
    pub(crate) fn stage_bytes(&self) -> u32 {
        (2 * self.rows * self.head_dim) as u32
    }

    /// Shared memory per cube: keys and values, queries and output gradients of every stage, two tiles of
    /// probabilities, and the words of rows and keys.
    fn shared_bytes(&self) -> usize {
        let row = 2 * self.head_dim;
        let words = |count: usize| (4 * count).next_multiple_of(128);
        2 * self.keys() * row
            + self.stages * 2 * self.rows * row
            + 16 * self.weights()
            + 2 * (words(self.keys()) + words(self.stages * self.rows))
            + match self.dropout {
                true => words(self.stages * self.rows) + words(self.keys()),
                false => 0,
            }
            // The slopes, and with `mma` the places of the keys.
            + match self.slopes {
                0 => 0,
                slopes => words(slopes) + words(self.keys()),
            }
            + match self.kept {
                true => words(self.keys()),
                false => 0,
            }
            // The gradients of the LSEs, and the sums of one half.
            + match self.divided {
                Divided::Gradients => 0,
                Divided::Rows => words(self.keys()) + words(self.stages * self.rows),
            }
    }

    /// Number of four-probability vectors that one role passes to the other: two query tiles.
    pub(crate) fn weights(&self) -> usize {
        match (self.instruction, self.divided) {
            (Instruction::Mma, Divided::Gradients) => 2 * self.keys() * self.rows / 4,
            (Instruction::Wgmma, _) | (_, Divided::Rows) => 1,
        }
    }

    pub(crate) fn keys(&self) -> usize {
        self.role_warps * self.warp_keys()
    }

    pub(crate) fn warp_keys(&self) -> usize {
        16 * self.fragments
    }

    pub(crate) fn queries(&self) -> usize {
        self.rows / self.heads
    }

    /// The shape of a step, for the lists of steps.
    pub(crate) fn step_shape(&self) -> StepShape {
        StepShape {
            keys: self.keys(),
            queries: self.queries(),
            heads: self.heads,
        }
    }

    /// 16-byte segments per row.
    pub(crate) fn segments(&self) -> usize {
        self.head_dim / 8
    }

    pub(crate) fn units(&self) -> usize {
        32 * self.warps()
    }

    pub(crate) fn warps(&self) -> usize {
        match self.instruction {
            Instruction::Mma => 2 * self.role_warps,
            Instruction::Wgmma => 4 * self.fragments,
        }
    }

    /// The warpgroups that start their products in turn; 1 if none waits for another. The products of a step of 128 columns
    /// take long enough that the warpgroups fall out of step by themselves: turns made the pass 5 % slower there.
    pub(crate) fn in_turn(&self) -> usize {
        match self.head_dim {
            64 => self.fragments,
            _ => 1,
        }
    }

    /// CubeCL's layout of the units: lanes along x, warps along y.
    pub(crate) fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(32, self.warps() as u32)
    }
}
