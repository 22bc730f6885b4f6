//! Masks and biases on the CPU engine.

use super::attention::{addressable_saved, forwarded, view_saved};
use super::packed::RowGradients;
use super::tensors::{Stored, addressable, buffer, by_element, contiguous, run, tensor, view};
use crate::backends::bias::as_f32;
use crate::ops::masked::MaskedAttentionOps;
use crate::spans::span;
use crate::types::{
    Forwarded, MaskedGrads, Masking, OptionalFloat, OptionalPlan, PlanTensors, Saved, Wanted,
};
use burn::backend::Flex;
use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn_flex::FlexTensor;
use flash_dma_cpu::{BroadcastView, Element, MaskedGradients, MaskedInputs, View};
use flash_dma_problem::{AttentionError, MaskedProblem, PlanGeometry};

impl MaskedAttentionOps for Flex {
    fn masked_attention_plan(
        mask: BoolTensor<Self>,
        hidden: bool,
        geometry: PlanGeometry,
    ) -> PlanTensors<Self> {
        let _span = span!("tile_plan", engine = "cpu");
        let mask = forward_strides(mask);
        plan_of(&geometry, |bits, counts| {
            flash_dma_cpu::plan(&geometry, broadcast_view(&mask), hidden, bits, counts)
        })
    }

    fn masked_attention_plan_ranges(
        first: IntTensor<Self>,
        end: IntTensor<Self>,
        geometry: PlanGeometry,
    ) -> PlanTensors<Self> {
        let _span = span!("tile_plan", engine = "cpu");
        let [first, end] = [first, end].map(forward_strides);
        plan_of(&geometry, |bits, counts| {
            let [first, end] = [&first, &end].map(broadcast_view);
            flash_dma_cpu::plan_ranges(&geometry, first, end, bits, counts)
        })
    }

    fn masked_attention_forward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        masking: Masking<Self>,
        problem: MaskedProblem,
        wanted: Wanted,
    ) -> Forwarded<Self> {
        let _span = span!("forward", engine = "cpu");
        let call = Call::new([q, k, v], masking, problem);
        by_element!(call.rows[0].dtype(), E => call.forward::<E>(wanted))
    }

    fn masked_attention_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        masking: Masking<Self>,
        saved: Saved<Self>,
        problem: MaskedProblem,
        bias_gradient: bool,
    ) -> MaskedGrads<Self> {
        let _span = span!("backward", engine = "cpu");
        let call = Call::new([q, k, v], masking, problem);
        by_element!(call.rows[0].dtype(), E => call.backward::<E>(saved, bias_gradient))
    }
}

/// A tile plan whose bits and counts `fill` writes.
fn plan_of(
    geometry: &PlanGeometry,
    fill: impl FnOnce(&mut [u32], &mut [u32]) -> Result<(), AttentionError>,
) -> PlanTensors<Flex> {
    let mut bits = buffer::<i32, 5>(geometry.bits_shape());
    let mut counts = buffer::<i32, 4>(geometry.counts_shape());
    run(fill(
        bytemuck::cast_slice_mut(&mut bits),
        bytemuck::cast_slice_mut(&mut counts),
    ));
    PlanTensors {
        bits: tensor(bits, geometry.bits_shape()),
        counts: tensor(counts, geometry.counts_shape()),
    }
}

/// Tensors of a call in a form the engine can address.
struct Call {
    rows: [FlexTensor; 3],
    bits: Option<FlexTensor>,
    bias: Option<FlexTensor>,
    problem: MaskedProblem,
}

impl Call {
    fn new(rows: [FlexTensor; 3], masking: Masking<Flex>, problem: MaskedProblem) -> Self {
        Self {
            rows: rows.map(addressable),
            bits: match masking.plan {
                OptionalPlan::None => None,
                OptionalPlan::Some { bits, .. } => Some(bits.to_contiguous()),
            },
            bias: masking.bias.into_option().map(|bias| {
                let bias = forward_strides(bias);
                let strides = bias.layout().strides().to_vec();
                as_f32::<Flex>(bias, |axis| strides[axis] == 0)
            }),
            problem,
        }
    }

    fn inputs<E: Element + Stored>(&self) -> MaskedInputs<'_, E> {
        let [q, k, v] = self.rows.each_ref().map(view);
        MaskedInputs {
            q,
            k,
            v,
            bits: (self.bits.as_ref()).map(|bits| bytemuck::cast_slice(contiguous::<i32>(bits))),
            bias: self.bias.as_ref().map(broadcast_view),
        }
    }

    fn forward<E: Element + Stored>(self, wanted: Wanted) -> Forwarded<Flex> {
        let p = &self.problem.attention;
        forwarded::<E>(p, wanted, |outputs| {
            flash_dma_cpu::masked_forward(&self.problem, self.inputs(), outputs)
        })
    }

    fn backward<E: Element + Stored>(
        self,
        saved: Saved<Flex>,
        bias_gradient: bool,
    ) -> MaskedGrads<Flex> {
        let p = &self.problem.attention;
        let saved = addressable_saved(saved);
        let mut rows = RowGradients::<E>::new(&self.rows, p);
        let [q, k, v] = rows.slices();
        let shape = self.problem.bias.filter(|_| bias_gradient);
        let mut bias = shape.map(buffer::<f32, 4>);
        run(flash_dma_cpu::masked_backward(
            &self.problem,
            self.inputs(),
            view_saved(&saved),
            MaskedGradients {
                q,
                k,
                v,
                bias: bias.as_deref_mut(),
            },
        ));
        let [q, k, v] = rows.into_tensors(p);
        let bias = bias.zip(shape).map(|(bias, shape)| tensor(bias, shape));
        MaskedGrads {
            q,
            k,
            v,
            bias: OptionalFloat::from_option(bias),
        }
    }
}

fn forward_strides(tensor: FlexTensor) -> FlexTensor {
    if tensor.layout().strides().iter().all(|&s| s >= 0) {
        tensor
    } else {
        tensor.to_contiguous()
    }
}

fn broadcast_view<E: Stored>(tensor: &FlexTensor) -> BroadcastView<'_, E> {
    let View {
        data,
        shape,
        strides,
    } = view(tensor);
    BroadcastView {
        data,
        shape,
        strides,
    }
}
