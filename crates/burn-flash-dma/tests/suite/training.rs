//! Parts of a training step, against f64 and against Burn's counterparts.

use crate::case::{data, grad, ints, loss, size, values, within};
use burn::module::{Module, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Distribution, FloatDType, Int, Tensor};
use burn_flash_dma::train::{clip_gradients, cross_entropy, embed, token_losses};

/// Two parameters, one of which may occur twice.
#[derive(Module, Debug)]
struct Pair {
    first: Linear,
    second: Linear,
    again: Linear,
}

impl Pair {
    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(device);
        let (first, second) = (linear(3, 4), linear(5, 2));
        Self {
            again: second.clone(),
            first,
            second,
        }
    }

    fn gradients(&self, scale: f32, dtype: FloatDType) -> (GradientsParams, Vec<f64>) {
        let mut gradients = GradientsParams::new();
        let mut all = Vec::new();
        for (linear, seed) in [(&self.first, 1), (&self.second, 2)] {
            let shape = linear.weight.dims();
            let end = seed + shape.iter().product::<usize>() as i64;
            let numbers = Tensor::<1, Int>::arange(seed..end, &Device::flex());
            let gradient = (numbers.float().reshape(shape) * 0.7).sin() * scale;
            let gradient = gradient.cast(dtype);
            all.extend(values(gradient.clone()));
            gradients.register(linear.weight.id, gradient);
        }
        (gradients, all)
    }

    fn values(&self, gradients: &GradientsParams) -> Vec<f64> {
        let of = |linear: &Linear| values(gradients.get::<2>(linear.weight.id).expect("kept"));
        [of(&self.first), of(&self.second)].concat()
    }
}

#[test]
fn gradients_are_clipped_by_the_norm_of_all_of_them() {
    let model = Pair::new(&Device::flex().autodiff());
    for (dtype, tolerance) in [(FloatDType::F32, 4e-7), (FloatDType::BF16, 0.5 / 128.0)] {
        for scale in [0.1, 30.0, 1e4] {
            let (mut gradients, before) = model.gradients(scale, dtype);
            let norm = clip_gradients(&model, &mut gradients, 2.0);
            let exact = before.iter().map(|g| g * g).sum::<f64>().sqrt();
            let norm = norm.into_scalar::<f64>();
            assert!((norm - exact).abs() < 1e-6 * exact, "{norm} is not {exact}");
            let factor = (2.0 / (exact + 1e-6)).min(1.0);
            let after = model.values(&gradients);
            for (after, before) in after.iter().zip(&before) {
                let error = (after - before * factor).abs();
                let near = error <= tolerance * (before * factor).abs();
                assert!(near, "{after} is not {before} times {factor}");
                let stays = factor < 1.0 || after == before;
                assert!(stays, "a short gradient stays as it is");
            }
            let kept = gradients.get::<2>(model.first.weight.id).expect("kept");
            assert_eq!(kept.dtype(), DType::from(dtype));
        }
    }
}

#[test]
fn parameters_without_gradients_are_left_out_of_the_norm() {
    let model = Pair::new(&Device::flex().autodiff());
    let mut gradients = GradientsParams::new();
    let norm = clip_gradients(&model, &mut gradients, 1.0);
    assert_eq!(norm.into_scalar::<f64>(), 0.0);
    let threes = Tensor::<2>::full([5, 2], 3.0, &Device::flex());
    gradients.register(model.second.weight.id, threes);
    let norm = clip_gradients(&model, &mut gradients, 1.0);
    assert!((norm.into_scalar::<f64>() - 90f64.sqrt()).abs() < 1e-5);
    assert_eq!(gradients.len(), 1);
}

#[test]
#[should_panic(expected = "a norm of 0 cannot be kept")]
fn a_norm_of_zero_is_refused() {
    let model = Pair::new(&Device::flex().autodiff());
    let _ = clip_gradients(&model, &mut GradientsParams::new(), 0.0);
}

const WIDTH: usize = 5;

fn table(vocabulary: usize, dtype: FloatDType) -> Embedding {
    let embedding = EmbeddingConfig::new(vocabulary, WIDTH).init(&Device::flex().autodiff());
    let weight = embedding.weight.val().cast(dtype).detach();
    Embedding {
        weight: Param::from_tensor(weight.require_grad()),
    }
}

/// Tokens, most of them the same two.
fn tokens(batch: usize, len: usize, vocabulary: usize) -> Tensor<2, Int> {
    let token = |n: usize| match n % 8 {
        0 => n * 31 % vocabulary,
        k => k % 2,
    };
    let all = (0..batch * len).map(|n| token(n) as i32);
    Tensor::from_data(data(all, [batch, len]), &Device::flex().autodiff())
}

