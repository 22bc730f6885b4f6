//! One attention problem: its sizes and the resolved options, checked.

use crate::dropout::{self, Dropout};
use crate::{AlibiSlopes, AttentionError, AttentionOptions, ElementType, EngineChoice, TensorName};

/// The greatest head dimension an engine must support.
pub const MAX_HEAD_DIM: usize = 256;

/// The greatest length of a sequence: positions are signed 32-bit numbers.
pub(crate) const MAX_LEN: usize = i32::MAX as usize;

pub(crate) const MAX_BYTES: usize = isize::MAX as usize;

/// Shape and strides of one tensor, in elements, and its name for errors.
#[derive(Clone, Copy, Debug)]
pub struct TensorSpec<'a> {
    /// The tensor's name.
    pub name: TensorName,
    /// Size of each axis.
    pub shape: &'a [usize],
    /// Stride of each axis, in elements.
    pub strides: &'a [usize],
}

impl TensorSpec<'_> {
    /// Checks the number of axes, the sizes, and that the last axis is contiguous.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Rank`], [`AttentionError::Shape`] or [`AttentionError::Strides`].
    pub fn check(&self, expected: &[usize]) -> Result<(), AttentionError> {
        check_shape(self.name, self.shape, expected)?;
        let last = self.shape.len() - 1;
        // The stride of an axis of one element is never used, nor is any of an empty tensor.
        if self.shape[last] > 1 && self.strides[last] != 1 && !self.shape.contains(&0) {
            return Err(AttentionError::Strides {
                tensor: self.name,
                strides: self.strides.to_vec(),
            });
        }
        Ok(())
    }

    /// Elements a buffer needs for this shape and these strides; 0 for an empty tensor. `None` if it overflows `usize`.
    #[must_use]
    pub fn required_len(&self) -> Option<usize> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        self.shape
            .iter()
            .zip(self.strides)
            .try_fold(1usize, |end, (&n, &s)| {
                end.checked_add((n - 1).checked_mul(s)?)
            })
    }
}

/// Row-major strides of a contiguous tensor, from the first axis to the last. An empty axis counts as one of a single
/// element, as its stride is never used.
pub fn contiguous_strides(shape: &[usize]) -> impl ExactSizeIterator<Item = usize> {
    (0..shape.len()).map(|axis| {
        let inner = shape[axis + 1..].iter();
        inner.fold(1usize, |stride, &n| stride.saturating_mul(n.max(1)))
    })
}

/// Checks a shape against the one that its role requires.
pub(crate) fn check_shape(
    tensor: TensorName,
    actual: &[usize],
    expected: &[usize],
) -> Result<(), AttentionError> {
    if actual.len() != expected.len() {
        return Err(AttentionError::Rank {
            tensor,
            expected: expected.len(),
            actual: actual.len(),
        });
    }
    match (0..expected.len()).find(|&axis| actual[axis] != expected[axis]) {
        None => Ok(()),
        Some(axis) => Err(AttentionError::Shape {
            tensor,
            axis,
            expected: expected[axis],
            actual: actual[axis],
        }),
    }
}

/// Sizes and resolved options of one valid problem. Only [`Problem::new`] creates one, so an engine may rely on them.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Problem {
    /// Sequences.
    pub batch: usize,
    /// Heads of `q` and `out`.
    pub q_heads: usize,
    /// Heads of `k`, `v` and `scores`; divides `q_heads`.
    pub kv_heads: usize,
    /// Queries per head; may be 0.
    pub q_len: usize,
    /// Keys per head; may be 0.
    pub k_len: usize,
    /// Elements per row, a multiple of 8 up to [`MAX_HEAD_DIM`].
    pub head_dim: usize,
    /// Element type of `q`, `k`, `v`.
    pub element: ElementType,
    /// True if keys are selected by scores, which are added to the logits.
    pub has_scores: bool,
    /// True if the backward pass computes the gradient of the scores; never without them.
    pub scores_learn: bool,
    /// The most keys that are alive at one position: how many each query keeps, or the stated bound for given
    /// intervals; `usize::MAX` if none was requested. Lists of keys are sized by it.
    pub window: usize,
    /// Bottom-right aligned causal masking.
    pub causal: bool,
    /// Factor on `q . k`.
    pub scale: f32,
    /// Cap of the scaled product.
    pub softcap: Option<f32>,
    /// Slopes of ALiBi, one per query head.
    pub alibi: Option<AlibiSlopes>,
    /// True if results must be bit-equal over repeats.
    pub deterministic: bool,
    /// Dropout of the attention probabilities; never with a threshold of 0.
    pub dropout: Option<Dropout>,
    /// The engine of both passes.
    pub engine: EngineChoice,
}

