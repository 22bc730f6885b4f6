//! Random problems: sizes, shapes of mask and bias, patterns, types, layouts, options, and non-finite elements.

use flash_dma_tests::prelude::*;

every_engine!(
    first_part: part(0),
    second_part: part(1),
    sixth_part: part(5),
);

// Burn takes kernels of its own layouts, which a GPU compiles again: it runs three parts of the eight.
raw_engines!(
    third_part: part(2),
    fourth_part: part(3),
    fifth_part: part(4),
    seventh_part: part(6),
    eighth_part: part(7),
);

/// Every eighth problem: a device compiles minutes of kernels for all of them, and tests run side by side.
fn part<E: MaskedEngine>(engine: &E, first: u64) {
    let problems = E::cases([8], [56], []).iter().sum();
    for seed in (first..problems).step_by(8) {
        check(engine, seed);
    }
}

fn one<T: Copy>(rng: &mut Rng, of: &[T]) -> T {
    of[rng.below(of.len())]
}

fn random_case<E: MaskedEngine>(seed: u64, rng: &mut Rng) -> MaskedCase {
    // A head dimension, a type, or an option that a kernel is compiled for takes a device seconds.
    let (dims, types) = match E::SIZE {
        Size::Small => (vec![8], vec![F32]),
        Size::Medium => (vec![8, 16, 24, 40, 64, 96], vec![F32, F16, Bf16]),
        Size::Large => (vec![64], vec![Bf16]),
    };
    let longest = E::cases([90], [260], [700]).pop().unwrap_or(1);
    let groups: &[usize] = match E::SIZE {
        Size::Small | Size::Medium => &[1, 2, 3, 4, 7],
        Size::Large => &[1, 4, 7],
    };
    let (kv_heads, group) = (1 + rng.below(3), one(rng, groups));
    let lengths = [(); 2].map(|()| {
        let most = one(rng, &[1, 20, 100, longest]);
        1 + rng.below(most)
    });
    let [batch, q_heads, q_len, k_len] =
        [1 + rng.below(2), kv_heads * group, lengths[0], lengths[1]];
    let mut case = MaskedCase::new([batch, q_heads, kv_heads, q_len, k_len, one(rng, &dims)])
        .element(one(rng, &types))
        .causal(one(rng, &[true, false]))
        .layout(one(rng, &[Layout::Contiguous, Layout::Transposed]));
    case.seed = seed;
    case.yardsticks = 4;
    case.hidden = one(rng, &[true, false]);
    case.grad_lse = one(rng, &[true, false]);
    case.deviation = one(rng, &[1.0, 1.0, 0.1, 30.0]);
    case.options.softcap =
        one(rng, &[None, None, Some(3.0), Some(50.0)]).filter(|_| E::SIZE == Size::Medium);
    case.options.scale = one(rng, &[None, None, Some(0.3), Some(-0.2)]);
    case.options.deterministic = one(rng, &[true, false]);
    let rate = one(rng, &[None, None, None, Some(0.1), Some(0.6)]);
    case.options.dropout = rate.map(|rate| Dropout::new(rate, seed).expect("a rate"));
    case.options.alibi = (seed % 5 == 2).then(|| AlibiSlopes::standard(q_heads));
    let shape = |rng: &mut Rng| {
        [
            one(rng, &[1, batch]),
            one(rng, &[1, kv_heads, q_heads]),
            one(rng, &[1, q_len, q_len]),
            one(rng, &[1, k_len, k_len, k_len]),
        ]
    };
    if rng.below(5) > 0 {
        let window = 1 + rng.below(k_len);
        let pattern = match rng.below(7) {
            0 => Pattern::Random(0.02),
            1 => Pattern::Random(0.5),
            2 => Pattern::Random(0.98),
            3 => Pattern::Tiles(1 + rng.below(130), 1 + rng.below(130)),
            4 => Pattern::Tiles(16 << rng.below(4), 32 << rng.below(3)),
            5 => Pattern::Top(window),
            _ => Pattern::Window(window),
        };
        case = case.mask(shape(rng), pattern);
    }
    if rng.below(4) > 0 {
        case = case.bias(shape(rng));
    }
    case
}

fn check<E: MaskedEngine>(engine: &E, seed: u64) {
    let mut rng = Rng::new(seed.wrapping_mul(0x9e37_79b9));
    let case = random_case::<E>(seed, &mut rng);
    let mut inputs = case.inputs();
    let mut grads = case.gradients(&inputs);
    // A probability that is 0 only in the engine's type makes 0 * infinity where f64 has infinity.
    let bads = match case.element {
        F32 => &[f64::NAN, f64::INFINITY, f64::NEG_INFINITY][..],
        _ => &[f64::NAN],
    };
    let most = if case.deviation > 1.0 { 0 } else { 4 };
    for _ in 0..rng.below(9).saturating_sub(5).min(most) {
        let bad = one(&mut rng, bads);
        // An infinity in the gradient of `out` is one of either sign in the terms of dO . O, and one in their sum.
        let of_grads = rng.below(3) == 0;
        let bad = if of_grads { f64::NAN } else { bad };
        let bias = inputs.bias.as_mut().map(|bias| &mut bias.values);
        let of = match (of_grads, rng.below(4)) {
            (true, 0) => grads.lse.as_mut().unwrap_or(&mut inputs.v),
            (true, _) => &mut grads.out,
            (false, 0) => &mut inputs.q,
            (false, 1) => &mut inputs.k,
            (false, 2) => &mut inputs.v,
            (false, _) => bias.unwrap_or(&mut inputs.k),
        };
        let at = rng.below(of.len());
        of[at] = bad;
    }
    case.check_gradients(engine, &inputs, &grads);
}
