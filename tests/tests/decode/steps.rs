//! Steps, chunks and live sets on every engine of the kernels, without Burn.

use super::rules;
use flash_dma_kernels::internals::DecodeTuning;
use flash_dma_tests::decoding::{Held, Sequence};
use flash_dma_tests::prelude::*;

flash_dma_tests::kernel_engines!(
    head_dims: of_each_dim(Some(21)),
    head_dims_without_a_window: of_each_dim(None),
    groups_and_steps,
    kinds_of_scores,
    scores_that_only_rank,
    options_and_layouts,
    not_finite,
    long_contexts,
    pieces_of_any_size,
    chunks_equal_one_pass,
    the_last_keys_of_pages,
    recent_keys_and_sinks,
    recent_keys_and_sinks_over_thousands_of_tokens,
    hidden_rows_are_never_read,
    sizes_of_cubes,
    repeats_are_bit_equal,
);

pub(super) fn types<T: Target>(kernels: &Kernels<T>) -> Vec<ElementType> {
    let all = [F32, Bf16, F16];
    all.into_iter().filter(|&e| kernels.supports(e)).collect()
}

fn of_each_dim<T: Target>(kernels: &Kernels<T>, window: Option<usize>) {
    for dim in Kernels::<T>::cases([32], [], [40, 64, 96, 128, 192, 256]) {
        for element in types(kernels) {
            let sequence = Sequence {
                head_dim: dim,
                element,
                pieces: vec![1, 1, 3],
                every: 7,
                ..Sequence::new(70, window)
            };
            sequence.check(kernels);
        }
    }
}

/// Rows that fill a tile, rows that do not, and rows of several tiles.
fn groups_and_steps<T: Target>(kernels: &Kernels<T>) {
    let groups = Kernels::<T>::cases(
        [[4, 1]],
        [],
        [[1, 1], [3, 3], [6, 2], [8, 1], [16, 1], [17, 1]],
    );
    for heads in groups {
        for pieces in [vec![1], vec![2, 16, 5]] {
            for (window, biased) in [(Some(33), false), (None, false), (None, true)] {
                let sequence = Sequence {
                    batch: 1,
                    heads,
                    element: types(kernels)[types(kernels).len() - 1],
                    pieces: pieces.clone(),
                    biased,
                    every: 5,
                    ..Sequence::new(90, window)
                };
                sequence.check(kernels);
            }
        }
    }
}

fn kinds_of_scores<T: Target>(kernels: &Kernels<T>) {
    for scores in Scores::ALL {
        for window in Kernels::<T>::cases([7], [], [1, 64, 200]) {
            let sequence = Sequence {
                scores,
                element: types(kernels)[1],
                pieces: vec![1, 4, 1, 16],
                every: 3,
                ..Sequence::new(100, Some(window))
            };
            sequence.check(kernels);
        }
        let sequence = Sequence {
            scores,
            biased: true,
            element: types(kernels)[1],
            pieces: vec![1, 4],
            every: 5,
            ..Sequence::new(70, None)
        };
        sequence.check(kernels);
    }
}

/// Scores hide keys, and none of their numbers or NaN reaches a logit.
fn scores_that_only_rank<T: Target>(kernels: &Kernels<T>) {
    let kinds = Kernels::<T>::cases(
        [Scores::Padded, Scores::Nan],
        [],
        [Scores::Ties, Scores::AllPadded, Scores::Large],
    );
    let with_parts = SelectionRule {
        window: 21,
        recent: 5,
        sinks: 2,
    };
    for scores in kinds {
        for rule in [SelectionRule::top(21), with_parts] {
            for element in types(kernels) {
                let sequence = Sequence {
                    role: ScoreRole::Rank,
                    rule: Some(rule),
                    scores,
                    element,
                    pieces: vec![1, 4, 16, 1],
                    every: 3,
                    ..Sequence::new(90, None)
                };
                sequence.check(kernels);
            }
        }
    }
}

fn options_and_layouts<T: Target>(kernels: &Kernels<T>) {
    let options = AttentionOptions::new();
    for options in [options.with_softcap(2.0), options.with_scale(-0.3)] {
        for layout in [Layout::Transposed, Layout::Padded] {
            for window in [Some(20), None] {
                let sequence = Sequence {
                    options,
                    layout,
                    element: types(kernels)[1],
                    pieces: vec![3, 1],
                    every: 3,
                    ..Sequence::new(50, window)
                };
                sequence.check(kernels);
            }
        }
    }
}

