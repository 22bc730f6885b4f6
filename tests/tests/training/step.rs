//! SwiGLU and the scores of a layer, forward and backward, against f64.

use burn::backend::Dispatch;
use burn::module::Param;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_flash_dma::ops::TrainingOps;
use burn_flash_dma::{linear, split_heads, swiglu, swiglu_linear};
use flash_dma_reference::round::round;
use flash_dma_tests::prelude::*;
use flash_dma_tests::tensors::{dtype, grad, load, values};

every_burn!(
    gates,
    gates_before_a_layer,
    scores_of_tokens,
    rows_of_tables,
    losses_without_all_logits,
    heads_side_by_side,
);

fn random(count: usize, scale: f64, element: ElementType, rng: &mut Rng) -> Vec<f64> {
    (0..count)
        .map(|_| round(rng.normal() * scale, element))
        .collect()
}

/// The element types to test: one of 16 bits where every kernel is compiled for seconds.
fn supported<B: Backend>(burn: &Burn<B>) -> impl Iterator<Item = ElementType> {
    let one = matches!(B::SIZE, Size::Small) && burn.supports(Bf16);
    let types = TYPES
        .into_iter()
        .filter(move |&element| !(one && element == F16));
    types.filter(|&element| burn.supports(element))
}

/// Half of the distance of neighbours, as a share of a number.
fn grain(element: ElementType) -> f64 {
    match element {
        F32 => 2f64.powi(-24),
        F16 => 2f64.powi(-11),
        Bf16 => 2f64.powi(-8),
    }
}

/// Adds a term to a sum, and its size to that of all terms.
fn add(sum: &mut [f64; 2], term: f64) {
    sum[0] += term;
    sum[1] += term.abs();
}

/// Sums in f32 are the exact ones, whose terms have these sizes in all.
fn agree(actual: &[f64], exact: &[[f64; 2]], what: &str) {
    assert_eq!(actual.len(), exact.len(), "{what}");
    for (actual, [exact, size]) in actual.iter().zip(exact) {
        let error = (actual - exact).abs();
        assert!(error <= 1e-6 * size + 1e-9, "{what}: {actual}, not {exact}");
    }
}

