//! Tile plans: the engines' inputs for them, and the expected results.

use crate::Engine;
use crate::engines::Cpu;
use crate::engines::buffers::binding;
use crate::engines::kernels::{Kernels, Target};
use flash_dma_cpu::BroadcastView;
use flash_dma_kernels::MaskBits;
use flash_dma_problem::{AttentionError, PlanGeometry, contiguous_strides};

#[cfg(feature = "burn")]
pub use super::burn::read;

/// The bits and counts of a plan, contiguous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// [`PlanGeometry::bits_shape`].
    pub bits: Vec<u32>,
    /// [`PlanGeometry::counts_shape`].
    pub counts: Vec<u32>,
}

/// A mask in the form engines get it.
#[derive(Clone, Debug)]
pub struct RawMask {
    /// The elements in the mask's shape, row-major; nonzero is set.
    pub values: Vec<u8>,
    /// True if set elements are hidden.
    pub hidden: bool,
    /// True if the queries of a key lie together in memory, instead of the keys of a query.
    pub transposed: bool,
}

/// One of the two tensors of ranges of keys.
#[derive(Clone, Debug)]
pub struct Keys {
    /// `[batch | 1, heads | 1, q_len | 1]`.
    pub shape: [usize; 3],
    /// Row-major.
    pub values: Vec<i32>,
}

/// A plan, or the engine's refusal.
pub type Planned = Result<Plan, AttentionError>;

/// An implementation of tile plans.
pub trait PlanEngine: Engine {
    /// The plan of a mask.
    fn plan(&self, geometry: &PlanGeometry, mask: &RawMask) -> Plan;

    /// The plan of ranges of keys: the first keys, and those after the last.
    fn plan_ranges(&self, geometry: &PlanGeometry, ranges: [&Keys; 2]) -> Planned;
}

impl Plan {
    /// The expected plan of a mask, given as a function of an entry of its shape; bits that are unspecified are 0.
    pub fn expected(geometry: &PlanGeometry, visible: impl Fn([usize; 4]) -> bool) -> Self {
        let PlanGeometry {
            mask, q_len, k_len, ..
        } = *geometry;
        let [batch, heads, queries, keys] = mask;
        let mut plan = Self::zeros(geometry);
        let [_, _, blocks, _, _] = geometry.bits_shape();
        let [_, _, query_blocks, key_blocks] = geometry.counts_shape();
        for row in 0..batch * heads {
            let entry = |i: usize, j: usize| {
                let (i, j) = (i.min(queries - 1), j.min(keys - 1));
                visible([row / heads, row % heads, i, j])
            };
            for i in 0..queries {
                for j in 0..blocks * 64 {
                    let shown = (j < keys || keys == 1) && entry(i, j);
                    let at = ((row * blocks + j / 64) * queries + i) * 2 + j % 64 / 32;
                    plan.bits[at] |= u32::from(shown) << (j % 32);
                }
            }
            for i in 0..q_len {
                for j in 0..k_len {
                    let at = (row * query_blocks + i / 16) * key_blocks + j / 64;
                    let shown = entry(i, j) && is_left(geometry, i, j);
                    plan.counts[at] += u32::from(shown);
                }
            }
        }
        plan.specified(geometry)
    }

    fn zeros(geometry: &PlanGeometry) -> Self {
        Self {
            bits: vec![0; geometry.bits_shape().iter().product()],
            counts: vec![0; geometry.counts_shape().iter().product()],
        }
    }

    /// The plan with its unspecified bits set to 0.
    pub fn specified(mut self, geometry: &PlanGeometry) -> Self {
        let [_, _, queries, keys] = geometry.mask;
        if queries == geometry.q_len && keys == geometry.k_len {
            let blocks = geometry.bits_shape()[2];
            for (n, word) in self.bits.iter_mut().enumerate() {
                let (query, from) = (n / 2 % queries, n / 2 / queries % blocks * 64 + n % 2 * 32);
                let left = (0..32).filter(|c| is_left(geometry, query, from + c));
                *word &= left.fold(0, |bits, c| bits | 1 << c);
            }
        }
        self
    }
}

/// True if causal masking leaves a key to a query.
fn is_left(geometry: &PlanGeometry, query: usize, key: usize) -> bool {
    !geometry.causal || key + geometry.q_len <= query + geometry.k_len
}

fn strides(shape: [usize; 4], transposed: bool) -> [usize; 4] {
    let [b, h, q, k] = shape;
    let order = if transposed { [b, h, k, q] } else { shape };
    let strides: Vec<usize> = contiguous_strides(&order).collect();
    let [keys, queries] = if transposed { [2, 3] } else { [3, 2] };
    [strides[0], strides[1], strides[queries], strides[keys]]
}

