//! Recent keys, sinks and documents: the definition against "the selection of the older keys, and one addition".

use flash_dma_problem::{Interval, SelectionRule};
use flash_dma_reference::generate::Scores;
use flash_dma_reference::slots::SlotCache;
use flash_dma_reference::{Rng, compose, select};

fn rule(window: usize, recent: usize, sinks: usize) -> SelectionRule {
    SelectionRule {
        window,
        recent,
        sinks,
    }
}

/// Cuts `len` tokens into documents, empty ones included.
fn documents(len: usize, rng: &mut Rng) -> Vec<usize> {
    let mut left = len;
    let mut lengths = vec![];
    while left > 0 {
        let tokens = rng.below(40).min(left);
        lengths.push(tokens);
        left -= tokens;
    }
    lengths
}

#[test]
fn one_addition_gives_the_sets_of_the_definition() {
    let mut rng = Rng::new(21);
    for turn in 0..600 {
        let kind = Scores::ALL[turn % Scores::ALL.len()];
        let len = rng.below(70);
        let scores = kind.head(len, &mut rng);
        let window = 1 + rng.below(24);
        let recent = rng.below(window + 1);
        let rule = rule(window, recent, rng.below(window - recent + 1));
        let documents = match turn % 3 {
            0 => vec![len],
            _ => documents(len, &mut rng),
        };
        let less = compose::intervals(&scores, &documents, &rule);
        let by_heap = compose::intervals_by_heap(&scores, &documents, &rule);
        let what = format!("{kind:?} {len} {documents:?} {rule:?} {scores:?}");
        assert_eq!(by_heap, less, "{what}");
        let more = compose::intervals(&scores, &documents, &rule.widened(3));
        assert!(less.iter().zip(&more).all(|(a, b)| a.end <= b.end));
        assert!(compose::max_live(&less) <= window);
    }
}

#[test]
fn the_plain_rule_is_the_plain_selection() {
    let mut rng = Rng::new(22);
    for kind in Scores::ALL {
        let scores = kind.head(80, &mut rng);
        for window in [1, 7, 80, 100] {
            let plain = compose::intervals(&scores, &[80], &SelectionRule::top(window));
            assert_eq!(plain, select::intervals(&scores, window), "{kind:?}");
        }
    }
}

/// The keys that the slots of a cache and the tokens `from..to` after them attend to, if the slots in order of
/// position, the empty ones first, and the tokens form a separate sequence.
fn chunk(
    cache: &SlotCache,
    scores: &[f64],
    [from, to]: [usize; 2],
    rule: SelectionRule,
) -> Vec<Vec<usize>> {
    let held = cache.keys();
    let empty = rule.window - held.len();
    let nothing = (0..empty).map(|_| (usize::MAX, f64::NEG_INFINITY));
    let tokens = (from..to).map(|position| (position, scores[position]));
    let keys: Vec<(usize, f64)> = nothing.chain(held).chain(tokens).collect();
    // The sinks are the first keys of the sequence, not of these: they rank as if their scores were infinite.
    let rank = |&(position, score): &(usize, f64)| {
        let is_sink = position < rule.sinks && score != f64::NEG_INFINITY;
        if is_sink { f64::INFINITY } else { score }
    };
    let ranks: Vec<f64> = keys.iter().map(rank).collect();
    let rule = SelectionRule { sinks: 0, ..rule };
    let attended = |at| compose::attended(&ranks, &rule, at);
    let positions = |set: Vec<usize>| set.into_iter().map(|at| keys[at].0).collect();
    let chunk = rule.window..keys.len();
    chunk.map(|at| positions(attended(at))).collect()
}

/// Compares the slots with the definition after every token, and the tokens from `from` on as a chunk.
fn slots_suffice(scores: &[f64], rule: SelectionRule, from: usize) {
    let context = || format!("{rule:?} {scores:?}");
    let mut cache = SlotCache::new(rule);
    let mut tail = Vec::new();
    for (position, &score) in scores.iter().enumerate() {
        if position == from {
            tail = chunk(&cache, scores, [from, scores.len()], rule);
        }
        cache.push(score);
        let expected = compose::attended(scores, &rule, position);
        assert_eq!(cache.attended(), expected, "at {position}, {}", context());
        if position >= from {
            let own = &tail[position - from];
            assert_eq!(own, &expected, "at {position} from {from}, {}", context());
        }
    }
}

#[test]
fn as_many_slots_as_the_window_suffice_for_all_short_sequences() {
    let values = [f64::NEG_INFINITY, f64::NAN, 0.0, 1.0];
    for window in 1..=4 {
        for recent in 0..=window {
            for sinks in 0..=window - recent {
                for sequence in 0..4usize.pow(6) {
                    let scores = [0, 1, 2, 3, 4, 5].map(|n| values[(sequence >> (2 * n)) % 4]);
                    slots_suffice(&scores, rule(window, recent, sinks), sequence % 6);
                }
            }
        }
    }
}

#[test]
fn as_many_slots_as_the_window_suffice() {
    let mut rng = Rng::new(23);
    for turn in 0..600 {
        let kind = Scores::ALL[turn % Scores::ALL.len()];
        let len = 1 + rng.below(90);
        let window = 1 + rng.below(24);
        let recent = rng.below(window + 1);
        let rule = rule(window, recent, rng.below(window - recent + 1));
        slots_suffice(&kind.head(len, &mut rng), rule, rng.below(len));
    }
}

/// A hidden sink does not hold a place that a visible key could have: only visible ones are protected.
#[test]
fn slots_of_a_small_sequence_by_hand() {
    let hidden = f64::NEG_INFINITY;
    let mut cache = SlotCache::new(rule(2, 1, 1));
    for (score, attended) in [
        (hidden, vec![]),
        (3.0, vec![1]),
        (hidden, vec![1]),
        (0.0, vec![1, 3]),
    ] {
        cache.push(score);
        assert_eq!(cache.attended(), attended);
    }
    // The hidden key takes the recent place, and the key before it has to go.
    let mut cache = SlotCache::new(rule(2, 2, 0));
    for (score, attended) in [(1.0, vec![0]), (hidden, vec![0]), (hidden, vec![])] {
        cache.push(score);
        assert_eq!(cache.attended(), attended);
    }
}

#[test]
fn a_small_composition_by_hand() {
    let hidden = f64::NEG_INFINITY;
    // Window 3: the last key, and the two best of the older ones, of which key 0 is a sink.
    let scores = [-5.0, 2.0, hidden, 9.0, 1.0, 0.0];
    let expected = [(0, 6), (1, 4), (2, 2), (3, 6), (4, 5), (5, 6)]
        .map(|(first, end)| Interval { first, end });
    assert_eq!(compose::intervals(&scores, &[6], &rule(3, 1, 1)), expected);
    // At position 2 the hidden key takes the place of the recent one: keys 0 and 1 remain.
    assert_eq!(compose::attended(&scores, &rule(3, 1, 1), 2), [0, 1]);
    // A sliding window of 2 in documents of 4 and 2 tokens.
    let expected = [(0, 2), (1, 3), (2, 2), (3, 4), (4, 6), (5, 6)]
        .map(|(first, end)| Interval { first, end });
    let sliding = compose::intervals(&scores, &[4, 2], &rule(2, 2, 0));
    assert_eq!(sliding, expected);
}
