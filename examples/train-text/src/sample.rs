//! Text from a trained model.

use burn::prelude::*;

use crate::model::TextModel;
use crate::rng::Rng;

/// How to sample.
#[derive(Debug, Clone, Copy)]
pub struct SampleOptions {
    /// Bytes to add to the prompt.
    pub bytes: usize,
    /// Divides the logits; 0 takes the most likely byte.
    pub temperature: f64,
    /// Seed of the draws.
    pub seed: u64,
    /// The longest context the model has been trained on.
    pub seq: usize,
}

/// The bytes that follow `prompt`.
///
/// The context grows up to `seq` bytes and then moves along. Each step runs the model on the whole
/// context: this shows what the model has learnt, a decoder with a cache is another example.
///
/// # Panics
///
/// If `prompt` is empty: the model predicts the byte after another.
pub fn sample(
    model: &TextModel,
    prompt: &[u8],
    options: SampleOptions,
    device: &Device,
) -> Vec<u8> {
    assert!(!prompt.is_empty(), "a prompt is needed");
    let mut rng = Rng::new(options.seed, u64::MAX);
    let mut text = prompt.to_vec();
    for _ in 0..options.bytes {
        let context = &text[text.len().saturating_sub(options.seq)..];
        let byte = pick(
            &next_logits(model, context, device),
            options.temperature,
            &mut rng,
        );
        text.push(byte);
    }
    text.split_off(prompt.len())
}

/// Bytes as text: what is not UTF-8, and control characters, which a terminal would obey, become
/// U+FFFD.
pub fn printable(bytes: &[u8]) -> String {
    let replace = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    String::from_utf8_lossy(bytes).replace(replace, "\u{fffd}")
}

fn next_logits(model: &TextModel, context: &[u8], device: &Device) -> Vec<f32> {
    let n = context.len();
    let tokens: Vec<i32> = context.iter().map(|&byte| byte.into()).collect();
    let tokens = Tensor::from_data(TensorData::new(tokens, [1, n]), device);
    let last = model.forward(tokens).slice([0..1, n - 1..n]);
    last.try_into_vec_as::<f32>()
        .expect("the logits can be read")
}

/// Draws an index with probabilities `softmax(logits / temperature)`.
fn pick(logits: &[f32], temperature: f64, rng: &mut Rng) -> u8 {
    let best = logits.iter().enumerate().fold(
        0,
        |best, (i, &logit)| if logit > logits[best] { i } else { best },
    );
    let mut chosen = best;
    if temperature > 0.0 {
        let weight = |logit: f32| (f64::from(logit - logits[best]) / temperature).exp();
        let total: f64 = logits.iter().map(|&logit| weight(logit)).sum();
        let mut at = rng.unit() * total;
        for (i, &logit) in logits.iter().enumerate() {
            at -= weight(logit);
            if at < 0.0 {
                chosen = i;
                break;
            }
        }
    }
    u8::try_from(chosen).expect("the vocabulary is the bytes")
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::model::TextModelConfig;

    #[test]
    fn temperature_zero_takes_the_most_likely_byte() {
        let mut logits = vec![0.0; 256];
        logits[65] = 3.0;
        assert_eq!(pick(&logits, 0.0, &mut Rng::new(0, 0)), 65);
    }

    #[test]
    fn a_sample_is_printed_without_control_characters() {
        assert_eq!(
            printable(b"fn a\n\t\x1b[2J\xff"),
            "fn a\n\t\u{fffd}[2J\u{fffd}"
        );
    }

    #[test]
    fn draws_follow_the_softmax() {
        let mut logits = vec![f32::NEG_INFINITY; 256];
        logits[10] = 0.0;
        logits[20] = 3f32.ln();
        let mut rng = Rng::new(5, 0);
        let twenties = (0..4000)
            .filter(|_| pick(&logits, 1.0, &mut rng) == 20)
            .count();
        assert!(
            (2900..3100).contains(&twenties),
            "{twenties} of 4000, expected 3000"
        );
        // At half the temperature the odds are 1 to 9.
        let twenties = (0..4000)
            .filter(|_| pick(&logits, 0.5, &mut rng) == 20)
            .count();
        assert!(
            (3520..3680).contains(&twenties),
            "{twenties} of 4000, expected 3600"
        );
    }

    #[test]
    fn a_sample_is_determined_by_its_seed_and_may_outgrow_the_context() {
        let _generator = crate::train::tests::GENERATOR.lock();
        let device = Device::flex();
        device.seed(1);
        let model = TextModelConfig::new(16, 1, 2, 1, 8, 4).init(&device);
        let options = SampleOptions {
            bytes: 12,
            temperature: 1.0,
            seed: 3,
            seq: 8,
        };
        let first = sample(&model, b"ab", options, &device);
        assert_eq!(first.len(), 12);
        assert_eq!(sample(&model, b"ab", options, &device), first);
        assert_ne!(
            sample(&model, b"ab", SampleOptions { seed: 4, ..options }, &device),
            first
        );
    }
}
