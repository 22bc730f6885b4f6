//! Host side of the backward pass without a mask.

use crate::args::{Gradients, Inputs, Saved, Selection};
use crate::backward::blueprint::MmaBlueprints;
use crate::backward::{Backward, matrix};
use crate::host::check::{check_gradients, check_inputs, check_saved, check_segments, elem_type};
use crate::host::engine::{Engine, Instruction, Refusal};
use crate::host::fill::fill;
use crate::host::pass::{Config, ConfigOf, Pass, Plan, Rows};
use crate::host::scratch::{bytes, scratch};
use crate::matrix::wgmma::boxes::takes_boxes;
use crate::pattern::intervals::LiveKeys;
use crate::pattern::intervals::order::{OrderedKeys, by_death};
use crate::pattern::intervals::ranked::{RankedKeys, ranked_keys, sources};
use crate::pattern::intervals::slices::{SelectedKeys, slice_bytes};
use crate::pattern::kind::{Bias, Pattern};
use crate::portable::blueprint::{Blueprint, Kernel};
use crate::portable::launch::{PortableKeys, PortableLaunch, SavedTensors};
use crate::rank_terms::rank_terms;
use crate::row_sums::{RowSums, rest_bytes};
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
        let blueprints = blueprints.with_kept(p, self.inputs.selection.as_ref(), self.saved);
        check_segments(self.inputs.rows(), size)?;
        check_rows(self.saved, instruction, &self.inputs.q, size)?;
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
        let unasked = match self.sums_unasked_scores(config) {
            true => bytes(self.problem.scores_shape()),
            false => 0,
        };
        of_engine + unasked + rest_bytes(self.problem, self.saved)
    }

    fn check(&self, grads: &Gradients) -> Result<(), AttentionError> {
        check_inputs(self.problem, self.inputs)?;
        check_saved(self.problem, self.saved)?;
        check_gradients(self.problem, self.inputs, grads)
    }

    fn launch_empty(&self, client: &Client, grads: Gradients) {
        zero(client, self.problem, &grads);
        fill(client, &grads.q, 0.0, elem_type(self.problem.element));
    }

    fn launch(&self, client: &Client, config: ConfigOf<Self>, mut grads: Gradients) {
        let (problem, inputs, saved) = (self.problem, self.inputs, self.saved);
        if self.sums_unasked_scores(&config) {
            grads.scores = Some(scratch(client, problem.scores_shape()));
        }
        match config {
            Config::Portable(blueprints) => {
                if problem.has_scores {
                    // Keys that no query attends to are never visited.
                    zero(client, problem, &grads);
                }
                let sums = RowSums::portable(client, problem, saved);
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

impl ScoredBackward<'_> {
    /// True if the kernels sum the gradient of constant scores, for which the caller has no buffer: they spare the sums
    /// only where they need the registers.
    fn sums_unasked_scores(&self, config: &ConfigOf<Self>) -> bool {
        let kept = matches!(config, Config::Matrix(blueprints) if blueprints.dkdv.tiles.kept);
        self.problem.has_scores && !self.problem.scores_learn && !kept
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

/// Refuses rows without the alignment that the tensor-core engines need, and, for `wgmma`, rows of dO and of `q` that
/// cannot be copied as boxes.
pub(crate) fn check_rows(
    saved: &Saved,
    instruction: Instruction,
    q: &TensorBinding,
    size: usize,
) -> Result<(), Obstacle> {
    check_segments(saved.rows(), size)?;
    let boxed = takes_boxes(q, size) && takes_boxes(&saved.grad_out, size);
    match instruction == Instruction::Mma || boxed {
        true => Ok(()),
        false => Err(Obstacle::RepeatedRows),
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
        for tiles in self.keys.slices(blueprint.outer_rows(), [grad]) {
            let kernel = self.kernel(PortableKeys::of_tiles(tiles.source), blueprint);
            kernel.dq(self.saved(), tiles.first, tiles.count, grad);
        }
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
        let learning = selection.learning.as_ref().expect("a rank comes with it");
        let kernel = self.kernel(PortableKeys::All, self.blueprints.dkdv);
        for (n, source) in sources(learning).enumerate() {
            let ranked = ranked_keys(self.keys.client, self.keys.problem, selection, source);
            let terms = rank_terms(self.saved.grad_lse.as_ref(), source, n > 0);
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
