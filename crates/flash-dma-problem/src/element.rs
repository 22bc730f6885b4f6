//! Element types.

use core::fmt;

/// Element types of `q`, `k`, `v` and their gradients. Scores, LSE and arithmetic are always f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// 32-bit IEEE.
    F32,
    /// 16-bit IEEE.
    F16,
    /// The upper half of an f32.
    Bf16,
}

impl ElementType {
    /// Bytes per element.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        })
    }
}
