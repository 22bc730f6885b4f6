//! Measured peak rates of a device: `benches/roof.py` times PyTorch's matrix product (cuBLAS) and copy.

use flash_dma_problem::ElementType;
use serde::Deserialize;

/// Measured rates of one device.
#[derive(Clone, Debug, Deserialize)]
pub struct Roof {
    /// Matrix products in bf16, TFLOP/s.
    pub bf16_tflops: f64,
    /// Matrix products in f16, TFLOP/s.
    pub f16_tflops: f64,
    /// Matrix products in f32 without TF32, TFLOP/s.
    pub f32_tflops: f64,
    /// A copy in device memory, bytes read plus bytes written, GB/s.
    pub copy_gbs: f64,
}

impl Roof {
    /// Reads a file that `benches/roof.py` has printed.
    pub fn read(path: &str) -> Result<Self, String> {
        let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
        serde_json::from_str(&text).map_err(|error| error.to_string())
    }

    fn tflops(&self, element: ElementType) -> f64 {
        match element {
            ElementType::F32 => self.f32_tflops,
            ElementType::F16 => self.f16_tflops,
            ElementType::Bf16 => self.bf16_tflops,
        }
    }

    /// Minimum time of this many operations on this many bytes, in milliseconds.
    pub fn ms(&self, element: ElementType, flops: f64, bytes: f64) -> f64 {
        let compute = flops / (self.tflops(element) * 1e9);
        let memory = bytes / (self.copy_gbs * 1e6);
        compute.max(memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slower_of_arithmetic_and_memory_is_the_bound() {
        let roof = Roof {
            bf16_tflops: 500.0,
            f16_tflops: 500.0,
            f32_tflops: 50.0,
            copy_gbs: 4000.0,
        };
        // 1e12 operations at 500e12 per second; 4e9 bytes at 4e12 per second.
        assert_eq!(roof.ms(ElementType::Bf16, 1e12, 4e6), 2.0);
        assert_eq!(roof.ms(ElementType::F32, 1e12, 4e6), 20.0);
        assert_eq!(roof.ms(ElementType::Bf16, 1e9, 4e9), 1.0);
    }
}
