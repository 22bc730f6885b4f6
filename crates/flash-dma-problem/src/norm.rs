//! RMS norm of rows, and rotary encoding of heads.

use crate::element::ElementType;
use crate::error::{AttentionError, TensorName};
use crate::problem::{MAX_BYTES, check_head_dim, check_limit, check_shape, rank, size_in_bytes};

/// The most features of a row of [`NormProblem::rows`].
pub const MAX_NORM_WIDTH: usize = 8192;

/// The rows of a rotary table that the tokens use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotary {
    /// Number of positions in the table.
    pub positions: usize,
    /// The position of the first token.
    pub start: usize,
}

/// RMS norm and rotary encoding, both optional, of rows `[batch, len, heads, width]` to `[batch, heads, len, width]`.
///
/// ```text
/// normal = x / sqrt(mean of x² + epsilon) * gamma
/// out[2 i]     = normal[2 i] * cos[i] - normal[2 i + 1] * sin[i]
/// out[2 i + 1] = normal[2 i + 1] * cos[i] + normal[2 i] * sin[i]
/// ```
///
/// Only [`rows`](Self::rows) and [`heads`](Self::heads) make one, so it is valid.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct NormProblem {
    /// Sequences.
    pub batch: usize,
    /// Tokens per sequence.
    pub len: usize,
    /// Rows per token.
    pub heads: usize,
    /// Features per row.
    pub width: usize,
    /// Element type of all tensors except gamma, its gradient and the angles, which are f32.
    pub element: ElementType,
    /// Element type of gamma and of its gradient: [`element`](Self::element) unless
    /// [`with_gamma`](Self::with_gamma) says otherwise.
    pub gamma: ElementType,
    /// Epsilon of the norm, added to the mean square; `None` without a norm.
    pub epsilon: Option<f32>,
    /// Rotary encoding; `None` without.
    pub rotary: Option<Rotary>,
}

impl NormProblem {
    /// The RMS norm of rows: `x` is `[.., width]`, `gamma` `[width]`. All rows count as tokens of one sequence and one
    /// head.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if a shape does not fit, the width exceeds [`MAX_NORM_WIDTH`] or `epsilon` is refused.
    pub fn rows(
        x: &[usize],
        gamma: &[usize],
        element: ElementType,
        epsilon: f32,
    ) -> Result<Self, AttentionError> {
        let Some((&width, outer)) = x.split_last() else {
            return Err(AttentionError::Rank {
                tensor: TensorName::Tokens,
                expected: 1,
                actual: 0,
            });
        };
        check_limit("the number of features of a row", width, MAX_NORM_WIDTH)?;
        let rows = (outer.iter()).fold(1usize, |rows, &n| rows.saturating_mul(n));
        Self {
            batch: 1,
            len: rows,
            heads: 1,
            width,
            element,
            gamma: element,
            epsilon: Some(epsilon),
            rotary: None,
        }
        .checked(Some(gamma))
    }

    /// The norm and rotary encoding of q's or k's heads: `x` is `[batch, len, heads, head_dim]`, `gamma` `[head_dim]`.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if a shape or the head dimension does not fit, `epsilon` is refused, or the positions exceed
    /// those of the table.
    pub fn heads(
        x: &[usize],
        norm: Option<(&[usize], f32)>,
        rotary: Option<Rotary>,
        element: ElementType,
    ) -> Result<Self, AttentionError> {
        let [batch, len, heads, width] = rank(TensorName::Tokens, x)?;
        check_head_dim(width)?;
        if let Some(Rotary { positions, start }) = rotary {
            let end = start.saturating_add(len);
            check_limit("the end of the rotary positions", end, positions)?;
        }
        Self {
            batch,
            len,
            heads,
            width,
            element,
            gamma: element,
            epsilon: norm.map(|(_, epsilon)| epsilon),
            rotary,
        }
        .checked(norm.map(|(gamma, _)| gamma))
    }

    /// The problem with a gamma of this type: that of a layer is often kept in f32, and its gradient is a sum over all rows.
    #[must_use]
    pub fn with_gamma(self, gamma: ElementType) -> Self {
        Self { gamma, ..self }
    }

    fn checked(self, gamma: Option<&[usize]>) -> Result<Self, AttentionError> {
        if let Some(gamma) = gamma {
            check_shape(TensorName::NormWeight, gamma, &[self.width])?;
        }
        if let Some(epsilon) = self.epsilon
            && !(epsilon.is_finite() && epsilon > 0.0)
        {
            return Err(AttentionError::Epsilon { epsilon });
        }
        let bytes = size_in_bytes(self.element, self.x_shape());
        check_limit("the size of x in bytes", bytes, MAX_BYTES)?;
        Ok(self)
    }

    /// The number of rows.
    #[must_use]
    pub fn row_count(&self) -> usize {
        self.batch * self.len * self.heads
    }

    /// True if there is nothing to compute.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.row_count() * self.width == 0
    }

    /// Shape of `x` and of its gradient.
    #[must_use]
    pub fn x_shape(&self) -> [usize; 4] {
        [self.batch, self.len, self.heads, self.width]
    }

    /// Shape of the output and of its gradient.
    #[must_use]
    pub fn out_shape(&self) -> [usize; 4] {
        [self.batch, self.heads, self.len, self.width]
    }

    /// Shape of the rotary table, the cosine and sine of each pair of features; `None` without rotary encoding.
    #[must_use]
    pub fn table_shape(&self) -> Option<[usize; 3]> {
        (self.rotary).map(|rotary| [rotary.positions, self.width / 2, 2])
    }
}