impl Problem {
    /// Checks the shapes of the inputs against each other and resolves the options.
    ///
    /// Shapes are those of the crate's table; `scores` is `None` for plain attention.
    ///
    /// # Errors
    ///
    /// Any variant of [`AttentionError`] about shapes, heads, sizes or options. Element types, devices and strides are
    /// checked where they are known.
    pub fn new(
        q: &[usize],
        k: &[usize],
        v: &[usize],
        scores: Option<&[usize]>,
        element: ElementType,
        options: &AttentionOptions,
    ) -> Result<Self, AttentionError> {
        let [batch, q_heads, q_len, head_dim] = rank(TensorName::Query, q)?;
        let [_, kv_heads, k_len, _] = rank(TensorName::Key, k)?;
        if kv_heads == 0 || q_heads == 0 || !q_heads.is_multiple_of(kv_heads) {
            return Err(AttentionError::HeadRatio { q_heads, kv_heads });
        }
        let kv_shape = [batch, kv_heads, k_len, head_dim];
        check_shape(TensorName::Key, k, &kv_shape)?;
        check_shape(TensorName::Value, v, &kv_shape)?;
        if let Some(scores) = scores {
            check_shape(TensorName::Scores, scores, &kv_shape[..3])?;
        }
        check_head_dim(head_dim)?;
        check_limit("the number of queries", q_len, MAX_LEN)?;
        check_limit("the number of keys", k_len, MAX_LEN)?;
        // Buffers are addressed by `usize`, byte sizes included.
        let q_bytes = size_in_bytes(element, [batch, q_heads, q_len, head_dim]);
        check_limit("the size of q in bytes", q_bytes, MAX_BYTES)?;
        let k_bytes = size_in_bytes(element, kv_shape);
        check_limit("the size of k in bytes", k_bytes, MAX_BYTES)?;
        let window = resolve_window(options.keep_window, scores.is_some())?;
        let scale = check_options(options, head_dim)?;
        if let Some(slopes) = options.alibi.map(|slopes| slopes.values().len())
            && slopes != q_heads
        {
            return Err(AttentionError::AlibiHeads { slopes, q_heads });
        }
        Ok(Self {
            batch,
            q_heads,
            kv_heads,
            q_len,
            k_len,
            head_dim,
            element,
            has_scores: scores.is_some(),
            scores_learn: scores.is_some(),
            window,
            causal: options.causal,
            scale,
            softcap: options.softcap,
            alibi: options.alibi,
            deterministic: options.deterministic,
            dropout: options.dropout.and_then(Dropout::effective),
            engine: options.engine,
        })
    }

    /// The same with scores that are constant, if it has any: the backward pass leaves their gradient out.
    #[must_use]
    pub fn with_constant_scores(self) -> Self {
        Self {
            scores_learn: false,
            ..self
        }
    }

    /// Query heads that share a key/value head.
    #[must_use]
    pub fn group(&self) -> usize {
        self.q_heads / self.kv_heads
    }

    /// The position of query `i`: the index of the last key it may see, negative if it sees none.
    #[must_use]
    pub fn position(&self, query: usize) -> i64 {
        if self.causal {
            query as i64 + self.k_len as i64 - self.q_len as i64
        } else {
            self.k_len as i64 - 1
        }
    }

    /// Shape of `q`, `out` and their gradients.
    #[must_use]
    pub fn q_shape(&self) -> [usize; 4] {
        [self.batch, self.q_heads, self.q_len, self.head_dim]
    }

