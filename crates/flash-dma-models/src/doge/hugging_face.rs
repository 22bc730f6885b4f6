//! Hugging Face's `config.json`, in the format of current and older versions of `transformers`.

use super::config::{DogeConfig, RopeScaling};
use super::error::ModelError;
use crate::nn::ExpertsConfig;
use burn::tensor::FloatDType;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

/// Fields of a `config.json`, each taken once; the rest is kept unchanged.
struct Fields(Map<String, Value>);

impl Fields {
    /// Takes a field, if it is present and not null.
    fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, ModelError> {
        let value = self.0.remove(name).unwrap_or_default();
        let wrong = |error| ModelError::config(format!("{name}: {error}"));
        serde_json::from_value(value).map_err(wrong)
    }

    fn need<T: DeserializeOwned>(&mut self, name: &str) -> Result<T, ModelError> {
        let field = self.take(name)?;
        field.ok_or_else(|| ModelError::config(format!("{name} is missing")))
    }

    /// Stores a field in `place` if it is present.
    fn or<T: DeserializeOwned>(&mut self, place: &mut T, name: &str) -> Result<(), ModelError> {
        if let Some(value) = self.take(name)? {
            *place = value;
        }
        Ok(())
    }

    /// Refuses a field with any value other than what this model supports. Does not take it.
    fn only(&self, field: &'static str, fits: impl Fn(&Value) -> bool) -> Result<(), ModelError> {
        match self.0.get(field) {
            Some(value) if !value.is_null() && !fits(value) => {
                let value = value.to_string();
                Err(ModelError::Unsupported { field, value })
            }
            _ => Ok(()),
        }
    }
}

impl DogeConfig {
    /// Reads the configuration from the text of a `config.json`.
    ///
    /// ```
    /// use flash_dma_models::doge::DogeConfig;
    ///
    /// # fn main() -> Result<(), flash_dma_models::doge::ModelError> {
    /// let config = DogeConfig::from_hugging_face(
    ///     r#"{"model_type": "doge", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8,
    ///         "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32768, "eos_token_id": 1}"#,
    /// )?;
    /// assert_eq!((config.layers, config.end_tokens()), (8, vec![1]));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`ModelError::Config`] if the text is not JSON, a size is missing or a field has another type, or
    /// [`ModelError::Unsupported`] for features that [`Doge`](super::Doge) does not have: another model, activation
    /// or kind of rotary encoding, dropout, a sliding window, or a mixture of experts of the first kind.
    pub fn from_hugging_face(text: &str) -> Result<Self, ModelError> {
        let fields = serde_json::from_str(text);
        let mut fields = Fields(fields.map_err(|error| ModelError::config(error.to_string()))?);
        let zero = |value: &Value| value.as_f64() == Some(0.0);
        if !fields.0.contains_key("model_type") {
            return Err(ModelError::config("model_type is missing"));
        }
        fields.only("model_type", |value| value == "doge")?;
        fields.only("hidden_act", |value| value == "silu")?;
        fields.only("sliding_window", |_| false)?;
        for dropout in ["hidden_dropout", "attention_dropout", "dynamic_mask_ratio"] {
            fields.only(dropout, zero)?;
        }

        let (rope_theta, rope_scaling) = rope(&mut fields)?;
        // Older files have one flag for both.
        let bias = fields.take("hidden_bias")?.unwrap_or(false);
        let mut config = Self::new(
            fields.need("hidden_size")?,
            fields.need("num_hidden_layers")?,
            fields.need("num_attention_heads")?,
        )
        .with_kv_heads(fields.take("num_key_value_heads")?)
        .with_head_dim(fields.take("head_dim")?)
        .with_intermediate_size(Some(fields.need("intermediate_size")?))
        .with_vocab_size(fields.need("vocab_size")?)
        .with_rope_theta(rope_theta)
        .with_rope_scaling(rope_scaling)
        .with_experts(experts(&mut fields)?);
        config.attention_bias = fields.take("attention_bias")?.unwrap_or(bias);
        config.mlp_bias = fields.take("mlp_bias")?.unwrap_or(bias);
        fields.or(&mut config.keep_window_size, "keep_window_size")?;
        let longest = &mut config.max_position_embeddings;
        fields.or(longest, "max_position_embeddings")?;
        fields.or(&mut config.rms_norm_eps, "rms_norm_eps")?;
        fields.or(&mut config.tie_word_embeddings, "tie_word_embeddings")?;
        fields.or(&mut config.initializer_range, "initializer_range")?;
        config.other = fields.0;
        Ok(config)
    }

