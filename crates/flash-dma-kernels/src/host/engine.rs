//! The matrix engines, and which of them to try.

use flash_dma_problem::AttentionError;

/// The matrix engine of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Engine {
    /// Register tiles of single units: every device, element type and head dimension.
    Portable,
    /// `mma.sync` on tensor cores: f16 and bf16, head dimensions that are multiples of 32, rows that begin at multiples
    /// of 16 bytes, on CUDA devices of sm_80 and newer.
    Mma,
    /// `wgmma` on tensor cores: f16 and bf16, head dimensions that are multiples of 16, at least 32, rows that begin at
    /// multiples of 16 bytes, on CUDA devices of sm_90.
    Wgmma,
}

/// The environment variable that restricts the choice of engines, for comparisons: `portable` excludes the tensor
/// cores, `mma` the `wgmma` engine, in attention and in products of the whole process. Products in f32 are then exact
/// to f32 with `portable`, where tensor cores would multiply in TF32. Read at every call.
pub const ENGINE_VARIABLE: &str = "FLASH_DMA_ENGINE";

impl Engine {
    /// The engines to try before [`Engine::Portable`], the fastest first: all engines that [`ENGINE_VARIABLE`] does not
    /// exclude.
    fn tensor_cores() -> Result<&'static [Self], AttentionError> {
        match std::env::var(ENGINE_VARIABLE).as_deref() {
            Err(_) | Ok("" | "wgmma") => Ok(&[Engine::Wgmma, Engine::Mma]),
            Ok("mma") => Ok(&[Engine::Mma]),
            Ok("portable") => Ok(&[]),
            Ok(other) => Err(AttentionError::Unsupported {
                what: format!("{ENGINE_VARIABLE}={other} (portable, mma or wgmma)"),
            }),
        }
    }

    /// Whether [`ENGINE_VARIABLE`] leaves it in.
    pub(crate) fn is_allowed(self) -> bool {
        self == Self::Portable || Self::tensor_cores().is_ok_and(|engines| engines.contains(&self))
    }

    /// The first engine for which `of` returns a configuration, and that; [`Engine::Portable`] is tried last.
    pub(crate) fn first<C>(
        of: impl Fn(Self) -> Result<C, AttentionError>,
    ) -> Result<(Self, C), AttentionError> {
        for &engine in Self::tensor_cores()? {
            if let Ok(config) = of(engine) {
                return Ok((engine, config));
            }
        }
        Ok((Self::Portable, of(Self::Portable)?))
    }

    /// The instruction of its products; none for single units.
    pub(crate) fn instruction(self) -> Option<Instruction> {
        match self {
            Self::Portable => None,
            Self::Mma => Some(Instruction::Mma),
            Self::Wgmma => Some(Instruction::Wgmma),
        }
    }
}

/// The tensor cores' instruction of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Instruction {
    /// `mma.sync`: a warp multiplies 16 rows, operands in registers. sm_80 and newer.
    Mma,
    /// `wgmma`: four warps multiply 64 rows, operands in shared memory. sm_90 alone.
    Wgmma,
}
