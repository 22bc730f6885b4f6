//! Parts of one tensor on Flex, and the buffers of their gradients.

use super::tensors::{Stored, buffer, tensor};
use crate::fallback::packed as fallback;
use crate::ops::packed::PackedOps;
use crate::types::PackedRows;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::Shape;
use burn_flex::{FlexTensor, Layout};
use flash_dma_problem::Problem;
use std::sync::Arc;

impl PackedOps for Flex {
    fn packed_split(x: FloatTensor<Self>) -> PackedRows<Self> {
        let [batch, len, parts, heads, head_dim] = x.shape().dims();
        let part = |index| {
            let layout = x.layout().narrow(2, index, 1);
            let strides = layout.strides();
            let strides = [strides[0], strides[3], strides[1], strides[4]];
            let shape = Shape::new([batch, heads, len, head_dim]);
            let layout = Layout::new(shape, strides.into(), layout.start_offset());
            x.clone().with_layout(layout)
        };
        PackedRows::from_parts((0..parts).map(part).collect())
    }

    fn packed_join(rows: PackedRows<Self>) -> FloatTensor<Self> {
        let parts = rows.into_parts();
        let Some(distance) = neighbours(&parts) else {
            return fallback::join::<Self>(PackedRows::from_parts(parts));
        };
        let layout = parts[0].layout();
        let [batch, heads, len, head_dim] = layout.shape().dims();
        let strides = layout.strides();
        let strides = vec![strides[0], strides[2], distance, strides[1], strides[3]];
        let shape = Shape::new([batch, len, parts.len(), heads, head_dim]);
        let layout = Layout::new(shape, strides, layout.start_offset());
        parts[0].clone().with_layout(layout)
    }
}

/// Distance of successive parts in elements, if they lie in one buffer in one layout.
fn neighbours(parts: &[FlexTensor]) -> Option<isize> {
    let begin = |part: &FlexTensor| part.layout().start_offset();
    let [first, second, ..] = parts else {
        return None;
    };
    let distance = begin(second).checked_sub(begin(first))?;
    let follows = |pair: &[FlexTensor]| {
        share_buffer(&pair[0], &pair[1])
            && begin(&pair[1]).checked_sub(begin(&pair[0])) == Some(distance)
            && pair[0].layout().shape() == pair[1].layout().shape()
            && pair[0].layout().strides() == pair[1].layout().strides()
    };
    let neighbours = distance > 0 && parts.windows(2).all(follows);
    neighbours.then_some(distance as isize)
}

fn share_buffer(a: &FlexTensor, b: &FlexTensor) -> bool {
    Arc::ptr_eq(&a.data_arc(), &b.data_arc())
}

pub(super) enum RowGradients<E> {
    /// One for each.
    Apart([Vec<E>; 3]),
    /// One for q, and one for k and v.
    Pair(Vec<E>, Vec<E>),
    /// One for all.
    Packed(Vec<E>),
}

impl<E: Stored> RowGradients<E> {
    /// Gradients of parts of one tensor lie one after another in one buffer, as [`PackedOps::packed_join`] wants
    /// them.
    pub(super) fn new([q, k, v]: &[FlexTensor; 3], problem: &Problem) -> Self {
        let (q_shape, kv_shape) = (problem.q_shape(), problem.kv_shape());
        let several = |parts: usize| vec![E::default(); parts * kv_shape.iter().product::<usize>()];
        if !share_buffer(k, v) {
            return Self::Apart([buffer(q_shape), buffer(kv_shape), buffer(kv_shape)]);
        }
        match share_buffer(q, k) && q_shape == kv_shape {
            true => Self::Packed(several(3)),
            false => Self::Pair(buffer(q_shape), several(2)),
        }
    }

    pub(super) fn slices(&mut self) -> [&mut [E]; 3] {
        match self {
            Self::Apart([q, k, v]) => [q, k, v],
            Self::Pair(q, kv) => {
                let len = kv.len() / 2;
                let (k, v) = kv.split_at_mut(len);
                [q, k, v]
            }
            Self::Packed(all) => {
                let len = all.len() / 3;
                let (q, kv) = all.split_at_mut(len);
                let (k, v) = kv.split_at_mut(len);
                [q, k, v]
            }
        }
    }

    pub(super) fn into_tensors(self, problem: &Problem) -> [FlexTensor; 3] {
        let (q_shape, kv_shape) = (problem.q_shape(), problem.kv_shape());
        let len = kv_shape.iter().product::<usize>();
        match self {
            Self::Apart([q, k, v]) => {
                [tensor(q, q_shape), tensor(k, kv_shape), tensor(v, kv_shape)]
            }
            Self::Pair(q, kv) => {
                let kv = tensor(kv, [2 * len]);
                let [k, v] = [0, 1].map(|n| part(&kv, kv_shape, n * len));
                [tensor(q, q_shape), k, v]
            }
            Self::Packed(all) => {
                let all = tensor(all, [3 * len]);
                [0, 1, 2].map(|n| part(&all, kv_shape, n * len))
            }
        }
    }
}

