//! The engines of this build.

#[cfg(feature = "kernels")]
pub(crate) mod buffers;
#[cfg(feature = "burn")]
pub(crate) mod burn;
pub(crate) mod cpu;
#[cfg(feature = "kernels")]
pub(crate) mod kernels;
#[cfg(feature = "kernels")]
pub mod memory;

#[cfg(feature = "kernels")]
pub use buffers::{binding, contiguous};
#[cfg(feature = "burn")]
pub use burn::*;
pub use cpu::Cpu;
#[cfg(feature = "kernels")]
pub use kernels::*;

use core::cell::RefCell;
use half::{bf16, f16};

/// The passes of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Pass {
    /// Selection and the forward pass.
    Forward,
    /// The backward pass.
    Backward,
    /// The forward pass under a mask or bias.
    MaskedForward,
    /// The backward pass under a mask or bias.
    MaskedBackward,
    /// A step over a cache.
    Decode,
}

impl Pass {
    /// All passes.
    pub const ALL: [Self; 5] = [
        Self::Forward,
        Self::Backward,
        Self::MaskedForward,
        Self::MaskedBackward,
        Self::Decode,
    ];
}

thread_local! {
    static NOTES: RefCell<Vec<(Pass, &'static str)>> = const { RefCell::new(Vec::new()) };
}

/// Records the implementation of a pass on this thread, if the engine has several.
#[cfg(feature = "kernels")]
pub(crate) fn note(pass: Pass, by: &'static str) {
    NOTES.with_borrow_mut(|notes| {
        if !notes.contains(&(pass, by)) {
            notes.push((pass, by));
        }
    });
}

/// The implementations of the passes on this thread since the last call; empty for engines with one implementation.
pub fn take_notes() -> Vec<(Pass, &'static str)> {
    NOTES.take()
}

pub(crate) trait Host: Copy + PartialEq + bytemuck::Pod {
    fn from_f64(x: f64) -> Self;
    fn to_f64(self) -> f64;
}

macro_rules! host {
    ($($element:ident: $from:expr,)*) => {$(
        impl Host for $element {
            fn from_f64(x: f64) -> Self {
                $from(x)
            }

            fn to_f64(self) -> f64 {
                f64::from(self)
            }
        }
    )*};
}

host!(
    f32: |x| x as f32,
    f16: f16::from_f64,
    bf16: bf16::from_f64,
);

/// Calls a function of a host type with that of an element type.
macro_rules! of_element {
    ($element:expr, $run:ident($($with:expr),*)) => {
        match $element {
            flash_dma_problem::ElementType::F32 => $run::<f32>($($with),*),
            flash_dma_problem::ElementType::F16 => $run::<half::f16>($($with),*),
            flash_dma_problem::ElementType::Bf16 => $run::<half::bf16>($($with),*),
        }
    };
}
pub(crate) use of_element;

pub(crate) fn narrow<E: Host>(values: &[f64]) -> Vec<E> {
    values.iter().map(|&x| E::from_f64(x)).collect()
}

pub(crate) fn widen<E: Host>(values: &[E]) -> Vec<f64> {
    values.iter().map(|x| x.to_f64()).collect()
}

/// The content of result buffers before a call: exact in every type, and never a result.
const SENTINEL: f64 = -12345.0;

pub(crate) fn sentinels<E: Host>(len: usize) -> Vec<E> {
    vec![E::from_f64(SENTINEL); len]
}

pub(crate) fn is_untouched<E: Host>(values: &[E]) -> bool {
    values.iter().all(|&x| x == E::from_f64(SENTINEL))
}
