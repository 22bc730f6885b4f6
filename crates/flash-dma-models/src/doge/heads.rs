//! Conversion of scores per query head, as in older files, to scores per key/value head.

use super::config::DogeConfig;
use super::error::ModelError;
use super::names::take;
use burn::tensor::{Shape, TensorData};
use burn_store::bridge;
use burn_store::burn_pack::Tensor as Entry;
use std::collections::BTreeMap;
use std::path::Path;

/// Tensors by current names.
pub(super) type Entries = BTreeMap<String, Entry>;

/// Score parameters of a layer, with a row per head; every layer has the first two.
const SCORES: [&str; 3] = ["A", "dt_proj.weight", "dt_proj.bias"];

/// True if the files have a decay per query head and there are fewer key/value heads.
pub(super) fn are_per_query_head(config: &DogeConfig, tensors: &Entries) -> bool {
    let decay = tensors.get(&name(0, SCORES[0]));
    config.heads != config.resolved_kv_heads()
        && decay.is_some_and(|decay| decay.shape.to_vec() == [config.heads])
}

/// Widens the shapes that the configuration requires to those of such files.
pub(super) fn widen(config: &DogeConfig, expected: &mut BTreeMap<String, Vec<usize>>) {
    for layer in 0..config.layers {
        for part in SCORES {
            if let Some(shape) = expected.get_mut(&name(layer, part)) {
                shape[0] = config.heads;
            }
        }
    }
}

/// Tensors and configuration of an equivalent model with scores per key/value head.
pub(super) fn per_kv_head(
    mut config: DogeConfig,
    mut tensors: Entries,
    dir: &Path,
) -> Result<(DogeConfig, Entries), ModelError> {
    let (heads, kv_heads) = (config.heads, config.resolved_kv_heads());
    let group = heads / kv_heads;
    let scores = |layers| (0..layers).flat_map(|layer| SCORES.map(|part| name(layer, part)));
    let mut agree = true;
    for name in scores(config.layers) {
        if let Some(tensor) = tensors.get(&name) {
            let data = bridge::to_data(tensor);
            let data = data.map_err(|error| ModelError::malformed(dir, error))?;
            agree &= rows_agree(&data, heads, group);
        }
    }
    if agree {
        for name in scores(config.layers) {
            let firsts =
                move |data: &TensorData| take(data, (0..kv_heads).map(|head| head * group));
            change(&mut tensors, &name, |shape| shape[0] = kv_heads, firsts);
        }
        return Ok((config, tensors));
    }
    let dim = config.resolved_head_dim();
    let rows = heads * dim;
    for layer in 0..config.layers {
        for part in [
            "k_proj.weight",
            "k_proj.bias",
            "v_proj.weight",
            "v_proj.bias",
        ] {
            let source = move |row: usize| row / dim / group * dim + row % dim;
            let copies = move |data: &TensorData| take(data, (0..rows).map(source));
            change(
                &mut tensors,
                &name(layer, part),
                |shape| shape[0] = rows,
                copies,
            );
        }
        change(
            &mut tensors,
            &name(layer, "dt_proj.weight"),
            |shape| *shape = vec![heads, rows],
            move |data| spread(data, [heads, kv_heads, dim]),
        );
    }
    config.kv_heads = Some(heads);
    Ok((config, tensors))
}

fn name(layer: usize, part: &str) -> String {
    format!("model.layers.{layer}.self_attn.{part}")
}

fn rows_agree(data: &TensorData, rows: usize, group: usize) -> bool {
    let bytes = data.as_bytes();
    let mut groups = bytes.chunks_exact(bytes.len() / rows * group);
    groups.all(|rows| {
        let mut rows = rows.chunks_exact(rows.len() / group);
        let first = rows.next();
        rows.all(|row| Some(row) == first)
    })
}

fn change(
    tensors: &mut Entries,
    name: &str,
    reshape: impl FnOnce(&mut Vec<usize>),
    change: impl Fn(&TensorData) -> TensorData + Send + Sync + 'static,
) {
    if let Some(tensor) = tensors.remove(name) {
        let mut shape = tensor.shape.to_vec();
        reshape(&mut shape);
        let (dtype, shape) = (tensor.dtype, Shape::from(shape));
        let changed =
            bridge::map_data(tensor, name.into(), dtype, shape, move |data| change(&data));
        tensors.insert(name.into(), changed);
    }
}

/// The score projection, `[heads, kv_heads * dim]`, for the values of as many key/value heads as query heads: it
/// reads the first head of each group and ignores the copies.
fn spread(data: &TensorData, [heads, kv_heads, dim]: [usize; 3]) -> TensorData {
    let (width, group) = (dim * data.dtype().size(), heads / kv_heads);
    let mut bytes = vec![0; heads * heads * width];
    let rows = bytes.chunks_exact_mut(heads * width);
    for (to, from) in rows.zip(data.as_bytes().chunks_exact(kv_heads * width)) {
        for (head, from) in from.chunks_exact(width).enumerate() {
            to[head * group * width..][..width].copy_from_slice(from);
        }
    }
    TensorData::from_bytes_vec(bytes, vec![heads, heads * dim], data.dtype())
}
