//! Host side of the backward pass without a mask.

use crate::args::{Gradients, Inputs, Saved, Selection};
use crate::backward::blueprint::MmaBlueprints;
use crate::backward::delta::SumTerms;
use crate::backward::rank::terms::rank_terms;
use crate::backward::{Backward, matrix};
use crate::host::check::{address_type, check_segments, elem_type, vector_size};
use crate::host::engine::{Engine, Instruction, Refusal};
use crate::host::fill::fill;
use crate::host::pass::{Config, ConfigOf, Pass, Plan, Rows};
use crate::host::scratch::{bytes, one_unit_each, scratch};
use crate::matrix::wgmma::boxes::takes_boxes;
use crate::pattern::intervals::LiveKeys;
use crate::pattern::intervals::order::{OrderedKeys, by_death};
use crate::pattern::intervals::ranked::{RankedKeys, ranked_keys};
use crate::pattern::intervals::slices::{SelectedKeys, slice_bytes};
use crate::pattern::kind::{Bias, Pattern};
use crate::portable::blueprint::{Blueprint, Kernel};
use crate::portable::delta::delta_kernel;
use crate::portable::launch::{PortableKeys, PortableLaunch, SavedTensors};
use cubecl::client::Client;
use cubecl::ir::{DeviceProperties, HardwareProperties};
use cubecl::prelude::*;
use flash_dma_problem::{AttentionError, MaskedProblem, Obstacle, PassKind, Problem};

/// The most buffers of any kernel.
pub(crate) const BINDINGS: u32 = 14;

/// Comptime configurations of the two large kernels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Blueprints {
    pub dq: Blueprint,
    pub dkdv: Blueprint,
}

impl Blueprints {
    pub(crate) fn choose(
        problem: &Problem,
        hardware: &HardwareProperties,
    ) -> Result<Self, AttentionError> {
        Ok(Self {
            dq: Blueprint::choose(Kernel::GradQuery, problem, hardware)?,
            dkdv: Blueprint::choose(Kernel::GradKeyValue, problem, hardware)?,
        })
    }

    /// [`choose`](Self::choose) for a mask and a bias.
    pub(crate) fn choose_masked(
        problem: &MaskedProblem,
        hardware: &HardwareProperties,
    ) -> Result<Self, AttentionError> {
        let pattern = Pattern::masked(problem, Bias::strided(problem));
        let Self { dq, dkdv } = Self::choose(&problem.attention, hardware)?;
        Ok(Self {
            dq: dq.with_pattern(pattern),
            dkdv: dkdv.with_pattern(pattern),
        })
    }

    /// Cubes along each axis of both grids.
    pub(crate) fn cubes(&self, problem: &Problem) -> [usize; 3] {
        let tiles = problem.q_len.div_ceil(self.dq.outer_rows());
        let key_tiles = problem.k_len.div_ceil(self.dkdv.outer_rows());
        [tiles.max(key_tiles), problem.q_heads, problem.batch]
    }

    /// The most bytes of buffers that [`PortablePass`] holds at once.
    pub(crate) fn workspace(&self, problem: &Problem, selection: Option<&Selection>) -> usize {
        let dkdv = OrderedKeys::bytes(problem);
        let dq = slice_bytes(problem, self.dq.outer_rows());
        let rank = RankedKeys::bytes(problem, selection);
        LiveKeys::bytes(problem) + bytes(problem.lse_shape()) + dq.max(dkdv).max(rank)
    }
}

pub(crate) struct ScoredBackward<'a> {
    pub problem: &'a Problem,
    pub inputs: &'a Inputs,
    pub saved: &'a Saved,
}

impl Backward for Problem {
    type Gradients = Gradients;

    fn plan_backward<'a>(
        &'a self,
        client: &'a Client,
        inputs: &'a Inputs,
        saved: &'a Saved,
        engine: Option<Engine>,
    ) -> Result<Plan<'a, Gradients>, AttentionError> {
        let pass = ScoredBackward {
            problem: self,
            inputs,
            saved,
        };
        Plan::new(client, engine, pass)
    }
}