/// A view of `shape` without gaps that begins at `start`.
fn part(whole: &FlexTensor, shape: [usize; 4], start: usize) -> FlexTensor {
    let contiguous = Layout::contiguous(Shape::new(shape));
    let layout = Layout::new(Shape::new(shape), contiguous.strides().to_vec(), start);
    whole.clone().with_layout(layout)
}

#[cfg(test)]
mod tests {
    use super::super::tensors::contiguous;
    use super::*;
    use crate::ops::attention::DynamicMaskOps;
    use crate::types::{OptionalFloat, Saved, Selection, Wanted};
    use burn::tensor::TensorData;
    use flash_dma_problem::{AttentionOptions, ElementType};

    fn random(shape: &[usize]) -> FlexTensor {
        let mut rng = flash_dma_reference::Rng::new(5);
        let len = shape.iter().product();
        let values: Vec<f32> = (0..len).map(|_| rng.normal() as f32).collect();
        FlexTensor::from_data(TensorData::new(values, shape.to_vec()))
    }

    /// The joined gradient of `x`, of which `q` may be a part, and the gradients of the parts.
    fn gradients(x: &FlexTensor, q: Option<FlexTensor>) -> (FlexTensor, [FlexTensor; 3]) {
        let rows = Flex::packed_split(x.clone());
        assert!(share_buffer(&rows.k, x) && share_buffer(&rows.v, x));
        let own = q.is_none();
        let q = q.unwrap_or_else(|| rows.q.into_option().expect("three parts"));
        let [q_shape, kv_shape] = [&q, &rows.k].map(|rows| rows.shape().dims::<4>());
        let options = AttentionOptions::new();
        let element = ElementType::F32;
        let problem =
            Problem::new(&q_shape, &kv_shape, &kv_shape, None, element, &options).expect("it fits");
        let rows = [q, rows.k, rows.v];
        let [q, k, v] = rows.clone();
        let wanted = Wanted::Out;
        let results = Flex::dynamic_mask_forward(q, k, v, Selection::All, problem, wanted);
        let saved = Saved {
            grad_out: random(&q_shape),
            out: results.out,
            residual: results.residual,
            lse: results.lse,
            lse_rest: results.lse_rest,
            grad_lse: OptionalFloat::None,
        };
        let [q, k, v] = rows;
        let grads = Flex::dynamic_mask_backward(q, k, v, Selection::All, saved, problem);
        let grads = [grads.q, grads.k, grads.v];
        let [q, k, v] = grads.clone();
        let joined = Flex::packed_join(PackedRows {
            q: OptionalFloat::from_option(own.then_some(q)),
            k,
            v,
        });
        (joined, grads)
    }

    fn values(tensor: &FlexTensor) -> Vec<f32> {
        contiguous::<f32>(&tensor.to_contiguous()).to_vec()
    }

    #[test]
    fn the_default_bodies_do_the_same() {
        for parts in [2, 3] {
            let x = random(&[2, 6, parts, 2, 8]);
            let (ours, default) = (
                Flex::packed_split(x.clone()),
                fallback::split::<Flex>(x.clone()),
            );
            let (ours, default) = (ours.into_parts(), default.into_parts());
            assert_eq!((ours.len(), default.len()), (parts, parts));
            for (ours, default) in ours.iter().zip(&default) {
                assert_eq!(default.shape().dims(), [2, 2, 6, 8]);
                assert_eq!(values(ours), values(default));
            }
            let joined = fallback::join::<Flex>(PackedRows::from_parts(default));
            assert_eq!(joined.shape(), x.shape());
            assert_eq!(values(&joined), values(&x));
        }
    }

    #[test]
    fn gradients_of_parts_are_a_view_of_one_buffer() {
        for (parts, q) in [(3, None), (2, Some(random(&[2, 4, 9, 8])))] {
            let x = random(&[2, 6, parts, 2, 8]);
            let (joined, [q, k, v]) = gradients(&x, q);
            assert_eq!(joined.shape().dims(), [2, 6, parts, 2, 8]);
            for part in [&k, &v] {
                assert!(share_buffer(&joined, part));
            }
            assert_eq!(share_buffer(&joined, &q), parts == 3);
            // The join of tensors with buffers of their own.
            let apart = |part: &FlexTensor| tensor(values(part), part.shape().dims::<4>());
            let copied = Flex::packed_join(PackedRows {
                q: OptionalFloat::from_option((parts == 3).then(|| apart(&q))),
                k: apart(&k),
                v: apart(&v),
            });
            assert!(!share_buffer(&copied, &joined));
            assert_eq!(values(&copied), values(&joined));
        }
    }
}
