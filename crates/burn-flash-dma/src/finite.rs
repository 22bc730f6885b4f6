//! Finding the source of a NaN or an infinity: checks of tensors by name.
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn::tensor::{Device, Tensor};
//! use burn_flash_dma::finite::{FiniteError, Kind, try_check_finite};
//!
//! let out = Tensor::<2>::from_floats([[1.0, 2.0], [0.5, f32::NAN]], &Device::flex());
//! let error = try_check_finite(&out, "out", 120).unwrap_err();
//! assert_eq!(
//!     error.to_string(),
//!     "out is not finite in step 120: NaN in row [1], at [1, 1], the first of 1 of 4 elements"
//! );
//! let FiniteError::NonFinite(found) = error else { panic!("the device works") };
//! assert_eq!((found.row(), found.kind), (&[1][..], Kind::Nan));
//! # }
//! ```
//!
//! [`FiniteChecks`] takes several tensors and waits for the device once. A check computes on the device and reads
//! three numbers per tensor, but it does wait: use it to find a fault, not in every step of a run.

use crate::fallback::running::arange;
use burn::tensor::{DType, Device, Int, Tensor};

/// Kind of a number that is not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Not a number.
    Nan,
    /// +∞.
    Infinity,
    /// −∞.
    NegativeInfinity,
}

/// First element of a tensor that is not finite, in row-major order.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NonFinite {
    /// Name of the tensor in the check.
    pub tensor: String,
    /// Step of the check.
    pub step: usize,
    /// Index of the element, one number per axis.
    pub index: Vec<usize>,
    /// Kind of the element.
    pub kind: Kind,
    /// Number of elements that are not finite, without −∞ if the check allows it.
    pub count: usize,
    /// Number of elements of the tensor.
    pub elements: usize,
}

impl NonFinite {
    /// Index of the element's row: without the last axis.
    #[must_use]
    pub fn row(&self) -> &[usize] {
        &self.index[..self.index.len() - 1]
    }
}

/// Failure of a check.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FiniteError {
    /// An element is not finite.
    #[error(
        "{} is not finite in step {}: {} in row {:?}, at {:?}, the first of {} of {} elements",
        .0.tensor, .0.step, .0.kind, .0.row(), .0.index, .0.count, .0.elements
    )]
    NonFinite(NonFinite),
    /// The device failed before the check could be read.
    #[error("the check of step {step} could not be read: {reason}")]
    Device {
        /// Step of the check.
        step: usize,
        /// The device's error.
        reason: String,
    },
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Nan => "NaN",
            Self::Infinity => "+∞",
            Self::NegativeInfinity => "−∞",
        })
    }
}

twin! {
    /// Checks that every element of a float tensor is finite. `name` and `step` appear in the error.
    pub fn check_finite<const D: usize>(tensor: &Tensor<D>, name: &str, step: usize)
        = try_check_finite;
}

/// Like [`check_finite`], but returns the error. Reads the device once.
///
/// # Errors
///
/// [`FiniteError`] with the first element that is not finite, or if the device failed.
pub fn try_check_finite<const D: usize>(
    tensor: &Tensor<D>,
    name: &str,
    step: usize,
) -> Result<(), FiniteError> {
    FiniteChecks::new(step).tensor(name, tensor).try_check()
}

/// Checks of several tensors, of any ranks, in one read of the device.
///
/// ```
/// # #[cfg(all(feature = "flex", feature = "autodiff"))] {
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_flash_dma::finite::FiniteChecks;
/// use burn_flash_dma::{AttentionOptions, dynamic_mask_attention};
///
/// let device = Device::flex().autodiff();
/// let random = |heads| Tensor::<4>::random([1, heads, 20, 8], Distribution::Default, &device);
/// let (q, k, v) = (random(4).require_grad(), random(2), random(2));
/// let scores = Tensor::<3>::random([1, 2, 20], Distribution::Default, &device);
/// let options = AttentionOptions::new().with_keep_window(6);
/// let out = dynamic_mask_attention(q.clone(), k.clone(), v.clone(), scores.clone(), options);
/// let grads = out.clone().sum().backward();
///
/// let checks = FiniteChecks::new(0).tensor("q", &q).tensor("k", &k).tensor("v", &v);
/// checks.hiding("scores", &scores).tensor("out", &out).gradient("the gradient of q", &q, &grads).check();
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing is read before `check`"]
pub struct FiniteChecks {
    step: usize,
    pieces: Vec<Piece>,
}

/// Consecutive elements of a tensor, and the findings in them.
#[derive(Clone, Debug)]
struct Piece {
    tensor: String,
    shape: Vec<usize>,
    start: usize,
    /// Number of elements that are not finite, index of the first of them, and its kind: 1 for NaN, 2 for +∞, 3 for
    /// −∞.
    found: Tensor<1, Int>,
}

/// Maximum number of elements of a piece: indices are 32-bit integers on some devices.
const PIECE: usize = 1 << 30;

