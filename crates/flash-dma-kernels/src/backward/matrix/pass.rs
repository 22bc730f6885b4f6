//! The launches of the large tensor-core kernels, and of the row sums before them.

use crate::alibi::slopes;
use crate::args::{Saved, scaling, scaling_and_dropout};
use crate::backward::blueprint::MmaBlueprints;
use crate::backward::delta::{BoxedRowsLaunch, CUBE_ROWS, RowWordsLaunch, delta_mma_kernel};
use crate::backward::dkdv::blueprint::{ChunkedBlueprint, DkdvBlueprint};
use crate::backward::dkdv::mma::dkdv_mma_kernel;
use crate::backward::dkdv::shared::args::{
    BackwardInputsLaunch, GradientTensors, KeyGradientsLaunch, KeyGridLaunch, QueryBoxesLaunch,
};
use crate::backward::dkdv::wgmma::dkdv_wgmma_kernel;
use crate::backward::dq::mma::dq_mma_kernel;
use crate::backward::dq::wgmma::dq_wgmma_kernel;
use crate::backward::rank::mma::rank_mma_kernel;
use crate::backward::rank::wgmma::rank_wgmma_kernel;
use crate::dropout::dropout;
use crate::host::check::{address_type, elem_type};
use crate::host::engine::Instruction;
use crate::host::scratch::{bytes, scratch};
use crate::matrix::args::{LaunchedTilesLaunch, OperandsLaunch, SavedRowsLaunch};
use crate::matrix::wgmma::boxes::{boxes_of, word_boxes_of};
use crate::matrix::wgmma::key_boxes::KeyMapsLaunch;
use crate::pattern::intervals::ranked::RankedSource;
use crate::pattern::tensors::{SourceTensors, TileLaunch};
use crate::rank_terms::rank_terms;
use crate::row_sums::{RowSums, SumTerms, rest_or_zeros};
use cubecl::client::Client;
use cubecl::ir::{AddressType, ElemType};
use cubecl::prelude::*;
use flash_dma_problem::Problem;

pub(crate) struct MmaPass<'a> {
    pub client: &'a Client,
    pub problem: &'a Problem,
    pub rows: [&'a TensorBinding; 3],
    pub saved: &'a Saved,
    pub blueprints: MmaBlueprints,
    pub data: QueryData,
    slopes: Option<TensorBinding>,
}

/// The dk/dv kernel's keys: a list of `capacity` entries per cube, for `chunks` chunks of queries with `tiles` tiles
/// each.
pub(crate) struct KeyLists {
    pub source: SourceTensors,
    pub capacity: usize,
    pub chunks: usize,
    pub tiles: usize,
}

impl KeyLists {
    fn cubes(&self, problem: &Problem) -> CubeCount {
        let cubes = self.tiles * self.chunks * problem.batch * problem.kv_heads;
        CubeCount::Static(cubes as u32, 1, 1)
    }

    /// The launch argument for chunks of `chunk` queries.
    fn grid(&self, chunk: usize) -> KeyGridLaunch {
        let [chunk, chunks, tiles, capacity] =
            [chunk, self.chunks, self.tiles, self.capacity].map(|n| n as u32);
        KeyGridLaunch::new(chunk, chunks, tiles, capacity)
    }
}

pub(crate) struct QueryData {
    pub sums: RowSums,
    /// `[batch, q_heads, 2 q_len]`, f32: `-log2(e) lse` and `delta` of every query; heads begin at multiples of 16
    /// bytes. `wgmma` only.
    rows: Option<TensorBinding>,
    /// The rows' words of the dropout mask, see [`words_shape`]; with dropout only.
    words: Option<TensorBinding>,
}

/// The shape of the buffer of [`QueryData::rows`].
fn boxed_shape(problem: &Problem) -> [usize; 3] {
    let [batch, heads, len] = problem.lse_shape();
    [batch, heads, 2 * len.next_multiple_of(2)]
}

