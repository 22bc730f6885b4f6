//! Timed phases, and the rows written for them.

use crate::stats::Millis;
use clap::ValueEnum;
use flash_dma_problem::{Problem, cost};
use serde::Serialize;

/// A timed call, or several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// The process's first call of everything, timed on the host: generating, compiling, loading, running.
    Cold,
    /// Scores to intervals.
    Select,
    /// The second selection, of a quarter of the window as runners-up.
    SelectRunnersUp,
    /// Intervals to the key lists of every query tile, which the forward pass builds itself.
    Lists,
    /// `out` and LSE, given the intervals.
    Forward,
    /// [`Forward`](Self::Forward) with the residual of `out`, as autodiff calls it.
    ForwardResidual,
    /// Selection and forward pass.
    EndToEnd,
    /// All gradients.
    Backward,
    /// [`Backward`](Self::Backward) with the residual of `out`, as autodiff calls it.
    BackwardResidual,
    /// [`BackwardResidual`](Self::BackwardResidual) of constant scores, with a quarter of the window as runners-up, whose
    /// ranks learn.
    BackwardRunnersUp,
    /// [`BackwardRunnersUp`](Self::BackwardRunnersUp) with kept keys that learn.
    BackwardLeaveOneOut,
    /// All gradients with `options.deterministic`.
    BackwardDeterministic,
}

impl Phase {
    /// True if the problem lacks scores or a residual that the phase needs.
    pub fn is_absent(self, problem: &Problem) -> bool {
        match self {
            Self::Select
            | Self::SelectRunnersUp
            | Self::Lists
            | Self::BackwardRunnersUp
            | Self::BackwardLeaveOneOut => !problem.has_scores,
            Self::ForwardResidual | Self::BackwardResidual => problem.residual_shape().is_none(),
            _ => false,
        }
    }

    /// True for a backward pass.
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

    /// The name in the rows.
    pub fn name(self) -> String {
        let value = self.to_possible_value().expect("no phase is hidden");
        value.get_name().to_owned()
    }

    /// Useful operations, on active pairs alone, and bytes, if every input is read once and every output written
    /// once. Selecting, listing and compiling have no operations; those for runners-up and for kept keys that learn
    /// are not counted.
    pub fn cost(self, problem: &Problem) -> (Option<u128>, Option<u128>) {
        let residual = problem.residual_shape().map_or(0, |shape| {
            (shape.iter().product::<usize>() * problem.element.size()) as u128
        });
        let forward = (cost::forward_flops(problem), cost::forward_bytes(problem));
        let backward = (cost::backward_flops(problem), cost::backward_bytes(problem));
        let keys: usize = problem.scores_shape().iter().product();
        let ((flops, bytes), more) = match self {
            Self::Cold | Self::Lists | Self::BackwardRunnersUp | Self::BackwardLeaveOneOut => {
                return (None, None);
            }
            // A score of 4 bytes in, an interval of 8 out.
            Self::Select | Self::SelectRunnersUp => return (None, Some(12 * keys as u128)),
            Self::Forward | Self::EndToEnd => (forward, 0),
            Self::ForwardResidual => (forward, residual),
            Self::Backward | Self::BackwardDeterministic => (backward, 0),
            Self::BackwardResidual => (backward, residual),
        };
        (Some(flops), Some(bytes + more))
    }
}

/// One measurement.
#[derive(Debug, Serialize)]
pub struct Row {
    /// A name of the workload table.
    pub workload: &'static str,
    /// The timed phase.
    pub phase: Phase,
    /// The engine that ran it, and its fixed choices.
    pub engine: String,
    /// Device time of whole public calls; host time for the cold phase.
    pub ms: Millis,
    /// Host time until a call has returned, in microseconds (median): checking and enqueueing, without waiting.
    pub host_us: Option<f64>,
    /// Useful operations per second, on active pairs alone.
    pub tflops: Option<f64>,
    /// Bytes of the phase if every input is read once and every output written once.
    pub bytes: Option<u64>,
    /// Time allowed by the device's measured roof, in percent of the measured time.
    pub roof_percent: Option<f64>,
    /// Inputs and outputs of all phases together.
    pub io_mib: f64,
    /// Maximum memory that the allocator held beyond them.
    pub workspace_mib: f64,
    /// Sum of both: the peak of the workload's memory.
    pub peak_mib: f64,
    /// The device and the runtime.
    pub device: String,
    /// The commit that was built.
    pub commit: String,
}
