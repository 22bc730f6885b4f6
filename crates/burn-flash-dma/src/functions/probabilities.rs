//! Attention probabilities of chosen queries.

use super::attention::Attention;
use super::masked::{Mask, MaskedAttention};
use super::packed::{Call, PackedAttention};
use super::selector::try_select;
use crate::fallback::running::arange;
use crate::fallback::tensors::{constant, ints, unless_empty};
use burn::tensor::{Bool, DType, Device, FloatDType, Int, Tensor, TensorData};
use flash_dma_problem::{AttentionError, ElementType, Problem};

impl<S> Attention<S> {
    twin! {
        /// Attention probabilities of the queries `rows`, `[batch, q_heads, rows, k_len]` in f32, off the graph. A
        /// key that is not attended has exactly 0; the others of a query add up to 1 up to rounding.
        ///
        /// ```
        /// # #[cfg(feature = "flex")] {
        /// use burn::tensor::{Device, Distribution, Tensor};
        /// use burn_flash_dma::{Attention, AttentionOptions};
        ///
        /// let device = Device::flex();
        /// let random = |heads| Tensor::<4>::random([1, heads, 100, 16], Distribution::Default, &device);
        /// let scores = Tensor::<3>::random([1, 2, 100], Distribution::Default, &device);
        /// let call = Attention::new(random(4), random(2), random(2)).scores(scores);
        /// let call = call.options(AttentionOptions::new().with_keep_window(8));
        ///
        /// // Probabilities of the last two queries: each attends to 8 keys.
        /// let p = call.probabilities(&[98, 99]);
        /// assert_eq!(p.dims(), [1, 4, 2, 100]);
        /// let attended = p.clone().greater_elem(0.0).int().sum_dim(3);
        /// assert!(attended.equal_elem(8).all().into_scalar::<bool>());
        /// assert!((p.sum_dim(3) - 1.0).abs().max().into_scalar::<f32>() < 1e-5);
        /// # }
        /// ```
        ///
        /// Memory and work grow with the number of rows, not with `q_len`: a few times the result, and k in f32.
        /// Without given intervals the keys are selected again.
        pub fn probabilities(self, rows: &[usize]) -> Tensor<4> = Self::try_probabilities;
    }

    /// Like [`probabilities`](Self::probabilities), but returns the error.
    ///
    /// # Errors
    ///
    /// Errors of [`try_forward`](Self::try_forward), and [`AttentionError::TooLarge`] if a query does not exist;
    /// nothing is computed then.
    pub fn try_probabilities(self, rows: &[usize]) -> Result<Tensor<4>, AttentionError> {
        let (call, problem) = self.checked()?;
        let [q, k, _] = call.rows;
        let device = q.device();
        let Some(chosen) = ChosenRows::try_new([q, k], rows, &problem)? else {
            return Ok(none(rows.len(), &problem, &device));
        };
        let intervals = match (&call.scores, call.intervals) {
            (Some(scores), None) => Some(try_select(scores.clone(), problem.window)?),
            (_, intervals) => intervals,
        };
        let shown = intervals.map(|intervals| intervals.visible_at(chosen.positions()));
        let bias = call.scores.map(|scores| constant(scores).unsqueeze_dim(2));
        Ok(chosen.probabilities(shown, bias))
    }
}

impl<M> MaskedAttention<M> {
    twin! {
        /// Attention probabilities of the queries `rows`, `[batch, q_heads, rows, k_len]` in f32: see
        /// [`Attention::probabilities`].
        pub fn probabilities(self, rows: &[usize]) -> Tensor<4> = Self::try_probabilities;
    }

