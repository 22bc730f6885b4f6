//! The slots that a few tokens take, in order of the tokens.

use crate::decode::commit::{ENTRY, NONE};
use crate::decode::tensors::{Contenders, SlotRule};
use crate::team::Team;
use cubecl::prelude::*;

/// Slots that a unit reads at once.
const READS: usize = 8;

/// The worst slots of the units, in shared memory. Worse is of less [worth](crate::decode::tensors::Protection::worth)
/// or, between keys of equal worth, of a greater position.
#[derive(CubeType)]
struct Candidates {
    /// Each unit's own candidate.
    own_keys: Shared<[u32]>,
    own_positions: Shared<[i32]>,
    own_slots: Shared<[u32]>,
    /// The remaining candidates during the search for the worst.
    keys: Shared<[u32]>,
    positions: Shared<[i32]>,
    slots: Shared<[u32]>,
}

#[cube]
impl Candidates {
    fn new(#[comptime] units: usize) -> Candidates {
        Candidates {
            own_keys: Shared::<[u32]>::new_slice(units),
            own_positions: Shared::<[i32]>::new_slice(units),
            own_slots: Shared::<[u32]>::new_slice(units),
            keys: Shared::<[u32]>::new_slice(units),
            positions: Shared::<[i32]>::new_slice(units),
            slots: Shared::<[u32]>::new_slice(units),
        }
    }

    /// Enters this unit's own candidate.
    fn enter(&mut self, unit: usize) {
        self.keys[unit] = self.own_keys[unit];
        self.positions[unit] = self.own_positions[unit];
        self.slots[unit] = self.own_slots[unit];
    }

    /// Replaces candidate `here` by candidate `there` if that is worse.
    fn keep_worse(&mut self, here: usize, there: usize) {
        let (key, other) = (self.keys[here], self.keys[there]);
        if other < key || (other == key && self.positions[there] > self.positions[here]) {
            self.keys[here] = other;
            self.positions[here] = self.positions[there];
            self.slots[here] = self.slots[there];
        }
    }
}

/// The slots of one (sequence, kv head), and the tokens that may take them.
#[derive(CubeType, Clone, Copy)]
struct HeadSlots {
    /// The first slot.
    first: usize,
    rule: SlotRule,
    /// The first new score.
    new: usize,
    /// The position of the first token.
    next_position: i32,
}

/// Finds the slot that each of `tokens` new tokens takes: the worst slot, if the token is better. Later tokens see the
/// slots as the earlier tokens left them. A slot of equal score is kept, because its position is lower. With recent
/// keys a token is always better, even a hidden one, because it is recent itself and the rule leaves at least one slot
/// unprotected.
///
/// One cube per (sequence, kv head), each unit owns every `units`-th slot. The cache is not changed.
///
/// | buffer | layout |
/// |---|---|
/// | `contenders` | see [`Contenders`] |
/// | `moves` | contiguous `[batch * kv_heads, tokens]` of [entries](crate::decode::commit), overwritten |
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn place_kernel(
    contenders: &Contenders,
    moves: &mut [i32],
    rule: SlotRule,
    tokens: u32,
    rows: u32,
    #[comptime] team: Team,
) {
    let units = comptime!(team.units());
    let row = CUBE_POS;
    if row >= rows as usize {
        terminate!();
    }
    let new_scores = &contenders.new_scores;
    let heads = new_scores.shape(1);
    let head = HeadSlots {
        first: row * rule.window as usize,
        rule,
        new: (row / heads) * new_scores.stride(0) + (row % heads) * new_scores.stride(1),
        next_position: contenders.seen[row / heads],
    };
    let entries = row * tokens as usize * ENTRY;
    let unit = UNIT_POS as usize;

    let mut candidates = Candidates::new(units);
    // The slots that this step's tokens took, by token; the number of slots where one took none.
    let mut taken = Shared::<[u32]>::new_slice(comptime!(flash_dma_problem::MAX_DECODE_TOKENS));
    find_worst(contenders, &head, &taken, &mut candidates, 0u32, units);
    for token in 0..tokens {
        candidates.enter(unit);
        sync_cube();
        let mut half = u32::new(comptime!(units as i64 / 2));
        while half > 0u32 {
            if unit < half as usize {
                candidates.keep_worse(unit, unit + half as usize);
            }
            sync_cube();
            half /= 2u32;
        }
        let (worst_key, worst_slot) = (candidates.keys[0], candidates.slots[0]);
        let now = head.next_position + token as i32;
        let score = new_scores[head.new + token as usize];
        let worth = head.rule.at(now).worth(score, now);
        let takes = worth > worst_key;
        if unit == 0 {
            taken[token as usize] = select(takes, worst_slot, head.rule.window);
            let to = entries + token as usize * ENTRY;
            moves[to] = select(takes, worst_slot as i32, comptime!(NONE));
            moves[to + 1] = select(takes, token as i32, comptime!(NONE));
            moves[to + 2] = now;
        }
        sync_cube();
        // The next token takes the protection from the key that is no longer recent, wherever that is.
        let changes = head.rule.recent > 0 || (takes && worst_slot as usize % units == unit);
        if changes && token + 1u32 < tokens {
            let done = token + 1u32;
            find_worst(contenders, &head, &taken, &mut candidates, done, units);
        }
    }
}

/// Makes the worst of this unit's slots after `done` tokens, as the next token finds them, its own candidate; if all of
/// its slots are protected, the candidate is one that no key is better than.
#[cube]
fn find_worst(
    contenders: &Contenders,
    head: &HeadSlots,
    taken: &Shared<[u32]>,
    candidates: &mut Candidates,
    done: u32,
    #[comptime] units: usize,
) {
    let mut worst_key = u32::new(u32::MAX as i64);
    let mut worst_place = i32::new(0);
    let window = head.rule.window;
    let protection = head.rule.at(head.next_position + done as i32);
    let mut worst_slot = window;
    let mut at = UNIT_POS;
    while at < window {
        // Several slots are read before the first one is used, so that the reads overlap.
        let mut scores = Array::<f32>::new(READS);
        let mut places = Array::<i32>::new(READS);
        #[unroll]
        for r in 0..READS {
            let slot = min(at + comptime!((r * units) as u32), window - 1u32) as usize;
            scores[r] = contenders.score[head.first + slot];
            places[r] = contenders.position[head.first + slot];
        }
        #[unroll]
        for r in 0..READS {
            let slot = at + comptime!((r * units) as u32);
            let mut score = scores[r];
            let mut place = places[r];
            for token in 0..done {
                if taken[token as usize] == slot {
                    score = contenders.new_scores[head.new + token as usize];
                    place = head.next_position + token as i32;
                }
            }
            let key = protection.worth(score, place);
            let is_worse = key < worst_key || (key == worst_key && place > worst_place);
            if slot < window && is_worse {
                worst_key = key;
                worst_place = place;
                worst_slot = slot;
            }
        }
        at += comptime!((READS * units) as u32);
    }
    let unit = UNIT_POS as usize;
    candidates.own_keys[unit] = worst_key;
    candidates.own_positions[unit] = worst_place;
    candidates.own_slots[unit] = worst_slot;
}
