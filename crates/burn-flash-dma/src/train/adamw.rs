//! AdamW in one pass, over one parameter or over all of a module.

use super::clipping::Norm;
use crate::ops::TrainingOps;
use crate::types::FloatList;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Dispatch, TensorMetadata};
use burn::config::Config;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{
    AdamWState, AdaptiveMomentumState, GradientsParams, LearningRate, ModuleOptimizer, Optimizer,
};
use burn::tensor::{DType, Device, Tensor};
use flash_dma_problem::AdamWStep;
use std::cell::RefCell;
use std::collections::HashSet;
use std::vec;

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
/// dozen operations in the parameter's type, arithmetic is f32 and rounded once, as 16-bit parameters need. Tensors that
/// nothing else holds are written over. [`optimize`] takes many parameters in a launch.
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
        let Updated { tensors, time } = Pass::next(|| self.update(lr, tensor, grad, state));
        let [parameter, moment_1, moment_2] = tensors.map(Tensor::from_dispatch);
        let momentum = AdaptiveMomentumState {
            time,
            moment_1,
            moment_2,
            max_moment_2: None,
        };
        (parameter, Some(AdamWState { momentum }))
    }

    fn to_device<const D: usize>(mut state: Self::State<D>, device: &Device) -> Self::State<D> {
        state.momentum = state.momentum.to_device(device);
        state
    }
}

impl AdamW {
    fn update<const D: usize>(
        &self,
        rate: LearningRate,
        parameter: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<AdamWState<D>>,
    ) -> Update {
        let AdamWConfig {
            beta_1,
            beta_2,
            epsilon,
            weight_decay,
        } = self.config;
        let (time, moments) = match state {
            Some(AdamWState { momentum }) => {
                (momentum.time + 1, [momentum.moment_1, momentum.moment_2])
            }
            None => {
                let options = (&parameter.device(), parameter.dtype());
                let zeros = || Tensor::zeros(parameter.dims(), options);
                (1, [zeros(), zeros()])
            }
        };
        let [moment_1, moment_2] = moments;
        Update {
            tensors: [parameter, gradient, moment_1, moment_2].map(Tensor::into_dispatch),
            step: AdamWStep {
                rate,
                beta_1,
                beta_2,
                epsilon,
                weight_decay,
                time,
            },
        }
    }
}

/// A step of an optimiser of which every group is an [`AdamW`], after [clipping](super::clip_gradients) to `max_norm`
/// (infinity never clips); returns the module, and the norm before clipping, `[1]` in f32.
///
/// It is [`clip_gradients`](super::clip_gradients) and `ModuleOptimizer::step`, with the same records and groups, in a few
/// launches instead of three for each parameter, and without writing gradients. Where gradients are reduced over devices it
/// belongs after that, which with Burn's `Learner` is `TrainStep::optimize`:
///
/// ```ignore
/// fn optimize(self, optim: &mut ModuleOptimizer, rate: ModuleLearningRate, grads: GradientsParams) -> Self {
///     burn_flash_dma::train::optimize(optim, rate, self, grads, 1.0).0
/// }
/// ```
///
/// # Panics
///
/// If a parameter with a gradient has another optimiser, `max_norm` is not greater than 0, or the gradients are not on one
/// device.
pub fn optimize<M: Module>(
    optimiser: &mut ModuleOptimizer,
    rate: impl Into<ModuleLearningRate>,
    module: M,
    gradients: GradientsParams,
    max_norm: f64,
) -> (M, Tensor<1>) {
    let Norm { norm, factor, ids } = Norm::of(&module, &gradients, max_norm);
    let rate = rate.into();
    let count = ids.len();
    // Burn hands out one parameter at a time. A first pass gathers what the steps need, a second one brings the results.
    let (module, pass) = Pass::Gather(Vec::with_capacity(count))
        .during(|| optimiser.step(rate.clone(), module, gradients));
    let Pass::Gather(updates) = pass else {
        unreachable!("a pass stays what it is")
    };
    assert_eq!(
        updates.len(),
        count,
        "every parameter with a gradient must have AdamW of this crate"
    );
    let updated = update_all(updates, &factor);
    let mut stand_ins = StandIns {
        ids,
        gradients: GradientsParams::new(),
    };
    module.visit(&mut stand_ins);
    let (module, _) = Pass::Bring(updated.into_iter())
        .during(|| optimiser.step(rate, module, stand_ins.gradients));
    (module, norm)
}

