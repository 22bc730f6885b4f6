//! Launches of the portable kernels, the same for every pattern.

use crate::alibi::slopes;
use crate::args::{Outputs, scaling};
use crate::backward::rank::terms::RankTermsLaunch;
use crate::dropout::dropout;
use crate::host::check::{address_type, elem_type, vector_size};
use crate::pattern::intervals::ranked::RankedKeys;
use crate::pattern::mask::args::MaskBits;
use crate::portable::args::{
    KeyGradientsLaunch, KeysArgs, ListedIntervals, ListedIntervalsLaunch, OperandsLaunch,
    OrderedIntervals, OrderedIntervalsLaunch, RankedListLaunch, SavedRowsLaunch, TilePlanLaunch,
};
use crate::portable::blueprint::Blueprint;
use crate::portable::dkdv::dkdv_kernel;
use crate::portable::dq::dq_kernel;
use crate::portable::forward::forward_kernel;
use crate::portable::masked::bias::bias_kernel;
use crate::portable::rank::rank_kernel;
use cubecl::client::Client;
use cubecl::ir::AddressType;
use cubecl::prelude::*;
use flash_dma_problem::Problem;

/// The keys that queries may attend to.
#[derive(Debug)]
pub(crate) enum PortableKeys<'a> {
    All,
    /// The fields of [`ListedIntervals`] where query tiles are launched, else of [`OrderedIntervals`].
    Intervals(Box<[TensorBinding; 4]>),
    Planned(&'a MaskBits),
}

/// What all portable kernels of a checked, non-empty problem read.
pub(crate) struct PortableLaunch<'a> {
    pub client: &'a Client,
    pub problem: &'a Problem,
    pub q: &'a TensorBinding,
    pub k: &'a TensorBinding,
    pub v: &'a TensorBinding,
    pub keys: PortableKeys<'a>,
    /// Given exactly if the blueprint's pattern has a bias of pairs.
    pub bias: Option<&'a TensorBinding>,
    pub blueprint: Blueprint,
}

/// What the backward pass knows per query row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SavedTensors<'a> {
    pub grad_out: &'a TensorBinding,
    pub lse: &'a TensorBinding,
    /// What the rounding of the LSEs lost.
    pub lse_rest: &'a TensorBinding,
    /// The row sums.
    pub delta: &'a TensorBinding,
}

impl<'a> PortableKeys<'a> {
    /// The keys of a slice of query tiles.
    pub(crate) fn of_slice(selection: Option<[TensorBinding; 4]>) -> Self {
        selection.map_or(Self::All, |selection| Self::Intervals(Box::new(selection)))
    }

    /// A mask, if there is one.
    pub(crate) fn of_mask(plan: Option<&'a MaskBits>) -> Self {
        plan.map_or(Self::All, Self::Planned)
    }

    fn all(&self) -> Vec<&TensorBinding> {
        match self {
            Self::All => Vec::new(),
            Self::Intervals(tensors) => tensors.iter().collect(),
            Self::Planned(plan) => vec![&plan.bits, &plan.counts],
        }
    }

    fn listed(&self) -> KeysArgs<ListedIntervals> {
        match self {
            Self::All => KeysArgs::All,
            Self::Planned(plan) => KeysArgs::Planned(tile_plan(plan)),
            Self::Intervals(tensors) => {
                let [scores, intervals, list, counts] = (**tensors).clone();
                KeysArgs::Intervals(ListedIntervalsLaunch::new(
                    scores.into_tensor_arg(),
                    intervals.into_tensor_arg(),
                    list.into_tensor_arg(),
                    counts.into_tensor_arg(),
                ))
            }
        }
    }

