//! Calls on a failing device: an error that names the operation, nothing half-written, and the next call is right.
#![cfg(any(feature = "cpu", feature = "cuda", feature = "wgpu"))]

#[cfg(feature = "burn")]
mod burn;

use cubecl::prelude::*;
use cubecl::server::Handle;
use flash_dma_kernels::{self as engine, Inputs, Saved, check};
use flash_dma_problem::{AttentionError, AttentionOptions, ElementType, Problem};
use flash_dma_tests::engines::{Kernels, Target};
use flash_dma_tests::{Case, kernel_engines};

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
    use flash_dma_tests::engines::KernelsOnCuda;
    let kernels = flash_dma_tests::engine::shared::<KernelsOnCuda>();
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
    let [out, lse] = [&p.q_shape()[..], &p.lse_shape()].map(|s| client.empty(bytes_of(s)));
    let result = forward(client, &p, &inputs(client, &p), &out, &lse);
    assert!(result.is_err() || client.read_one(out).is_err());
    assert!(client.read_one(lse).is_err());
}

fn binding(handle: &Handle, shape: &[usize], strides: &[usize]) -> TensorBinding {
    // SAFETY: the callers give buffers that hold what shape and strides reach.
    unsafe {
        TensorBinding::from_raw_parts(
            handle.clone(),
            strides.iter().copied().collect(),
            shape.iter().copied().collect(),
        )
    }
}

/// A row of ones that represents every row of a tensor.
fn broadcast(client: &cubecl::client::Client, shape: [usize; 4]) -> TensorBinding {
    let handle = client.create_from_slice(f32::as_bytes(&vec![1.0; shape[3]]));
    binding(&handle, &shape, &[0, 0, 0, 1])
}

fn contiguous(handle: &Handle, shape: &[usize]) -> TensorBinding {
    let strides: Vec<usize> = flash_dma_problem::contiguous_strides(shape).collect();
    binding(handle, shape, &strides)
}

/// A result that must not be used reports so, by name.
fn assert_failed(client: &cubecl::client::Client, operation: &'static str, results: &[&Handle]) {
    for result in results {
        let error = check(client, operation, [*result]).expect_err(operation);
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
            client.read_one((*result).clone()).is_err(),
            "{operation} was read"
        );
    }
}

/// `out` of a pebibyte, past any device and any address space, and inputs of a few rows.
fn huge() -> Problem {
    let (q, kv) = ([1, 1 << 10, 1 << 30, 256], [1, 1, 8, 256]);
    Problem::new(
        &q,
        &kv,
        &kv,
        None,
        ElementType::F32,
        &AttentionOptions::new(),
    )
    .unwrap()
}

/// The huge problem is launched and its results must not be used; or it has more tiles than the device cubes (Vulkan's
/// have 65535), and nothing is launched.
fn assert_ran_out(
    client: &cubecl::client::Client,
    operation: &'static str,
    result: &Result<(), AttentionError>,
    results: &[&Handle],
) {
    if client.properties().hardware.max_cube_count.0 == 65535 {
        let refused = matches!(result, Err(AttentionError::Grid { limit: 65535, .. }));
        return assert!(refused, "{result:?}");
    }
    assert_eq!(*result, Ok(()), "what is launched fails, not the launching");
    assert_failed(client, operation, results);
}

fn inputs(client: &cubecl::client::Client, p: &Problem) -> Inputs {
    Inputs {
        q: broadcast(client, p.q_shape()),
        k: broadcast(client, p.kv_shape()),
        v: broadcast(client, p.kv_shape()),
        selection: None,
    }
}

fn bytes_of(shape: &[usize]) -> usize {
    shape.iter().product::<usize>() * 4
}

fn memory_that_runs_out_in_a_forward_pass<T: Target>(kernels: &Kernels<T>) {
    let (client, p) = (kernels.client(), huge());
    let out = client.empty(bytes_of(&p.q_shape()));
    let lse = client.empty(bytes_of(&p.lse_shape()));
    let result = forward(client, &p, &inputs(client, &p), &out, &lse);
    assert_ran_out(client, "attention's forward pass", &result, &[&out, &lse]);
    Case::new(9, 7).check(kernels);
}

fn memory_that_runs_out_in_a_backward_pass<T: Target>(kernels: &Kernels<T>) {
    let (client, p) = (kernels.client(), huge());
    let grad_q = client.empty(bytes_of(&p.q_shape()));
    let [grad_k, grad_v] = [(); 2].map(|()| client.empty(bytes_of(&p.kv_shape())));
    // It was never written, and so was never allocated.
    let lse = client.empty(bytes_of(&p.lse_shape()));
    let saved = Saved {
        out: broadcast(client, p.q_shape()),
        residual: None,
        lse: contiguous(&lse, &p.lse_shape()),
        lse_rest: None,
        grad_out: broadcast(client, p.q_shape()),
        grad_lse: None,
    };
    let gradients = engine::Gradients {
        q: contiguous(&grad_q, &p.q_shape()),
        k: contiguous(&grad_k, &p.kv_shape()),
        v: contiguous(&grad_v, &p.kv_shape()),
        scores: None,
        rank: None,
    };
    let inputs = inputs(client, &p);
    let plan = engine::backward::plan(client, &p, &inputs, &saved);
    let result = plan.and_then(|plan| plan.run(gradients));
    assert_ran_out(
        client,
        "attention's backward pass",
        &result,
        &[&grad_q, &grad_k, &grad_v],
    );
    Case::new(9, 7).check(kernels);
}

fn forward(
    client: &cubecl::client::Client,
    p: &Problem,
    inputs: &Inputs,
    out: &Handle,
    lse: &Handle,
) -> Result<(), AttentionError> {
    engine::forward::plan(client, p, inputs)?.run(engine::Outputs::new(
        contiguous(out, &p.q_shape()),
        contiguous(lse, &p.lse_shape()),
    ))
}

/// Attention over a q that `spoil` was to write.
fn attend_over<T: Target>(kernels: &Kernels<T>, spoil: impl FnOnce(&TensorBinding)) {
    let client = kernels.client();
    let shape = [1, 1, 4, 16];
    let options = AttentionOptions::new();
    let p = Problem::new(&shape, &shape, &shape, None, ElementType::F32, &options).unwrap();
    let q = contiguous(&client.create_from_slice(&[0; 4 * 64]), &shape);
    spoil(&q);
    let [out, lse] = [&p.q_shape()[..], &p.lse_shape()].map(|s| client.empty(bytes_of(s)));
    let given = Inputs {
        q,
        ..inputs(client, &p)
    };
    let result = forward(client, &p, &given, &out, &lse);
    assert_eq!(result, Ok(()));
    assert_failed(client, "attention's forward pass", &[&out, &lse]);
    // Without a name given, the runtime names the kernel that it skipped.
    let error = client
        .read_one(out)
        .expect_err("it was skipped")
        .to_string();
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
        return flash_dma_tests::engine::skip::<Kernels<T>>("a launch that is refused");
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
