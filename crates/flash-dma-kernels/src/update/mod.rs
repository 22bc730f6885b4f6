//! An optimiser's update after the backward pass: the norm of all gradients, their scaling by a number on the device, and
//! AdamW. The first and the last take many parameters in a launch.

mod kernel;
#[cfg(test)]
mod tests;

use crate::host::check::{
    Layout, address_type, check_grid, check_tensor, check_type, elem_type, most_buffers,
};
use crate::host::flat::{Pass, vectors};
use crate::host::range::range;
use crate::host::scratch::one_unit_each;
use cubecl::CubeDim;
use cubecl::client::Client;
use cubecl::prelude::*;
use flash_dma_problem::{AdamWStep, AttentionError, ElementType, SQUARE_SUMS, TensorName};
use kernel::{
    SquaredLaunch, StepLaunch, UpdateLaunch, adamw_kernel, add_squares_kernel, scale_kernel,
};

/// Units of a cube of [`add_squares`], except where units are threads of a processor.
const UNITS: usize = 256;
/// The most parameters of a launch of [`adamw`], of up to five buffers each.
const UPDATES: usize = 16;
/// The most tensors of a launch of [`add_squares`].
const SQUARED: usize = 32;

/// A parameter, its gradient and its moments, contiguous and of one shape and type.
#[derive(Clone, Debug)]
pub struct ParameterUpdate {
    /// The parameter.
    pub parameter: TensorBinding,
    /// Its gradient.
    pub gradient: TensorBinding,
    /// Running mean of the gradient.
    pub moment_1: TensorBinding,
    /// Running mean of the gradient's square.
    pub moment_2: TensorBinding,
    /// Where the new parameter goes; `None` for over the old one.
    pub new: Option<TensorBinding>,
}

impl ParameterUpdate {
    fn tensors(&self) -> Vec<&TensorBinding> {
        let old = [
            &self.parameter,
            &self.gradient,
            &self.moment_1,
            &self.moment_2,
        ];
        old.into_iter().chain(&self.new).collect()
    }
}

/// A step of AdamW on parameters of `element` whose gradients count `factor` times, `[1]` in f32; it writes over the moments.
/// Arithmetic is f32, and each result is rounded once. A launch takes up to 16 parameters.
///
/// The call only enqueues: a failure on the device is reported when a result is read.
///
/// # Errors
///
/// [`AttentionError`], before any launch, if the device lacks the element type or the buffers for a parameter, or a shape,
/// stride or buffer does not fit.
pub fn adamw(
    client: &Client,
    element: ElementType,
    step: &AdamWStep,
    updates: &[ParameterUpdate],
    factor: &TensorBinding,
) -> Result<(), AttentionError> {
    check_type(client, element)?;
    check_grid(client, 6, [1; 3])?;
    let names = [
        TensorName::Parameter,
        TensorName::GradParameter,
        TensorName::FirstMoment,
        TensorName::SecondMoment,
        TensorName::Parameter,
    ];
    for update in updates {
        let shape = update.parameter.shape.to_vec();
        for (name, tensor) in names.into_iter().zip(update.tensors()) {
            check_tensor(name, tensor, &shape, element.size(), Layout::Contiguous)?;
        }
    }
    check_tensor(TensorName::ClipFactor, factor, &[1], 4, Layout::Contiguous)?;
    let _range = range!("adamw");
    let kind = |update: &ParameterUpdate| {
        let (vector, items) = vectors(client, element, &update.tensors());
        ((vector, update.new.is_none()), items)
    };
    for (kind, updates) in groups(updates, kind, most(client, 5, 1).min(UPDATES)) {
        adamw_launch(client, element, step, kind, &updates, factor);
    }
    Ok(())
}

