//! Which engine computes a call, and why, answered before anything is launched by the code that chooses it.
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn::tensor::Device;
//! use burn_flash_dma::engines::{Engine, engine_for, engines};
//! use burn_flash_dma::{AttentionOptions, ElementType, Problem};
//!
//! let device = Device::flex();
//! assert_eq!(engines(&device)?, [Engine::Cpu]);
//!
//! let (q, kv) = ([1, 8, 4096, 80], [1, 2, 4096, 80]);
//! let options = AttentionOptions::new().with_keep_window(512);
//! let problem = Problem::new(&q, &kv, &kv, Some(&kv[..3]), ElementType::Bf16, &options)?;
//! let report = engine_for(&problem, &device)?;
//! assert_eq!((report.forward, report.backward), (Engine::Cpu, Engine::Cpu));
//! # }
//! # Ok::<(), burn_flash_dma::AttentionError>(())
//! ```
//!
//! A pass that falls to the portable kernels although its device has tensor cores warns through the crate `log`, once
//! for each device and reason. [`AttentionOptions::engine`](crate::AttentionOptions::engine) forces an engine per
//! call, and the environment variable `FLASH_DMA_ENGINE` excludes the faster ones in the whole process.

pub use flash_dma_problem::{Engine, EngineChoice, EngineReport, Obstacle, PassKind, PassedOver};

#[cfg(any(feature = "cube", feature = "flex"))]
use burn::backend::DispatchDevice;
use burn::tensor::Device;
use flash_dma_problem::{AttentionError, MaskedProblem, Problem};

/// Engines available on a device, the fastest first. On CubeCL's devices, without those that `FLASH_DMA_ENGINE`
/// excludes; empty on a backend without an engine.
///
/// # Errors
///
/// [`AttentionError::Unsupported`] if the variable does not name an engine.
pub fn engines(device: &Device) -> Result<Vec<Engine>, AttentionError> {
    match Kind::of(device) {
        #[cfg(feature = "cube")]
        Kind::Cube(client) => flash_dma_kernels::engines(&client),
        #[cfg(feature = "flex")]
        Kind::Flex => Ok(vec![Engine::Cpu]),
        Kind::Other(_) => Ok(Vec::new()),
    }
}

/// Engines that compute both passes of a [`Problem`] or [`MaskedProblem`] on a device if its tensors are contiguous,
/// and the reasons why no faster one does.
///
/// Rows that do not begin at multiples of 16 bytes, or are repeated, exclude tensor cores unless the call asks for
/// them. An engine may leave single kernels of a pass to the portable ones, such as those of biases.
///
/// # Errors
///
/// [`AttentionError::Engine`] if the problem asks for an engine that does not support it,
/// [`AttentionError::NoEngine`] on a backend without one, or any other error with which attention would refuse the
/// problem there.
pub fn engine_for<P: EngineProblem>(
    problem: &P,
    device: &Device,
) -> Result<EngineReport, AttentionError> {
    match (problem.attention().engine, Kind::of(device)) {
        (_, Kind::Other(error)) => Err(error),
        #[cfg(feature = "cube")]
        (_, Kind::Cube(client)) => flash_dma_kernels::engine_for(&client, problem),
        #[cfg(feature = "flex")]
        (choice, Kind::Flex) => {
            check_cpu(choice)?;
            let cpu = || (Engine::Cpu, Vec::new());
            Ok(EngineReport::new(cpu(), cpu()))
        }
    }
}

pub(crate) fn has_kernels(device: &Device) -> bool {
    match Kind::of(device) {
        #[cfg(feature = "cube")]
        Kind::Cube(_) => true,
        _ => false,
    }
}

/// Refuses a backend without an engine, a requested engine that does not support the call, and a call too large for
/// the device's grid, before the operation fails when it runs. Checks the backward pass if `gradients`.
pub(crate) fn check<P: EngineProblem>(
    problem: &P,
    device: &Device,
    gradients: bool,
) -> Result<(), AttentionError> {
    let attention = problem.attention();
    let _ = gradients;
    match (attention.engine, Kind::of(device)) {
        (_, Kind::Other(error)) => Err(error),
        #[cfg(feature = "cube")]
        (EngineChoice::Fastest, Kind::Cube(client))
            if flash_dma_kernels::fits_grid(&client, attention) =>
        {
            Ok(())
        }
        #[cfg(feature = "cube")]
        (_, Kind::Cube(client)) => flash_dma_kernels::check_engine(&client, problem, gradients),
        #[cfg(feature = "flex")]
        (choice, Kind::Flex) => check_cpu(choice),
    }
}

/// Refuses a device whose backend has no engine, and so no operation of this crate.
pub(crate) fn check_backend(device: &Device) -> Result<(), AttentionError> {
    match device.clone().inner().as_dispatch() {
        #[cfg(feature = "cube")]
        DispatchDevice::Cube(_) => Ok(()),
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) => Ok(()),
        #[allow(unreachable_patterns)]
        other => Err(no_engine(&format!("{other:?}"))),
    }
}

/// Error for a device, which begins with the name of its backend: `LibTorch(Cuda(0))`.
fn no_engine(device: &str) -> AttentionError {
    let backend = device.split('(').next().unwrap_or(device).into();
    AttentionError::NoEngine { backend }
}

#[cfg(feature = "flex")]
fn check_cpu(choice: EngineChoice) -> Result<(), AttentionError> {
    match choice {
        EngineChoice::Fastest | EngineChoice::Only(Engine::Cpu) => Ok(()),
        EngineChoice::Only(engine) => Err(AttentionError::Engine {
            engine,
            pass: PassKind::Forward,
            obstacle: Obstacle::OtherBackend,
        }),
    }
}

/// Problems that [`engine_for`] takes.
#[cfg(feature = "cube")]
pub trait EngineProblem: sealed::Attends + flash_dma_kernels::Reported {}
/// Problems that [`engine_for`] takes.
#[cfg(not(feature = "cube"))]
pub trait EngineProblem: sealed::Attends {}

impl EngineProblem for Problem {}
impl EngineProblem for MaskedProblem {}

mod sealed {
    use super::{MaskedProblem, Problem};

    pub trait Attends {
        /// The problem without mask and bias.
        fn attention(&self) -> &Problem;
    }

    impl Attends for Problem {
        fn attention(&self) -> &Problem {
            self
        }
    }

    impl Attends for MaskedProblem {
        fn attention(&self) -> &Problem {
            &self.attention
        }
    }
}

enum Kind {
    #[cfg(feature = "cube")]
    Cube(cubecl::client::Client),
    #[cfg(feature = "flex")]
    Flex,
    /// No engine, with the error for it.
    Other(AttentionError),
}

impl Kind {
    /// Kind of a device, under autodiff or not.
    fn of(device: &Device) -> Self {
        match device.clone().inner().as_dispatch() {
            #[cfg(feature = "cube")]
            DispatchDevice::Cube(device) => Self::Cube(device.client()),
            #[cfg(feature = "flex")]
            DispatchDevice::Flex(_) => Self::Flex,
            // Some builds have no other kind.
            #[allow(unreachable_patterns)]
            other => Self::Other(no_engine(&format!("{other:?}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::no_engine;

    #[test]
    fn a_backend_without_an_engine_is_named() {
        let text = "the backend LibTorch has no engine of attention: take a device of Flex or of a CubeCL runtime";
        assert_eq!(no_engine("LibTorch(Cuda(0))").to_string(), text);
    }
}
