//! The content of a cache after appending.

use crate::decode::append::{append, append_pages};
use crate::decode::args::{ChunkOutputs, Pages, Slots, Tokens};
use crate::decode::chunk::chunk_keys;
use crate::decode::tests::{empty_slots, filled, live};
use crate::testing::{Placement, client, contiguous, read_u32, upload};
use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use flash_dma_problem::{AppendProblem, AttentionError, CacheShape, ElementType, SelectionRule};
use flash_dma_reference::generate::Scores;
use flash_dma_reference::slots::SlotCache as OracleSlots;
use flash_dma_reference::{Rng, compose};
use std::ops::Range;

const F32: ElementType = ElementType::F32;

/// A cache of slots with rows of 8 f32, and the number of tokens it has been given.
struct Cache {
    client: Client,
    shape: CacheShape,
    slots: Slots,
    held: usize,
}

impl Cache {
    fn new(batch: usize, kv_heads: usize, rule: impl Into<SelectionRule>) -> Self {
        let client = client();
        let shape = CacheShape::slots(batch, kv_heads, rule, 8, F32).unwrap();
        Self {
            slots: empty_slots(&client, &shape),
            shape,
            held: 0,
            client,
        }
    }

    /// Appends the next tokens up to `to` of scores `[batch * kv_heads]`.
    fn append(&mut self, scores: &[Vec<f64>], to: usize, placement: Placement) {
        let (problem, tokens) = self.tokens(scores, to, placement);
        append(&self.client, &problem, self.slots.clone(), tokens).unwrap();
        self.held = to;
    }

    fn tokens(
        &self,
        scores: &[Vec<f64>],
        to: usize,
        placement: Placement,
    ) -> (AppendProblem, Tokens) {
        let (cache, from) = (self.shape, self.held);
        let shape = [cache.batch, cache.kv_heads, to - from, cache.head_dim];
        let [k, v] = token_rows(scores.len(), |_| from..to);
        let z: Vec<f64> = (scores.iter().flat_map(|head| &head[from..to]))
            .copied()
            .collect();
        let problem = cache.append(&shape, &shape, Some(&shape[..3]), F32, from);
        let up = |values: &[f64], shape: &[usize], placement| {
            upload(&self.client, values, shape, F32, placement)
        };
        let tokens = Tokens {
            k: up(&k, &shape, placement),
            v: up(&v, &shape, placement),
            scores: Some(up(&z, &shape[..3], Placement::Contiguous)),
        };
        (problem.unwrap(), tokens)
    }

    /// Compares the live keys with the oracle's selection of the first `held` keys, and checks their rows.
    fn check(&self, scores: &[Vec<f64>], context: &str) {
        let window = self.shape.capacity();
        let rule = self.shape.rule().unwrap();
        let slots = &self.slots;
        let read = |words: &TensorBinding| read_u32(&self.client, words.clone());
        let (k, v) = (read(&slots.k), read(&slots.v));
        let (score, position) = (read(&slots.score), read(&slots.position));
        let live = live(&self.client, slots);
        for (row, head) in scores.iter().enumerate() {
            let want = compose::attended(head, &rule, self.held - 1);
            assert_eq!(live[row], want, "row {row} after {} {context}", self.held);
            for slot in row * window..(row + 1) * window {
                if position[slot] == u32::MAX {
                    assert_eq!(score[slot], f32::NEG_INFINITY.to_bits());
                    continue;
                }
                let key = position[slot] as usize;
                assert_eq!(score[slot], (head[key] as f32).to_bits());
                assert_key([&k, &v], slot, [row, key]);
            }
        }
        assert_eq!(read(&slots.seen), vec![self.held as u32; self.shape.batch]);
    }
}

/// A value that identifies an element of a key.
fn key_element(row: usize, token: usize, column: usize) -> f64 {
    (1 + row * 65536 + token * 8 + column % 8) as f64
}

/// The keys and values of some tokens of each row.
fn token_rows(rows: usize, tokens: impl Fn(usize) -> Range<usize>) -> [Vec<f64>; 2] {
    let all = (0..rows).flat_map(|row| tokens(row).map(move |token| (row, token)));
    let element = |(row, token)| (0..8).map(move |c| key_element(row, token, c));
    let k: Vec<f64> = all.flat_map(element).collect();
    let v = k.iter().map(|x| -x).collect();
    [k, v]
}

/// Checks that the rows `at` of keys and values are those of a token.
fn assert_key([k, v]: [&[u32]; 2], at: usize, [row, token]: [usize; 2]) {
    for c in 0..8 {
        let element = key_element(row, token, c) as f32;
        assert_eq!(k[at * 8 + c], element.to_bits());
        assert_eq!(v[at * 8 + c], (-element).to_bits());
    }
}

fn scores(kind: Scores, rows: usize, len: usize, seed: u64) -> Vec<Vec<f64>> {
    let mut rng = Rng::new(seed);
    (0..rows).map(|_| kind.head(len, &mut rng)).collect()
}

