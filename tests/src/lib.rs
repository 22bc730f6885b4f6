//! The harness of the contract, gradient and property tests: one [`Engine`] trait over everything
//! that computes dynamic-mask attention, one comparison with the oracle, and the macro that makes a
//! test of every engine in the build.
//!
//! The engines follow the features: the CPU engine always; the kernels on `cpu`, `cuda`, `wgpu`; Burn
//! on `flex`, `cpu`, `cuda`, `wgpu`. `--no-default-features --features cuda` is the GPU suite.
#![warn(missing_docs)]

pub mod call;
pub mod case;
pub mod decoding;
pub mod engine;
pub mod engines;
pub mod masked;

pub use call::{Call, Layout, Raw};
pub use case::{Case, problem};
pub use engine::{Engine, Gradients, Outputs, Refused, Size};

/// Makes each named function `fn test<E: Engine>(engine: &E)` one test for every engine in the
/// build: `contract::results::gqa::kernels_cpu`. Burn on CubeCL's CPU runtime compiles each of Burn's own
/// operations for minutes, so it has only what [`on_burn_cpu!`] names.
#[macro_export]
macro_rules! every_engine {
    ($($test:ident),* $(,)?) => {$(
        mod $test {
            $crate::engine_tests!($test:
                [all()] cpu = Cpu,
                [feature = "cpu"] kernels_cpu = KernelsOnCpu,
                [feature = "cuda"] kernels_cuda = KernelsOnCuda,
                [feature = "cuda"] kernels_cuda_mma = KernelsOnCudaMma,
                [feature = "cuda"] kernels_cuda_portable = KernelsOnCudaPortable,
                [feature = "wgpu"] kernels_wgpu = KernelsOnWgpu,
                [feature = "flex"] burn_flex = BurnOnFlex,
                [feature = "cuda"] burn_cuda = BurnOnCuda,
                [feature = "wgpu"] burn_wgpu = BurnOnWgpu,
            );
        }
    )*};
}

/// As [`every_engine!`], for those that attend under masks and biases.
#[macro_export]
macro_rules! masked_engines {
    ($($test:ident),* $(,)?) => {$(
        mod $test {
            $crate::engine_tests!($test:
                [all()] cpu = Cpu,
                [feature = "cpu"] kernels_cpu = KernelsOnCpu,
                [feature = "cuda"] kernels_cuda = KernelsOnCuda,
                [feature = "cuda"] kernels_cuda_portable = KernelsOnCudaPortable,
                [feature = "wgpu"] kernels_wgpu = KernelsOnWgpu,
                [feature = "flex"] burn_flex = BurnOnFlex,
                [feature = "cuda"] burn_cuda = BurnOnCuda,
            );
        }
    )*};
}

/// As [`every_engine!`], for the engines below Burn: those that take buffers as they are.
#[macro_export]
macro_rules! raw_engines {
    ($($test:ident),* $(,)?) => {$(
        mod $test {
            $crate::engine_tests!($test:
                [all()] cpu = Cpu,
                [feature = "cpu"] kernels_cpu = KernelsOnCpu,
                [feature = "cuda"] kernels_cuda = KernelsOnCuda,
                [feature = "cuda"] kernels_cuda_mma = KernelsOnCudaMma,
                [feature = "cuda"] kernels_cuda_portable = KernelsOnCudaPortable,
                [feature = "wgpu"] kernels_wgpu = KernelsOnWgpu,
            );
        }
    )*};
}

/// Makes each named function `fn test<B: Backend>(burn: &Burn<B>)` one test for every Burn backend in the
/// build, CubeCL's CPU runtime included.
#[macro_export]
macro_rules! every_burn {
    ($($test:ident),* $(,)?) => {$(
        mod $test {
            $crate::engine_tests!($test:
                [feature = "flex"] burn_flex = BurnOnFlex,
                [feature = "cpu"] burn_cpu = BurnOnCpu,
                [feature = "cuda"] burn_cuda = BurnOnCuda,
                [feature = "wgpu"] burn_wgpu = BurnOnWgpu,
            );
        }
    )*};
}

/// As [`every_engine!`], for the kernels alone: `fn test<T: Target>(kernels: &Kernels<T>)`.
#[macro_export]
macro_rules! kernel_engines {
    ($($test:ident),* $(,)?) => {$(
        mod $test {
            $crate::engine_tests!($test:
                [feature = "cpu"] kernels_cpu = KernelsOnCpu,
                [feature = "cuda"] kernels_cuda = KernelsOnCuda,
                [feature = "cuda"] kernels_cuda_mma = KernelsOnCudaMma,
                [feature = "cuda"] kernels_cuda_portable = KernelsOnCudaPortable,
                [feature = "wgpu"] kernels_wgpu = KernelsOnWgpu,
            );
        }
    )*};
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

/// The tests of one function, each if its condition holds in this build.
#[macro_export]
#[doc(hidden)]
macro_rules! engine_tests {
    ($test:ident: $([$($condition:tt)*] $name:ident = $engine:ident,)*) => {$(
        #[cfg($($condition)*)]
        #[test]
        fn $name() {
            super::$test($crate::engine::shared::<$crate::engines::$engine>());
        }
    )*};
}
