//! Attention under an arbitrary mask and bias: their broadcasting, and the tiles that a mask is cut into.

use crate::problem::{MAX_LEN, check_limit, check_shape, rank};
use crate::{AttentionError, AttentionOptions, ElementType, Problem, TensorName};

/// Sizes and options of one valid problem with a mask, a bias, both or neither. Only its checks can create it.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct MaskedProblem {
    /// The problem without mask and bias; it has no scores.
    pub attention: Problem,
    /// The mask, as tiles; `None` if every key that causal masking leaves is visible.
    pub plan: Option<PlanGeometry>,
    /// Shape of the bias, which broadcasts to the logits; `None` adds nothing.
    pub bias: Option<[usize; 4]>,
}

impl MaskedProblem {
    /// Checks the shapes against each other and resolves the options. `q`, `k`, `v` are shaped as for [`Problem::new`];
    /// `mask` and `bias` are `[batch | 1, q_heads | kv_heads | 1, q_len | 1, k_len | 1]`.
    ///
    /// # Errors
    ///
    /// The errors of [`Problem::new`], [`AttentionError::Broadcast`] and [`AttentionError::Rank`].
    pub fn new(
        q: &[usize],
        k: &[usize],
        v: &[usize],
        mask: Option<&[usize]>,
        bias: Option<&[usize]>,
        element: ElementType,
        options: &AttentionOptions,
    ) -> Result<Self, AttentionError> {
        let attention = Problem::new(q, k, v, None, element, options)?;
        let broadcast = |name, shape| check_broadcast(name, shape, &attention);
        let mask = (mask.map(|shape| broadcast(TensorName::Mask, shape))).transpose()?;
        let bias = (bias.map(|shape| broadcast(TensorName::Bias, shape))).transpose()?;
        let plan = mask.map(|mask| PlanGeometry {
            mask,
            q_len: attention.q_len,
            k_len: attention.k_len,
            causal: attention.causal,
        });
        Ok(Self {
            attention,
            plan,
            bias,
        })
    }

    /// Does what [`new`](Self::new) does, for a mask that has already been cut into tiles.
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new), [`AttentionError::PlanCausal`], and [`AttentionError::Shape`] if the plan is
    /// for other lengths.
    pub fn with_plan(
        q: &[usize],
        k: &[usize],
        v: &[usize],
        plan: &PlanGeometry,
        bias: Option<&[usize]>,
        element: ElementType,
        options: &AttentionOptions,
    ) -> Result<Self, AttentionError> {
        let mut problem = Self::new(q, k, v, None, bias, element, options)?;
        check_broadcast(TensorName::Mask, &plan.mask, &problem.attention)?;
        let attention = &problem.attention;
        let logits = |q_len, k_len| [attention.batch, attention.q_heads, q_len, k_len];
        let planned = logits(plan.q_len, plan.k_len);
        check_shape(
            TensorName::Plan,
            &planned,
            &logits(attention.q_len, attention.k_len),
        )?;
        if plan.causal != attention.causal {
            return Err(AttentionError::PlanCausal {
                plan: plan.causal,
                options: attention.causal,
            });
        }
        problem.plan = Some(*plan);
        Ok(problem)
    }

    /// True if the bias is one number per key, the same for all queries.
    #[must_use]
    pub fn has_key_bias(&self) -> bool {
        (self.bias).is_some_and(|shape| shape[2] == 1 && shape[3] == self.attention.k_len)
    }

    /// True if all keys share the bias, as with one number per query. It adds the same to all logits of a row, which
    /// changes the row's LSE and nothing else: its gradient is the sum of the LSE's gradients over the rows that share
    /// it and see some key.
    #[must_use]
    pub fn has_row_bias(&self) -> bool {
        self.bias.is_some_and(|shape| shape[3] == 1)
    }

    /// Number of query heads that read one entry of axis 1 of a mask or bias: all heads, the heads of a group, or one.
    #[must_use]
    pub fn heads_each(&self, heads: usize) -> usize {
        self.attention.q_heads / heads.max(1)
    }
}

