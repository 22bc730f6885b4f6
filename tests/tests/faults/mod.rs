//! Calls on a failing device: an error that names the operation, nothing half-written, and the next call is right.
#![cfg(any(feature = "cpu", feature = "cuda", feature = "wgpu"))]

#[cfg(feature = "burn")]
mod burn;

use cubecl::client::Client;
use cubecl::prelude::*;
use cubecl::server::Handle;
use flash_dma_kernels::{self as engine, Backward as _, Forward as _, Inputs, Saved, check};
use flash_dma_tests::engines::{binding, contiguous};
use flash_dma_tests::prelude::*;

kernel_engines!(
    memory_that_runs_out_in_a_forward_pass,
    memory_that_runs_out_in_a_backward_pass,
    an_input_whose_kernel_does_not_compile,
    an_input_whose_launch_is_refused,
);

/// Does not compile on any runtime.
#[cube(launch_unchecked)]
fn broken_kernel(out: &mut [f32]) {
    let x: f32;
    gpu_asm!("this.is.no.instruction {};", out(_) x, options(nomem));
    out[ABSOLUTE_POS] = x;
}

/// Does not compile for shaders without byte types.
#[cube(launch_unchecked)]
fn bytes_kernel(out: &mut [u8]) {
    out[ABSOLUTE_POS] = 1u8;
}

/// Asks for a gibibyte of shared memory.
#[cube(launch_unchecked)]
fn greedy_kernel(out: &mut [f32]) {
    let mut shared = Shared::<[f32]>::new_slice(1usize << 28);
    shared[UNIT_POS as usize] = out[ABSOLUTE_POS];
    sync_cube();
    out[ABSOLUTE_POS] = shared[(UNIT_POS as usize + 1) % 4];
}

/// Writes past every allocation.
#[cfg(feature = "cuda")]
#[cube(launch_unchecked, address_type = "dynamic")]
fn wild_kernel(out: &mut [f32], at: usize) {
    out[at] = 1.0f32;
}

/// It destroys the context of the process, so it is run alone, by name.
#[cfg(feature = "cuda")]
#[test]
#[ignore = "ends the CUDA context: run it in a process of its own"]
fn a_wild_write_ends_the_context_and_nothing_is_returned_after_it() {
    let kernels = shared::<flash_dma_tests::engines::KernelsOnCuda>();
    let client = kernels.client();
    Case::new(9, 7).check(kernels);
    let good = client.create_from_slice(&[0; 64]);
    let wild = contiguous(&client.create_from_slice(&[0; 64]), &[16]);
    // SAFETY: none; the fault is the subject of the test.
    unsafe {
        wild_kernel::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(1),
            cubecl::ir::AddressType::U64,
            wild.into_buffer_arg(),
            1usize << 44,
        );
    }
    let sync = cubecl::future::block_on(client.sync());
    let error = sync.expect_err("the write was illegal").to_string();
    assert!(error.contains("poisoned"), "{error}");
    // Neither existing buffers nor new calls work.
    assert!(client.read_one(good).is_err());
    let p = Case::new(9, 7).plain().problem();
    let results = results(client, &p);
    let result = forward(client, &p, &inputs(client, &p), &results);
    let [out, lse] = results;
    assert!(result.is_err() || client.read_one(out).is_err());
    assert!(client.read_one(lse).is_err());
}

/// A row of ones that represents every row of a tensor.
fn broadcast(client: &Client, shape: [usize; 4]) -> TensorBinding {
    let handle = client.create_from_slice(f32::as_bytes(&vec![1.0; shape[3]]));
    binding(&handle, &shape, &[0, 0, 0, 1])
}

/// Checks that reading a result that must not be used is an error with the operation's name.
fn assert_failed(client: &Client, operation: &'static str, results: &[Handle]) {
    for result in results {
        let error = check(client, operation, [result]).expect_err(operation);
        assert!(
            matches!(&error, AttentionError::DeviceFailed { operation: o, .. } if *o == operation),
            "{error:?}"
        );
        let text = error.to_string();
        assert!(
            text.starts_with(&format!("{operation} failed on the device: ")),
            "{text}"
        );
        assert!(
            client.read_one(result.clone()).is_err(),
            "{operation} was read"
        );
    }
}

/// A problem whose `out` takes a pebibyte, past any device and any address space, with inputs of a few rows.
fn huge() -> Problem {
    let (q, kv) = ([1, 1 << 10, 1 << 30, 256], [1, 1, 8, 256]);
    problem(q, kv, false, F32, &AttentionOptions::new())
}

/// Checks that the huge problem is launched and its results must not be used; or that it has more tiles than the device
/// has cubes (Vulkan's have 65535), and nothing is launched.
fn assert_ran_out(
    client: &Client,
    operation: &'static str,
    result: &Result<(), AttentionError>,
    results: &[Handle],
) {
    if client.properties().hardware.max_cube_count.0 == 65535 {
        let refused = matches!(result, Err(AttentionError::Grid { limit: 65535, .. }));
        return assert!(refused, "{result:?}");
    }
    assert_eq!(*result, Ok(()), "what is launched fails, not the launching");
    assert_failed(client, operation, results);
}

