//! A decoder that reads only the last token, so that every distribution is known.

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_flash_dma::AttentionError;
use burn_flash_dma::cache::AttentionCache;
use flash_dma_models::LanguageModel;

/// Probabilities of the next token after each token.
#[derive(Clone, Debug)]
pub struct Chain(pub Vec<Vec<f64>>);

impl Chain {
    /// Probability of a text after a token.
    pub fn probability(&self, mut last: u32, text: &[u32]) -> f64 {
        let mut product = 1.0;
        for &token in text {
            product *= self.0[last as usize][token as usize];
            last = token;
        }
        product
    }
}

impl LanguageModel for Chain {
    fn vocabulary(&self) -> usize {
        self.0.len()
    }

    fn device(&self) -> Device {
        Device::flex()
    }

    fn try_init_caches(&self, _: usize) -> Result<Vec<AttentionCache>, AttentionError> {
        Ok(Vec::new())
    }

    fn try_read(
        &self,
        tokens: Tensor<2, Int>,
        rows: usize,
        _: &mut [AttentionCache],
    ) -> Result<Tensor<3>, AttentionError> {
        let [sequences, len] = tokens.dims();
        let tokens: Vec<i64> = tokens.into_data().iter().collect();
        let mut logits: Vec<f32> = Vec::new();
        for token in tokens.chunks(len).flat_map(|row| &row[len - rows..]) {
            let law = &self.0[*token as usize];
            logits.extend(law.iter().map(|p| p.ln() as f32));
        }
        let logits = TensorData::new(logits, [sequences, rows, self.0.len()]);
        Ok(Tensor::from_data(logits, &self.device()))
    }
}

/// Every text of `len` tokens.
pub fn texts(vocabulary: u32, len: usize) -> Vec<Vec<u32>> {
    (0..len).fold(vec![Vec::new()], |shorter, _| {
        let longer = |text: Vec<u32>| {
            (0..vocabulary).map(move |token| text.iter().copied().chain([token]).collect())
        };
        shorter.into_iter().flat_map(longer).collect()
    })
}

/// Panics if counts of independent draws do not fit probabilities: if Pearson's statistic exceeds its expectation by
/// more than `4.5` standard deviations. Impossible classes must be empty.
pub fn assert_drawn_from(counts: &[usize], probabilities: &[f64]) {
    let total: usize = counts.iter().sum();
    let (mut statistic, mut classes) = (0.0, 0);
    for (&count, &probability) in counts.iter().zip(probabilities) {
        if probability == 0.0 {
            assert_eq!(count, 0, "an impossible class");
            continue;
        }
        let expected = probability * total as f64;
        assert!(expected >= 5.0, "too few draws: {expected} are expected");
        statistic += (count as f64 - expected).powi(2) / expected;
        classes += 1;
    }
    let freedom = f64::from(classes - 1);
    let bound = freedom + 4.5 * (2.0 * freedom).sqrt();
    let text = format!("{statistic} of {bound}: {counts:?} of {probabilities:?}");
    assert!(statistic < bound, "{text}");
}
