//! Limits of CubeCL 0.11.3 that the kernels work around, each as a kernel of a few lines and the code that CubeCL
//! generates for it; `docs/upstream.md` states their cost. A failing test is good news: the limit is gone, and with it
//! the reason for the work-around named in the document.

use crate::codegen::cuda::Gpu;
use crate::codegen::{cuda, recorder};
use crate::host::scratch::scratch;
use cubecl::CubeDim;
use cubecl::client::Client;
use cubecl::ir::AddressType;
use cubecl::prelude::barrier::copy_async_checked;
use cubecl::prelude::*;

/// The CUDA C++ of the one kernel that is launched.
fn source(launch: impl FnOnce(&Client)) -> String {
    let kernels = recorder::record(&recorder::client(Gpu::H200), launch);
    let [kernel] = kernels.as_slice() else {
        panic!("{} kernels were launched", kernels.len());
    };
    cuda::generate(&**kernel).expect("it has a CUDA form").text
}

fn buffer(client: &Client) -> BufferArg {
    scratch(client, [1024]).into_buffer_arg()
}

macro_rules! launch {
    ($client:expr, $kernel:ident, $($argument:expr),*) => {
        // SAFETY: nothing runs.
        unsafe {
            $kernel::launch_unchecked(
                $client,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(128),
                $($argument),*
            )
        }
    };
}

/// The source of a kernel that takes a buffer to read and one to write.
macro_rules! source_of {
    ($kernel:ident $(, $argument:expr)*) => {
        source(|client| launch!(client, $kernel, buffer(client), buffer(client) $(, $argument)*))
    };
}

#[cube(launch_unchecked)]
fn accumulator(_x: &[f32], y: &mut [f32], #[comptime] len: usize) {
    let size!(N) = len;
    let sums: Vector<f32, N>;
    gpu_asm!("// {}", out(_) sums);
    y[0] = sums.extract(0usize);
}

#[test]
fn a_vector_is_aligned_to_its_length_whatever_that_is() {
    assert!(source_of!(accumulator, 64).contains("alignas(256)"));
    // Not a power of two: no compiler accepts it.
    assert!(source_of!(accumulator, 96).contains("alignas(384)"));
}

#[cube(launch_unchecked)]
fn times_zero(x: &[f32], y: &mut [f32]) {
    y[0] = x[0] * 0.0f32;
}

#[test]
fn a_product_with_zero_is_zero_whatever_the_other_factor() {
    let text = source_of!(times_zero);
    let rest = text.split("__restrict__ ").nth(1).expect("a buffer");
    let (input, body) = rest.split_once(',').expect("two buffers");
    // The input is not even read: NaN and infinities become 0.
    assert!(!body.contains(input), "{text}");
}

#[cube(launch_unchecked)]
fn exponential(x: &[f32], y: &mut [f32]) {
    y[0] = x[0].exp();
}

#[test]
fn fast_math_has_no_fast_exp() {
    // The recorder compiles with `fast_math`, as a CUDA device does.
    let text = source_of!(exponential);
    assert!(
        text.contains("= exp(") && !text.contains("__expf"),
        "{text}"
    );
}

#[test]
fn launch_bounds_have_no_minimum_of_cubes() {
    // Hence registers are capped by the size of the cube alone, and `setmaxnreg` is ignored.
    let text = source_of!(exponential);
    assert!(text.contains("__launch_bounds__(128) "), "{text}");
}

#[cube(launch_unchecked)]
fn shuffle(x: &[f32], y: &mut [f32]) {
    y[UNIT_POS as usize] = plane_shuffle_xor(x[UNIT_POS as usize], 1u32);
}

#[test]
fn a_shuffle_asks_which_lanes_are_active() {
    assert!(source_of!(shuffle).contains("__shfl_xor_sync(__activemask()"));
}

#[cube(launch_unchecked)]
fn count(x: &[u32], y: &mut [u32]) {
    let counts = Shared::<[Atomic<u32>]>::new_slice(32usize);
    counts[x[UNIT_POS as usize] as usize].fetch_add(1u32);
    sync_cube();
    y[UNIT_POS as usize] = counts[0].load();
}

#[test]
fn a_shared_atomic_takes_a_generic_address_and_returns_a_value() {
    let text = source_of!(count);
    assert!(text.contains("atom.relaxed.add.u32"), "{text}");
    assert!(!text.contains(".shared"), "{text}");
}

#[cube(launch_unchecked)]
fn operand(x: &[f32], y: &mut [f32]) {
    let mut a = x[0];
    a += x[1];
    let out: f32;
    gpu_asm!("ex2.approx.ftz.f32 {}, {};", out(_) out, in(_) a, options(pure, nomem));
    y[0] = out;
}

#[test]
fn a_variable_goes_into_an_asm_block_by_its_address() {
    // `l`: a pointer, where `ex2` takes a float. No error is reported before ptxas.
    assert!(source_of!(operand).contains(r#""=f"(result) : "l"("#));
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn checked_copy(x: &[f32], y: &mut [f32]) {
    let mut tile = Shared::<[f32]>::new_slice(128usize);
    let unit = UNIT_POS as usize;
    copy_async_checked(&x[0..unit], &mut tile[unit..unit + 1], 1u32);
    y[unit] = tile[unit];
}

#[test]
fn a_checked_copy_takes_its_length_as_an_index() {
    let text = |address| {
        source(|client| {
            launch!(
                client,
                checked_copy,
                address,
                buffer(client),
                buffer(client)
            )
        })
    };
    let operands = |text: String| {
        let copy = text.split("cp.async").nth(1).expect("a copy").to_owned();
        copy.matches(r#""l"("#).count()
    };
    // With 32-bit addresses only the address is a 64-bit operand; with 64-bit addresses the length is one, too,
    // although it has to have 32 bits.
    assert_eq!(operands(text(AddressType::U32)), 1);
    assert_eq!(operands(text(AddressType::U64)), 2);
}

#[cube(launch_unchecked)]
fn options(
    _first: &ComptimeOption<Box<[f32]>>,
    _second: &ComptimeOption<Box<[f32]>>,
    y: &mut [f32],
) {
    y[0] = 0.0f32;
}

#[test]
fn options_hash_what_they_hold_and_not_whether_they_do() {
    let id = |present: [bool; 2]| {
        let kernels = recorder::record(&recorder::client(Gpu::H200), |client| {
            let [first, second] = present.map(|present| present.then(|| buffer(client)).into());
            launch!(client, options, first, second, buffer(client));
        });
        kernels[0].id()
    };
    let [first, second] = [id([true, false]), id([false, true])];
    assert!(first != second);
    assert_eq!(first.stable_hash(), second.stable_hash());
}
