//! Cubes of several units, as on a GPU, and of one unit.

use super::{ZohParameters, run};
use crate::testing::{client, contiguous, read_f64, strided, zeros};
use flash_dma_problem::{AttentionError, ElementType, TensorName};
use flash_dma_reference::Rng;
use flash_dma_reference::compare::{Exact, OUTPUT, compare};

/// `[batch, heads, len, head_dim]`.
type Shape = [usize; 4];

struct Inputs {
    shape: Shape,
    values: Vec<f32>,
    dt_proj: Vec<f32>,
    bias: Vec<f32>,
    a: Vec<f32>,
}

impl Inputs {
    fn random(shape: Shape) -> Self {
        let mut rng = Rng::new(shape.iter().sum::<usize>() as u64);
        let [_, heads, _, head_dim] = shape;
        let mut some = |len: usize| (0..len).map(|_| rng.normal() as f32).collect();
        Self {
            shape,
            values: some(shape.iter().product()),
            dt_proj: some(heads * heads * head_dim),
            bias: some(heads),
            a: some(heads),
        }
    }

    fn terms(&self, batch: usize, head: usize, token: usize) -> Vec<(f32, f32)> {
        let [_, heads, len, head_dim] = self.shape;
        let of_head = move |other: usize| {
            let value = ((batch * heads + other) * len + token) * head_dim;
            let weight = (head * heads + other) * head_dim;
            (0..head_dim).map(move |d| (self.values[value + d], self.dt_proj[weight + d]))
        };
        (0..heads).flat_map(of_head).collect()
    }

    /// The scores by definition, and in f32.
    fn scores(&self, biased: bool) -> (Exact, Vec<f64>) {
        let [batch, heads, len, _] = self.shape;
        let (mut values, mut magnitude, mut naive) = (Vec::new(), Vec::new(), Vec::new());
        for (b, h, n) in
            (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..len).map(move |n| (b, h, n))))
        {
            let bias = if biased { self.bias[h] } else { 0.0 };
            let terms = self.terms(b, h, n);
            let products = || terms.iter().map(|&(x, y)| f64::from(x) * f64::from(y));
            let step: f64 = products().sum::<f64>() + f64::from(bias);
            let softplus = step.max(0.0) + (-step.abs()).exp().ln_1p();
            let score = (f64::from(self.a[h]) * softplus).exp();
            let size = products().map(f64::abs).sum::<f64>() + f64::from(bias).abs();
            values.push(score);
            magnitude.push(score * (1.0 + f64::from(self.a[h]).abs() * size));
            let step = terms.iter().fold(0.0f32, |sum, (x, y)| sum + x * y) + bias;
            let softplus = step.max(0.0) + (-step.abs()).exp().ln_1p();
            naive.push(f64::from((self.a[h] * softplus).exp()));
        }
        (Exact { values, magnitude }, naive)
    }

    fn parameters(&self, biased: bool) -> ZohParameters {
        let [_, heads, _, head_dim] = self.shape;
        let client = client();
        ZohParameters {
            dt_proj: contiguous(&client, &self.dt_proj, &[heads, heads * head_dim]),
            bias: biased.then(|| contiguous(&client, &self.bias, &[heads])),
            a: contiguous(&client, &self.a, &[heads]),
            element: ElementType::F32,
        }
    }
}

fn check(shape: Shape, strides: Shape, biased: bool, units: usize) {
    let (client, inputs) = (client(), Inputs::random(shape));
    let [batch, heads, len, _] = shape;
    let values = strided(&client, &inputs.values, &shape, &strides);
    let out = zeros(&client, &[batch, heads, len]);
    let element = ElementType::F32;
    let parameters = inputs.parameters(biased);
    run(&client, &values, element, &parameters, &out, units).expect("good inputs");
    let actual = read_f64(&client, out, element);
    let (exact, naive) = inputs.scores(biased);
    let shape = [batch, heads, len];
    compare("scores", &shape, &actual, &exact, &naive, element, OUTPUT)
        .unwrap_or_else(|failure| panic!("{shape:?} {strides:?}: {failure}"));
}

#[test]
fn scores_of_a_few_tokens_agree_with_the_definition() {
    check([2, 3, 2, 8], [48, 16, 8, 1], false, 4);
    // Token by token, with a gap.
    check([2, 2, 3, 8], [60, 8, 20, 1], true, 4);
    // No vectors, and more units than features.
    check([1, 1, 2, 5], [10, 10, 5, 1], true, 8);
    check([1, 4, 1, 36], [144, 36, 36, 1], false, 1);
}

#[test]
fn bad_scores_are_refused_by_name() {
    let (client, inputs) = (client(), Inputs::random([1, 2, 3, 4]));
    let values = strided(&client, &inputs.values, &inputs.shape, &[24, 12, 4, 1]);
    let out = zeros(&client, &[1, 2, 3]);
    let mut parameters = inputs.parameters(false);
    parameters.dt_proj.shape = [2, 7].into();
    let element = ElementType::F32;
    let error = run(&client, &values, element, &parameters, &out, 1);
    let refused = AttentionError::Shape {
        tensor: TensorName::DtProjection,
        axis: 1,
        expected: 8,
        actual: 7,
    };
    assert_eq!(error, Err(refused));
}
