//! The harness of the contract, gradient and property tests: one [`Engine`] trait over everything
//! that computes dynamic-mask attention, one comparison with the oracle, and the macro that makes a
//! test of every engine in the build.
//!
//! The engines follow the features: the CPU engine always; the kernels on `cpu`, `cuda`, `wgpu` (through WGSL) or
//! `vulkan` (through SPIR-V); Burn on `flex`, `cpu`, `cuda`, and under `burn` on `wgpu`.
//! `--no-default-features --features cuda` is the GPU suite, `--no-default-features --features vulkan` that of the
//! kernels on Vulkan. Without any feature there is the CPU engine
//! alone, which the [fuzzer](fuzz) runs then.
#![warn(missing_docs)]

pub mod call;
pub mod case;
#[cfg(feature = "kernels")]
pub mod decoding;
pub mod engine;
pub mod engines;
pub mod expected;
pub mod fuzz;
pub mod given;
#[cfg(feature = "kernels")]
pub mod large;
pub mod masked;
pub mod norm;

pub use call::{Call, Layout, Raw};
pub use case::{Case, problem};
pub use engine::{Competing, Engine, Gradients, Outputs, Refused, Size};

/// Makes each named function `fn test<E: Engine>(engine: &E)` one test for every engine in the build:
/// `contract::results::gqa::kernels_cpu`. Burn on CubeCL's CPU runtime compiles each of Burn's own operations for
/// minutes, so it only runs the tests that [`on_burn_cpu!`] names.
#[macro_export]
macro_rules! every_engine {
    ($($test:ident),* $(,)?) => { $crate::tests_on! { [cpu kernels burn] $($test)* } };
}

/// As [`every_engine!`], for the engines below Burn: the engines that take buffers directly.
#[macro_export]
macro_rules! raw_engines {
    ($($test:ident),* $(,)?) => { $crate::tests_on! { [cpu kernels] $($test)* } };
}

/// As [`raw_engines!`], for problems that the tensor-core engines support: each of them, and the engines that they are
/// compared with.
#[macro_export]
macro_rules! tensor_core_engines {
    ($($test:ident),* $(,)?) => { $crate::tests_on! { [cpu tensor_cores] $($test)* } };
}

/// As [`raw_engines!`], for cases specific to the tensor-core kernels: without the portable kernels if a device has
/// others, because they lack such tiles and take as long to compile.
#[macro_export]
macro_rules! matrix_engines {
    ($($test:ident),* $(,)?) => { $crate::tests_on! { [cpu matrix] $($test)* } };
}

/// As [`every_engine!`], for the kernels alone: `fn test<T: Target>(kernels: &Kernels<T>)`.
#[macro_export]
macro_rules! kernel_engines {
    ($($test:ident),* $(,)?) => { $crate::tests_on! { [kernels] $($test)* } };
}

/// As [`every_engine!`], for operations that have one kernel, whatever engine attention takes.
#[macro_export]
macro_rules! every_runtime {
    ($($test:ident),* $(,)?) => { $crate::tests_on! { [cpu runtimes burn] $($test)* } };
}

/// As [`kernel_engines!`], for operations that have one kernel, whatever engine attention takes.
#[macro_export]
macro_rules! kernel_runtimes {
    ($($test:ident),* $(,)?) => { $crate::tests_on! { [runtimes] $($test)* } };
}

/// Makes each named function `fn test<B: Backend>(burn: &Burn<B>)` one test for every Burn backend in the
/// build, CubeCL's CPU runtime included.
#[macro_export]
macro_rules! every_burn {
    ($($test:ident),* $(,)?) => { $crate::tests_on! { [burn burn_cpu] $($test)* } };
}

/// As [`every_burn!`], without CubeCL's CPU runtime.
#[macro_export]
macro_rules! fast_burn {
    ($($test:ident),* $(,)?) => { $crate::tests_on! { [burn] $($test)* } };
}

/// Makes each named function a test for Burn on CubeCL's CPU runtime.
#[macro_export]
macro_rules! on_burn_cpu {
    ($($test:ident),* $(,)?) => {
        #[cfg(feature = "cpu")]
        mod burn_cpu {
            $(
                #[test]
                fn $test() {
                    super::$test($crate::engine::shared::<$crate::engines::BurnOnCpu>());
                }
            )*
        }
    };
}