fn check_broadcast(
    tensor: TensorName,
    shape: &[usize],
    problem: &Problem,
) -> Result<[usize; 4], AttentionError> {
    let shape: [usize; 4] = rank(tensor, shape)?;
    let sizes: [&[usize]; 4] = [
        &[problem.batch],
        &[problem.q_heads, problem.kv_heads],
        &[problem.q_len],
        &[problem.k_len],
    ];
    for (axis, sizes) in sizes.into_iter().enumerate() {
        check_axis(tensor, axis, sizes, shape[axis])?;
    }
    Ok(shape)
}

/// Checks that an axis has one of these sizes, or 1.
fn check_axis(
    tensor: TensorName,
    axis: usize,
    sizes: &[usize],
    actual: usize,
) -> Result<(), AttentionError> {
    if actual == 1 || sizes.contains(&actual) {
        return Ok(());
    }
    Err(AttentionError::Broadcast {
        tensor,
        axis,
        sizes: sizes.to_vec(),
        actual,
    })
}

/// The geometry of a mask's tiles: the shape of the mask, the lengths it is broadcast to, and the causal masking on top
/// of it. A *tile plan* holds, for masks of this geometry:
///
/// - **bits** `[batch, heads, key_blocks, queries, 2]`, 32-bit integers: bit `c % 32` of word `c / 32` is set if a
///   query sees key `64 * key_block + c`, causal masking aside. The first two axes are the mask's; an axis that the
///   mask broadcasts has size 1 here, too, so nothing is materialised. Bits past the last key are 0, unless the mask
///   has one key: then there is one key block, all of whose bits are the same. Bits of pairs that causal masking hides
///   are unspecified, so an engine need not read the mask for them;
/// - **counts** `[batch, heads, query_blocks, key_blocks]`, 32-bit integers: the number of visible pairs in a block of
///   16 queries and 64 keys, causal masking included. A block is *empty* if the count is 0, *full* (and needs no test)
///   if it is the number of pairs, and otherwise *partial*.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct PlanGeometry {
    /// Shape of the mask.
    pub mask: [usize; 4],
    /// Queries per head.
    pub q_len: usize,
    /// Keys per head.
    pub k_len: usize,
    /// Bottom-right aligned causal masking on top of the mask.
    pub causal: bool,
}

impl PlanGeometry {
    /// Queries per block.
    pub const QUERY_BLOCK: usize = 16;
    /// Keys per block.
    pub const KEY_BLOCK: usize = 64;

    /// The geometry of a mask `[batch, heads, q_len | 1, k_len | 1]` for `q_len` queries and `k_len` keys.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Rank`], [`AttentionError::Broadcast`] or [`AttentionError::TooLarge`].
    pub fn new(
        mask: &[usize],
        [q_len, k_len]: [usize; 2],
        causal: bool,
    ) -> Result<Self, AttentionError> {
        let mask: [usize; 4] = rank(TensorName::Mask, mask)?;
        for (axis, what, size) in [
            (2, "the number of queries", q_len),
            (3, "the number of keys", k_len),
        ] {
            check_limit(what, size, MAX_LEN)?;
            check_axis(TensorName::Mask, axis, &[size], mask[axis])?;
        }
        Ok(Self {
            mask,
            q_len,
            k_len,
            causal,
        })
    }

    /// Shape of the `first` and `end` tensors of key ranges that represent the mask: the mask's shape, with one key.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Shape`] of the mask if it does not have all keys.
    pub fn ranges_shape(&self) -> Result<[usize; 4], AttentionError> {
        let [batch, heads, queries, _] = self.mask;
        let whole = [batch, heads, queries, self.k_len];
        check_shape(TensorName::Mask, &self.mask, &whole)?;
        Ok([batch, heads, queries, 1])
    }