/// NaN and infinities in keys and values that few, all or no queries attend to.
fn not_finite<T: Target>(kernels: &Kernels<T>) {
    for element in types(kernels) {
        for (window, kind) in [
            (Some(9), Scores::Normal),
            (Some(9), Scores::Increasing),
            (Some(9), Scores::Decreasing),
            (None, Scores::Normal),
        ] {
            let sequence = Sequence {
                element,
                scores: kind,
                pieces: vec![1, 6, 16],
                ..Sequence::new(60, window)
            };
            for (value, which) in [(f64::NAN, 0), (f64::NAN, 1), (f64::INFINITY, 1)] {
                let mut inputs = sequence.inputs();
                let dim = sequence.head_dim;
                for token in [12, 31, 50] {
                    match which {
                        0 => inputs.k[token * dim + 5] = value,
                        _ => inputs.v[(60 + token) * dim + 11] = value,
                    }
                }
                sequence.check_inputs(kernels, &inputs);
            }
        }
    }
}

/// Prefills and windows that a device splits into many parts.
fn long_contexts<T: Target>(kernels: &Kernels<T>) {
    for (len, window) in Kernels::<T>::cases(
        [(300, Some(100))],
        [],
        [
            (9000, Some(2048)),
            (9000, None),
            (20_000, Some(5000)),
            (4100, Some(4096)),
        ],
    ) {
        for element in types(kernels) {
            let sequence = Sequence {
                batch: 1,
                heads: [8, 2],
                head_dim: 128,
                element,
                prefill: len - 40,
                page_len: 256,
                pieces: vec![1, 1, 1, 4],
                every: 6,
                scores: Scores::Ties,
                ..Sequence::new(len, window)
            };
            sequence.check(kernels);
        }
    }
}

/// The live sets alone, over thousands of tokens.
fn pieces_of_any_size<T: Target>(kernels: &Kernels<T>) {
    let cases = Kernels::<T>::cases(
        [(1500, 13)],
        [],
        [(6000, 13), (40_000, 2048), (100_000, 333)],
    );
    for (len, window) in cases {
        for scores in [
            Scores::Normal,
            Scores::Ties,
            Scores::Nan,
            Scores::AllEqual,
            Scores::Recency,
        ] {
            let sequence = Sequence {
                batch: 2,
                heads: [2, 2],
                head_dim: 8,
                scores,
                ..Sequence::new(len, Some(window))
            };
            let all = sequence.inputs();
            let pieces: [&[usize]; 3] =
                [&[len], &[1, 16, 17, len / 7], &[1, 1, 1, 2, 5, len / 300]];
            for pieces in pieces {
                let mut cache = Held::new(kernels, &sequence);
                for &piece in pieces.iter().cycle() {
                    cache.append(&all, (cache.held + piece).min(len));
                    if cache.held == len {
                        break;
                    }
                }
                cache.check_live(&all);
            }
        }
    }
}

fn check_chunk<T: Target>(cache: &mut Held<'_, T>, all: &Inputs, len: usize) {
    let from = cache.held;
    let result = cache.chunk(all, from + len);
    cache.compare(all, from, &result);
    cache.check_live(all);
}

fn chunks_equal_one_pass<T: Target>(kernels: &Kernels<T>) {
    for (len, window, chunk) in Kernels::<T>::cases(
        [(120, 30, 50)],
        [],
        [(1000, 300, 257), (3000, 100, 1024), (700, 900, 200)],
    ) {
        for element in types(kernels) {
            let sequence = Sequence {
                element,
                scores: Scores::Padded,
                ..Sequence::new(len, Some(window))
            };
            let all = sequence.inputs();
            let mut cache = Held::new(kernels, &sequence);
            while cache.held < len {
                let next = chunk.min(len - cache.held);
                check_chunk(&mut cache, &all, next);
            }
        }
    }
}

/// Windows that end in a page, in a step, and after the sequence.
fn the_last_keys_of_pages<T: Target>(kernels: &Kernels<T>) {
    let windows = Kernels::<T>::cases([1, 21], [4], [32, 65, 500]);
    for (n, last) in windows.into_iter().enumerate() {
        for (biased, pieces) in [(false, vec![1, 16, 5]), (true, vec![2, 9])] {
            let sequence = Sequence {
                element: types(kernels)[n % types(kernels).len()],
                last: Some(last),
                biased,
                scores: Scores::Padded,
                prefill: 40,
                pieces,
                every: 2,
                ..Sequence::new(120, None)
            };
            sequence.check(kernels);
        }
    }
}

