//! The grid of shapes of the reference's equivalence tests (1 sequence, 2 heads over 1, the 1024 keys of greatest
//! bias), forward and backward, with this project's tolerance instead of the reference's 95 % of the elements.
//!
//! The oracle takes longer than all engines together, so it runs once per case for all of them.

use core::cell::LazyCell;
use flash_dma_tests::masked::top_of_bias;
use flash_dma_tests::on_each_engine;
use flash_dma_tests::prelude::*;

static LENGTHS: [usize; 6] = [128, 256, 512, 1024, 2048, 4096];

macro_rules! grid {
    ($($name:ident: $dim:literal of $element:ident,)*) => {$(
        mod $name {
            lengths!(short, $dim, $element, &LENGTHS[..4]);
            lengths!(long, $dim, $element, &LENGTHS[4..5]);
            lengths!(longest, $dim, $element, &LENGTHS[5..]);
        }
    )*};
}

/// A test per masking.
macro_rules! lengths {
    ($name:ident, $dim:literal, $element:ident, $lengths:expr) => {
        mod $name {
            use super::super::*;

            #[test]
            fn causal() {
                check($dim, $element, true, $lengths);
            }

            #[test]
            fn full() {
                check($dim, $element, false, $lengths);
            }
        }
    };
}

// Kernels are generic over 16-bit types: one for each width. `contract::tensor_cores` has both at every width.
grid!(
    dim_32: 32 of Bf16,
    dim_64: 64 of F16,
    dim_96: 96 of Bf16,
    dim_128: 128 of Bf16,
    dim_192: 192 of F16,
    dim_256: 256 of Bf16,
);

/// The lengths that an engine runs in reasonable time. If a device has a better engine, its portable kernels, which
/// would double the compilation, run with one head dimension.
fn lengths<E: MaskedEngine>(_: &E, dim: usize) -> Vec<usize> {
    if E::NAME == "kernels_cuda_portable" && dim != 64 {
        return Vec::new();
    }
    let small = LENGTHS[..1].iter().filter(|_| dim == 32);
    let medium = if dim.is_multiple_of(64) && dim < 192 {
        3
    } else {
        2
    };
    // The oracle takes minutes for wide heads at the greatest length.
    let large = if dim <= 128 { 6 } else { 5 };
    E::cases(small, &LENGTHS[..medium], &LENGTHS[..large])
        .into_iter()
        .copied()
        .collect()
}

fn check(dim: usize, element: ElementType, causal: bool, lengths_here: &[usize]) {
    for &len in lengths_here {
        let mut wanted = false;
        on_each_engine!(|engine: &_| wanted |= lengths(engine, dim).contains(&len));
        if !wanted {
            eprintln!("skipped: the grid at {len} tokens of {dim} elements");
            continue;
        }
        // One value per key, or one per pair.
        let bias = match causal == (element == Bf16) {
            true => [1, 1, 1, len],
            false => [1, 1, len, len],
        };
        let mut case = MaskedCase::new([1, 2, 1, len, len, dim])
            .element(element)
            .causal(causal)
            .bias(bias);
        // Long sequences have enough elements.
        case.yardsticks = (512 / len as u64).min(3);
        let mut inputs = case.inputs();
        // The reference keeps 1024 keys, so all of them at short lengths: half of these, so that all are masked.
        inputs.visible = Some(top_of_bias(&inputs, 1024.min(len / 2)));
        let grads = case.gradients(&inputs);
        let expected = case.expected(&inputs, &grads);
        let others = LazyCell::new(|| case.others(&inputs, grads.lse.is_some()));
        on_each_engine!(|engine: &_| {
            if lengths(engine, dim).contains(&len) {
                case.check_expected(engine, &inputs, &grads, &expected, || others.clone());
            }
        });
    }
}
