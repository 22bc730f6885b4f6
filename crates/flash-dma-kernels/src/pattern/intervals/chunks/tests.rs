use super::*;
use crate::pattern::intervals::classes::BRIEF;
use crate::pattern::intervals::live_keys;
use crate::pattern::intervals::tests::{problem, rows_of};
use crate::testing::{client, contiguous, read_u32, selection, zeros};
use flash_dma_problem::Interval;
use flash_dma_reference::Rng;
use flash_dma_reference::compose::max_live;
use flash_dma_reference::generate::Scores;

/// The queries of a chunk that attend to a key.
fn attended(p: &Problem, interval: &Interval, chunk: std::ops::Range<usize>) -> Vec<usize> {
    chunk
        .filter(|&query| interval.contains(p.position(query)))
        .collect()
}

/// Deaths, lives, births, births of brief keys; the times within a class differ by less than its width.
fn class(
    p: &Problem,
    interval: &Interval,
    chunk: &std::ops::Range<usize>,
    width: usize,
) -> (usize, usize) {
    let seen = attended(p, interval, chunk.clone());
    let (first, last) = (seen[0], seen[seen.len() - 1]);
    match (first > chunk.start, last + 1 < chunk.end) {
        (true, true) if last < first + BRIEF as usize * width => {
            (3, CLASSES - 1 - (first - chunk.start) / width)
        }
        (true, true) if first - chunk.start < chunk.end - (last + 1) => {
            (0, (last - chunk.start) / width)
        }
        (true, _) => (2, (first - chunk.start) / width),
        (false, true) => (0, (last - chunk.start) / width),
        (false, false) => (1, 0),
    }
}

/// Compares the list of every chunk with its definition: the keys of `listed`, on `spans`, that it attends to.
fn compare(p: &Problem, keys: Keys, spans: &[Vec<Interval>], listed: &[u32], chunk: usize) {
    let client = client();
    let chunks = p.q_len.div_ceil(chunk);
    let width = chunk.div_ceil(CLASSES).next_power_of_two();
    for planes in [1, 4] {
        let lists = chunk_keys_with(&client, p, keys, chunk, Team { lanes: 1, planes });
        let [keys, counts, starts] =
            [lists.keys, lists.counts, lists.starts.unwrap()].map(|words| read_u32(&client, words));
        for (row, n) in (0..2).flat_map(|row| (0..chunks).map(move |n| (row, n))) {
            let queries = n * chunk..((n + 1) * chunk).min(p.q_len);
            let list = row * chunks + n;
            let found = &keys[list * lists.capacity..][..counts[list] as usize];
            let span = |key: u32| &spans[row][key as usize];
            let place = |key: u32| class(p, span(key), &queries, width);
            let mut expected = listed.to_vec();
            expected.retain(|&key| !attended(p, span(key), queries.clone()).is_empty());
            expected.sort_by_key(|&key| place(key));
            // Stable, but brief keys from last to first within their class.
            let brief = |a: &u32, b: &u32| place(*a).0 == 3 && place(*a) == place(*b);
            for class in expected.chunk_by_mut(brief) {
                class.reverse();
            }
            assert_eq!(found, expected, "row {row}, chunk {n}, {planes} planes");
            let starts = &starts[list * STARTS..][..STARTS];
            assert_eq!((starts[0], starts[STARTS - 1]), (0, counts[list]));
            for class in starts.windows(2) {
                let keys = &found[class[0] as usize..class[1] as usize];
                assert!(keys.iter().all(|&key| place(key) == place(keys[0])));
            }
        }
    }
}

fn check(q_len: usize, k_len: usize, window: usize, causal: bool, chunk: usize) {
    let client = client();
    let p = problem(2, q_len, k_len, window, causal);
    let rows = rows_of([Scores::Normal; 2], k_len, p.window, 3);
    let live = live_keys(&client, &p, &selection(&client, &rows));
    let all: Vec<u32> = (0..k_len as u32).collect();
    compare(&p, Keys::Live(&live), &rows, &all, chunk);
}

/// Two rows of keys in any order, on spans that begin anywhere.
fn check_ranked(q_len: usize, k_len: usize, chunk: usize) {
    let client = client();
    let p = problem(2, q_len, k_len, 3, true);
    let mut rng = Rng::new(4);
    let mut span = |key: usize| {
        let first = key + rng.below(k_len - key);
        let end = first + 1 + rng.below((k_len - first).min(40));
        let [first, end] = [first, end].map(|position| position as u32);
        Interval { first, end }
    };
    let spans = [(); 2].map(|()| (0..k_len).map(&mut span).collect::<Vec<Interval>>());
    // Every third key is none, and the list descends.
    let listed: Vec<u32> = (0..k_len as u32).rev().filter(|key| key % 3 != 0).collect();
    let mut keys = vec![0; 2 * k_len];
    let mut positions = vec![0; 4 * k_len];
    for (row, spans) in spans.iter().enumerate() {
        for (n, &key) in listed.iter().enumerate() {
            keys[row * k_len + n] = key;
            let span = &spans[key as usize];
            positions[2 * (row * k_len + n)..][..2].copy_from_slice(&[span.first, span.end]);
        }
    }
    let ranked = RankedKeys {
        keys: contiguous(&client, &keys, &[2, k_len]),
        spans: zeros(&client, &[1, 2, k_len, 2]),
        listed: contiguous(&client, &positions, &[1, 2, k_len, 2]),
        counts: contiguous(&client, &[listed.len() as u32; 2], &[2]),
    };
    let most = spans.iter().map(|row| {
        let until = row.iter().enumerate().map(|(key, span)| Interval {
            first: key as u32,
            end: span.end,
        });
        max_live(&until.collect::<Vec<_>>())
    });
    let most = Keys::Ranked(&ranked, most.max().unwrap());
    compare(&p, most, &spans, &listed, chunk);
}

#[test]
fn every_chunk_lists_the_keys_whose_ranks_learn() {
    check_ranked(200, 200, 64);
    check_ranked(150, 200, 50);
    check_ranked(200, 150, 48);
}

#[test]
fn every_chunk_lists_its_keys_by_death_and_birth() {
    check(200, 200, 20, true, 64);
    check(150, 200, 30, true, 50);
    check(200, 150, 30, true, 48);
    check(100, 150, 30, false, 48);
    check(70, 70, 70, true, 70);
}

#[test]
fn a_late_chunk_lists_the_lasting_keys_before_it() {
    check(900, 900, 30, true, 128);
    check(400, 900, 30, true, 100);
    check(100, 900, 30, false, 48);
}
