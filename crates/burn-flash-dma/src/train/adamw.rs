//! AdamW in one pass.

use crate::ops::TrainingOps;
use burn::backend::Dispatch;
use burn::config::Config;
use burn::optim::{AdamWState, AdaptiveMomentumState, LearningRate, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, Tensor};
use flash_dma_problem::AdamWStep;

/// Configuration of [`AdamW`]. The defaults are those of Burn's `AdamWConfig`.
#[derive(Config, Debug, Copy)]
pub struct AdamWConfig {
    /// Share of the running mean of the gradient that a step keeps.
    #[config(default = 0.9)]
    pub beta_1: f32,
    /// Share of the running mean of the gradient's square that a step keeps.
    #[config(default = 0.999)]
    pub beta_2: f32,
    /// Added to the root of the running mean of the gradient's square.
    #[config(default = 1e-5)]
    pub epsilon: f32,
    /// Share of a parameter that a learning rate of 1 would take away in a step.
    #[config(default = 1e-4)]
    pub weight_decay: f32,
}

impl AdamWConfig {
    /// The optimiser of a parameter, for a group of parameters with settings of their own.
    #[must_use]
    pub fn build(&self) -> AdamW {
        AdamW { config: *self }
    }

    /// The optimiser of a module.
    #[must_use]
    pub fn init(&self) -> ModuleOptimizer {
        ModuleOptimizer::from(self.build())
    }
}

/// AdamW with decoupled decay: the steps of Burn's, of the same records, in one pass over memory. Where Burn's does a
/// dozen operations in the parameter's type, arithmetic is f32 and rounded once, as 16-bit parameters need.
///
/// Without AMSGrad, whose maxima are left out of a record that has them, and without cautious decay.
#[derive(Clone, Debug)]
pub struct AdamW {
    config: AdamWConfig,
}

impl Optimizer for AdamW {
    type State<const D: usize> = AdamWState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let AdamWConfig {
            beta_1,
            beta_2,
            epsilon,
            weight_decay,
        } = self.config;
        let (time, [moment_1, moment_2]) = match state {
            Some(AdamWState { momentum }) => {
                (momentum.time + 1, [momentum.moment_1, momentum.moment_2])
            }
            None => {
                let zeros = || Tensor::zeros(tensor.dims(), (&tensor.device(), tensor.dtype()));
                (1, [zeros(), zeros()])
            }
        };
        let step = AdamWStep {
            rate: lr,
            beta_1,
            beta_2,
            epsilon,
            weight_decay,
            time,
        };
        let (tensor, moment_1, moment_2) = Dispatch::training_adamw(
            tensor.into_dispatch(),
            grad.into_dispatch(),
            moment_1.into_dispatch(),
            moment_2.into_dispatch(),
            step,
        );
        let momentum = AdaptiveMomentumState {
            time,
            moment_1: Tensor::from_dispatch(moment_1),
            moment_2: Tensor::from_dispatch(moment_2),
            max_moment_2: None,
        };
        (Tensor::from_dispatch(tensor), Some(AdamWState { momentum }))
    }

    fn to_device<const D: usize>(mut state: Self::State<D>, device: &Device) -> Self::State<D> {
        state.momentum = state.momentum.to_device(device);
        state
    }
}
