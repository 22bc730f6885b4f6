//! Broadcasts: every shape of a mask with every shape of a bias, for every kind of group, and tensors that repeat in
//! memory by a stride of 0.

use super::kinds;
use flash_dma_tests::prelude::*;

every_engine!(
    without_groups: every_pair([2, 3, 3]),
    groups_of_two: every_pair([2, 4, 2]),
    groups_of_four: every_pair([2, 8, 2]),
    one_kv_head: every_pair([2, 3, 1]),
    one_alone,
    strides_of_zero,
    layouts,
);
matrix_engines!(on_tensor_cores, of_groups_on_tensor_cores);

/// All shapes that broadcast to `[batch, q_heads, q_len, k_len]`.
fn shapes([batch, q_heads, kv_heads, q_len, k_len, _]: [usize; 6]) -> Vec<[usize; 4]> {
    let mut shapes = Vec::new();
    for b in [1, batch] {
        for h in [1, kv_heads, q_heads] {
            for q in [1, q_len] {
                shapes.extend([1, k_len].map(|k| [b, h, q, k]));
            }
        }
    }
    shapes.sort_unstable();
    shapes.dedup();
    shapes
}

/// Every shape of a mask with every shape of a bias; on a slow device all pairs for one kv head, otherwise each with
/// one other.
fn every_pair<E: MaskedEngine>(engine: &E, [batch, q_heads, kv_heads]: [usize; 3]) {
    let sizes = [batch, q_heads, kv_heads, 19, 70, 8];
    let shapes = shapes(sizes);
    for (m, &mask) in shapes.iter().enumerate() {
        for (b, &bias) in shapes.iter().enumerate() {
            // All values of (m, b) are as often causal as not.
            let causal = (m + b).is_multiple_of(2);
            let few = E::SIZE == Size::Small && kv_heads > 1;
            if few && b != (5 * m + 3) % shapes.len() {
                continue;
            }
            let mut case = MaskedCase::new(sizes).causal(causal).bias(bias);
            case.grad_lse = b.is_multiple_of(3);
            case.mask(mask, Pattern::Random(0.6)).check(engine);
        }
    }
}

/// Every mask without a bias and every bias without a mask.
fn one_alone<E: MaskedEngine>(engine: &E) {
    for sizes in E::cases(
        [[2, 4, 2, 17, 66, 8]],
        [[2, 3, 3, 40, 70, 8], [2, 8, 1, 33, 150, 8]],
        [[2, 8, 2, 60, 190, 8]],
    ) {
        for (n, shape) in shapes(sizes).into_iter().enumerate() {
            let causal = n.is_multiple_of(2);
            let case = MaskedCase::new(sizes).causal(causal);
            case.clone().bias(shape).check(engine);
            case.mask(shape, Pattern::Random(0.4)).check(engine);
        }
    }
}

/// The pairs in a type and a head dimension of the tensor-core engines, over several tiles: on a GPU every pair.
fn on_tensor_cores<E: MaskedEngine>(engine: &E) {
    pairs_on_tensor_cores(engine, E::cases([], [[4, 2, 64]], []), false);
    pairs_on_tensor_cores(engine, E::cases([], [], [[4, 4, 64]]), true);
}

/// Each shape of a mask with one shape of a bias.
fn of_groups_on_tensor_cores<E: MaskedEngine>(engine: &E) {
    let heads = E::cases([], [[4, 1, 64]], [[8, 2, 64], [4, 2, 128]]);
    pairs_on_tensor_cores(engine, heads, false);
}

fn pairs_on_tensor_cores<E: MaskedEngine>(engine: &E, heads: Vec<[usize; 3]>, all: bool) {
    for (n, [q_heads, kv_heads, dim]) in heads.into_iter().enumerate() {
        let sizes = [2, q_heads, kv_heads, 35, 140, dim];
        let element = if dim == 64 { Bf16 } else { F16 };
        let shapes = shapes(sizes);
        for (m, &mask) in shapes.iter().enumerate() {
            for (b, &bias) in shapes.iter().enumerate() {
                if !all && b != (5 * m + 3 + n) % shapes.len() {
                    continue;
                }
                MaskedCase::new(sizes)
                    .element(element)
                    .causal((m + b + n).is_multiple_of(2))
                    .mask(mask, Pattern::Random(0.6))
                    .bias(bias)
                    .check(engine);
            }
        }
    }
}

/// A mask and a bias of full shape, keys and values of one head and queries of one sequence, each stored once.
fn strides_of_zero<E: MaskedEngine>(engine: &E) {
    let sizes = [2, 4, 2, 21, 70, 8];
    for (n, (mask, bias)) in [
        ([1, 1, 21, 70], [1, 1, 1, 70]),
        ([2, 1, 1, 70], [2, 4, 21, 1]),
        ([1, 4, 21, 1], [1, 1, 1, 1]),
        ([1, 1, 1, 70], [1, 4, 21, 70]),
    ]
    .into_iter()
    .enumerate()
    {
        let case = MaskedCase::new(sizes)
            .mask(mask, Pattern::Random(0.5))
            .bias(bias)
            .causal(n.is_multiple_of(2))
            .layout(Layout::Broadcast);
        let mut inputs = case.inputs();
        let full = [2, 4, 21, 70];
        inputs.visible = inputs
            .visible
            .as_ref()
            .map(|mask| expand(mask, &inputs, full));
        inputs.bias = inputs.bias.as_ref().map(|bias| expand(bias, &inputs, full));
        // The second sequence's queries are the first's; the second head's keys and values are the first's.
        let (q, kv) = (4 * 21 * 8, 70 * 8);
        inputs.q.copy_within(..q, q);
        for rows in [&mut inputs.k, &mut inputs.v] {
            rows.copy_within(..kv, kv);
            rows.copy_within(2 * kv..3 * kv, 3 * kv);
        }
        let call = case.call(&inputs);
        let stored = |raw: &flash_dma_tests::Raw| raw.values.len();
        assert_eq!(stored(&call.q), q);
        assert_eq!(stored(&call.k), 2 * kv);
        assert!(stored(&call.mask.expect("a mask")) <= mask.iter().product());
        assert!(stored(&call.bias.expect("a bias")) <= bias.iter().product());
        case.check_inputs(engine, &inputs);
    }
}

/// Writes a broadcast out to another shape.
fn expand<T: Copy>(x: &Broadcast<T>, inputs: &MaskedInputs, shape: [usize; 4]) -> Broadcast<T> {
    let [batch, heads, queries, keys] = shape;
    let mut values = Vec::new();
    for b in 0..batch {
        for h in 0..heads {
            for i in 0..queries {
                values.extend((0..keys).map(|j| x.values[x.index(&inputs.problem, b, h, i, j)]));
            }
        }
    }
    Broadcast { shape, values }
}

/// Rows of mask and bias that begin anywhere, heads outermost and innermost.
fn layouts<E: MaskedEngine>(engine: &E) {
    for layout in [Layout::Contiguous, Layout::Transposed, Layout::Padded] {
        for (element, dim) in kinds::<E>() {
            // A multiple of 32 keys: masks whose words are read whole, if their layout allows it.
            for k_len in [65, 96] {
                let case = MaskedCase::new([2, 4, 2, 18, k_len, dim])
                    .element(element)
                    .layout(layout)
                    .mask([2, 2, 18, k_len], Pattern::Random(0.5));
                case.clone().bias([2, 4, 18, k_len]).check(engine);
                case.causal(true).bias([2, 2, 1, k_len]).check(engine);
            }
        }
    }
}
