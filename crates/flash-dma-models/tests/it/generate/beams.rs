//! Beam search.

use crate::generate::chain::{Chain, texts};
use crate::generate::model::{Model, prompt};
use flash_dma_models::generate::{Beam, Beams, EarlyStopping, Ended, Generator, Sampler};

const STOP: u32 = 3;

fn chain() -> Chain {
    Chain(vec![
        vec![0.15, 0.22, 0.34, 0.29],
        vec![0.47, 0.13, 0.3, 0.1],
        vec![0.21, 0.42, 0.18, 0.19],
        vec![0.25, 0.25, 0.25, 0.25],
    ])
}

/// Every text of at most four tokens after the token 0, and its log probability.
fn all_texts() -> Vec<(Vec<u32>, f64)> {
    let cut = |mut text: Vec<u32>| {
        let end = text.iter().position(|&token| token == STOP);
        text.truncate(end.map_or(4, |end| end + 1));
        text
    };
    let mut all: Vec<Vec<u32>> = texts(4, 4).into_iter().map(cut).collect();
    all.dedup();
    let with_log = |text: Vec<u32>| {
        let log = chain().probability(0, &text).ln();
        (text, log)
    };
    all.into_iter().map(with_log).collect()
}

#[test]
fn enough_beams_are_an_exhaustive_search() {
    let chain = chain();
    let generator = Generator::new(&chain).with_stop(&[STOP]).with_max_new(4);
    let count = all_texts().len();
    assert_eq!(count, 1 + 3 + 9 + 27 * 4);
    let mut best = Vec::new();
    for penalty in [-1.0, 0.0, 0.5, 1.0, 2.0] {
        let score = |(text, log): (Vec<u32>, f64)| {
            let score = log / (text.len() as f64).powf(penalty);
            (text, log, score)
        };
        let mut expected: Vec<_> = all_texts().into_iter().map(score).collect();
        expected.sort_by(|a, b| b.2.total_cmp(&a.2));
        let beams = Beams::new(count).with_returned(count);
        let beams = beams.with_length_penalty(penalty);
        let found = generator.beams(&[0], &beams);
        assert_eq!(found.len(), count);
        for (beam, (_, _, score)) in found.iter().zip(&expected) {
            let near = |a: f64, b: f64| (a - b).abs() < 1e-6 * b.abs();
            assert!(near(beam.score, *score), "{beam:?} is not of {score}");
            let log = chain.probability(0, &beam.tokens).ln();
            assert!(near(beam.log_probability, log), "{beam:?} is not of {log}");
            let ended = match beam.tokens.ends_with(&[STOP]) {
                true => Ended::Stop(STOP),
                false => Ended::Length,
            };
            assert_eq!(beam.ended, ended);
        }
        assert_eq!(found[0].tokens, expected[0].0);
        best.push(found[0].tokens.clone());
        let mut tokens: Vec<_> = found.into_iter().map(|beam| beam.tokens).collect();
        tokens.sort();
        tokens.dedup();
        assert_eq!(tokens.len(), count, "every text is found once");
    }
    // The penalty decides: the shortest text at one end, a long one at the other.
    assert_eq!(best[0], [STOP]);
    assert_eq!(best[4].len(), 4);
}

/// A chain that ends early, or continues with the token 1 for a long time.
fn tempting() -> Chain {
    Chain(vec![
        vec![0.0, 0.4, 0.1, 0.5],
        vec![0.0, 0.9, 0.05, 0.05],
        vec![0.0, 0.4, 0.0, 0.6],
        vec![0.25, 0.25, 0.25, 0.25],
    ])
}

fn found(chain: Chain, beams: Beams) -> Vec<Vec<u32>> {
    let generator = Generator::new(&chain).with_stop(&[STOP]).with_max_new(4);
    let found = generator.beams(&[0], &beams).into_iter();
    found.map(|beam| beam.tokens).collect()
}

