//! Launches of the portable kernels, the same for every pattern.

use crate::alibi::slopes;
use crate::args::{Inputs, Outputs, Saved, scaling};
use crate::dropout::{DropoutSeedLaunch, dropout};
use crate::host::check::{address_type, elem_type, vector_size};
use crate::pattern::intervals::ranked::RankedKeys;
use crate::pattern::mask::args::{MaskBits, MaskedInputs};
use crate::pattern::tensors::{KeyTensors, SourceTensors};
use crate::portable::args::{
    KeyGradientsLaunch, KeysArgs, ListedIntervals, ListedIntervalsLaunch, LogitTermsLaunch,
    OperandsLaunch, OrderedIntervals, OrderedIntervalsLaunch, OutputsLaunch, RankedListLaunch,
    SavedRowsLaunch, TilePlanLaunch,
};
use crate::portable::bias::bias_kernel;
use crate::portable::blueprint::Blueprint;
use crate::portable::dkdv::dkdv_kernel;
use crate::portable::dq::dq_kernel;
use crate::portable::forward::forward_kernel;
use crate::portable::rank::rank_kernel;
use crate::rank_terms::RankTermsLaunch;
use crate::row_sums::RowSums;
use cubecl::client::Client;
use cubecl::ir::AddressType;
use cubecl::prelude::*;
use flash_dma_problem::{MaskedProblem, Problem};

#[derive(Debug)]
pub(crate) enum PortableKeys<'a> {
    All,
    /// The fields of [`ListedIntervals`] for kernels that own query tiles, otherwise of [`OrderedIntervals`].
    Intervals(Box<[TensorBinding; 4]>),
    Planned(&'a MaskBits),
}

/// The inputs of all portable kernels of a checked, non-empty problem.
pub(crate) struct PortableLaunch<'a> {
    pub client: &'a Client,
    pub problem: &'a Problem,
    pub rows: [&'a TensorBinding; 3],
    pub keys: PortableKeys<'a>,
    /// Given exactly if the blueprint's pattern has a bias per pair.
    pub bias: Option<&'a TensorBinding>,
    pub blueprint: Blueprint,
}

/// The saved numbers of every query row in the backward pass.
#[derive(Clone, Copy)]
pub(crate) struct SavedTensors<'a> {
    pub saved: &'a Saved,
    pub sums: &'a RowSums,
}

impl PortableKeys<'_> {
    /// The keys of some query tiles without a mask.
    pub(crate) fn of_tiles(source: SourceTensors) -> Self {
        match (source.bias, source.keys) {
            (Some(scores), KeyTensors::Intervals([intervals, list, counts])) => {
                Self::Intervals(Box::new([scores, intervals, list, counts]))
            }
            _ => Self::All,
        }
    }

    fn all(&self) -> Vec<&TensorBinding> {
        match self {
            Self::All => Vec::new(),
            Self::Intervals(tensors) => tensors.iter().collect(),
            Self::Planned(plan) => vec![&plan.bits, &plan.counts],
        }
    }

    fn listed(&self) -> KeysArgs<ListedIntervals> {
        self.args(|[scores, intervals, list, counts]| {
            ListedIntervalsLaunch::new(scores, intervals, list, counts)
        })
    }

    fn ordered(&self) -> KeysArgs<OrderedIntervals> {
        self.args(|[scores, keys, ends, counts]| {
            OrderedIntervalsLaunch::new(scores, keys, ends, counts)
        })
    }

    fn args<I: LaunchArg>(
        &self,
        intervals: impl FnOnce([TensorArg; 4]) -> I::RuntimeArg,
    ) -> KeysArgs<I> {
        match self {
            Self::All => KeysArgs::All,
            Self::Planned(plan) => {
                let [bits, counts] =
                    [&plan.bits, &plan.counts].map(|t| t.clone().into_tensor_arg());
                KeysArgs::Planned(TilePlanLaunch::new(bits, counts))
            }
            Self::Intervals(tensors) => {
                let tensors = (**tensors).clone().map(TensorBinding::into_tensor_arg);
                KeysArgs::Intervals(intervals(tensors))
            }
        }
    }
}

