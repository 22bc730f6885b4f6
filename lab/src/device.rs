//! Devices and element types by name.

use crate::Result;
use burn::tensor::{Device, FloatDType};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Device to train on; its name is also that of the Cargo feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceName {
    /// Burn's Flex backend: the processor, on this project's CPU engine.
    Flex,
    /// An NVIDIA GPU.
    Cuda,
}

/// Element type of the activations; parameters and optimiser state are f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DtypeName {
    /// 32 bits.
    F32,
    /// 16 bits with five for the exponent. There is no loss scaling: small gradients vanish.
    F16,
    /// 16 bits with eight for the exponent.
    Bf16,
}

impl DeviceName {
    /// Opens the device, if this binary has it and it supports `dtype`.
    pub fn open(self, dtype: DtypeName) -> Result<Device> {
        let name = name(self);
        let device = match self {
            #[cfg(feature = "flex")]
            Self::Flex => Device::flex(),
            #[cfg(feature = "cuda")]
            Self::Cuda => Device::cuda(0),
            #[allow(unreachable_patterns, reason = "with all features nothing is left")]
            _ => return Err(format!("--device {name}: build with --features {name}").into()),
        };
        match device.supports_dtype(dtype.burn()) {
            true => Ok(device),
            false => {
                let dtype = crate::device::name(dtype);
                Err(format!("--device {name} does not support --dtype {dtype}").into())
            }
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

/// Name of a value on the command line and in the rows.
pub fn name(value: impl ValueEnum) -> String {
    let value = value.to_possible_value().expect("no value is hidden");
    value.get_name().to_owned()
}
