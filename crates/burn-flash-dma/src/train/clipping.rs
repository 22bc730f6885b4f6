//! Clipping by the global norm of all gradients.

use crate::ops::TrainingOps;
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
/// norm of each parameter, which changes the direction of the step.
///
/// Squares are summed in f32 and in a fixed order, in one launch per parameter, and nothing is read from the device. A
/// norm that is not finite makes all gradients NaN or zero, as in PyTorch. Without gradients the norm is 0.
///
/// # Panics
///
/// If `max_norm` is not greater than 0, or the gradients are not on one device.
pub fn clip_gradients<M: Module>(
    module: &M,
    gradients: &mut GradientsParams,
    max_norm: f64,
) -> Tensor<1> {
    assert!(max_norm > 0.0, "a norm of {max_norm} cannot be kept");
    let mut squares = Squares {
        gradients,
        device: None,
        seen: HashSet::new(),
        sums: None,
    };
    module.visit(&mut squares);
    let norm = squares.norm();
    let factor = (norm.clone() + EPSILON).recip() * max_norm;
    module.visit(&mut Scale {
        gradients,
        seen: HashSet::new(),
        factor: factor.clamp_max(1.0),
    });
    norm
}

struct Squares<'a> {
    gradients: &'a GradientsParams,
    device: Option<Device>,
    /// A module may hold a parameter in several places.
    seen: HashSet<ParamId>,
    /// Parts of the sum over the gradients so far, `[SQUARE_SUMS]`.
    sums: Option<Tensor<1>>,
}

impl Squares<'_> {
    fn norm(self) -> Tensor<1> {
        let device = self.device.unwrap_or_default();
        (self.sums).map_or_else(|| Tensor::zeros([1], &device), |sums| sums.sum().sqrt())
    }
}

impl ModuleVisitor for Squares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let device = || param.val().device().without_autodiff();
        self.device.get_or_insert_with(device);
        let Some(gradient) = self.gradients.get::<D>(param.id) else {
            return;
        };
        if !self.seen.insert(param.id) {
            return;
        }
        let device = gradient.device();
        let sums = (self.sums.take())
            .unwrap_or_else(|| Tensor::zeros([SQUARE_SUMS], (&device, DType::F32)));
        assert_eq!(sums.device(), device, "all gradients must be on one device");
        let (sums, gradient) = (sums.into_dispatch(), gradient.into_dispatch());
        let sums = Dispatch::training_add_squares(sums, gradient);
        self.sums = Some(Tensor::from_dispatch(sums));
    }
}

struct Scale<'a> {
    gradients: &'a mut GradientsParams,
    seen: HashSet<ParamId>,
    factor: Tensor<1>,
}

impl ModuleVisitor for Scale<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        let Some(gradient) = self.gradients.remove::<D>(param.id) else {
            return;
        };
        let factor = self.factor.clone().into_dispatch();
        let scaled = Dispatch::training_scale(gradient.into_dispatch(), factor);
        let scaled: Tensor<D> = Tensor::from_dispatch(scaled);
        self.gradients.register(param.id, scaled);
    }
}
