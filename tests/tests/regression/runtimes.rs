//! Traps of CubeCL's runtimes that the kernels go around.

use flash_dma_kernels::{Engine as Kind, Tuning};
use flash_dma_problem::AttentionError;
use flash_dma_problem::ElementType::{Bf16, F16};
use flash_dma_tests::engines::{Kernels, Target};
use flash_dma_tests::{Case, Engine, kernel_engines};

kernel_engines!(barriers_were_erased_where_there_are_none);

/// `docs/upstream.md`, "Barriers disappear, others do not compile": on CubeCL's CPU runtime a kernel that waits for a
/// copy does not wait, and its results are wrong without an error. So a runtime without asynchronous copies refuses the
/// kernels that need them; forced, too.
fn barriers_were_erased_where_there_are_none<T: Target>(kernels: &Kernels<T>) {
    for element in [Bf16, F16] {
        let case = Case::new(20, 30).dim(64).element(element);
        let inputs = case.inputs();
        let grad_out = vec![0.0; inputs.q.len()];
        let call = kernels.call(&inputs, case.layout, (&grad_out, None));
        for engine in [Kind::Mma, Kind::Wgmma] {
            let result = kernels.forward_tuned(&call, engine, Tuning::default());
            match result {
                Ok(outputs) => {
                    assert!(T::NAME.contains("cuda"), "{engine:?} on {}", T::NAME);
                    case.check_outputs(&inputs, &outputs, &format!("{engine:?}"));
                }
                Err(AttentionError::Unsupported { what }) => {
                    // An H200 has both; other CUDA devices may lack one.
                    assert!(what.contains("engine"), "{what}");
                }
                Err(error) => panic!("{engine:?} on {}: {error}", T::NAME),
            }
        }
    }
}
