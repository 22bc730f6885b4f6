//! The engines of a device, and which of them would run a problem, by the same plans that launch.

use crate::backward::Backward;
use crate::host::check::limits;
use crate::host::engine::{Engine, allowed};
use crate::host::pass::Plan;
use crate::matrix::blueprint::{has_mma, has_wgmma};
use crate::pattern::mask::args::{MaskBits, MaskedInputs};
use crate::planning::Rows;
use crate::{Inputs, Saved};
use cubecl::client::Client;
use flash_dma_problem::memory::Passes;
use flash_dma_problem::{
    AttentionError, ElementType, EngineReport, MaskedProblem, PassedOver, Problem,
};

/// The engines of a device, the fastest first, without those that [`ENGINE_VARIABLE`](crate::ENGINE_VARIABLE) excludes.
/// [`Engine::Portable`] is always the last.
///
/// # Errors
///
/// [`AttentionError::Unsupported`] if the variable names no engine.
pub fn engines(client: &Client) -> Result<Vec<Engine>, AttentionError> {
    let properties = client.properties();
    let on_device = |engine: &Engine| match engine {
        Engine::Wgmma => has_wgmma(properties),
        Engine::Mma => [ElementType::F16, ElementType::Bf16]
            .iter()
            .any(|&e| has_mma(e, properties)),
        _ => true,
    };
    Ok(allowed()?.iter().copied().filter(on_device).collect())
}

/// The engines that would run both passes of a problem whose tensors are contiguous, and the reasons why no faster one
/// would. It plans the passes as a call does, and launches nothing.
///
/// # Errors
///
/// The errors of [`Forward::plan_forward`](crate::forward::Forward::plan_forward) and [`Backward::plan_backward`].
pub fn engine_for<P: Reported>(
    client: &Client,
    problem: &P,
) -> Result<EngineReport, AttentionError> {
    let rows = Rows::new(client);
    let (inputs, saved) = problem.tensors(&rows);
    let forward = problem.plan_forward(client, &inputs, None)?;
    let backward = problem.plan_backward(client, &inputs, &saved, None)?;
    Ok(EngineReport::new(choice(&forward), choice(&backward)))
}

/// Plans the forward pass of a problem whose tensors are contiguous, and the backward pass if there is one.
///
/// # Errors
///
/// The errors of [`engine_for`], for these passes.
pub fn check_engine<P: Reported>(
    client: &Client,
    problem: &P,
    backward: bool,
) -> Result<(), AttentionError> {
    if backward {
        return engine_for(client, problem).map(drop);
    }
    let (inputs, _) = problem.tensors(&Rows::new(client));
    problem.plan_forward(client, &inputs, None).map(drop)
}

/// True if a problem fits the device's grid with any engine. If not, [`check_engine`] checks whether its engines fit.
pub fn fits_grid(client: &Client, problem: &Problem) -> bool {
    let [x, y, z] = limits(client);
    problem.batch * problem.q_heads <= y.min(z) && problem.q_len.max(problem.k_len) <= x
}

fn choice<O>(plan: &Plan<'_, O>) -> (Engine, Vec<PassedOver>) {
    (plan.engine(), plan.passed_over().to_vec())
}

/// Problems that [`engine_for`] can plan without their tensors.
pub trait Reported: Backward + sealed::Shaped<Self::Inputs> {}

impl Reported for Problem {}
impl Reported for MaskedProblem {}

mod sealed {
    use super::{Inputs, MaskBits, MaskedInputs, MaskedProblem, Passes, Problem, Rows, Saved};

    /// The inputs of a problem and the tensors that its forward pass saves, used only for their shapes and strides.
    pub trait Shaped<I> {
        fn tensors(&self, rows: &Rows) -> (I, Saved);
    }

    impl Shaped<Inputs> for Problem {
        fn tensors(&self, rows: &Rows) -> (Inputs, Saved) {
            let inputs = rows.inputs(self, Passes::ForwardAndBackward);
            (inputs, rows.saved(self))
        }
    }

    impl Shaped<MaskedInputs> for MaskedProblem {
        fn tensors(&self, rows: &Rows) -> (MaskedInputs, Saved) {
            let Inputs { q, k, v, .. } = rows.inputs(&self.attention, Passes::Forward);
            let inputs = MaskedInputs {
                q,
                k,
                v,
                plan: self.plan.map(|plan| MaskBits {
                    bits: rows.tensor(&plan.bits_shape()),
                    counts: rows.tensor(&plan.counts_shape()),
                }),
                bias: self.bias.map(|shape| rows.tensor(&shape)),
            };
            (inputs, rows.saved(&self.attention))
        }
    }
}
