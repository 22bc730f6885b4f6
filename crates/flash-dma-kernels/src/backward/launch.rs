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
use crate::pattern::intervals::order::{OrderedKeys, by_death};
use crate::pattern::intervals::ranked::{RankedKeys, RankedSource, ranked_keys};
use crate::pattern::intervals::slices::{for_each_slice, slice_bytes};
use crate::pattern::intervals::tiles::QueryTiles;
use crate::pattern::intervals::{LiveKeys, live_keys};
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

    /// As [`choose`](Self::choose) for a mask and a bias.
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

    /// The bytes of the buffers that [`launch_portable`] holds at once at most.
    pub(crate) fn workspace(&self, problem: &Problem, selection: Option<&Selection>) -> usize {
        let dkdv = OrderedKeys::bytes(problem);
        let dq = slice_bytes(problem, self.dq.outer_rows());
        let rank = RankedKeys::bytes(problem, selection);
        LiveKeys::bytes(problem) + bytes(problem.lse_shape()) + dq.max(dkdv).max(rank)
    }
}

/// The backward pass of a problem without a mask.
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
        let blueprints = match instruction {
            Instruction::Mma => MmaBlueprints::choose(p, properties),
            Instruction::Wgmma => MmaBlueprints::choose_wgmma(p, properties),
        }?;
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
                launch_portable(client, problem, inputs, saved, &grads, blueprints);
            }
            Config::Matrix(blueprints) => {
                matrix::launch::launch(client, problem, inputs, saved, &grads, blueprints);
            }
        }
    }
}

fn launch_portable(
    client: &Client,
    problem: &Problem,
    inputs: &Inputs,
    saved: &Saved,
    grads: &Gradients,
    blueprints: Blueprints,
) {
    if problem.has_scores {
        // Keys that no query attends to are never visited.
        zero(client, problem, grads);
    }
    let delta = launch_delta(client, problem, saved);
    let lse_rest = saved.rest_or_zeros(client, problem);
    let live = (inputs.selection.as_ref()).map(|selection| live_keys(client, problem, selection));
    let pass = BackwardPass {
        client,
        problem,
        inputs,
        saved,
        delta: &delta,
        lse_rest: &lse_rest,
        live: live.as_ref(),
    };
    let tiles = QueryTiles::new(problem, blueprints.dq.outer_rows());
    pass.launch_dq(grads, &tiles, blueprints.dq);
    pass.launch_dkdv(grads, blueprints.dkdv);
    pass.launch_rank(grads, blueprints.dkdv);
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
    /// Refuses rows without the alignment that the tensor-core engines need, and, for `wgmma`, rows of dO and of `q`
    /// that cannot be copied as boxes.
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
}

impl Saved {
    /// What the rounding of the LSEs lost; zeros in a new buffer if it was not kept.
    pub(crate) fn rest_or_zeros(&self, client: &Client, problem: &Problem) -> TensorBinding {
        self.lse_rest.clone().unwrap_or_else(|| {
            let zeros = scratch(client, problem.lse_shape());
            fill(client, &zeros, 0.0, f32::elem_type_native());
            zeros
        })
    }

    /// The bytes of the buffer that [`rest_or_zeros`](Self::rest_or_zeros) makes.
    pub(crate) fn rest_bytes(&self, problem: &Problem) -> usize {
        match self.lse_rest {
            Some(_) => 0,
            None => bytes(problem.lse_shape()),
        }
    }
}

/// The row sums `delta` in a new buffer `[batch, q_heads, q_len]`, f32.
pub(crate) fn launch_delta(client: &Client, problem: &Problem, saved: &Saved) -> TensorBinding {
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
            SumTerms::new(saved, false),
            elem_type(problem.element),
        );
    }
    delta
}

/// The inputs of both large kernels.
struct BackwardPass<'a> {
    client: &'a Client,
    problem: &'a Problem,
    inputs: &'a Inputs,
    saved: &'a Saved,
    delta: &'a TensorBinding,
    lse_rest: &'a TensorBinding,
    live: Option<&'a LiveKeys>,
}

impl<'a> BackwardPass<'a> {
    fn launch_dq(&self, grads: &Gradients, tiles: &QueryTiles, blueprint: Blueprint) {
        let (client, problem, inputs) = (self.client, self.problem, self.inputs);
        let results = [&grads.q];
        for_each_slice(
            client,
            problem,
            inputs,
            self.live,
            tiles,
            &results,
            |slice| {
                let kernel = self.kernel(PortableKeys::of_slice(slice.selection), blueprint);
                kernel.dq(self.saved(), slice.first_tile, slice.tiles, &grads.q);
            },
        );
    }

    fn launch_dkdv(&self, grads: &Gradients, blueprint: Blueprint) {
        let (keys, listed) = match (&self.inputs.selection, self.live) {
            (Some(selection), Some(live)) => {
                let ordered = by_death(self.client, self.problem, live);
                let scores = selection.scores.clone();
                let tensors = [scores, ordered.keys, ordered.ends, ordered.counts];
                (PortableKeys::Intervals(Box::new(tensors)), ordered.capacity)
            }
            _ => (PortableKeys::All, self.problem.k_len),
        };
        let key_tiles = listed.div_ceil(blueprint.outer_rows());
        let kernel = self.kernel(keys, blueprint);
        let rows = [&grads.k, &grads.v];
        kernel.dkdv(self.saved(), key_tiles, rows, grads.scores.as_ref());
    }

    /// The gradient of the rank, if one learns; all other keys keep their zero. `blueprint` is that of
    /// dk and dv, whose tiles have room for more than this kernel needs.
    fn launch_rank(&self, grads: &Gradients, blueprint: Blueprint) {
        let (client, problem) = (self.client, self.problem);
        let (Some(selection), Some(rank)) = (&self.inputs.selection, &grads.rank) else {
            return;
        };
        let far = selection.far.as_ref().expect("a rank comes with it");
        let kernel = self.kernel(PortableKeys::All, blueprint);
        let launch = |source, left_out| {
            let ranked = ranked_keys(client, problem, selection, source);
            let terms = rank_terms(self.saved.grad_lse.as_ref(), left_out);
            kernel.rank(self.saved(), terms, &selection.scores, ranked, rank);
        };
        launch(RankedSource::RunnersUp(&far.ends), None);
        if let Some(left_out) = &far.left_out {
            launch(RankedSource::Kept(&left_out.from), Some(left_out.how));
        }
    }

    fn kernel(&self, keys: PortableKeys<'a>, blueprint: Blueprint) -> PortableLaunch<'a> {
        let Inputs { q, k, v, .. } = self.inputs;
        PortableLaunch {
            client: self.client,
            problem: self.problem,
            q,
            k,
            v,
            keys,
            bias: None,
            blueprint,
        }
    }

    fn saved(&self) -> SavedTensors<'a> {
        SavedTensors {
            grad_out: &self.saved.grad_out,
            lse: &self.saved.lse,
            lse_rest: self.lse_rest,
            delta: self.delta,
        }
    }
}
