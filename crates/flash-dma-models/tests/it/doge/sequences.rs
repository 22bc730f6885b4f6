//! Padding, packed documents, and training.

use crate::doge::fixture::{
    BIASED, EXPERTS, TOLERANCE, assert_close, devices, everywhere, rows, sequence,
};
use burn::tensor::{Int, Tensor};
use burn_flash_dma::Documents;
use flash_dma_models::nn::TokenInput;

#[test]
fn packed_documents_are_computed_as_if_each_stood_alone() {
    for (case, device) in everywhere() {
        let model = case.model(&device);
        let tokens = case.expected().tokens;
        let lengths = [20, 1, tokens.len() - 21];
        let documents = Documents::from_lengths([lengths.to_vec()]);
        let input = TokenInput::new(sequence(&tokens, &device)).documents(documents);
        let packed = rows(model.forward(input));
        let mut start = 0;
        for length in lengths {
            let alone = sequence(&tokens[start..start + length], &device);
            let alone = rows(model.forward(alone));
            assert_close(case.name, &packed[start..start + length], &alone, TOLERANCE);
            start += length;
        }
    }
}

#[test]
fn padding_changes_no_other_row() {
    for device in devices() {
        let model = EXPERTS.model(&device);
        let tokens = EXPERTS.expected().tokens;
        let both = sequence(&[&tokens[..30], &[7; 10]].concat(), &device);
        let other = sequence(&tokens[..40], &device);
        let both = TokenInput::new(Tensor::cat(vec![both, other.clone()], 0)).lengths([30, 40]);
        let both = rows(model.forward(both));
        let alone = rows(model.forward(sequence(&tokens[..30], &device)));
        assert_close("padded", &both[..30], &alone, TOLERANCE);
        assert_close("full", &both[40..], &rows(model.forward(other)), TOLERANCE);
    }
}

#[cfg(feature = "autodiff")]
mod training {
    use super::*;
    use burn::module::{Module, ModuleVisitor, Param};
    use burn::tensor::{FloatDType, Gradients};

    /// The mean of `-log softmax` at the targets, in f64.
    fn by_definition(logits: &[Vec<f32>], targets: &[i32]) -> f64 {
        let losses = logits.iter().zip(targets).map(|(row, &target)| {
            let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
            sum.ln() - f64::from(row[target as usize])
        });
        losses.sum::<f64>() / targets.len() as f64
    }

    #[test]
    fn the_loss_is_the_mean_over_the_tokens_that_are_no_padding() {
        for device in devices() {
            let model = BIASED.model(&device);
            let tokens = BIASED.expected().tokens;
            let (inputs, targets) = (&tokens[..40], &tokens[1..41]);
            let logits = rows(model.forward(sequence(inputs, &device)));
            let loss = |input: TokenInput| {
                let loss = model.loss(input, sequence(targets, &device));
                f64::from(loss.into_scalar::<f32>())
            };
            let all = loss(sequence(inputs, &device).into());
            assert!((all - by_definition(&logits, targets)).abs() < 1e-4);
            let some = loss(TokenInput::new(sequence(inputs, &device)).lengths([25]));
            assert!((some - by_definition(&logits[..25], &targets[..25])).abs() < 1e-4);
        }
    }

    /// Collects parameters whose gradient is missing, zero or not finite.
    struct Silent<'a> {
        gradients: &'a Gradients,
        path: Vec<String>,
        found: Vec<String>,
    }

    impl ModuleVisitor for Silent<'_> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.into());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let gradient = param.val().grad(self.gradients);
            let size = gradient.map(|gradient| gradient.abs().sum().into_scalar::<f32>());
            if !size.is_some_and(|size| size > 0.0 && size.is_finite()) {
                self.found.push(self.path.join("."));
            }
        }
    }

    #[test]
    fn every_parameter_learns_in_f32_and_beside_activations_in_bf16() {
        for (case, device) in everywhere() {
            for dtype in [FloatDType::F32, FloatDType::BF16] {
                let model = case.model(&device.clone().autodiff()).with_dtype(dtype);
                let tokens = case.expected().tokens;
                let shifted = |start| -> Tensor<2, Int> {
                    sequence(&tokens[start..start + 50], &device.clone().autodiff())
                };
                let gradients = model.loss(shifted(0), shifted(1)).backward();
                let mut silent = Silent {
                    gradients: &gradients,
                    path: Vec::new(),
                    found: Vec::new(),
                };
                model.visit(&mut silent);
                assert_eq!(silent.found, Vec::<String>::new(), "{}", case.name);
            }
        }
    }
}
