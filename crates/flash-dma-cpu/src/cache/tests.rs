//! Decoding against the oracle: however tokens are appended, a query gets its row of one pass over everything.

use super::placement::EMPTY;
use super::*;
use crate::{AttentionOptions, CacheShape, ElementType, Interval, Problem};
use flash_dma_problem::{ScoreRole, SelectionRule};
use flash_dma_reference::compare::{OUTPUT, compare, compare_lse};
use flash_dma_reference::compose::attended;
use flash_dma_reference::generate::{self, Scores};
use flash_dma_reference::{Inputs, Rng};

const HEADS: [usize; 2] = [4, 2];
const DIM: usize = 16;

/// `[batch, heads, range of the sequence, dim]` of a contiguous tensor.
fn part(x: &[f64], shape: [usize; 4], range: std::ops::Range<usize>) -> Vec<f32> {
    let [_, _, len, dim] = shape;
    let rows = (x.chunks_exact(len * dim)).flat_map(|x| &x[range.start * dim..range.end * dim]);
    rows.map(|&x| x as f32).collect()
}

/// Tokens in the shape of their keys.
fn tokens<'a>(k: &'a [f32], v: &'a [f32], z: Option<&'a [f32]>, kv: [usize; 4]) -> Tokens<'a, f32> {
    let [batch, heads, count, _] = kv;
    Tokens {
        k: View::contiguous(k, kv),
        v: View::contiguous(v, kv),
        scores: z.map(|z| View::contiguous(z, [batch, heads, count])),
    }
}

fn window_of(rule: Option<SelectionRule>) -> AttentionOptions {
    AttentionOptions {
        keep_window: rule.map(|rule| rule.window),
        ..AttentionOptions::new()
    }
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// The first `len` tokens of every sequence.
fn prefix(inputs: &Inputs, len: usize, queries: usize) -> Inputs {
    let p = &inputs.problem;
    let q = [p.batch, p.q_heads, queries, p.head_dim];
    let kv = [p.batch, p.kv_heads, len, p.head_dim];
    let mut options = AttentionOptions::new();
    options.keep_window = p.has_scores.then_some(p.window);
    let scores = inputs.scores.as_ref().map(|_| &kv[..3]);
    let [b, h, n, _] = p.kv_shape();
    Inputs {
        problem: Problem::new(&q, &kv, &kv, scores, p.element, &options).unwrap(),
        q: wide(&part(&inputs.q, p.q_shape(), len - queries..len)),
        k: wide(&part(&inputs.k, p.kv_shape(), 0..len)),
        v: wide(&part(&inputs.v, p.kv_shape(), 0..len)),
        scores: (inputs.scores.as_ref()).map(|z| wide(&part(z, [b, h, n, 1], 0..len))),
    }
}

fn inputs(batch: usize, len: usize, kind: Option<(Scores, SelectionRule)>, seed: u64) -> Inputs {
    let [q_heads, kv_heads] = HEADS;
    let (q, kv) = ([batch, q_heads, len, DIM], [batch, kv_heads, len, DIM]);
    let options = window_of(kind.map(|(_, rule)| rule));
    let scores = kind.map(|_| &kv[..3]);
    let problem = Problem::new(&q, &kv, &kv, scores, ElementType::F32, &options).unwrap();
    let kind = kind.map_or(Scores::Normal, |(kind, _)| kind);
    generate::inputs(problem, kind, 1.0, seed)
}

struct State {
    k: Vec<f32>,
    v: Vec<f32>,
    score: Vec<f32>,
    position: Vec<i32>,
    seen: Vec<i32>,
}

impl State {
    fn new(shape: &CacheShape) -> Self {
        let [batch, heads, window, dim] = shape.kv_shape();
        let rows = batch * heads * window;
        Self {
            k: vec![f32::NAN; rows * dim],
            v: vec![f32::NAN; rows * dim],
            score: vec![f32::NEG_INFINITY; rows],
            position: vec![EMPTY; rows],
            seen: vec![0; batch],
        }
    }

    fn cache(&mut self) -> Cache<'_, f32> {
        Cache::Slots(Slots {
            k: &mut self.k,
            v: &mut self.v,
            score: &mut self.score,
            position: &mut self.position,
            seen: &mut self.seen,
        })
    }

    /// The positions of the keys of a row that are not hidden.
    fn live(&self, row: usize, window: usize) -> Vec<usize> {
        let slots = row * window..(row + 1) * window;
        let shown = slots.filter(|&slot| self.score[slot] != f32::NEG_INFINITY);
        let mut live: Vec<usize> = shown.map(|slot| self.position[slot] as usize).collect();
        live.sort_unstable();
        live
    }
}

