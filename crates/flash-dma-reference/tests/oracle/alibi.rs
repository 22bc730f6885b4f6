//! ALiBi in the oracle, compared with a bias.

use crate::{bits, masked, problem};
use flash_dma_problem::{AlibiSlopes, AttentionOptions, Dropout};
use flash_dma_reference::generate::{self, Scores};
use flash_dma_reference::masked::{Broadcast, MaskedInputs};

const SLOPES: [f32; 4] = [0.5, 0.0, 2.0, -0.125];

#[test]
fn it_is_a_bias_of_pairs_with_every_option_and_any_lengths() {
    let cases = [
        ([6, 6], true),
        ([3, 9], true),
        ([9, 3], true),
        ([4, 7], false),
    ];
    for ([q_len, k_len], causal) in cases {
        let options = AttentionOptions::new()
            .with_causal(causal)
            .with_softcap(1.5)
            .with_scale(0.7)
            .with_dropout(Dropout::new(0.2, 3).unwrap());
        let of = |options| problem([4, q_len, 8], [2, k_len], false, options);
        let alibi = options.with_alibi(AlibiSlopes::new(&SLOPES).unwrap());
        let (plain, alibi) = (of(options), of(alibi));
        // The definition, written out: with causal masking as `slope * (key - position)`.
        let values = (SLOPES.iter())
            .flat_map(|&slope| (0..q_len).flat_map(move |i| (0..k_len).map(move |j| (slope, i, j))))
            .map(|(slope, i, j)| {
                let relative = (j + q_len) as i32 - (i + k_len) as i32;
                let steps = if causal { relative } else { -relative.abs() };
                f64::from(slope) * f64::from(steps)
            });
        let bias = Broadcast {
            shape: [1, 4, q_len, k_len],
            values: values.collect(),
        };
        let draw = |p| generate::inputs(p, Scores::Normal, 1.0, 5);
        let by_bias = masked(&draw(plain), None, Some(bias));
        let by_slopes = masked(&draw(alibi), None, None);
        let (a, b) = (by_bias.forward(), by_slopes.forward());
        assert_eq!(bits(&a.out.values), bits(&b.out.values));
        assert_eq!(bits(&a.lse.values), bits(&b.lse.values));
        let (grad_out, grad_lse) = generate::gradients(&plain, 4);
        let backward = |inputs: &MaskedInputs| inputs.backward(&grad_out, Some(&grad_lse));
        let (a, b) = (backward(&by_bias), backward(&by_slopes));
        for (a, b) in [(a.q, b.q), (a.k, b.k), (a.v, b.v)] {
            assert_eq!(bits(&a.values), bits(&b.values));
        }
    }
}

#[test]
fn a_selection_does_not_depend_on_it() {
    let options = AttentionOptions::new().with_keep_window(3);
    // So steep that a query's whole weight is on its nearest selected key.
    let steep = options.with_alibi(AlibiSlopes::new(&[1000.0; 4]).unwrap());
    let inputs = |options| {
        let problem = problem([4, 9, 8], [2, 9], true, options);
        generate::inputs(problem, Scores::Normal, 1.0, 8)
    };
    let rows: Vec<usize> = (0..9).collect();
    let (plain, steep) = (inputs(options), inputs(steep));
    let (plain, steep) = (plain.probabilities(&rows), steep.probabilities(&rows));
    for (plain, steep) in plain.values.chunks(9).zip(steep.values.chunks(9)) {
        let nearest = plain.iter().rposition(|&p| p > 0.0);
        let nearest = nearest.expect("every row selects a key");
        assert!(steep[nearest] > 0.999, "{plain:?} {steep:?}");
    }
}
