//! The products of `wgmma`, each form in isolation, against sums in f64. The operands are small whole numbers: every
//! product and every sum is exact in f32, so results compare with `==`.

use flash_dma_reference::round::round;
use flash_dma_tests::engines::KernelsOnCuda;
use flash_dma_tests::prelude::*;

/// Rows of both operands.
const ROWS: usize = 64;

/// Panels of 128, 64 and 32 bytes per row, alone and several: every head dimension that a kernel may have.
#[test]
fn columns_of_every_panel() {
    for columns in (16..=256).step_by(16) {
        for element in [Bf16, F16] {
            check(columns, element, false);
        }
    }
}

/// The same panels, copied by the tensor memory accelerator.
#[test]
fn boxes_of_every_panel() {
    for columns in (16..=256).step_by(16) {
        check(columns, Bf16, true);
    }
}

fn check(columns: usize, element: ElementType, boxes: bool) {
    let mut rng = Rng::new(columns as u64);
    let mut numbers = |len: usize, most: usize| -> Vec<f64> {
        (0..len)
            .map(|_| rng.below(2 * most + 1) as f64 - most as f64)
            .collect()
    };
    let a = numbers(ROWS * columns, 4);
    let b = numbers(ROWS * columns, 4);
    let sums = numbers(ROWS * columns, 1000);
    let engine = shared::<KernelsOnCuda>();
    let result = engine.products_alone(element, boxes, [&a, &b], &sums);
    let (products, results) = match result {
        Err(AttentionError::Unsupported { .. }) => {
            return skip::<KernelsOnCuda>("products of wgmma");
        }
        other => other.expect("refused"),
    };
    let dot = |x: &[f64], i: usize, y: &[f64], j: usize| -> f64 {
        let (x, y) = (&x[i * columns..][..columns], &y[j * columns..][..columns]);
        x.iter().zip(y).map(|(x, y)| x * y).sum()
    };
    let how = format!("{columns} columns of {element}, boxes: {boxes}");
    for i in 0..ROWS {
        for j in 0..ROWS {
            let at = i * ROWS + j;
            assert_eq!(
                products[at],
                dot(&a, i, &b, j),
                "a b^T at [{i}, {j}], {how}"
            );
            let transposed = products[ROWS * ROWS + at];
            assert_eq!(transposed, dot(&b, i, &a, j), "b a^T at [{i}, {j}], {how}");
        }
        for c in 0..columns {
            let weighted = |j: usize| round(dot(&a, i, &b, j), element) * b[j * columns + c];
            let expected = sums[i * columns + c] + (0..ROWS).map(weighted).sum::<f64>();
            let actual = results[i * columns + c];
            assert_eq!(actual, expected, "c + round(a b^T) b at [{i}, {c}], {how}");
        }
    }
}
