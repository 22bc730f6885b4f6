//! The slots that many tokens take: the keys of slots and tokens that the rule keeps, by a radix selection.

use crate::decode::commit::{ENTRY, NONE};
use crate::decode::tensors::{Contenders, Protection, SlotRule};
use crate::select::digits::{BINS, DIGIT, count, find_digit, shared_address};
use crate::select::sort::NEVER;
use crate::team::{Member, Team, sum_up_to};
use cubecl::prelude::*;

/// Tokens that a unit reads before it uses the first of them, so that the reads overlap.
const READS: usize = 4;

/// The worst key that is kept.
#[derive(CubeType, Clone, Copy)]
struct Threshold {
    /// Its [worth](Protection::worth); [`NEVER`] if all keys are kept.
    key: u32,
    /// Its position: keys of the same worth at later positions are dropped.
    last: u32,
}

#[cube]
impl Threshold {
    fn keeps(&self, key: u32, position: u32) -> bool {
        key != NEVER && (key > self.key || (key == self.key && position <= self.last))
    }
}

/// The bits of a word that form the digit, and the bits above it.
#[derive(CubeType, Clone, Copy)]
struct Bits {
    shift: u32,
    above: u32,
    /// The value of the bits above it in the counted elements.
    known: u32,
    /// The greatest value of the digit.
    mask: u32,
}

/// The slots and tokens of one (sequence, kv head).
#[derive(CubeType, Clone, Copy)]
struct Union {
    /// The first slot, and the number of slots.
    slots: usize,
    window: u32,
    /// The protection of keys when all tokens have arrived.
    protection: Protection,
    /// The first new score, and the number of new scores.
    new: usize,
    tokens: u32,
    /// The position of the first token.
    seen: u32,
}

#[cube]
impl Union {
    /// The worth of a key when all tokens have arrived.
    fn worth(&self, score: f32, position: u32) -> u32 {
        self.protection.worth(score, position as i32)
    }
}

/// Finds the keys of the greatest [worth](Protection::worth) of the slots and the new tokens, as many as there are
/// slots, and assigns the tokens among them to the slots that are empty or whose keys are not among them: lists of both
/// in ascending order, paired.
///
/// One cube per (sequence, kv head). The cache is not changed.
///
/// | buffer | layout |
/// |---|---|
/// | `contenders` | see [`Contenders`] |
/// | `moves` | contiguous `[batch * kv_heads, entries]` of [entries](crate::decode::commit), overwritten; the lesser of `tokens` and `window` entries are enough |
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn choose_kernel(
    contenders: &Contenders,
    moves: &mut [i32],
    rule: SlotRule,
    entries: u32,
    rows: u32,
    #[comptime] team: Team,
    #[comptime] ptx: bool,
) {
    let row = CUBE_POS;
    if row >= rows as usize {
        terminate!();
    }
    let new_scores = &contenders.new_scores;
    let heads = new_scores.shape(1);
    let tokens = new_scores.shape(2) as u32;
    let seen = contenders.seen[row / heads] as u32;
    let union = Union {
        slots: row * rule.window as usize,
        window: rule.window,
        protection: rule.at((seen + tokens - 1u32) as i32),
        new: (row / heads) * new_scores.stride(0) + (row % heads) * new_scores.stride(1),
        tokens,
        seen,
    };
    let counts = Shared::<[Atomic<u32>]>::new_slice(BINS);
    let mut totals = Shared::<[u32]>::new_slice(team.planes);
    let mut found = Shared::<[u32]>::new_slice(3usize);
    let mut bin = UNIT_POS as usize;
    while bin < BINS {
        counts[bin].store(0u32);
        bin += comptime!(team.units());
    }
    sync_cube();

    let mut key = 0u32;
    let mut wanted = union.window;
    let mut equal = 0u32;
    for pass in 0..3u32 {
        let bits = Bits {
            shift: select(pass == 0u32, 21u32, select(pass == 1u32, 10u32, 0u32)),
            above: select(
                pass == 0u32,
                0u32,
                select(pass == 1u32, 0xFFE0_0000u32, 0xFFFF_FC00u32),
            ),
            known: key,
            // The last digit has one bit fewer: the bit above it is already known.
            mask: select(pass == 2u32, 0x3FFu32, 0x7FFu32),
        };
        count_digits(contenders, &union, &counts, &bits, false, 0u32, team, ptx);
        let digit = find_digit(&counts, &mut totals, &mut found, wanted, 0u32, team);
        key += digit.value << bits.shift;
        wanted = digit.wanted;
        equal = digit.count;
    }
    let mut last = u32::new(u32::MAX as i64);
    if key != NEVER && wanted < equal {
        // Only the first of the equal keys are kept: finds the last of these, by ascending position.
        last = 0u32;
        for pass in 0..3u32 {
            let bits = Bits {
                shift: (2u32 - pass) * comptime!(DIGIT),
                above: select(
                    pass == 0u32,
                    0u32,
                    select(pass == 1u32, 0xFFC0_0000u32, 0xFFFF_F800u32),
                ),
                known: last,
                mask: 0x7FFu32,
            };
            count_digits(contenders, &union, &counts, &bits, true, key, team, ptx);
            let digit = find_digit(&counts, &mut totals, &mut found, wanted, 0u32, team);
            wanted = digit.wanted;
            last += (comptime!(BINS as u32 - 1) - digit.value) << bits.shift;
        }
    }

    let threshold = Threshold { key, last };
    assign(
        contenders,
        moves,
        &union,
        &threshold,
        row,
        entries,
        &mut totals,
        team,
    );
}

