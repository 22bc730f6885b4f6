//! Writing models with adapters.

use crate::dir::Dir;
use crate::doge::files::{assert_saved_as, logits, saved};
use crate::doge::fixture::{CASES, assert_close, device, difference, rows, sequence};
use burn::module::{Lora, Module, ModuleMapper, Param};
use burn::tensor::Tensor;
use flash_dma_models::doge::{Doge, ModelError};

/// Fills the factors of adapters, as training does.
struct Trained;

impl ModuleMapper for Trained {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        // Weights are frozen below adapters, and so are the other parameters.
        match param.is_require_grad() {
            true => param.map(|value| value.add_scalar(0.03)),
            false => param,
        }
    }
}

#[test]
fn a_model_with_adapters_is_refused_and_once_they_are_merged_written_as_what_it_computes() {
    for case in &CASES {
        let model = case.model(&device().autodiff());
        let tokens = case.expected().tokens;
        let adapted = model.clone().apply_lora(Lora::new(2, 4.0));
        let adapted = adapted.map(&mut Trained);
        let directory = Dir::new();
        let inside = directory.path("model");
        let error = adapted.save_safetensors(&inside).expect_err("adapters");
        let ModelError::Adapters { paths } = &error else {
            panic!("{error}");
        };
        assert!(paths.contains(&"blocks.0.attention.q_proj.weight".to_owned()));
        assert!(error.to_string().contains("are not merged"), "{error}");
        assert!(!inside.exists(), "something was written");

        let plain = device();
        let ours = rows(adapted.forward(sequence(&tokens, &plain.clone().autodiff())));
        let again = Doge::from_safetensors(saved(&adapted.merged()).path(""), &plain);
        let again = again.expect("it is a model");
        assert_close("merged", &logits(&again, &tokens), &ours, 1e-5);
        let generating = logits(&adapted.for_generation(), &tokens);
        assert_close("for generation", &generating, &ours, 1e-5);
        assert!(difference(&logits(&model.for_generation(), &tokens), &ours) > 1e-3);
        // A model without adapters is already merged.
        assert_saved_as(&model.merged(), case);
    }
}
