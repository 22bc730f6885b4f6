//! Text from a trained model.

use flash_dma_models::generate::Sampler;
use flash_dma_models::nn::Decoder;

use crate::error::Error;
use crate::generate::{Generator, draw};

/// How to sample.
#[derive(Debug, Clone, Copy)]
pub struct SampleOptions {
    /// Bytes to add to the prompt.
    pub bytes: usize,
    /// How each is drawn.
    pub sampler: Sampler,
    /// The longest context the model has been trained on.
    pub seq: usize,
}

/// The bytes that follow `prompt`.
///
/// The model reads each byte once. It has seen no position past `seq`, so when the context gets there it begins
/// again with the last half of it.
///
/// # Errors
///
/// [`Error::Attention`] if the model's attention cannot be cached, [`Error::Sample`] if its logits give no byte.
///
/// # Panics
///
/// If `prompt` is empty: the model predicts the byte after another.
pub fn sample(model: &Decoder, prompt: &[u8], options: SampleOptions) -> Result<Vec<u8>, Error> {
    let mut text = prompt.to_vec();
    let mut generator = Generator::new(model)?;
    let mut logits = generator.read(last(&text, options.seq))?;
    for written in 0..options.bytes {
        text.push(draw(&options.sampler, &logits, written)?);
        logits = if generator.context() < options.seq {
            generator.read(last(&text, 1))?
        } else {
            generator.reset();
            generator.read(last(&text, options.seq.div_ceil(2)))?
        };
    }
    Ok(text.split_off(prompt.len()))
}

/// The last `count` bytes, or all.
fn last(text: &[u8], count: usize) -> &[u8] {
    &text[text.len().saturating_sub(count)..]
}

/// Bytes as text: what is not UTF-8, and control characters, which a terminal would obey, become
/// U+FFFD.
pub fn printable(bytes: &[u8]) -> String {
    let replace = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    String::from_utf8_lossy(bytes).replace(replace, "\u{fffd}")
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::prelude::*;
    use burn_flash_dma::nn::DynamicMaskAttentionConfig;
    use flash_dma_models::nn::DecoderConfig;

    #[test]
    fn a_sample_is_printed_without_control_characters() {
        assert_eq!(
            printable(b"fn a\n\t\x1b[2J\xff"),
            "fn a\n\t\u{fffd}[2J\u{fffd}"
        );
    }

    fn options(seed: u64) -> SampleOptions {
        SampleOptions {
            bytes: 12,
            sampler: Sampler::random(seed),
            seq: 8,
        }
    }

    fn model() -> Decoder {
        let device = Device::flex();
        device.seed(1);
        let attention = DynamicMaskAttentionConfig::new(16, 2)
            .with_n_kv_heads(Some(1))
            .with_max_seq_len(Some(8))
            .with_keep_window(Some(4));
        DecoderConfig::new(attention, 1).init(&device)
    }

    #[test]
    fn a_sample_is_determined_by_its_seed_and_may_outgrow_the_context() {
        let _generator = crate::train::tests::GENERATOR.lock();
        let model = model();
        let draw = |seed| sample(&model, b"ab", options(seed)).unwrap();
        let first = draw(3);
        assert_eq!(first.len(), 12);
        assert_eq!(draw(3), first);
        assert_ne!(draw(4), first);
    }

    /// What a byte is drawn from is what the whole model says of its context.
    #[test]
    fn reading_byte_by_byte_equals_the_whole_pass() {
        let _generator = crate::train::tests::GENERATOR.lock();
        let model = model();
        let text = b"abcdefgh";
        let tokens: Vec<i32> = text.iter().map(|&byte| byte.into()).collect();
        let tokens = Tensor::from_data(TensorData::new(tokens, [1, 8]), &Device::flex());
        let whole = model.forward(tokens).try_into_vec_as::<f32>().unwrap();
        let mut generator = Generator::new(&model).unwrap();
        for (byte, row) in text.iter().zip(whole.chunks(256)) {
            let logits = generator.read(&[*byte]).unwrap();
            for (logit, expected) in logits.iter().zip(row) {
                assert!((logit - expected).abs() < 1e-5, "{logit} is not {expected}");
            }
        }
    }
}