    fn ordered(&self) -> KeysArgs<OrderedIntervals> {
        match self {
            Self::All => KeysArgs::All,
            Self::Planned(plan) => KeysArgs::Planned(tile_plan(plan)),
            Self::Intervals(tensors) => {
                let [scores, keys, ends, counts] = (**tensors).clone();
                KeysArgs::Intervals(OrderedIntervalsLaunch::new(
                    scores.into_tensor_arg(),
                    keys.into_tensor_arg(),
                    ends.into_tensor_arg(),
                    counts.into_tensor_arg(),
                ))
            }
        }
    }
}

fn tile_plan(plan: &MaskBits) -> TilePlanLaunch {
    TilePlanLaunch::new(
        plan.bits.clone().into_tensor_arg(),
        plan.counts.clone().into_tensor_arg(),
    )
}

impl PortableLaunch<'_> {
    /// Launches [`forward_kernel`] for `tiles` query tiles from `first_tile` on.
    pub(crate) fn forward(&self, first_tile: usize, tiles: usize, outputs: &Outputs) {
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
                cubes([tiles, p.q_heads, p.batch]),
                blueprint.cube_dim(),
                self.address_type(&typed, &[&lse]),
                self.vector_size(&typed),
                self.operands(),
                self.keys.listed(),
                self.bias().into(),
                slopes(self.client, p)
                    .map(TensorBinding::into_tensor_arg)
                    .into(),
                dropout(p).into(),
                out.into_tensor_arg(),
                residual.map(TensorBinding::into_tensor_arg).into(),
                lse.into_tensor_arg(),
                lse_rest.map(TensorBinding::into_tensor_arg).into(),
                scaling(p.scale, p.softcap),
                first_tile,
                blueprint,
                elem_type(p.element),
            );
        }
    }

    /// Launches [`dq_kernel`] for `tiles` query tiles from `first_tile` on.
    pub(crate) fn dq(
        &self,
        saved: SavedTensors,
        first_tile: usize,
        tiles: usize,
        grad_q: &TensorBinding,
    ) {
        let p = self.problem;
        let typed = [saved.grad_out, grad_q];
        // SAFETY: every buffer was checked to hold the shape and strides that the kernel indexes by.
        unsafe {
            dq_kernel::launch_unchecked(
                self.client,
                cubes([tiles, p.q_heads, p.batch]),
                self.blueprint.cube_dim(),
                self.address_type(&typed, &[saved.delta]),
                self.vector_size(&typed),
                self.operands(),
                saved.rows(),
                self.keys.listed(),
                self.bias().into(),
                slopes(self.client, p)
                    .map(TensorBinding::into_tensor_arg)
                    .into(),
                dropout(p).into(),
                grad_q.clone().into_tensor_arg(),
                scaling(p.scale, p.softcap),
                first_tile,
                self.blueprint,
                elem_type(p.element),
            );
        }
    }

    /// Launches [`dkdv_kernel`] for `tiles` key tiles.
    pub(crate) fn dkdv(
        &self,
        saved: SavedTensors,
        tiles: usize,
        [grad_k, grad_v]: [&TensorBinding; 2],
        grad_scores: Option<&TensorBinding>,
    ) {
        let p = self.problem;
        let typed = [saved.grad_out, grad_k, grad_v];
        let words: Vec<_> = grad_scores.into_iter().chain([saved.delta]).collect();
        // SAFETY: every buffer was checked to hold the shape and strides that the kernel indexes by.
        unsafe {
            dkdv_kernel::launch_unchecked(
                self.client,
                cubes([tiles, p.kv_heads, p.batch]),
                self.blueprint.cube_dim(),
                self.address_type(&typed, &words),
                self.vector_size(&typed),
                self.operands(),
                saved.rows(),
                self.keys.ordered(),
                self.bias().into(),
                slopes(self.client, p)
                    .map(TensorBinding::into_tensor_arg)
                    .into(),
                dropout(p).into(),
                KeyGradientsLaunch::new(
                    grad_k.clone().into_tensor_arg(),
                    grad_v.clone().into_tensor_arg(),
                    grad_scores
                        .map(|scores| scores.clone().into_tensor_arg())
                        .into(),
                ),
                scaling(p.scale, p.softcap),
                self.blueprint,
                elem_type(p.element),
            );
        }
    }

    /// Launches [`rank_kernel`] for some of the keys with `scores`.
    pub(crate) fn rank(
        &self,
        saved: SavedTensors,
        terms: RankTermsLaunch,
        scores: &TensorBinding,
        ranked: RankedKeys,
        rank: &TensorBinding,
    ) {
        let p = self.problem;
        let typed = [saved.grad_out];
        let tiles = p.k_len.div_ceil(self.blueprint.outer_rows());
        let words = [saved.delta, scores, &ranked.spans];
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
                saved.rows(),
                terms,
                RankedListLaunch::new(
                    scores.clone().into_tensor_arg(),
                    ranked.keys.into_tensor_arg(),
                    ranked.spans.into_tensor_arg(),
                    ranked.counts.into_tensor_arg(),
                ),
                slopes(self.client, p)
                    .map(TensorBinding::into_tensor_arg)
                    .into(),
                rank.clone().into_tensor_arg(),
                scaling(p.scale, p.softcap),
                self.blueprint,
                elem_type(p.element),
            );
        }
    }

    /// Launches [`bias_kernel`] for a bias of a given shape with all keys.
    pub(crate) fn bias_gradient(
        &self,
        saved: SavedTensors,
        grad_bias: &TensorBinding,
        shape: [usize; 4],
    ) {
        let p = self.problem;
        let typed = [saved.grad_out];
        // SAFETY: every buffer was checked to hold the shape and strides that the kernel indexes by.
        unsafe {
            bias_kernel::launch_unchecked(
                self.client,
                cubes(bias_cubes(shape, self.blueprint)),
                self.blueprint.cube_dim(),
                self.address_type(&typed, &[saved.delta, grad_bias]),
                self.vector_size(&typed),
                self.operands(),
                saved.rows(),
                self.keys.ordered(),
                self.bias().into(),
                slopes(self.client, p)
                    .map(TensorBinding::into_tensor_arg)
                    .into(),
                dropout(p).into(),
                grad_bias.clone().into_tensor_arg(),
                scaling(p.scale, p.softcap),
                shape[2] == 1,
                self.blueprint,
                elem_type(p.element),
            );
        }
    }

    fn operands<F: Float, N: Size>(&self) -> OperandsLaunch<F, N> {
        OperandsLaunch::new(
            self.q.clone().into_tensor_arg(),
            self.k.clone().into_tensor_arg(),
            self.v.clone().into_tensor_arg(),
        )
    }

    fn bias(&self) -> Option<TensorArg> {
        self.bias.map(|bias| bias.clone().into_tensor_arg())
    }

    /// The address type that reaches every element of q, k, v and `typed`, and of the keys, the bias and `words`.
    fn address_type(&self, typed: &[&TensorBinding], words: &[&TensorBinding]) -> AddressType {
        let typed = [&[self.q, self.k, self.v], typed].concat();
        let words: Vec<_> = (self.keys.all().into_iter())
            .chain(self.bias)
            .chain(words.iter().copied())
            .collect();
        address_type(&typed, self.problem.element.size()).max(address_type(&words, 4))
    }

    fn vector_size(&self, typed: &[&TensorBinding]) -> usize {
        let typed = [&[self.q, self.k, self.v], typed].concat();
        vector_size(&typed, self.problem.element.size())
    }
}

impl SavedTensors<'_> {
    fn rows<F: Float, N: Size>(&self) -> SavedRowsLaunch<F, N> {
        SavedRowsLaunch::new(
            self.grad_out.clone().into_tensor_arg(),
            self.lse.clone().into_tensor_arg(),
            self.lse_rest.clone().into_tensor_arg(),
            self.delta.clone().into_tensor_arg(),
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
