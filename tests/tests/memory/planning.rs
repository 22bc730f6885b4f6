//! The longest sequences and the largest batches that fit.

use super::window;
use burn_flash_dma::memory::{self, Passes};
use flash_dma_tests::prelude::*;

every_burn!(a_plan_fits_and_one_token_more_does_not);

fn a_plan_fits_and_one_token_more_does_not<B: Backend>(_: &Burn<B>) {
    let (q, kv) = ([2, 8, 1, 64], [2, 2, 1, 64]);
    let template = problem(q, kv, true, F32, &window(512));
    let device = B::device();
    let passes = Passes::ForwardAndBackward;
    let bytes = 1 << 30;
    let fits = |sizes| {
        let problem = template.with_sizes(sizes).expect("valid sizes");
        memory::required_bytes(&problem, passes, &device).expect("a plan") <= bytes
    };
    let planned = memory::longest(&template, passes, bytes, &device);
    if B::NAME == "burn_flex" {
        // The engine on the host has no such number.
        let error = planned.expect_err("no plan").to_string();
        assert!(error.contains("known before the call"), "{error}");
        return;
    }
    let n = planned.expect("a plan");
    assert!(n > 10_000, "{n} tokens");
    assert!(fits([2, n, n]) && !fits([2, n + 1, n + 1]), "{n} tokens");
    let template = template.with_sizes([1, 1000, 1000]).expect("valid sizes");
    let batch = memory::largest_batch(&template, passes, bytes, &device).expect("a plan");
    assert!(fits([batch, 1000, 1000]), "{batch}");
    assert!(!fits([batch + 1, 1000, 1000]), "{batch}");
}
