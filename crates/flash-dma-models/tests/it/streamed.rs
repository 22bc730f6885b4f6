//! The gradient of a sequence in parts is that of the whole.
#![cfg(all(feature = "flex", feature = "autodiff"))]

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_flash_dma::AttentionError;
use burn_flash_dma::nn::{
    DynamicMaskAttentionConfig, Logits, Rope, ScoreLearning, Scores, Selection,
};
use flash_dma_models::nn::{Decoder, DecoderConfig};

/// Gradients by name; empty where there is none.
struct ByName<'a> {
    gradients: &'a GradientsParams,
    path: Vec<String>,
    all: Vec<(String, Vec<f32>)>,
}

impl ModuleVisitor for ByName<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = self.gradients.get::<D>(param.id);
        let numbers = gradient.map(|gradient| gradient.into_data().iter::<f32>().collect());
        self.all
            .push((self.path.join("."), numbers.unwrap_or_default()));
    }
}

fn by_name(model: &Decoder, gradients: &GradientsParams) -> Vec<(String, Vec<f32>)> {
    let mut by_name = ByName {
        gradients,
        path: Vec::new(),
        all: Vec::new(),
    };
    model.visit(&mut by_name);
    by_name.all
}

fn attention(window: usize) -> DynamicMaskAttentionConfig {
    DynamicMaskAttentionConfig::new(32, 4)
        .with_n_kv_heads(Some(2))
        .with_rope(Some(Rope::new(200)))
        .with_selection(Selection::keep(window))
}

fn sequence(len: usize) -> [Tensor<2, Int>; 2] {
    let numbers = (0..2 * (len + 1)).map(|at| (at * at * 31 + at / 3) as i32 % 256);
    let numbers = TensorData::new(numbers.collect::<Vec<_>>(), [2, len + 1]);
    let tokens = Tensor::<2, Int>::from_data(numbers, &Device::flex());
    [0, 1].map(|from| tokens.clone().narrow(1, from, len))
}

/// Compares parts of each of these lengths with the whole.
fn check(config: &DecoderConfig, len: usize, parts: &[usize]) {
    let device = Device::flex().autodiff();
    device.seed(5);
    let model = config.init(&device);
    let [tokens, targets] = sequence(len);
    let (loss, backward) = model
        .try_loss_and_backward(tokens.clone(), targets.clone(), None)
        .expect("it fits");
    let whole = by_name(&model, &backward());
    let loss = loss.into_scalar::<f32>();
    for &part in parts {
        let streamed =
            model.try_loss_and_gradients_in_parts(tokens.clone(), targets.clone(), None, part);
        let (streamed, gradients) = streamed.expect("it fits");
        let streamed = streamed.into_scalar::<f32>();
        assert!((streamed - loss).abs() < 1e-5, "{streamed}, not {loss}");
        for ((name, whole), (_, parts)) in whole.iter().zip(by_name(&model, &gradients)) {
            assert_eq!(whole.len(), parts.len(), "{name} in parts of {part}");
            let most = whole.iter().fold(0f32, |most, x| most.max(x.abs()));
            let far = whole.iter().zip(&parts).map(|(a, b)| (a - b).abs());
            let far = far.fold(0f32, f32::max);
            println!("parts of {part}: {name}: off by {far:e} of {most:e}");
            assert!(
                far <= 2e-5 * most + 1e-9,
                "parts of {part}: {name}: off by {far} of {most}"
            );
        }
    }
}

#[test]
fn a_default_decoder_in_parts_has_the_gradient_of_the_whole() {
    let config = DecoderConfig::new(attention(12), 4).with_local_window(Some(5));
    check(&config, 60, &[60, 20, 17, 7]);
}
