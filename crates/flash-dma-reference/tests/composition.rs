//! Recent keys, sinks and documents: the definition, position by position, against "the selection of the older keys, and
//! one addition".

use flash_dma_problem::{Interval, SelectionRule};
use flash_dma_reference::generate::Scores;
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
        assert_eq!(
            compose::intervals_by_heap(&scores, &documents, &rule),
            compose::intervals(&scores, &documents, &rule),
            "{kind:?} {len} {documents:?} {rule:?} {scores:?}"
        );
        let more = compose::intervals(&scores, &documents, &rule.widened(3));
        let less = compose::intervals(&scores, &documents, &rule);
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
    assert_eq!(
        compose::intervals(&scores, &[4, 2], &rule(2, 2, 0)),
        expected
    );
}
