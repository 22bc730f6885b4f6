//! The engines of this build.

pub(crate) mod burn;
pub(crate) mod cpu;
pub(crate) mod kernels;

#[cfg(feature = "cpu")]
pub use burn::BurnOnCpu;
#[cfg(feature = "cuda")]
pub use burn::BurnOnCuda;
#[cfg(feature = "flex")]
pub use burn::BurnOnFlex;
#[cfg(feature = "wgpu")]
pub use burn::BurnOnWgpu;
pub use burn::{Backend, Burn};
pub use cpu::Cpu;
#[cfg(feature = "cpu")]
pub use kernels::KernelsOnCpu;
#[cfg(feature = "wgpu")]
pub use kernels::KernelsOnWgpu;
pub use kernels::{Kernels, Target};
#[cfg(feature = "cuda")]
pub use kernels::{KernelsOnCuda, KernelsOnCudaMma, KernelsOnCudaPortable, KernelsOnCudaWgmma};

use half::{bf16, f16};

/// An element type on the host.
pub(crate) trait Host: Copy + PartialEq + bytemuck::Pod {
    fn from_f64(x: f64) -> Self;
    fn to_f64(self) -> f64;
}

impl Host for f32 {
    fn from_f64(x: f64) -> Self {
        x as Self
    }

    fn to_f64(self) -> f64 {
        f64::from(self)
    }
}

impl Host for f16 {
    fn from_f64(x: f64) -> Self {
        Self::from_f64(x)
    }

    fn to_f64(self) -> f64 {
        f64::from(self)
    }
}

impl Host for bf16 {
    fn from_f64(x: f64) -> Self {
        Self::from_f64(x)
    }

    fn to_f64(self) -> f64 {
        f64::from(self)
    }
}

pub(crate) fn narrow<E: Host>(values: &[f64]) -> Vec<E> {
    values.iter().map(|&x| E::from_f64(x)).collect()
}

pub(crate) fn widen<E: Host>(values: &[E]) -> Vec<f64> {
    values.iter().map(|x| x.to_f64()).collect()
}

/// What the buffers of results hold before a call: exact in every type, and no result.
const SENTINEL: f64 = -12345.0;

pub(crate) fn sentinels<E: Host>(len: usize) -> Vec<E> {
    vec![E::from_f64(SENTINEL); len]
}

pub(crate) fn is_untouched<E: Host>(values: &[E]) -> bool {
    values.iter().all(|&x| x == E::from_f64(SENTINEL))
}
