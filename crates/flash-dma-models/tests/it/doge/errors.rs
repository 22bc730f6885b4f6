//! Bad input is a typed error.

use crate::dir::Dir;
use crate::doge::fixture::{BIASED, CASES, TIED, device, sequence};
use burn::module::Initializer;
#[cfg(feature = "autodiff")]
use burn::tensor::Int;
use burn::tensor::{DType, Tensor};
use burn_flash_dma::AttentionError;
use flash_dma_models::LanguageModel;
use flash_dma_models::doge::{Doge, DogeConfig, ModelError};
#[cfg(feature = "autodiff")]
use flash_dma_models::nn::TokenInput;
use flash_dma_models::nn::{ExpertsConfig, Sequences};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use std::io::ErrorKind;

fn config() -> DogeConfig {
    DogeConfig::new(32, 1, 4).with_vocab_size(50)
}

fn refused(directory: &Dir) -> ModelError {
    Doge::from_safetensors(directory.path(""), &device()).expect_err("it is refused")
}

#[test]
fn files_that_are_not_there_are_named() {
    for missing in ["config.json", "model.safetensors"] {
        let directory = TIED.directory();
        std::fs::remove_file(directory.path(missing)).expect("it was there");
        assert_error!(
            refused(&directory),
            ModelError::Io { path, source }
                if source.kind() == ErrorKind::NotFound && path.ends_with(missing)
        );
    }
}

#[test]
fn a_file_that_ends_too_early_or_is_none_is_refused() {
    for case in &CASES {
        let bytes = case.tensors;
        let len = bytes.len();
        for end in [0, 1, 7, 8, 100, len / 2, len - 4, len - 1] {
            let directory = case.directory();
            directory.file("model.safetensors", &bytes[..end]);
            let error = refused(&directory);
            assert!(error.to_string().contains("model.safetensors"), "{error}");
            let io = matches!(error, ModelError::Io { .. }) && end == 0;
            assert!(io || matches!(error, ModelError::Malformed { .. }));
        }
    }
}

#[test]
fn missing_tensors_are_named() {
    for case in &CASES {
        for name in case.files().tensors.into_keys() {
            let mut files = case.files();
            files.tensors.remove(&name);
            assert_error!(
                refused(&files.write()),
                ModelError::Missing { names } if *names == [name.as_str()]
            );
        }
    }
}

#[test]
fn tensors_that_do_not_belong_to_the_model_are_named() {
    let mut files = TIED.files();
    files.set("model.layers.7.self_attn.A", &[1], &[0.5]);
    files.set("model.layers.0.self_attn.q_proj.bias", &[32], &[0.5; 32]);
    let expected = [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.7.self_attn.A",
    ];
    assert_error!(
        refused(&files.write()),
        ModelError::Unknown { names } if *names == expected
    );
}

#[test]
fn a_configuration_of_another_model_is_refused_by_the_tensors() {
    type Fits = fn(&ModelError) -> bool;
    let missing = |error: &ModelError| matches!(error, ModelError::Missing { .. });
    let unknown = |error: &ModelError| matches!(error, ModelError::Unknown { .. });
    let shape = |error: &ModelError| matches!(error, ModelError::Shape { .. });
    let config = |error: &ModelError| matches!(error, ModelError::Config { .. });
    let cases: [(&str, Value, Fits); 11] = [
        ("num_hidden_layers", json!(3), missing),
        ("is_moe", json!(true), missing),
        ("num_hidden_layers", json!(1), unknown),
        ("attention_bias", json!(false), unknown),
        ("mlp_bias", json!(false), unknown),
        ("vocab_size", json!(62), shape),
        ("hidden_size", json!(32), shape),
        ("num_key_value_heads", json!(1), shape),
        ("num_key_value_heads", json!(3), config),
        ("num_key_value_heads", json!(0), config),
        ("tie_word_embeddings", json!(true), config),
    ];
    for (field, value, fits) in cases {
        let mut files = BIASED.files();
        files.config[field] = value;
        let error = refused(&files.write());
        assert!(fits(&error), "{field}: {error}");
    }
}

