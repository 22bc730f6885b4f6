//! Kinds of kernels, by the names that CubeCL reports.

use serde::Serialize;

/// Purpose of a kernel in a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Selection and attention, forward and backward.
    Attention,
    /// RMS norm and rotary encoding by their own kernels.
    Norm,
    /// Matrix products.
    Product,
    /// Sums, maxima and the like, including fused ones.
    Reduction,
    /// Elementwise operations, fused or not.
    ElementWise,
    /// All kernels between the backward pass and the next step: clipping and the update.
    Optimiser,
    /// Copies, casts and fills.
    Copy,
    /// Rows by index: lookups, and sums into rows.
    Lookup,
    /// Kernels without a rule.
    Other,
}

/// The first rule whose words all occur in a name decides. A name is the path of the kernel's type without its
/// generic arguments: the module of the function, its name, and that in camel case.
const RULES: &[(&[&str], Kind)] = &[
    (&["flash_dma_kernels::", "norm"], Kind::Norm),
    (&["flash_dma_kernels::", "rotary"], Kind::Norm),
    (&["flash_dma_kernels::", "product"], Kind::Product),
    (&["flash_dma_kernels::", "matmul"], Kind::Product),
    (&["flash_dma_kernels::", "gating"], Kind::ElementWise),
    (&["flash_dma_kernels::"], Kind::Attention),
    // Layout changes that a product needs first.
    (&["cubek_matmul::", "relayout"], Kind::Copy),
    (&["cubek_matmul::"], Kind::Product),
    (&["matmul"], Kind::Product),
    (&["cubek_reduce::"], Kind::Reduction),
    (&["reduce_kernel"], Kind::Reduction),
    (&["cumulative_kernel"], Kind::Reduction),
    (&["kernel::cast::"], Kind::Copy),
    (&["cubecl_std::tensor::"], Kind::Copy),
    (&["kernel::index::slice"], Kind::Copy),
    (&["repeat_dim"], Kind::Copy),
    (&["flip_kernel"], Kind::Copy),
    (&["full_kernel"], Kind::Copy),
    (&["kernel::index::"], Kind::Lookup),
    (&["elemwise_fuse"], Kind::ElementWise),
    (&["kernel::binary"], Kind::ElementWise),
    (&["kernel::unary"], Kind::ElementWise),
    (&["kernel::comparison"], Kind::ElementWise),
    (&["kernel::mask"], Kind::ElementWise),
];

impl Kind {
    /// Kind of a kernel, by the name that CubeCL reports: the path of its type.
    pub fn of(name: &str) -> Self {
        // The types in the generic arguments have paths, too.
        let path = path(name);
        let rule = RULES
            .iter()
            .find(|(words, _)| words.iter().all(|word| path.contains(word)));
        rule.map_or(Self::Other, |(_, kind)| *kind)
    }
}

/// A kernel's name without generic arguments.
pub fn path(name: &str) -> &str {
    name.split('<').next().unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_of_a_training_step_have_their_kinds() {
        let of = "
            Attention flash_dma_kernels::backward::dkdv::wgmma::dkdv_wgmma::DkdvWgmma<half::bf16>
            Attention flash_dma_kernels::select::kernel::select::Select
            ElementWise flash_dma_kernels::gating::kernel::swiglu_kernel::SwigluKernel
            Norm flash_dma_kernels::norm::rotary::forward::Forward
            Product cubek_matmul::multi_level::components::batch::partitioned_matmul::matmul::matmul_entry::MatmulEntry<\
                burn_cubecl_fusion::engine::launch::elemwise_fuse::X>
            Reduction cubek_reduce::launch::base::reduce_kernel::ReduceKernel<f32>
            Reduction burn_cubecl_fusion::optim::reduce::optimization::reduce_kernel_fused::ReduceKernelFused
            Reduction cubek_reduce::routines::shared_sum::shared_sum_kernel::SharedSumKernel
            ElementWise burn_cubecl_fusion::optim::elemwise::optimization::elemwise_fuse::ElemwiseFuse
            ElementWise burn_cubecl::kernel::unary_float::unary_float::UnaryFloat<f32, burn_cubecl::kernel::cast::base::X>
            Copy burn_cubecl::kernel::cast::base::cast_element::CastElement
            Copy cubecl_std::tensor::contiguous::base::copy_kernel::CopyKernel
            Copy burn_cubecl::kernel::index::slice_assign::slice_assign_kernel::SliceAssignKernel
            Lookup burn_cubecl::kernel::index::select_assign::select_assign_kernel::SelectAssignKernel
            Lookup burn_cubecl::kernel::index::gather::gather_kernel::GatherKernel
            Other cubek_random::base::prng_kernel::PrngKernel
        ";
        for line in of.trim().lines() {
            let (kind, name) = line.trim().split_once(' ').expect("a kind and a name");
            assert_eq!(format!("{:?}", Kind::of(name)), kind, "{name}");
        }
    }

    #[test]
    fn every_rule_can_decide() {
        for (number, (words, kind)) in RULES.iter().enumerate() {
            let earlier = &RULES[..number];
            let hidden = earlier.iter().find(|(other, _)| {
                (other.iter()).all(|word| words.iter().any(|own| own.contains(word)))
            });
            assert!(hidden.is_none(), "{words:?} ({kind:?}) by {hidden:?}");
        }
    }
}
