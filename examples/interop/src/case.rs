//! A case on disk: tensors in a safetensors file, options as JSON in its metadata.

use std::collections::HashMap;
use std::error::Error;
use std::fs;
use std::path::Path;

use burn::prelude::*;
use burn::tensor::DType;
use burn_flash_dma::{AttentionMask, AttentionOptions};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

/// Every tensor a case may hold.
const KNOWN: &str = "q, k, v, scores, mask, bias, documents, dout, dlse";

/// Options of a case, as they stand in the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaseOptions {
    /// Number of keys that a query keeps; absent keeps all.
    pub window: Option<usize>,
    /// Bottom-right aligned causal masking; absent is true.
    pub causal: Option<bool>,
    /// Factor on `q . k`; absent is `1/sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// Softcap of the scaled product.
    pub softcap: Option<f32>,
    /// Meaning of `true` in the mask: hidden, as in Burn, or (default) shown, as in PyTorch.
    #[serde(default)]
    pub mask_hides: bool,
    /// Element type to compute in; the command line overrides it.
    pub dtype: Option<String>,
}

impl CaseOptions {
    /// Converts to the library's options.
    pub fn attention(&self) -> AttentionOptions {
        AttentionOptions {
            keep_window: self.window,
            causal: self.causal.unwrap_or(true),
            scale: self.scale,
            softcap: self.softcap,
            ..AttentionOptions::default()
        }
    }
}

/// A case: inputs still on the host, floats widened to f32.
pub struct Case {
    pub options: CaseOptions,
    tensors: HashMap<String, TensorData>,
}

impl Case {
    /// Reads a case file.
    pub fn read(path: &Path) -> Result<Self, Box<dyn Error>> {
        let bytes = fs::read(path)?;
        let invalid = |error| format!("no valid safetensors file: {error}");
        let (_, metadata) = SafeTensors::read_metadata(&bytes).map_err(invalid)?;
        let options = metadata.metadata().as_ref();
        let options = options.and_then(|map| map.get("options"));
        let options = serde_json::from_str(options.map_or("{}", String::as_str));
        let options = options.map_err(|error| format!("the metadata's options: {error}"))?;
        let mut tensors = HashMap::new();
        for (name, view) in SafeTensors::deserialize(&bytes).map_err(invalid)?.iter() {
            if !KNOWN.split(", ").any(|known| known == name) {
                return Err(format!("unknown tensor {name}; a case holds {KNOWN}").into());
            }
            tensors.insert(name.to_string(), host(name, &view)?);
        }
        let holds = |name| tensors.contains_key(name);
        if holds("scores") && (holds("mask") || holds("bias")) {
            return Err("a case has either scores or a mask and a bias".into());
        }
        Ok(Self { options, tensors })
    }

    /// The data of a tensor of `D` axes, if it is there.
    fn data<const D: usize>(&self, name: &str) -> Result<Option<TensorData>, String> {
        let data = self.tensors.get(name);
        match data.map(|data| data.shape().num_dims()) {
            Some(axes) if axes != D => Err(format!("{name} must have {D} axes, but has {axes}")),
            _ => Ok(data.cloned()),
        }
    }

    /// A float tensor, if it is there.
    pub fn tensor<const D: usize>(
        &self,
        name: &str,
        device: &Device,
    ) -> Result<Option<Tensor<D>>, String> {
        let data = self.data::<D>(name)?;
        Ok(data.map(|data| Tensor::from_data(data, (device, DType::F32))))
    }

    /// The mask, if it is there: `[batch | 1, q_heads | kv_heads | 1, q_len | 1, k_len | 1]`.
    pub fn mask(&self, device: &Device) -> Result<Option<AttentionMask>, String> {
        let mask = self.data::<4>("mask")?;
        let mask = mask.map(|data| Tensor::<4, Bool>::from_data(data, device));
        Ok(mask.map(|mask| match self.options.mask_hides {
            true => AttentionMask::hidden(mask),
            false => AttentionMask::visible(mask),
        }))
    }

    /// The document of each token, `[batch, k_len]`, if the case has documents.
    pub fn documents(&self, device: &Device) -> Result<Option<Tensor<2, Int>>, String> {
        let ids = self.data::<2>("documents")?;
        Ok(ids.map(|ids| Tensor::from_data(ids, (device, DType::I32))))
    }
}

/// A tensor of the file in the type of its role.
fn host(name: &str, view: &TensorView) -> Result<TensorData, String> {
    let bytes = |dtype| TensorData::from_bytes_vec(view.data().to_vec(), view.shape(), dtype);
    let refused = |types| Err(format!("{name} is {:?}; {types} are read", view.dtype()));
    match (name, view.dtype()) {
        ("mask", Dtype::BOOL | Dtype::U8) => Ok(bytes(DType::U8).convert::<bool>()),
        ("mask", _) => refused("BOOL and U8"),
        ("documents", Dtype::I32) => Ok(bytes(DType::I32)),
        ("documents", Dtype::I64) => Ok(bytes(DType::I64).convert::<i32>()),
        ("documents", _) => refused("I32 and I64"),
        (_, Dtype::F64) => Ok(bytes(DType::F64).convert::<f32>()),
        (_, Dtype::F32) => Ok(bytes(DType::F32)),
        (_, Dtype::F16) => Ok(bytes(DType::F16).convert::<f32>()),
        (_, Dtype::BF16) => Ok(bytes(DType::BF16).convert::<f32>()),
        _ => refused("F64, F32, F16 and BF16"),
    }
}
