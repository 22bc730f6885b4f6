//! Output to `tracing`: spans of calls and operations, their engines and nesting; warnings of layers.

use crate::case::uniform;
use burn::tensor::{Device, Tensor};
use burn_flash_dma::cache::DynamicMaskCacheConfig;
use burn_flash_dma::nn::{
    DynamicMaskAttentionConfig, DynamicMaskCrossAttentionConfig, ScoreLearning, Scores, Selection,
};
use burn_flash_dma::{AttentionOptions, dynamic_mask_attention, rms_norm};
use std::cell::RefCell;
use std::sync::Once;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Subscriber of the process: one per test would race with the registration of spans by other tests. It notes
/// `name(engine)` of each of our spans that a recording thread enters, indented by two spaces per open span, and the
/// text of every event.
struct Log;

/// Recording of one thread.
#[derive(Default)]
struct Recording {
    names: Vec<String>,
    open: usize,
    lines: Vec<String>,
}

thread_local! {
    static RECORDING: RefCell<Option<Recording>> = const { RefCell::new(None) };
}

/// The text of an event.
struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, _field: &Field, value: &dyn std::fmt::Debug) {
        self.0 = format!("{value:?}");
    }
}

struct EngineField(Option<String>);

impl Visit for EngineField {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "engine" {
            self.0 = Some(value.into());
        }
    }

    fn record_debug(&mut self, _field: &Field, _value: &dyn std::fmt::Debug) {}
}

/// Applies `change` to this thread's recording, if any.
fn note<T>(change: impl FnOnce(&mut Recording) -> T) -> Option<T> {
    RECORDING.with_borrow_mut(|recording| recording.as_mut().map(change))
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "flash_dma"
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut engine = EngineField(None);
        span.record(&mut engine);
        let engine = engine.0.map(|engine| format!("({engine})"));
        let name = span.metadata().name().to_string() + &engine.unwrap_or_default();
        let count = note(|recording| {
            recording.names.push(name);
            recording.names.len()
        });
        Id::from_u64(count.unwrap_or(1) as u64)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}
    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        note(|recording| recording.lines.push(text.0));
    }

    fn enter(&self, span: &Id) {
        note(|recording| {
            let name = &recording.names[span.into_u64() as usize - 1];
            let line = format!("{}{name}", "  ".repeat(recording.open));
            recording.lines.push(line);
            recording.open += 1;
        });
    }

    fn exit(&self, _span: &Id) {
        note(|recording| recording.open -= 1);
    }
}

/// Spans that `run` opens on this thread, and the events.
pub(crate) fn spans_of(run: impl FnOnce()) -> Vec<String> {
    static SUBSCRIBED: Once = Once::new();
    SUBSCRIBED.call_once(|| {
        tracing::subscriber::set_global_default(Log).expect("there is no other subscriber");
    });
    // A span registered by another test just before does not know of our interest yet.
    tracing::callsite::rebuild_interest_cache();
    RECORDING.set(Some(Recording::default()));
    run();
    let recording = RECORDING.take().expect("it was set above");
    assert_eq!(recording.open, 0, "every span is closed");
    recording.lines
}

fn random(heads: usize, device: &Device) -> Tensor<4> {
    uniform([1, heads, 24, 8], device)
}

/// A forward and a backward pass.
fn train(options: AttentionOptions, device: &Device) {
    let device = device.clone().autodiff();
    let [q, k, v] = [2, 1, 1].map(|heads| random(heads, &device));
    let scores = uniform([1, 1, 24], &device);
    let out = dynamic_mask_attention(q.require_grad(), k, v, scores, options);
    out.sum().backward();
}

#[test]
fn a_call_holds_its_operations_and_the_backward_pass_stands_behind_it() {
    let options = AttentionOptions::new().with_keep_window(6);
    let lines = spans_of(|| train(options, &Device::flex()));
    let call = ["attention", "  select(cpu)", "  forward(cpu)"];
    assert_eq!(lines, [&call[..], &["backward(cpu)"]].concat());
}

#[test]
fn norms_and_steps_over_a_cache_are_named() {
    let device = Device::flex();
    let options = AttentionOptions::new().with_keep_window(6);
    let lines = spans_of(|| {
        let mut cache = DynamicMaskCacheConfig::new(1, 1, 8, options).init(&device);
        let scores = uniform([1, 1, 24], &device);
        cache.append(random(1, &device), random(1, &device), scores.clone());
        let [q, k, v] = [2, 1, 1].map(|heads| random(heads, &device).narrow(2, 0, 2));
        let _ = cache.step(q, k, v, scores.narrow(2, 0, 2));
        let x = Tensor::<2>::ones([3, 8], &device);
        let _ = rms_norm(x, Tensor::ones([8], &device), 1e-5);
    });
    assert_eq!(lines, ["append(cpu)", "decode(cpu)", "norm_forward(cpu)"]);
}

#[test]
fn a_layer_warns_of_scores_that_do_nothing_or_learn_nothing() {
    let warned = |selection: Selection, learning: ScoreLearning, scores: Scores| {
        let config = DynamicMaskAttentionConfig::new(32, 4)
            .with_scores(scores)
            .with_selection(selection)
            .with_learning(Some(learning));
        let lines = spans_of(|| drop(config.init(&Device::flex())));
        assert!(lines.len() < 2, "{lines:?}");
        lines.into_iter().next().unwrap_or_default()
    };
    let (new, keep) = (ScoreLearning::new, || Selection::keep(8));
    let nothing = || ScoreLearning::none().with_tokens(true);
    let text = warned(Selection::new(), new(), Scores::Ranking);
    assert!(
        text.contains("without a window nothing is ranked"),
        "{text}"
    );
    let text = warned(keep(), nothing(), Scores::Ranking);
    assert!(text.contains("6 of 8 keys"), "{text}");
    for (selection, learning, scores) in [
        (keep(), new(), Scores::Ranking),
        (keep(), nothing().with_kept(true), Scores::Ranking),
        (Selection::last(8), ScoreLearning::none(), Scores::Ranking),
        (Selection::new(), ScoreLearning::none(), Scores::Ranking),
        (Selection::new(), new(), Scores::Added),
        (keep(), nothing(), Scores::Dma),
    ] {
        let text = warned(selection, learning, scores);
        assert_eq!(text, "");
    }
    let lines =
        spans_of(|| drop(DynamicMaskCrossAttentionConfig::new(32, 4).init(&Device::flex())));
    assert!(
        lines.concat().contains("DynamicMaskCrossAttention"),
        "{lines:?}"
    );
}
