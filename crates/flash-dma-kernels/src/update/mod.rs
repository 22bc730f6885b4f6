//! An optimiser's update after the backward pass: the norm of all gradients, their scaling by a number on the device, and
//! AdamW, each in one pass over a parameter.

mod kernel;
#[cfg(test)]
mod tests;

use crate::host::check::{Layout, address_type, check_grid, check_tensor, check_type, elem_type};
use crate::host::flat::{Pass, vectors};
use crate::host::range::range;
use cubecl::CubeDim;
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::{AdamWStep, AttentionError, ElementType, SQUARE_SUMS, TensorName};
use kernel::{StateLaunch, StepLaunch, adamw_kernel, add_squares_kernel, scale_kernel};

/// Units of a cube of [`add_squares`], except where units are threads of a processor.
const UNITS: usize = 256;

/// A parameter and its moments, contiguous and of one shape and type.
#[derive(Clone, Debug)]
pub struct UpdateState {
    /// The parameter.
    pub parameter: TensorBinding,
    /// Running mean of the gradient.
    pub moment_1: TensorBinding,
    /// Running mean of the gradient's square.
    pub moment_2: TensorBinding,
}

impl UpdateState {
    fn tensors(&self) -> [&TensorBinding; 3] {
        [&self.parameter, &self.moment_1, &self.moment_2]
    }
}

/// A step of AdamW: `new`, or where none is given `old` itself, from `old` and the gradient, all contiguous, of the shape of
/// the parameter and of `element`. Arithmetic is f32, and each result is rounded once.
///
/// The call only enqueues: a failure on the device is reported when a result is read.
///
/// # Errors
///
/// [`AttentionError`], before any launch, if the device lacks the element type or seven buffers, or a shape, stride or
/// buffer does not fit.
pub fn adamw(
    client: &Client,
    element: ElementType,
    step: &AdamWStep,
    old: &UpdateState,
    gradient: &TensorBinding,
    new: Option<&UpdateState>,
) -> Result<(), AttentionError> {
    check_type(client, element)?;
    check_grid(client, 7, [1; 3])?;
    let names = [
        TensorName::Parameter,
        TensorName::FirstMoment,
        TensorName::SecondMoment,
    ];
    let all = || {
        names.into_iter().cycle().zip(
            [Some(old), new]
                .into_iter()
                .flatten()
                .flat_map(UpdateState::tensors),
        )
    };
    let shape = old.parameter.shape.to_vec();
    for (name, tensor) in all().chain([(TensorName::GradParameter, gradient)]) {
        check_tensor(name, tensor, &shape, element.size(), Layout::Contiguous)?;
    }
    let _range = range!("adamw");
    let tensors: Vec<_> = all().map(|(_, tensor)| tensor).chain([gradient]).collect();
    let Some(pass) = Pass::new(client, element, &tensors) else {
        return Ok(());
    };
    let [correction_1, correction_2] = step.corrections();
    let numbers = StepLaunch::new(
        step.rate as f32,
        step.decay() as f32,
        step.beta_1,
        step.beta_2,
        step.epsilon,
        correction_1,
        correction_2,
    );
    let (cubes, dim) = pass.cubes(client);
    // SAFETY: every buffer was checked to hold the parameter's elements, and units past the last do nothing.
    unsafe {
        adamw_kernel::launch_unchecked(
            client,
            cubes,
            dim,
            pass.address,
            pass.vector,
            arguments(old),
            gradient.clone().into_buffer_arg(),
            new.map_or_else(|| aliases(old), arguments),
            numbers,
            pass.items,
            new.is_none(),
            elem_type(element),
        );
    }
    Ok(())
}

fn arguments<E: Float, N: Size>(state: &UpdateState) -> StateLaunch<E, N> {
    let [parameter, moment_1, moment_2] = state
        .tensors()
        .map(|tensor| tensor.clone().into_buffer_arg());
    StateLaunch::new(parameter, moment_1, moment_2)
}

/// The buffers of `old`, which are the kernel's first.
fn aliases<E: Float, N: Size>(old: &UpdateState) -> StateLaunch<E, N> {
    let count = old.parameter.shape.iter().product();
    let [parameter, moment_1, moment_2] = [0, 1, 2].map(|at| BufferArg::alias(at, count));
    StateLaunch::new(parameter, moment_1, moment_2)
}

/// `out = x * factor`: `x` and `out` are contiguous, of one shape and of `element`, the factor `[1]` in f32. Rounded once.
///
/// # Errors
///
/// As [`adamw`].
pub fn scale(
    client: &Client,
    element: ElementType,
    x: &TensorBinding,
    factor: &TensorBinding,
    out: &TensorBinding,
) -> Result<(), AttentionError> {
    check_type(client, element)?;
    let (size, contiguous) = (element.size(), Layout::Contiguous);
    let shape = x.shape.to_vec();
    check_tensor(TensorName::GradParameter, x, &shape, size, contiguous)?;
    check_tensor(TensorName::ClipFactor, factor, &[1], 4, contiguous)?;
    check_tensor(TensorName::GradParameter, out, &shape, size, contiguous)?;
    let _range = range!("scale");
    let Some(pass) = Pass::new(client, element, &[x, out]) else {
        return Ok(());
    };
    let (cubes, dim) = pass.cubes(client);
    // SAFETY: both buffers were checked to hold the elements, and units past the last do nothing.
    unsafe {
        scale_kernel::launch_unchecked(
            client,
            cubes,
            dim,
            pass.address,
            pass.vector,
            x.clone().into_buffer_arg(),
            factor.clone().into_buffer_arg(),
            out.clone().into_buffer_arg(),
            pass.items,
            elem_type(element),
        );
    }
    Ok(())
}

/// `out = sums` + parts of the sum of the squares of `x`, which is contiguous and of `element`: the sum of all numbers
/// grows by that of all squares. `sums` and `out` are `[`[`SQUARE_SUMS`]`]` in f32. The order of additions is fixed.
///
/// # Errors
///
/// As [`adamw`].
pub fn add_squares(
    client: &Client,
    element: ElementType,
    x: &TensorBinding,
    sums: &TensorBinding,
    out: &TensorBinding,
) -> Result<(), AttentionError> {
    check_type(client, element)?;
    let contiguous = Layout::Contiguous;
    check_tensor(
        TensorName::GradParameter,
        x,
        &x.shape.to_vec(),
        element.size(),
        contiguous,
    )?;
    for tensor in [sums, out] {
        check_tensor(
            TensorName::SquareSums,
            tensor,
            &[SQUARE_SUMS],
            4,
            contiguous,
        )?;
    }
    let _range = range!("add_squares");
    let (vector, items) = vectors(client, element, &[x]);
    let units = match client.properties().hardware.plane_size_max {
        0 | 1 => 1,
        _ => UNITS.min(1 << client.properties().hardware.max_units_per_cube.ilog2()),
    };
    // SAFETY: a cube reads and writes its sum, and reads the elements that exist.
    unsafe {
        add_squares_kernel::launch_unchecked(
            client,
            CubeCount::Static(SQUARE_SUMS as u32, 1, 1),
            CubeDim::new_1d(units as u32),
            address_type(&[x], element.size()),
            vector,
            x.clone().into_buffer_arg(),
            sums.clone().into_buffer_arg(),
            out.clone().into_buffer_arg(),
            items,
            units,
            elem_type(element),
        );
    }
    Ok(())
}