/// The shape of the buffer of [`QueryData::words`]: heads begin at multiples of 16 bytes if the words are copied as boxes.
fn words_shape(problem: &Problem, for_boxes: bool) -> [usize; 3] {
    let [batch, heads, len] = problem.lse_shape();
    let len = match for_boxes {
        true => len.next_multiple_of(4),
        false => len,
    };
    [batch, heads, len]
}

pub(crate) fn row_sums_bytes(problem: &Problem, blueprints: MmaBlueprints) -> usize {
    let for_boxes = blueprints.dkdv.tiles.instruction == Instruction::Wgmma;
    let boxed = match for_boxes {
        true => bytes(boxed_shape(problem)),
        false => 0,
    };
    let words = (problem.dropout).map_or(0, |_| bytes(words_shape(problem, for_boxes)));
    bytes(problem.lse_shape()) + boxed + words
}

/// The data of the query rows in new buffers.
fn launch_delta(client: &Client, problem: &Problem, saved: &Saved, for_boxes: bool) -> QueryData {
    let lse_rest = rest_or_zeros(client, problem, saved);
    let delta = scratch(client, problem.lse_shape());
    let all: usize = problem.lse_shape().iter().product();
    let rows = for_boxes.then(|| scratch(client, boxed_shape(problem)));
    let typed: Vec<_> = saved.rows().collect();
    let residual = saved.residual.clone().map(TensorBinding::into_tensor_arg);
    let grad_lse = saved.grad_lse.clone().map(TensorBinding::into_buffer_arg);
    let boxed = (rows.clone()).map(|rows| {
        BoxedRowsLaunch::new(saved.lse.clone().into_buffer_arg(), rows.into_buffer_arg())
    });
    let row_words = (problem.dropout).map(|_| scratch(client, words_shape(problem, for_boxes)));
    let masked = dropout(problem)
        .zip(row_words.clone())
        .map(|(seed, words)| {
            let stride = words.shape[2] as u32;
            RowWordsLaunch::new(seed, words.into_buffer_arg(), stride, problem.k_len as u32)
        });
    let words: Vec<_> = [&delta].into_iter().chain(&rows).collect();
    // SAFETY: rows past the last are not read; the buffers were checked to hold what is indexed.
    unsafe {
        delta_mma_kernel::launch_unchecked(
            client,
            CubeCount::Static(all.div_ceil(CUBE_ROWS) as u32, 1, 1),
            CubeDim::new_1d(256),
            address_type(&typed, problem.element.size()).max(address_type(&words, 4)),
            saved.out.clone().into_tensor_arg(),
            residual.into(),
            saved.grad_out.clone().into_tensor_arg(),
            grad_lse.into(),
            delta.clone().into_buffer_arg(),
            boxed.into(),
            masked.into(),
            SumTerms::new(
                problem.head_dim,
                saved,
                for_boxes,
                problem.dropout.is_some(),
            ),
            elem_type(problem.element),
        );
    }
    let rows = rows.map(|mut rows| {
        // There are no rows after the last query: the TMA fills them with zeros.
        rows.shape[2] = 2 * problem.q_len;
        rows
    });
    let words = row_words.map(|mut words| {
        words.shape[2] = problem.q_len;
        words
    });
    QueryData {
        sums: RowSums { delta, lse_rest },
        rows,
        words,
    }
}