    /// The geometry of a mask that shows each query a range of keys. The first keys and ends (one past the last key)
    /// are `[batch | 1, heads | 1, q_len | 1]` each.
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new), for [`TensorName::FirstKeys`] or [`TensorName::EndKeys`].
    pub fn of_ranges(
        first: &[usize],
        end: &[usize],
        [q_len, k_len]: [usize; 2],
        causal: bool,
    ) -> Result<Self, AttentionError> {
        let mut mask = [1, 1, 1, k_len];
        for (tensor, shape) in [(TensorName::FirstKeys, first), (TensorName::EndKeys, end)] {
            let shape: [usize; 3] = rank(tensor, shape)?;
            for (axis, actual) in shape.into_iter().enumerate() {
                // The number of queries is given; the other sizes are taken from the first of the two tensors.
                let expected = if axis == 2 { q_len } else { mask[axis] };
                if axis == 2 || expected != 1 {
                    check_axis(tensor, axis, &[expected], actual)?;
                }
                if actual != 1 {
                    mask[axis] = actual;
                }
            }
        }
        Self::new(&mask, [q_len, k_len], causal)
    }

    /// Shape of the bits.
    #[must_use]
    pub fn bits_shape(&self) -> [usize; 5] {
        let [batch, heads, queries, keys] = self.mask;
        [batch, heads, keys.div_ceil(Self::KEY_BLOCK), queries, 2]
    }

    /// Shape of the counts.
    #[must_use]
    pub fn counts_shape(&self) -> [usize; 4] {
        [
            self.mask[0],
            self.mask[1],
            self.q_len.div_ceil(Self::QUERY_BLOCK),
            self.k_len.div_ceil(Self::KEY_BLOCK),
        ]
    }

    /// Number of pairs in a block; blocks at the ends of the lengths have fewer.
    #[must_use]
    pub fn pairs(&self, query_block: usize, key_block: usize) -> usize {
        let rest = |len: usize, block: usize, size: usize| (len - block * size).min(size);
        rest(self.q_len, query_block, Self::QUERY_BLOCK)
            * rest(self.k_len, key_block, Self::KEY_BLOCK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const Q: [usize; 4] = [2, 4, 5, 8];
    const K: [usize; 4] = [2, 2, 7, 8];

    fn new(mask: Option<&[usize]>, bias: Option<&[usize]>) -> Result<MaskedProblem, String> {
        let options = AttentionOptions::new();
        MaskedProblem::new(&Q, &K, &K, mask, bias, ElementType::F32, &options)
            .map_err(|e| e.to_string())
    }

    #[test]
    fn every_axis_is_whole_or_one_and_heads_may_be_those_of_the_keys() {
        for batch in [1, 2] {
            for heads in [1, 2, 4] {
                for (q_len, k_len) in [(1, 1), (1, 7), (5, 1), (5, 7)] {
                    let shape = [batch, heads, q_len, k_len];
                    let p = new(Some(&shape), Some(&shape)).unwrap();
                    assert_eq!(p.bias, Some(shape));
                    assert_eq!(p.heads_each(heads) * heads, 4);
                    let kinds = (p.has_key_bias(), p.has_row_bias());
                    assert_eq!(kinds, (q_len == 1 && k_len == 7, k_len == 1));
                }
            }
        }
    }

    #[test]
    fn without_a_bias_there_is_none_of_any_kind() {
        let p = new(Some(&[1, 1, 1, 7]), None).unwrap();
        assert!(!p.has_key_bias() && !p.has_row_bias());
    }

    #[test]
    fn a_shape_that_does_not_broadcast_is_refused_by_tensor_and_axis() {
        let heads = "the mask must have size 1, 4 or 2 on axis 1, but has 3";
        assert_eq!(new(Some(&[2, 3, 5, 7]), None).unwrap_err(), heads);
        let keys = "the bias must have size 1 or 7 on axis 3, but has 6";
        assert_eq!(new(None, Some(&[2, 1, 5, 6])).unwrap_err(), keys);
        let axes = "the bias must have 4 axes, but has 2";
        assert_eq!(new(None, Some(&[5, 7])).unwrap_err(), axes);
    }

    #[test]
    fn a_plan_belongs_to_its_lengths_and_its_causal_masking() {
        let with = |plan: PlanGeometry| {
            let options = AttentionOptions::new();
            MaskedProblem::with_plan(&Q, &K, &K, &plan, None, ElementType::F32, &options)
                .map(|p| p.plan)
                .map_err(|e| e.to_string())
        };
        let plan = |q_len, k_len, causal| {
            PlanGeometry::new(&[1, 2, q_len, k_len], [q_len, k_len], causal).unwrap()
        };
        assert_eq!(with(plan(5, 7, true)), Ok(Some(plan(5, 7, true))));
        assert!(with(plan(5, 7, false)).unwrap_err().contains("causal"));
        let broadcast = PlanGeometry::new(&[1, 1, 1, 1], [6, 7], true).unwrap();
        let queries = "the tile plan must have size 5 on axis 2, but has 6";
        assert_eq!(with(broadcast).unwrap_err(), queries);
        assert!(with(plan(5, 8, true)).unwrap_err().contains("mask"));
    }

    #[test]
    fn ranges_broadcast_against_each_other() {
        let of = |first: &[usize], end: &[usize]| {
            PlanGeometry::of_ranges(first, end, [5, 7], true)
                .map(|plan| plan.mask)
                .map_err(|e| e.to_string())
        };
        assert_eq!(of(&[1, 1, 5], &[1, 1, 5]), Ok([1, 1, 5, 7]));
        assert_eq!(of(&[1, 1, 1], &[3, 1, 1]), Ok([3, 1, 1, 7]));
        assert_eq!(of(&[3, 1, 5], &[1, 2, 1]), Ok([3, 2, 5, 7]));
        assert_eq!(of(&[0, 1, 5], &[1, 2, 1]), Ok([0, 2, 5, 7]));
        let refused = |first: &[usize], end: &[usize]| of(first, end).unwrap_err();
        let text = "first of the key ranges must have size 1 or 5 on axis 2, but has 4";
        assert_eq!(refused(&[1, 1, 4], &[1, 1, 5]), text);
        let text = "end of the key ranges must have size 1 or 5 on axis 2, but has 7";
        assert_eq!(refused(&[1, 1, 5], &[1, 1, 7]), text);
        let text = "end of the key ranges must have size 1 or 2 on axis 0, but has 3";
        assert_eq!(refused(&[2, 1, 5], &[3, 1, 5]), text);
        let text = "first of the key ranges must have 3 axes, but has 2";
        assert_eq!(refused(&[2, 5], &[1, 1, 5]), text);
        let plan = PlanGeometry::of_ranges(&[3, 1, 1], &[1, 2, 5], [5, 7], true).unwrap();
        assert_eq!(plan.ranges_shape(), Ok([3, 2, 5, 1]));
        let of_one = PlanGeometry::new(&[1, 1, 5, 1], [5, 7], true).unwrap();
        let refused = of_one.ranges_shape().unwrap_err();
        let expected = AttentionError::Shape {
            tensor: TensorName::Mask,
            axis: 3,
            expected: 7,
            actual: 1,
        };
        assert_eq!(refused, expected);
        let long = PlanGeometry::of_ranges(&[1; 3], &[1; 3], [5, 1 << 31], true);
        assert!(matches!(long, Err(AttentionError::TooLarge { .. })));
    }

    #[test]
    fn broadcast_axes_stay_of_size_one_in_the_bits() {
        let plan = PlanGeometry::new(&[1, 2, 1, 130], [40, 130], true).unwrap();
        assert_eq!(plan.bits_shape(), [1, 2, 3, 1, 2]);
        assert_eq!(plan.counts_shape(), [1, 2, 3, 3]);
        assert_eq!(plan.pairs(0, 0), 16 * 64);
        assert_eq!(plan.pairs(2, 2), 8 * 2);
        let row = PlanGeometry::new(&[3, 1, 40, 1], [40, 130], false).unwrap();
        assert_eq!(row.bits_shape(), [3, 1, 1, 40, 2]);
    }
}
