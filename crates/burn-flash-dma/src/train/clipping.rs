//! Clipping by the global norm of all gradients.

use crate::ops::TrainingOps;
use crate::types::FloatList;
use burn::backend::Dispatch;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};
use flash_dma_problem::SQUARE_SUMS;
use std::collections::HashSet;

/// Added to the norm before dividing by it, as in PyTorch.
const EPSILON: f64 = 1e-6;

/// Scales all gradients of a module by `min(1, max_norm / (norm + 1e-6))`, where `norm` is their global Euclidean
/// norm, and returns the norm before scaling, `[1]` in f32: PyTorch's `clip_grad_norm_`. Burn's own clipping uses the
/// norm of each parameter, which changes the direction of the step. [`optimize`](super::optimize) clips, too, without a
/// pass over the gradients of its own.
///
/// Squares are summed in f32 and in a fixed order, in a launch for up to 32 parameters, and nothing is read from the device.
/// A norm that is not finite makes all gradients NaN or zero, as in PyTorch. Without gradients the norm is 0.
///
/// # Panics
///
/// If `max_norm` is not greater than 0, or the gradients are not on one device.
pub fn clip_gradients<M: Module>(
    module: &M,
    gradients: &mut GradientsParams,
    max_norm: f64,
) -> Tensor<1> {
    let Norm { norm, factor, ids } = Norm::of(module, gradients, max_norm);
    module.visit(&mut Scale {
        gradients,
        ids,
        factor,
    });
    norm
}

/// The norm of a module's gradients, and what follows from it.
pub(super) struct Norm {
    /// `[1]` in f32.
    pub norm: Tensor<1>,
    /// The factor that scales the gradients to a norm that is allowed, `[1]` in f32.
    pub factor: Tensor<1>,
    /// The parameters that have a gradient.
    pub ids: HashSet<ParamId>,
}

impl Norm {
    /// # Panics
    ///
    /// As [`clip_gradients`].
    pub(super) fn of<M: Module>(module: &M, gradients: &GradientsParams, max_norm: f64) -> Self {
        assert!(max_norm > 0.0, "a norm of {max_norm} cannot be kept");
        let mut all = Gradients {
            gradients,
            device: None,
            ids: HashSet::new(),
            list: FloatList(Vec::new()),
        };
        module.visit(&mut all);
        let device = all.device.unwrap_or_default();
        let norm = match all.list.0.is_empty() {
            true => Tensor::zeros([1], (&device, DType::F32)),
            false => {
                let sums = Tensor::<1>::zeros([SQUARE_SUMS], (&device, DType::F32));
                let sums = Dispatch::training_add_squares(sums.into_dispatch(), all.list);
                Tensor::<1>::from_dispatch(sums).sum().sqrt()
            }
        };
        let factor = (norm.clone() + EPSILON).recip() * max_norm;
        Self {
            norm,
            factor: factor.clamp_max(1.0),
            ids: all.ids,
        }
    }
}

struct Gradients<'a> {
    gradients: &'a GradientsParams,
    device: Option<Device>,
    /// A module may hold a parameter in several places.
    ids: HashSet<ParamId>,
    list: FloatList<Dispatch>,
}

impl ModuleVisitor for Gradients<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let device = || param.val().device().without_autodiff();
        let first = self.device.get_or_insert_with(device);
        let Some(gradient) = self.gradients.get::<D>(param.id) else {
            return;
        };
        if !self.ids.insert(param.id) {
            return;
        }
        if self.list.0.is_empty() {
            *first = gradient.device();
        }
        assert_eq!(
            *first,
            gradient.device(),
            "all gradients must be on one device"
        );
        self.list.0.push(gradient.into_dispatch());
    }
}

struct Scale<'a> {
    gradients: &'a mut GradientsParams,
    /// The parameters whose gradients are to be scaled.
    ids: HashSet<ParamId>,
    factor: Tensor<1>,
}

impl ModuleVisitor for Scale<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.ids.remove(&param.id) {
            return;
        }
        let gradient = self.gradients.remove::<D>(param.id).expect("it has one");
        let factor = self.factor.clone().into_dispatch();
        let scaled = Dispatch::training_scale(gradient.into_dispatch(), factor);
        let scaled: Tensor<D> = Tensor::from_dispatch(scaled);
        self.gradients.register(param.id, scaled);
    }
}