#[test]
fn tokens_one_at_a_time_leave_the_best_for_every_kind_of_scores() {
    for (seed, kind) in Scores::ALL.into_iter().enumerate() {
        let scores = scores(kind, 4, 30, seed as u64);
        for window in [1, 7, 50] {
            let mut cache = Cache::new(2, 2, window);
            for token in 0..30 {
                cache.append(&scores, token + 1, Placement::Contiguous);
                cache.check(&scores, &format!("{kind:?} {window}"));
            }
        }
    }
}

#[test]
fn thousands_of_steps_leave_the_best() {
    check_thousands(Scores::Ties, SelectionRule::top(13), 5);
}

fn check_thousands(kind: Scores, rule: SelectionRule, seed: u64) {
    let scores = scores(kind, 1, 3000, seed);
    let mut cache = Cache::new(1, 1, rule);
    for token in 0..3000 {
        cache.append(&scores, token + 1, Placement::Contiguous);
        if token % 97 == 0 || token == 2999 {
            cache.check(&scores, &format!("{kind:?}"));
        }
    }
}

#[test]
fn pieces_of_any_size_leave_the_same_as_one() {
    for (seed, kind) in Scores::ALL.into_iter().enumerate() {
        let scores = scores(kind, 4, 400, 100 + seed as u64);
        for window in [1, 24, 333, 500] {
            for pieces in [
                &[400][..],
                &[16, 16, 16, 352],
                &[3, 100, 1, 17, 200, 2, 77],
                &[399, 1],
            ] {
                let mut cache = Cache::new(1, 4, window);
                for &piece in pieces {
                    cache.append(&scores, cache.held + piece, Placement::Gaps);
                    cache.check(&scores, &format!("{kind:?} {window} {pieces:?}"));
                }
            }
        }
    }
}

#[test]
fn equal_scores_of_long_sequences_are_told_apart_by_position() {
    // Positions past one digit of the selection, and past two.
    for seen in [3000, 5 << 22] {
        let scores = vec![vec![1.0; 5000]];
        let mut cache = Cache::new(1, 1, 40);
        cache.slots.seen = contiguous(&cache.client, &[seen], &[1]);
        cache.append(&scores, 5000, Placement::Contiguous);
        let want: Vec<usize> = (seen as usize..seen as usize + 40).collect();
        assert_eq!(live(&cache.client, &cache.slots), [want]);
    }
}

/// Windows with recent keys and sinks, and some that are full of them.
const RULES: [[usize; 3]; 7] = [
    [1, 1, 0],
    [1, 0, 1],
    [7, 3, 2],
    [7, 7, 0],
    [7, 0, 7],
    [24, 5, 19],
    [100, 30, 4],
];

fn rule([window, recent, sinks]: [usize; 3]) -> SelectionRule {
    SelectionRule {
        window,
        recent,
        sinks,
    }
}

#[test]
fn recent_keys_and_sinks_keep_their_slots() {
    use Scores::{AllPadded, Nan, Normal, Padded, Ties};
    for (seed, kind) in [Normal, Ties, Padded, AllPadded, Nan]
        .into_iter()
        .enumerate()
    {
        let scores = scores(kind, 4, 80, 200 + seed as u64);
        for parts in RULES {
            for pieces in [&[1][..], &[16, 3, 1], &[2, 40, 1, 17, 5], &[80]] {
                let mut cache = Cache::new(2, 2, rule(parts));
                for &piece in pieces.iter().cycle() {
                    let (from, to) = (cache.held, (cache.held + piece).min(80));
                    cache.append(&scores, to, Placement::Gaps);
                    if from % 9 == 0 || piece > 1 {
                        cache.check(&scores, &format!("{kind:?} {parts:?} {pieces:?}"));
                    }
                    if to == 80 {
                        break;
                    }
                }
                cache.check(&scores, &format!("{kind:?} {parts:?} {pieces:?}"));
            }
        }
    }
}

#[test]
fn thousands_of_steps_leave_what_the_rule_says() {
    check_thousands(Scores::Nan, rule([13, 5, 3]), 6);
}