    /// Text of a `config.json` for parameters of this type, for current `transformers`. Fields that this crate does
    /// not read are written back unchanged.
    #[must_use]
    pub fn to_hugging_face(&self, dtype: FloatDType) -> String {
        let mut rope = json!({"rope_type": "default", "rope_theta": number(self.rope_theta)});
        if let RopeScaling::Dynamic(factor) = self.rope_scaling {
            rope["rope_type"] = json!("dynamic");
            rope["factor"] = json!(factor);
        }
        let mut fields = self.other.clone();
        // Older names of fields that are written below.
        fields.remove("torch_dtype");
        let architectures = fields.entry("architectures");
        architectures.or_insert(json!(["DogeForCausalLM"]));
        let mut written = json!({
            "model_type": "doge",
            "dtype": name_of(dtype),
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.resolved_intermediate_size(),
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.resolved_kv_heads(),
            "vocab_size": self.vocab_size,
            "keep_window_size": self.keep_window_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_parameters": rope,
            "rms_norm_eps": self.rms_norm_eps,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": self.initializer_range,
            "is_moe": self.experts.is_some(),
        });
        fields.append(written.as_object_mut().expect("an object"));
        if let Some(head_dim) = self.head_dim {
            fields.insert("head_dim".into(), json!(head_dim));
        }
        if let Some(experts) = &self.experts {
            fields.insert("num_experts".into(), json!(experts.experts));
            fields.insert("num_experts_per_tok".into(), json!(experts.per_token));
        }
        format!("{:#}\n", Value::Object(fields))
    }
}

fn experts(fields: &mut Fields) -> Result<Option<ExpertsConfig>, ModelError> {
    let is_moe = fields.take("is_moe")?.unwrap_or(false);
    let count: Option<usize> = fields.take("num_experts")?;
    let per_token = fields.take("num_experts_per_tok")?;
    if !is_moe {
        return Ok(None);
    }
    if count.is_none() {
        // The first kind, with heads and keys of their own.
        fields.only("num_cdmoe_experts", |_| false)?;
    }
    let [count, per_token] = [count.unwrap_or(16384), per_token.unwrap_or(64)];
    Ok(Some(ExpertsConfig::new(count, per_token)))
}

/// Base and scaling of the rotary frequencies: `rope_parameters`, or `rope_theta` and `rope_scaling` in older files.
fn rope(fields: &mut Fields) -> Result<(f32, RopeScaling), ModelError> {
    let theta: Option<f32> = fields.take("rope_theta")?;
    let old: Option<Map<String, Value>> = fields.take("rope_scaling")?;
    let new: Option<Map<String, Value>> = fields.take("rope_parameters")?;
    let mut rope = Fields(new.or(old).unwrap_or_default());
    rope.only("partial_rotary_factor", |value| value.as_f64() == Some(1.0))?;
    let theta = rope.take("rope_theta")?.or(theta).unwrap_or(10000.0);
    let kind: Option<String> = match rope.take("rope_type")? {
        None => rope.take("type")?,
        kind => kind,
    };
    let scaling = match kind.as_deref() {
        None | Some("default") => RopeScaling::Plain,
        Some("dynamic") => RopeScaling::Dynamic(rope.need("factor")?),
        Some(kind) => {
            let (field, value) = ("rope_type", kind.into());
            return Err(ModelError::Unsupported { field, value });
        }
    };
    Ok((theta, scaling))
}

/// Shortest decimal number that reads as this one.
fn number(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

fn name_of(dtype: FloatDType) -> &'static str {
    match dtype {
        FloatDType::F16 => "float16",
        FloatDType::BF16 => "bfloat16",
        FloatDType::F64 => "float64",
        _ => "float32",
    }
}