fn adamw_launch(
    client: &Client,
    element: ElementType,
    step: &AdamWStep,
    (vector, in_place): (usize, bool),
    updates: &[(&ParameterUpdate, usize)],
    factor: &TensorBinding,
) {
    let tensors: Vec<_> = updates
        .iter()
        .flat_map(|(update, _)| update.tensors())
        .collect();
    let mut units = 0;
    let mut arguments = SequenceArg::new();
    for (at, (update, items)) in updates.iter().enumerate() {
        let argument = |tensor: &TensorBinding| tensor.clone().into_buffer_arg();
        let new = match &update.new {
            Some(new) => argument(new),
            // Four buffers of each parameter are before this one's first.
            None => BufferArg::alias(4 * at, update.parameter.shape.iter().product()),
        };
        arguments.push(UpdateLaunch::new(
            argument(&update.parameter),
            argument(&update.gradient),
            argument(&update.moment_1),
            argument(&update.moment_2),
            new,
            units,
            *items,
        ));
        // A plane has vectors of one parameter.
        units += items.next_multiple_of(UNITS);
    }
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
    let (cubes, dim) = one_unit_each(client, units);
    // SAFETY: every buffer was checked to hold its parameter's elements, and units outside of those do nothing.
    unsafe {
        adamw_kernel::launch_unchecked(
            client,
            cubes,
            dim,
            address_of(&tensors, element, units),
            vector,
            arguments,
            factor.clone().into_buffer_arg(),
            numbers,
            updates.len(),
            in_place,
            elem_type(element),
        );
    }
}

/// The smallest address type of tensors and of `units`.
fn address_of(tensors: &[&TensorBinding], element: ElementType, units: usize) -> AddressType {
    let of_units = match u32::try_from(units) {
        Ok(_) => AddressType::U32,
        Err(_) => AddressType::U64,
    };
    address_type(tensors, element.size()).max(of_units)
}

/// The parameters that a launch has buffers for, of `each` apiece and `others` together.
fn most(client: &Client, each: usize, others: usize) -> usize {
    (most_buffers(client).saturating_sub(others) / each).max(1)
}

/// Groups of at most `most` of one kind, in order, without those that have no vectors; with each the number of these.
fn groups<T, K: PartialEq>(
    all: &[T],
    kind: impl Fn(&T) -> (K, usize),
    most: usize,
) -> Vec<(K, Vec<(&T, usize)>)> {
    let mut groups: Vec<(K, Vec<(&T, usize)>)> = Vec::new();
    for one in all {
        let (kind, items) = kind(one);
        if items == 0 {
            continue;
        }
        let open = |(of, group): &&mut (K, Vec<_>)| *of == kind && group.len() < most;
        match groups.iter_mut().find(open) {
            Some((_, group)) => group.push((one, items)),
            None => groups.push((kind, vec![(one, items)])),
        }
    }
    groups
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

/// `sums` + parts of the sum of the squares of `xs`, which are contiguous and of `element`: the sum of all numbers grows by
/// that of all squares. `sums` is `[`[`SQUARE_SUMS`]`]` in f32, and is written over. The order of additions is fixed. A
/// launch takes up to 32 tensors.
///
/// # Errors
///
/// As [`adamw`].
pub fn add_squares(
    client: &Client,
    element: ElementType,
    xs: &[TensorBinding],
    sums: &TensorBinding,
) -> Result<(), AttentionError> {
    check_type(client, element)?;
    check_grid(client, 2, [SQUARE_SUMS, 1, 1])?;
    let contiguous = Layout::Contiguous;
    for x in xs {
        let shape = x.shape.to_vec();
        check_tensor(
            TensorName::GradParameter,
            x,
            &shape,
            element.size(),
            contiguous,
        )?;
    }
    check_tensor(TensorName::SquareSums, sums, &[SQUARE_SUMS], 4, contiguous)?;
    let _range = range!("add_squares");
    let units = match client.properties().hardware.plane_size_max {
        0 | 1 => 1,
        _ => UNITS.min(1 << client.properties().hardware.max_units_per_cube.ilog2()),
    };
    let width = |x: &TensorBinding| vectors(client, element, &[x]);
    for (vector, xs) in groups(xs, width, most(client, 1, 1).min(SQUARED)) {
        let tensors: Vec<_> = xs.iter().map(|(x, _)| *x).collect();
        let arguments = xs
            .iter()
            .map(|(x, items)| SquaredLaunch::new((*x).clone().into_buffer_arg(), *items));
        // SAFETY: a cube reads and writes its sum, and reads the elements that exist.
        unsafe {
            add_squares_kernel::launch_unchecked(
                client,
                CubeCount::Static(SQUARE_SUMS as u32, 1, 1),
                CubeDim::new_1d(units as u32),
                address_type(&tensors, element.size()),
                vector,
                arguments.collect(),
                sums.clone().into_buffer_arg(),
                xs.len(),
                units,
                elem_type(element),
            );
        }
    }
    Ok(())
}