impl<'a> PortableLaunch<'a> {
    /// The kernels under a mask and a bias.
    pub(crate) fn masked(
        client: &'a Client,
        problem: &'a MaskedProblem,
        inputs: &'a MaskedInputs,
        blueprint: Blueprint,
    ) -> Self {
        let plan = inputs.plan.as_ref();
        Self {
            client,
            problem: &problem.attention,
            rows: inputs.rows(),
            keys: plan.map_or(PortableKeys::All, PortableKeys::Planned),
            bias: inputs.bias.as_ref(),
            blueprint,
        }
    }

    /// The kernels without a mask and a bias.
    pub(crate) fn scored(
        client: &'a Client,
        problem: &'a Problem,
        inputs: &'a Inputs,
        keys: PortableKeys<'a>,
        blueprint: Blueprint,
    ) -> Self {
        Self {
            client,
            problem,
            rows: inputs.rows(),
            keys,
            bias: None,
            blueprint,
        }
    }

    pub(crate) fn forward(&self, first: usize, count: usize, outputs: &Outputs) {
        let p = self.problem;
        let Outputs {
            out,
            residual,
            lse,
            lse_rest,
        } = outputs.clone();
        let blueprint = Blueprint {
            rest: lse_rest.is_some(),
            ..self.blueprint
        };
        let typed: Vec<_> = [&out].into_iter().chain(&residual).collect();
        // SAFETY: every buffer was checked to hold the shape and strides that the kernel indexes by.
        unsafe {
            forward_kernel::launch_unchecked(
                self.client,
                cubes([count, p.q_heads, p.batch]),
                blueprint.cube_dim(),
                self.address_type(&typed, &[&lse]),
                self.vector_size(&typed),
                self.operands(),
                self.keys.listed(),
                self.terms(dropout(p)),
                OutputsLaunch::new(
                    out.into_tensor_arg(),
                    residual.map(TensorBinding::into_tensor_arg).into(),
                    lse.into_tensor_arg(),
                    lse_rest.map(TensorBinding::into_tensor_arg).into(),
                ),
                first,
                blueprint,
                elem_type(p.element),
            );
        }
    }

    /// Launches [`dq_kernel`] for `count` query tiles from `first` on.
    pub(crate) fn dq(
        &self,
        rows: SavedTensors,
        first: usize,
        count: usize,
        grad_q: &TensorBinding,
    ) {
        let p = self.problem;
        let typed = [&rows.saved.grad_out, grad_q];
        // SAFETY: every buffer was checked to hold the shape and strides that the kernel indexes by.
        unsafe {
            dq_kernel::launch_unchecked(
                self.client,
                cubes([count, p.q_heads, p.batch]),
                self.blueprint.cube_dim(),
                self.address_type(&typed, &[&rows.sums.delta]),
                self.vector_size(&typed),
                self.operands(),
                rows.arg(),
                self.keys.listed(),
                self.terms(dropout(p)),
                grad_q.clone().into_tensor_arg(),
                first,
                self.blueprint,
                elem_type(p.element),
            );
        }
    }

    /// Launches [`dkdv_kernel`] for `tiles` key tiles.
    pub(crate) fn dkdv(
        &self,
        rows: SavedTensors,
        tiles: usize,
        [grad_k, grad_v]: [&TensorBinding; 2],
        grad_scores: Option<&TensorBinding>,
    ) {
        let p = self.problem;
        let typed = [&rows.saved.grad_out, grad_k, grad_v];
        let words: Vec<_> = grad_scores.into_iter().chain([&rows.sums.delta]).collect();
        let scores = grad_scores.cloned().map(TensorBinding::into_tensor_arg);
        // SAFETY: every buffer was checked to hold the shape and strides that the kernel indexes by.
        unsafe {
            dkdv_kernel::launch_unchecked(
                self.client,
                cubes([tiles, p.kv_heads, p.batch]),
                self.blueprint.cube_dim(),
                self.address_type(&typed, &words),
                self.vector_size(&typed),
                self.operands(),
                rows.arg(),
                self.keys.ordered(),
                self.terms(dropout(p)),
                KeyGradientsLaunch::new(
                    grad_k.clone().into_tensor_arg(),
                    grad_v.clone().into_tensor_arg(),
                    scores.into(),
                ),
                self.blueprint,
                elem_type(p.element),
            );
        }
    }

