//! Problems that are the same in other words.

use super::run;
use flash_dma_tests::prelude::*;

every_engine!(
    a_window_of_all_keys_is_a_key_bias,
    permuted_keys_of_full_attention,
    split_keys_merge_by_their_lse,
    a_constant_on_the_scores_moves_the_lse,
);

fn close(name: &str, a: &[f64], b: &[f64], tolerance: f64) {
    assert_eq!(a.len(), b.len(), "{name}");
    for (at, (a, b)) in a.iter().zip(b).enumerate() {
        assert!(
            a == b || (a - b).abs() <= tolerance,
            "{name}[{at}]: {a} {b}"
        );
    }
}

/// Scores of zero with every key kept are plain attention.
fn a_window_of_all_keys_is_a_key_bias<E: Engine>(engine: &E) {
    for case in [Case::new(40, 50), Case::new(40, 50).full()] {
        let mut scored = case.clone().window(50).inputs();
        scored
            .scores
            .as_mut()
            .expect("the case has scores")
            .fill(0.0);
        let plain = case.plain().problem();
        let plain = Inputs {
            problem: plain,
            scores: None,
            ..scored.clone()
        };
        let (a, b) = (
            run(engine, &scored, Layout::Contiguous),
            run(engine, &plain, Layout::Contiguous),
        );
        close("out", &a.0.out, &b.0.out, 2e-6);
        close("lse", &a.0.lse, &b.0.lse, 4e-6);
        close("dq", &a.1.q, &b.1.q, 1e-5);
        close("dk", &a.1.k, &b.1.k, 1e-5);
        close("dv", &a.1.v, &b.1.v, 1e-5);
    }
}

/// Without causal masking the order of the keys means nothing, so long as no scores tie.
fn permuted_keys_of_full_attention<E: Engine>(engine: &E) {
    let case = Case::new(30, 60).full().heads(2, 2).window(13);
    let inputs = case.inputs();
    let (len, dim) = (60, case.head_dim);
    // 7 and 60 have no common factor.
    let from = |key: usize| (7 * key + 3) % len;
    let permute = |x: &[f64], size: usize| -> Vec<f64> {
        (0..x.len() / size)
            .flat_map(|row| {
                let at = (row / len * len + from(row % len)) * size;
                x[at..at + size].to_vec()
            })
            .collect()
    };
    let permuted = Inputs {
        k: permute(&inputs.k, dim),
        v: permute(&inputs.v, dim),
        scores: inputs.scores.as_ref().map(|z| permute(z, 1)),
        ..inputs.clone()
    };
    let (a, b) = (
        run(engine, &inputs, Layout::Contiguous),
        run(engine, &permuted, Layout::Contiguous),
    );
    close("out", &a.0.out, &b.0.out, 2e-6);
    close("lse", &a.0.lse, &b.0.lse, 4e-6);
    close("dq", &a.1.q, &b.1.q, 1e-5);
    close("dk", &permute(&a.1.k, dim), &b.1.k, 1e-5);
    close("dv", &permute(&a.1.v, dim), &b.1.v, 1e-5);
    let scores = [&a, &b].map(|x| x.1.scores.clone().expect("the case has scores"));
    close("dscores", &permute(&scores[0], 1), &scores[1], 1e-5);
}

/// `out = sum_s exp(lse_s - lse) out_s` over the parts of the keys.
fn split_keys_merge_by_their_lse<E: Engine>(engine: &E) {
    let case = Case::new(20, 90)
        .full()
        .heads(1, 1)
        .window(90)
        .scores(Scores::Normal);
    let (whole, dim) = (case.inputs(), case.head_dim);
    let parts = [0..31, 31..32, 32..90].map(|keys: std::ops::Range<usize>| {
        let take = |x: &[f64], size: usize| -> Vec<f64> {
            let heads = x.chunks(90 * size);
            heads
                .flat_map(|head| head[keys.start * size..keys.end * size].to_vec())
                .collect()
        };
        let part = Inputs {
            problem: Case::new(20, keys.len())
                .full()
                .heads(1, 1)
                .window(90)
                .problem(),
            q: whole.q.clone(),
            k: take(&whole.k, dim),
            v: take(&whole.v, dim),
            scores: whole.scores.as_ref().map(|z| take(z, 1)),
        };
        run(engine, &part, Layout::Contiguous).0
    });
    let whole = run(engine, &whole, Layout::Contiguous).0;
    for row in 0..whole.lse.len() {
        let lse = parts.iter().map(|p| p.lse[row].exp()).sum::<f64>().ln();
        close("lse", &[lse], &[whole.lse[row]], 2e-6);
        for d in 0..dim {
            let at = row * dim + d;
            let out: f64 = parts
                .iter()
                .map(|p| (p.lse[row] - lse).exp() * p.out[at])
                .sum();
            close("out", &[out], &[whole.out[at]], 2e-6);
        }
    }
}

/// The softmax does not see it, nor does the selection.
fn a_constant_on_the_scores_moves_the_lse<E: Engine>(engine: &E) {
    for element in E::cases([F32], [Bf16], []) {
        // Scores of few digits, so that the sums are exact.
        let case = Case::new(40, 50).scores(Scores::Ties).element(element);
        let inputs = case.inputs();
        let mut moved = inputs.clone();
        let scores = moved.scores.as_mut().expect("the case has scores");
        scores.iter_mut().for_each(|z| *z += 8.0);
        let (a, b) = (
            run(engine, &inputs, Layout::Contiguous),
            run(engine, &moved, Layout::Contiguous),
        );
        let moved: Vec<f64> = a.0.lse.iter().map(|x| x + 8.0).collect();
        close("lse", &moved, &b.0.lse, 1e-5);
        let tolerance = if element == ElementType::F32 {
            1e-5
        } else {
            2e-2
        };
        close("out", &a.0.out, &b.0.out, tolerance);
    }
}
