//! Any number of tensors in one argument of an operation.

use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Backend, BackendTensor, Dispatch, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind,
    ExtensionType,
};

/// Tensors of one device (Burn's macros have no `Vec` of tensors as an argument, and with fusion not as a result either).
#[derive(Clone, Debug)]
pub struct FloatList<B: Backend>(pub Vec<FloatTensor<B>>);

impl<B: Backend> FloatList<B> {
    /// The tensors after `f`, perhaps of another backend.
    pub(crate) fn map<T: Backend>(
        self,
        f: impl FnMut(FloatTensor<B>) -> FloatTensor<T>,
    ) -> FloatList<T> {
        FloatList(self.0.into_iter().map(f).collect())
    }
}

impl<B: Backend> ExtensionType<B> for FloatList<B> {
    type Target = FloatList<Dispatch>;

    fn map_to_dispatch<F>(self, map_kind: F, autodiff: DispatchAutodiffContext) -> Self::Target
    where
        F: Fn(BackendTensor<B>) -> DispatchTensorKind,
    {
        self.map(|tensor| DispatchTensor {
            kind: map_kind(BackendTensor::Float(tensor)),
            autodiff,
        })
    }

    fn map_from_dispatch<F>(target: Self::Target, unwrap_kind: F) -> Self
    where
        F: Fn(DispatchTensor) -> BackendTensor<B>,
    {
        target.map(|tensor| unwrap_kind(tensor).float())
    }

    fn routing_tensor(target: &Self::Target) -> Option<&DispatchTensor> {
        target.0.first()
    }

    fn routing_float_tensor(target: &Self::Target) -> Option<&DispatchTensor> {
        target.0.first()
    }

    fn autodiff_context(target: &Self::Target) -> DispatchAutodiffContext {
        (target.0.iter()).fold(DispatchAutodiffContext::Disabled, |context, tensor| {
            context.merge(tensor.autodiff)
        })
    }
}

#[cfg(feature = "fusion")]
mod fusion {
    use super::FloatList;
    use burn::backend::Backend;
    use burn::backend::fusion::custom::{
        ExtensionMetadata, Float, FusionValueAdapter, HandleContainer, OutputTensor, TensorId,
        TensorIr, TensorSpec,
    };
    use burn::backend::fusion::{
        ExecutionError, Fusion, FusionBackend, FusionRuntime, FusionTensor,
    };

    impl<B: Backend> ExtensionMetadata for FloatList<B> {
        type Metadata = Vec<TensorSpec>;
        type Input = Vec<TensorIr>;
        type Output = Vec<OutputTensor>;
    }

    type Handles<B> =
        HandleContainer<<<B as FusionBackend>::FusionRuntime as FusionRuntime>::FusionHandle>;

    impl<B: FusionBackend> FusionValueAdapter<B> for FloatList<B> {
        type Metadata = Vec<TensorSpec>;
        type Input = Vec<TensorIr>;
        type Output = Vec<OutputTensor>;
        type Inner = Self;
        type Fused = FloatList<Fusion<B>>;

        fn to_metadata(value: &Self::Fused) -> Self::Metadata {
            let specs = value.0.iter();
            specs
                .map(<Float as FusionValueAdapter<B>>::to_metadata)
                .collect()
        }

        fn visit_fused_tensors(
            value: &Self::Fused,
            visit: &mut impl FnMut(&FusionTensor<B::FusionRuntime>),
        ) {
            value.0.iter().for_each(visit);
        }

        fn tensor_count(meta: &Self::Metadata) -> usize {
            meta.len()
        }

        fn append_input_ir(value: Self::Fused, inputs: &mut Vec<TensorIr>) -> Self::Input {
            let tensors = value.0.into_iter();
            tensors
                .map(|tensor| <Float as FusionValueAdapter<B>>::append_input_ir(tensor, inputs))
                .collect()
        }

        fn resolve_inputs(input: &Self::Input, handles: &mut Handles<B>) -> Self {
            let tensors = input.iter();
            Self(
                tensors
                    .map(|ir| <Float as FusionValueAdapter<B>>::resolve_inputs(ir, handles))
                    .collect(),
            )
        }

        fn append_output_ir(
            meta: &Self::Metadata,
            out: &mut Vec<TensorIr>,
            create: &mut impl FnMut() -> TensorId,
        ) -> Self::Output {
            let specs = meta.iter();
            specs
                .map(|spec| <Float as FusionValueAdapter<B>>::append_output_ir(spec, out, create))
                .collect()
        }

        fn validate_outputs(
            value: &Self,
            output: &Self::Output,
            device: Option<&B::Device>,
        ) -> Result<(), ExecutionError> {
            (value.0.iter().zip(output)).try_for_each(|(tensor, output)| {
                <Float as FusionValueAdapter<B>>::validate_outputs(tensor, output, device)
            })
        }

        fn register_output_handles(value: Self, output: &Self::Output, handles: &mut Handles<B>) {
            for (tensor, output) in value.0.into_iter().zip(output) {
                <Float as FusionValueAdapter<B>>::register_output_handles(tensor, output, handles);
            }
        }

        fn build_fused_output(
            meta: &Self::Metadata,
            tensors: &mut std::vec::IntoIter<FusionTensor<B::FusionRuntime>>,
        ) -> Self::Fused {
            let specs = meta.iter();
            FloatList(
                specs
                    .map(|spec| <Float as FusionValueAdapter<B>>::build_fused_output(spec, tensors))
                    .collect(),
            )
        }
    }
}
