//! The kernel that drops the keys no position attends to.

use crate::team::{Member, Team, ballot};
use cubecl::prelude::*;

/// Keys that a lane reads before it uses the first of them, so that the reads overlap.
const READS: usize = 8;

/// Lists the keys of non-empty interval, in order.
///
/// One cube per row. Each plane counts the live keys of its share and, after a barrier, when the counts of the
/// preceding planes are known, writes them; the second read hits the L2 cache.
///
/// | buffer | layout |
/// |---|---|
/// | `intervals` | contiguous `[rows, n]` of (first, end) |
/// | `keys`, `ends` | contiguous `[rows, n]`, overwritten up to the row's count |
/// | `counts` | contiguous `[rows]`, overwritten |
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn live_keys_kernel(
    intervals: &[Vector<u32, Const<2>>],
    keys: &mut [u32],
    ends: &mut [u32],
    counts: &mut [u32],
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

        let mut counted = Shared::<[u32]>::new_slice(team.planes);
        let mut own = 0u32;
        let mut at = start;
        while at < end {
            let share_ends = read_ends(intervals, base, at, end, &member, team);
            #[unroll]
            for r in 0..READS {
                let key = at + comptime!((r * team.lanes) as u32) + member.lane as u32;
                own += ballot(share_ends[r] > key, team).count_ones();
            }
            at += turn;
        }
        if member.lane == 0 {
            counted[member.plane] = own;
        }
        sync_cube();
        let mut place = 0u32;
        for plane in 0..member.plane {
            place += counted[plane];
        }
        if member.lane == 0 && member.plane == comptime!(team.planes - 1) {
            counts[row] = place + own;
        }

        let mut at = start;
        while at < end {
            let share_ends = read_ends(intervals, base, at, end, &member, team);
            #[unroll]
            for r in 0..READS {
                let key = at + comptime!((r * team.lanes) as u32) + member.lane as u32;
                let is_live = share_ends[r] > key;
                let live = ballot(is_live, team);
                if is_live {
                    let to = base + (place + (live & member.before).count_ones()) as usize;
                    keys[to] = key;
                    ends[to] = share_ends[r];
                }
                place += live.count_ones();
            }
            at += turn;
        }
    }
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