#[test]
fn early_stopping_is_a_rule() {
    // With one beam, the stop (0.5) beats the token 1 (0.4). ln 0.4 < ln 0.5, but ln 0.4 / 4 > ln 0.5.
    let by = |beams: Beams, rule| found(tempting(), beams.with_early_stopping(rule));
    let one = |rule| by(Beams::new(1), rule);
    assert_eq!(one(EarlyStopping::WhenFull), [[STOP]]);
    assert_eq!(one(EarlyStopping::Heuristic), [[STOP]]);
    assert_eq!(one(EarlyStopping::WhenHopeless), [[1; 4]]);
    // With two, 2 and the stop (0.06) are full after two tokens, where 1, 1 (0.36) is ahead of them.
    let two = |rule| by(Beams::new(2).with_returned(2), rule);
    assert_eq!(two(EarlyStopping::WhenFull), [vec![STOP], vec![2, STOP]]);
    assert_eq!(two(EarlyStopping::Heuristic), [vec![1; 4], vec![STOP]]);
    assert_eq!(two(EarlyStopping::WhenHopeless), [vec![1; 4], vec![STOP]]);
    // Log probabilities alone favour the short text, and then no longer text can overtake it.
    let short = Beams::new(1).with_length_penalty(0.0);
    assert_eq!(by(short, EarlyStopping::WhenHopeless), [[STOP]]);
}

#[test]
fn the_heuristic_counts_the_length_of_the_open_text() {
    let mut chain = tempting();
    chain.0[0] = vec![0.0, 0.35, 0.25, 0.4];
    chain.0[2] = vec![0.0, 0.1, 0.0, 0.9];
    let beams = Beams::new(2).with_returned(2);
    // After two tokens the stop (ln 0.4) and 2, stop are finished, and 1, 1 has ln 0.315: less than ln 0.4, but more
    // for each of its tokens.
    assert_eq!(found(chain, beams), [vec![1; 4], vec![2, STOP]]);
}

#[test]
fn a_text_that_ends_below_the_best_is_not_finished() {
    let mut chain = tempting();
    chain.0[0] = vec![0.0, 0.6, 0.0, 0.4];
    chain.0[1] = vec![0.0, 0.1, 0.0, 0.9];
    let beams = Beams::new(1).with_early_stopping(EarlyStopping::WhenFull);
    assert_eq!(found(chain, beams), [[1, STOP]]);
}

#[test]
fn one_beam_is_greedy_and_more_have_the_log_probability_of_the_whole_text() {
    let model = Model::new(2);
    let prompt = prompt(40, 0);
    let generator = Generator::new(&model).with_max_new(8);
    let greedy = &generator.generate(&[&prompt])[0].tokens;
    assert_eq!(generator.beams(&prompt, &Beams::new(1))[0].tokens, *greedy);

    let beams = Beams::new(5).with_returned(5);
    let found = generator.clone().with_chunk(9).beams(&prompt, &beams);
    assert_eq!(found.len(), 5);
    assert!(found.is_sorted_by(|a, b| a.score >= b.score));
    assert!(found[0].log_probability > found[4].log_probability);
    for beam in &found {
        let whole = model.whole(&[&prompt[..], &beam.tokens].concat());
        let rows = whole[prompt.len() - 1..].iter().zip(&beam.tokens);
        let logs = rows.map(|(row, &token)| f64::from(row[token as usize]));
        let log: f64 = logs.sum();
        let close = (beam.log_probability - log).abs() < 1e-3;
        assert!(close, "{beam:?} is not of {log}");
        assert!((beam.score - log / 8.0).abs() < 1e-3);
    }
}

#[test]
fn the_repetition_penalty_applies_to_log_probabilities() {
    let chain = Chain(vec![vec![0.6, 0.4], vec![0.6, 0.4]]);
    let strict = Sampler::greedy().with_repetition_penalty(2.0);
    let generator = Generator::new(&chain).with_sampler(strict).with_max_new(1);
    let found = |prompt: &[u32]| generator.beams(prompt, &Beams::new(2)).swap_remove(0);
    // 2 ln 0.6 is below ln 0.4.
    assert_eq!(found(&[0]).tokens, [1]);
    assert!((found(&[0]).score - 0.4_f64.ln()).abs() < 1e-6);
    // 2 ln 0.6 is above 2 ln 0.4.
    assert_eq!(found(&[1, 0]).tokens, [0]);
    assert!((found(&[1, 0]).score - 2.0 * 0.6_f64.ln()).abs() < 1e-6);
}

#[test]
fn no_tokens_are_a_text() {
    let model = Model::new(2);
    let generator = Generator::new(&model).with_max_new(0);
    let found = generator.beams(&[1], &Beams::new(3));
    let empty = Beam {
        tokens: Vec::new(),
        ended: Ended::Length,
        log_probability: 0.0,
        score: 0.0,
    };
    assert_eq!(found, [empty]);
}
