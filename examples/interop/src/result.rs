//! The result file of a case.

use std::collections::HashMap;
use std::path::Path;

use burn::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::error::Error;
use crate::run::Outcome;

/// Writes the tensors of an outcome; the metadata says which element type computed them.
///
/// # Errors
///
/// [`Error::Format`] if the file cannot be written.
pub fn write(path: &Path, outcome: &Outcome, dtype: &str) -> Result<(), Error> {
    let floats = outcome
        .floats
        .iter()
        .map(|(name, data)| (*name, data, Dtype::F32));
    let intervals = outcome
        .intervals
        .iter()
        .map(|data| ("intervals", data, Dtype::I32));
    let views = floats
        .chain(intervals)
        .map(|(name, data, dtype)| Ok((name, view(data, dtype)?)))
        .collect::<Result<Vec<_>, Error>>()?;
    let metadata = HashMap::from([("dtype".to_string(), dtype.to_string())]);
    Ok(safetensors::serialize_to_file(views, Some(metadata), path)?)
}

fn view(data: &TensorData, dtype: Dtype) -> Result<TensorView<'_>, Error> {
    // The format is little-endian, and so is every device Burn runs on.
    Ok(TensorView::new(
        dtype,
        data.shape().to_vec(),
        data.as_bytes(),
    )?)
}
