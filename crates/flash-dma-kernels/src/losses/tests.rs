//! Cross-entropy and its gradient against f64, among them rows of logits that are large, equal, masked or not finite.

use super::{LossRows, losses, losses_gradient};
use crate::testing::{Placement, client, contiguous, read_f64, upload};
use flash_dma_problem::ElementType::{Bf16, F16, F32};
use flash_dma_reference::Rng;
use flash_dma_reference::round::round;

#[test]
fn both_directions_are_those_of_f64() {
    let client = client();
    for (element, grain) in [(F32, 6e-8), (F16, 5e-4), (Bf16, 4e-3)] {
        for [rows, classes] in [[1, 1], [3, 7], [20, 33], [9, 1000], [130, 256]] {
            let mut rng = Rng::new(classes as u64);
            let mut logits = Vec::new();
            let mut targets = Vec::new();
            for row in 0..rows {
                // Offsets leave a softmax as it is; a logit of −∞ has no share.
                let (scale, offset) =
                    [(1.0, 0.0), (30.0, 0.0), (0.0, 5.0), (1.0, -20000.0)][row % 4];
                let logit = |_| round(offset + scale * rng.normal(), element);
                let mut all: Vec<f64> = (0..classes).map(logit).collect();
                if row % 5 == 3 && classes > 1 {
                    all[row % classes] = f64::NEG_INFINITY;
                }
                let finite = (0..classes).filter(|&class| all[class].is_finite());
                let finite: Vec<_> = finite.collect();
                targets.push(finite[rng.below(finite.len())]);
                logits.extend(all);
            }
            let grad: Vec<f64> = (0..rows).map(|_| round(rng.normal(), F32)).collect();
            let up = |values: &[f64], shape: &[usize], element| {
                upload(&client, values, shape, element, Placement::Contiguous)
            };
            let x = up(&logits, &[rows, classes], element);
            let words: Vec<i32> = targets.iter().map(|&target| target as i32).collect();
            let words = contiguous(&client, &words, &[rows]);
            let normaliser = up(&vec![9.0; rows * 2], &[rows, 2], F32);
            let (out, gradient) = (
                up(&vec![9.0; rows], &[rows], F32),
                up(&vec![9.0; logits.len()], &[rows, classes], element),
            );
            let tensors = LossRows {
                element,
                logits: x.clone(),
                targets: words,
                normaliser,
            };
            let d = up(&grad, &[rows], F32);
            losses(&client, &tensors, &out).unwrap();
            losses_gradient(&client, &tensors, &d, Some(&gradient)).unwrap();
            losses_gradient(&client, &tensors, &d, None).unwrap();
            let out = read_f64(&client, out, F32);
            let gradient = read_f64(&client, gradient, element);
            assert_eq!(read_f64(&client, x, element), gradient, "in place");
            for row in 0..rows {
                let all = &logits[row * classes..][..classes];
                let greatest = all.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = all.iter().map(|x| (x - greatest).exp()).sum();
                let exact = greatest - all[targets[row]] + sum.ln();
                let error = (out[row] - exact).abs();
                let what = format!("{element} {rows} {classes}, row {row}");
                // The difference and the logarithm are each rounded once.
                let allowed = 2e-7 * (exact.abs() + sum.ln() + 1.0);
                assert!(error <= allowed, "{what}: {}, not {exact}", out[row]);
                for (class, x) in all.iter().enumerate() {
                    let share = (x - greatest - sum.ln()).exp();
                    let hit = f64::from(u8::from(class == targets[row]));
                    let exact = (share - hit) * grad[row];
                    let actual = gradient[row * classes + class];
                    // An exponent's rounding is a share of its size; f16 has no small numbers of full length.
                    let of_share = 1e-6 * share * (1.0 + (x - greatest).abs().min(100.0));
                    let allowed = grain * exact.abs() + (of_share + 1e-7) * grad[row].abs() + 3e-8;
                    let error = (actual - exact).abs();
                    assert!(error <= allowed, "{what} {class}: {actual}, not {exact}");
                }
            }
        }
    }
}

#[test]
fn rows_without_a_softmax_and_classes_that_do_not_exist_have_a_loss_of_nan() {
    let client = client();
    let logits = [
        [0.0, f64::NAN, 1.0],
        [0.0, f64::INFINITY, 1.0],
        [f64::NEG_INFINITY; 3],
        [0.0, 1.0, 2.0],
        [0.0, 1.0, 2.0],
        [0.0, 1.0, 2.0],
    ];
    let (rows, element) = (logits.len(), F32);
    let up = |values: &[f64], shape: &[usize]| {
        upload(&client, values, shape, element, Placement::Contiguous)
    };
    let out = up(&vec![9.0; rows], &[rows]);
    let tensors = LossRows {
        element,
        logits: up(logits.as_flattened(), &[rows, 3]),
        targets: contiguous(&client, &[0, 0, 0, 3, -1, 2], &[rows]),
        normaliser: up(&vec![9.0; rows * 2], &[rows, 2]),
    };
    losses(&client, &tensors, &out).unwrap();
    let is_nan: Vec<_> = (read_f64(&client, out, element).iter())
        .map(|loss| loss.is_nan())
        .collect();
    assert_eq!(is_nan, [true, true, true, true, true, false]);
}
