//! The host's side: what is refused, what is fixed at compile time, and the launch.

use crate::kernel::{KeptKeysLaunch, RowsLaunch, ScalingLaunch, mass_kernel};
use cubecl::client::Client;
use cubecl::ir::features::TypeUsage;
use cubecl::prelude::*;
use flash_dma_kernels::internals::tiles::{Blueprint, Kernel};
use flash_dma_kernels::internals::{Layout, check_tensor, elem_type, vector_size};
use flash_dma_kernels::{AttentionError, Problem, Selection, contiguous_strides};
use flash_dma_problem::TensorName;

/// The inputs of [`attention_mass`], shaped as the problem says.
#[derive(Clone, Debug)]
pub struct MassInputs {
    /// `[batch, q_heads, q_len, head_dim]`, any strides with a contiguous last axis.
    pub q: TensorBinding,
    /// `[batch, kv_heads, k_len, head_dim]`, likewise.
    pub k: TensorBinding,
    /// Scores and intervals, contiguous.
    pub selection: Selection,
    /// What the forward pass wrote: contiguous `[batch, q_heads, q_len]`, f32.
    pub lse: TensorBinding,
}

/// The reason for refusing a call. Nothing has been launched or written then.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MassError {
    /// A problem without scores: all its keys are kept.
    #[error("the attention mass needs a problem with scores")]
    NoScores,
    /// An input that does not fit the problem, or a device that cannot run the kernel.
    #[error(transparent)]
    Input(#[from] AttentionError),
    /// The buffer of the result is not a contiguous tensor of one f32 per key.
    #[error("the mass must be contiguous {expected:?} in f32, but is {actual:?} of {len} elements")]
    Mass {
        /// The shape of the scores.
        expected: Vec<usize>,
        /// The shape that was given.
        actual: Vec<usize>,
        /// The f32 that its buffer holds.
        len: usize,
    },
}

// ANCHOR: launch
/// Overwrites `mass`, contiguous `[batch, kv_heads, k_len]`, with the sum of each key's probabilities over all queries
/// of the group's heads. A key that nothing attends to gets exactly 0.
///
/// # Errors
///
/// A [`MassError`], before anything is launched.
pub fn attention_mass(
    client: &Client,
    problem: &Problem,
    inputs: &MassInputs,
    mass: &TensorBinding,
) -> Result<(), MassError> {
    // The shared memory of the forward kernel holds ours: it has one tile and the weights more.
    let blueprint = Blueprint::choose(Kernel::Forward, problem, &client.properties().hardware)?;
    attention_mass_in(client, problem, inputs, mass, blueprint)
}

/// [`attention_mass`] with a given blueprint of the problem, which must fit the device.
///
/// # Errors
///
/// As it.
pub fn attention_mass_in(
    client: &Client,
    problem: &Problem,
    inputs: &MassInputs,
    mass: &TensorBinding,
    blueprint: Blueprint,
) -> Result<(), MassError> {
    inputs.check(client, problem)?;
    check_mass(problem, mass)?;
    let p = problem;
    let cubes = check_grid(client, p, blueprint)?;
    if p.batch * p.k_len == 0 {
        return Ok(());
    }
    let MassInputs { q, k, .. } = inputs;
    let Selection {
        scores, intervals, ..
    } = &inputs.selection;
    let words = [scores, intervals, &inputs.lse, mass];
    let typed = [q, k].map(|tensor| tensor.required_address_type(p.element.size()));
    let address = words.map(|tensor| tensor.required_address_type(4));
    let arg = |tensor: &TensorBinding| tensor.clone().into_tensor_arg();
    // SAFETY: every tensor was checked to hold the shape and strides that the kernel indexes by, rows and positions
    // past the last are neither read nor written, and the grid has one cube for each tile of keys.
    unsafe {
        mass_kernel::launch_unchecked(
            client,
            cubes,
            blueprint.cube_dim(),
            typed.into_iter().chain(address).max().unwrap_or_default(),
            vector_size(&[q, k], p.element.size()),
            RowsLaunch::new(arg(q), arg(k), arg(&inputs.lse)),
            KeptKeysLaunch::new(arg(scores), arg(intervals)),
            arg(mass),
            ScalingLaunch::new(p.scale, p.softcap.unwrap_or(1.0)),
            blueprint,
            elem_type(p.element),
        );
    }
    Ok(())
}
// ANCHOR_END: launch

impl MassInputs {
    // ANCHOR: check
    /// Checks every input against the problem, and its element type against the device.
    fn check(&self, client: &Client, problem: &Problem) -> Result<(), MassError> {
        if !problem.has_scores {
            return Err(MassError::NoScores);
        }
        let (p, size) = (problem, problem.element.size());
        let Selection {
            scores, intervals, ..
        } = &self.selection;
        let strided = Layout::Strided;
        check_tensor(TensorName::Query, &self.q, &p.q_shape(), size, strided)?;
        check_tensor(TensorName::Key, &self.k, &p.kv_shape(), size, strided)?;
        let words = |name, tensor, shape: &[usize]| {
            check_tensor(name, tensor, shape, 4, Layout::Contiguous)
        };
        words(TensorName::Scores, scores, &p.scores_shape())?;
        words(TensorName::Intervals, intervals, &p.intervals_shape())?;
        words(TensorName::Lse, &self.lse, &p.lse_shape())?;
        let used = TypeUsage::Buffer | TypeUsage::Conversion;
        let usage = client.properties().type_usage(elem_type(p.element));
        if !usage.is_superset(used) {
            let what = format!("tensors of {}", p.element);
            return Err(AttentionError::Unsupported { what }.into());
        }
        Ok(())
    }
    // ANCHOR_END: check
}

fn check_mass(problem: &Problem, mass: &TensorBinding) -> Result<(), MassError> {
    let (expected, len) = (
        problem.scores_shape(),
        mass.handle.size_in_used() as usize / 4,
    );
    if mass.shape[..] != expected
        || !contiguous_strides(&mass.shape).eq(mass.strides.iter().copied())
        || expected.iter().product::<usize>() > len
    {
        return Err(MassError::Mass {
            expected: expected.to_vec(),
            actual: mass.shape.to_vec(),
            len,
        });
    }
    Ok(())
}

/// One cube per tile of keys, kv head and sequence.
fn check_grid(
    client: &Client,
    problem: &Problem,
    blueprint: Blueprint,
) -> Result<CubeCount, AttentionError> {
    let cubes = [
        problem.k_len.div_ceil(blueprint.outer_rows()),
        problem.kv_heads,
        problem.batch,
    ];
    let (x, y, z) = client.properties().hardware.max_cube_count;
    let names = [
        "the number of tiles",
        "the number of heads",
        "the number of sequences",
    ];
    for ((what, size), limit) in names.into_iter().zip(cubes).zip([x, y, z]) {
        let limit = limit as usize;
        if size > limit {
            return Err(AttentionError::TooLarge { what, size, limit });
        }
    }
    let [x, y, z] = cubes.map(|size| size as u32);
    Ok(CubeCount::Static(x, y, z))
}
