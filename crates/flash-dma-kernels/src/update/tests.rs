//! Updates against f64, at lengths that vectors divide and that they do not.

use super::{ParameterUpdate, adamw, add_squares, scale};
use crate::testing::{Placement, client, read_f64, upload};
use flash_dma_problem::{AdamWStep, ElementType, SQUARE_SUMS};
use flash_dma_reference::Rng;
use flash_dma_reference::round::round;

const ELEMENTS: [(ElementType, f64); 3] = [
    (ElementType::F32, 6e-8),
    (ElementType::F16, 5e-4),
    (ElementType::Bf16, 4e-3),
];
/// The last one takes every cube of the sums of squares more than once.
const SHAPES: [&[usize]; 5] = [&[1], &[7], &[3, 5, 8], &[64, 33], &[80, 100]];

fn random(rng: &mut Rng, shape: &[usize], element: ElementType) -> Vec<f64> {
    let count = shape.iter().product();
    (0..count).map(|_| round(rng.normal(), element)).collect()
}

#[test]
fn a_step_of_adamw_is_that_of_f64() {
    let client = client();
    for (element, grain) in ELEMENTS {
        let time = 10;
        let step = AdamWStep {
            rate: 0.01,
            beta_1: 0.9,
            beta_2: 0.95,
            epsilon: 1e-3,
            weight_decay: 0.1,
            time,
        };
        let factor = f64::from(0.7f32);
        let mut rng = Rng::new(1);
        // More than a launch takes, in vectors of several widths.
        let shapes = SHAPES.into_iter().chain([&[0][..]]).cycle().take(45);
        let old: Vec<_> = shapes
            .map(|shape| {
                let [p, g, m, mut v] = [(); 4].map(|()| random(&mut rng, shape, element));
                v.iter_mut().for_each(|v| *v = v.abs());
                (shape, [p, g, m, v])
            })
            .collect();
        let upload = |values: &[f64], shape: &[usize], element| {
            upload(&client, values, shape, element, Placement::Contiguous)
        };
        let updates = old.iter().enumerate().map(|(at, (shape, values))| {
            let elsewhere = || upload(&vec![9.0; values[0].len()], shape, element);
            let [parameter, gradient, moment_1, moment_2] = values
                .each_ref()
                .map(|values| upload(values, shape, element));
            ParameterUpdate {
                parameter,
                gradient,
                moment_1,
                moment_2,
                new: (at % 3 == 0).then(elsewhere),
            }
        });
        let updates: Vec<_> = updates.collect();
        let by = upload(&[factor], &[1], ElementType::F32);
        adamw(&client, element, &step, &updates, &by).unwrap();
        let [beta_1, beta_2] = [step.beta_1, step.beta_2].map(f64::from);
        for (update, (shape, [p, g, m, v])) in updates.into_iter().zip(old) {
            let read = |tensor| read_f64(&client, tensor, element);
            let new_p = match update.new {
                Some(new) => {
                    assert_eq!(read(update.parameter), p, "{element} {shape:?}");
                    read(new)
                }
                None => read(update.parameter),
            };
            assert_eq!(read(update.gradient), g, "{element} {shape:?}");
            let [new_m, new_v] = [update.moment_1, update.moment_2].map(read);
            for at in 0..p.len() {
                let g = g[at] * factor;
                let m = beta_1 * m[at] + (1.0 - beta_1) * g;
                let v = beta_2 * v[at] + (1.0 - beta_2) * g * g;
                let change = m
                    / (1.0 - beta_1.powi(time as i32))
                    / ((v / (1.0 - beta_2.powi(time as i32))).sqrt() + f64::from(step.epsilon));
                let decayed = p[at] * (1.0 - step.rate * f64::from(step.weight_decay));
                let exact = [decayed - step.rate * change, m, v];
                for (actual, exact) in [new_p[at], new_m[at], new_v[at]].into_iter().zip(exact) {
                    // A few roundings of f32 of terms up to the largest, and one of the result.
                    let allowed = grain * exact.abs() + 1e-6 * (1.0 + g * g);
                    let error = (actual - exact).abs();
                    assert!(
                        error <= allowed,
                        "{element} {shape:?} {at}: {actual}, not {exact}"
                    );
                }
            }
        }
    }
}

#[test]
fn scaled_gradients_are_rounded_once() {
    let client = client();
    for (element, _) in ELEMENTS {
        for shape in SHAPES {
            let x = random(&mut Rng::new(5), shape, element);
            let up = |values: &[f64], shape: &[usize], element| {
                upload(&client, values, shape, element, Placement::Contiguous)
            };
            let factor = f64::from(0.3f32);
            let out = up(&vec![9.0; x.len()], shape, element);
            let by = up(&[factor], &[1], ElementType::F32);
            scale(&client, element, &up(&x, shape, element), &by, &out).unwrap();
            let scaled = read_f64(&client, out, element);
            for (actual, x) in scaled.into_iter().zip(x) {
                let exact = round(f64::from((x * factor) as f32), element);
                assert_eq!(actual, exact, "{element} {shape:?}");
            }
        }
    }
}

#[test]
fn squares_add_up_over_several_gradients() {
    let client = client();
    for (element, _) in ELEMENTS {
        let sums = upload(
            &client,
            &[0.25; SQUARE_SUMS],
            &[SQUARE_SUMS],
            ElementType::F32,
            Placement::Contiguous,
        );
        let mut exact = 0.25 * SQUARE_SUMS as f64;
        let shapes = SHAPES.into_iter().chain([&[0][..]]).cycle().take(100);
        let xs = shapes.zip(0..).map(|(shape, seed)| {
            let x = random(&mut Rng::new(seed), shape, element);
            exact += x.iter().map(|x| x * x).sum::<f64>();
            upload(&client, &x, shape, element, Placement::Contiguous)
        });
        let xs: Vec<_> = xs.collect();
        add_squares(&client, element, &xs, &sums).unwrap();
        let all: f64 = read_f64(&client, sums, ElementType::F32).into_iter().sum();
        assert!(
            (all - exact).abs() < 1e-6 * exact,
            "{element}: {all}, not {exact}"
        );
    }
}
