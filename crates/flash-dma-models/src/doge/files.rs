//! Reading and writing of Hugging Face's files.

use super::config::DogeConfig;
use super::error::ModelError;
use super::heads::{Entries, are_per_query_head, per_kv_head, widen};
use super::model::Doge;
use super::names::{PairOrder, Pairs, expected, from_module, from_old, to_module};
use burn::tensor::{DType, Device, FloatDType};
use burn_store::burn_pack::Tensor as Entry;
use burn_store::{
    BurnToPyTorchAdapter, FloatCastAdapter, ModuleAdapter, ModuleSnapshot, ModuleStore,
    PyTorchToBurnAdapter, SafetensorsStore, SafetensorsStoreError, bridge,
};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

const CONFIG: &str = "config.json";
const TENSORS: &str = "model.safetensors";
/// Maps tensors to files if there are several.
const INDEX: &str = "model.safetensors.index.json";

impl Doge {
    /// Reads a model in Hugging Face's layout from a directory: `config.json`, and `model.safetensors` or the files
    /// named by `model.safetensors.index.json`. Its parameters are f32, whatever the type in the files.
    ///
    /// The [module](super) describes the conversion.
    ///
    /// # Errors
    ///
    /// [`ModelError`] if a file is missing or malformed, the configuration is wrong or unsupported, or the tensors
    /// are not exactly those the configuration requires: some are missing or unknown, of another shape, or neither
    /// f32, f16 nor bf16.
    pub fn from_safetensors(dir: impl AsRef<Path>, device: &Device) -> Result<Self, ModelError> {
        Self::from_safetensors_as(dir, FloatDType::F32, device)
    }

    /// [`from_safetensors`](Self::from_safetensors) with parameters and activations of an element type.
    ///
    /// # Errors
    ///
    /// See [`from_safetensors`](Self::from_safetensors).
    pub fn from_safetensors_as(
        dir: impl AsRef<Path>,
        dtype: FloatDType,
        device: &Device,
    ) -> Result<Self, ModelError> {
        let dir = dir.as_ref();
        let path = dir.join(CONFIG);
        let text = fs::read_to_string(&path).map_err(ModelError::io(&path))?;
        let (config, tensors) = fit(DogeConfig::from_hugging_face(&text)?, entries(dir)?, dir)?;

        let mut model = config.try_init(device)?.with_dtype(dtype);
        let order = PairOrder {
            head_dim: config.resolved_head_dim(),
            to: Pairs::Neighbours,
        };
        let adapter = (order.chain(PyTorchToBurnAdapter)).chain(FloatCastAdapter::to(dtype.into()));
        let (tensors, _) = to_module().remap(tensors.into_values().collect());
        let result = model.apply(tensors, None, Some(Box::new(adapter)), false);
        match result.errors.first() {
            Some(error) => Err(ModelError::malformed(dir, error)),
            // All names and shapes have been compared before.
            None if result.missing.is_empty() && result.unused.is_empty() => Ok(model),
            None => Err(ModelError::malformed(dir, result)),
        }
    }

