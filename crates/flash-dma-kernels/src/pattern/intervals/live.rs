//! The kernel that drops the keys no position attends to, and the access of other kernels to its lists.

use crate::team::{Member, Team, ballot};
use cubecl::prelude::*;

/// Keys that a lane reads before it uses the first of them, so that the reads overlap.
const READS: usize = 8;
/// The most positions that a brief key lives; the others are lasting. With recent keys every key lives, most of them
/// briefly, and a search for the keys of a late position would read them all.
pub(crate) const BRIEF: usize = 256;
/// Keys of a block: entries are counted before each. A multiple of the keys that a plane reads at once.
pub(crate) const BLOCK: usize = 256;

/// The lists of [`LiveKeys`](crate::pattern::intervals::LiveKeys) as kernel arguments.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct LiveLists {
    pub entries: Box<[Vector<u32, Const<2>>]>,
    pub counts: Box<[u32]>,
    pub starts: Box<[Vector<u32, Const<2>>]>,
}

/// Lists the keys of non-empty intervals and, separately, those that last, in order.
///
/// One cube per row. Each plane counts the live keys of its share and, after a barrier, when the counts of the
/// preceding planes are known, writes them; the second read hits the L2 cache.
///
/// | buffer | layout |
/// |---|---|
/// | `intervals` | contiguous `[rows, n]` of (first, end) |
/// | `live` | see [`LiveKeys`](crate::pattern::intervals::LiveKeys), overwritten up to the counts |
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn live_keys_kernel(
    intervals: &[Vector<u32, Const<2>>],
    live: &mut LiveLists,
    rows: u32,
    n: u32,
    #[comptime] team: Team,
) {
    let row = CUBE_POS;
    if row < rows as usize {
        let member = Member::this(team);
        let base = row * n as usize;
        let turn = comptime!((READS * team.lanes) as u32);
        // Whole rounds, so that a plane's reads begin at a cache line.
        let share = n.div_ceil(comptime!(team.planes as u32)).div_ceil(turn) * turn;
        let start = min(member.plane as u32 * share, n);
        let end = min(start + share, n);

        let mut counted = Shared::<[Vector<u32, Const<2>>]>::new_slice(team.planes);
        let mut own = Places::new();
        let mut at = start;
        while at < end {
            let share_ends = read_ends(intervals, base, at, end, &member, team);
            #[unroll]
            for r in 0..READS {
                let key = at + comptime!((r * team.lanes) as u32) + member.lane as u32;
                own.advance(
                    ballot(share_ends[r] > key, team),
                    ballot(lasts(key, share_ends[r]), team),
                );
            }
            at += turn;
        }
        if member.lane == 0 {
            counted[member.plane] = pair(own.live, own.lasting);
        }
        sync_cube();
        let mut places = Places::new();
        for plane in 0..member.plane {
            places.live += counted[plane].extract(0usize);
            places.lasting += counted[plane].extract(1usize);
        }
        if member.lane == 0 && member.plane == comptime!(team.planes - 1) {
            live.counts[row] = places.live + own.live;
        }

        let lists = row * 2 * n as usize;
        let blocks = row * n.div_ceil(comptime!(BLOCK as u32)) as usize;
        let mut at = start;
        while at < end {
            if member.lane == 0 && at.is_multiple_of(comptime!(BLOCK as u32)) {
                live.starts[blocks + at as usize / BLOCK] = pair(places.live, places.lasting);
            }
            let share_ends = read_ends(intervals, base, at, end, &member, team);
            #[unroll]
            for r in 0..READS {
                let key = at + comptime!((r * team.lanes) as u32) + member.lane as u32;
                let (is_live, is_lasting) = (share_ends[r] > key, lasts(key, share_ends[r]));
                let (all, lasting) = (ballot(is_live, team), ballot(is_lasting, team));
                if is_live {
                    let to = lists + (places.live + (all & member.before).count_ones()) as usize;
                    live.entries[to] = pair(key, share_ends[r]);
                }
                if is_lasting {
                    let place = places.lasting + (lasting & member.before).count_ones();
                    let to = lists + n as usize + place as usize;
                    live.entries[to] = pair(key, share_ends[r]);
                }
                places.advance(all, lasting);
            }
            at += turn;
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

/// True if the key lives longer than a brief one.
#[cube]
fn lasts(key: u32, end: u32) -> bool {
    end > key + comptime!(BRIEF as u32)
}

/// The ends of this lane's keys of the turn that begins at `at`; 0, which is before every key, past `end`.
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
    pub count: u32,
    /// Number of lasting keys before the block, which are the first entries.
    lasting: u32,
    /// Number of live keys before the block that are not entries.
    skipped: u32,
    /// Place of the row's first live key among all entries, and the distance from it to the first lasting one.
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

    pub(crate) fn place(&self, entry: u32) -> usize {
        self.base + (entry + select(entry < self.lasting, self.n, self.skipped)) as usize
    }

    /// An upper bound on the number of entries with keys before `end`, which is after the position.
    pub(crate) fn until(&self, end: u32) -> u32 {
        // Live keys ascend: the key of a row's live key number `n` is at least `n`.
        min(self.count, max(end, self.skipped) - self.skipped)
    }
}
