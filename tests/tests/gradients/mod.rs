//! Gradients compared with the oracle where masks and biases need separate kernels, and their further properties.

mod alibi;
mod dropout;
mod hidden;
mod large_logits;
mod leave_one_out;
mod long_rows;
mod masks;
mod pair_terms;
mod pairs;
#[cfg(feature = "burn")]
mod rank_and_bias;
mod row_biases;
mod runners_up;
mod selections;
#[cfg(feature = "burn")]
mod self_check;

use flash_dma_tests::prelude::*;

/// Lengths off every tile, fewer than a tile and several of both passes, with the option of causal masking: each
/// problem is one variant of the kernels, which take longer to compile than to run.
fn problems<E: MaskedEngine>() -> Vec<MaskedCase> {
    let sizes = E::cases(
        [[1, 2, 1, 33, 100, 64]],
        [[1, 4, 1, 150, 200, 64], [2, 2, 2, 100, 130, 128]],
        [
            [1, 4, 2, 129, 200, 128],
            [1, 8, 1, 333, 330, 64],
            [2, 6, 2, 70, 257, 128],
        ],
    );
    let case = |(n, sizes): (usize, [usize; 6])| {
        let case = MaskedCase::new(sizes).element([Bf16, F16][n % 2]);
        case.causal(n != 1)
    };
    sizes.into_iter().enumerate().map(case).collect()
}

/// Every second problem, starting at `first`, if a device compiles kernels for each.
fn half_of_problems<E: MaskedEngine>(first: usize) -> impl Iterator<Item = MaskedCase> {
    let step = if E::SIZE < Size::Large { 1 } else { 2 };
    problems::<E>()
        .into_iter()
        .skip(first * (step - 1))
        .step_by(step)
}

/// Groups of heads, several tiles of queries and of keys, lengths off every tile, more queries than keys.
fn groups<E: MaskedEngine>() -> Vec<MaskedCase> {
    let sizes = E::cases(
        [[2, 4, 2, 20, 30, 64]],
        [[2, 4, 2, 150, 200, 64]],
        [[2, 4, 2, 301, 270, 64], [2, 3, 3, 130, 517, 64]],
    );
    let case = |sizes| MaskedCase::new(sizes).element(Bf16).causal(true);
    sizes.into_iter().map(case).collect()
}
