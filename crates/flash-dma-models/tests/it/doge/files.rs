//! Reading and writing of files.

use crate::dir::Dir;
use crate::doge::fixture::{BIASED, CASES, Case, Files, TIED, device, rows, sequence};
use burn::tensor::{DType, FloatDType};
use flash_dma_models::doge::Doge;
use safetensors::tensor::{Dtype, SafeTensors};
use serde_json::json;

/// Logits of a model over the fixture's tokens.
pub fn logits(model: &Doge, tokens: &[i32]) -> Vec<Vec<f32>> {
    rows(model.forward(sequence(tokens, &device())))
}

pub fn saved(model: &Doge) -> Dir {
    let directory = Dir::new();
    // A folder that does not exist yet.
    let inside = directory.path("model");
    model.save_safetensors(&inside).expect("it can be written");
    for name in ["config.json", "model.safetensors"] {
        let written = std::fs::read(inside.join(name)).expect("it is there");
        directory.file(name, written);
    }
    directory
}

/// Asserts that a model is written as the bytes of a fixture.
#[track_caller]
pub fn assert_saved_as(model: &Doge, case: &Case) {
    let same = saved(model).bytes("model.safetensors") == case.tensors;
    assert!(same, "{}", case.name);
}

#[test]
fn a_model_is_written_as_the_bytes_that_it_was_read_from() {
    for case in &CASES {
        let model = case.model(&device());
        assert_saved_as(&model, case);
        let directory = saved(&model);
        let again = Doge::from_safetensors(directory.path(""), &device()).expect("it is a model");
        assert_eq!(again.config(), model.config());
        let tokens = case.expected().tokens;
        assert_eq!(logits(&again, &tokens), logits(&model, &tokens));
    }
}

#[test]
fn what_this_crate_does_not_read_of_a_configuration_is_written_back() {
    let mut files = TIED.files();
    files.config["a_field_of_someone"] = json!({"else": [1, 2]});
    let model = files.read(&device());
    assert_eq!(model.config().end_tokens(), [60]);
    let written = saved(&model).bytes("config.json");
    let written: serde_json::Value = serde_json::from_slice(&written).expect("it is JSON");
    for (field, value) in files.config.as_object().expect("an object") {
        // Numbers of experts in a model without any.
        if !field.starts_with("num_experts") {
            assert_eq!(&written[field], value, "{field}");
        }
    }
}

/// The older name of a tensor.
fn old(name: &str) -> String {
    let names = [
        ("model.embed_tokens.", "model.word_embed."),
        ("model.norm.", "model.final_layernorm."),
        (".input_layernorm.", ".pre_layernorm."),
        (".post_attention_layernorm.", ".post_layernorm."),
        (".input_residual", ".pre_residual.weight"),
        (".post_attention_residual", ".post_residual.weight"),
        (".mlp.", ".feed_forward."),
    ];
    (names.iter()).fold(name.into(), |name: String, (new, old)| {
        name.replace(new, old)
    })
}

#[test]
fn older_files_are_read_and_written_under_the_names_of_today() {
    for case in &CASES {
        let mut files = case.files();
        files.tensors = (files.tensors.into_iter())
            .map(|(name, value)| (old(&name), value))
            .collect();
        assert!(files.tensors.contains_key("model.word_embed.weight"));
        let config = files.config.as_object_mut().expect("an object");
        let rope = config.remove("rope_parameters").expect("it is there");
        config.insert("rope_theta".into(), rope["rope_theta"].clone());
        if rope["rope_type"] == "dynamic" {
            let scaling = json!({
                "factor": 4.0, "original_max_position_embeddings": 128, "rope_type": "dynamic"
            });
            config.insert("rope_scaling".into(), scaling);
        }
        config.insert("torch_dtype".into(), json!("float32"));
        let model = files.read(&device());
        let today = case.model(&device());
        let scalings = [&model, &today].map(|model| model.config().rope_scaling);
        assert_eq!(scalings[0], scalings[1]);
        assert_saved_as(&model, case);
    }
}