/// One step of `n` tokens from `at` on against the oracle; if `through_keys`, by a forward pass over [`chunk_keys`].
fn step(
    inputs: &Inputs,
    shape: &CacheShape,
    at: usize,
    n: usize,
    cache: Cache<'_, f32>,
    through_keys: bool,
) {
    let p = &inputs.problem;
    let [k, v] = [&inputs.k, &inputs.v].map(|x| part(x, p.kv_shape(), at..at + n));
    let [b, h, len, _] = p.kv_shape();
    let z = (inputs.scores.as_ref()).map(|z| part(z, [b, h, len, 1], at..at + n));
    let kv = [b, h, n, DIM];
    let tokens = tokens(&k, &v, z.as_deref(), kv);
    let exact = prefix(inputs, at + n, n);
    let q: Vec<f32> = exact.q.iter().map(|&x| x as f32).collect();
    let q_shape = exact.problem.q_shape();
    let options = window_of(shape.rule());
    let scores = z.as_ref().map(|_| &kv[..3]);
    let (mut out, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; q.len() / DIM]);
    let view = View::contiguous(&q, q_shape);
    match cache {
        Cache::Slots(slots) if through_keys => {
            let problem = shape.append(&kv, &kv, scores, p.element, at).unwrap();
            let keys = p.window + n;
            let all = [b, h, keys, DIM];
            let [mut k, mut v] = [(); 2].map(|()| vec![f32::NAN; b * h * keys * DIM]);
            let [mut z, mut rank] = [(); 2].map(|()| vec![f32::NAN; b * h * keys]);
            let rule = shape.rule().unwrap();
            let target = ChunkKeys {
                k: &mut k,
                v: &mut v,
                scores: &mut z,
                rank: (rule.sinks > 0).then_some(&mut rank[..]),
            };
            chunk_keys(&problem, slots.read(), tokens, target).unwrap();
            let rank = View::contiguous(if rule.sinks > 0 { &rank } else { &z }, [b, h, keys]);
            let mut intervals = vec![Interval { first: 0, end: 0 }; b * h * keys];
            crate::select(rank, rule.kept(), &mut intervals).unwrap();
            if !shape.adds_scores() {
                z.fill(0.0);
            }
            let scores = View::contiguous(&z, [b, h, keys]);
            let whole = Problem::new(&q_shape, &all, &all, Some(&all[..3]), p.element, &options);
            let inputs = crate::Inputs {
                q: view,
                k: View::contiguous(&k, all),
                v: View::contiguous(&v, all),
                selection: Some(crate::Selection {
                    scores,
                    intervals: &intervals,
                    learning: None,
                }),
            };
            let outputs = Outputs::new(&mut out, &mut lse);
            crate::forward(&whole.unwrap(), inputs, outputs).unwrap();
            append(&problem, Cache::Slots(slots), tokens).unwrap();
        }
        cache => {
            let problem = shape.decode(&q_shape, &kv, &kv, scores, p.element, at, &options);
            decode(&problem.unwrap(), view, cache, tokens, &mut out, &mut lse).unwrap();
        }
    }
    let (oracle, naive) = match (shape.rule(), shape.page_window()) {
        (Some(rule), _) => (
            exact.forward_by(&rule, shape.score_role()),
            exact.naive_forward_by(&rule, shape.score_role()),
        ),
        (None, Some(keys)) => (exact.forward_last(keys), exact.naive_forward_last(keys)),
        (None, None) => (exact.forward(), exact.naive_forward()),
    };
    let (out, lse, element) = (wide(&out), wide(&lse), p.element);
    let (oracle_out, naive_out) = (&oracle.out, &naive.out);
    compare(
        "out", &q_shape, &out, oracle_out, naive_out, element, OUTPUT,
    )
    .and_then(|_| compare_lse(&exact.problem.lse_shape(), &lse, &oracle.lse))
    .unwrap_or_else(|error| panic!("tokens {at}..{}: {error}", at + n));
}

