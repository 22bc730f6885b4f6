//! ALiBi in the oracle: the bias that it is.

use crate::masked;
use flash_dma_problem::{AlibiSlopes, AttentionOptions, Dropout, ElementType, Problem};
use flash_dma_reference::Exact;
use flash_dma_reference::generate::{self, Scores};
use flash_dma_reference::masked::{Broadcast, MaskedInputs};

const SLOPES: [f32; 4] = [0.5, 0.0, 2.0, -0.125];

fn problem([q_len, k_len]: [usize; 2], scores: bool, options: AttentionOptions) -> Problem {
    let (q, k) = ([2, 4, q_len, 8], [2, 2, k_len, 8]);
    let scores = scores.then_some(&k[..3]);
    Problem::new(&q, &k, &k, scores, ElementType::F32, &options).unwrap()
}

fn bits(x: &Exact) -> Vec<u64> {
    x.values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn it_is_a_bias_of_pairs_with_every_option_and_any_lengths() {
    let cases = [
        ([6, 6], true),
        ([3, 9], true),
        ([9, 3], true),
        ([4, 7], false),
    ];
    for (lengths, causal) in cases {
        let options = AttentionOptions::new()
            .with_causal(causal)
            .with_softcap(1.5)
            .with_scale(0.7)
            .with_dropout(Dropout::new(0.2, 3).unwrap());
        let plain = problem(lengths, false, options);
        let alibi = options.with_alibi(AlibiSlopes::new(&SLOPES).unwrap());
        let alibi = problem(lengths, false, alibi);
        let [q_len, k_len] = lengths.map(|len| len as i32);
        // The definition, written out: with causal masking as `slope * (key - position)`.
        let values = (SLOPES.iter())
            .flat_map(|&slope| (0..q_len).flat_map(move |i| (0..k_len).map(move |j| (slope, i, j))))
            .map(|(slope, i, j)| {
                let relative = j - (i + k_len - q_len);
                let steps = if causal { relative } else { -relative.abs() };
                f64::from(slope) * f64::from(steps)
            });
        let bias = Broadcast {
            shape: [1, 4, q_len as usize, k_len as usize],
            values: values.collect(),
        };
        let draw = |p| generate::inputs(p, Scores::Normal, 1.0, 5);
        let by_bias = masked(&draw(plain), None, Some(bias));
        let by_slopes = masked(&draw(alibi), None, None);
        let (a, b) = (by_bias.forward(), by_slopes.forward());
        assert_eq!(bits(&a.out), bits(&b.out));
        assert_eq!(bits(&a.lse), bits(&b.lse));
        let (grad_out, grad_lse) = generate::gradients(&plain, 4);
        let backward = |inputs: &MaskedInputs| inputs.backward(&grad_out, Some(&grad_lse));
        let (a, b) = (backward(&by_bias), backward(&by_slopes));
        for (a, b) in [(a.q, b.q), (a.k, b.k), (a.v, b.v)] {
            assert_eq!(bits(&a), bits(&b));
        }
    }
}

#[test]
fn a_selection_does_not_depend_on_it() {
    let options = AttentionOptions::new().with_keep_window(3);
    // So steep that a query's weight is all at its nearest selected key.
    let steep = options.with_alibi(AlibiSlopes::new(&[1000.0; 4]).unwrap());
    let inputs = |options| {
        let problem = problem([9, 9], true, options);
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
