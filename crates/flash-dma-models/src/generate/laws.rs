//! Distributions of the next tokens, from a model's logits.

use super::distribution::Distribution;
use super::error::{GenerateError, SampleError};
use super::sampler::Sampler;
use burn::tensor::{Int, Tensor, Transaction};

/// Logits `[sequences, rows, vocabulary]`, as far as a sampler needs them.
pub(super) enum Laws {
    /// Greatest logit of each row, on the host and as `[sequences, rows]` on the device.
    Best(Vec<u32>, Box<Tensor<2, Int>>),
    /// All logits.
    All(Logits),
}

pub(super) struct Logits {
    values: Vec<f32>,
    vocabulary: usize,
}

impl Logits {
    /// Waits for the device.
    pub(super) fn read(logits: Tensor<3>) -> Result<Self, GenerateError> {
        let [_, _, vocabulary] = logits.dims();
        let values = logits.try_into_vec_as::<f32>()?;
        Ok(Self { values, vocabulary })
    }

    pub(super) fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.vocabulary..][..self.vocabulary]
    }
}

impl Laws {
    /// Waits for the device.
    pub(super) fn read(logits: Tensor<3>, sampler: &Sampler) -> Result<Self, GenerateError> {
        let [sequences, rows, _] = logits.dims();
        if sampler.is_plain_greedy() {
            let best: Tensor<2, Int> = logits.clone().argmax(2).reshape([sequences, rows]);
            let sums = logits.clone().sum_dim(2);
            let data = (Transaction::default().register(best.clone())).register(sums);
            let mut data = data.try_execute()?.into_iter();
            let mut next = || data.next().expect("two tensors are read");
            let tokens: Vec<i64> = next().iter().collect();
            // The sum shows NaN and infinities: the host then reports or draws.
            if next().iter::<f32>().all(f32::is_finite) {
                let tokens = tokens.into_iter().map(|token| token as u32).collect();
                return Ok(Self::Best(tokens, Box::new(best)));
            }
        }
        Ok(Self::All(Logits::read(logits)?))
    }

    /// Distribution of row `row`, for the token after `text` and `ahead`.
    pub(super) fn law(
        &self,
        row: usize,
        sampler: &Sampler,
        text: &[u32],
        ahead: &[u32],
    ) -> Result<Distribution, SampleError> {
        match self {
            Self::Best(tokens, _) => Ok(Distribution::certain(tokens[row])),
            Self::All(logits) => match ahead {
                [] => sampler.try_distribution(logits.row(row), text),
                _ => sampler.try_distribution(logits.row(row), &[text, ahead].concat()),
            },
        }
    }
}