/// Calls `test(engine)` for every engine in the build: for a test whose expected result takes longer than what
/// it tests.
#[macro_export]
macro_rules! on_each_engine {
    ($test:expr) => {
        $crate::engines_of! { engine_call [$test] cpu kernels burn }
    };
}

/// One module per test, with a test for each engine of the sets.
#[macro_export]
#[doc(hidden)]
macro_rules! tests_on {
    ($sets:tt $($test:ident)*) => {$(
        mod $test {
            $crate::tests_on! { @ $test $sets }
        }
    )*};
    (@ $test:ident [$($set:ident)*]) => { $crate::engines_of! { engine_test [$test] $($set)* } };
}

/// Expands a macro of this file for each engine of the sets: the only list of engines.
#[macro_export]
#[doc(hidden)]
macro_rules! engines_of {
    ($each:ident $with:tt) => {};
    ($each:ident $with:tt cpu $($set:ident)*) => {
        $crate::$each!($with [all()] cpu = Cpu);
        $crate::engines_of!($each $with $($set)*);
    };
    ($each:ident $with:tt kernels $($set:ident)*) => {
        $crate::$each!($with [feature = "cuda"] kernels_cuda_portable = KernelsOnCudaPortable);
        $crate::engines_of!($each $with matrix $($set)*);
    };
    ($each:ident $with:tt matrix $($set:ident)*) => {
        $crate::$each!($with [feature = "cuda"] kernels_cuda_mma = KernelsOnCudaMma);
        $crate::engines_of!($each $with runtimes $($set)*);
    };
    ($each:ident $with:tt runtimes $($set:ident)*) => {
        $crate::$each!($with [feature = "cpu"] kernels_cpu = KernelsOnCpu);
        $crate::$each!($with [feature = "cuda"] kernels_cuda = KernelsOnCuda);
        $crate::$each!($with [all(feature = "wgpu", not(feature = "vulkan"))] kernels_wgpu = KernelsOnWgpu);
        $crate::$each!($with [feature = "vulkan"] kernels_vulkan = KernelsOnVulkan);
        $crate::engines_of!($each $with $($set)*);
    };
    ($each:ident $with:tt tensor_cores $($set:ident)*) => {
        $crate::$each!($with [feature = "cpu"] kernels_cpu = KernelsOnCpu);
        $crate::$each!($with [feature = "cuda"] kernels_cuda_wgmma = KernelsOnCudaWgmma);
        $crate::$each!($with [feature = "cuda"] kernels_cuda_mma = KernelsOnCudaMma);
        $crate::$each!($with [feature = "cuda"] kernels_cuda_portable = KernelsOnCudaPortable);
        $crate::engines_of!($each $with $($set)*);
    };
    ($each:ident $with:tt burn $($set:ident)*) => {
        $crate::$each!($with [feature = "flex"] burn_flex = BurnOnFlex);
        $crate::$each!($with [feature = "cuda"] burn_cuda = BurnOnCuda);
        $crate::$each!($with [all(feature = "burn", feature = "wgpu")] burn_wgpu = BurnOnWgpu);
        $crate::engines_of!($each $with $($set)*);
    };
    ($each:ident $with:tt burn_cpu $($set:ident)*) => {
        $crate::$each!($with [feature = "cpu"] burn_cpu = BurnOnCpu);
        $crate::engines_of!($each $with $($set)*);
    };
}

/// The test of a function on one engine, if its condition holds in this build.
#[macro_export]
#[doc(hidden)]
macro_rules! engine_test {
    ([$test:ident] [$($condition:tt)*] $name:ident = $engine:ident) => {
        #[cfg($($condition)*)]
        #[test]
        fn $name() {
            super::$test($crate::engine::shared::<$crate::engines::$engine>());
        }
    };
}

/// A call with one engine, if its condition holds in this build.
#[macro_export]
#[doc(hidden)]
macro_rules! engine_call {
    ([$test:expr] [$($condition:tt)*] $name:ident = $engine:ident) => {
        #[cfg($($condition)*)]
        $test($crate::engine::shared::<$crate::engines::$engine>());
    };
}