/// Gradients of the rows, about 1 and of few bits, so that every type here holds them.
fn slopes(batch: usize, len: usize) -> Tensor<3> {
    let count = (batch * len * WIDTH) as i64;
    let numbers = Tensor::<1, Int>::arange(0..count, &Device::flex().autodiff());
    let slopes = numbers.remainder_scalar(7).float() * 0.125 + 0.75;
    slopes.reshape([batch, len, WIDTH])
}

/// Gradient of a table in f64.
fn exact(tokens: &Tensor<2, Int>, slopes: &[f64], vocabulary: usize) -> Vec<f64> {
    let mut table = vec![0.0; vocabulary * WIDTH];
    for (token, row) in ints(tokens.clone()).into_iter().zip(slopes.chunks(WIDTH)) {
        for (sum, slope) in table[token as usize * WIDTH..].iter_mut().zip(row) {
            *sum += slope;
        }
    }
    table
}

fn worst(actual: &[f64], expected: &[f64]) -> f64 {
    let relative = |(a, e): (&f64, &f64)| (a - e).abs() / e.abs().max(1.0);
    actual
        .iter()
        .zip(expected)
        .map(relative)
        .fold(0.0, f64::max)
}

/// Gradient of the table of these rows, from their gradients `slopes`.
fn table_gradient(embedding: &Embedding, rows: Tensor<3>, slopes: Tensor<3>) -> Tensor<2> {
    let slopes = slopes.cast(rows.dtype());
    let grads = loss(rows, slopes).backward();
    let weight = embedding.weight.val();
    weight.grad(&grads).expect("the table is trained")
}

#[test]
fn rows_are_those_of_the_table_and_their_gradient_is_summed_in_f32() {
    // One segment, several, a number of tokens that no segments divide, and additions at indices.
    for (batch, len, vocabulary) in [(2, 40, 11), (2, 2048, 256), (1, 1031, 256), (3, 700, 2000)] {
        for (stored, computed) in [
            (FloatDType::F32, FloatDType::F32),
            (FloatDType::F32, FloatDType::BF16),
            (FloatDType::BF16, FloatDType::BF16),
        ] {
            let case = format!("{batch} x {len} of {vocabulary}, {stored:?} as {computed:?}");
            let (embedding, tokens) = (table(vocabulary, stored), tokens(batch, len, vocabulary));
            let rows = embed(&embedding, tokens.clone(), computed);
            assert_eq!(rows.dtype(), DType::from(computed), "{case}");
            let by_burn = embedding.forward(tokens.clone()).cast(computed);
            assert_eq!(values(rows.clone()), values(by_burn), "{case}");

            let slopes = slopes(batch, len);
            let gradient = table_gradient(&embedding, rows, slopes.clone());
            assert_eq!(gradient.dtype(), DType::from(stored), "{case}");
            let exact = exact(&tokens, &values(slopes), vocabulary);
            let error = worst(&values(gradient), &exact);
            let bound = match stored {
                FloatDType::F32 => 1e-6,
                _ => 1.0 / 256.0,
            };
            assert!(error <= bound, "{case}: {error}");
        }
    }
}

#[test]
fn additions_in_bf16_lose_what_a_sum_in_f32_keeps() {
    let (embedding, tokens) = (table(256, FloatDType::BF16), tokens(2, 2048, 256));
    let (slopes, dtype) = (slopes(2, 2048), FloatDType::BF16);
    let exact = exact(&tokens, &values(slopes.clone()), 256);
    let error = |rows: Tensor<3>| {
        let gradient = table_gradient(&embedding, rows, slopes.clone());
        worst(&values(gradient), &exact)
    };
    let ours = error(embed(&embedding, tokens.clone(), dtype));
    let burn = error(embedding.forward(tokens));
    assert!(burn > 0.1 && ours < burn / 20.0, "{ours} and Burn's {burn}");
}

#[test]
fn no_tokens_are_no_rows() {
    let none = Tensor::zeros([2, 0], &Device::flex().autodiff());
    let rows = embed(&table(4, FloatDType::F32), none, FloatDType::BF16);
    assert_eq!((rows.dims(), rows.dtype()), ([2, 0, WIDTH], DType::BF16));
}

fn logits(dtype: FloatDType) -> (Tensor<2>, Tensor<1, Int>) {
    let device = Device::flex().autodiff();
    let logits = Tensor::<2>::random([37, 19], Distribution::Normal(0.0, 4.0), &device);
    let targets = data((0..37).map(|n| n * 7 % 19), [37]);
    let targets = Tensor::from_data(targets, &device);
    (logits.cast(dtype).detach().require_grad(), targets)
}

