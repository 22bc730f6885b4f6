//! The harness of the contract, gradient and property tests: one [`Engine`] trait over every implementation of
//! dynamic-mask attention, one comparison with the oracle, and the macro that makes a test of every engine in the
//! build.
//!
//! A check panics with the worst element of every tensor that is wrong. A function that makes a case or a call panics
//! if its sizes do not fit; one that runs it panics if the engine refuses, unless it returns the refusal as its error.
//!
//! The engines follow the features: the CPU engine always; the kernels on `cpu`, `cuda`, `wgpu` (through WGSL) or
//! `vulkan` (through SPIR-V); Burn on `flex`, `cpu`, `cuda`, and under `burn` on `wgpu`.
//! `--no-default-features --features cuda` is the GPU suite, `--no-default-features --features vulkan` that of the
//! kernels on Vulkan. Without any feature there is only the CPU engine, which the [fuzzer](fuzz) runs then.
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
pub mod prelude;
#[cfg(feature = "burn")]
pub mod tensors;

pub use call::{Call, Grads, Layout, Raw};
pub use case::{Case, problem};
pub use engine::{Competing, Engine, Gradients, Outputs, Passes, Refused, Size};

/// Makes each named function `fn test<E: Engine>(engine: &E)` one test for every engine in the build:
/// `contract::results::gqa::kernels_cpu`. A test `name: function(arguments)` is one call of a function that takes these
/// after the engine. Burn on CubeCL's CPU runtime compiles each of Burn's own operations for minutes, so it only runs
/// the tests that [`on_burn_cpu!`] names.
#[macro_export]
macro_rules! every_engine {
    ($($tests:tt)*) => { $crate::tests_on! { [cpu kernels burn] $($tests)* } };
}

/// [`every_engine!`] for the engines below Burn, which take buffers directly.
#[macro_export]
macro_rules! raw_engines {
    ($($tests:tt)*) => { $crate::tests_on! { [cpu kernels] $($tests)* } };
}

/// [`raw_engines!`] for problems that the tensor-core engines support: each of them, and the engines that they are
/// compared with.
#[macro_export]
macro_rules! tensor_core_engines {
    ($($tests:tt)*) => { $crate::tests_on! { [cpu tensor_cores] $($tests)* } };
}

/// [`raw_engines!`] for cases specific to the tensor-core kernels: without the portable kernels if a device has others,
/// because they lack such tiles and take as long to compile.
#[macro_export]
macro_rules! matrix_engines {
    ($($tests:tt)*) => { $crate::tests_on! { [cpu matrix] $($tests)* } };
}

/// [`every_engine!`] for the kernels alone: `fn test<T: Target>(kernels: &Kernels<T>)`.
#[macro_export]
macro_rules! kernel_engines {
    ($($tests:tt)*) => { $crate::tests_on! { [kernels] $($tests)* } };
}

/// [`every_engine!`] for operations that have one kernel, whatever engine attention takes.
#[macro_export]
macro_rules! every_runtime {
    ($($tests:tt)*) => { $crate::tests_on! { [cpu runtimes burn] $($tests)* } };
}

/// [`kernel_engines!`] for operations that have one kernel, whatever engine attention takes.
#[macro_export]
macro_rules! kernel_runtimes {
    ($($tests:tt)*) => { $crate::tests_on! { [runtimes] $($tests)* } };
}

/// [`every_engine!`] for every Burn backend in the build, CubeCL's CPU runtime included:
/// `fn test<B: Backend>(burn: &Burn<B>)`.
#[macro_export]
macro_rules! every_burn {
    ($($tests:tt)*) => { $crate::tests_on! { [burn burn_cpu] $($tests)* } };
}

/// [`every_burn!`] without CubeCL's CPU runtime.
#[macro_export]
macro_rules! fast_burn {
    ($($tests:tt)*) => { $crate::tests_on! { [burn] $($tests)* } };
}

/// [`every_engine!`] for Burn on CubeCL's CPU runtime alone.
#[macro_export]
macro_rules! on_burn_cpu {
    ($($test:ident $(: $of:ident($($with:expr),* $(,)?))?),* $(,)?) => {
        #[cfg(feature = "cpu")]
        mod burn_cpu {
            #[allow(unused_imports)]
            use super::*;

            $(
                #[test]
                fn $test() {
                    $crate::run_on!(BurnOnCpu $test $($of($($with),*))?);
                }
            )*
        }
    };
}

/// Calls `test(engine)` for every engine in the build: for a test whose expected result takes longer than the engines.
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
    (@ [$($set:ident)*] $with:tt) => { $crate::engines_of! { engine_test $with $($set)* } };
    ($sets:tt $($test:ident $(: $of:ident($($with:expr),* $(,)?))?),* $(,)?) => {$(
        mod $test {
            #[allow(unused_imports)]
            use super::*;

            $crate::tests_on! { @ $sets [$test $($of($($with),*))?] }
        }
    )*};
}

#[macro_export]
#[doc(hidden)]
macro_rules! run_on {
    ($engine:ident $test:ident) => { $crate::run_on!($engine $test $test()) };
    ($engine:ident $test:ident $of:ident($($with:expr),*)) => {
        super::$of($crate::engine::shared::<$crate::engines::$engine>() $(, $with)*)
    };
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
    ([$($test:tt)*] [$($condition:tt)*] $name:ident = $engine:ident) => {
        #[cfg($($condition)*)]
        #[test]
        fn $name() {
            $crate::run_on!($engine $($test)*);
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
