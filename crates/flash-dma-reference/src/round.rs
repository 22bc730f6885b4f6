//! Rounding to the element types, so that the oracle sees exactly the numbers that an engine sees.

use flash_dma_problem::ElementType;
use half::{bf16, f16};

/// The nearest value of the element type, ties to even.
#[must_use]
pub fn round(x: f64, element: ElementType) -> f64 {
    match element {
        ElementType::F32 => f64::from(x as f32),
        ElementType::F16 => f16::from_f64(x).to_f64(),
        ElementType::Bf16 => bf16::from_f64(x).to_f64(),
    }
}

/// [`round()`] of an f32.
#[must_use]
pub fn round_f32(x: f32, element: ElementType) -> f32 {
    match element {
        ElementType::F32 => x,
        ElementType::F16 => f16::from_f32(x).to_f32(),
        ElementType::Bf16 => bf16::from_f32(x).to_f32(),
    }
}

/// The distance from 1 to the next greater value of the element type.
#[must_use]
pub fn epsilon(element: ElementType) -> f64 {
    match element {
        ElementType::F32 => f64::from(f32::EPSILON),
        ElementType::F16 => f16::EPSILON.to_f64(),
        ElementType::Bf16 => bf16::EPSILON.to_f64(),
    }
}
