//! Names and layouts of tensors: the module's, and Hugging Face's.

use super::config::DogeConfig;
use burn::tensor::TensorData;
use burn_store::burn_pack::Tensor as Entry;
use burn_store::{KeyRemapper, ModuleAdapter, ModuleContext, bridge};
use std::collections::BTreeMap;

/// Older and current names.
const OLD: [(&str, &str); 7] = [
    (r"^model\.word_embed\.", "model.embed_tokens."),
    (r"^model\.final_layernorm\.", "model.norm."),
    (r"\.pre_layernorm\.", ".input_layernorm."),
    (r"\.post_layernorm\.", ".post_attention_layernorm."),
    (r"\.pre_residual\.weight$", ".input_residual"),
    (r"\.post_residual\.weight$", ".post_attention_residual"),
    (r"\.feed_forward\.", ".mlp."),
];

/// Names in the module, and current names in the files. No name on the left is part of another one on its level.
const MODULE: [(&str, &str); 18] = [
    ("embedding.", "model.embed_tokens."),
    ("unembedding.", "lm_head."),
    ("blocks.", "model.layers."),
    ("norm.", "model.norm."),
    (".attention_norm.", ".input_layernorm."),
    (".attention_residual", ".input_residual"),
    (".feed_forward_norm.", ".post_attention_layernorm."),
    (".feed_forward_residual", ".post_attention_residual"),
    (".attention.dt_bias", ".self_attn.dt_proj.bias"),
    (".attention.dt_proj", ".self_attn.dt_proj.weight"),
    (".attention.a", ".self_attn.A"),
    (".feed_forward.experts.router.", ".mlp.router_gate."),
    (".feed_forward.experts.down", ".mlp.down_embed.weight"),
    (".feed_forward.experts.up", ".mlp.up_embed.weight"),
    // Parts that both networks have, after the more specific ones above.
    (".feed_forward.gate.", ".mlp.gate_proj."),
    (".feed_forward.up.", ".mlp.up_proj."),
    (".feed_forward.down.", ".mlp.down_proj."),
    (".attention.", ".self_attn."),
];

pub(super) fn from_old() -> KeyRemapper {
    remapper(OLD.map(|(old, new)| (old.to_owned(), new)))
}

pub(super) fn to_module() -> KeyRemapper {
    remapper(MODULE.map(|(module, file)| (pattern(file), module)))
}

pub(super) fn from_module() -> KeyRemapper {
    remapper(MODULE.map(|(module, file)| (pattern(module), file)))
}

/// Pattern of exactly this beginning, whole part or end of a name.
fn pattern(text: &str) -> String {
    let begin = if text.starts_with('.') { "" } else { "^" };
    let end = if text.ends_with('.') { "" } else { "$" };
    format!("{begin}{}{end}", text.replace('.', r"\."))
}

