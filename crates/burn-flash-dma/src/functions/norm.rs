//! RMS norm, and the encoding of the heads of q and k: validation, then one dispatch.

use crate::ops::norm::NormOps;
use crate::types::OptionalFloat;
use crate::validate::{as_f32, check_element, check_shape, computes_in, element_type, same_device};
use burn::backend::Dispatch;
use burn::tensor::Tensor;
use flash_dma_problem::{AttentionError, ElementType, NormProblem, Rotary, TensorName};

twin! {
    /// RMS norm of rows: `x / sqrt(mean of x² over the last axis + epsilon) * gamma`.
    ///
    /// | tensor | shape | type |
    /// |---|---|---|
    /// | `x`, result | `[.., width]` | f32, f16 or bf16 |
    /// | `gamma` | `[width]` | as `x`, or one of the two is f32 |
    ///
    /// One pass over memory; arithmetic is f32, rounded once. Differentiable in both; the gradient of `gamma` is
    /// summed in two stages and in a fixed order. Widths up to 8192. The parameters of Burn's `RmsNorm` fit:
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// # use burn::tensor::{Device, Distribution, Tensor};
    /// use burn::nn::RmsNormConfig;
    /// use burn_flash_dma::rms_norm;
    ///
    /// # let device = Device::flex();
    /// let norm = RmsNormConfig::new(24).init(&device);
    /// let x = Tensor::<3>::random([2, 5, 24], Distribution::Normal(0.0, 1.0), &device);
    /// let out = rms_norm(x.clone(), norm.gamma.val(), norm.epsilon as f32);
    /// let theirs = norm.forward(x);
    /// assert!((out - theirs).abs().max().into_scalar::<f32>() < 1e-5);
    /// # }
    /// ```
    pub fn rms_norm<const D: usize>(x: Tensor<D>, gamma: Tensor<1>, epsilon: f32) -> Tensor<D>
        = try_rms_norm;
}

/// Like [`rms_norm`], but returns the error.
///
/// # Errors
///
/// [`AttentionError`] if the shapes, element types or devices do not fit, the width exceeds 8192, or `epsilon` is not
/// positive and finite; nothing is computed then.
pub fn try_rms_norm<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    epsilon: f32,
) -> Result<Tensor<D>, AttentionError> {
    let problem = row_problem(&x, &gamma, epsilon)?;
    let out = Dispatch::rms_norm(x.into_dispatch(), gamma.into_dispatch(), problem);
    Ok(Tensor::from_dispatch(out))
}

twin! {
    /// `x` and its [`rms_norm`], for a block whose output is added to its input. The gradients of both are added in the pass
    /// that computes that of the norm.
    ///
    /// ```
    /// # #[cfg(all(feature = "flex", feature = "autodiff"))] {
    /// # use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_flash_dma::rms_norm_branch;
    ///
    /// # let device = Device::flex().autodiff();
    /// let x = Tensor::<3>::random([2, 5, 24], Distribution::Normal(0.0, 1.0), &device).require_grad();
    /// let gamma = Tensor::<1>::ones([24], &device);
    /// let [residual, normed] = rms_norm_branch(x.clone(), gamma, 1e-5);
    /// let out = residual + normed.tanh();
    /// assert_eq!(x.grad(&out.sum().backward()).unwrap().dims(), [2, 5, 24]);
    /// # }
    /// ```
    pub fn rms_norm_branch<const D: usize>(x: Tensor<D>, gamma: Tensor<1>, epsilon: f32) -> [Tensor<D>; 2]
        = try_rms_norm_branch;
}

/// Like [`rms_norm_branch`], but returns the error.
///
/// # Errors
///
/// See [`try_rms_norm`].
pub fn try_rms_norm_branch<const D: usize>(
    x: Tensor<D>,
    gamma: Tensor<1>,
    epsilon: f32,
) -> Result<[Tensor<D>; 2], AttentionError> {
    let problem = row_problem(&x, &gamma, epsilon)?;
    let (x, normed) = Dispatch::rms_norm_branch(x.into_dispatch(), gamma.into_dispatch(), problem);
    Ok([x, normed].map(Tensor::from_dispatch))
}

/// Heads of q or k ready for attention: RMS norm of each head, rotary encoding of neighbouring features, and heads
/// before tokens, in one pass over memory. Norm and encoding are optional.
///
/// | tensor | shape | type |
/// |---|---|---|
/// | `x` | `[batch, len, heads, head_dim]` | f32, f16 or bf16 |
/// | `gamma` | `[head_dim]` | as `x`, or one of the two is f32 |
/// | `table` | `[positions, head_dim, 2]` | f32 |
/// | result | `[batch, heads, len, head_dim]` | as `x` |
///
/// `x` may be strided, so slices of a joint product of q, k and v are read in place. The result keeps its memory
/// order, which attention also reads in place. Arithmetic is f32, rounded once. Differentiable in `x` and `gamma`.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// # use burn::tensor::{Device, Distribution, Tensor};
/// use burn::nn::{RmsNormConfig, RotaryEncodingConfig};
/// use burn_flash_dma::HeadEncoding;
///
/// # let device = Device::flex();
/// let norm = RmsNormConfig::new(16).init(&device);
/// let rope = RotaryEncodingConfig::new(64, 16).init(&device);
/// let x = Tensor::<4>::random([2, 10, 4, 16], Distribution::Normal(0.0, 1.0), &device);
/// let q = HeadEncoding::new(x.clone())
///     .norm(norm.gamma.val(), norm.epsilon as f32)
///     .rotary(rope.freq_complex.clone(), 0)
///     .forward();
/// let theirs = rope.forward(norm.forward(x).swap_dims(1, 2));
/// assert!((q - theirs).abs().max().into_scalar::<f32>() < 1e-5);
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing is computed before `forward`"]
pub struct HeadEncoding {
    x: Tensor<4>,
    norm: Option<(Tensor<1>, f32)>,
    rotary: Option<(Tensor<3>, usize)>,
}