    /// Writes the model in Hugging Face's layout, for `transformers`, into a directory, which is created if missing:
    /// `config.json` and `model.safetensors`, replacing existing files. Parameters keep their element type.
    ///
    /// [Merge](Self::merged) a model with LoRA adapters first: `model.merged().save_safetensors(dir)`.
    ///
    /// An unchanged model that was read in its own element type from a `model.safetensors` with current names is
    /// written as the same bytes.
    ///
    /// # Errors
    ///
    /// [`ModelError::Adapters`] if weights have adapters, before anything is written; [`ModelError::Io`] or
    /// [`ModelError::Malformed`] if a file cannot be written; each file is then unchanged or complete.
    pub fn save_safetensors(&self, dir: impl AsRef<Path>) -> Result<(), ModelError> {
        let paths = self.adapted();
        if !paths.is_empty() {
            return Err(ModelError::Adapters { paths });
        }
        let dir = dir.as_ref();
        fs::create_dir_all(dir).map_err(ModelError::io(dir))?;
        let path = dir.join(TENSORS);
        let order = PairOrder {
            head_dim: self.config().resolved_head_dim(),
            to: Pairs::Halves,
        };
        let mut store = SafetensorsStore::from_file(&path)
            .remap(from_module())
            .with_to_adapter(BurnToPyTorchAdapter.chain(order))
            .clear_metadata()
            // Required by `transformers`.
            .metadata("format", "pt")
            .overwrite(true);
        self.save_into(&mut store)
            .map_err(|error| failure(&path, error))?;

        let dtype = match self.embedding.weight.dtype() {
            DType::F16 => FloatDType::F16,
            DType::BF16 => FloatDType::BF16,
            DType::F64 => FloatDType::F64,
            _ => FloatDType::F32,
        };
        let (path, partial) = (dir.join(CONFIG), dir.join("config.json.partial"));
        let text = self.config().to_hugging_face(dtype);
        fs::write(&partial, text).map_err(ModelError::io(&partial))?;
        fs::rename(&partial, &path).map_err(ModelError::io(&path))
    }
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Tensors of a directory by current names, each once. Their values are read later.
fn entries(dir: &Path) -> Result<Entries, ModelError> {
    let mut all = Entries::new();
    for file in files(dir)? {
        if Path::new(&file).file_name() != Some(file.as_ref()) {
            let reason = format!("{file} is not the name of a file in its folder");
            return Err(ModelError::malformed(&dir.join(INDEX), reason));
        }
        let path = dir.join(file);
        fs::metadata(&path).map_err(ModelError::io(&path))?;
        let mut store = SafetensorsStore::from_file(&path);
        let tensors = store.get_all_tensors();
        let tensors = tensors.map_err(|error| failure(&path, error))?;
        for tensor in from_old().remap(tensors.values().cloned().collect()).0 {
            let name = tensor.name.clone();
            if all.insert(name.clone(), tensor).is_some() {
                return Err(ModelError::Twice { name });
            }
        }
    }
    Ok(all)
}

fn files(dir: &Path) -> Result<BTreeSet<String>, ModelError> {
    let index = dir.join(INDEX);
    // Like `transformers`: the index counts only if there is no single file.
    if dir.join(TENSORS).exists() || !index.exists() {
        return Ok(BTreeSet::from([TENSORS.to_owned()]));
    }
    let text = fs::read_to_string(&index).map_err(ModelError::io(&index))?;
    let Index { weight_map } =
        serde_json::from_str(&text).map_err(|error| ModelError::malformed(&index, error))?;
    Ok(weight_map.into_values().collect())
}

fn failure(path: &Path, error: SafetensorsStoreError) -> ModelError {
    match error {
        SafetensorsStoreError::Io(source) => ModelError::io(path)(source),
        error => ModelError::malformed(path, error),
    }
}

/// Completes the configuration from the tensors, and checks that these are exactly the required ones.
fn fit(
    mut config: DogeConfig,
    mut tensors: Entries,
    dir: &Path,
) -> Result<(DogeConfig, Entries), ModelError> {
    config.check()?;
    let (heads, kv_heads) = (config.heads, config.resolved_kv_heads());
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        let reason = format!("{heads} query heads are no multiple of {kv_heads} key/value heads");
        return Err(ModelError::config(reason));
    }
    let normalises = |name: &String| name.contains(".q_norm.") || name.contains(".k_norm.");
    config.qk_norm = tensors.keys().any(normalises) || config.layers == 0;
    if config.tie_word_embeddings {
        untie(&mut tensors, dir)?;
    }
    let mut expected = expected(&config);
    let per_query_head = are_per_query_head(&config, &tensors);
    if per_query_head {
        widen(&config, &mut expected);
    }
    check(&expected, &tensors)?;
    match per_query_head {
        true => per_kv_head(config, tensors, dir),
        false => Ok((config, tensors)),
    }
}

/// Drops the second copy of a tied embedding that some files have.
fn untie(tensors: &mut Entries, dir: &Path) -> Result<(), ModelError> {
    let Some(head) = tensors.remove("lm_head.weight") else {
        return Ok(());
    };
    let Some(embedding) = tensors.get("model.embed_tokens.weight") else {
        return Ok(());
    };
    let data = |tensor: &Entry| {
        let data = bridge::to_data(tensor);
        data.map_err(|error| ModelError::malformed(dir, error))
    };
    match data(&head)? == data(embedding)? {
        true => Ok(()),
        false => Err(ModelError::config(
            "tie_word_embeddings is true, but lm_head.weight is not model.embed_tokens.weight",
        )),
    }
}

fn check(expected: &BTreeMap<String, Vec<usize>>, tensors: &Entries) -> Result<(), ModelError> {
    let absent = |name: &&String| !tensors.contains_key(*name);
    let names: Vec<_> = expected.keys().filter(absent).cloned().collect();
    if !names.is_empty() {
        return Err(ModelError::Missing { names });
    }
    let unknown = |name: &&String| !expected.contains_key(*name);
    let names: Vec<_> = tensors.keys().filter(unknown).cloned().collect();
    if !names.is_empty() {
        return Err(ModelError::Unknown { names });
    }
    for (name, shape) in expected {
        let tensor = &tensors[name];
        let name = name.clone();
        if !matches!(tensor.dtype, DType::F32 | DType::F16 | DType::BF16) {
            let actual = tensor.dtype;
            return Err(ModelError::ElementType { name, actual });
        }
        let (expected, actual) = (shape.clone(), tensor.shape.to_vec());
        if expected != actual {
            return Err(ModelError::Shape {
                name,
                expected,
                actual,
            });
        }
    }
    Ok(())
}
