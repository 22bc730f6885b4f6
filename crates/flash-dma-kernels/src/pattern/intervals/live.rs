//! The kernel that drops the keys no position attends to, and how other kernels read what it leaves.

use crate::team::{Member, Team, ballot, sum_of};
use cubecl::prelude::*;

/// Keys that a lane reads before it uses the first of them, so that the reads overlap.
const READS: usize = 8;
/// The most positions that a brief key lives; the others are lasting. With recent keys every key lives, most of them
/// briefly, and whoever looks for the keys of a late position would read them all.
pub(crate) const BRIEF: usize = 256;
/// Keys of a block, which a plane lists, and before which the entries are counted; a multiple of what it reads at once.
pub(crate) const BLOCK: usize = 256;

/// The lists of [`LiveKeys`](crate::pattern::intervals::LiveKeys), as kernels have them.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct LiveLists {
    pub entries: Box<[Vector<u32, Const<2>>]>,
    pub counts: Box<[u32]>,
    pub starts: Box<[Vector<u32, Const<2>>]>,
}

/// Counts the keys of each block that live, and those of them that last. A plane per block.
///
/// | buffer | layout |
/// |---|---|
/// | `intervals` | contiguous `[rows, n]` of (first, end) |
/// | `sizes` | contiguous `[rows, blocks]` of (live, lasting), overwritten |
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn count_blocks_kernel(
    intervals: &[Vector<u32, Const<2>>],
    sizes: &mut [Vector<u32, Const<2>>],
    rows: u32,
    n: u32,
    #[comptime] team: Team,
) {
    let member = Member::this(team);
    let block = KeyBlock::of_plane(&member, n, team);
    if block.row < rows as usize {
        let mut own = Places::new();
        let mut at = block.start;
        while at < block.end {
            let ends = read_ends(intervals, block.base, at, block.end, &member, team);
            #[unroll]
            for r in 0..READS {
                let key = at + comptime!((r * team.lanes) as u32) + member.lane as u32;
                own.advance(
                    ballot(ends[r] > key, team),
                    ballot(lasts(key, ends[r]), team),
                );
            }
            at += comptime!((READS * team.lanes) as u32);
        }
        if member.lane == 0 {
            sizes[block.of_all] = pair(own.live, own.lasting);
        }
    }
}

/// Lists the keys of non-empty interval, and those of them that last, in order. A plane per block, which adds up the
/// sizes of the blocks before.
///
/// | buffer | layout |
/// |---|---|
/// | `intervals` | contiguous `[rows, n]` of (first, end) |
/// | `sizes` | as [`count_blocks_kernel`] has left them |
/// | `live` | see [`LiveKeys`](crate::pattern::intervals::LiveKeys), overwritten up to the counts |
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn live_keys_kernel(
    intervals: &[Vector<u32, Const<2>>],
    sizes: &[Vector<u32, Const<2>>],
    live: &mut LiveLists,
    rows: u32,
    n: u32,
    #[comptime] team: Team,
) {
    let member = Member::this(team);
    let block = KeyBlock::of_plane(&member, n, team);
    if block.row < rows as usize {
        let mut places = Places::before(sizes, &block, &member, team);
        if member.lane == 0 && block.start < block.end {
            live.starts[block.of_all] = pair(places.live, places.lasting);
        }
        let lists = block.row * 2 * n as usize;
        let mut at = block.start;
        while at < block.end {
            let ends = read_ends(intervals, block.base, at, block.end, &member, team);
            #[unroll]
            for r in 0..READS {
                let key = at + comptime!((r * team.lanes) as u32) + member.lane as u32;
                let (is_live, is_lasting) = (ends[r] > key, lasts(key, ends[r]));
                let (all, lasting) = (ballot(is_live, team), ballot(is_lasting, team));
                if is_live {
                    let to = lists + (places.live + (all & member.before).count_ones()) as usize;
                    live.entries[to] = pair(key, ends[r]);
                }
                if is_lasting {
                    let place = places.lasting + (lasting & member.before).count_ones();
                    let to = lists + n as usize + place as usize;
                    live.entries[to] = pair(key, ends[r]);
                }
                places.advance(all, lasting);
            }
            at += comptime!((READS * team.lanes) as u32);
        }
        if member.lane == 0 && block.end == n {
            live.counts[block.row] = places.live;
        }
    }
}

/// The block of keys that a plane owns; a row without keys has one without keys.
#[derive(CubeType, Clone, Copy)]
struct KeyBlock {
    row: usize,
    /// Its index in the row, and among the blocks of all rows.
    index: usize,
    of_all: usize,
    /// Where the row's keys are among those of all rows.
    base: usize,
    /// Its keys in the row.
    start: u32,
    end: u32,
}

