//! The rows that `bench attention` and `bench decode` write.

use crate::roof::Roof;
use crate::stats::Millis;
use crate::workloads::Workload;
use flash_dma_problem::{Problem, cost};
use serde::Serialize;

/// The timed cases and phases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// The process's first call of everything, from the host: generating, compiling, loading, running.
    Cold,
    /// Scores to intervals.
    Select,
    /// The second selection of a quarter of the window as runners-up.
    SelectRunnersUp,
    /// Intervals to the key lists of every query tile, which the forward pass builds itself.
    Lists,
    /// `out` and LSE, given the intervals.
    Forward,
    /// The same with the residual of `out`, as autodiff calls it.
    ForwardResidual,
    /// Selection and forward pass.
    EndToEnd,
    /// All gradients.
    Backward,
    /// The same with the residual of `out`, as autodiff calls it.
    BackwardResidual,
    /// The same with a quarter of the window as runners-up.
    BackwardRunnersUp,
    /// The same with what kept keys are worth.
    BackwardLeaveOneOut,
    /// All gradients with `options.deterministic`.
    BackwardDeterministic,
}

impl Phase {
    /// Whether it needs scores.
    #[must_use]
    pub fn selects(self) -> bool {
        matches!(
            self,
            Self::Select
                | Self::SelectRunnersUp
                | Self::Lists
                | Self::BackwardRunnersUp
                | Self::BackwardLeaveOneOut
        )
    }

    /// Whether it is a backward pass.
    #[must_use]
    pub fn is_backward(self) -> bool {
        matches!(
            self,
            Self::Backward
                | Self::BackwardResidual
                | Self::BackwardRunnersUp
                | Self::BackwardLeaveOneOut
                | Self::BackwardDeterministic
        )
    }

    /// The name used in the rows.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::Select => "select",
            Self::SelectRunnersUp => "select-runners-up",
            Self::Lists => "lists",
            Self::Forward => "forward",
            Self::ForwardResidual => "forward-residual",
            Self::EndToEnd => "end-to-end",
            Self::Backward => "backward",
            Self::BackwardResidual => "backward-residual",
            Self::BackwardRunnersUp => "backward-runners-up",
            Self::BackwardLeaveOneOut => "backward-leave-one-out",
            Self::BackwardDeterministic => "backward-deterministic",
        }
    }

    /// Useful operations of the phase, on active pairs alone. Selecting, listing and compiling have none, and those of
    /// runners-up and of what kept keys are worth are not counted.
    #[must_use]
    pub fn flops(self, problem: &Problem) -> Option<u128> {
        match self {
            Self::Cold
            | Self::Select
            | Self::SelectRunnersUp
            | Self::Lists
            | Self::BackwardRunnersUp
            | Self::BackwardLeaveOneOut => None,
            Self::Forward | Self::ForwardResidual | Self::EndToEnd => {
                Some(cost::forward_flops(problem))
            }
            Self::Backward | Self::BackwardResidual | Self::BackwardDeterministic => {
                Some(cost::backward_flops(problem))
            }
        }
    }

    /// Bytes of the phase if every input is read once and every output written once.
    #[must_use]
    pub fn bytes(self, problem: &Problem) -> Option<u128> {
        let keys: usize = problem.scores_shape().iter().product();
        let residual = problem.residual_shape().map_or(0, |shape| {
            (shape.iter().product::<usize>() * problem.element.size()) as u128
        });
        match self {
            Self::Cold | Self::Lists | Self::BackwardRunnersUp | Self::BackwardLeaveOneOut => None,
            // A score of 4 bytes in, an interval of 8 out.
            Self::Select | Self::SelectRunnersUp => Some(12 * keys as u128),
            Self::Forward | Self::EndToEnd => Some(cost::forward_bytes(problem)),
            Self::Backward | Self::BackwardDeterministic => Some(cost::backward_bytes(problem)),
            Self::ForwardResidual => Some(cost::forward_bytes(problem) + residual),
            Self::BackwardResidual => Some(cost::backward_bytes(problem) + residual),
        }
    }
}

/// One measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// A name of the workload table.
    pub workload: String,
    /// The timed phase.
    pub phase: Phase,
    /// The engine that ran it.
    pub engine: String,
    /// Device time of whole public calls; host time where the phase is cold.
    pub ms: Millis,
    /// Host time until a call has returned, in microseconds (median): checking and enqueueing, not waiting.
    pub host_us: Option<f64>,
    /// Useful operations per second, on active pairs alone.
    pub tflops: Option<f64>,
    /// Bytes of the phase if every input is read once and every output written once.
    pub bytes: Option<u64>,
    /// The time the device's measured roof allows, in percent of the time it took.
    pub roof_percent: Option<f64>,
    /// Inputs and outputs of all phases together.
    pub io_mib: f64,
    /// The most memory that the allocator held beyond them.
    pub workspace_mib: f64,
    /// Sum of both: the peak of the workload's memory.
    pub peak_mib: Option<f64>,
    /// The device and the runtime.
    pub device: String,
    /// The commit that was built.
    pub commit: String,
}

impl Row {
    /// Fills in the fields that follow from the workload's sizes.
    pub fn complete(&mut self, workload: &Workload, roof: Option<&Roof>) {
        let Ok(problem) = workload.problem() else {
            return;
        };
        let (flops, bytes) = (self.phase.flops(&problem), self.phase.bytes(&problem));
        self.tflops = flops.map(|f| f as f64 / self.ms.median / 1e9);
        self.bytes = bytes.and_then(|b| u64::try_from(b).ok());
        self.peak_mib = Some(self.io_mib + self.workspace_mib);
        if let (Some(roof), Some(bytes)) = (roof, bytes) {
            let ms = roof.ms(problem.element, flops.unwrap_or(0) as f64, bytes as f64);
            self.roof_percent = Some(100.0 * ms / self.ms.median);
        }
    }
}

/// One measurement of `bench decode`.
#[derive(Clone, Debug, Serialize)]
pub struct DecodeRow {
    /// A name of the table.
    pub workload: String,
    /// `decode` (attention and append), or `append`.
    pub phase: String,
    /// The engine that ran it, and its fixed choices.
    pub engine: String,
    /// Device time of one call, in a sequence of calls.
    pub ms: Millis,
    /// The same in a replayed graph of calls; only for `decode`.
    pub graph_ms: Option<Millis>,
    /// Host time until a call has returned, in microseconds (median).
    pub host_us: f64,
    /// Keys that a kv head holds.
    pub keys: usize,
    /// Bytes of a call if every row is read or written once.
    pub bytes: u64,
    /// Bytes of the cache.
    pub cache_bytes: usize,
    /// The device and the runtime.
    pub device: String,
    /// The commit that was built.
    pub commit: String,
}
