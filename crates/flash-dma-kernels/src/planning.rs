//! The device memory that a problem takes, and the largest problem that fits, known before anything is allocated.

use crate::args::{Inputs, RankLearning, Saved, Selection};
use crate::select::select_workspace;
use crate::{Backward, Forward, contiguous_strides};
use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use flash_dma_problem::memory::{self, Passes};
use flash_dma_problem::{AttentionError, Problem};

/// The bytes that the passes of a problem take on the device of `client`, all tensors contiguous and held at once: the
/// [tensors](memory::tensor_bytes), and the greatest workspace of [`select_workspace`],
/// [`Forward::plan_forward`] and, with a backward pass, [`Backward::plan_backward`]. The client's pool rounds the sizes of buffers up and may hold more.
///
/// # Errors
///
/// [`AttentionError`] if the device does not support the problem.
pub fn required_bytes(
    client: &Client,
    problem: &Problem,
    passes: Passes,
) -> Result<usize, AttentionError> {
    let rows = Rows::new(client);
    let inputs = rows.inputs(problem, passes);
    let selecting = match problem.has_scores {
        true => select_workspace(client, problem.scores_shape(), problem.window),
        false => 0,
    };
    let forward = problem.plan_forward(client, &inputs, None)?;
    let mut workspace = selecting.max(forward.workspace_bytes());
    if passes != Passes::Forward {
        let saved = rows.saved(problem);
        let backward = problem.plan_backward(client, &inputs, &saved, None)?;
        workspace = workspace.max(backward.workspace_bytes());
    }
    let tensors = usize::try_from(memory::tensor_bytes(problem, passes)).unwrap_or(usize::MAX);
    Ok(tensors.saturating_add(workspace))
}

/// The number of tokens of the longest sequences that fit into `bytes` of the device's memory, as [`required_bytes`]
/// counts: `problem` with as many queries as keys. 0 if not even one token fits. This is only arithmetic on the host.
///
/// The result fits, and one token more does not. As the number of an engine's lists and parts may fall when a problem
/// grows, some greater length may fit again.
///
/// # Errors
///
/// [`AttentionError`] if the device does not support the problem at any size.
pub fn longest(
    client: &Client,
    problem: &Problem,
    passes: Passes,
    bytes: usize,
) -> Result<usize, AttentionError> {
    memory::longest(problem, bytes, |p| required_bytes(client, p, passes))
}

/// The greatest number of sequences, each as long as those of `problem`, that fits into `bytes` of the device's memory,
/// as [`required_bytes`] counts. 0 if not even one fits. The result is as in [`longest`].
///
/// # Errors
///
/// The errors of [`longest`].
pub fn largest_batch(
    client: &Client,
    problem: &Problem,
    passes: Passes,
    bytes: usize,
) -> Result<usize, AttentionError> {
    memory::largest_batch(problem, bytes, |p| required_bytes(client, p, passes))
}

/// Contiguous tensors used only for their shape and strides; all share one small buffer.
pub struct Rows(TensorBinding);

impl Rows {
    pub(crate) fn new(client: &Client) -> Self {
        Self(TensorBinding {
            handle: client.empty(16).binding(),
            strides: [1].into(),
            shape: [1].into(),
            tiling: Default::default(),
        })
    }

    pub(crate) fn tensor(&self, shape: &[usize]) -> TensorBinding {
        TensorBinding {
            strides: contiguous_strides(shape).collect(),
            shape: shape.iter().copied().collect(),
            ..self.0.clone()
        }
    }

    pub(crate) fn inputs(&self, problem: &Problem, passes: Passes) -> Inputs {
        let learning = (passes == Passes::WithRunnersUp).then(|| RankLearning {
            ends: self.tensor(&problem.scores_shape()),
            // A layer's default.
            max_live: problem.window.saturating_add(problem.window / 4),
            kept_from: None,
        });
        Inputs {
            q: self.tensor(&problem.q_shape()),
            k: self.tensor(&problem.kv_shape()),
            v: self.tensor(&problem.kv_shape()),
            selection: problem.has_scores.then(|| Selection {
                scores: self.tensor(&problem.scores_shape()),
                intervals: self.tensor(&problem.intervals_shape()),
                learning,
            }),
        }
    }

    pub(crate) fn saved(&self, problem: &Problem) -> Saved {
        Saved {
            out: self.tensor(&problem.q_shape()),
            residual: problem.residual_shape().map(|shape| self.tensor(&shape)),
            lse: self.tensor(&problem.lse_shape()),
            lse_rest: Some(self.tensor(&problem.lse_shape())),
            grad_out: self.tensor(&problem.q_shape()),
            grad_lse: None,
        }
    }
}
