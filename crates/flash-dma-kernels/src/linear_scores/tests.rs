//! Linear scores and the gradient of their directions against f64.

use super::{linear_scores, linear_scores_gradient};
use crate::testing::{Placement, client, read_f64, upload};
use flash_dma_problem::ElementType::{self, Bf16, F16, F32};
use flash_dma_reference::Rng;
use flash_dma_reference::round::round;

#[test]
fn both_directions_are_those_of_f64() {
    let client = client();
    // The last one has parts of more than the fewest tokens.
    let sizes = [
        [1, 1, 1, 1],
        [2, 5, 24, 2],
        [1, 37, 33, 3],
        [3, 20, 64, 8],
        [2, 4500, 8, 2],
    ];
    for element in [F32, F16, Bf16] {
        for [batch, len, width, heads] in sizes {
            let mut rng = Rng::new(len as u64);
            let mut random = |count: usize, element: ElementType| -> Vec<f64> {
                (0..count).map(|_| round(rng.normal(), element)).collect()
            };
            let tokens = random(batch * len * width, element);
            let directions = random(heads * width, F32);
            let grad = random(batch * heads * len, F32);
            let up = |values: &[f64], shape: &[usize], element| {
                upload(&client, values, shape, element, Placement::Contiguous)
            };
            let x = up(&tokens, &[batch, len, width], element);
            let shape = [batch, heads, len];
            let out = up(&vec![9.0; grad.len()], &shape, F32);
            let gradient = up(&vec![9.0; directions.len()], &[heads, width], F32);
            let d = up(&directions, &[heads, width], F32);
            linear_scores(&client, element, &x, &d, &out).unwrap();
            linear_scores_gradient(&client, element, &x, &up(&grad, &shape, F32), &gradient)
                .unwrap();

            let (mut exact, mut of_directions) =
                (vec![0.0; grad.len()], vec![0.0; directions.len()]);
            let (mut sizes, mut of_sizes) = (exact.clone(), of_directions.clone());
            for b in 0..batch {
                for h in 0..heads {
                    for t in 0..len {
                        let at = (b * heads + h) * len + t;
                        for c in 0..width {
                            let x = tokens[(b * len + t) * width + c];
                            exact[at] += x * directions[h * width + c];
                            sizes[at] += (x * directions[h * width + c]).abs();
                            of_directions[h * width + c] += x * grad[at];
                            of_sizes[h * width + c] += (x * grad[at]).abs();
                        }
                    }
                }
            }
            let out = read_f64(&client, out, F32);
            let gradient = read_f64(&client, gradient, F32);
            let all = (out.iter().zip(&exact).zip(&sizes))
                .chain(gradient.iter().zip(&of_directions).zip(&of_sizes));
            for ((actual, exact), size) in all {
                let error = (actual - exact).abs();
                let what = format!("{element} {batch} {len} {width} {heads}");
                assert!(
                    error <= 1e-6 * size + 1e-12,
                    "{what}: {actual}, not {exact}"
                );
            }
        }
    }
}
