//! Counting digits in shared memory, and finding the digit of the n-th greatest: a step of a radix selection.

use crate::team::{Member, Team, sum_up_to};
use cubecl::prelude::*;

/// Bits of a digit, and the values it takes.
pub(crate) const DIGIT: u32 = 11;
pub(crate) const BINS: usize = 1 << DIGIT;

/// A value of a digit, and the remaining search below it.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Digit {
    pub value: u32,
    /// The rank of the wanted element among those of that value, from 1, the greatest first.
    pub wanted: u32,
    /// Elements of that value.
    pub count: u32,
}

/// Adds 1 to a count; `first` is the shared-memory address of the first. CubeCL's own atomic takes a generic address,
/// which costs a trip through the memory system each time.
#[cube]
pub(crate) fn count(counts: &Shared<[Atomic<u32>]>, first: u32, digit: u32, #[comptime] ptx: bool) {
    if comptime!(ptx) {
        let at = first + digit * 4u32;
        gpu_asm!("red.shared.add.u32 [{}], 1;", in(_) at, options(explicit_mem, reads_address_space shared, writes_address_space shared));
    } else {
        counts[digit as usize].fetch_add(1u32);
    }
}

/// The address of a slice in shared memory, as PTX instructions take it.
#[cube]
pub(crate) fn shared_address<T: CubePrimitive>(slice: &[T]) -> u32 {
    let out: u32;
    gpu_asm!("{{ .reg .u64 t; cvta.to.shared.u64 t, {p}; cvt.u32.u64 {o}, t; }}", p = in(_) unsafe { slice.as_ptr_unchecked() }, o = out(_) out, options(pure, nomem));
    out
}

/// The digit of the `wanted`-th greatest of the counted elements and `lowest` others of digit 0; there must be that
/// many. Synchronises before it reads the counts and before it returns, and sets them to 0; `totals` and `found` are
/// used only here.
#[cube]
pub(crate) fn find_digit(
    counts: &Shared<[Atomic<u32>]>,
    totals: &mut Shared<[u32]>,
    found: &mut Shared<[u32]>,
    wanted: u32,
    lowest: u32,
    #[comptime] team: Team,
) -> Digit {
    let run = comptime!(BINS / team.units());
    let member = Member::this(team);
    // The first unit has the greatest digits.
    let unit = member.plane * team.lanes + member.lane;
    let first = BINS - (unit + 1) * run;
    sync_cube();
    let mut own = select(first == 0, lowest, 0u32);
    for b in 0..run {
        own += counts[first + b].load();
    }
    let up_to = sum_up_to(own, &member, team);
    if member.lane == comptime!(team.lanes - 1) {
        totals[member.plane] = up_to;
    }
    sync_cube();
    let mut before = up_to - own;
    for plane in 0..member.plane {
        before += totals[plane];
    }
    if before < wanted && wanted <= before + own {
        let mut rest = wanted - before;
        let mut bin = first + comptime!(run - 1);
        let mut count = counts[bin].load() + select(bin == 0, lowest, 0u32);
        while rest > count {
            rest -= count;
            bin -= 1;
            count = counts[bin].load() + select(bin == 0, lowest, 0u32);
        }
        found[0] = bin as u32;
        found[1] = rest;
        found[2] = count;
    }
    for b in 0..run {
        counts[first + b].store(0u32);
    }
    sync_cube();
    Digit {
        value: found[0],
        wanted: found[1],
        count: found[2],
    }
}
