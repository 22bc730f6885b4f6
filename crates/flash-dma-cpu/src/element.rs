//! The element types of `q`, `k`, `v` and their gradients.

use flash_dma_problem::ElementType;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Element types the engine computes on: `f32`, [`half::f16`] and [`half::bf16`]. Arithmetic is f32
/// for all of them. The trait is sealed.
pub trait Element: sealed::Sealed + Copy + Send + Sync + 'static {
    /// The type as the problem names it.
    const TYPE: ElementType;

    /// Widens `source` to f32, exactly. The slices have the same length.
    #[doc(hidden)]
    fn widen(source: &[Self], target: &mut [f32]);

    /// Rounds `source` to this type, to nearest even. The slices have the same length.
    #[doc(hidden)]
    fn round(source: &[f32], target: &mut [Self]);
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

impl Element for f32 {
    const TYPE: ElementType = ElementType::F32;

    #[inline]
    fn widen(source: &[Self], target: &mut [f32]) {
        target.copy_from_slice(source);
    }

    #[inline]
    fn round(source: &[f32], target: &mut [Self]) {
        target.copy_from_slice(source);
    }
}

impl Element for f16 {
    const TYPE: ElementType = ElementType::F16;

    #[inline]
    fn widen(source: &[Self], target: &mut [f32]) {
        source.convert_to_f32_slice(target);
    }

    #[inline]
    fn round(source: &[f32], target: &mut [Self]) {
        target.convert_from_f32_slice(source);
    }
}

impl Element for bf16 {
    const TYPE: ElementType = ElementType::Bf16;

    #[inline]
    fn widen(source: &[Self], target: &mut [f32]) {
        // The upper half of an f32: a shift, which vectorises (half's own loop branches on NaN).
        for (target, source) in target.iter_mut().zip(source) {
            *target = f32::from_bits(u32::from(source.to_bits()) << 16);
        }
    }

    #[inline]
    fn round(source: &[f32], target: &mut [Self]) {
        target.convert_from_f32_slice(source);
    }
}
