//! Which of a warp's keys the queries of a step see.

use crate::backward::blueprint::DkdvBlueprint;
use crate::backward::dkdv::shared::mask::KeyMask;
use crate::matrix::ptx::shuffle;
use cubecl::prelude::*;

/// The words of the mask of two neighbouring queries of a step's tile: lane `l` has those of queries `2 l` and
/// `2 l + 1`, modulo the tile.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct SeenWords {
    even: u32,
    odd: u32,
}

#[cube]
impl SeenWords {
    /// No bit set.
    pub(crate) fn none() -> SeenWords {
        SeenWords {
            even: 0u32,
            odd: 0u32,
        }
    }

    /// The words of the step that begins at query `step` of head `head` of the group. For a `full` step, whose queries
    /// see all keys, all bits are set and nothing is read.
    pub(crate) fn read(
        mask: &KeyMask,
        head: usize,
        step: usize,
        full: bool,
        q_len: usize,
        #[comptime] bp: DkdvBlueprint,
    ) -> SeenWords {
        let all = u32::new(comptime!(u32::MAX as i64));
        let mut words = SeenWords {
            even: all,
            odd: all,
        };
        if !full {
            let first = own_query(step, bp);
            words.even = mask.word(head, min(first, q_len - 1));
            words.odd = mask.word(head, min(first + 1, q_len - 1));
        }
        words
    }

    /// Bit `k + 16 e`: whether query `2 l + e` of the step that begins at query `step` sees key `k` of the sixteen keys
    /// that begin `further` keys after the first of `mask`.
    pub(crate) fn pack(
        &self,
        step: usize,
        mask: &KeyMask,
        q_len: usize,
        k_len: usize,
        #[comptime] further: usize,
        #[comptime] bp: DkdvBlueprint,
    ) -> u32 {
        let first = own_query(step, bp);
        let even = mask.keys(self.even, first, q_len, k_len, further, bp);
        let odd = mask.keys(self.odd, first + 1, q_len, k_len, further, bp);
        even | (odd << 16)
    }
}

/// The first of the two neighbouring queries whose words this lane reads, of a step that begins at query `step`.
#[cube]
fn own_query(step: usize, #[comptime] bp: DkdvBlueprint) -> usize {
    step + UNIT_POS_X as usize * 2 % comptime!(bp.queries())
}

/// The bits of the two rows among the `n`-th eight rows of a step's tile that this lane holds columns of: bit `16 e`
/// says whether row `8 n + 2 quad + e` sees the lane's first key, bit `16 e + 8` its second.
#[cube]
pub(crate) fn seen_pair(packed: u32, #[comptime] n: usize, #[comptime] bp: DkdvBlueprint) -> u32 {
    let lane = UNIT_POS_X;
    let pair = (lane % 4 + comptime!(n as u32 * 4)) % comptime!(bp.queries() as u32 / 2);
    shuffle(packed, pair) >> (lane / 4)
}