    /// Like [`probabilities`](Self::probabilities), but returns the error.
    ///
    /// # Errors
    ///
    /// Errors of [`try_forward`](Self::try_forward) and [`Attention::try_probabilities`].
    pub fn try_probabilities(self, rows: &[usize]) -> Result<Tensor<4>, AttentionError> {
        let (call, problem) = self.checked()?;
        let ([q, k, _], problem) = (call.rows, &problem.attention);
        let device = q.device();
        let Some(chosen) = ChosenRows::try_new([q, k], rows, problem)? else {
            return Ok(none(rows.len(), problem, &device));
        };
        let shown = call.mask.map(|mask| match mask {
            Mask::Tensor(mask) => mask.into_visible_rows(rows),
            Mask::Plan(plan) => plan.visible_rows(chosen.indices.clone()),
        });
        let bias = call.bias.map(constant).map(|bias| match bias.dims()[2] {
            1 => bias,
            _ => bias.select(2, chosen.indices.clone()),
        });
        Ok(chosen.probabilities(shown, bias))
    }
}

impl<S> PackedAttention<S> {
    twin! {
        /// Attention probabilities of the queries `rows`, counted over all documents, `[q_heads, rows, total_k]` in
        /// f32: see [`Attention::probabilities`].
        pub fn probabilities(self, rows: &[usize]) -> Tensor<3> = Self::try_probabilities;
    }

    /// Like [`probabilities`](Self::probabilities), but returns the error.
    ///
    /// # Errors
    ///
    /// Errors of [`try_forward`](Self::try_forward) and [`Attention::try_probabilities`].
    pub fn try_probabilities(self, rows: &[usize]) -> Result<Tensor<3>, AttentionError> {
        let p = match self.call()? {
            Call::Attention(attention) => attention.try_probabilities(rows)?,
            Call::Masked(attention) => attention.try_probabilities(rows)?,
        };
        let [_, heads, queries, keys] = p.dims();
        let view = |p: Tensor<4>| p.squeeze_dim(0);
        Ok(unless_empty(p, [heads, queries, keys], view))
    }
}

/// Some queries of a checked call, off the graph.
struct ChosenRows {
    /// `[batch, q_heads, rows, head_dim]`.
    q: Tensor<4>,
    /// `[batch, kv_heads, k_len, head_dim]`.
    k: Tensor<4>,
    /// `[rows]`, i32.
    indices: Tensor<1, Int>,
    problem: Problem,
}

impl ChosenRows {
    /// `None` if there is nothing to compute.
    fn try_new(
        [q, k]: [Tensor<4>; 2],
        rows: &[usize],
        problem: &Problem,
    ) -> Result<Option<Self>, AttentionError> {
        let device = q.device();
        if let Some(&row) = rows.iter().find(|&&row| row >= problem.q_len) {
            return Err(AttentionError::TooLarge {
                what: "the index of a query",
                size: row,
                limit: problem.q_len.saturating_sub(1),
            });
        }
        if rows.is_empty() || problem.batch * problem.q_heads * problem.k_len == 0 {
            return Ok(None);
        }
        let indices = rows.iter().map(|&row| row as i32).collect();
        let indices = ints(indices, [rows.len()], &device);
        Ok(Some(Self {
            q: constant(q).select(2, indices.clone()),
            k: constant(k),
            indices,
            problem: *problem,
        }))
    }

    /// Index of the last key that each query may see, `[rows]` i32.
    fn positions(&self) -> Tensor<1, Int> {
        let Problem { q_len, k_len, .. } = self.problem;
        match self.problem.causal {
            true => self.indices.clone() + (k_len as i64 - q_len as i64),
            false => self.indices.zeros_like() + (k_len as i64 - 1),
        }
    }