impl<'a> MmaPass<'a> {
    /// Launches the row sums, which the `wgmma` kernels read as boxes.
    pub(crate) fn new(
        client: &'a Client,
        problem: &'a Problem,
        rows: [&'a TensorBinding; 3],
        saved: &'a Saved,
        blueprints: MmaBlueprints,
    ) -> Self {
        let for_boxes = blueprints.dkdv.tiles.instruction == Instruction::Wgmma;
        Self {
            client,
            problem,
            rows,
            saved,
            blueprints,
            data: launch_delta(client, problem, saved, for_boxes),
            slopes: slopes(client, problem),
        }
    }

    /// The preprocessed data of every query row, for copies as boxes; `wgmma` only.
    pub(crate) fn boxed_rows(&self) -> &TensorBinding {
        self.data.rows.as_ref().expect("wgmma asked for them")
    }

    /// The address type that reaches every element of q, k, v and the output gradient, and of the row sums and `words`.
    fn address_type<'b>(&'b self, words: impl Iterator<Item = &'b TensorBinding>) -> AddressType {
        let [q, k, v] = self.rows;
        let typed = [q, k, v, &self.saved.grad_out];
        let words: Vec<_> = words.chain([&self.data.sums.delta]).collect();
        address_type(&typed, self.problem.element.size()).max(address_type(&words, 4))
    }

    pub(crate) fn launch_dq(&self, tiles: TileLaunch, grad_q: &TensorBinding) {
        let (problem, blueprint) = (self.problem, self.blueprints.dq);
        let tile = blueprint.tile.writing([grad_q]);
        let size = problem.element.size();
        let head_groups = (problem.batch * problem.q_heads / tile.heads) as u32;
        let address = (self.address_type(tiles.source.all())).max(address_type(&[grad_q], size));
        // One argument list, because both kernels take the same arguments.
        macro_rules! launch {
            ($kernel:ident, $blueprint:expr $(, $maps:expr)?) => {
                // SAFETY: the buffers were checked to hold the shapes and strides that the kernels index by, and the
                // lists hold keys below `k_len` or blocks of the plan.
                unsafe {
                    $kernel::launch_unchecked(
                        self.client,
                        CubeCount::Static(tiles.count as u32, head_groups, 1),
                        tile.cube_dim(),
                        address,
                        OperandsLaunch::of(self.rows),
                        self.saved.grad_out.clone().into_tensor_arg(),
                        tiles.source.into_query_tiles(self.slopes.clone()),
                        SavedRowsLaunch::new(
                            self.saved.lse.clone().into_buffer_arg(),
                            self.data.sums.lse_rest.clone().into_buffer_arg(),
                            self.data.sums.delta.clone().into_buffer_arg(),
                        ),
                        grad_q.clone().into_buffer_arg(),
                        scaling_and_dropout(problem),
                        $($maps,)?
                        LaunchedTilesLaunch::new(tiles.first as u32, tiles.count as u32),
                        $blueprint,
                        elem_type(problem.element),
                    )
                }
            };
        }
        match tile.instruction {
            Instruction::Mma => launch!(dq_mma_kernel, blueprint),
            Instruction::Wgmma => {
                launch!(dq_wgmma_kernel, tile, KeyMapsLaunch::of(&tile, self.rows))
            }
        }
    }

    /// The inputs of the kernels that own key tiles, with the words of the rows for `mma`.
    fn key_inputs<E: Float>(&self, words: Option<&TensorBinding>) -> BackwardInputsLaunch<E> {
        let [q, k, v] = self.rows.map(|rows| rows.clone().into_tensor_arg());
        let words = words.map(|words| words.clone().into_buffer_arg());
        let slopes = self.slopes.clone().map(TensorBinding::into_tensor_arg);
        BackwardInputsLaunch::new(
            q,
            k,
            v,
            self.saved.grad_out.clone().into_tensor_arg(),
            self.saved.lse.clone().into_buffer_arg(),
            self.data.sums.lse_rest.clone().into_buffer_arg(),
            self.data.sums.delta.clone().into_buffer_arg(),
            words.into(),
            slopes.into(),
        )
    }

