//! Through Burn: the read returns the error, which has the operation's name.

#![cfg(any(feature = "cpu", feature = "cuda"))]

use burn::tensor::{DType, Tensor};
use burn_flash_dma::Attention;
use flash_dma_tests::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};

on_burn_cpu!(memory_that_runs_out);

#[cfg(feature = "cuda")]
mod burn_cuda {
    #[test]
    fn memory_that_runs_out() {
        super::memory_that_runs_out(flash_dma_tests::engine::shared::<
            flash_dma_tests::engines::BurnOnCuda,
        >());
    }
}

/// The text of a panic or of a failed read.
fn failure(call: impl FnOnce() -> Tensor<4>) -> String {
    // Without fusion the call panics; with it, the read fails.
    match catch_unwind(AssertUnwindSafe(|| call().try_into_data())) {
        Ok(result) => result.expect_err("a pebibyte was read").to_string(),
        Err(panic) => match panic.downcast::<String>() {
            Ok(text) => *text,
            Err(_) => panic!("a panic without a text"),
        },
    }
}

fn memory_that_runs_out<B: Backend>(burn: &Burn<B>) {
    let device = burn.device();
    let row = || Tensor::<4>::ones([1, 1, 1, 256], (device, DType::F32));
    // Calls of one kind are checked at first alone. After that the read still fails, with the reason.
    for call in 0..40 {
        let text = failure(|| {
            let q = row().expand([1, 1 << 10, 1 << 30, 256]);
            Attention::new(q, row(), row()).forward()
        });
        let named = text.contains("attention's forward pass failed on the device");
        assert!(named || call >= 32, "{call}: {text}");
        assert!(text.contains("can't allocate buffer"), "{call}: {text}");
    }
    let small = Case {
        batch: 1,
        ..Case::new(5, 7).heads(1, 1)
    };
    small.check(burn);
}