/// A window, or one with recent keys and sinks, or one that is full of them.
fn rules(rng: &mut Rng) -> [SelectionRule; 4] {
    let window = 1 + rng.below(20);
    let recent = rng.below(window + 1);
    let rule = |recent, sinks| SelectionRule {
        window,
        recent,
        sinks,
    };
    [
        rule(0, 0),
        rule(recent, rng.below(window - recent + 1)),
        rule(recent, window - recent),
        rule(window, 0),
    ]
}

#[test]
fn slots_decode_as_one_pass_would() {
    let mut rng = Rng::new(11);
    for (seed, kind) in Scores::ALL.into_iter().enumerate() {
        let roles = [ScoreRole::RankAndBias, ScoreRole::Rank];
        let ruled = rules(&mut rng).map(|rule| roles.map(|role| (rule, role)));
        for (rule, role) in ruled.into_iter().flatten() {
            let batch = 1 + seed % 2;
            let inputs = inputs(batch, 70, Some((kind, rule)), seed as u64);
            let shape = CacheShape::slots(batch, HEADS[1], rule, DIM, ElementType::F32).unwrap();
            let shape = shape.with_score_role(role);
            let mut state = State::new(&shape);
            let mut at = 0;
            while at < 70 {
                let through_keys = rng.below(3) == 0;
                let n = (1 + rng.below(if through_keys { 30 } else { 5 })).min(70 - at);
                step(&inputs, &shape, at, n, state.cache(), through_keys);
                at += n;
                assert_eq!(state.seen, vec![at as i32; batch]);
                let scores = inputs.scores.as_ref().unwrap();
                for (row, scores) in scores.chunks_exact(70).enumerate() {
                    let expected = attended(scores, &rule, at - 1);
                    assert_eq!(state.live(row, rule.window), expected, "{kind:?} {rule:?}");
                }
            }
        }
    }
}

/// A step that appends later writes the same outputs as the step and leaves every bit of the cache, given writable or
/// read-only; then the tokens are appended.
#[test]
fn a_step_that_appends_later_leaves_the_slots() {
    let rule = SelectionRule {
        window: 5,
        recent: 2,
        sinks: 1,
    };
    let shape = CacheShape::slots(1, HEADS[1], rule, DIM, ElementType::F32).unwrap();
    let mut rng = Rng::new(15);
    let mut random = |len: usize| -> Vec<f32> { (0..len).map(|_| rng.normal() as f32).collect() };
    let bits = |state: &State| {
        let rows = [&state.k[..], &state.v[..], &state.score[..]].concat();
        let rows: Vec<u32> = rows.into_iter().map(f32::to_bits).collect();
        (rows, state.position.clone(), state.seen.clone())
    };
    let mut state = State::new(&shape);
    for at in (0..24).step_by(4) {
        let (kv, q_shape) = ([1, HEADS[1], 4, DIM], [1, HEADS[0], 4, DIM]);
        let rows = HEADS[1] * 4;
        let (k, v, z) = (random(rows * DIM), random(rows * DIM), random(rows));
        let q = random(HEADS[0] * 4 * DIM);
        let tokens = tokens(&k, &v, Some(&z), kv);
        let options = AttentionOptions::new().with_keep_window(5);
        let (scores, f32) = (Some(&kv[..3]), ElementType::F32);
        let now = shape.decode(&q_shape, &kv, &kv, scores, f32, at, &options);
        let now = now.unwrap();
        let later = now.with_appending(Appending::Later);
        let view = View::contiguous(&q, q_shape);
        let before = bits(&state);
        let outputs = [0, 1, 2].map(|call| {
            let (mut out, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; q.len() / DIM]);
            assert_eq!(bits(&state), before);
            let cache = state.cache();
            match call {
                0 => attend(&later, view, cache.read(), tokens, &mut out, &mut lse),
                1 => decode(&later, view, cache, tokens, &mut out, &mut lse),
                _ => decode(&now, view, cache, tokens, &mut out, &mut lse),
            }
            .unwrap();
            [out, lse]
        });
        assert_eq!(outputs[0], outputs[2]);
        assert_eq!(outputs[1], outputs[2]);
        assert_ne!(bits(&state), before);
    }
}

