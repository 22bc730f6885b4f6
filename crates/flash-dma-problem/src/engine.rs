//! The engines' names, an engine's choice, and the reasons why one does not run a pass.

use crate::ElementType;
use core::fmt;

/// An implementation of the passes of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Engine {
    /// Threads and SIMD on the host: Burn's Flex backend, and slices.
    Cpu,
    /// Register tiles of single units: every CubeCL device, element type and head dimension.
    Portable,
    /// `mma.sync` on tensor cores: f16 and bf16, head dimensions that are multiples of 32, rows that begin at multiples
    /// of 16 bytes, on CUDA devices of sm_80 and newer.
    Mma,
    /// `wgmma` on tensor cores: f16 and bf16, head dimensions that are multiples of 16, at least 32, rows that begin at
    /// multiples of 16 bytes, on CUDA devices of sm_90.
    Wgmma,
}

impl Engine {
    /// A short name: `cpu`, `portable`, `mma` or `wgmma`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Portable => "portable",
            Self::Mma => "mma",
            Self::Wgmma => "wgmma",
        }
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "the CPU engine",
            Self::Portable => "the portable kernels",
            Self::Mma => "the mma kernels",
            Self::Wgmma => "the wgmma kernels",
        })
    }
}

/// The engine that a call asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum EngineChoice {
    /// The fastest engine that serves the pass, by a fixed rule; candidates are never timed.
    #[default]
    Fastest,
    /// This engine, in every pass of the call. If it does not serve one, the call fails with
    /// [`AttentionError::Engine`](crate::AttentionError::Engine).
    Only(Engine),
}

/// A pass for which an engine is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PassKind {
    /// The output and the LSE.
    Forward,
    /// The gradients.
    Backward,
    /// One step over a cache.
    Decode,
}

impl PassKind {
    /// A short name: `forward`, `backward` or `decode`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Decode => "decode",
        }
    }
}

impl fmt::Display for PassKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forward => "the forward pass",
            Self::Backward => "the backward pass",
            Self::Decode => "the decode step",
        })
    }
}

/// The reason why an engine does not run a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Obstacle {
    /// The device's backend does not have the engine.
    #[error("the backend of the device has no such engine")]
    OtherBackend,
    /// The device does not have the instructions of the engine.
    #[error("the device has no such instructions")]
    Device,
    /// The engine has no kernel for the pass.
    #[error("there is no such kernel")]
    Pass,
    /// The engine does not multiply elements of this type: tensor cores would round f32.
    #[error("there is no kernel for {0}")]
    Element(ElementType),
    /// The engine has no kernel for this head dimension.
    #[error("the head dimension is {head_dim}, and there are kernels for {served}")]
    HeadDim {
        /// The head dimension of the problem.
        head_dim: usize,
        /// The head dimensions that the engine serves, in words.
        served: &'static str,
    },
    /// Rows do not begin at multiples of 16 bytes.
    #[error("rows do not begin at multiples of 16 bytes")]
    UnalignedRows,
    /// Rows are one row repeated by a stride of 0.
    #[error("rows are repeated by a stride of 0")]
    RepeatedRows,
    /// The bias differs between queries.
    #[error("the bias differs between queries")]
    PairBias,
    /// The bias differs between queries, and its gradients are wanted with dropout.
    #[error("the bias differs between queries, and there is dropout")]
    DroppedPairBias,
    /// The bias differs between queries, and its gradients are wanted with ALiBi.
    #[error("the bias differs between queries, and there is ALiBi")]
    AlibiPairBias,
    /// The bias of keys is not contiguous along them.
    #[error("the bias is not contiguous along the keys")]
    BiasStride,
    /// Pages are not whole key tiles of the engine.
    #[error("pages are not whole key tiles")]
    PageLength,
    /// Pages have a window.
    #[error("there is no kernel for pages with a window")]
    PageWindow,
    /// A key tile has more queries or heads than the engine's lists can name.
    #[error("the lists of a key tile cannot name so many queries or heads")]
    Lists,
    /// The device has less shared memory than the engine's smallest tiles need.
    #[error("the device has too little shared memory")]
    SharedMemory,
    /// The environment variable `FLASH_DMA_ENGINE` excludes the engine.
    #[error("FLASH_DMA_ENGINE excludes it")]
    Variable,
    /// The call asks for another engine.
    #[error("the call asks for {0}")]
    Forced(Engine),
    /// A cache takes the fastest engine of every step; no other can be asked for.
    #[error("a cache takes the fastest engine")]
    Cache,
}