#[test]
fn a_chunk_sees_the_slots_in_order() {
    let scores = scores(Scores::Padded, 4, 100, 9);
    for (first, parts) in [
        (0, [5, 0, 0]),
        (3, [5, 0, 0]),
        (57, [20, 0, 0]),
        (0, [5, 2, 3]),
        (2, [20, 4, 5]),
        (57, [20, 7, 6]),
    ] {
        let rule = rule(parts);
        let window = rule.window;
        let mut cache = Cache::new(2, 2, rule);
        for token in 0..first {
            cache.append(&scores, token + 1, Placement::Contiguous);
        }
        let (problem, tokens) = cache.tokens(&scores, 100, Placement::TokenMajor);
        let keys = window + 100 - first;
        let all = [2, 2, keys, 8];
        let rows = || filled(&cache.client, &all, f32::NAN.to_bits());
        let words = || filled(&cache.client, &all[..3], 0);
        let (k, v, z, rank) = (rows(), rows(), words(), words());
        let target = ChunkOutputs {
            k: k.clone(),
            v: v.clone(),
            scores: z.clone(),
            rank: (rule.sinks > 0).then(|| rank.clone()),
        };
        chunk_keys(&cache.client, &problem, cache.slots.clone(), tokens, target).unwrap();
        let [k, v, z, rank] = [k, v, z, rank].map(|words| read_u32(&cache.client, words));
        for (row, head) in scores.iter().enumerate() {
            let mut oracle = OracleSlots::new(rule);
            head[..first].iter().for_each(|&z| oracle.push(z));
            // A hidden key that is no longer recent may be there or not, and is worth nothing in either case.
            let worth =
                |&(key, z): &(usize, f64)| z != f64::NEG_INFINITY || rule.is_recent(key, first - 1);
            let held = oracle.keys().into_iter().filter(worth).map(|(key, _)| key);
            let order: Vec<usize> = held.chain(first..100).collect();
            let before = keys - order.len();
            for n in 0..before {
                assert_eq!(z[row * keys + n], f32::NEG_INFINITY.to_bits());
            }
            for (n, key) in order.into_iter().enumerate() {
                let at = row * keys + before + n;
                let score = head[key] as f32;
                assert_eq!(z[at], score.to_bits());
                if rule.sinks > 0 {
                    let is_sink = key < rule.sinks && score != f32::NEG_INFINITY;
                    let ranked = if is_sink { f32::INFINITY } else { score };
                    assert_eq!(rank[at], ranked.to_bits(), "{key} {parts:?}");
                }
                assert_key([&k, &v], at, [row, key]);
            }
            if rule.recent == 0 {
                let rows = (row * keys..row * keys + before).flat_map(|at| at * 8..at * 8 + 8);
                assert!(rows.into_iter().all(|at| k[at] == 0 && v[at] == 0));
            }
        }
    }
}

#[test]
fn pages_get_their_tokens_in_order() {
    let client = client();
    let shape = CacheShape::pages(2, 2, [7, 4, 3], 8, F32).unwrap();
    let rows = || filled(&client, &shape.kv_shape(), 0);
    let table: [[u32; 3]; 2] = [[5, 0, 2], [1, 6, 3]];
    let pages = Pages {
        k: rows(),
        v: rows(),
        scores: None,
        table: contiguous(&client, table.as_flattened(), &[2, 3]),
        lengths: contiguous(&client, &[0u32, 1], &[2]),
    };
    let mut held = [0usize, 1];
    for piece in [3usize, 1, 6] {
        let new = [2, 2, piece, 8];
        let [k, v] = token_rows(4, |row| held[row / 2]..held[row / 2] + piece);
        let problem = shape.append(&new, &new, None, F32, held[1]).unwrap();
        let tokens = Tokens {
            k: upload(&client, &k, &new, F32, Placement::Gaps),
            v: upload(&client, &v, &new, F32, Placement::TokenMajor),
            scores: None,
        };
        append_pages(&client, &problem, pages.clone(), tokens).unwrap();
        held = held.map(|n| n + piece);
    }
    let [k, v] = [pages.k, pages.v].map(|rows| read_u32(&client, rows));
    for row in 0..4 {
        for at in row / 2..held[row / 2] {
            let page = table[row / 2][at / 4] as usize;
            let place = (page * 2 + row % 2) * 4 + at % 4;
            assert_key([&k, &v], place, [row, at]);
        }
    }
    // Nothing was written where no token belongs.
    assert_eq!(k.iter().filter(|&&x| x != 0).count(), 4 * 10 * 8);
}

#[test]
fn a_refused_append_leaves_the_cache_as_it_was() {
    let scores = scores(Scores::Normal, 2, 30, 3);
    let mut cache = Cache::new(1, 2, 5);
    cache.append(&scores, 20, Placement::Contiguous);
    let (problem, tokens) = cache.tokens(&scores, 21, Placement::Contiguous);
    let refused =
        |slots: Slots, tokens: Tokens| append(&cache.client, &problem, slots, tokens).unwrap_err();
    let (_, more) = cache.tokens(&scores, 22, Placement::Contiguous);
    let error = refused(cache.slots.clone(), more);
    assert!(matches!(error, AttentionError::Shape { .. }), "{error}");
    let bare = Tokens {
        scores: None,
        ..tokens.clone()
    };
    let error = refused(cache.slots.clone(), bare);
    assert_eq!(error, AttentionError::CacheScores);
    let mut short = cache.slots.clone();
    short.seen = filled(&cache.client, &[2], 0);
    let text = "the count of seen tokens must have size 1 on axis 0, but has 2";
    assert_eq!(refused(short, tokens).to_string(), text);
    cache.check(&scores, "after refusals");
}