impl Pass for ScoredBackward<'_> {
    type Outputs = Gradients;
    type Portable = Blueprints;
    type Matrix = MmaBlueprints;

    const BINDINGS: u32 = BINDINGS;
    const KIND: PassKind = PassKind::Backward;

    fn rows(&self) -> Rows {
        self.problem.into()
    }

    fn portable(&self, hardware: &HardwareProperties) -> Result<Blueprints, AttentionError> {
        Blueprints::choose(self.problem, hardware)
    }

    fn matrix(
        &self,
        instruction: Instruction,
        properties: &DeviceProperties,
    ) -> Result<MmaBlueprints, Refusal> {
        let (p, size) = (self.problem, self.problem.element.size());
        let blueprints = MmaBlueprints::choose(instruction, p, properties)?;
        check_segments(self.inputs.typed(), size)?;
        self.saved.check_rows(instruction, &self.inputs.q, size)?;
        Ok(blueprints)
    }

    fn cubes(&self, config: &ConfigOf<Self>) -> [usize; 3] {
        match config {
            Config::Portable(blueprints) => blueprints.cubes(self.problem),
            Config::Matrix(blueprints) => blueprints.cubes(self.problem),
        }
    }

    fn workspace_bytes(&self, config: &ConfigOf<Self>) -> usize {
        let selection = self.inputs.selection.as_ref();
        let of_engine = match config {
            Config::Portable(blueprints) => blueprints.workspace(self.problem, selection),
            Config::Matrix(blueprints) => blueprints.workspace(self.problem, selection),
        };
        of_engine + self.saved.rest_bytes(self.problem)
    }

    fn check(&self, grads: &Gradients) -> Result<(), AttentionError> {
        self.inputs.check(self.problem)?;
        self.saved.check(self.problem)?;
        grads.check(self.problem, self.inputs)
    }

    fn launch_empty(&self, client: &Client, grads: Gradients) {
        zero(client, self.problem, &grads);
        fill(client, &grads.q, 0.0, elem_type(self.problem.element));
    }

    fn launch(&self, client: &Client, config: ConfigOf<Self>, grads: Gradients) {
        let (problem, inputs, saved) = (self.problem, self.inputs, self.saved);
        match config {
            Config::Portable(blueprints) => {
                if problem.has_scores {
                    // Keys that no query attends to are never visited.
                    zero(client, problem, &grads);
                }
                let sums = RowSums::new(client, problem, saved);
                let pass = PortablePass {
                    keys: SelectedKeys::new(client, problem, inputs),
                    inputs,
                    saved,
                    sums,
                    grads: &grads,
                    blueprints,
                };
                pass.launch_dq();
                pass.launch_dkdv();
                pass.launch_rank();
            }
            Config::Matrix(blueprints) => {
                matrix::launch(client, problem, inputs, saved, &grads, blueprints);
            }
        }
    }
}

/// Zeroes the gradients of k, v, the scores and the rank.
fn zero(client: &Client, problem: &Problem, grads: &Gradients) {
    let element = elem_type(problem.element);
    fill(client, &grads.k, 0.0, element);
    fill(client, &grads.v, 0.0, element);
    for words in grads.scores.iter().chain(&grads.rank) {
        fill(client, words, 0.0, f32::elem_type_native());
    }
}

impl Saved {
    /// Refuses rows misaligned for the tensor-core engines and, for `wgmma`, rows of dO and `q` that boxes cannot copy.
    pub(crate) fn check_rows(
        &self,
        instruction: Instruction,
        q: &TensorBinding,
        size: usize,
    ) -> Result<(), Obstacle> {
        check_segments(self.typed(), size)?;
        let boxed = takes_boxes(q, size) && takes_boxes(&self.grad_out, size);
        match instruction == Instruction::Mma || boxed {
            true => Ok(()),
            false => Err(Obstacle::RepeatedRows),
        }
    }

    /// The rounding errors of the LSEs; zeros in a new buffer if they were not kept.
    pub(crate) fn rest_or_zeros(&self, client: &Client, problem: &Problem) -> TensorBinding {
        self.lse_rest.clone().unwrap_or_else(|| {
            let zeros = scratch(client, problem.lse_shape());
            fill(client, &zeros, 0.0, f32::elem_type_native());
            zeros
        })
    }

    /// The bytes that [`rest_or_zeros`](Self::rest_or_zeros) allocates.
    pub(crate) fn rest_bytes(&self, problem: &Problem) -> usize {
        match self.lse_rest {
            Some(_) => 0,
            None => bytes(problem.lse_shape()),
        }
    }
}