#[test]
fn slots_keep_what_the_rule_says_for_thousands_of_tokens() {
    const LEN: usize = 3000;
    let mut rng = Rng::new(13);
    for kind in [Scores::Normal, Scores::Ties, Scores::AllEqual, Scores::Nan] {
        for rule in rules(&mut rng) {
            let scores: Vec<f64> = [(); 2].map(|()| kind.head(LEN, &mut rng)).concat();
            let shape = CacheShape::slots(1, HEADS[1], rule, 8, ElementType::F32).unwrap();
            let mut state = State::new(&shape);
            let mut at = 0;
            while at < LEN {
                let most = [1, 1, 16, 300][rng.below(4)];
                let n = (1 + rng.below(most)).min(LEN - at);
                let z = part(&scores, [1, 2, LEN, 1], at..at + n);
                let kv = [1, 2, n, 8];
                let rows = vec![0.0; 2 * n * 8];
                let tokens = tokens(&rows, &rows, Some(&z), kv);
                let problem = shape.append(&kv, &kv, Some(&kv[..3]), ElementType::F32, at);
                append(&problem.unwrap(), state.cache(), tokens).unwrap();
                at += n;
                for (row, scores) in scores.chunks_exact(LEN).enumerate() {
                    if rng.below(10) == 0 || at == LEN {
                        let expected = attended(scores, &rule, at - 1);
                        assert_eq!(state.live(row, rule.window), expected, "{kind:?} {rule:?}");
                    }
                }
            }
        }
    }
}

/// Rows of hidden tokens hold NaN; they take their places among the recent ones, and no result reads them.
#[test]
fn rows_of_hidden_tokens_are_never_read() {
    let mut rng = Rng::new(14);
    for rule in rules(&mut rng) {
        let mut inputs = inputs(2, 60, Some((Scores::Nan, rule)), 3);
        let hidden = inputs.scores.clone().unwrap();
        for (row, _) in (hidden.iter().enumerate()).filter(|(_, z)| **z == f64::NEG_INFINITY) {
            inputs.k[row * DIM..(row + 1) * DIM].fill(f64::NAN);
            inputs.v[row * DIM..(row + 1) * DIM].fill(f64::NAN);
        }
        let shape = CacheShape::slots(2, HEADS[1], rule, DIM, ElementType::F32).unwrap();
        let mut state = State::new(&shape);
        for (at, n) in [(0, 1), (1, 20), (21, 1), (22, 1), (23, 30), (53, 7)] {
            step(&inputs, &shape, at, n, state.cache(), n == 30);
        }
    }
}

#[test]
fn pages_decode_as_one_pass_would() {
    let mut rng = Rng::new(12);
    for seed in 0..6 {
        let batch = 1 + seed % 2;
        let inputs = inputs(batch, 50, None, seed as u64);
        let shape = CacheShape::pages(batch, HEADS[1], [14, 8, 7], DIM, ElementType::F32).unwrap();
        let rows = 14 * HEADS[1] * 8 * DIM;
        let (mut k, mut v) = (vec![f32::NAN; rows], vec![f32::NAN; rows]);
        // The sequences' pages alternate, from the last one down.
        let table: Vec<i32> = (0..batch)
            .flat_map(|b| (0..7).map(move |page| (13 - page * batch - b) as i32))
            .collect();
        let mut lengths = vec![0; batch];
        let mut at = 0;
        while at < 50 {
            let n = (1 + rng.below(9)).min(50 - at);
            let pages = Pages {
                k: &mut k,
                v: &mut v,
                scores: None,
                table: &table,
                lengths: &mut lengths,
            };
            step(&inputs, &shape, at, n, Cache::Pages(pages), false);
            at += n;
        }
        assert_eq!(lengths, vec![50; batch]);
    }
}

