//! The configuration.

use burn::tensor::FloatDType;
use burn_flash_dma::nn::QkNorm;
use flash_dma_models::doge::{DogeConfig, ModelError, RopeScaling};
use flash_dma_models::nn::{ExpertsConfig, Residual};
use serde_json::{Value, json};

fn minimal() -> Value {
    json!({
        "model_type": "doge", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "vocab_size": 100
    })
}

fn read(value: &Value) -> Result<DogeConfig, ModelError> {
    DogeConfig::from_hugging_face(&value.to_string())
}

#[test]
fn what_a_configuration_does_not_say_is_the_default_of_transformers() {
    let config = read(&minimal()).expect("it is complete");
    let sizes = [config.hidden_size, config.layers, config.heads];
    assert_eq!(sizes, [64, 3, 4]);
    let derived = [config.resolved_kv_heads(), config.resolved_head_dim()];
    assert_eq!(derived, [4, 16]);
    let lengths = [config.keep_window_size, config.max_position_embeddings];
    assert_eq!(lengths, [2048, 2048]);
    let rope = (config.rope_theta, config.rope_scaling);
    assert_eq!(rope, (10000.0, RopeScaling::Plain));
    assert_eq!(config.rms_norm_eps, 1e-6);
    assert!(!config.tie_word_embeddings && !config.attention_bias && !config.mlp_bias);
    assert!(config.experts.is_none() && config.end_tokens().is_empty());
    let block = config.block();
    assert_eq!(block.attention.qk_norm, QkNorm::Rms(1e-6));
    assert_eq!(block.residual, Residual::Learned);
}

#[test]
fn older_fields_mean_what_todays_mean() {
    let mut old = minimal();
    old["hidden_bias"] = true.into();
    old["rope_theta"] = 500.0.into();
    old["rope_scaling"] = json!({"rope_type": "dynamic", "factor": 4.0});
    old["eos_token_id"] = json!([1, 7]);
    let config = read(&old).expect("it is complete");
    assert!(config.attention_bias && config.mlp_bias);
    let rope = (config.rope_theta, config.rope_scaling);
    assert_eq!(rope, (500.0, RopeScaling::Dynamic(4.0)));
    assert_eq!(config.end_tokens(), [1, 7]);
}

#[test]
fn a_configuration_is_read_as_it_was_written() {
    let mut experts = minimal();
    experts["is_moe"] = true.into();
    experts["num_experts"] = 64.into();
    experts["num_experts_per_tok"] = 5.into();
    experts["rms_norm_eps"] = 1e-5.into();
    experts["head_dim"] = 24.into();
    let config = read(&experts).expect("it is complete");
    assert_eq!(config.experts, Some(ExpertsConfig::new(64, 5)));
    let configs = [
        config,
        DogeConfig::doge_60m(),
        read(&minimal()).expect("it is complete"),
    ];
    for config in configs {
        let text = config.to_hugging_face(FloatDType::BF16);
        let again = DogeConfig::from_hugging_face(&text).expect("it was written here");
        let mut same = config.clone();
        // Derived values are written, and so are fields that others read.
        same.kv_heads = Some(config.resolved_kv_heads());
        same.intermediate_size = Some(config.resolved_intermediate_size());
        same.other = again.other.clone();
        assert_eq!(again, same);
        assert_eq!(again.other["dtype"], "bfloat16");
    }
}

#[test]
fn sizes_of_the_published_models_are_theirs() {
    for (config, expected) in [
        (DogeConfig::doge_20m(), [256, 8, 2, 1, 512]),
        (DogeConfig::doge_60m(), [512, 16, 4, 2, 1024]),
    ] {
        let (heads, kv_heads) = (config.heads, config.resolved_kv_heads());
        let inner = config.resolved_intermediate_size();
        let sizes = [config.hidden_size, config.layers, heads, kv_heads, inner];
        assert_eq!((sizes, config.vocab_size), (expected, 32768));
    }
}

#[test]
fn what_this_model_does_not_compute_is_refused_by_its_field() {
    let turned = "partial_rotary_factor";
    let cases = [
        ("model_type", json!("llama"), "model_type"),
        ("hidden_act", json!("gelu"), "hidden_act"),
        ("sliding_window", json!(512), "sliding_window"),
        ("hidden_dropout", json!(0.1), "hidden_dropout"),
        ("attention_dropout", json!(0.1), "attention_dropout"),
        ("dynamic_mask_ratio", json!(0.5), "dynamic_mask_ratio"),
        ("rope_scaling", json!({"rope_type": "yarn"}), "rope_type"),
        ("rope_parameters", json!({turned: 0.5}), turned),
    ];
    for (name, value, expected) in cases {
        let mut config = minimal();
        config[name] = value;
        assert_error!(
            read(&config).expect_err("it is refused"),
            ModelError::Unsupported { field, .. } if *field == expected
        );
    }
    let mut first_kind = minimal();
    first_kind["is_moe"] = true.into();
    first_kind["num_cdmoe_experts"] = 16348.into();
    let error = read(&first_kind).expect_err("it is refused");
    assert!(matches!(error, ModelError::Unsupported { .. }), "{error}");
}

#[test]
fn a_configuration_that_lacks_a_size_or_has_another_type_says_which() {
    let config = minimal();
    // All that it has must be there.
    for field in config.as_object().expect("an object").keys() {
        let mut config = config.clone();
        config.as_object_mut().expect("an object").remove(field);
        let error = read(&config).expect_err("it is refused");
        assert!(matches!(error, ModelError::Config { .. }), "{error}");
        assert!(error.to_string().contains(field), "{error}");
    }
    let mut config = minimal();
    config["vocab_size"] = "many".into();
    let error = read(&config).expect_err("it is refused");
    assert!(error.to_string().contains("vocab_size"), "{error}");
    for text in ["", "[]", "{"] {
        let error = DogeConfig::from_hugging_face(text).expect_err("it is refused");
        assert!(matches!(error, ModelError::Config { .. }), "{error}");
    }
}
