//! Traps of CubeCL's runtimes that the kernels work around.

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use flash_dma_kernels::Engine as Kind;
use flash_dma_kernels::internals::Tuning;
use flash_dma_problem::ElementType::{Bf16, F16};
use flash_dma_problem::{AttentionError, Obstacle};
use flash_dma_reference::Rng;
use flash_dma_reference::round::round;
use flash_dma_tests::engine::skip;
use flash_dma_tests::engines::{Kernels, Target};
use flash_dma_tests::{Case, Engine, Grads, kernel_engines};
use half::{bf16, f16};

kernel_engines!(
    barriers_were_erased_where_there_are_none,
    casts_round_to_nearest,
);

/// `docs/upstream.md`, "Barriers disappear, others do not compile": on CubeCL's CPU runtime a kernel that waits for a
/// copy does not wait, and its results are wrong without an error. So a runtime without asynchronous copies refuses the
/// kernels that need them; forced, too.
fn barriers_were_erased_where_there_are_none<T: Target>(kernels: &Kernels<T>) {
    for element in [Bf16, F16] {
        let case = Case::new(20, 30).dim(64).element(element);
        let inputs = case.inputs();
        let grads = Grads::of_out(vec![0.0; inputs.q.len()]);
        let call = kernels.call(&inputs, case.layout, &grads);
        for engine in [Kind::Mma, Kind::Wgmma] {
            let result = kernels.forward_tuned(&call, engine, Tuning::default());
            match result {
                Ok(outputs) => {
                    assert!(T::NAME.contains("cuda"), "{engine:?} on {}", T::NAME);
                    case.check_outputs(&inputs, &outputs, &format!("{engine:?}"));
                }
                // An H200 has both; other CUDA devices may lack one.
                Err(AttentionError::Engine { obstacle, .. }) => {
                    assert_eq!(obstacle, Obstacle::Device);
                }
                Err(error) => panic!("{engine:?} on {}: {error}", T::NAME),
            }
        }
    }
}

#[cube(launch_unchecked)]
fn cast_kernel<E: Numeric>(x: &[f32], y: &mut [E], #[define(E)] _element: ElemType) {
    if ABSOLUTE_POS < x.len() {
        y[ABSOLUTE_POS] = E::cast_from(x[ABSOLUTE_POS]);
    }
}

/// A cast that truncated would double the error of every result.
fn casts_round_to_nearest<T: Target>(kernels: &Kernels<T>) {
    if T::NAME == "kernels_vulkan" {
        // `docs/upstream.md`, "Casts round as the driver likes": on an H200 they do not round to nearest.
        return skip::<Kernels<T>>("the rounding of casts");
    }
    let (client, mut rng) = (kernels.client(), Rng::new(1));
    let mut values: Vec<f32> = (0..1000).map(|_| rng.normal() as f32).collect();
    // Ties, to even: below and above.
    values.extend([1.0 + 2f32.powi(-8), 1.0 + 3.0 * 2f32.powi(-8)]);
    values.extend([1.0 + 2f32.powi(-11), 1.0 + 3.0 * 2f32.powi(-11)]);
    let kinds = [(F16, FloatKind::F16), (Bf16, FloatKind::BF16)];
    for (element, kind) in kernels.supported(kinds, |&(element, _)| element) {
        let x = client.create_from_slice(f32::as_bytes(&values));
        let y = client.empty(2 * values.len());
        // SAFETY: units past the values do nothing.
        unsafe {
            cast_kernel::launch_unchecked(
                client,
                CubeCount::Static(values.len().div_ceil(32) as u32, 1, 1),
                CubeDim::new_1d(32),
                BufferArg::from_raw_parts(x, values.len()),
                BufferArg::from_raw_parts(y.clone(), values.len()),
                ElemType::Float(kind),
            );
        }
        let bytes = client.read_one(y).expect("the cast ran");
        let words = bytes.chunks_exact(2);
        let words = words.map(|b| u16::from_le_bytes([b[0], b[1]]));
        for (x, bits) in values.iter().zip(words) {
            let y = match element {
                F16 => f16::from_bits(bits).to_f64(),
                _ => bf16::from_bits(bits).to_f64(),
            };
            assert_eq!(y, round(f64::from(*x), element), "{x:e} as {element}");
        }
    }
}
