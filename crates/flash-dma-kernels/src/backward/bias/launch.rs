//! Host side of the gradient of a bias of pairs on `wgmma`.

use crate::backward::bias::kernel::bias_wgmma_kernel;
use crate::backward::matrix::pass::MmaPass;
use crate::host::check::{address_type, elem_type};
use crate::matrix::blueprint::has_wgmma;
use crate::matrix::wgmma::boxes::{boxes_of, word_boxes_of};
use cubecl::CubeDim;
use cubecl::prelude::*;
use flash_dma_problem::{ElementType, MaskedProblem};

/// What is fixed when the kernel of the gradient of a bias is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BiasBlueprint {
    /// The element type; f16 or bf16.
    pub element: ElementType,
    /// Elements a row; 64 or 128.
    pub head_dim: usize,
    /// Bottom-right aligned causal masking.
    pub causal: bool,
    /// What the queries see is a tile plan's.
    pub masked: bool,
    /// Whether the scaled product is capped.
    pub softcap: bool,
}

/// A bias of pairs, what the queries see, and where the gradient goes.
pub(crate) struct BiasGradient<'a> {
    /// f32, any strides.
    pub bias: &'a TensorBinding,
    /// The bits and the counts of the plan; any buffers without a mask.
    pub plan: [TensorBinding; 2],
    /// f32, contiguous, the shape of `bias`; overwritten.
    pub grad: &'a TensorBinding,
}

/// Steps of a cube that make its first copies small beside the rest.
const STEPS: usize = 16;

/// Cubes a multiprocessor that even out what they see.
const CUBES: usize = 4;

impl BiasBlueprint {
    /// Queries of a tile: 64 for each of two warpgroups.
    pub(crate) const QUERIES: usize = 128;
    /// Keys of a tile.
    pub(crate) const KEYS: usize = 128;
    /// Keys that are multiplied, and copied, at a time.
    pub(crate) const HALF: usize = 64;
    /// Query tiles in shared memory: the one in use, and one under way.
    pub(crate) const ROW_STAGES: usize = 2;
    /// Halves of key tiles in shared memory: both of the one in use, and one under way.
    pub(crate) const KEY_STAGES: usize = 3;
    /// Warps a cube.
    pub(crate) const WARPS: usize = 8;

    /// The configuration for `problem`, or `None` if the kernel does not serve it: a bias with all queries and keys, of a
    /// problem whose other gradients `wgmma` computes.
    pub(crate) fn choose(problem: &MaskedProblem, properties: &DeviceProperties) -> Option<Self> {
        let p = &problem.attention;
        let of_pairs = |shape: [usize; 4]| shape[2] == p.q_len && shape[3] == p.k_len;
        let served = problem.bias.is_some_and(of_pairs)
            && has_wgmma(properties)
            && p.element != ElementType::F32
            && [64, 128].contains(&p.head_dim);
        let blueprint = Self {
            element: p.element,
            head_dim: p.head_dim,
            causal: p.causal,
            masked: problem.plan.is_some(),
            softcap: p.softcap.is_some(),
        };
        (served && blueprint.shared_bytes() <= properties.hardware.max_shared_memory_size)
            .then_some(blueprint)
    }

    /// Query tiles and output gradients with their row sums, keys and values, and barriers.
    fn shared_bytes(&self) -> usize {
        let row = 4 * self.head_dim;
        Self::ROW_STAGES * Self::QUERIES * (row + 8) + Self::KEY_STAGES * Self::HALF * row + 256
    }

    /// 16-byte chunks of a row.
    pub(crate) fn chunks(&self) -> usize {
        self.head_dim / 8
    }

    /// Key tiles of a cube, one after the other: as many as have [`STEPS`] steps, or fewer where cubes would be few.
    fn run(problem: &MaskedProblem, shape: [usize; 4], processors: usize) -> usize {
        let p = &problem.attention;
        let steps = p.batch / shape[0] * problem.heads_each(shape[1]);
        let mut run = STEPS.div_ceil(steps);
        while run > 1 && Self::cubes_of(shape, run).iter().product::<usize>() < CUBES * processors {
            run /= 2;
        }
        run
    }

    /// Cubes for runs of `run` key tiles: runs, query tiles, rows of the bias.
    fn cubes_of([batch, heads, queries, keys]: [usize; 4], run: usize) -> [usize; 3] {
        [
            keys.div_ceil(Self::KEYS).div_ceil(run),
            queries.div_ceil(Self::QUERIES),
            batch * heads,
        ]
    }

    /// Cubes for a bias of this shape at most.
    pub(crate) fn most_cubes(shape: [usize; 4]) -> [usize; 3] {
        Self::cubes_of(shape, 1)
    }
}

impl MmaPass<'_> {
    /// The gradient of a bias with all queries and keys, on `wgmma`.
    pub(crate) fn launch_bias(
        &self,
        problem: &MaskedProblem,
        tensors: BiasGradient,
        blueprint: BiasBlueprint,
    ) {
        let (client, p) = (self.client, self.problem);
        let shape = problem.bias.expect("there is a bias");
        let processors = (client.properties().hardware)
            .num_streaming_multiprocessors
            .unwrap_or(1);
        let run = BiasBlueprint::run(problem, shape, processors as usize);
        let [x, y, z] = BiasBlueprint::cubes_of(shape, run);
        let BiasGradient { bias, plan, grad } = tensors;
        let [bits, counts] = plan;
        let [mask_batches, mask_heads, blocks, queries, _] =
            problem.plan.map_or([1; 5], |plan| plan.bits_shape());
        let heads_each = problem.heads_each(shape[1]);
        let [q, k, v] = self.rows;
        let boxes = |tensor| boxes_of(tensor, p.element, 1, BiasBlueprint::HALF);
        // SAFETY: the buffers were checked to hold the shapes and strides that the kernel indexes by.
        unsafe {
            bias_wgmma_kernel::launch_unchecked(
                client,
                CubeCount::Static(x as u32, y as u32, z as u32),
                CubeDim::new_2d(32, BiasBlueprint::WARPS as u32),
                address_type(&[bias, &bits, &counts, grad], 4),
                bias.clone().into_tensor_arg(),
                bits.into_buffer_arg(),
                counts.into_buffer_arg(),
                grad.clone().into_buffer_arg(),
                p.scale,
                p.softcap.unwrap_or(1.0),
                boxes(q),
                boxes(&self.saved.grad_out),
                boxes(k),
                boxes(v),
                word_boxes_of(self.boxed_rows(), 1, 2 * BiasBlueprint::QUERIES),
                p.q_len as u32,
                p.k_len as u32,
                p.group() as u32,
                shape[1] as u32,
                heads_each as u32,
                (p.batch / shape[0] * heads_each) as u32,
                problem.heads_each(mask_heads) as u32,
                if mask_batches > 1 {
                    mask_heads as u32
                } else {
                    0
                },
                blocks as u32,
                queries as u32,
                run as u32,
                blueprint,
                elem_type(p.element),
            );
        }
    }
}