/// The row sums of a backward pass, and the rounding errors of the LSEs, each `[batch, q_heads, q_len]` in f32.
pub(crate) struct RowSums {
    pub delta: TensorBinding,
    pub lse_rest: TensorBinding,
}

impl RowSums {
    /// Launches the portable kernel of the row sums.
    pub(crate) fn new(client: &Client, problem: &Problem, saved: &Saved) -> Self {
        let delta = scratch(client, problem.lse_shape());
        let rows = problem.lse_shape().iter().product();
        let (cube_count, cube_dim) = one_unit_each(client, rows);
        let size = problem.element.size();
        let typed = saved.typed();
        let residual = saved.residual.clone().map(TensorBinding::into_tensor_arg);
        let grad_lse = saved.grad_lse.clone().map(TensorBinding::into_tensor_arg);
        // SAFETY: units past the rows return; the buffers were checked to hold what is indexed.
        unsafe {
            delta_kernel::launch_unchecked(
                client,
                cube_count,
                cube_dim,
                address_type(&typed, size).max(address_type(&[&delta], 4)),
                vector_size(&typed, size),
                saved.out.clone().into_tensor_arg(),
                residual.into(),
                saved.grad_out.clone().into_tensor_arg(),
                grad_lse.into(),
                delta.clone().into_tensor_arg(),
                problem.head_dim,
                SumTerms::new(saved, false, false),
                elem_type(problem.element),
            );
        }
        let lse_rest = saved.rest_or_zeros(client, problem);
        Self { delta, lse_rest }
    }
}

/// The portable kernels of a checked, non-empty problem.
struct PortablePass<'a> {
    keys: SelectedKeys<'a>,
    inputs: &'a Inputs,
    saved: &'a Saved,
    sums: RowSums,
    grads: &'a Gradients,
    blueprints: Blueprints,
}

impl<'a> PortablePass<'a> {
    fn launch_dq(&self) {
        let (grad, blueprint) = (&self.grads.q, self.blueprints.dq);
        (self.keys).for_each_slice(blueprint.outer_rows(), &[grad], |tiles| {
            let kernel = self.kernel(PortableKeys::of_tiles(tiles.source), blueprint);
            kernel.dq(self.saved(), tiles.first, tiles.count, grad);
        });
    }

    fn launch_dkdv(&self) {
        let (client, problem) = (self.keys.client, self.keys.problem);
        let (grads, blueprint) = (self.grads, self.blueprints.dkdv);
        let (keys, listed) = match &self.keys.selection {
            Some((selection, live)) => {
                let ordered = by_death(client, problem, live);
                let scores = selection.scores.clone();
                let tensors = [scores, ordered.keys, ordered.ends, ordered.counts];
                (PortableKeys::Intervals(Box::new(tensors)), ordered.capacity)
            }
            None => (PortableKeys::All, problem.k_len),
        };
        let key_tiles = listed.div_ceil(blueprint.outer_rows());
        let rows = [&grads.k, &grads.v];
        let kernel = self.kernel(keys, blueprint);
        kernel.dkdv(self.saved(), key_tiles, rows, grads.scores.as_ref());
    }

    /// The gradient of the rank, if it is learned; all other keys keep their zero. The blueprint is that of dk and dv,
    /// whose tiles have room for more than this kernel needs.
    fn launch_rank(&self) {
        let (Some((selection, _)), Some(rank)) = (&self.keys.selection, &self.grads.rank) else {
            return;
        };
        let far = selection.far.as_ref().expect("a rank comes with it");
        let kernel = self.kernel(PortableKeys::All, self.blueprints.dkdv);
        for source in far.sources() {
            let ranked = ranked_keys(self.keys.client, self.keys.problem, selection, source);
            let terms = rank_terms(self.saved.grad_lse.as_ref(), source);
            kernel.rank(self.saved(), terms, &selection.scores, ranked, rank);
        }
    }

    fn kernel(&self, keys: PortableKeys<'a>, blueprint: Blueprint) -> PortableLaunch<'a> {
        let SelectedKeys {
            client, problem, ..
        } = self.keys;
        PortableLaunch::scored(client, problem, self.inputs, keys, blueprint)
    }

    fn saved(&self) -> SavedTensors<'_> {
        SavedTensors {
            saved: self.saved,
            sums: &self.sums,
        }
    }
}