#[test]
fn a_model_in_several_files_is_read() {
    let files = BIASED.files();
    let directory = Dir::new();
    directory.file("config.json", files.config.to_string());
    let shard = |name: &str| name.len() % 3;
    let file = |number: usize| format!("model-0000{}-of-00003.safetensors", number + 1);
    for number in 0..3 {
        let bytes = files.tensors_of(|name| shard(name) == number);
        directory.file(&file(number), &bytes);
    }
    let map: serde_json::Map<_, _> = (files.tensors.keys())
        .map(|name| (name.clone(), file(shard(name)).into()))
        .collect();
    let index = json!({"metadata": {"total_size": 1}, "weight_map": map}).to_string();
    directory.file("model.safetensors.index.json", index);
    let model = Doge::from_safetensors(directory.path(""), &device()).expect("the files fit");
    assert_saved_as(&model, &BIASED);
}

/// The files in 16 bits, rounded by truncation: the kind of rounding does not matter here.
fn halved(mut files: Files) -> Files {
    for (dtype, _, bytes) in files.tensors.values_mut() {
        let halves = bytes.chunks_exact(4).flat_map(|float| [float[2], float[3]]);
        (*dtype, *bytes) = (Dtype::BF16, halves.collect());
    }
    files
}

#[test]
fn files_in_16_bits_are_read_as_any_float_type() {
    for case in &CASES {
        let files = halved(case.files());
        let directory = files.write();
        let read = |dtype| Doge::from_safetensors_as(directory.path(""), dtype, &device());
        let wide = read(FloatDType::F32).expect("bf16 is read as f32");
        assert_eq!(wide.embedding.weight.dtype(), DType::F32);
        let names = ["embed_tokens", "layers.1.self_attn.q_proj"];
        let names = names.map(|part| format!("model.{part}.weight"));
        let wide = saved(&wide).bytes("model.safetensors");
        let wide = SafeTensors::deserialize(&wide).expect("it is a file of tensors");
        for name in names {
            let cut = files.tensors[&name].2.chunks_exact(2);
            let widened: Vec<u8> = cut.flat_map(|float| [0, 0, float[0], float[1]]).collect();
            let written = wide.tensor(&name).expect("it was written");
            assert!(written.data() == widened, "{name}");
        }
        // In their own type they are written back unchanged.
        let narrow = read(FloatDType::BF16).expect("bf16 is read as bf16");
        let q_proj = &narrow.blocks[0].attention.q_proj;
        assert_eq!(q_proj.weight.dtype(), DType::BF16);
        let written = saved(&narrow);
        let bytes = written.bytes("model.safetensors");
        let written_tensors = SafeTensors::deserialize(&bytes).expect("a file");
        for (name, (dtype, shape, bytes)) in &files.tensors {
            let view = written_tensors.tensor(name).expect("it was written");
            assert_eq!((view.dtype(), view.shape()), (*dtype, &shape[..]), "{name}");
            assert!(view.data() == bytes, "{name}");
        }
        let config = String::from_utf8(written.bytes("config.json")).expect("it is text");
        assert!(config.contains(r#""dtype": "bfloat16""#), "{config}");
        let half = read(FloatDType::F16).expect("bf16 is read as f16");
        assert_eq!(half.norm.gamma.dtype(), DType::F16);
    }
}

#[test]
fn a_tied_embedding_may_be_there_twice() {
    let mut files = TIED.files();
    let embedding = files.tensors["model.embed_tokens.weight"].clone();
    files.tensors.insert("lm_head.weight".into(), embedding);
    let model = files.read(&device());
    assert_saved_as(&model, &TIED);
}

#[test]
fn files_from_before_the_norms_of_q_and_k_make_a_model_without_them() {
    let mut files = TIED.files();
    let norm = |name: &str| name.contains("q_norm") || name.contains("k_norm");
    files.tensors.retain(|name, _| !norm(name));
    let model = files.read(&device());
    assert!(!model.config().qk_norm);
    let mut blocks = model.blocks.iter();
    assert!(blocks.all(|block| block.attention.q_norm.is_none()));
    let tokens = TIED.expected().tokens;
    assert!(logits(&model, &tokens) != logits(&TIED.model(&device()), &tokens));
}