/// Single tokens, several at once and chunks, for every kind of scores.
fn recent_keys_and_sinks<T: Target>(kernels: &Kernels<T>) {
    let more = [
        Scores::Ties,
        Scores::AllEqual,
        Scores::Padded,
        Scores::Normal,
    ];
    for scores in Kernels::<T>::cases([Scores::Nan], [], more) {
        for window in Kernels::<T>::cases([7], [], [1, 40, 200]) {
            for rule in rules(window) {
                let sequence = Sequence {
                    rule: Some(rule),
                    scores,
                    element: types(kernels)[1],
                    pieces: vec![1, 4, 1, 16],
                    every: 3,
                    ..Sequence::new(100, Some(window))
                };
                sequence.check(kernels);
                let all = sequence.inputs();
                let mut cache = Held::new(kernels, &sequence);
                for chunk in [33, 17, 1, 49] {
                    check_chunk(&mut cache, &all, chunk);
                }
            }
        }
    }
}

/// The live sets over thousands of tokens, and the last steps.
fn recent_keys_and_sinks_over_thousands_of_tokens<T: Target>(kernels: &Kernels<T>) {
    let cases = Kernels::<T>::cases([(400, 13)], [], [(3000, 13), (20_000, 2048)]);
    for (len, window) in cases {
        let kinds = [Scores::Ties, Scores::Normal, Scores::Nan, Scores::Padded];
        for (rule, scores) in rules(window).into_iter().zip(kinds.into_iter().cycle()) {
            let sequence = Sequence {
                batch: 1,
                heads: [4, 2],
                rule: Some(rule),
                scores,
                element: types(kernels)[1],
                ..Sequence::new(len, Some(window))
            };
            let all = sequence.inputs();
            let pieces: [&[usize]; 2] = [&[1, 2, 1, len / 300], &[len / 7, 17, 16, 1]];
            for pieces in pieces {
                let mut cache = Held::new(kernels, &sequence);
                for &piece in pieces.iter().cycle() {
                    let left = len - 4 - cache.held;
                    cache.append(&all, cache.held + piece.min(left));
                    if cache.held == len - 4 {
                        break;
                    }
                }
                cache.check_live(&all);
                for to in [len - 3, len] {
                    let from = cache.held;
                    let result = cache.step(&all, to);
                    cache.compare(&all, from, &result);
                    cache.check_live(&all);
                }
            }
        }
    }
}

/// The rows of hidden tokens are NaN: they have their places among the recent keys, and no query reads them.
fn hidden_rows_are_never_read<T: Target>(kernels: &Kernels<T>) {
    for element in types(kernels) {
        for rule in rules(9) {
            let sequence = Sequence {
                rule: Some(rule),
                element,
                scores: Scores::Padded,
                pieces: vec![1, 6, 16],
                ..Sequence::new(60, Some(9))
            };
            let mut inputs = sequence.inputs();
            let scores = inputs.scores.clone().expect("slots have scores");
            let dim = sequence.head_dim;
            for (row, _) in (scores.iter().enumerate()).filter(|(_, z)| **z == f64::NEG_INFINITY) {
                inputs.k[row * dim..(row + 1) * dim].fill(f64::NAN);
                inputs.v[row * dim..(row + 1) * dim].fill(f64::NAN);
            }
            sequence.check_inputs(kernels, &inputs);
            let mut cache = Held::new(kernels, &sequence);
            cache.append(&inputs, 25);
            check_chunk(&mut cache, &inputs, 35);
        }
    }
}

/// Numbers of cubes that leave warps without keys, and every size of the tensor-core kernel.
fn sizes_of_cubes<T: Target>(kernels: &Kernels<T>) {
    let tuning = |cubes, warps, key_tile, stages| DecodeTuning {
        cubes: Some(cubes),
        warps: Some(warps),
        key_tile: Some(key_tile),
        stages: Some(stages),
    };
    for tuning in Kernels::<T>::cases(
        [tuning(3, 4, 16, 3)],
        [],
        [
            tuning(1, 1, 16, 2),
            tuning(2, 2, 32, 3),
            tuning(40, 4, 16, 4),
            tuning(5, 8, 32, 2),
        ],
    ) {
        for element in types(kernels) {
            for window in [Some(170), None] {
                let sequence = Sequence {
                    element,
                    tuning,
                    prefill: 150,
                    pieces: vec![1, 5],
                    every: 4,
                    ..Sequence::new(230, window)
                };
                sequence.check(kernels);
            }
        }
    }
}

fn repeats_are_bit_equal<T: Target>(kernels: &Kernels<T>) {
    let repeats: usize = Kernels::<T>::cases([2], [], [20]).iter().sum();
    for window in [Some(100), None] {
        let sequence = Sequence {
            element: types(kernels)[1],
            ..Sequence::new(200, window)
        };
        let all = sequence.inputs();
        let run = || {
            let mut cache = Held::new(kernels, &sequence);
            cache.append(&all, 190);
            [191, 195, 200].map(|to| cache.step(&all, to))
        };
        let first = run();
        for _ in 0..repeats {
            assert!(run() == first, "another result of the same steps");
        }
    }
}
