//! Memory: the kernels request exactly the bytes that they announce, and these are linear in the tokens. The same tests
//! for all CUDA engines without a GPU, with masks, caches and lengths up to four million, are in `flash-dma-kernels`.

mod large;
#[cfg(feature = "burn")]
mod planning;

use flash_dma_kernels::required_bytes;
use flash_dma_problem::memory::{Passes, tensor_bytes};
use flash_dma_tests::engines::memory::{Called, Workspace};
use flash_dma_tests::prelude::*;

kernel_engines!(
    a_pass_requests_the_workspace_it_says,
    required_bytes_hold_every_call,
    workspaces_are_linear_in_the_tokens,
);

/// The most repetitions of a call: a runtime whose threads release a launch late counts its buffers for too long, but
/// this does not happen in every one of a few calls.
const CALLS: usize = 5;

/// Bytes that a runtime may count in addition to the requests: rounded sizes, on CUDA also launches' shapes and
/// strides.
const UNTOLD: u64 = 1 << 20;

fn window(keys: usize) -> AttentionOptions {
    AttentionOptions::new().with_keep_window(keys)
}

/// Two sequences of two kv heads and four query heads; a window comes with scores.
fn tokens<T: Target>(kernels: &Kernels<T>, n: usize, options: AttentionOptions) -> Problem {
    let (dim, element) = match T::SIZE {
        Size::Large if kernels.supports(Bf16) => (64, Bf16),
        _ => (16, F32),
    };
    let (q, kv) = ([2, 4, n, dim], [2, 2, n, dim]);
    problem(q, kv, options.keep_window.is_some(), element, &options)
}

/// Two lengths, one twice the other, and a window.
fn lengths<T: Target>() -> ([usize; 2], usize) {
    match T::SIZE {
        Size::Small => ([96, 192], 24),
        _ => ([8192, 16384], 1024),
    }
}

fn a_pass_requests_the_workspace_it_says<T: Target>(kernels: &Kernels<T>) {
    let ([short, long], keys) = lengths::<T>();
    for (n, options) in [
        (short, window(keys)),
        (long, window(keys)),
        (short, window(keys).with_deterministic(true)),
        (long, window(keys).with_causal(false)),
        (short, window(2 * long)),
        (short, AttentionOptions::new()),
    ] {
        let problem = tokens(kernels, n, options);
        check_workspaces(kernels, &problem);
        if problem.has_scores && n == short {
            check_workspaces(kernels, &problem.with_constant_scores());
        }
    }
}

fn check_workspaces<T: Target>(kernels: &Kernels<T>, problem: &Problem) {
    let mut calls = kernels.workspaces(problem);
    for _ in 1..CALLS {
        if calls.iter().all(is_as_said) {
            break;
        }
        for (call, again) in calls.iter_mut().zip(kernels.workspaces(problem)) {
            if !is_as_said(call) {
                *call = again;
            }
        }
    }
    assert!(calls.iter().all(is_as_said), "{calls:?} of {problem:?}");
}

/// True if the request equals the announced size exactly, and the runtime holds at least that much, and little more.
fn is_as_said(call: &Workspace) -> bool {
    let (said, held) = (call.said as u64, call.peak.in_use);
    call.peak.requested == call.said && (said..=said + UNTOLD).contains(&held)
}

/// The bytes that are planned with are those of the tensors and of the call that needs most, no more and no less.
fn required_bytes_hold_every_call<T: Target>(kernels: &Kernels<T>) {
    use Called::{Backward, Forward, Ranked, Select};
    if T::ENGINE.is_some() {
        // The plan is for the engine that the library chooses.
        return;
    }
    let ([short, _], keys) = lengths::<T>();
    for options in [
        window(keys),
        window(keys).with_deterministic(true),
        window(2 * short),
        AttentionOptions::new(),
    ] {
        let problem = tokens(kernels, short, options);
        let calls = kernels.workspaces(&problem);
        for (passes, made) in [
            (Passes::Forward, &[Select, Forward][..]),
            (Passes::ForwardAndBackward, &[Select, Forward, Backward]),
            (Passes::WithRunnersUp, &[Select, Forward, Backward, Ranked]),
        ] {
            let of = calls.iter().filter(|call| made.contains(&call.called));
            let most = of.map(|call| call.said).max().expect("a call");
            let tensors = tensor_bytes(&problem, passes) as usize;
            let required = required_bytes(kernels.client(), &problem, passes);
            assert_eq!(required, Ok(tensors + most), "{passes:?} of {problem:?}");
        }
    }
}

fn workspaces_are_linear_in_the_tokens<T: Target>(kernels: &Kernels<T>) {
    let (lengths, keys) = lengths::<T>();
    for options in [window(keys), AttentionOptions::new()] {
        let [short, long] = lengths.map(|n| kernels.workspaces(&tokens(kernels, n, options)));
        for (short, long) in short.iter().zip(&long) {
            assert!(long.said <= 2 * short.said + 4096, "{short:?} {long:?}");
        }
        if options.keep_window.is_none() {
            // Nothing is listed, and only the backward pass needs something: up to three words for each query and head.
            let words = 3 * 4 * 2 * 4 * lengths[1];
            assert!(
                long.iter().all(|call| call.said <= words + 4096),
                "{long:?}"
            );
        }
    }
}
