//! Equivalent problems.

use super::{Results, outputs, run};
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

/// Compares results by name, within the rounding of f32.
fn all_close(a: &Results, b: &Results) {
    for ((name, a), (other, b)) in a.iter().zip(b) {
        assert_eq!(name, other);
        let tolerance = match *name {
            "out" => 2e-6,
            "lse" => 4e-6,
            _ => 1e-5,
        };
        close(name, a, b, tolerance);
    }
}

/// Scores of zero with every key kept are plain attention.
fn a_window_of_all_keys_is_a_key_bias<E: Engine>(engine: &E) {
    for case in [Case::new(40, 50), Case::new(40, 50).full()] {
        let mut scored = case.clone().window(50).inputs();
        let scores = scored.scores.as_mut().expect("the case has scores");
        scores.fill(0.0);
        let plain = Inputs {
            problem: case.plain().problem(),
            scores: None,
            ..scored.clone()
        };
        let [mut scored, plain] = [&scored, &plain].map(|inputs| run(engine, inputs));
        let of_scores = scored.pop();
        assert!(of_scores.is_some_and(|(name, _)| name == "dscores") && scored.len() == 5);
        all_close(&scored, &plain);
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
    let [mut own, permuted] = [&inputs, &permuted].map(|inputs| run(engine, inputs));
    for (name, values) in &mut own {
        match *name {
            "dk" | "dv" => *values = permute(values, dim),
            "dscores" => *values = permute(values, 1),
            _ => {}
        }
    }
    assert_eq!((own.len(), permuted.len()), (6, 6));
    all_close(&own, &permuted);
}

/// `out = sum_s exp(lse_s - lse) out_s` over the parts of the keys.
fn split_keys_merge_by_their_lse<E: Engine>(engine: &E) {
    let case = |k_len| Case::new(20, k_len).full().heads(1, 1).window(90);
    let (whole, dim) = (case(90).inputs(), case(90).head_dim);
    let parts = [0..31, 31..32, 32..90].map(|keys: std::ops::Range<usize>| {
        let take = |x: &[f64], size: usize| -> Vec<f64> {
            let heads = x.chunks(90 * size);
            heads
                .flat_map(|head| head[keys.start * size..keys.end * size].to_vec())
                .collect()
        };
        let part = Inputs {
            problem: case(keys.len()).problem(),
            q: whole.q.clone(),
            k: take(&whole.k, dim),
            v: take(&whole.v, dim),
            scores: whole.scores.as_ref().map(|z| take(z, 1)),
        };
        outputs(engine, &part)
    });
    let whole = outputs(engine, &whole);
    for row in 0..whole.lse.len() {
        let lse = parts.iter().map(|p| p.lse[row].exp()).sum::<f64>().ln();
        close("lse", &[lse], &[whole.lse[row]], 2e-6);
        for at in row * dim..(row + 1) * dim {
            let of_part = |p: &Outputs| (p.lse[row] - lse).exp() * p.out[at];
            let out: f64 = parts.iter().map(of_part).sum();
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
        let [a, b] = [&inputs, &moved].map(|inputs| outputs(engine, inputs));
        let moved: Vec<f64> = a.lse.iter().map(|x| x + 8.0).collect();
        close("lse", &moved, &b.lse, 1e-5);
        let tolerance = if element == F32 { 1e-5 } else { 2e-2 };
        close("out", &a.out, &b.out, tolerance);
    }
}
