//! Host side of the gradient of a bias per pair on `wgmma`.

use crate::args::scaling;
use crate::backward::bias::blueprint::BiasBlueprint;
use crate::backward::bias::kernel::{BiasSizesLaunch, SavedLsesLaunch, bias_wgmma_kernel};
use crate::backward::bias::steps::PlanTensorsLaunch;
use crate::backward::bias::tiles::BiasBoxesLaunch;
use crate::backward::matrix::pass::MmaPass;
use crate::host::check::{address_type, elem_type};
use crate::matrix::blueprint::processors;
use crate::matrix::wgmma::boxes::{boxes_of, word_boxes_of};
use crate::pattern::mask::args::MaskedInputs;
use cubecl::CubeDim;
use cubecl::prelude::*;
use flash_dma_problem::MaskedProblem;

impl MmaPass<'_> {
    /// The gradient of a bias with all queries and keys, on `wgmma`: f32, contiguous, the shape of the bias; overwritten.
    pub(crate) fn launch_bias(
        &self,
        problem: &MaskedProblem,
        inputs: &MaskedInputs,
        grad: &TensorBinding,
        blueprint: BiasBlueprint,
    ) {
        let (client, p) = (self.client, self.problem);
        let shape = problem.bias.expect("there is a bias");
        let bias = inputs.bias.as_ref().expect("it was checked");
        let run = BiasBlueprint::run(problem, shape, processors(client.properties()));
        let [x, y, z] = BiasBlueprint::cubes_of(shape, run);
        let plan = inputs.plan.as_ref();
        let words: Vec<_> = (plan.iter().flat_map(|plan| [&plan.bits, &plan.counts]))
            .chain([bias, grad])
            .collect();
        let plan = plan.map(|plan| {
            let (bits, counts) = (plan.bits.clone(), plan.counts.clone());
            PlanTensorsLaunch::new(bits.into_buffer_arg(), counts.into_buffer_arg())
        });
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
                address_type(&words, 4),
                bias.clone().into_tensor_arg(),
                plan.into(),
                SavedLsesLaunch::new(
                    self.saved.lse.clone().into_buffer_arg(),
                    self.data.sums.lse_rest.clone().into_buffer_arg(),
                ),
                grad.clone().into_buffer_arg(),
                scaling(p.scale, p.softcap),
                BiasBoxesLaunch::new(
                    boxes(q),
                    boxes(&self.saved.grad_out),
                    boxes(k),
                    boxes(v),
                    word_boxes_of(self.boxed_rows(), 1, 2 * BiasBlueprint::QUERIES),
                ),
                BiasSizesLaunch::new(
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
                ),
                blueprint,
                elem_type(p.element),
            );
        }
    }
}