fn remapper(pairs: impl IntoIterator<Item = (String, &'static str)>) -> KeyRemapper {
    KeyRemapper::from_patterns(pairs.into_iter().collect()).expect("the patterns are constants")
}

/// Tensors of a file and their shapes, by current names.
pub(super) fn expected(config: &DogeConfig) -> BTreeMap<String, Vec<usize>> {
    let (hidden, dim) = (config.hidden_size, config.resolved_head_dim());
    let (heads, kv_heads) = (config.heads, config.resolved_kv_heads());
    let mut all = BTreeMap::new();
    let mut add = |name: String, shape: &[usize]| all.insert(name, shape.to_vec());
    add(
        "model.embed_tokens.weight".into(),
        &[config.vocab_size, hidden],
    );
    add("model.norm.weight".into(), &[hidden]);
    if !config.tie_word_embeddings {
        add("lm_head.weight".into(), &[config.vocab_size, hidden]);
    }
    for layer in 0..config.layers {
        let mut add =
            |name: &str, shape: &[usize]| add(format!("model.layers.{layer}.{name}"), shape);
        for name in ["input", "post_attention"] {
            add(&format!("{name}_layernorm.weight"), &[hidden]);
            add(&format!("{name}_residual"), &[hidden]);
        }
        let mut linear = |name: &str, [from, to]: [usize; 2], bias: bool| {
            add(&format!("{name}.weight"), &[to, from]);
            if bias {
                add(&format!("{name}.bias"), &[to]);
            }
        };
        let bias = config.attention_bias;
        linear("self_attn.q_proj", [hidden, heads * dim], bias);
        linear("self_attn.k_proj", [hidden, kv_heads * dim], bias);
        linear("self_attn.v_proj", [hidden, kv_heads * dim], bias);
        linear("self_attn.o_proj", [heads * dim, hidden], bias);
        linear("self_attn.dt_proj", [kv_heads * dim, kv_heads], bias);
        let inner = config.resolved_intermediate_size();
        linear("mlp.gate_proj", [hidden, inner], config.mlp_bias);
        linear("mlp.up_proj", [hidden, inner], config.mlp_bias);
        linear("mlp.down_proj", [inner, hidden], config.mlp_bias);
        if let Some(experts) = &config.experts {
            linear("mlp.router_gate", [hidden, 2 * experts.keys()], false);
            add("mlp.down_embed.weight", &[experts.experts, hidden]);
            add("mlp.up_embed.weight", &[experts.experts, hidden]);
        }
        add("self_attn.A", &[kv_heads]);
        if config.qk_norm {
            add("self_attn.q_norm.weight", &[dim]);
            add("self_attn.k_norm.weight", &[dim]);
        }
    }
    all
}

/// Which features of a head are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pairs {
    /// `2 i` and `2 i + 1`: Burn's.
    Neighbours,
    /// `i` and `i + head_dim / 2`: Hugging Face's.
    Halves,
}

/// Reorders the features of q and k for one kind of pairs. Attention only sees products of q and k, which do not
/// change if both have their features in another order.
#[derive(Clone, Debug)]
pub(super) struct PairOrder {
    pub(super) head_dim: usize,
    pub(super) to: Pairs,
}

impl PairOrder {
    /// Old index of feature `i` of a head.
    fn source(&self, i: usize) -> usize {
        let half = self.head_dim / 2;
        match self.to {
            Pairs::Neighbours => i / 2 + i % 2 * half,
            Pairs::Halves => i % half * 2 + i / half,
        }
    }
}

impl ModuleAdapter for PairOrder {
    /// `tensor` is laid out as in a file, with the features of all heads on the first axis.
    fn adapt(&self, tensor: Entry, _: ModuleContext<'_>) -> Entry {
        let parts = ["q_proj", "k_proj", "q_norm", "k_norm"];
        if !tensor.name.split('.').any(|part| parts.contains(&part)) {
            return tensor;
        }
        let order = self.clone();
        let (name, dtype, shape) = (tensor.name.clone(), tensor.dtype, tensor.shape.clone());
        bridge::map_data(tensor, name, dtype, shape, move |data| {
            let rows = data.shape()[0];
            let dim = order.head_dim;
            take(
                &data,
                (0..rows).map(|row| row / dim * dim + order.source(row % dim)),
            )
        })
    }

    fn clone_box(&self) -> Box<dyn ModuleAdapter> {
        Box::new(self.clone())
    }
}

pub(super) fn take(data: &TensorData, rows: impl Iterator<Item = usize>) -> TensorData {
    let mut shape = data.shape().to_vec();
    let width = data.as_bytes().len() / shape[0].max(1);
    let mut bytes = Vec::with_capacity(data.as_bytes().len());
    let mut count = 0;
    for row in rows {
        bytes.extend_from_slice(&data.as_bytes()[row * width..][..width]);
        count += 1;
    }
    shape[0] = count;
    TensorData::from_bytes_vec(bytes, shape, data.dtype())
}
