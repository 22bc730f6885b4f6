//! What can go wrong, each as one line for a person to act on.

use std::path::PathBuf;

use burn_flash_dma::AttentionError;
use flash_dma_models::data::DataError;
use flash_dma_models::doge::ModelError;
use flash_dma_models::generate::GenerateError;

/// An error of these programs; `Display` is one line.
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
    /// A file is not what its name says.
    #[error("{}: {reason}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// A combination of options that means nothing.
    #[error("{0}")]
    Options(String),
    /// The device is not there, or does not compute in the element type; or checkpoints cannot be removed.
    #[error(transparent)]
    Device(#[from] train_text::error::Error),
    /// The model cannot be read or written.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Text cannot become tokens, or tokens text.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Nothing can be generated.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// The model refuses its input.
    #[error(transparent)]
    Attention(#[from] AttentionError),
    /// A training that is to go on was another one.
    #[error("the training that stopped had {what} = {then}, not {now}: give it what it had")]
    Settings {
        /// What differs.
        what: String,
        /// Its value in the training that stopped.
        then: String,
        /// Its value now.
        now: String,
    },
    /// Burn stopped the training.
    #[error("training stopped: {0}")]
    Training(String),
    /// The address cannot be listened on.
    #[error("{address}: {source}")]
    Address {
        /// The address.
        address: String,
        /// What the system said.
        source: std::io::Error,
    },
}

impl Error {
    /// Attaches the path to a system error.
    pub fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }
}
