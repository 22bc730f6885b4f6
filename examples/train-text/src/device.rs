//! The devices and element types one can ask for by name.

use burn::prelude::*;
use burn::tensor::FloatDType;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::error::Error;

/// Where to train.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceName {
    /// Burn's Flex backend: the processor, on this project's CPU engine.
    Flex,
    /// An NVIDIA GPU.
    Cuda,
    /// CubeCL's processor runtime. It is there to check kernels: training on it is very slow.
    Cpu,
    /// A GPU through WebGPU.
    Wgpu,
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
    /// The name as it is written after `--device`, which is also the Cargo feature.
    pub fn name(self) -> &'static str {
        match self {
            Self::Flex => "flex",
            Self::Cuda => "cuda",
            Self::Cpu => "cpu",
            Self::Wgpu => "wgpu",
        }
    }

    /// The device, if this binary has it and it computes in `dtype`.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceNotCompiled`], [`Error::Dtype`].
    pub fn open(self, dtype: DtypeName) -> Result<Device, Error> {
        let device = match self {
            #[cfg(feature = "flex")]
            Self::Flex => Device::flex(),
            #[cfg(feature = "cuda")]
            Self::Cuda => Device::cuda(0),
            #[cfg(feature = "cpu")]
            Self::Cpu => Device::cpu(),
            #[cfg(feature = "wgpu")]
            Self::Wgpu => Device::wgpu(burn::tensor::DeviceKind::DefaultDevice),
            #[allow(unreachable_patterns, reason = "with all features nothing is left")]
            missing => return Err(Error::DeviceNotCompiled(missing.name())),
        };
        if device.supports_dtype(dtype.burn()) {
            Ok(device)
        } else {
            Err(Error::Dtype {
                device: self.name(),
                dtype: dtype.name(),
            })
        }
    }
}

impl DtypeName {
    /// The name as it is written after `--dtype`.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// Burn's name for it.
    pub fn burn(self) -> FloatDType {
        match self {
            Self::F32 => FloatDType::F32,
            Self::F16 => FloatDType::F16,
            Self::Bf16 => FloatDType::BF16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(not(feature = "wgpu"))]
    #[test]
    fn a_device_that_is_not_compiled_in_names_its_feature() {
        let error = DeviceName::Wgpu.open(DtypeName::F32).unwrap_err();
        assert_eq!(
            error.to_string(),
            "--device wgpu is not compiled in: build with --features wgpu"
        );
    }

    #[test]
    fn names_are_the_ones_of_the_command_line_and_of_the_settings_file() {
        for device in DeviceName::value_variants() {
            let written = device.to_possible_value().unwrap();
            assert_eq!(written.get_name(), device.name());
            assert_eq!(serde_json::to_value(device).unwrap(), device.name());
        }
        for dtype in DtypeName::value_variants() {
            let written = dtype.to_possible_value().unwrap();
            assert_eq!(written.get_name(), dtype.name());
            assert_eq!(serde_json::to_value(dtype).unwrap(), dtype.name());
        }
    }
}