impl HeadEncoding {
    /// Neither normalised nor rotated.
    pub fn new(x: Tensor<4>) -> Self {
        Self {
            x,
            norm: None,
            rotary: None,
        }
    }

    /// Divides each head by its root mean square, with `epsilon` added to the mean square, and multiplies by `gamma`.
    pub fn norm(mut self, gamma: Tensor<1>, epsilon: f32) -> Self {
        self.norm = Some((gamma, epsilon));
        self
    }

    /// Rotates each pair of features `(2 i, 2 i + 1)` by the angle of its token's position, from `start` on. `table`
    /// is the `freq_complex` of Burn's `RotaryEncoding`: cosine and sine of each feature's angle at each position,
    /// the same for both of a pair (f16 and bf16 are cast up). A constant under autodiff.
    pub fn rotary(mut self, table: Tensor<3>, start: usize) -> Self {
        self.rotary = Some((table, start));
        self
    }

    twin! {
        /// The encoded heads.
        pub fn forward(self) -> Tensor<4> = Self::try_forward;
    }

    /// Like [`forward`](Self::forward), but returns the error.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if the shapes, element types or devices do not fit, the head dimension is not a multiple of
    /// 8 up to 256, the positions exceed the table, or epsilon is not positive and finite; nothing is computed then,
    /// except the cast of the table.
    pub fn try_forward(self) -> Result<Tensor<4>, AttentionError> {
        let Self { x, norm, rotary } = self;
        let [element, of_gamma] = check_operands(&x, norm.as_ref().map(|(gamma, _)| gamma))?;
        let dims @ [.., head_dim] = x.dims();
        let mut angles = None;
        if let Some((table, start)) = &rotary {
            let [positions, ..] = table.dims();
            let name = TensorName::RotaryTable;
            check_shape(name, &table.dims(), &[positions, head_dim, 2])?;
            same_device(&x.device(), name, table.device())?;
            let start = *start;
            angles = Some(Rotary { positions, start });
        }
        let gamma = (norm.as_ref()).map(|(gamma, epsilon)| (gamma.dims(), *epsilon));
        let gamma = (gamma.as_ref()).map(|(dims, epsilon)| (&dims[..], *epsilon));
        let problem = NormProblem::heads(&dims, gamma, angles, element)?.with_gamma(of_gamma);
        let table = match rotary {
            None => None,
            Some((table, _)) => Some(as_f32(TensorName::RotaryTable, table)?.into_dispatch()),
        };
        let gamma = norm.map(|(gamma, _)| gamma.into_dispatch());
        let out = Dispatch::encode_heads(
            x.into_dispatch(),
            OptionalFloat::from_option(gamma),
            OptionalFloat::from_option(table),
            problem,
        );
        Ok(Tensor::from_dispatch(out))
    }
}

/// The problem of [`try_rms_norm`], or its error.
fn row_problem<const D: usize>(
    x: &Tensor<D>,
    gamma: &Tensor<1>,
    epsilon: f32,
) -> Result<NormProblem, AttentionError> {
    let [element, of_gamma] = check_operands(x, Some(gamma))?;
    let problem = NormProblem::rows(&x.dims(), &gamma.dims(), element, epsilon)?;
    Ok(problem.with_gamma(of_gamma))
}

/// Element types of `x`, which its device supports, and of `gamma`, without one that of `x`; refused if `gamma` is of the other
/// 16-bit type, or on another device.
fn check_operands<const D: usize>(
    x: &Tensor<D>,
    gamma: Option<&Tensor<1>>,
) -> Result<[ElementType; 2], AttentionError> {
    let element = element_type(TensorName::Tokens, x)?;
    computes_in(&x.device(), x.dtype(), element)?;
    let Some(gamma) = gamma else {
        return Ok([element; 2]);
    };
    let of_gamma = check_gamma(x, gamma)?;
    same_device(&x.device(), TensorName::NormWeight, gamma.device())?;
    Ok([element, of_gamma])
}

/// Element type of `gamma`; refused with tokens of a type that its norm does not take.
pub(crate) fn check_gamma<const D: usize>(
    x: &Tensor<D>,
    gamma: &Tensor<1>,
) -> Result<ElementType, AttentionError> {
    let of_x = element_type(TensorName::Tokens, x)?;
    let of_gamma = element_type(TensorName::NormWeight, gamma)?;
    if ![of_x, of_gamma].contains(&ElementType::F32) {
        // A norm belongs to a layer, which has one type: the tokens are at fault.
        check_element(TensorName::Tokens, x, of_gamma)?;
    }
    Ok(of_gamma)
}