fn inputs(client: &Client, p: &Problem) -> Inputs {
    Inputs {
        q: broadcast(client, p.q_shape()),
        k: broadcast(client, p.kv_shape()),
        v: broadcast(client, p.kv_shape()),
        selection: None,
    }
}

/// A buffer of f32 that nothing was written to, so that nothing was allocated for it.
fn unwritten(client: &Client, shape: &[usize]) -> Handle {
    client.empty(shape.iter().product::<usize>() * 4)
}

fn results(client: &Client, p: &Problem) -> [Handle; 2] {
    [&p.q_shape()[..], &p.lse_shape()].map(|shape| unwritten(client, shape))
}

fn memory_that_runs_out_in_a_forward_pass<T: Target>(kernels: &Kernels<T>) {
    let (client, p) = (kernels.client(), huge());
    let results = results(client, &p);
    let result = forward(client, &p, &inputs(client, &p), &results);
    assert_ran_out(client, "attention's forward pass", &result, &results);
    Case::new(9, 7).check(kernels);
}

fn memory_that_runs_out_in_a_backward_pass<T: Target>(kernels: &Kernels<T>) {
    let (client, p) = (kernels.client(), huge());
    let (q, kv) = (p.q_shape(), p.kv_shape());
    let results = [q, kv, kv].map(|shape| unwritten(client, &shape));
    let saved = Saved {
        out: broadcast(client, p.q_shape()),
        residual: None,
        lse: contiguous(&unwritten(client, &p.lse_shape()), &p.lse_shape()),
        lse_rest: None,
        grad_out: broadcast(client, p.q_shape()),
        grad_lse: None,
    };
    let gradients = engine::Gradients {
        q: contiguous(&results[0], &q),
        k: contiguous(&results[1], &kv),
        v: contiguous(&results[2], &kv),
        scores: None,
        rank: None,
    };
    let inputs = inputs(client, &p);
    let plan = p.plan_backward(client, &inputs, &saved, None);
    let result = plan.and_then(|plan| plan.run(gradients));
    assert_ran_out(client, "attention's backward pass", &result, &results);
    Case::new(9, 7).check(kernels);
}

fn forward(
    client: &Client,
    p: &Problem,
    inputs: &Inputs,
    [out, lse]: &[Handle; 2],
) -> Result<(), AttentionError> {
    p.plan_forward(client, inputs, None)?
        .run(engine::Outputs::new(
            contiguous(out, &p.q_shape()),
            contiguous(lse, &p.lse_shape()),
        ))
}

/// Attention over a q that `spoil` was to write.
fn attend_over<T: Target>(kernels: &Kernels<T>, spoil: impl FnOnce(&TensorBinding)) {
    let client = kernels.client();
    let shape = [1, 1, 4, 16];
    let p = problem(shape, shape, false, F32, &AttentionOptions::new());
    let q = contiguous(&client.create_from_slice(&[0; 4 * 64]), &shape);
    spoil(&q);
    let results = results(client, &p);
    let given = Inputs {
        q,
        ..inputs(client, &p)
    };
    let result = forward(client, &p, &given, &results);
    assert_eq!(result, Ok(()));
    assert_failed(client, "attention's forward pass", &results);
    // Without a name given, the runtime names the kernel that it skipped.
    let [out, _] = results;
    let error = client.read_one(out).expect_err("it was skipped");
    let error = error.to_string();
    assert!(error.contains("skipped `"), "{error}");
    assert!(error.contains("Forward"), "{error}");
    Case::new(9, 7).check(kernels);
}

fn an_input_whose_kernel_does_not_compile<T: Target>(kernels: &Kernels<T>) {
    attend_over(kernels, |q| {
        let (count, dim) = (CubeCount::Static(1, 1, 1), CubeDim::new_1d(4));
        let q = q.clone().into_buffer_arg();
        // SAFETY: it never runs.
        unsafe {
            if T::NAME == "kernels_wgpu" {
                // WGSL ignores assembly.
                bytes_kernel::launch_unchecked(kernels.client(), count, dim, q);
            } else {
                broken_kernel::launch_unchecked(kernels.client(), count, dim, q);
            }
        }
    });
}

fn an_input_whose_launch_is_refused<T: Target>(kernels: &Kernels<T>) {
    if T::NAME == "kernels_cpu" {
        // There, shared memory is a thread's stack and nothing refuses it.
        return skip::<Kernels<T>>("a launch that is refused");
    }
    attend_over(kernels, |q| {
        // SAFETY: it never runs.
        unsafe {
            greedy_kernel::launch_unchecked(
                kernels.client(),
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(4),
                q.clone().into_buffer_arg(),
            );
        }
    });
}
