//! Which engine computes a call, and why: said by the code that launches, before anything is launched.
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn::tensor::Device;
//! use burn_flash_dma::engines::{Engine, engine_for, engines};
//! use burn_flash_dma::{AttentionOptions, ElementType, Problem};
//!
//! let device = Device::flex();
//! assert_eq!(engines(&device)?, [Engine::Cpu, Engine::DefaultBodies]);
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
//! for each device and reason. [`AttentionOptions::engine`](crate::AttentionOptions::engine) forces an engine per call,
//! and the environment variable `FLASH_DMA_ENGINE` excludes the faster ones in the whole process.

pub use flash_dma_problem::{Engine, EngineChoice, EngineReport, Obstacle, PassKind, PassedOver};

#[cfg(any(feature = "cube", feature = "flex"))]
use burn::backend::DispatchDevice;
use burn::tensor::Device;
use flash_dma_problem::{AttentionError, MaskedProblem, Problem};

/// The engines that can be asked for on a device, the fastest first; the default bodies end the list. On CubeCL's devices
/// without those that `FLASH_DMA_ENGINE` excludes.
///
/// # Errors
///
/// [`AttentionError::Unsupported`] if the variable names no engine.
pub fn engines(device: &Device) -> Result<Vec<Engine>, AttentionError> {
    let mut all = match Kind::of(device) {
        #[cfg(feature = "cube")]
        Kind::Cube(client) => flash_dma_kernels::engines(&client)?,
        #[cfg(feature = "flex")]
        Kind::Flex => vec![Engine::Cpu],
        Kind::Other => Vec::new(),
    };
    all.push(Engine::DefaultBodies);
    Ok(all)
}

/// The engines that compute both passes of a problem on a device if its tensors are contiguous, and why no faster one
/// does. A [`Problem`], or a [`MaskedProblem`].
///
/// Rows that do not begin at multiples of 16 bytes, or are repeated, exclude tensor cores unless the call asks for them.
/// An engine may leave single kernels of a pass to the portable ones; those of biases do, as the book's chapter on masks
/// says.
///
/// # Errors
///
/// [`AttentionError::Engine`] if the problem asks for an engine that does not serve it, or any other error with which
/// attention would refuse the problem there.
pub fn engine_for<P: EngineProblem>(
    problem: &P,
    device: &Device,
) -> Result<EngineReport, AttentionError> {
    let both = |engine| EngineReport::new((engine, Vec::new()), (engine, Vec::new()));
    match (problem.attention().engine, Kind::of(device)) {
        (EngineChoice::Only(Engine::DefaultBodies), _) => Ok(both(Engine::DefaultBodies)),
        #[cfg(feature = "cube")]
        (_, Kind::Cube(client)) => flash_dma_kernels::engine_for(&client, problem),
        #[cfg(feature = "flex")]
        (EngineChoice::Fastest | EngineChoice::Only(Engine::Cpu), Kind::Flex) => {
            Ok(both(Engine::Cpu))
        }
        (EngineChoice::Fastest, _) => Ok(both(Engine::DefaultBodies)),
        (EngineChoice::Only(engine), _) => Err(other_backend(engine)),
    }
}

/// Whether the kernels run on a device.
pub(crate) fn has_kernels(device: &Device) -> bool {
    match Kind::of(device) {
        #[cfg(feature = "cube")]
        Kind::Cube(_) => true,
        _ => false,
    }
}

/// Refuses an engine that a call asks for and that does not serve it, and a call that is too large for the device's grid:
/// the forward pass, and the backward pass if `gradients`. Without this an operation would fail when it is run, which may
/// be later.
pub(crate) fn check<P: EngineProblem>(
    problem: &P,
    device: &Device,
    gradients: bool,
) -> Result<(), AttentionError> {
    let attention = problem.attention();
    match (attention.engine, Kind::of(device)) {
        (EngineChoice::Only(Engine::DefaultBodies), _) => Ok(()),
        #[cfg(feature = "cube")]
        (EngineChoice::Fastest, Kind::Cube(client))
            if flash_dma_kernels::fits_grid(&client, attention) =>
        {
            Ok(())
        }
        #[cfg(feature = "cube")]
        (_, Kind::Cube(client)) => flash_dma_kernels::check_engine(&client, problem, gradients),
        (EngineChoice::Fastest, _) => Ok(()),
        #[cfg(feature = "flex")]
        (EngineChoice::Only(Engine::Cpu), Kind::Flex) => Ok(()),
        (EngineChoice::Only(engine), _) => {
            let _ = gradients;
            Err(other_backend(engine))
        }
    }
}

/// Whether a call asks for the default bodies on a backend that has an engine.
#[cfg(any(feature = "cube", feature = "flex"))]
pub(crate) fn default_bodies(problem: &Problem) -> bool {
    problem.engine == EngineChoice::Only(Engine::DefaultBodies)
}

fn other_backend(engine: Engine) -> AttentionError {
    let (pass, obstacle) = (PassKind::Forward, Obstacle::OtherBackend);
    AttentionError::Engine {
        engine,
        pass,
        obstacle,
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

/// The backends that have engines of their own.
enum Kind {
    #[cfg(feature = "cube")]
    Cube(cubecl::client::Client),
    #[cfg(feature = "flex")]
    Flex,
    Other,
}

impl Kind {
    /// That of a device, under autodiff or not.
    fn of(device: &Device) -> Self {
        match device.clone().inner().as_dispatch() {
            #[cfg(feature = "cube")]
            DispatchDevice::Cube(device) => Self::Cube(device.client()),
            #[cfg(feature = "flex")]
            DispatchDevice::Flex(_) => Self::Flex,
            // There is no other kind in some builds.
            #[allow(unreachable_patterns)]
            _ => Self::Other,
        }
    }
}