#[test]
fn every_tensor_of_another_shape_is_named() {
    for case in &CASES {
        for (name, (dtype, mut shape, mut bytes)) in case.files().tensors {
            let mut files = case.files();
            // One more row, which is not the number of query heads either.
            let row = bytes.len() / shape[0];
            bytes.extend(vec![0; 3 * row]);
            shape[0] += 3;
            let value = (dtype, shape.clone(), bytes);
            files.tensors.insert(name.clone(), value);
            assert_error!(
                refused(&files.write()),
                ModelError::Shape { name: wrong, actual, .. } if (wrong, actual) == (&name, &shape)
            );
        }
    }
}

#[test]
fn other_element_types_are_refused() {
    for (dtype, expected) in [(Dtype::I32, DType::I32), (Dtype::U32, DType::U32)] {
        let mut files = TIED.files();
        let name = "model.layers.1.mlp.up_proj.weight";
        files.tensors.get_mut(name).expect("it is there").0 = dtype;
        assert_error!(
            refused(&files.write()),
            ModelError::ElementType { name: wrong, actual } if wrong == name && *actual == expected
        );
    }
}

#[test]
fn a_tensor_under_both_its_names_is_refused() {
    let mut files = TIED.files();
    let norm = files.tensors["model.norm.weight"].clone();
    let old = "model.final_layernorm.weight".into();
    files.tensors.insert(old, norm);
    assert_error!(
        refused(&files.write()),
        ModelError::Twice { name } if name == "model.norm.weight"
    );
}

#[test]
fn a_bad_index_is_refused() {
    let index = |text: String| {
        let directory = TIED.directory();
        let from = directory.path("model.safetensors");
        std::fs::rename(from, directory.path("a.safetensors")).expect("it was there");
        directory.file("model.safetensors.index.json", text);
        refused(&directory)
    };
    for text in ["", "[]", "{}", r#"{"weight_map": {"A": 1}}"#] {
        assert_error!(index(text.into()), ModelError::Malformed { .. });
    }
    for file in ["../a.safetensors", "/etc/passwd", "b/a.safetensors", ".."] {
        let text = json!({"weight_map": {"model.norm.weight": file}}).to_string();
        assert_error!(index(text), ModelError::Malformed { .. });
    }
    let text = json!({"weight_map": {"model.norm.weight": "b.safetensors"}}).to_string();
    assert_error!(index(text), ModelError::Io { .. });
}

#[test]
fn configurations_that_contradict_themselves_are_refused() {
    let experts = |count, per_token| Some(ExpertsConfig::new(count, per_token));
    let wrong = [
        config().with_vocab_size(0),
        config().with_intermediate_size(Some(0)),
        config().with_max_position_embeddings(0),
        config().with_experts(experts(16, 0)),
        config().with_experts(experts(16, 17)),
        // 16 of 20 experts can be chosen.
        config().with_experts(experts(20, 17)),
    ];
    for config in wrong {
        let error = config.try_init(&device()).expect_err("it is refused");
        assert_error!(error, ModelError::Config { .. });
    }
    let refused_by_attention = [
        config().with_kv_heads(Some(3)),
        config().with_head_dim(Some(12)),
        config().with_keep_window_size(0),
        config().with_rms_norm_eps(0.0),
        config().with_rms_norm_eps(f64::NAN),
    ];
    for config in refused_by_attention {
        let error = config.try_init(&device()).expect_err("it is refused");
        assert_error!(error, ModelError::Attention(_));
    }
    let most = config().with_experts(experts(20, 16));
    assert!(most.try_init(&device()).is_ok());
}

/// Size and limit in the refusal of a call.
fn too_large(result: Result<Tensor<3>, AttentionError>) -> Option<(usize, usize)> {
    match result.expect_err("it is refused") {
        AttentionError::TooLarge { size, limit, .. } => Some((size, limit)),
        _ => None,
    }
}

#[test]
fn positions_past_the_limit_of_dynamic_frequencies_are_refused() {
    let model = TIED.model(&device()).for_generation();
    let tokens = |len: usize| sequence(&vec![5; len], &device());
    let assert_too_large = |result| assert_eq!(too_large(result), Some((129, 128)));
    assert!(model.try_forward(tokens(128)).is_ok());
    assert_too_large(model.try_forward(tokens(129)));
    let mut caches = model.try_init_caches(1).expect("the model has caches");
    let mut read = |len| model.try_read(tokens(len), 1, &mut caches);
    assert!(read(127).is_ok());
    assert_too_large(read(2));
    // Nothing was read.
    assert!(read(1).is_ok());
    assert_eq!(model.max_len(), Some(128));
    // Plain frequencies have no limit over a cache.
    let plain = BIASED.model(&device()).for_generation();
    let mut caches = plain.try_init_caches(1).expect("the model has caches");
    assert!(plain.try_read(tokens(129), 1, &mut caches).is_ok());
    assert_eq!(plain.max_len(), None);
}

