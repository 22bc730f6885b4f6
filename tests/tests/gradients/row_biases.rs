//! Gradients of biases that all keys share: each is a sum of the LSE's gradients, whatever the pairs are.

use flash_dma_tests::prelude::*;

every_engine!(
    without_a_gradient_of_the_lse_it_is_zero: of_each_shape(false),
    it_is_the_sum_of_the_gradients_of_the_lse_of_rows_that_see_keys: of_each_shape(true),
    options_that_change_the_other_gradients_do_not_change_it,
    long_sums_are_as_exact,
);

/// Two sequences of two groups, with more queries than keys: under causal masking the first see nothing.
const SIZES: [usize; 6] = [2, 4, 2, 70, 50, 64];

/// All shapes of a bias that all keys share.
fn shapes([batch, q_heads, kv_heads, q_len, ..]: [usize; 6]) -> Vec<[usize; 4]> {
    let mut shapes = Vec::new();
    for batch in [1, batch] {
        for heads in [1, kv_heads, q_heads] {
            shapes.extend([q_len, 1].map(|queries| [batch, heads, queries, 1]));
        }
    }
    shapes.dedup();
    shapes
}

/// The gradient of a bias, and the sum of the absolute values of its terms.
fn expected(inputs: &MaskedInputs, grad_lse: &[f64]) -> Vec<[f64; 2]> {
    let (p, bias) = (&inputs.problem, inputs.bias.as_ref().expect("a bias"));
    let lse = inputs.forward().lse.values;
    let mut sums = vec![[0.0; 2]; bias.values.len()];
    for (row, &grad) in grad_lse.iter().enumerate() {
        let (head, query) = (row / p.q_len, row % p.q_len);
        let (batch, head) = (head / p.q_heads, head % p.q_heads);
        if lse[row] > f64::NEG_INFINITY {
            let [sum, size] = &mut sums[bias.index(p, batch, head, query, 0)];
            *sum += grad;
            *size += grad.abs();
        }
    }
    sums
}

fn check<E: MaskedEngine>(engine: &E, case: &MaskedCase) {
    let inputs = case.inputs();
    let mut call = case.call(&inputs);
    let (_, grads) = engine.masked(&call).expect("a good case");
    let grad_lse = call.grad_lse.take();
    let expected = expected(&inputs, grad_lse.as_deref().unwrap_or(&[]));
    let actual = grads.bias.expect("it was asked for");
    for (n, (actual, [sum, size])) in actual.into_iter().zip(expected).enumerate() {
        let bound = 4.0 * f64::from(f32::EPSILON) * size;
        let error = (actual - sum).abs();
        assert!(
            error <= bound,
            "{} at {case:?}: dbias {n} is {actual:e} instead of {sum:e}",
            E::NAME
        );
    }
}

/// All shapes, with another mask each time.
fn cases<E: MaskedEngine>(engine: &E) -> Vec<MaskedCase> {
    let [batch, q_heads, kv_heads, q_len, k_len, _] = SIZES;
    let masks = [
        ([1, 1, q_len, k_len], Pattern::Random(0.03)),
        ([batch, kv_heads, q_len, 1], Pattern::Random(0.7)),
        ([batch, q_heads, 1, k_len], Pattern::Random(0.5)),
    ];
    let elements = [F32, Bf16, F16].into_iter();
    let mut elements = elements.filter(|&x| engine.supports(x)).cycle();
    let each = |(n, shape): (usize, [usize; 4])| {
        let case = MaskedCase::new(SIZES).causal(n % 2 == 0).bias(shape);
        let case = case.element(elements.next().expect("f32 is everywhere"));
        match masks.get(n % 4) {
            Some(&(shape, pattern)) => case.mask(shape, pattern),
            None => case,
        }
    };
    shapes(SIZES).into_iter().enumerate().map(each).collect()
}

fn of_each_shape<E: MaskedEngine>(engine: &E, grad_lse: bool) {
    for mut case in cases(engine) {
        case.grad_lse = grad_lse;
        check(engine, &case);
    }
}

fn options_that_change_the_other_gradients_do_not_change_it<E: MaskedEngine>(engine: &E) {
    for element in [F32, Bf16] {
        let mut case = MaskedCase::new(SIZES).bias([1, 4, 70, 1]).element(element);
        case.options = case.options.with_softcap(3.0);
        case.options = case.options.with_dropout(Dropout::new(0.4, 9).unwrap());
        check(engine, &case);
    }
}

/// More queries than a kernel adds up one after the other.
fn long_sums_are_as_exact<E: MaskedEngine>(engine: &E) {
    let case = MaskedCase::new([1, 2, 1, 700, 9, 8]);
    for shape in [[1, 1, 1, 1], [1, 2, 1, 1], [1, 1, 700, 1]] {
        check(engine, &case.clone().bias(shape));
    }
}