    /// Shape of `k`, `v` and their gradients.
    #[must_use]
    pub fn kv_shape(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.k_len, self.head_dim]
    }

    /// Shape of the scores and their gradient.
    #[must_use]
    pub fn scores_shape(&self) -> [usize; 3] {
        [self.batch, self.kv_heads, self.k_len]
    }

    /// Shape of the intervals: first and end on the last axis.
    #[must_use]
    pub fn intervals_shape(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.k_len, 2]
    }

    /// Shape of the residual of `out`, which is what rounding to 16 bits loses. `None` for f32, where nothing is lost.
    #[must_use]
    pub fn residual_shape(&self) -> Option<[usize; 4]> {
        (self.element != ElementType::F32).then(|| self.q_shape())
    }

    /// Shape of the LSE.
    #[must_use]
    pub fn lse_shape(&self) -> [usize; 3] {
        [self.batch, self.q_heads, self.q_len]
    }
}

impl Problem {
    /// The distance between a query and a key, `|query + k_len - q_len - key|`, which [`AlibiSlopes`] multiply.
    #[must_use]
    pub fn distance(&self, query: usize, key: usize) -> usize {
        (query + self.k_len).abs_diff(self.q_len + key)
    }

    /// The ALiBi slope of a query head; `None` without ALiBi.
    #[must_use]
    pub fn slope(&self, q_head: usize) -> Option<f32> {
        self.alibi.map(|slopes| slopes.values()[q_head])
    }

    /// The position of query `i` in a dropout mask: the last query is at the last key, with causal masking and without.
    /// Negative positions wrap.
    #[must_use]
    pub fn dropout_position(&self, query: usize) -> u32 {
        (query as u32)
            .wrapping_add(self.k_len as u32)
            .wrapping_sub(self.q_len as u32)
    }

    /// The factors of the probabilities of one query of one head; 1 without dropout. `head` is as for
    /// [`PairMask::head_word`](crate::dropout::PairMask::head_word).
    pub fn dropout_weights(&self, head: usize, query: usize) -> impl Fn(usize) -> f32 + use<> {
        let mask = self.dropout.map(Dropout::mask);
        let position = self.dropout_position(query);
        let row = mask.map(|mask| dropout::row_word(mask.head_word(head), position));
        move |key| match (mask, row) {
            (Some(mask), Some(row)) => {
                mask.weight(row, dropout::column_word(mask.columns, key as u32))
            }
            _ => 1.0,
        }
    }
}

/// The sizes of a tensor of `R` axes.
pub(crate) fn rank<const R: usize>(
    tensor: TensorName,
    shape: &[usize],
) -> Result<[usize; R], AttentionError> {
    shape.try_into().map_err(|_| AttentionError::Rank {
        tensor,
        expected: R,
        actual: shape.len(),
    })
}

/// Refuses a head dimension that is not a multiple of 8 from 8 to [`MAX_HEAD_DIM`].
pub(crate) fn check_head_dim(head_dim: usize) -> Result<(), AttentionError> {
    if head_dim == 0 || head_dim > MAX_HEAD_DIM || !head_dim.is_multiple_of(8) {
        return Err(AttentionError::HeadDim { head_dim });
    }
    Ok(())
}

/// Bytes of a tensor, saturating.
pub(crate) fn size_in_bytes(element: ElementType, shape: [usize; 4]) -> usize {
    (shape.iter()).fold(element.size(), |size, &n| size.saturating_mul(n))
}

/// Checks the scale and the softcap; returns the scale.
pub(crate) fn check_options(
    options: &AttentionOptions,
    head_dim: usize,
) -> Result<f32, AttentionError> {
    let scale = options.scale.unwrap_or(1.0 / (head_dim as f32).sqrt());
    if !scale.is_finite() {
        return Err(AttentionError::Scale { scale });
    }
    match options.softcap {
        Some(softcap) if !(softcap.is_finite() && softcap > 0.0) => {
            Err(AttentionError::Softcap { softcap })
        }
        _ => Ok(scale),
    }
}

pub(crate) fn check_limit(
    what: &'static str,
    size: usize,
    limit: usize,
) -> Result<(), AttentionError> {
    if size > limit {
        return Err(AttentionError::TooLarge { what, size, limit });
    }
    Ok(())
}

