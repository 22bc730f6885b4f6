//! A case on disk: tensors in a safetensors file, options as JSON in its metadata.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::Path;

use burn::prelude::*;
use burn::tensor::DType;
use burn_flash_dma::{AttentionMask, AttentionOptions};
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use crate::error::Error;

/// The key of the metadata under which the options stand.
const OPTIONS_KEY: &str = "options";

/// Every tensor a case may hold.
const KNOWN: [&str; 9] = [
    "q", "k", "v", "scores", "dout", "dlse", MASK, "bias", DOCUMENTS,
];
const MASK: &str = "mask";
const DOCUMENTS: &str = "documents";

/// The options of a case, as they stand in the file.
#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CaseOptions {
    /// Keys a query keeps; absent keeps all.
    pub window: Option<usize>,
    /// Bottom-right aligned causal masking.
    pub causal: bool,
    /// Factor on `q . k`; absent is `1/sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// Softcap of the scaled product.
    pub softcap: Option<f32>,
    /// What `true` in the mask means: it shows, as in PyTorch, unless this says that it hides, as in Burn.
    pub mask_hides: bool,
    /// Element type to compute in, unless the command line names one.
    pub dtype: Option<String>,
}

impl Default for CaseOptions {
    fn default() -> Self {
        Self {
            window: None,
            causal: true,
            scale: None,
            softcap: None,
            mask_hides: false,
            dtype: None,
        }
    }
}

impl CaseOptions {
    /// As the library's options.
    pub fn attention(&self) -> AttentionOptions {
        AttentionOptions {
            keep_window: self.window,
            causal: self.causal,
            scale: self.scale,
            softcap: self.softcap,
            ..AttentionOptions::default()
        }
    }
}

/// A case: inputs still on the host, floats widened to f32.
#[derive(Debug, Clone)]
pub struct Case {
    /// The options.
    pub options: CaseOptions,
    tensors: HashMap<String, TensorData>,
}

impl Case {
    /// Reads a case file.
    ///
    /// # Errors
    ///
    /// [`Error`] if the file cannot be read, is no case, or asks for what this program cannot do.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let bytes = fs::read(path).map_err(|error| Error::Io(error.to_string()))?;
        let (_, metadata) = SafeTensors::read_metadata(&bytes)?;
        let options = match metadata
            .metadata()
            .as_ref()
            .and_then(|map| map.get(OPTIONS_KEY))
        {
            Some(json) => serde_json::from_str(json).map_err(|e| Error::Options(e.to_string()))?,
            None => CaseOptions::default(),
        };
        let file = SafeTensors::deserialize(&bytes)?;
        let names: BTreeSet<&str> = file.names().into_iter().collect();
        if let Some(name) = names.iter().find(|name| !KNOWN.contains(name)) {
            return Err(Error::UnknownTensor(name.to_string()));
        }
        if names.contains("scores") && (names.contains(MASK) || names.contains("bias")) {
            return Err(Error::ScoresAndMask);
        }
        let tensors = file
            .iter()
            .map(|(name, view)| {
                let bytes =
                    |dtype| TensorData::from_bytes_vec(view.data().to_vec(), view.shape(), dtype);
                let refused = |types| Error::TensorType(name.to_string(), view.dtype(), types);
                let data = match name {
                    MASK => match view.dtype() {
                        Dtype::BOOL | Dtype::U8 => bytes(DType::U8).convert::<bool>(),
                        _ => return Err(refused("BOOL and U8")),
                    },
                    DOCUMENTS => match view.dtype() {
                        Dtype::I32 => bytes(DType::I32),
                        Dtype::I64 => bytes(DType::I64).convert::<i32>(),
                        _ => return Err(refused("I32 and I64")),
                    },
                    _ => {
                        let dtype = float(view.dtype());
                        let dtype = dtype.ok_or_else(|| refused("F64, F32, F16 and BF16"))?;
                        bytes(dtype).convert::<f32>()
                    }
                };
                Ok((name.to_string(), data))
            })
            .collect::<Result<_, Error>>()?;
        Ok(Self { options, tensors })
    }

    /// The data of a tensor of the case, if it is there.
    fn data<const D: usize>(&self, name: &'static str) -> Result<Option<TensorData>, Error> {
        let Some(data) = self.tensors.get(name) else {
            return Ok(None);
        };
        let axes = data.shape().num_dims();
        if axes != D {
            return Err(Error::Rank {
                name,
                expected: D,
                actual: axes,
            });
        }
        Ok(Some(data.clone()))
    }

    /// A float tensor of the case, if it is there.
    ///
    /// # Errors
    ///
    /// [`Error::Rank`] if it has another number of axes.
    pub fn tensor<const D: usize>(
        &self,
        name: &'static str,
        device: &Device,
    ) -> Result<Option<Tensor<D>>, Error> {
        let data = self.data::<D>(name)?;
        Ok(data.map(|data| Tensor::from_data(data, (device, DType::F32))))
    }

    /// The mask of the case, if it is there: `[batch | 1, q_heads | kv_heads | 1, q_len | 1, k_len | 1]`.
    ///
    /// # Errors
    ///
    /// As for [`Case::tensor`].
    pub fn mask(&self, device: &Device) -> Result<Option<AttentionMask>, Error> {
        let mask = self.data::<4>(MASK)?;
        let mask = mask.map(|data| Tensor::<4, Bool>::from_data(data, device));
        Ok(mask.map(|mask| match self.options.mask_hides {
            true => AttentionMask::hidden(mask),
            false => AttentionMask::visible(mask),
        }))
    }

    /// The document of each token, `[batch, k_len]`, if the case has documents.
    ///
    /// # Errors
    ///
    /// As for [`Case::tensor`].
    pub fn documents(&self, device: &Device) -> Result<Option<Tensor<2, Int>>, Error> {
        let ids = self.data::<2>(DOCUMENTS)?;
        Ok(ids.map(|ids| Tensor::from_data(ids, (device, DType::I32))))
    }

    /// A tensor that every case has.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] if it is not there, and as for [`Case::tensor`].
    pub fn required<const D: usize>(
        &self,
        name: &'static str,
        device: &Device,
    ) -> Result<Tensor<D>, Error> {
        self.tensor(name, device)?.ok_or(Error::Missing(name))
    }
}

fn float(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F64 => Some(DType::F64),
        Dtype::F32 => Some(DType::F32),
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::BF16),
        _ => None,
    }
}