impl Obstacle {
    /// The change by which a caller can get the engine; `None` if the device or the call decides it.
    #[must_use]
    pub fn advice(&self) -> Option<&'static str> {
        match self {
            Self::Element(_) => Some("cast q, k and v to bf16 or f16"),
            Self::HeadDim { .. } => Some("take a head dimension of 64 or 128"),
            Self::UnalignedRows => {
                Some("copy q, k and v, so that their rows begin at multiples of 16 bytes")
            }
            Self::RepeatedRows => Some("copy the tensor that repeats its rows"),
            Self::PairBias => Some("take a bias that all queries share, if the model allows it"),
            Self::DroppedPairBias => {
                Some("leave out dropout, or take a bias that all queries share")
            }
            Self::AlibiPairBias => Some("add ALiBi to the bias"),
            Self::BiasStride => Some("copy the bias, so that it is contiguous along the keys"),
            Self::PageLength => Some("take pages of a multiple of 32 tokens"),
            _ => None,
        }
    }
}

/// An engine that was considered before the one that runs a pass, and the reason why it does not run it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("not {engine} for {pass}: {obstacle}")]
pub struct PassedOver {
    /// The pass.
    pub pass: PassKind,
    /// The engine that does not run it.
    pub engine: Engine,
    /// The reason.
    pub obstacle: Obstacle,
}

/// The engines of both passes of a problem, and the reasons why no faster one runs them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EngineReport {
    /// The engine of the forward pass.
    pub forward: Engine,
    /// The engine of the backward pass.
    pub backward: Engine,
    /// The engines that were passed over: those of the forward pass first, the fastest first within a pass. Empty if
    /// both passes run on the first engine considered.
    pub why: Vec<PassedOver>,
}

impl EngineReport {
    /// The report of the forward and the backward choice, each an engine and those passed over for it.
    #[must_use]
    pub fn new(
        (forward, mut why): (Engine, Vec<PassedOver>),
        (backward, more): (Engine, Vec<PassedOver>),
    ) -> Self {
        why.extend(more);
        Self {
            forward,
            backward,
            why,
        }
    }
}

impl fmt::Display for EngineReport {
    /// One line for each pass and for each engine that was passed over.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "forward: {}\nbackward: {}", self.forward, self.backward)?;
        self.why.iter().try_for_each(|over| write!(f, "\n{over}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_says_what_runs_and_why_nothing_faster_does() {
        let head_dim = Obstacle::HeadDim {
            head_dim: 80,
            served: "64 and 128",
        };
        let over = |(engine, obstacle)| PassedOver {
            pass: PassKind::Backward,
            engine,
            obstacle,
        };
        let why = [
            (Engine::Wgmma, head_dim),
            (Engine::Mma, Obstacle::SharedMemory),
        ]
        .map(over);
        let backward = (Engine::Portable, why.to_vec());
        let report = EngineReport::new((Engine::Wgmma, Vec::new()), backward);
        let lines = [
            "forward: the wgmma kernels",
            "backward: the portable kernels",
            "not the wgmma kernels for the backward pass: the head dimension is 80, and there are kernels for 64 and 128",
            "not the mma kernels for the backward pass: the device has too little shared memory",
        ];
        assert_eq!(report.to_string(), lines.join("\n"));
    }
}
