//! Clipping by the global norm of all gradients.

use crate::fallback::tensors::at_least_f32;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use std::collections::HashSet;

/// Approximate size of the groups in which gradients are squared and summed, copied into one tensor: 64 MiB, twice.
const GROUP: usize = 1 << 24;

/// Rows of a group, which is summed by columns first: Burn sums all numbers of a tensor in one cube.
const ROWS: usize = 256;

/// Added to the norm before dividing by it, as in PyTorch.
const EPSILON: f64 = 1e-6;

/// Scales all gradients of a module by `min(1, max_norm / (norm + 1e-6))`, where `norm` is their global Euclidean
/// norm, and returns the norm before scaling, `[1]` in f32: PyTorch's `clip_grad_norm_`. Burn's own clipping uses the
/// norm of each parameter, which changes the direction of the step.
///
/// Squares are summed in f32, in one launch per parameter and a few per 16 million numbers, and nothing is read from
/// the device. A norm that is not finite makes all gradients NaN or zero, as in PyTorch. Without gradients the norm
/// is 0.
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
        group: Vec::new(),
        numbers: 0,
        sums: Vec::new(),
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
    /// Gradients as rows, to be summed together.
    group: Vec<Tensor<1>>,
    numbers: usize,
    sums: Vec<Tensor<1>>,
}

impl Squares<'_> {
    fn sum_group(&mut self) {
        let mut group = std::mem::take(&mut self.group);
        let numbers = std::mem::take(&mut self.numbers);
        let (Some(first), 1..) = (group.first(), numbers) else {
            return;
        };
        let columns = numbers.div_ceil(ROWS);
        let missing = columns * ROWS - numbers;
        if missing > 0 {
            let of_group = (&first.device(), first.dtype());
            group.push(Tensor::zeros([missing], of_group));
        }
        let squares = Tensor::cat(group, 0).square();
        let sums = squares.reshape([ROWS, columns]).sum_dim(0);
        self.sums.push(sums.sum());
    }

    fn norm(mut self) -> Tensor<1> {
        self.sum_group();
        let sum = self.sums.into_iter().reduce(|sum, group| sum + group);
        let device = self.device.unwrap_or_default();
        sum.map_or_else(|| Tensor::zeros([1], &device), Tensor::sqrt)
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
        let row = gradient.flatten::<1>(0, D - 1);
        self.numbers += row.dims()[0];
        self.group.push(at_least_f32(row));
        if self.numbers >= GROUP {
            self.sum_group();
        }
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
        let dtype = gradient.dtype();
        let scaled = at_least_f32(gradient) * self.factor.clone().reshape([1; D]);
        self.gradients.register(param.id, scaled.cast(dtype));
    }
}