/// The values of a mask in their memory layout.
pub(super) fn laid_out<T: Copy + Default>(
    shape: [usize; 4],
    mask: &RawMask,
    of: impl Fn(u8) -> T,
) -> Vec<T> {
    let strides = strides(shape, mask.transposed);
    let mut values = vec![T::default(); mask.values.len()];
    for (n, &value) in mask.values.iter().enumerate() {
        let [_, h, q, k] = shape;
        let index = [n / k / q / h, n / k / q % h, n / k % q, n % k];
        let at: usize = index.iter().zip(strides).map(|(i, s)| i * s).sum();
        values[at] = of(value);
    }
    values
}

/// The shape and strides of ranges; axes of size 1 are broadcast to a geometry's mask with one key.
fn columns(geometry: &PlanGeometry, keys: &Keys) -> ([usize; 4], [usize; 4]) {
    let (mut shape, mut strides) = (geometry.mask, [0; 4]);
    shape[3] = 1;
    for (axis, stride) in contiguous_strides(&keys.shape).enumerate() {
        if keys.shape[axis] != 1 {
            (shape[axis], strides[axis]) = (keys.shape[axis], stride);
        }
    }
    (shape, strides)
}

impl PlanEngine for Cpu {
    fn plan(&self, geometry: &PlanGeometry, mask: &RawMask) -> Plan {
        let data = laid_out(geometry.mask, mask, |x| x);
        let view = BroadcastView {
            data: &data,
            shape: geometry.mask,
            strides: strides(geometry.mask, mask.transposed),
        };
        let Plan {
            mut bits,
            mut counts,
        } = Plan::zeros(geometry);
        bits.fill(u32::MAX);
        let result = flash_dma_cpu::plan(geometry, view, mask.hidden, &mut bits, &mut counts);
        result.expect("a good plan");
        Plan { bits, counts }
    }

    fn plan_ranges(&self, geometry: &PlanGeometry, ranges: [&Keys; 2]) -> Planned {
        let [first, end] = ranges.map(|keys| {
            let (shape, strides) = columns(geometry, keys);
            BroadcastView {
                data: &keys.values[..],
                shape,
                strides,
            }
        });
        let mut plan = Plan::zeros(geometry);
        plan.bits.fill(u32::MAX);
        flash_dma_cpu::plan_ranges(geometry, first, end, &mut plan.bits, &mut plan.counts)?;
        Ok(plan)
    }
}

impl<T: Target> Kernels<T> {
    fn planned(
        &self,
        geometry: &PlanGeometry,
        run: impl FnOnce(MaskBits) -> Result<(), AttentionError>,
    ) -> Planned {
        let zeros = Plan::zeros(geometry);
        let place = |words: &[u32], shape: &[usize]| {
            let wrong: Vec<i32> = words.iter().map(|_| 0x5555_5555).collect();
            self.words(shape, &wrong)
        };
        let plan = MaskBits {
            bits: place(&zeros.bits, &geometry.bits_shape()),
            counts: place(&zeros.counts, &geometry.counts_shape()),
        };
        run(plan.clone())?;
        let read = |tensor, len| match len {
            0 => Vec::new(),
            _ => bytemuck::cast_slice(&self.read_bytes(tensor, 4))[..len].to_vec(),
        };
        Ok(Plan {
            bits: read(&plan.bits, zeros.bits.len()),
            counts: read(&plan.counts, zeros.counts.len()),
        })
    }
}

impl<T: Target> PlanEngine for Kernels<T> {
    /// Builds the plan from four-byte elements and again from one-byte elements; a device without byte buffers refuses
    /// the latter if their rows are not contiguous.
    fn plan(&self, geometry: &PlanGeometry, mask: &RawMask) -> Plan {
        let strides = strides(geometry.mask, mask.transposed);
        let plan = |bytes: &[u8], size| {
            let mask_tensor = binding(&self.buffer(bytes), &geometry.mask, &strides);
            self.planned(geometry, |plan| {
                let hidden = mask.hidden;
                flash_dma_kernels::plan(&self.client, geometry, mask_tensor, size, hidden, plan)
            })
        };
        let words = laid_out(geometry.mask, mask, |x| u32::from(x) << 17);
        let of_words = plan(bytemuck::cast_slice(&words), 4);
        let of_bytes = plan(&laid_out(geometry.mask, mask, |x| x), 1);
        let [_, _, queries, keys] = geometry.mask;
        if self.stores_bytes() {
            assert_eq!(of_words, of_bytes);
        } else if mask.transposed && queries > 1 && keys > 1 {
            let refused = matches!(of_bytes, Err(AttentionError::Unsupported { .. }));
            assert!(refused, "{of_bytes:?}");
        }
        of_words.expect("a good plan")
    }

    fn plan_ranges(&self, geometry: &PlanGeometry, ranges: [&Keys; 2]) -> Planned {
        let [first, end] = ranges.map(|keys| {
            let (shape, strides) = columns(geometry, keys);
            let buffer = self.buffer(bytemuck::cast_slice(&keys.values));
            binding(&buffer, &shape, &strides)
        });
        self.planned(geometry, |plan| {
            flash_dma_kernels::plan_ranges(&self.client, geometry, first, end, plan)
        })
    }
}