/// Operands of a step of AdamW.
struct Update {
    /// The parameter, its gradient and its moments.
    tensors: [FloatTensor<Dispatch>; 4],
    step: AdamWStep,
}

/// Results of a step of AdamW.
struct Updated {
    /// The parameter and its moments.
    tensors: [FloatTensor<Dispatch>; 3],
    time: usize,
}

/// The steps, in the order of `updates`, of gradients that count `factor` times.
fn update_all(updates: Vec<Update>, factor: &Tensor<1>) -> Vec<Updated> {
    let mut all: Vec<Option<Updated>> = updates.iter().map(|_| None).collect();
    let mut rest: Vec<_> = updates.into_iter().enumerate().collect();
    // Those of one step and one type go together.
    while let Some((_, first)) = rest.first() {
        let of = |update: &Update| {
            let [parameter, gradient, ..] = &update.tensors;
            (update.step, parameter.dtype(), gradient.dtype())
        };
        let key = of(first);
        let (group, others): (Vec<_>, Vec<_>) =
            rest.into_iter().partition(|(_, update)| of(update) == key);
        rest = others;
        let step = key.0;
        let mut places = Vec::with_capacity(group.len());
        let mut lists = [(); 4].map(|()| FloatList(Vec::with_capacity(group.len())));
        for (place, update) in group {
            places.push(place);
            for (list, tensor) in lists.iter_mut().zip(update.tensors) {
                list.0.push(tensor);
            }
        }
        let [parameters, gradients, moments_1, moments_2] = lists;
        let factor = factor.clone().into_dispatch();
        let (parameters, moments_1, moments_2) =
            Dispatch::training_adamw(parameters, gradients, moments_1, moments_2, factor, step);
        let moments = moments_1.0.into_iter().zip(moments_2.0);
        let results = parameters.0.into_iter().zip(moments);
        for (place, (parameter, (moment_1, moment_2))) in places.into_iter().zip(results) {
            all[place] = Some(Updated {
                tensors: [parameter, moment_1, moment_2],
                time: step.time,
            });
        }
    }
    let all = all.into_iter();
    all.map(|updated| updated.expect("every group was updated"))
        .collect()
}

/// A pass of [`optimize`] over a module, and its calls of [`AdamW`].
enum Pass {
    /// Calls leave their operands here, and return the gradient in place of every result.
    Gather(Vec<Update>),
    /// Calls return these, in the order of the first pass.
    Bring(vec::IntoIter<Updated>),
}

thread_local! {
    static PASS: RefCell<Option<Pass>> = const { RefCell::new(None) };
}

impl Pass {
    /// Runs `steps`, and returns what is left of the pass.
    fn during<T>(self, steps: impl FnOnce() -> T) -> (T, Self) {
        /// Ends the pass even if a step panics.
        struct End;
        impl Drop for End {
            fn drop(&mut self) {
                PASS.take();
            }
        }
        PASS.set(Some(self));
        let _end = End;
        let result = steps();
        let pass = PASS.take().expect("only the end of a pass takes it");
        (result, pass)
    }

    /// The next result. `update` is what it is computed from, here if there is no pass.
    fn next(update: impl FnOnce() -> Update) -> Updated {
        PASS.with_borrow_mut(|pass| match pass {
            Some(Self::Bring(updated)) => updated.next().expect("one for each that was gathered"),
            Some(Self::Gather(gathered)) => {
                let update = update();
                let [_, gradient, ..] = &update.tensors;
                let updated = Updated {
                    tensors: [(); 3].map(|()| gradient.clone()),
                    time: update.step.time,
                };
                gathered.push(update);
                updated
            }
            None => {
                let update = update();
                let [_, gradient, ..] = &update.tensors;
                let device = Tensor::<1>::from_dispatch(gradient.clone()).device();
                let one = Tensor::ones([1], (&device, DType::F32));
                let updated = update_all(vec![update], &one).pop();
                updated.expect("one for each that is given")
            }
        })
    }
}

/// Gradients for a second pass, of which only their presence is read: a parameter holds its gradient after the first.
struct StandIns {
    /// The parameters that have one.
    ids: HashSet<ParamId>,
    gradients: GradientsParams,
}

impl ModuleVisitor for StandIns {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.ids.remove(&param.id) {
            self.gradients.register(param.id, param.val().inner());
        }
    }
}
