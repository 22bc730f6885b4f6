//! The comptime configurations of the tensor-core backward kernels, and the rules that choose them.

use crate::forward::mma::MmaBlueprint;
use cubecl::CubeDim;
use cubecl::prelude::*;
use flash_dma_problem::Problem;

/// Both large kernels and the chunks of queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MmaBlueprints {
    pub dq: DqBlueprint,
    pub dkdv: DkdvBlueprint,
    /// Queries of a chunk, a multiple of `dkdv.queries()`.
    pub chunk: usize,
}

/// What is fixed when the dq kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DqBlueprint {
    /// Query tile and key stream, as in the forward pass.
    pub tile: MmaBlueprint,
    /// Whether the rows of Q and dO stay in registers; else their fragments are loaded for each use.
    pub resident: bool,
}

/// Keys whose logits and gradients a warp of the dq kernel holds at once.
pub(super) const DQ_BLOCK: usize = 32;

/// Head dimensions up to this leave registers for the fragments of Q and dO.
const RESIDENT_DIM: usize = 128;

/// What is fixed when the dk/dv kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DkdvBlueprint {
    /// Elements a row; a multiple of 32.
    pub head_dim: usize,
    /// Warps of each of the two roles.
    pub role_warps: usize,
    /// Groups of 16 keys that a warp owns.
    pub fragments: usize,
    /// Rows of a query tile; the last may belong to no query.
    pub rows: usize,
    /// Query heads of one kv head that share the rows of a tile.
    pub heads: usize,
    /// Bottom-right aligned causal masking.
    pub causal: bool,
    /// Keys come from lists, carry a score and are attended to on an interval.
    pub sparse: bool,
    /// Whether the scaled product is capped.
    pub softcap: bool,
    /// Whether several cubes add to one key's gradients: then into f32 sums, by atomics.
    pub shared_keys: bool,
}

/// Query tiles in shared memory: the one whose probabilities are made, the one before it whose keys'
/// gradients are, and the one under way.
pub(super) const STAGES: usize = 3;

/// Queries of the shortest chunk: shorter ones would flush the keys' gradients too often.
const MIN_CHUNK: usize = 1024;

impl MmaBlueprints {
    /// The configuration for `problem`, or `None` if this engine does not serve it.
    pub(crate) fn choose(problem: &Problem, properties: &DeviceProperties) -> Option<Self> {
        let tile = MmaBlueprint::choose(problem, properties)?;
        let shared = properties.hardware.max_shared_memory_size;
        let dq = DqBlueprint::choose(tile, shared)?;
        let dkdv = DkdvBlueprint::choose(problem, shared)?;
        let (dkdv, chunk) = dkdv.with_chunks(problem);
        Some(Self { dq, dkdv, chunk })
    }
}

impl DqBlueprint {
    /// The largest tiles that fit: 64 keys keep the tensor cores busy between two barriers.
    fn choose(tile: MmaBlueprint, max_shared: usize) -> Option<Self> {
        [(64, 3), (64, 2), (32, 3), (32, 2)]
            .into_iter()
            .flat_map(|(key_tile, stages)| {
                [tile.warps, 4].map(|warps| Self {
                    tile: MmaBlueprint {
                        warps: warps.min(tile.warps),
                        key_tile,
                        stages,
                        ..tile
                    },
                    resident: tile.head_dim <= RESIDENT_DIM,
                })
            })
            .find(|blueprint| blueprint.shared_bytes() <= max_shared)
    }

    /// Q and dO, and keys, values, scores and intervals of every stage.
    fn shared_bytes(&self) -> usize {
        let row = 2 * self.tile.head_dim;
        let key = 2 * row + 4 + 8;
        2 * self.tile.tile_rows() * row + self.tile.stages * self.tile.key_tile * key + 6 * 128
    }
}

impl DkdvBlueprint {
    /// The largest tiles that fit. A warp's accumulators of dk or dv take `fragments * head_dim / 2`
    /// registers a lane, its products with a query tile `fragments * rows / 2`.
    fn choose(problem: &Problem, max_shared: usize) -> Option<Self> {
        let group = problem.group();
        [(4, 2, 64), (4, 2, 32), (4, 1, 64), (4, 1, 32), (4, 1, 16)]
            .into_iter()
            .filter(|(_, fragments, _)| fragments * problem.head_dim <= 256)
            .filter_map(|(role_warps, fragments, rows)| {
                let heads = (1..=group.min(rows)).rfind(|n| group.is_multiple_of(*n))?;
                Some(Self {
                    head_dim: problem.head_dim,
                    role_warps,
                    fragments,
                    rows,
                    heads,
                    causal: problem.causal,
                    sparse: problem.has_scores,
                    softcap: problem.softcap.is_some(),
                    shared_keys: false,
                })
            })
            .find(|blueprint| blueprint.shared_bytes() <= max_shared)
    }

    /// Cuts the queries into chunks of about a window. Without scores a key is attended to by a
    /// contiguous range of queries to the end, one chunk; so it is where a fixed order of sums is
    /// asked for.
    fn with_chunks(self, problem: &Problem) -> (Self, usize) {
        let tile = self.queries();
        let all = problem.q_len.div_ceil(tile).max(1) * tile;
        if !problem.has_scores || problem.deterministic {
            return (self, all);
        }
        let target = problem.window.max(MIN_CHUNK);
        let chunk = (target.min(problem.q_len).div_ceil(tile) * tile).min(all);
        let shared_keys = chunk < all;
        (
            Self {
                shared_keys,
                ..self
            },
            chunk,
        )
    }

    /// Shared memory of a cube: keys and values, queries and output gradients of every stage, two
    /// tiles of probabilities, and the words of rows and keys.
    fn shared_bytes(&self) -> usize {
        let row = 2 * self.head_dim;
        let words = |count: usize| (4 * count).next_multiple_of(128);
        2 * self.keys() * row
            + STAGES * 2 * self.rows * row
            + 2 * self.keys() * self.rows * 4
            + 2 * (words(self.keys()) + words(STAGES * self.rows))
    }

    /// Keys of a tile.
    pub(crate) fn keys(&self) -> usize {
        self.role_warps * self.warp_keys()
    }

    /// Keys of a warp.
    pub(crate) fn warp_keys(&self) -> usize {
        16 * self.fragments
    }

    /// Queries of a tile.
    pub(crate) fn queries(&self) -> usize {
        self.rows / self.heads
    }

    /// 16-byte chunks of a row.
    pub(crate) fn chunks(&self) -> usize {
        self.head_dim / 8
    }

    /// Units a cube.
    pub(crate) fn units(&self) -> usize {
        2 * self.role_warps * 32
    }

    /// The units as CubeCL lays them out: lanes along x, warps along y.
    pub(crate) fn cube_dim(&self) -> CubeDim {
        CubeDim::new_2d(32, 2 * self.role_warps as u32)
    }
}
