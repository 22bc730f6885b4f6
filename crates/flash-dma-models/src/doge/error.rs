//! Errors of making, reading and writing a model.

use burn::tensor::DType;
use burn_flash_dma::AttentionError;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Error of making, reading or writing a model. Tensors have their names in Hugging Face's files; the text of each
/// error explains its fields.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum ModelError {
    /// A file or a directory cannot be read or written.
    #[error("{path}: {source}", path = path.display())]
    Io {
        path: PathBuf,
        source: std::io::Error,
    },
    /// A file of the wrong format, or one that ends too early.
    #[error("{path} cannot be read: {reason}", path = path.display())]
    Malformed { path: PathBuf, reason: String },
    /// A configuration that contradicts itself.
    #[error("the configuration is wrong: {reason}")]
    Config { reason: String },
    /// A configuration with a feature that this model does not have.
    #[error("{field} = {value} is not supported")]
    Unsupported { field: &'static str, value: String },
    /// Tensors that the configuration requires and no file has.
    #[error("{} of the model's tensors are missing: {}", names.len(), some(names))]
    Missing { names: Vec<String> },
    /// Tensors that the files have and the configuration does not.
    #[error("{} tensors do not belong to the model: {}", names.len(), some(names))]
    Unknown { names: Vec<String> },
    /// A tensor in two files, or in one file under its old name and its new one.
    #[error("{name} is given twice")]
    Twice { name: String },
    /// A tensor of another shape than the configuration requires.
    #[error("{name} must have the shape {expected:?}, but has {actual:?}")]
    Shape {
        name: String,
        expected: Vec<usize>,
        actual: Vec<usize>,
    },
    /// A tensor of an unsupported element type.
    #[error("{name} must be f32, f16 or bf16, but is {actual:?}")]
    ElementType { name: String, actual: DType },
    /// Weights with adapters that are not merged, for which the files have no place: see
    /// [`Doge::merged`](super::Doge::merged).
    #[error("{} weights have adapters that are not merged into them: {}", paths.len(), some(paths))]
    Adapters {
        /// Paths of the weights in the module.
        paths: Vec<String>,
    },
    /// Refusal of the model's attention.
    #[error(transparent)]
    Attention(#[from] AttentionError),
}

impl ModelError {
    pub(super) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        |source| Self::Io { path, source }
    }

    pub(super) fn malformed(path: &Path, reason: impl ToString) -> Self {
        Self::Malformed {
            path: path.to_owned(),
            reason: reason.to_string(),
        }
    }

    pub(super) fn config(reason: impl Into<String>) -> Self {
        let reason = reason.into();
        Self::Config { reason }
    }
}

/// First names of a list that may be as long as a model's.
fn some(names: &[String]) -> String {
    const SHOWN: usize = 4;
    let mut text = names[..names.len().min(SHOWN)].join(", ");
    if names.len() > SHOWN {
        text.push_str(", …");
    }
    text
}
