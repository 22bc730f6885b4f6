//! Scores per query head, as older files have them.

use crate::doge::files::{logits, saved};
use crate::doge::fixture::{
    BIASED, Files, TIED, TOLERANCE, assert_close, device, difference, rows,
};
use burn::tensor::{Distribution, Tensor};
use flash_dma_models::doge::Doge;

/// The projection of the scores and their decay, of the first layer.
const SCORES: [&str; 2] = ["dt_proj.weight", "A"];

fn name(layer: usize, part: &str) -> String {
    format!("model.layers.{layer}.self_attn.{part}")
}

/// The files with the rows of every layer's scores repeated for each query head.
fn repeated(mut files: Files, group: usize) -> Files {
    for layer in 0..2 {
        for part in ["dt_proj.weight", "dt_proj.bias", "A"] {
            let name = name(layer, part);
            let Some((_, shape, _)) = files.tensors.get(&name) else {
                continue;
            };
            let mut shape = shape.clone();
            let values = files.floats(&name);
            let rows = values.chunks(values.len() / shape[0]);
            let repeated: Vec<f32> = rows.flat_map(|row| row.repeat(group)).collect();
            shape[0] *= group;
            files.set(&name, &shape, &repeated);
        }
    }
    files
}

#[test]
fn scores_on_which_query_heads_agree_become_those_of_the_key_value_head() {
    for case in [TIED, BIASED] {
        let model = repeated(case.files(), 2).read(&device());
        let same = case.model(&device());
        assert_eq!(model.config(), same.config());
        let tokens = case.expected().tokens;
        assert_eq!(logits(&model, &tokens), logits(&same, &tokens));
    }
}

/// Files of `tied`, with two query heads on one key/value head, and scores of their own for each query head.
fn own() -> (Files, [Vec<f32>; 2], [f32; 2]) {
    let mut files = TIED.files();
    let width = 16;
    for layer in 0..2 {
        let row = files.floats(&name(layer, SCORES[0]));
        let other: Vec<f32> = row.iter().rev().map(|x| 1.5 * x).collect();
        let decay = files.floats(&name(layer, SCORES[1]))[0];
        let both: Vec<f32> = row.iter().chain(&other).copied().collect();
        files.set(&name(layer, SCORES[0]), &[2, width], &both);
        files.set(&name(layer, SCORES[1]), &[2], &[decay, 0.7 - decay]);
    }
    let both = files.floats(&name(0, SCORES[0]));
    let decay = files.floats(&name(0, SCORES[1]));
    let rows = [both[..width].to_vec(), both[width..].to_vec()];
    (files, rows, [decay[0], decay[1]])
}

#[test]
fn scores_of_its_own_give_each_query_head_its_selection() {
    let (files, weights, decays) = own();
    let model = files.read(&device());
    assert_eq!(model.config().resolved_kv_heads(), 2);
    let x = Tensor::<3>::random([1, 50, 32], Distribution::Normal(0.0, 1.0), &device());
    let ours = model.blocks[0].attention.forward(x.clone());

    // The layer's output is a sum over heads, each from a layer with only that head's scores.
    let mut sum = ours.zeros_like();
    for head in 0..2 {
        let mut files = TIED.files();
        files.set(&name(0, SCORES[0]), &[1, 16], &weights[head]);
        files.set(&name(0, SCORES[1]), &[1], &decays[head..=head]);
        let mut out = files.floats(&name(0, "o_proj.weight"));
        for row in out.chunks_mut(32) {
            row[(1 - head) * 16..][..16].fill(0.0);
        }
        files.set(&name(0, "o_proj.weight"), &[32, 32], &out);
        sum = sum + files.read(&device()).blocks[0].attention.forward(x.clone());
    }
    let shared = TIED.model(&device()).blocks[0].attention.forward(x);
    let [ours, sum, shared] = [ours, sum, shared].map(rows);
    assert_close("heads", &ours, &sum, TOLERANCE);
    assert!(difference(&shared, &ours) > 100.0 * TOLERANCE);
}

#[test]
fn a_model_with_scores_per_query_head_is_written_as_one_with_as_many_key_value_heads() {
    let (files, ..) = own();
    let model = files.read(&device());
    let directory = saved(&model);
    let again = Doge::from_safetensors(directory.path(""), &device()).expect("it is a model");
    assert_eq!(again.config().kv_heads, Some(2));
    let tokens = TIED.expected().tokens;
    assert_eq!(logits(&again, &tokens), logits(&model, &tokens));
}
