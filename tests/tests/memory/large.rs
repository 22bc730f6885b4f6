//! Problems whose tensors exceed 2^31 elements or whose sequences have half a million tokens, on sampled rows and keys;
//! and small ones, which show that the samples detect faults.

use super::window;
#[cfg(feature = "cuda")]
use flash_dma_problem::Problem;
use flash_dma_tests::large::check_pattern;
use flash_dma_tests::prelude::*;

kernel_engines!(patterns_are_the_same_on_the_device, small_samples);

/// Tests of the engines on tensor cores; the portable one would take minutes.
macro_rules! on_tensor_cores {
    ($($test:ident),* $(,)?) => {$(
        #[cfg(feature = "cuda")]
        mod $test {
            use flash_dma_tests::engine::shared;
            use flash_dma_tests::engines::{KernelsOnCuda, KernelsOnCudaMma};

            #[test]
            fn kernels_cuda() {
                super::$test(shared::<KernelsOnCuda>());
            }

            #[test]
            fn kernels_cuda_mma() {
                super::$test(shared::<KernelsOnCudaMma>());
            }
        }
    )*};
}

on_tensor_cores!(
    keys_and_queries_past_2_31_elements,
    dense_attention_past_2_31_elements,
    half_a_million_tokens,
);

fn patterns_are_the_same_on_the_device<T: Target>(kernels: &Kernels<T>) {
    check_pattern(kernels, 0..200);
}

fn small_samples<T: Target>(kernels: &Kernels<T>) {
    let (n, dim, element) = match T::SIZE {
        Size::Large if kernels.supports(Bf16) => (5000, 64, Bf16),
        _ => (70, 16, F32),
    };
    let (q, kv) = ([2, 4, n, dim], [2, 2, n, dim]);
    for options in [AttentionOptions::new(), window(n / 5)] {
        let scores = options.keep_window.is_some();
        kernels.check_sampled(&problem(q, kv, scores, element, &options));
    }
}

#[cfg(feature = "cuda")]
fn bf16([batch, q_heads, kv_heads, len]: [usize; 4], options: AttentionOptions) -> Problem {
    let (q, kv) = ([batch, q_heads, len, 128], [batch, kv_heads, len, 128]);
    let scores = options.keep_window.is_some();
    problem(q, kv, scores, Bf16, &options)
}

/// Every tensor of rows exceeds 2^31 elements and 2^32 bytes, and so do the sums of the gradients of keys.
#[cfg(feature = "cuda")]
fn keys_and_queries_past_2_31_elements<T: Target>(kernels: &Kernels<T>) {
    kernels.check_sampled(&bf16([33, 8, 8, 64 << 10], window(2048)));
}

#[cfg(feature = "cuda")]
fn dense_attention_past_2_31_elements<T: Target>(kernels: &Kernels<T>) {
    kernels.check_sampled(&bf16([9, 32, 8, 64 << 10], AttentionOptions::new()));
}

#[cfg(feature = "cuda")]
fn half_a_million_tokens<T: Target>(kernels: &Kernels<T>) {
    kernels.check_sampled(&bf16([1, 8, 2, 512 << 10], window(2048)));
}