impl FiniteChecks {
    /// No tensors yet. `step` appears in the error.
    pub fn new(step: usize) -> Self {
        let pieces = Vec::new();
        Self { step, pieces }
    }

    /// Adds a float tensor whose elements must all be finite.
    pub fn tensor<const D: usize>(self, name: &str, tensor: &Tensor<D>) -> Self {
        self.with(name, tensor, false)
    }

    /// Adds a float tensor that may contain −∞: scores, in which it hides a key, additive masks, or an LSE.
    pub fn hiding<const D: usize>(self, name: &str, tensor: &Tensor<D>) -> Self {
        self.with(name, tensor, true)
    }

    /// Adds the gradient of a tensor, if it has one.
    #[cfg(feature = "autodiff")]
    pub fn gradient<const D: usize>(
        self,
        name: &str,
        tensor: &Tensor<D>,
        gradients: &burn::tensor::Gradients,
    ) -> Self {
        match tensor.grad(gradients) {
            Some(gradient) => self.tensor(name, &gradient),
            None => self,
        }
    }

    fn with<const D: usize>(mut self, name: &str, tensor: &Tensor<D>, hiding: bool) -> Self {
        let shape = tensor.dims().to_vec();
        let elements: usize = shape.iter().product();
        if elements == 0 {
            return self;
        }
        let flat = tensor.clone().without_autodiff().reshape([elements]);
        for start in (0..elements).step_by(PIECE) {
            let piece = flat.clone().narrow(0, start, PIECE.min(elements - start));
            self.pieces.push(Piece {
                tensor: name.into(),
                shape: shape.clone(),
                start,
                found: find(piece, hiding),
            });
        }
        self
    }

    twin! {
        /// Reads the checks.
        pub fn check(self) = Self::try_check;
    }

    /// Like [`check`](Self::check), but returns the error. Reads each device once.
    ///
    /// # Errors
    ///
    /// [`FiniteError`] with the first element that is not finite of the first such tensor, in the order of adding, or
    /// if the device failed.
    pub fn try_check(self) -> Result<(), FiniteError> {
        let step = self.step;
        let mut devices: Vec<Device> = Vec::new();
        for piece in &self.pieces {
            let device = piece.found.device();
            if !devices.contains(&device) {
                devices.push(device);
            }
        }
        let mut found = vec![[0; 3]; self.pieces.len()];
        for device in &devices {
            let own = |(_, piece): &(usize, &Piece)| piece.found.device() == *device;
            let own: Vec<_> = self.pieces.iter().enumerate().filter(own).collect();
            let all = own.iter().map(|(_, piece)| piece.found.clone()).collect();
            let data = Tensor::cat(all, 0).try_into_data_as::<i64>();
            let data = data.map_err(|error| FiniteError::Device {
                step,
                reason: error.to_string(),
            })?;
            let words: Vec<usize> = data.iter::<i64>().map(|word| word as usize).collect();
            for ((at, _), words) in own.iter().zip(words.chunks_exact(3)) {
                found[*at].copy_from_slice(words);
            }
        }
        let pieces = || self.pieces.iter().zip(&found);
        let Some((piece, [_, place, code])) = pieces().find(|(_, found)| found[0] > 0) else {
            return Ok(());
        };
        let pieces = pieces().filter(|(other, _)| other.tensor == piece.tensor);
        Err(FiniteError::NonFinite(NonFinite {
            tensor: piece.tensor.clone(),
            step,
            index: index_of(piece.start + place, &piece.shape),
            kind: match code {
                1 => Kind::Nan,
                2 => Kind::Infinity,
                _ => Kind::NegativeInfinity,
            },
            count: pieces.map(|(_, found)| found[0]).sum(),
            elements: piece.shape.iter().product(),
        }))
    }
}

fn find(flat: Tensor<1>, hiding: bool) -> Tensor<1, Int> {
    let (len, device) = (flat.dims()[0] as i64, flat.device());
    let mut infinite = flat.clone().is_inf();
    if hiding {
        infinite = infinite.bool_and(flat.clone().greater_elem(0.0));
    }
    let bad = flat.clone().is_nan().bool_or(infinite);
    let places = arange(0..len, &device);
    let first = places.mask_fill(bad.clone().bool_not(), len).min();
    let element = flat.select(0, first.clone().clamp_max(len - 1));
    let infinite = element.clone().is_inf();
    let above = infinite.clone().bool_and(element.clone().greater_elem(0.0));
    let below = infinite.bool_and(element.clone().lower_elem(0.0));
    let kind = element.is_nan().int() + above.int().mul_scalar(2) + below.int().mul_scalar(3);
    let words = [bad.int().sum(), first, kind];
    Tensor::cat(words.map(|word| word.cast(DType::I32)).into(), 0)
}

pub(crate) fn index_of(mut place: usize, shape: &[usize]) -> Vec<usize> {
    let mut index = shape.to_vec();
    for axis in index.iter_mut().rev() {
        (place, *axis) = (place / *axis, place % *axis);
    }
    index
}