#[test]
fn more_rows_than_tokens_are_refused() {
    let model = TIED.model(&device()).for_generation();
    let mut caches = model.try_init_caches(1).expect("the model has caches");
    let result = model.try_read(sequence(&[5, 6], &device()), 3, &mut caches);
    assert_eq!(too_large(result), Some((3, 2)));
    assert!(caches.iter().all(|cache| cache.lengths() == [0]));
}

#[test]
fn a_rotary_encoding_without_a_base_is_refused() {
    for theta in [0.0, -1.0, f32::NAN] {
        let error = (config().with_rope_theta(theta).try_init(&device())).expect_err("refused");
        let text = error.to_string();
        assert!(text.contains("a positive, finite base"), "{text}");
    }
}

#[test]
fn a_block_in_another_type_than_its_tokens_blames_the_tokens() {
    let block = config().block().try_init(&device()).expect("a block");
    let x = Tensor::<3>::ones([1, 2, config().hidden_size], &device());
    // Parameters of f32 are read as they are or rounded for the products.
    let half = block.try_forward(x.clone().cast(DType::F16), &Sequences::new());
    assert_eq!(half.expect("no error").dtype(), DType::F16);
    let refused = |dtype| {
        let error = block.try_forward(x.clone().cast(dtype), &Sequences::new());
        error.expect_err("it is refused").to_string()
    };
    let expected = "x must be f32, f16 or bf16, but is f64";
    assert_eq!(refused(DType::F64), expected);
    let error = block.feed_forward.try_forward(x.clone().cast(DType::F64));
    let text = error.expect_err("it is refused").to_string();
    assert_eq!(text, "x must be f32, but is f64");
    let error = block.feed_forward.try_forward(x.narrow(2, 0, 1));
    assert!(matches!(error, Err(AttentionError::Shape { .. })));
}

#[test]
fn more_experts_of_a_token_than_there_are_are_refused() {
    let x = Tensor::<3>::ones([1, 2, 8], &device());
    let of = |all, per_token| {
        let experts = ExpertsConfig::new(all, per_token).init(8, &Initializer::Ones, &device());
        experts.try_forward(x.clone())
    };
    assert_eq!(too_large(of(5, 5)), Some((5, 4)));
    let none = of(0, 0).expect("nothing is added");
    assert_eq!(none.into_data().iter::<f32>().sum::<f32>(), 0.0);
}

#[cfg(feature = "autodiff")]
#[test]
fn targets_of_other_tokens_are_refused() {
    let model = config().init(&device().autodiff());
    let tokens = |len| Tensor::<2, Int>::zeros([2, len], &device().autodiff());
    let error = model.try_loss(tokens(3), tokens(4)).expect_err("refused");
    let text = error.to_string();
    assert_eq!(text, "the targets must have size 3 on axis 1, but has 4");
    assert!(model.try_token_losses(tokens(3), tokens(2)).is_err());
}

#[cfg(feature = "autodiff")]
#[test]
fn the_loss_of_no_tokens_is_zero_and_has_gradients() {
    let device = device().autodiff();
    let model = config().init(&device);
    for shape in [[0, 3], [2, 0]] {
        let tokens = || Tensor::<2, Int>::zeros(shape, &device);
        let logits = model.forward(tokens());
        assert_eq!(logits.dims()[..2], shape);
        let losses = model.try_token_losses(tokens(), tokens());
        assert_eq!(losses.unwrap().dims(), shape);
        let input = TokenInput::new(tokens()).lengths(vec![0; shape[0]]);
        let loss = model.loss(input, tokens());
        assert_eq!(loss.clone().into_scalar::<f32>(), 0.0);
        let grads = loss.backward();
        let grad = model.norm.gamma.val().grad(&grads).expect("it is tracked");
        assert_eq!(grad.into_data().iter::<f32>().sum::<f32>(), 0.0);
    }
}
