//! Training of a decoder: it learns, with kept and with recomputed activations, and reports its layers' selections.
#![cfg(all(feature = "flex", feature = "autodiff"))]

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, Rope, Selection};
use burn_flash_dma::train::{AdamWConfig, clip_gradients};
use flash_dma_models::nn::{Activations, Decoder, DecoderConfig};

/// Two rows of 24 repeating numbers, and the numbers that follow them.
fn batch() -> [Tensor<2, Int>; 2] {
    let tokens = Tensor::<1, Int>::arange(0..49, &Device::flex()).remainder_scalar(7);
    [0, 1].map(|from| tokens.clone().narrow(0, from, 48).reshape([2, 24]))
}

fn config() -> DecoderConfig {
    let attention = DynamicMaskAttentionConfig::new(32, 2)
        .with_n_kv_heads(Some(1))
        .with_rope(Some(Rope::new(24)))
        .with_selection(Selection::keep(6));
    DecoderConfig::new(attention, 2).with_local_window(None)
}

/// A model of the configuration with the parameters of another one.
fn model(config: &DecoderConfig, parameters: &Decoder) -> Decoder {
    let model = config.init(&Device::flex().autodiff());
    model.load_record(parameters.clone().into_record())
}

/// Losses of some steps, and the model after them.
fn train(mut model: Decoder) -> (Vec<f32>, Decoder) {
    let mut optimiser = AdamWConfig::new().init();
    let [inputs, targets] = batch();
    let step = |_| {
        let loss = model.try_loss_and_backward(inputs.clone(), targets.clone(), None);
        let (loss, backward) = loss.expect("it fits");
        let mut gradients = backward();
        clip_gradients(&model, &mut gradients, 1.0);
        model = optimiser.step(0.01, model.clone(), gradients);
        loss.into_scalar::<f32>()
    };
    ((0..20).map(step).collect(), model)
}

#[test]
fn a_decoder_that_recomputes_its_blocks_learns_the_same() {
    let parameters = config().init(&Device::flex().autodiff());
    let [kept, recomputed] = [Activations::Kept, Activations::Recomputed]
        .map(|activations| train(model(&config().with_activations(activations), &parameters)).0);
    // Untrained, every byte is equally likely.
    assert!((kept[0] - 256f32.ln()).abs() < 0.5, "{kept:?}");
    assert!(kept[19] < kept[0] - 2.0, "{kept:?}");
    for (kept, recomputed) in kept.iter().zip(&recomputed) {
        assert!((kept - recomputed).abs() < 1e-4, "{kept} and {recomputed}");
    }
}

#[test]
fn sixteen_bit_activations_train_f32_parameters() {
    struct Types(Vec<DType>);
    impl ModuleVisitor for Types {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(param.val().dtype());
        }
    }
    let config = config().with_dtype(FloatDType::BF16);
    let (losses, model) = train(config.init(&Device::flex().autodiff()));
    assert!(losses[19] < losses[0] - 1.0, "{losses:?}");
    let mut types = Types(Vec::new());
    model.visit(&mut types);
    assert!(types.0.len() > 10 && types.0.iter().all(|&dtype| dtype == DType::F32));
}

#[test]
fn a_model_of_sixteen_bits_shows_its_selections() {
    let config = config().with_dtype(FloatDType::BF16);
    let model = config.init(&Device::flex());
    let [inputs, _] = batch();
    let shape = inputs.dims();
    let selections = model.try_selections(inputs).expect("it fits");
    assert_eq!(selections.len(), config.layers);
    for (intervals, scores) in selections.into_iter().flatten() {
        assert_eq!(intervals.tensor().dims()[2], shape[1]);
        assert_eq!(scores.dims()[2], shape[1]);
    }
}

#[test]
fn short_texts_have_as_large_a_share_of_the_keys_in_the_layers_that_choose() {
    let mut config = config()
        .with_local_window(Some(5))
        .with_dense_layers(vec![4]);
    config.attention = config.attention.with_selection(Selection::keep(40));
    config.layers = 4;
    let mut model = config.init(&Device::flex());
    let windows = |model: &Decoder| -> Vec<Option<usize>> {
        let layers = model.blocks.iter().map(|block| &block.attention);
        layers.map(|layer| layer.options().keep_window).collect()
    };
    for (divisor, window) in [(4, 10), (8, 8), (1, 40)] {
        model.try_set_share(divisor).expect("it fits");
        assert_eq!(windows(&model), [Some(5), Some(window), Some(5), None]);
    }
}

#[cfg(feature = "train")]
#[test]
fn the_metrics_say_what_the_layers_select_and_whether_the_scores_learn() {
    use burn::data::dataloader::Progress;
    use burn::train::metric::{Metric, MetricMetadata, Numeric};
    use burn_flash_dma::nn::Scores;
    use burn_flash_dma::train::{Measure, SelectionInput, SelectionMetric};

    let mut config = config();
    config.attention = config.attention.with_scores(Scores::Dma);
    let model = config.init(&Device::flex().autodiff());
    let [inputs, targets] = batch();
    let loss = model.try_loss_and_backward(inputs.clone(), targets.clone(), None);
    let (_, backward) = loss.expect("it fits");
    let gradients = model.score_gradients(&backward());
    let looked = model.valid().try_loss_and_selections(inputs, targets);
    let (_, selections) = looked.expect("it fits");
    let value = |measure: Measure, input: &SelectionInput| {
        let mut metric = SelectionMetric::new(measure);
        let metadata = MetricMetadata {
            progress: Progress::new(1, 1, None),
            iteration: None,
            lr: None,
        };
        metric.update(input, &metadata).expect("it can be read");
        metric.value().expect("a value").current()
    };
    assert!(value(Measure::ScoreGradient, &gradients) > 0.0);
    // Of 24 positions the first six see 1 to 6 keys, the others keep 6.
    assert!((value(Measure::KeysAlive, &selections) - 5.375).abs() < 1e-9);
    assert!((5.375..=24.0).contains(&value(Measure::Lifetime, &selections)));
    assert!((0.0..=100.0).contains(&value(Measure::Ties, &selections)));
}
