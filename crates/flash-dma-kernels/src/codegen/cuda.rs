//! The CUDA device that kernels are recorded for, and their CUDA C++.

use cubecl::ir::features::{Plane, Tma, TypeUsage};
use cubecl::ir::{
    DeviceIdentity, DeviceProperties, ElemType, FloatKind, HardwareProperties,
    MemoryDeviceProperties, OpaqueType, VectorSize,
};
use cubecl::{Compiler, CubeKernel, define_kernel};
use cubecl_cpp::cuda::arch::CudaArchitecture;
use cubecl_cpp::cuda::mma::CudaCmmaCompiler;
use cubecl_cpp::cuda::supported_mma_combinations;
use cubecl_cpp::shared::{
    CompilationOptions, CppCompiler, CppSupportedFeatures, register_mma_features,
    register_wmma_features,
};
use cubecl_cpp::target::Cuda;

pub(crate) struct Source {
    /// The translation unit, as CubeCL hands it to NVRTC.
    pub text: String,
    /// Dynamic shared memory that a launch reserves, in bytes.
    pub shared_bytes: usize,
}

/// A device that kernels are chosen for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gpu {
    /// Hopper: `wgmma`, the most shared memory.
    H200,
    /// Ampere, the oldest with `cp.async` and `mma` of bf16.
    A100,
    /// Ada: the least shared memory.
    Rtx4090,
    /// Blackwell, for servers and for workstations.
    B200,
    Rtx5090,
}

impl Gpu {
    /// All devices; the first one names shared variants.
    pub const ALL: [Self; 5] = [
        Self::H200,
        Self::A100,
        Self::Rtx4090,
        Self::B200,
        Self::Rtx5090,
    ];

    /// The devices that together launch nearly every variant.
    pub const USUAL: &'static [Self] = &[Self::H200, Self::A100];

    /// The architecture that NVRTC and ptxas compile for.
    pub fn arch(self) -> &'static str {
        match self {
            Self::H200 => "sm_90a",
            Self::A100 => "sm_80",
            Self::Rtx4090 => "sm_89",
            Self::B200 => "sm_100",
            Self::Rtx5090 => "sm_120",
        }
    }
}

/// The device as `cubecl-cuda` describes it to the code that chooses kernels.
pub(crate) fn device_properties(gpu: Gpu) -> DeviceProperties {
    let (version, memory, shared, multiprocessors) = match gpu {
        Gpu::H200 => (90, 140 << 30, 227 << 10, 132),
        Gpu::A100 => (80, 80 << 30, 163 << 10, 108),
        Gpu::Rtx4090 => (89, 24 << 30, 99 << 10, 128),
        Gpu::B200 => (100, 180 << 30, 227 << 10, 148),
        Gpu::Rtx5090 => (120, 32 << 30, 99 << 10, 170),
    };
    let arch = CudaArchitecture {
        version,
        tensor_cores: true,
    };
    let mut properties = DeviceProperties::new(
        Default::default(),
        MemoryDeviceProperties::new(memory, 512),
        HardwareProperties {
            load_width: 128,
            vector_register_count: None,
            plane_size_min: 32,
            plane_size_max: 32,
            max_bindings: 1024,
            max_shared_memory_size: shared,
            max_cube_count: (i32::MAX as u32, 65535, 65535),
            max_units_per_cube: 1024,
            max_cube_dim: (1024, 1024, 64),
            num_streaming_multiprocessors: Some(multiprocessors),
            num_tensor_cores: Some(4),
            min_tensor_cores_dim: Some(8),
            num_cpu_cores: None,
            last_level_cache_size: None,
            max_vector_size: VectorSize::MAX,
            cube_mma_reserved_shared_memory: 0,
        },
        cubecl::profile::TimingMethod::Device,
        DeviceIdentity {
            name: format!("{gpu:?} (recorded)"),
            fingerprint: format!("ptx_sm{version}"),
            physical: None,
        },
    );
    cubecl_cpp::register_supported_types(&mut properties);
    properties.register_type_usage(ElemType::Float(FloatKind::TF32), TypeUsage::Conversion);
    properties.register_opaque_type(OpaqueType::Barrier);
    if version >= 90 {
        properties.register_opaque_type(OpaqueType::TensorMap);
    }
    let features = &mut properties.features;
    for plane in [Plane::Ops, Plane::Sync, Plane::NonUniformControlFlow] {
        features.plane.insert(plane);
    }
    for kind in [FloatKind::F16, FloatKind::BF16] {
        features.matmul.ldmatrix.insert(ElemType::Float(kind));
        features.matmul.stmatrix.insert(ElemType::Float(kind));
    }
    features.copy_async = true;
    if version >= 90 {
        features.tma.insert(Tma::Base);
    }
    features.cube_cluster = version >= 90;
    features.memory_reinterpret = true;
    features.alignment = true;
    features.device_memory_scope = true;
    register_wmma_features(
        CudaCmmaCompiler::Cpp.supported_cmma_combinations(&arch),
        &mut properties,
    );
    register_mma_features(supported_mma_combinations(&arch), &mut properties);
    properties
}

/// Generates the kernel's CUDA C++ with the options that `cubecl-cuda` uses on sm_80 and later.
pub(crate) fn generate(kernel: &dyn CubeKernel) -> Result<Source, String> {
    let options = CompilationOptions {
        warp_size: 32,
        supports_features: CppSupportedFeatures {
            grid_constants: true,
            fast_math: true,
            fast_tanh: true,
            dp4a: true,
            // Only on sm_90; kernels that need them are not generated for both architectures.
            clusters: false,
            elect_sync: false,
        },
        ..Default::default()
    };
    let definition = define_kernel(kernel).map_err(|e| e.to_string())?;
    let compiled = CppCompiler::<Cuda>::default()
        .compile(definition, &options)
        .map_err(|e| e.to_string())?;
    Ok(Source {
        shared_bytes: compiled.shared_memory_size,
        text: compiled.source,
    })
}
