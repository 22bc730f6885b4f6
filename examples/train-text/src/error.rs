//! What can go wrong before or after training, each as one line for a person to act on.

use std::path::PathBuf;

/// An error of this program; `Display` is one line.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or directory could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The corpus holds no text at all.
    #[error("{}: no text to train on", .0.display())]
    EmptyCorpus(PathBuf),
    /// The corpus is too small to be split into training and validation windows.
    #[error(
        "{}: {bytes} bytes are too few for --seq {seq}: at least {needed} are needed",
        path.display()
    )]
    TinyCorpus {
        /// The file or directory.
        path: PathBuf,
        /// Its size in bytes.
        bytes: usize,
        /// The window length asked for.
        seq: usize,
        /// The least size that can be split.
        needed: usize,
    },
    /// Without `--data`, the program trains on its own repository, which was not found.
    #[error("not inside the repository: say what to train on with --data FILE|DIR")]
    NoRepository,
    /// The device exists but this binary was built without it.
    #[error("--device {0} is not compiled in: build with --features {0}")]
    DeviceNotCompiled(&'static str),
    /// The device does not compute in this element type.
    #[error("--device {device} does not support --dtype {dtype}")]
    Dtype {
        /// The device's name.
        device: &'static str,
        /// The element type's name.
        dtype: &'static str,
    },
    /// A combination of options that cannot be trained.
    #[error("{0}")]
    Options(String),
    /// A file left by an earlier run that cannot be used.
    #[error("{}: {reason}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The model cannot generate.
    #[error(transparent)]
    Attention(#[from] burn_flash_dma::AttentionError),
    /// The options of sampling mean nothing, or the model's logits give no byte.
    #[error("no byte can be drawn: {0}")]
    Sample(#[from] flash_dma_models::generate::SampleError),
    /// Burn stopped the training.
    #[error("training stopped: {0}")]
    Training(String),
}

impl Error {
    /// Attaches the path to a system error.
    pub fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }
}