/// The tables name the pages that the next query sees alone, and the lengths count the tokens in them.
#[test]
fn pages_of_a_window_decode_as_one_pass_over_its_keys_would() {
    const LEN: usize = 50;
    let mut rng = Rng::new(13);
    let top = |kind| (kind, SelectionRule::top(LEN));
    let kinds = [None, Some(top(Scores::Normal)), Some(top(Scores::Padded))];
    for (kind, window) in (kinds.iter()).flat_map(|&kind| [1, 5, 8, 30, 99].map(|w| (kind, w))) {
        let inputs = inputs(2, LEN, kind, window as u64);
        let shape = CacheShape::pages(2, HEADS[1], [14, 8, 7], DIM, ElementType::F32).unwrap();
        let mut shape = shape.with_window(window).unwrap();
        if kind.is_some() {
            shape = shape.with_scores();
        }
        let rows = 14 * HEADS[1] * 8;
        let (mut k, mut v) = (vec![f32::NAN; rows * DIM], vec![f32::NAN; rows * DIM]);
        let mut scores = kind.map(|_| vec![f32::NAN; rows]);
        let mut at = 0;
        while at < LEN {
            let n = (1 + rng.below(9)).min(LEN - at);
            let dropped = (at + 1).saturating_sub(window) / 8;
            let page = |b: usize, page: usize| match page + dropped {
                page @ 0..7 => (13 - page * 2 - b) as i32,
                _ => -1,
            };
            let table = [0, 1].map(|b| [0, 1, 2, 3, 4, 5, 6].map(|at| page(b, at)));
            let mut lengths = vec![(at - dropped * 8) as i32; 2];
            let pages = Pages {
                k: &mut k,
                v: &mut v,
                scores: scores.as_deref_mut(),
                table: table.as_flattened(),
                lengths: &mut lengths,
            };
            step(&inputs, &shape, at, n, Cache::Pages(pages), false);
            at += n;
        }
    }
}

#[test]
fn a_refused_call_leaves_the_cache_as_it_was() {
    let shape = CacheShape::slots(1, 2, 4, DIM, ElementType::F32).unwrap();
    let kv = [1, 2, 3, DIM];
    let problem = shape.append(&kv, &kv, Some(&kv[..3]), ElementType::F32, 0);
    let problem = problem.unwrap();
    let (rows, z) = (vec![1.0; 2 * 3 * DIM], vec![0.5; 6]);
    let tokens = tokens(&rows, &rows, Some(&z), kv);
    let mut state = State::new(&shape);
    let without = Tokens {
        scores: None,
        ..tokens
    };
    let error = append(&problem, state.cache(), without).unwrap_err();
    assert_eq!(error, AttentionError::CacheScores);
    let short = Tokens {
        v: View::contiguous(&rows[..10], kv),
        ..tokens
    };
    let error = append(&problem, state.cache(), short).unwrap_err();
    assert!(matches!(error, AttentionError::Buffer { .. }), "{error}");
    state.position.pop();
    let error = append(&problem, state.cache(), tokens).unwrap_err();
    let text = "the cached positions needs 8 elements, but its buffer has 7";
    assert_eq!(error.to_string(), text);
    assert!(state.k.iter().all(|x| x.is_nan()) && state.seen == [0]);
    assert!(state.position.iter().all(|&p| p == EMPTY));

    let shape = CacheShape::pages(1, 2, [2, 4, 2], DIM, ElementType::F32).unwrap();
    let problem = shape.append(&kv, &kv, None, ElementType::F32, 0).unwrap();
    let mut pool = vec![7.0; 2 * 2 * 4 * DIM];
    let mut other = pool.clone();
    let no_page = "a page of the page table is 5, past the limit of 1";
    let no_room = "the page table holds 6 tokens of 8: there is no room for 3 more";
    for (table, lengths, text) in [([0, 5], [4], no_page), ([0, 1], [6], no_room)] {
        let pages = Pages {
            k: &mut pool,
            v: &mut other,
            scores: None,
            table: &table,
            lengths: &mut lengths.clone(),
        };
        let error = append(&problem, Cache::Pages(pages), without).unwrap_err();
        assert_eq!(error.to_string(), text);
        assert!(pool.iter().chain(&other).all(|&x| x == 7.0));
    }
}
