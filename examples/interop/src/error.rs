//! Why a case is not run. Each is one line.

use burn_flash_dma::AttentionError;
use safetensors::{Dtype, SafeTensorError};

/// An error about one case; `Display` is one line.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read or written.
    #[error("{0}")]
    Io(String),
    /// The file is no safetensors file.
    #[error("no valid safetensors file: {0}")]
    Format(#[from] SafeTensorError),
    /// The metadata's options are no such options.
    #[error("the metadata's options: {0}")]
    Options(String),
    /// A tensor the program does not know, perhaps misspelt.
    #[error("unknown tensor {0}; a case holds q, k, v, scores, mask, bias, documents, dout, dlse")]
    UnknownTensor(String),
    /// Scores select; a mask and a bias belong to the other operation.
    #[error("a case has either scores or a mask and a bias")]
    ScoresAndMask,
    /// A tensor of a type that its role does not have.
    #[error("{0} is {1:?}; {2} are read")]
    TensorType(String, Dtype, &'static str),
    /// A required tensor is absent.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// A tensor has another number of axes.
    #[error("{name} must have {expected} axes, but has {actual}")]
    Rank {
        /// Which tensor.
        name: &'static str,
        /// Number of axes of its role.
        expected: usize,
        /// Number of axes it has.
        actual: usize,
    },
    /// A gradient of another shape than its output.
    #[error("{name} must have the shape of {of}, {expected:?}, but has {actual:?}")]
    GradientShape {
        /// Which gradient.
        name: &'static str,
        /// Of which output.
        of: &'static str,
        /// The output's shape.
        expected: Vec<usize>,
        /// The gradient's shape.
        actual: Vec<usize>,
    },
    /// An element type the program does not know.
    #[error("unknown dtype {0}: f32, f16 or bf16")]
    UnknownDtype(String),
    /// The device does not compute in the element type.
    #[error("the device does not support {0}")]
    UnsupportedDtype(String),
    /// The library refuses the case.
    #[error(transparent)]
    Attention(#[from] AttentionError),
    /// The device failed.
    #[error("the device failed: {0}")]
    Device(String),
}