fn resolve_window(window: Option<usize>, has_scores: bool) -> Result<usize, AttentionError> {
    match window {
        None => Ok(usize::MAX),
        Some(0) => Err(AttentionError::ZeroWindow),
        Some(_) if !has_scores => Err(AttentionError::WindowWithoutScores),
        Some(window) => Ok(window),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(
        q: [usize; 4],
        k: [usize; 4],
        options: AttentionOptions,
    ) -> Result<Problem, AttentionError> {
        Problem::new(&q, &k, &k, Some(&k[..3]), ElementType::Bf16, &options)
    }

    #[test]
    fn causal_positions_are_aligned_bottom_right() {
        let p = new([1, 2, 3, 8], [1, 1, 5, 8], AttentionOptions::new()).unwrap();
        assert_eq!((0..3).map(|i| p.position(i)).collect::<Vec<_>>(), [2, 3, 4]);
        let p = new([1, 2, 5, 8], [1, 1, 3, 8], AttentionOptions::new()).unwrap();
        assert_eq!(p.position(0), -2);
        let full = AttentionOptions::new().with_causal(false);
        let p = new([1, 2, 5, 8], [1, 1, 3, 8], full).unwrap();
        assert_eq!(p.position(0), 2);
    }

    #[test]
    fn sizes_past_the_index_type_are_refused_without_allocating() {
        let long = 1usize << 31;
        let new = |q, k| new(q, k, AttentionOptions::new());
        let error = new([1, 1, 4, 8], [1, 1, long, 8]).unwrap_err();
        assert!(matches!(error, AttentionError::TooLarge { size, .. } if size == long));
        let error = new([1 << 30, 1 << 20, 1 << 30, 8], [1 << 30, 1, 4, 8]).unwrap_err();
        assert!(matches!(error, AttentionError::TooLarge { .. }));
        // 2^33 elements are fine: they are addressed by 64 bits.
        assert!(new([1, 32, 1 << 21, 128], [1, 8, 1 << 21, 128]).is_ok());
    }

    #[test]
    fn bad_problems_name_what_is_wrong() {
        let ok = [1, 2, 3, 8];
        let o = AttentionOptions::new;
        let text = |r: Result<Problem, AttentionError>| r.unwrap_err().to_string();
        let dims = "k must have size 8 on axis 3, but has 16";
        assert_eq!(text(new(ok, [1, 2, 3, 16], o())), dims);
        let heads = "the 3 query heads are no positive multiple of the 2 key/value heads";
        assert_eq!(text(new([1, 3, 3, 8], ok, o())), heads);
        let window = "the keep window must be at least 1";
        assert_eq!(text(new(ok, ok, o().with_keep_window(0))), window);
        assert!(text(new([1, 2, 3, 12], [1, 2, 3, 12], o())).contains("12 is not supported"));
        assert!(text(new(ok, ok, o().with_softcap(0.0))).contains("softcap"));
        assert!(text(new(ok, ok, o().with_scale(f32::NAN))).contains("scale"));
        let plain = |q, options| Problem::new(q, &ok, &ok, None, ElementType::F32, &options);
        let p = plain(&ok[..3], o());
        assert_eq!(text(p), "q must have 4 axes, but has 3");
        let p = plain(&ok, o().with_keep_window(3));
        assert_eq!(text(p), "a keep window needs scores to rank the keys by");
    }

    #[test]
    fn a_spec_checks_its_last_axis_and_its_reach() {
        let spec = |strides| TensorSpec {
            name: TensorName::Query,
            shape: &[2, 3, 4],
            strides,
        };
        assert!(spec(&[12, 4, 1]).check(&[2, 3, 4]).is_ok());
        let strided = spec(&[1, 2, 6]).check(&[2, 3, 4]);
        assert!(matches!(strided, Err(AttentionError::Strides { .. })));
        let empty = TensorSpec {
            shape: &[2, 0, 4],
            ..spec(&[0, 0, 8])
        };
        assert!(empty.check(&[2, 0, 4]).is_ok());
        assert_eq!(spec(&[100, 10, 1]).required_len(), Some(124));
        assert_eq!(spec(&[usize::MAX, 10, 1]).required_len(), None);
    }
}