    /// Launches [`rank_kernel`] for some of the keys with `scores`.
    pub(crate) fn rank(
        &self,
        rows: SavedTensors,
        terms: RankTermsLaunch,
        scores: &TensorBinding,
        ranked: RankedKeys,
        rank: &TensorBinding,
    ) {
        let p = self.problem;
        let typed = [&rows.saved.grad_out];
        let tiles = p.k_len.div_ceil(self.blueprint.outer_rows());
        let words = [&rows.sums.delta, scores, &ranked.spans];
        // SAFETY: every buffer was checked to hold the shape and strides that the kernel indexes by, and the list holds
        // keys below `k_len`.
        unsafe {
            rank_kernel::launch_unchecked(
                self.client,
                cubes([tiles, p.kv_heads, p.batch]),
                self.blueprint.cube_dim(),
                self.address_type(&typed, &words),
                self.vector_size(&typed),
                self.operands(),
                rows.arg(),
                terms,
                RankedListLaunch::new(
                    scores.clone().into_tensor_arg(),
                    ranked.keys.into_tensor_arg(),
                    ranked.spans.into_tensor_arg(),
                    ranked.counts.into_tensor_arg(),
                ),
                self.terms(None),
                rank.clone().into_tensor_arg(),
                self.blueprint,
                elem_type(p.element),
            );
        }
    }

    /// Launches [`bias_kernel`] for a bias of a given shape with all keys.
    pub(crate) fn bias_gradient(
        &self,
        rows: SavedTensors,
        grad_bias: &TensorBinding,
        shape: [usize; 4],
    ) {
        let p = self.problem;
        let typed = [&rows.saved.grad_out];
        // SAFETY: every buffer was checked to hold the shape and strides that the kernel indexes by.
        unsafe {
            bias_kernel::launch_unchecked(
                self.client,
                cubes(bias_cubes(shape, self.blueprint)),
                self.blueprint.cube_dim(),
                self.address_type(&typed, &[&rows.sums.delta, grad_bias]),
                self.vector_size(&typed),
                self.operands(),
                rows.arg(),
                self.keys.ordered(),
                self.terms(dropout(p)),
                grad_bias.clone().into_tensor_arg(),
                shape[2] == 1,
                self.blueprint,
                elem_type(p.element),
            );
        }
    }

    fn operands<F: Float, N: Size>(&self) -> OperandsLaunch<F, N> {
        let [q, k, v] = self.rows.map(|rows| rows.clone().into_tensor_arg());
        OperandsLaunch::new(q, k, v)
    }

    fn terms(&self, dropout: Option<DropoutSeedLaunch>) -> LogitTermsLaunch {
        let p = self.problem;
        let bias = self.bias.map(|bias| bias.clone().into_tensor_arg());
        let slopes = slopes(self.client, p).map(TensorBinding::into_tensor_arg);
        let scaling = scaling(p.scale, p.softcap);
        LogitTermsLaunch::new(bias.into(), slopes.into(), dropout.into(), scaling)
    }

    /// The address type that reaches every element of q, k, v and `typed`, and of the keys, the bias and `words`.
    fn address_type(&self, typed: &[&TensorBinding], words: &[&TensorBinding]) -> AddressType {
        let typed = [&self.rows, typed].concat();
        let words: Vec<_> = (self.keys.all().into_iter())
            .chain(self.bias)
            .chain(words.iter().copied())
            .collect();
        address_type(&typed, self.problem.element.size()).max(address_type(&words, 4))
    }

    fn vector_size(&self, typed: &[&TensorBinding]) -> usize {
        let typed = [&self.rows, typed].concat();
        vector_size(&typed, self.problem.element.size())
    }
}

impl SavedTensors<'_> {
    fn arg<F: Float, N: Size>(&self) -> SavedRowsLaunch<F, N> {
        let Self { saved, sums } = self;
        SavedRowsLaunch::new(
            saved.grad_out.clone().into_tensor_arg(),
            saved.lse.clone().into_tensor_arg(),
            sums.lse_rest.clone().into_tensor_arg(),
            sums.delta.clone().into_tensor_arg(),
        )
    }
}

/// Cubes of [`bias_kernel`]: tiles of keys, tiles of queries, heads of all sequences.
pub(crate) fn bias_cubes(
    [batch, heads, queries, keys]: [usize; 4],
    blueprint: Blueprint,
) -> [usize; 3] {
    [
        keys.div_ceil(blueprint.outer_rows()),
        queries.div_ceil(blueprint.inner_rows()),
        batch * heads,
    ]
}

fn cubes([x, y, z]: [usize; 3]) -> CubeCount {
    CubeCount::Static(x as u32, y as u32, z as u32)
}