/// Counts the digits of the keys' worth, for those that agree with `bits`; or, if `by_position`, the inverted digits of
/// the positions of keys worth `key`.
#[cube]
fn count_digits(
    contenders: &Contenders,
    union: &Union,
    counts: &Shared<[Atomic<u32>]>,
    bits: &Bits,
    #[comptime] by_position: bool,
    key: u32,
    #[comptime] team: Team,
    #[comptime] ptx: bool,
) {
    let units = comptime!(team.units() as u32);
    let mut first_count = 0u32;
    if comptime!(ptx) {
        first_count = shared_address::<Atomic<u32>>(&counts[0..1]);
    }
    let mut slot = UNIT_POS;
    while slot < union.window {
        let at = union.slots + slot as usize;
        let place = contenders.position[at] as u32;
        let own = union.worth(contenders.score[at], place);
        count_one(counts, first_count, own, place, bits, by_position, key, ptx);
        slot += units;
    }
    let mut at = UNIT_POS;
    while at < union.tokens {
        let mut read = Array::<f32>::new(READS);
        #[unroll]
        for r in 0..READS {
            let token = at + comptime!(r as u32) * units;
            read[r] = contenders.new_scores[union.new + min(token, union.tokens - 1u32) as usize];
        }
        #[unroll]
        for r in 0..READS {
            let token = at + comptime!(r as u32) * units;
            if token < union.tokens {
                let place = union.seen + token;
                let own = union.worth(read[r], place);
                count_one(counts, first_count, own, place, bits, by_position, key, ptx);
            }
        }
        at += comptime!(READS as u32) * units;
    }
}

#[cube]
fn count_one(
    counts: &Shared<[Atomic<u32>]>,
    first_count: u32,
    own: u32,
    position: u32,
    bits: &Bits,
    #[comptime] by_position: bool,
    key: u32,
    #[comptime] ptx: bool,
) {
    let mut counted = own & bits.above == bits.known;
    let mut digit = (own >> bits.shift) & bits.mask;
    if comptime!(by_position) {
        counted = own == key && position & bits.above == bits.known;
        digit = bits.mask - ((position >> bits.shift) & bits.mask);
    }
    if counted {
        count(counts, first_count, digit, ptx);
    }
}

/// Writes the moves: the r-th kept token takes the r-th free slot. Units process consecutive runs of slots and of
/// tokens, and a scan tells each how many precede its own.
#[cube]
fn assign(
    contenders: &Contenders,
    moves: &mut [i32],
    union: &Union,
    threshold: &Threshold,
    row: usize,
    entries: u32,
    totals: &mut Shared<[u32]>,
    #[comptime] team: Team,
) {
    let member = Member::this(team);
    let unit = (member.plane * team.lanes + member.lane) as u32;
    let units = comptime!(team.units() as u32);
    let to = row * entries as usize;

    let window = union.window;
    let run = window.div_ceil(units);
    let (begin, end) = (min(unit * run, window), min((unit + 1u32) * run, window));
    let mut free = 0u32;
    for slot in begin..end {
        let at = union.slots + slot as usize;
        let place = contenders.position[at] as u32;
        let stays = threshold.keeps(union.worth(contenders.score[at], place), place);
        free += u32::cast_from(!stays);
    }
    let mut rank = before(free, &member, totals, team);
    for slot in begin..end {
        let at = union.slots + slot as usize;
        let place = contenders.position[at] as u32;
        let stays = threshold.keeps(union.worth(contenders.score[at], place), place);
        if !stays {
            if rank < entries {
                moves[(to + rank as usize) * ENTRY] = slot as i32;
            }
            rank += 1u32;
        }
    }

    let run = union.tokens.div_ceil(units);
    let (begin, end) = (
        min(unit * run, union.tokens),
        min((unit + 1u32) * run, union.tokens),
    );
    let mut staying = 0u32;
    for token in begin..end {
        let place = union.seen + token;
        let own = union.worth(contenders.new_scores[union.new + token as usize], place);
        staying += u32::cast_from(threshold.keeps(own, place));
    }
    let mut rank = before(staying, &member, totals, team);
    for token in begin..end {
        let place = union.seen + token;
        let own = union.worth(contenders.new_scores[union.new + token as usize], place);
        if threshold.keeps(own, place) {
            let at = (to + rank as usize) * ENTRY;
            moves[at + 1] = token as i32;
            moves[at + 2] = place as i32;
            rank += 1u32;
        }
    }
    // No moves follow the last token's.
    if unit == comptime!(units - 1) {
        for rest in rank..entries {
            moves[(to + rest as usize) * ENTRY + 1] = comptime!(NONE);
        }
    }
}

/// The sum of `own` over the units before this one. Every unit must take part; `totals` is used only here.
#[cube]
fn before(own: u32, member: &Member, totals: &mut Shared<[u32]>, #[comptime] team: Team) -> u32 {
    let up_to = sum_up_to(own, member, team);
    sync_cube();
    if member.lane == comptime!(team.lanes - 1) {
        totals[member.plane] = up_to;
    }
    sync_cube();
    let mut sum = up_to - own;
    for plane in 0..member.plane {
        sum += totals[plane];
    }
    sum
}
