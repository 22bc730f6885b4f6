//! Gradients: one node of the autodiff graph per pass.

mod attention;
mod handed;
mod masked;
mod node;
mod norm;
mod packed;
mod product;
mod recomputed;
mod training;

use crate::ops::scores::ScoreOps;
use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;

impl<B: ScoreOps, C: CheckpointStrategy> ScoreOps for Autodiff<B, C> {}
