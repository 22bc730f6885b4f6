//! The configuration of the gradient kernel for a bias with a query axis.

use crate::matrix::blueprint::has_wgmma;
use crate::matrix::logit_scale::LogitForm;
use crate::pattern::kind::{Bias, Pattern};
use cubecl::prelude::*;
use flash_dma_problem::{ElementType, MaskedProblem};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BiasBlueprint {
    /// The element type; f16 or bf16.
    pub element: ElementType,
    /// 64 or 128.
    pub head_dim: usize,
    pub causal: bool,
    /// All keys or those of a tile plan, with a bias per pair.
    pub pattern: Pattern,
    pub softcap: bool,
}

impl BiasBlueprint {
    /// The form of its logits.
    pub(crate) fn logit_form(&self) -> LogitForm {
        LogitForm {
            capped: self.softcap,
            scored: true,
        }
    }

    /// Queries per tile: 64 for each of two warpgroups.
    pub(crate) const QUERIES: usize = 128;
    pub(crate) const KEYS: usize = 128;
    /// Keys that are multiplied and copied at a time.
    pub(crate) const HALF: usize = 64;
    /// Query tiles in shared memory: one in use, one in flight.
    pub(crate) const ROW_STAGES: usize = 2;
    /// Halves of key tiles in shared memory: both halves of the tile in use, and one in flight.
    pub(crate) const KEY_STAGES: usize = 3;
    pub(crate) const WARPS: usize = 8;

    /// The configuration for `problem`, or `None` if the kernel does not support it: a bias with all queries and keys,
    /// of a problem whose other gradients `wgmma` computes.
    pub(crate) fn choose(problem: &MaskedProblem, properties: &DeviceProperties) -> Option<Self> {
        let p = &problem.attention;
        let of_pairs = |shape: [usize; 4]| shape[2] == p.q_len && shape[3] == p.k_len;
        let served = problem.bias.is_some_and(of_pairs)
            && has_wgmma(properties)
            && p.element != ElementType::F32
            && [64, 128].contains(&p.head_dim);
        let blueprint = Self {
            element: p.element,
            head_dim: p.head_dim,
            causal: p.causal,
            pattern: Pattern::masked(problem, Bias::Pair),
            softcap: p.softcap.is_some(),
        };
        (served && blueprint.shared_bytes() <= properties.hardware.max_shared_memory_size)
            .then_some(blueprint)
    }

    /// Bytes of query tiles and output gradients with their row sums, keys and values, and barriers.
    pub(crate) fn shared_bytes(&self) -> usize {
        let row = 4 * self.head_dim;
        Self::ROW_STAGES * Self::QUERIES * (row + 8) + Self::KEY_STAGES * Self::HALF * row + 256
    }

    /// 16-byte segments per row.
    pub(crate) fn segments(&self) -> usize {
        self.head_dim / 8
    }

    /// Key tiles per cube, processed in sequence: enough for [`STEPS`] steps, or fewer if there would be too few cubes.
    pub(crate) fn run(problem: &MaskedProblem, shape: [usize; 4], processors: usize) -> usize {
        let p = &problem.attention;
        let steps = p.batch / shape[0] * problem.heads_each(shape[1]);
        let mut run = STEPS.div_ceil(steps);
        while run > 1 && Self::cubes_of(shape, run).iter().product::<usize>() < CUBES * processors {
            run /= 2;
        }
        run
    }

    /// Cubes for runs of `run` key tiles: runs, query tiles, rows of the bias.
    pub(crate) fn cubes_of([batch, heads, queries, keys]: [usize; 4], run: usize) -> [usize; 3] {
        [
            keys.div_ceil(Self::KEYS).div_ceil(run),
            queries.div_ceil(Self::QUERIES),
            batch * heads,
        ]
    }
}

/// Steps per cube at which the cost of its first copies is small.
pub(crate) const STEPS: usize = 16;

/// Cubes per multiprocessor that balance the load.
pub(crate) const CUBES: usize = 4;
