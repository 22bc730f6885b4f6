//! Devices and element types by name.

use crate::Result;
use burn::tensor::{Device, FloatDType};
use clap::{Args, ValueEnum};
use serde::Serialize;

/// Device and element type for Burn.
#[derive(Args, Clone, Debug, Serialize)]
pub struct Place {
    /// Device.
    #[arg(long, value_enum, default_value = "cuda")]
    pub device: DeviceName,
    /// Element type of the activations, and of the caches.
    #[arg(long, value_enum, default_value = "bf16")]
    pub dtype: DtypeName,
}

/// A device.
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

impl Place {
    /// Opens the device, with the same random numbers in every process, if this binary has it and it supports the
    /// type.
    pub fn open(&self) -> Result<Device> {
        let device = self.numbered(0)?;
        device.seed(0);
        Ok(device)
    }

    /// The device of this number; the processor is one device, whatever its number.
    pub fn numbered(&self, number: usize) -> Result<Device> {
        let device = match (self.device, number) {
            #[cfg(feature = "flex")]
            (DeviceName::Flex, _) => Device::flex(),
            #[cfg(feature = "cuda")]
            (DeviceName::Cuda, number) => Device::cuda(number),
            #[cfg(feature = "cpu")]
            (DeviceName::Cpu, _) => Device::cpu(),
            #[allow(unreachable_patterns, reason = "with all features nothing is left")]
            (missing, _) => return Err(format!("{missing:?} is not compiled in").into()),
        };
        if !device.supports_dtype(self.dtype.burn()) {
            return Err(format!("{:?} does not support {:?}", self.device, self.dtype).into());
        }
        Ok(device)
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
