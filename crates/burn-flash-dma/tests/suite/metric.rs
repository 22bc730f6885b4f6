//! The metric of Burn's training loop, through the trait that the loop calls.

use crate::case::{grad, uniform};
use crate::layer::{self, Groups, of_scores};
use burn::data::dataloader::Progress;
use burn::tensor::{Device, Tensor};
use burn::train::metric::{Metric, MetricMetadata, Numeric};
use burn_flash_dma::nn::{DynamicMaskAttention, Scorer, Scores, Selection};
use burn_flash_dma::train::{Measure, SelectionInput, SelectionMetric};
use burn_flash_dma::{IntervalStats, Selector};

fn metadata() -> MetricMetadata {
    MetricMetadata {
        progress: Progress {
            items_processed: 1,
            items_total: 1,
            unit: None,
        },
        iteration: Some(0),
        lr: None,
    }
}

fn layer(scores: Scores, window: usize, device: &Device) -> DynamicMaskAttention {
    let config = layer::config()
        .with_selection(Selection::keep(window).with_recent(Some(2)))
        .learning(|l| l.with_runners_up(Some(3)));
    config.with_scores(scores).init(device)
}

fn x(batch: usize, layer: &DynamicMaskAttention) -> Tensor<3> {
    layer::tokens_for(layer, batch, 30)
}

/// Value that a metric shows after an update.
fn value(metric: &mut SelectionMetric, input: &SelectionInput) -> Option<f64> {
    metric.update(input, &metadata()).expect("a readable input");
    metric.value().map(|entry| entry.current())
}

fn measured(measure: Measure, input: &SelectionInput) -> Option<f64> {
    value(&mut SelectionMetric::new(measure), input)
}

fn near(actual: Option<f64>, expected: f64, what: &str) {
    let actual = actual.unwrap_or_else(|| panic!("{what} has no value"));
    let near = (actual - expected).abs() <= 1e-6 * expected.abs();
    assert!(near, "{what}: {actual} is not {expected}");
}

#[test]
fn the_numbers_are_those_of_the_selections() {
    let layers = [4, 7].map(|window| layer(Scores::Ranking, window, &Device::flex().autodiff()));
    let x = x(3, &layers[0]);
    let of = |number: fn(&IntervalStats) -> f64| {
        let numbers = layers.each_ref().map(|layer| {
            let stats = layer.selection(x.clone()).stats();
            number(&stats)
        });
        numbers.iter().sum::<f64>() / 2.0
    };
    let ties = layers.each_ref().map(|layer| {
        let scores = layer.scores(x.clone());
        layer.selection(x.clone()).tie_rate(&scores)
    });
    let input = layers.iter().fold(SelectionInput::new(), |input, layer| {
        input.layer(layer, x.clone())
    });
    for (measure, expected) in [
        (Measure::KeysAlive, of(|s| s.mean_alive)),
        (Measure::Lifetime, of(|s| s.mean_lifetime)),
        (Measure::Recents, 100.0 * of(|s| s.recent)),
        (Measure::Ties, 50.0 * (ties[0] + ties[1])),
    ] {
        near(measured(measure, &input), expected, &format!("{measure:?}"));
    }
    assert_eq!(measured(Measure::ScoreGradient, &input), None);
}

#[test]
fn ties_are_percent_of_positions() {
    let scores = Tensor::<3>::ones([2, 1, 16], &Device::flex());
    let intervals = Selector::top(4).select(scores.clone());
    let input = SelectionInput::new().selection(&intervals, scores);
    assert_eq!(measured(Measure::Ties, &input), Some(100.0));
    assert_eq!(measured(Measure::Recents, &input), Some(0.0));
}

#[test]
fn the_norm_is_that_of_all_gradients_of_the_scores() {
    for scores in [Scores::Dma, Scores::Added] {
        let layers = [4, 7].map(|window| layer(scores, window, &Device::flex().autodiff()));
        let [first, second] = &layers;
        let out = second.forward(first.forward(x(2, first)));
        let grads = out.powi_scalar(2).sum().backward();
        let mut gradients = Vec::new();
        for layer in &layers {
            gradients.extend(of_scores(layer, &grads));
            if let Scorer::Zoh(zoh) = layer.scorer() {
                gradients.extend(grad(&zoh.a.val(), &grads));
            }
        }
        let squares: f64 = gradients.iter().map(|g| g * g).sum();
        let input = layers.iter().fold(SelectionInput::new(), |input, layer| {
            input.gradients_of(layer.scorer(), &grads)
        });
        assert!(squares > 0.0);
        let norm = measured(Measure::ScoreGradient, &input);
        near(norm, squares.sqrt(), "norm");
        for measure in &Measure::ALL[..4] {
            assert_eq!(measured(*measure, &input), None);
        }
    }
}

#[test]
fn scores_from_elsewhere_have_a_norm_too() {
    let device = Device::flex().autodiff();
    let layer = layer(Scores::Dma, 5, &device);
    let x = x(2, &layer);
    let scores = uniform([2, 2, 30], &device).require_grad();
    let out = layer.forward_with_scores(x, scores.clone());
    let grads = out.powi_scalar(2).sum().backward();
    let squares: f64 = grad(&scores, &grads).iter().map(|g| g * g).sum();
    let input = SelectionInput::new().gradient(scores.grad(&grads).expect("tracked"));
    let norm = measured(Measure::ScoreGradient, &input);
    near(norm, squares.sqrt(), "norm");
}

#[test]
fn an_epoch_is_the_mean_over_its_sequences() {
    let mut metric = SelectionMetric::new(Measure::KeysAlive);
    let entry = metric.update(&SelectionInput::new(), &metadata());
    assert!(entry.expect("nothing to read").is_not_available());
    assert!(metric.value().is_none() && metric.running_value().is_none());
    let all = metric.compute().expect("nothing to read");
    assert!(all.is_not_available());
    let mut sum = 0.0;
    for (batch, window) in [(1, 3), (4, 9)] {
        let scores = uniform([batch, 2, 30], &Device::flex());
        let intervals = Selector::top(window).select(scores.clone());
        let input = SelectionInput::new().selection(&intervals, scores);
        let now = value(&mut metric, &input).expect("a selection");
        near(Some(now), intervals.stats().mean_alive, "batch");
        sum += batch as f64 * now;
    }
    near(Some(metric.final_value().current()), sum / 5.0, "epoch");
    metric.clear();
    assert!(metric.value().is_none());
    let names: std::collections::BTreeSet<_> = Measure::ALL
        .map(|measure| SelectionMetric::new(measure).name().to_string())
        .into();
    assert_eq!(names.len(), Measure::ALL.len());
}