/// Losses and the gradient of their mean, in f64.
fn exact_losses(logits: &[f64], targets: &[i64]) -> (Vec<f64>, Vec<f64>) {
    let classes = logits.len() / targets.len();
    let (mut losses, mut gradient) = (Vec::new(), Vec::new());
    for (row, &target) in logits.chunks(classes).zip(targets) {
        let sum: f64 = row.iter().map(|z| z.exp()).sum();
        losses.push(sum.ln() - row[target as usize]);
        let share = |(class, z): (usize, &f64)| {
            let hit = f64::from(u8::from(class == target as usize));
            (z.exp() / sum - hit) / targets.len() as f64
        };
        gradient.extend(row.iter().enumerate().map(share));
    }
    (losses, gradient)
}

#[test]
fn the_loss_and_its_gradient_are_those_of_the_formula() {
    for (dtype, rounding) in [(FloatDType::F32, 2e-6), (FloatDType::BF16, 1.0 / 256.0)] {
        let (logits, targets) = logits(dtype);
        let (exact, slopes) = exact_losses(&values(logits.clone()), &ints(targets.clone()));
        let losses = values(token_losses(logits.clone(), targets.clone()));
        assert!(worst(&losses, &exact) < 2e-6, "{dtype:?}");

        let loss = cross_entropy(logits.clone(), targets);
        assert_eq!((loss.dims(), loss.dtype()), ([1], DType::F32));
        let grads = loss.backward();
        let mean = exact.iter().sum::<f64>() / 37.0;
        assert!((loss.into_scalar::<f64>() - mean).abs() < 2e-6 * mean);
        let gradient = logits.grad(&grads).expect("the logits are tracked");
        assert_eq!(gradient.dtype(), DType::from(dtype));
        for (actual, expected) in values(gradient).iter().zip(&slopes) {
            let near = (actual - expected).abs() <= rounding * expected.abs() + 1e-8;
            assert!(near, "{actual} is not {expected}");
        }
    }
}

#[test]
fn the_loss_is_burns() {
    let (logits, targets) = logits(FloatDType::F32);
    let burn = CrossEntropyLossConfig::new().init(&logits.device());
    let [ours, theirs] = [
        cross_entropy(logits.clone(), targets.clone()),
        burn.forward(logits.clone(), targets.clone()),
    ];
    let [a, b] = [&ours, &theirs].map(|loss| loss.clone().into_scalar::<f64>());
    assert!((a - b).abs() < 1e-6 * b, "{a} is not {b}");
    let (_, exact) = exact_losses(&values(logits.clone()), &ints(targets.clone()));
    let error = |loss: Tensor<1>| {
        let errors = grad(&logits, &loss.backward()).into_iter().zip(&exact);
        errors.map(|(g, e)| (g - e).abs()).fold(0.0, f64::max)
    };
    let [ours, theirs] = [ours, theirs].map(error);
    assert!(ours <= 3.0 * theirs, "{ours}, Burn's {theirs}");
    // Large logits do not overflow.
    let large = token_losses(logits.clone().detach() * 1e3, targets);
    assert!(values(large).iter().all(|loss| loss.is_finite()));
}

#[test]
#[should_panic(expected = "the number of targets")]
fn targets_of_other_tokens_are_refused() {
    let (logits, targets) = logits(FloatDType::F32);
    let _ = cross_entropy(logits, targets.narrow(0, 0, 36));
}

/// Kernels and fusion give the same.
#[cfg(all(feature = "cpu", feature = "fusion"))]
#[test]
fn kernels_compute_the_same() {
    let (vocabulary, batch, len) = (40, 2, 600);
    let by = |device: Device| {
        let device = device.autodiff();
        let numbers = Tensor::<1, Int>::arange(0..(vocabulary * WIDTH) as i64, &device);
        let weight = numbers.float().sin().reshape([vocabulary, WIDTH]);
        let embedding = Embedding {
            weight: Param::from_tensor(weight.detach().require_grad()),
        };
        let tokens = tokens(batch, len, vocabulary).into_data();
        let tokens = Tensor::<2, Int>::from_data(tokens, &device);
        let rows = embed(&embedding, tokens.clone(), FloatDType::BF16);
        // The rows are the logits: products of any other kind take minutes to compile here.
        let targets = tokens.remainder_scalar(WIDTH as i64).flatten(0, 1);
        let loss = cross_entropy(rows.flatten(0, 1), targets);
        let grads = loss.backward();
        let mut gradients = GradientsParams::from_grads(grads, &embedding);
        let norm = clip_gradients(&embedding, &mut gradients, 0.1);
        let gradient = gradients.get::<2>(embedding.weight.id).expect("trained");
        [values(loss), values(norm), values(gradient)]
    };
    let _alone = crate::case::alone();
    for (flex, cube) in by(Device::flex()).iter().zip(by(Device::cpu())) {
        // One bf16 number that rounds the other way.
        within(&cube, flex, size(flex) / 256.0, "cube");
    }
}