    /// The probabilities under a mask `shown` and a bias, both `[batch | 1, q_heads | kv_heads | 1, rows | 1, k_len |
    /// 1]`, and causal masking.
    fn probabilities(self, shown: Option<Tensor<4, Bool>>, bias: Option<Tensor<4>>) -> Tensor<4> {
        let p = self.problem;
        let (positions, device) = (self.positions(), self.q.device());
        let ([rows], k_len) = (self.indices.dims(), p.k_len);
        let pairs = [p.batch, p.kv_heads, p.group(), rows, k_len];
        let keys = arange(0..k_len as i64, (&device, DType::I32));
        let keys = keys.reshape([1, 1, 1, 1, k_len]).expand(pairs);
        let mut hidden = keys.greater(positions.reshape([1, 1, 1, rows, 1]).expand(pairs));
        if let Some(shown) = shown {
            let axes = grouped(shown.dims(), &p);
            hidden = hidden.bool_or(shown.bool_not().reshape(axes).expand(pairs));
        }
        let alibi = self.alibi();
        let mut logits = self.products() * p.scale;
        if let Some(cap) = p.softcap {
            logits = (logits / cap).tanh() * cap;
        }
        if let Some(alibi) = alibi {
            logits = logits + alibi;
        }
        if let Some(bias) = bias {
            let axes = grouped(bias.dims(), &p);
            logits = logits + bias.cast(DType::F32).reshape(axes);
        }
        let logits = logits.mask_fill(hidden.clone(), f32::NEG_INFINITY);
        // Subtracting an LSE would add its rounding to every probability.
        let max = logits.clone().max_dim(4);
        let none = max.clone().equal_elem(f32::NEG_INFINITY);
        let max = max.mask_fill(none, 0.0);
        let weights = (logits - max).exp().mask_fill(hidden.clone(), 0.0);
        let sum = weights.clone().sum_dim(4);
        let nothing = sum.clone().equal_elem(0.0).expand(pairs);
        let probabilities = (weights / sum).mask_fill(hidden.bool_or(nothing), 0.0);
        probabilities.reshape([p.batch, p.q_heads, rows, k_len])
    }

    /// ALiBi bias of the logits, `[1, kv_heads, group, rows, k_len]`.
    fn alibi(&self) -> Option<Tensor<5>> {
        let p = self.problem;
        let slopes = p.alibi?.values();
        let device = self.q.device();
        let keys = arange(0..p.k_len as i64, (&device, DType::I32));
        let places = self.indices.clone() + (p.k_len as i64 - p.q_len as i64);
        let distances: Tensor<2, Int> = places.unsqueeze_dim::<2>(1) - keys.unsqueeze_dim::<2>(0);
        let distances = distances.abs().cast(FloatDType::F32);
        let slopes = Tensor::<1>::from_data(TensorData::from(slopes), (&device, DType::F32));
        let slopes = slopes.reshape([1, p.kv_heads, p.group(), 1, 1]);
        Some(slopes.neg() * distances.unsqueeze::<5>())
    }

    /// Products of the queries and all keys, `[batch, kv_heads, group, rows, k_len]`, in true f32: the device's
    /// matrix products may be TF32, which is exact for 16-bit numbers but not for f32.
    fn products(self) -> Tensor<5> {
        let p = self.problem;
        let ([rows], group) = (self.indices.dims(), p.group());
        let k = self.k.cast(DType::F32);
        let q = self.q.cast(DType::F32);
        if p.element != ElementType::F32 {
            let q = q.reshape([p.batch, p.kv_heads, group * rows, p.head_dim]);
            let products = q.matmul(k.swap_dims(2, 3));
            return products.reshape([p.batch, p.kv_heads, group, rows, p.k_len]);
        }
        // The terms of all rows at once would take `rows` times the memory of k.
        let q = q.reshape([p.batch, p.kv_heads, group, rows, 1, p.head_dim]);
        let k = k.reshape([p.batch, p.kv_heads, 1, 1, p.k_len, p.head_dim]);
        let row = |row| {
            let terms: Tensor<6> = q.clone().narrow(3, row, 1) * k.clone();
            terms.sum_dim(5).squeeze_dim(5)
        };
        Tensor::cat((0..rows).map(row).collect(), 3)
    }
}

fn none(rows: usize, problem: &Problem, device: &Device) -> Tensor<4> {
    let shape = [problem.batch, problem.q_heads, rows, problem.k_len];
    Tensor::zeros(shape, (device, DType::F32))
}

/// Splits the head axis of a mask or a bias by group.
fn grouped([batch, heads, rows, keys]: [usize; 4], problem: &Problem) -> [usize; 5] {
    let (heads, group) = match heads == problem.q_heads {
        true => (problem.kv_heads, problem.group()),
        false => (heads, 1),
    };
    [batch, heads, group, rows, keys]
}
