use super::*;
use crate::pattern::intervals::tests::problem;
use crate::testing::{client, contiguous, read_u32};
use flash_dma_reference::Rng;

const TILE: usize = 8;

/// Mesa's driver and Apple's GPUs have 32 KiB.
#[test]
fn the_counters_fit_the_device() {
    let mut hardware = client().properties().hardware.clone();
    hardware.plane_size_max = 32;
    for (shared, most, units) in [
        (16 << 10, 1024, 128),
        (32 << 10, 1024, 256),
        (48 << 10, 1024, 512),
        (227 << 10, 256, 256),
    ] {
        hardware.max_shared_memory_size = shared;
        hardware.max_units_per_cube = most;
        assert_eq!(units_for(&hardware), units);
        assert!(shared_bytes(units) <= shared);
    }
}

/// Two rows of keys with any ends, as documents or given ends may have them.
fn check(q_len: usize, k_len: usize, causal: bool, kept: bool, unit_counts: &[usize]) {
    let client = client();
    let p = problem(2, q_len, k_len, 3, causal);
    let shape = p.scores_shape();
    let mut rng = Rng::new(5);
    let (mut all, mut ends) = (Vec::new(), Vec::new());
    for n in 0..2 * k_len {
        let key = n % k_len;
        let end = key + rng.below(k_len - key + 1);
        let (first, past) = match kept {
            true => (key + rng.below(k_len - key + 1), end),
            false => (end, end + rng.below(k_len - end + 1)),
        };
        let score = [0.0f32, f32::NAN, f32::NEG_INFINITY][rng.below(8).saturating_sub(5)];
        ends.push(end as u32);
        all.push((first as u32, past as u32, score));
    }
    let scores: Vec<f32> = all.iter().map(|&(.., score)| score).collect();
    let bound = |&(first, past, _): &(u32, u32, f32)| if kept { first } else { past };
    let bounds: Vec<u32> = all.iter().map(bound).collect();
    let words: Vec<u32> = (ends.iter().enumerate())
        .flat_map(|(n, &end)| [(n % k_len) as u32, end])
        .collect();
    let bounds = contiguous(&client, &bounds, &shape);
    let source = match kept {
        true => RankedSource::Kept(&bounds),
        false => RankedSource::RunnersUp(&bounds),
    };
    let selection = Selection {
        scores: contiguous(&client, &scores, &shape),
        intervals: contiguous(&client, &words, &p.intervals_shape()),
        learning: None,
    };
    let width = k_len.div_ceil(CLASSES).max(1) as u32;
    for &units in unit_counts {
        let ranked = ranked_keys_with(&client, &p, &selection, source, units);
        let [listed, listed_spans] =
            [&ranked.keys, &ranked.listed].map(|t| read_u32(&client, t.clone()));
        ranked.order_tiles(&client, &p, TILE);
        let [ordered, spans, counts] =
            [ranked.keys, ranked.spans, ranked.counts].map(|t| read_u32(&client, t));
        for (row, all) in all.chunks_exact(k_len).enumerate() {
            let runs = |first: u32, past: u32| {
                let positions = i64::from(first)..i64::from(past);
                (0..q_len).any(|query| positions.contains(&p.position(query)))
            };
            let learns = |&key: &usize| {
                let (first, past, score) = all[key];
                runs(first, past) && score != f32::NEG_INFINITY
            };
            let mut expected: Vec<usize> = (0..k_len).filter(learns).collect();
            expected.sort_by_key(|&key| (all[key].0 / width, key % units));
            let count = counts[row] as usize;
            assert_eq!(count, expected.len(), "row {row}, {units} units");
            let ordered = &ordered[row * k_len..][..expected.len()];
            for (ours, listed) in ordered.chunks(TILE).zip(expected.chunks(TILE)) {
                let mut listed: Vec<usize> = listed.to_vec();
                listed.sort_by_key(|&key| all[key].1);
                let ours: Vec<_> = ours.iter().map(|&key| key as usize).collect();
                assert_eq!(ours, listed, "row {row}");
            }
            for (n, &key) in expected.iter().enumerate() {
                let listed = listed[row * k_len + n] as usize;
                assert_eq!(listed, key, "row {row}, entry {n}");
                let span = &spans[2 * (row * k_len + key)..][..2];
                assert_eq!(span, [all[key].0, all[key].1], "row {row}, key {key}");
                assert_eq!(&listed_spans[2 * (row * k_len + n)..][..2], span);
            }
        }
    }
}

#[test]
fn keys_are_listed_by_the_first_position_at_which_their_ranks_learn() {
    for kept in [false, true] {
        check(300, 300, true, kept, &[1, 4]);
        check(20, 300, true, kept, &[1]);
        check(300, 20, true, kept, &[4]);
        check(20, 300, false, kept, &[4]);
        check(1, 1, true, kept, &[1]);
        // The units sum the counters in parts.
        check(90, 90, true, kept, &[32]);
    }
}
