//! The devices and element types one can ask for by name.

use burn::tensor::{Device, FloatDType};
use clap::ValueEnum;
use serde::Serialize;

/// Where to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceName {
    /// Burn's Flex backend: the processor, on this project's CPU engine.
    Flex,
    /// An NVIDIA GPU.
    Cuda,
    /// CubeCL's processor runtime.
    Cpu,
}

/// Element type of the activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DtypeName {
    /// 32 bits.
    F32,
    /// 16 bits with five for the exponent.
    F16,
    /// 16 bits with eight for the exponent.
    Bf16,
}

impl DeviceName {
    /// The device, if this binary has it and it computes in `dtype`.
    ///
    /// # Errors
    ///
    /// What is missing.
    pub fn open(self, dtype: DtypeName) -> Result<Device, String> {
        let device = match self {
            #[cfg(feature = "flex")]
            Self::Flex => Device::flex(),
            #[cfg(feature = "cuda")]
            Self::Cuda => Device::cuda(0),
            #[cfg(feature = "cpu")]
            Self::Cpu => Device::cpu(),
            #[allow(unreachable_patterns, reason = "with all features nothing is left")]
            missing => return Err(format!("{missing:?} is not compiled in")),
        };
        match device.supports_dtype(dtype.burn()) {
            true => Ok(device),
            false => Err(format!("{self:?} does not support {dtype:?}")),
        }
    }
}

impl DtypeName {
    /// Burn's name for it.
    pub fn burn(self) -> FloatDType {
        match self {
            Self::F32 => FloatDType::F32,
            Self::F16 => FloatDType::F16,
            Self::Bf16 => FloatDType::BF16,
        }
    }
}
