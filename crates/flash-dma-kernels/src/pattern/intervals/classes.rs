//! The chunks of queries, and the classes of the keys of a chunk, by their first and last query in it.

use crate::pattern::position::query_shift;
use crate::team::{Member, Team, ballot, same_lanes};
use cubecl::prelude::*;

/// Classes of deaths, and of births, in a chunk.
pub(crate) const CLASSES: usize = 32;

/// The first class of brief keys. In it and the classes after it keys descend.
pub(crate) const BRIEF_CLASSES: usize = 2 * CLASSES + 1;

/// The classes of a chunk's keys: deaths, the whole chunk, births, and, from last to first, births of brief keys.
pub(crate) const ALL_CLASSES: usize = BRIEF_CLASSES + CLASSES;

/// Bits of a class and of [`ALL_CLASSES`].
pub(crate) const CLASS_BITS: u32 = ALL_CLASSES.ilog2() + 1;

/// The most class widths that a brief key lives. Wider tiles of brief keys would stream much that most of them do not
/// see; a lower limit would leave recent keys among those that stay.
pub(crate) const BRIEF: i32 = 4;

/// The queries of a chunk.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct ChunkQueries {
    pub first: i32,
    pub end: i32,
    /// Maps a position to its query.
    pub shift: i32,
    pub k_len: u32,
}

/// The queries `from .. to` of a chunk that see a key; none if `from >= to`.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Seen {
    pub from: i32,
    pub to: i32,
}

/// The cut of queries into chunks.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct QueryChunks {
    pub q_len: u32,
    pub k_len: u32,
    pub chunk: u32,
}

#[cube]
impl QueryChunks {
    /// True if the queries that see the key of an interval are in more than one chunk.
    pub(crate) fn share(&self, interval: Vector<u32, Const<2>>, #[comptime] causal: bool) -> bool {
        let (first, end) = (interval.extract(0usize), interval.extract(1usize));
        let seen = ChunkQueries::all(self.q_len, self.k_len).seen(first, end, causal);
        let chunk = self.chunk as i32;
        seen.from >= seen.to || seen.from / chunk != (seen.to - 1i32) / chunk
    }
}

/// A key of a lane among those of its plane.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Classed {
    pub is_listed: bool,
    pub class: usize,
    /// If the key is listed, the lanes whose keys are listed in the same class, one bit each.
    pub same: u32,
}

#[cube]
impl Classed {
    /// True if the lane is the first of its class.
    pub(crate) fn leads(&self, member: &Member) -> bool {
        self.is_listed && self.same & member.before == 0u32
    }
}

#[cube]
impl ChunkQueries {
    pub(crate) fn of_chunk(chunk: u32, size: u32, q_len: u32, k_len: u32) -> ChunkQueries {
        ChunkQueries {
            first: (chunk * size) as i32,
            end: min(chunk * size + size, q_len) as i32,
            shift: query_shift(q_len as usize, k_len as usize),
            k_len,
        }
    }

    pub(crate) fn all(q_len: u32, k_len: u32) -> ChunkQueries {
        ChunkQueries::of_chunk(0u32, q_len, q_len, k_len)
    }

    /// Classifies the key of each of a plane's lanes, with positions `first .. end`. Every lane must take part.
    pub(crate) fn classed(
        &self,
        first: u32,
        end: u32,
        bits: u32,
        #[comptime] causal: bool,
        #[comptime] team: Team,
    ) -> Classed {
        let seen = self.seen(first, end, causal);
        let mut classed = Classed {
            is_listed: seen.from < seen.to,
            class: 0usize,
            same: 0u32,
        };
        let listed = ballot(classed.is_listed, team);
        // Most of the older keys are gone, often all of a plane's.
        if listed != 0u32 {
            classed.class = self.class_of(&seen, bits);
            classed.same = same_lanes(classed.class as u32, CLASS_BITS, team) & listed;
        }
        classed
    }

    pub(crate) fn seen(&self, first: u32, end: u32, #[comptime] causal: bool) -> Seen {
        let mut seen = Seen {
            from: self.first,
            to: self.end,
        };
        if comptime!(causal) {
            seen.from = max(self.first, first as i32 + self.shift);
            seen.to = min(self.end, end as i32 + self.shift);
        } else if end < self.k_len {
            // All queries have the position of the last key.
            seen.to = self.first;
        }
        seen
    }

    /// The class of a key that the queries `seen`, at least one, see; `bits` is [`class_bits`].
    pub(crate) fn class_of(&self, seen: &Seen, bits: u32) -> usize {
        let (born, dies) = (seen.from > self.first, seen.to < self.end);
        let birth = (seen.from - self.first) >> bits as i32;
        let death = (seen.to - 1 - self.first) >> bits as i32;
        let brief = dies && seen.to - seen.from <= comptime!(BRIEF) << bits as i32;
        let early = dies && seen.from - self.first < self.end - seen.to;
        let mut class = comptime!(CLASSES as i32).runtime();
        if born && brief {
            class = comptime!((BRIEF_CLASSES + CLASSES - 1) as i32) - birth;
        } else if born && !early {
            class = comptime!(CLASSES as i32 + 1) + birth;
        } else if dies {
            class = death;
        }
        class as usize
    }
}

/// `log2` of the queries per class of deaths or births: the least with which [`CLASSES`] cover a chunk.
#[cube]
pub(crate) fn class_bits(chunk: u32) -> u32 {
    let width = chunk.div_ceil(comptime!(CLASSES as u32));
    comptime!(u32::BITS) - (width - 1u32).leading_zeros()
}