fn gates<B: Backend>(burn: &Burn<B>) {
    let shapes = match B::SIZE {
        Size::Large => vec![[1, 1, 1], [3, 7, 33], [2, 500, 2752]],
        _ => vec![[1, 1, 1], [3, 7, 33], [2, 5, 64]],
    };
    let device = burn.device().clone().autodiff();
    for shape in shapes {
        for element in supported(burn) {
            let mut rng = Rng::new(shape[2] as u64);
            let [gate, up, slope] = [8.0, 1.0, 1.0]
                .map(|scale| random(shape.iter().product(), scale, element, &mut rng));
            let [x, y] = [&gate, &up].map(|all| load(all, shape, element, &device).require_grad());
            let out = swiglu(x.clone(), y.clone());
            assert_eq!(out.dtype(), dtype(element));
            let slopes: Tensor<3> = load(&slope, shape, element, &device);
            let loss = out.clone().cast(DType::F32) * slopes.cast(DType::F32);
            let grads = loss.sum().backward();
            let actual = [values(out.inner()), grad(&x, &grads), grad(&y, &grads)];
            for at in 0..gate.len() {
                let (x, y, d) = (gate[at], up[at], slope[at]);
                let sigmoid = 1.0 / (1.0 + (-x).exp());
                let silu = x * sigmoid;
                let exact = [
                    silu * y,
                    d * y * (sigmoid + silu * (1.0 - sigmoid)),
                    d * silu,
                ];
                for (actual, exact) in actual.iter().map(|all| all[at]).zip(exact) {
                    let size = (1.0 + x.abs()) * y.abs().max(1.0) * d.abs().max(1.0);
                    // The smallest numbers of f16 have few digits.
                    let allowed = grain(element) * exact.abs() + 6e-7 * size + 6e-8;
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

/// Whatever learns, the layer after the gate gives the bits of the two operations, which have their own tests.
fn gates_before_a_layer<B: Backend>(burn: &Burn<B>) {
    let shapes = match B::SIZE {
        Size::Large => vec![[2, 7, 33, 17], [2, 500, 2752, 1024]],
        _ => vec![[2, 7, 33, 17]],
    };
    let device = burn.device().clone().autodiff();
    for [batch, len, hidden, d_out] in shapes {
        // The types of 16 bits take one path.
        for element in supported(burn).filter(|&element| element != F16) {
            let mut rng = Rng::new(hidden as u64);
            let mut next = |count| random(count, 1.0, element, &mut rng);
            let [gate, up] = [(); 2].map(|()| next(batch * len * hidden));
            let slope = next(batch * len * d_out);
            let (weight, bias) = (next(hidden * d_out), next(d_out));
            for learns in [0, 1, 3, 4, 7] {
                let [of_gate, of_up, of_weight] = [0, 1, 2].map(|bit| learns >> bit & 1 == 1);
                let run = |together: bool| {
                    let wide = |all: &[f64], learns| {
                        let x: Tensor<3> = load(all, [batch, len, hidden], element, &device);
                        x.set_require_grad(learns)
                    };
                    let (gate, up) = (wide(&gate, of_gate), wide(&up, of_up));
                    let mut layer: Linear = LinearConfig::new(hidden, d_out).init(&device);
                    let matrix: Tensor<2> = load(&weight, [hidden, d_out], F32, &device);
                    let row: Tensor<1> = load(&bias, [d_out], F32, &device);
                    layer.weight = Param::from_tensor(matrix.set_require_grad(of_weight));
                    layer.bias = Some(Param::from_tensor(row));
                    let out = match together {
                        true => swiglu_linear(gate.clone(), up.clone(), &layer),
                        false => linear(&layer, swiglu(gate.clone(), up.clone())),
                    };
                    let slope: Tensor<3> = load(&slope, [batch, len, d_out], element, &device);
                    let mut all = vec![Some(values(out.clone().inner()))];
                    if learns > 0 {
                        let grads = (out * slope).sum().backward();
                        all.extend([&gate, &up].map(|x| x.grad(&grads).map(values)));
                        all.push(layer.weight.grad(&grads).map(values));
                    }
                    all
                };
                let (together, apart) = (run(true), run(false));
                assert!(together == apart, "{element} {hidden}, {learns:03b} learn");
            }
        }
    }
}

/// Sums of losses, and their gradients, in parts that the tokens fill and that they do not.
fn losses_without_all_logits<B: Backend>(burn: &Burn<B>) {
    let sizes = match B::SIZE {
        Size::Large => vec![
            [70, 16, 10, 32],
            [300, 256, 1000, 128],
            [500, 64, 2048, 128],
        ],
        _ => vec![[70, 16, 10, 32], [33, 8, 5, 32], [4, 8, 5, 32]],
    };
    let device = burn.device().clone().autodiff();
    for [tokens, width, classes, rows] in sizes {
        for element in supported(burn) {
            let mut rng = Rng::new(tokens as u64);
            let x = random(tokens * width, 1.0, element, &mut rng);
            // Logits of the order of 1.
            let scale = (width as f64).sqrt().recip();
            let weight = random(width * classes, scale, F32, &mut rng);
            let weights = random(tokens, 1.0, F32, &mut rng);
            let targets: Vec<_> = (0..tokens).map(|at| (at * 7 + 3) % classes).collect();
            let factor = 0.3;
            let run = |by_rows| {
                let features: Tensor<2> = load(&x, [tokens, width], element, &device);
                let matrix: Tensor<2> = load(&weight, [width, classes], F32, &device);
                let (features, matrix) = (features.require_grad(), matrix.require_grad());
                let of_tokens: Tensor<1> = load(&weights, [tokens], F32, &device);
                let numbers: Vec<_> = targets.iter().map(|&class| class as i32).collect();
                let classes_of = TensorData::from(&numbers[..]);
                let classes_of = Tensor::<1, Int>::from_data(classes_of, &device);
                let sum = Dispatch::training_linear_losses(
                    features.clone().into_dispatch(),
                    matrix.clone().into_dispatch(),
                    classes_of.into_dispatch(),
                    of_tokens.into_dispatch(),
                    rows,
                    by_rows,
                );
                let sum = Tensor::<1>::from_dispatch(sum);
                let grads = (sum.clone() * factor).backward();
                assert_eq!(features.grad(&grads).unwrap().dtype(), dtype(element));
                assert_eq!(matrix.grad(&grads).unwrap().dtype(), DType::F32);
                [
                    values(sum.inner()),
                    grad(&features, &grads),
                    grad(&matrix, &grads),
                ]
            };

            let mut exact = [0.0; 2];
            let mut of_x = vec![[0.0; 2]; tokens * width];
            let mut of_weight = vec![[0.0; 2]; width * classes];
            let rounded: Vec<_> = weight.iter().map(|&w| round(w, element)).collect();
            for token in 0..tokens {
                let row = &x[token * width..][..width];
                let logit = |class: usize| {
                    let terms = row.iter().zip(rounded[class..].iter().step_by(classes));
                    round(terms.map(|(x, w)| x * w).sum(), element)
                };
                let logits: Vec<_> = (0..classes).map(logit).collect();
                let total: f64 = logits.iter().map(|logit| logit.exp()).sum();
                add(
                    &mut exact,
                    weights[token] * (total.ln() - logits[targets[token]]),
                );
                for (class, logit) in logits.iter().enumerate() {
                    let hit = f64::from(u8::from(class == targets[token]));
                    let d = factor * weights[token] * (logit.exp() / total - hit);
                    for feature in 0..width {
                        let at = feature * classes + class;
                        add(&mut of_x[token * width + feature], d * rounded[at]);
                        add(&mut of_weight[at], d * row[feature]);
                    }
                }
            }
            // Logits and their gradients are rounded to the type, a product of f32 perhaps to TF32.
            let rounding = match element {
                F32 => 4e-3,
                _ => 8.0 * grain(element),
            };
            let what = format!("{element} {tokens} {classes}");
            let near = |actual: &[f64], exact: &[[f64; 2]]| {
                assert_eq!(actual.len(), exact.len(), "{what}");
                for (actual, [exact, size]) in actual.iter().zip(exact) {
                    let error = (actual - exact).abs();
                    assert!(
                        error <= rounding * size + 1e-6,
                        "{what}: {actual}, not {exact}"
                    );
                }
            };
            let ways = match B::SIZE {
                Size::Large => vec![false, true],
                // Kernels for processors are compiled for seconds.
                _ => vec![element != F32],
            };
            for by_rows in ways {
                let [sum, of_features, of_matrix] = run(by_rows);
                near(&sum, &[exact]);
                near(&of_features, &of_x);
                near(&of_matrix, &of_weight);
            }
        }
    }
}

/// Nine heads are more than the kernels have sums for.
fn scores_of_tokens<B: Backend>(burn: &Burn<B>) {
    let sizes = match B::SIZE {
        Size::Large => vec![
            [2, 37, 33, 3],
            [1, 50, 40, 9],
            [2, 5000, 1024, 2],
            [1, 300, 2048, 8],
        ],
        _ => vec![[2, 37, 33, 3], [1, 50, 40, 9]],
    };
    let device = burn.device().clone().autodiff();
    for [batch, len, width, heads] in sizes {
        for element in supported(burn) {
            let mut rng = Rng::new(len as u64);
            let tokens = random(batch * len * width, 1.0, element, &mut rng);
            let directions = random(heads * width, 1.0, F32, &mut rng);
            let slope = random(batch * heads * len, 1.0, F32, &mut rng);
            let x = load(&tokens, [batch, len, width], element, &device).require_grad();
            let d = load(&directions, [heads, width], F32, &device).require_grad();
            let run = |x: &Tensor<3>, learn| {
                let [tokens, directions] = [x.clone().into_dispatch(), d.clone().into_dispatch()];
                let scores = Dispatch::training_scores(tokens, directions, learn);
                let scores = Tensor::<3>::from_dispatch(scores);
                let slopes: Tensor<3> = load(&slope, [batch, heads, len], F32, &device);
                let grads = (scores.clone() * slopes).sum().backward();
                (values(scores.inner()), grads)
            };
            let (scores, grads) = run(&x, false);
            assert!(grad(&x, &grads).iter().all(|&of_token| of_token == 0.0));
            // Tokens outside the graph.
            let (again, of_again) = run(&x.clone().detach().set_require_grad(false), false);
            assert_eq!(again, scores);
            assert_eq!(grad(&d, &of_again), grad(&d, &grads));
            // Tokens that learn; their products of a few terms may be those of TF32.
            let (again, of_again) = run(&x, true);
            assert_eq!(again, scores);
            assert_eq!(grad(&d, &of_again), grad(&d, &grads));
            let of_tokens = grad(&x, &of_again);
            for (at, of_token) in of_tokens.into_iter().enumerate() {
                let (b, t, c) = (at / width / len, at / width % len, at % width);
                let term = |h| slope[(b * heads + h) * len + t] * directions[h * width + c];
                let exact: f64 = (0..heads).map(term).sum();
                let size: f64 = (0..heads).map(|h| term(h).abs()).sum();
                let error = (of_token - exact).abs();
                let allowed = grain(element) * exact.abs() + 2e-3 * size;
                assert!(
                    error <= allowed,
                    "{element}, a token: {of_token}, not {exact}"
                );
            }

            let (mut exact, mut of_directions) = (
                vec![[0.0; 2]; slope.len()],
                vec![[0.0; 2]; directions.len()],
            );
            for (at, (sum, slope)) in exact.iter_mut().zip(&slope).enumerate() {
                let (b, h, t) = (at / len / heads, at / len % heads, at % len);
                let token = &tokens[(b * len + t) * width..][..width];
                let rows = directions[h * width..]
                    .iter()
                    .zip(&mut of_directions[h * width..]);
                for (x, (direction, of_direction)) in token.iter().zip(rows) {
                    add(sum, x * direction);
                    add(of_direction, x * slope);
                }
            }
            let actual = [(scores, exact), (grad(&d, &grads), of_directions)];
            for (actual, exact) in actual {
                let what = format!("{element} {batch} {len} {width} {heads}");
                agree(&actual, &exact, &what);
            }
        }
    }
}

/// The gradient of a table's rows, `[vocabulary, width]` in f32. The last ones are products in chunks of tokens on CubeCL's
/// runtimes, and additions at indices.
fn rows_of_tables<B: Backend>(burn: &Burn<B>) {
    let sizes = match B::SIZE {
        Size::Large => vec![
            [1, 1, 1],
            [700, 40, 33],
            [70_001, 1000, 64],
            [3000, 2000, 16],
        ],
        _ => vec![[1, 1, 1], [50, 11, 8]],
    };
    let device = burn.device().clone();
    for [count, vocabulary, width] in sizes {
        for element in supported(burn) {
            let mut rng = Rng::new(count as u64);
            let slopes = random(count * width, 1.0, element, &mut rng);
            let rows: Vec<_> = (0..count).map(|_| rng.below(vocabulary)).collect();
            let tokens = rows.iter().map(|&row| row as i64).collect();
            let tokens = Tensor::<1, Int>::from_data(TensorData::new(tokens, [count]), &device);
            let gradient: Tensor<2> = load(&slopes, [count, width], element, &device);
            let gradient = Dispatch::training_lookup_gradient(
                gradient.into_dispatch(),
                tokens.into_dispatch(),
                vocabulary,
            );
            let actual = values(Tensor::<2>::from_dispatch(gradient));
            let mut exact = vec![[0.0; 2]; vocabulary * width];
            for (row, slopes) in rows.iter().zip(slopes.chunks(width)) {
                for (sum, &slope) in exact[row * width..].iter_mut().zip(slopes) {
                    add(sum, slope);
                }
            }
            let what = format!("{element} {count} {vocabulary} {width}");
            agree(&actual, &exact, &what);
        }
    }
}

/// Gradients of parts, joined bit for bit: at the device's alignment, off it, and of transposed parts.
fn heads_side_by_side<B: Backend>(burn: &Burn<B>) {
    let device = burn.device().clone().autodiff();
    for (heads, width) in [([8, 2, 2], 128), ([4, 4, 8], 64), ([3, 1, 2], 24)] {
        for element in supported(burn) {
            let (batch, len, all) = (2, 5, heads.iter().sum());
            let mut rng = Rng::new(width as u64);
            let shape = [batch, len, all, width];
            let x: Tensor<4> = load(
                &vec![1.0; batch * len * all * width],
                shape,
                element,
                &device,
            );
            let x = x.require_grad();
            let (mut loss, mut exact) = (
                Tensor::<1>::zeros([1], &device),
                vec![0.0; x.shape().num_elements()],
            );
            let mut first = 0;
            for (part, heads) in split_heads(x.clone(), heads).into_iter().zip(heads) {
                // Heads before tokens, as attention has them.
                let slope = random(batch * heads * len * width, 1.0, element, &mut rng);
                for (at, slope) in slope.iter().enumerate() {
                    let (b, h, t, c) = (
                        at / width / len / heads,
                        at / width / len % heads,
                        at / width % len,
                        at % width,
                    );
                    exact[((b * len + t) * all + first + h) * width + c] = *slope;
                }
                let slopes: Tensor<4> = load(&slope, [batch, heads, len, width], element, &device);
                let terms = part.swap_dims(1, 2) * slopes;
                loss = loss + terms.cast(DType::F32).sum();
                first += heads;
            }
            assert_eq!(
                grad(&x, &loss.backward()),
                exact,
                "{element} {heads:?} {width}"
            );
        }
    }
}