#[cube]
impl KeyBlock {
    fn of_plane(member: &Member, n: u32, #[comptime] team: Team) -> KeyBlock {
        let blocks = max(n.div_ceil(comptime!(BLOCK as u32)), 1u32) as usize;
        let of_all = CUBE_POS * team.planes + member.plane;
        let (row, index) = (of_all / blocks, of_all % blocks);
        let start = (index * BLOCK) as u32;
        KeyBlock {
            row,
            index,
            of_all,
            base: row * n as usize,
            start,
            end: min(start + comptime!(BLOCK as u32), n),
        }
    }
}

/// Entries of both lists of a row.
#[derive(CubeType, Clone, Copy)]
struct Places {
    live: u32,
    lasting: u32,
}

#[cube]
impl Places {
    fn new() -> Places {
        Places {
            live: 0u32,
            lasting: 0u32,
        }
    }

    /// Those of the row's blocks before `block`.
    fn before(
        sizes: &[Vector<u32, Const<2>>],
        block: &KeyBlock,
        member: &Member,
        #[comptime] team: Team,
    ) -> Places {
        let first = block.of_all - block.index;
        let mut sum = Places::new();
        let mut at = member.lane;
        while at < block.index {
            let size = sizes[first + at];
            sum.live += size.extract(0usize);
            sum.lasting += size.extract(1usize);
            at += team.lanes;
        }
        Places {
            live: sum_of(sum.live, team),
            lasting: sum_of(sum.lasting, team),
        }
    }

    /// Adds the lanes whose keys live, and last.
    fn advance(&mut self, live: u32, lasting: u32) {
        self.live += live.count_ones();
        self.lasting += lasting.count_ones();
    }
}

#[cube]
fn pair(first: u32, second: u32) -> Vector<u32, Const<2>> {
    let mut pair = Vector::<u32, Const<2>>::new(first);
    pair.insert(1usize, second);
    pair
}

/// Whether the key lives longer than a brief one.
#[cube]
fn lasts(key: u32, end: u32) -> bool {
    end > key + comptime!(BRIEF as u32)
}

/// The ends of this lane's keys of the turn that begins at `at`; 0, before every key, past `end`.
#[cube]
fn read_ends(
    intervals: &[Vector<u32, Const<2>>],
    base: usize,
    at: u32,
    end: u32,
    member: &Member,
    #[comptime] team: Team,
) -> Array<u32> {
    let mut ends = Array::<u32>::new(READS);
    #[unroll]
    for r in 0..READS {
        let key = at + comptime!((r * team.lanes) as u32) + member.lane as u32;
        let read = intervals[base + min(key, end - 1u32) as usize].extract(1usize);
        ends[r] = select(key < end, read, 0u32);
    }
    ends
}

/// The entries of a row that positions from some position on may attend to, ascending: the lasting keys before a block,
/// and all live keys from it on.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct LiveFrom {
    /// How many entries there are.
    pub count: u32,
    /// How many of them, the first ones, are lasting keys before the block.
    lasting: u32,
    /// How many live keys before the block are no entries.
    skipped: u32,
    /// Where the row's first live key is among all entries, and how far behind it the first lasting one.
    base: usize,
    n: u32,
}

#[cube]
impl LiveFrom {
    /// The entries of row `row`, of `n` keys, for the positions from `position` on.
    pub(crate) fn new(live: &LiveLists, row: usize, n: u32, position: i32) -> LiveFrom {
        let mut from = LiveFrom {
            count: live.counts[row],
            lasting: 0u32,
            skipped: 0u32,
            base: row * 2 * n as usize,
            n,
        };
        // A brief key that is born before the block is dead at the position.
        let block = max(position - comptime!(BRIEF as i32), 0i32) as usize / BLOCK;
        if block > 0 {
            let blocks = row * n.div_ceil(comptime!(BLOCK as u32)) as usize;
            let start = live.starts[blocks + block];
            from.lasting = start.extract(1usize);
            from.skipped = start.extract(0usize) - from.lasting;
            from.count -= from.skipped;
        }
        from
    }

    /// A placeholder that is never read.
    pub(crate) fn none() -> LiveFrom {
        LiveFrom {
            count: 0u32,
            lasting: 0u32,
            skipped: 0u32,
            base: 0usize,
            n: 0u32,
        }
    }

    /// The place of an entry among all.
    pub(crate) fn place(&self, entry: u32) -> usize {
        self.base + (entry + select(entry < self.lasting, self.n, self.skipped)) as usize
    }

    /// How many entries there are if none with a key from `end` on matters; `end` is after the position.
    pub(crate) fn until(&self, end: u32) -> u32 {
        // Live keys ascend: the key of a row's live key number `n` is at least `n`.
        min(self.count, max(end, self.skipped) - self.skipped)
    }
}