    /// The boxes in which `wgmma` copies query tiles of `blueprint`.
    fn query_boxes<E: Float>(&self, blueprint: DkdvBlueprint) -> QueryBoxesLaunch<E> {
        let (heads, queries) = (blueprint.heads, blueprint.queries());
        let [q, ..] = self.rows;
        let [q_boxes, o_boxes] = [q, &self.saved.grad_out]
            .map(|tensor| boxes_of(tensor, self.problem.element, heads, queries));
        let row_boxes = word_boxes_of(self.boxed_rows(), heads, 2 * queries);
        let words = (self.data.words.as_ref()).filter(|_| blueprint.dropout);
        let word_boxes = words.map(|words| word_boxes_of(words, heads, queries));
        QueryBoxesLaunch::new(q_boxes, o_boxes, row_boxes, word_boxes.into())
    }

    /// Launches the rank kernel for `keys`, which are those of `source` on their intervals; it overwrites their ranks'
    /// gradients or, if it `adds`, adds to what earlier launches have written.
    pub(crate) fn launch_rank(
        &self,
        keys: KeyLists,
        source: RankedSource,
        adds: bool,
        rank: &TensorBinding,
        ChunkedBlueprint { tiles, chunk }: ChunkedBlueprint,
    ) {
        let problem = self.problem;
        let terms = rank_terms(self.saved.grad_lse.as_ref(), source, adds);
        let (cubes, grid) = (keys.cubes(problem), keys.grid(chunk));
        // One argument list, because both kernels take the same arguments.
        macro_rules! launch {
            ($kernel:ident $(, $boxes:expr)?) => {
                // SAFETY: the buffers were checked to hold the shapes and strides that the kernels index by, and the list
                // holds keys below `k_len`.
                unsafe {
                    $kernel::launch_unchecked(
                        self.client,
                        cubes,
                        tiles.cube_dim(),
                        self.address_type(keys.source.all().chain([rank])),
                        self.key_inputs(None),
                        terms,
                        keys.source.into_key_tiles(),
                        rank.clone().into_buffer_arg(),
                        scaling(problem.scale, problem.softcap),
                        $($boxes,)?
                        grid,
                        tiles,
                        elem_type(problem.element),
                    )
                }
            };
        }
        match tiles.instruction {
            Instruction::Mma => launch!(rank_mma_kernel),
            Instruction::Wgmma => launch!(rank_wgmma_kernel, self.query_boxes(tiles)),
        }
    }

    /// Launches the dk/dv kernel; it writes or adds to the gradients of k, v (`output` elements) and of scores or
    /// biases.
    pub(crate) fn launch_dkdv(
        &self,
        keys: KeyLists,
        grads: [GradientTensors; 2],
        grad_scores: Option<TensorBinding>,
        output: ElemType,
    ) {
        let problem = self.problem;
        let ChunkedBlueprint { tiles, chunk } = self.blueprints.dkdv;
        // `wgmma` copies them as boxes.
        let row_words =
            (self.data.words.as_ref()).filter(|_| tiles.instruction == Instruction::Mma);
        let (cubes, grid) = (keys.cubes(problem), keys.grid(chunk));
        let [grad_k, _] = &grads;
        let address = (self.address_type(keys.source.all().chain(&grad_k.sums)))
            .max(address_type(&[&grad_k.own], output.size()));
        // One argument list, because both kernels take the same arguments.
        macro_rules! launch {
            ($kernel:ident $(, $boxes:expr)?) => {
                // SAFETY: the buffers were checked to hold the shapes and strides that the kernels index by, and the
                // lists hold keys below `k_len` or steps of the problem.
                unsafe {
                    $kernel::launch_unchecked(
                        self.client,
                        cubes,
                        tiles.cube_dim(),
                        address,
                        self.key_inputs(row_words),
                        keys.source.into_key_tiles(),
                        KeyGradientsLaunch::of(grads, grad_scores),
                        scaling_and_dropout(problem),
                        $($boxes,)?
                        grid,
                        tiles,
                        elem_type(problem.element),
                        output,
                    )
                }
            };
        }
        match tiles.instruction {
            Instruction::Mma => launch!(dkdv_mma_kernel),
            Instruction::Wgmma => launch!(dkdv_wgmma_kernel, self.query_boxes(tiles)),
        }
    }
}
