//! Losses by position in the context, and by window.

use super::Batch;
use crate::Result;
use crate::train::{added, finite};
use burn::tensor::{Device, Tensor};
use flash_dma_models::nn::Decoder;
use serde::{Deserialize, Serialize};

/// Number of positions in the first bin; each other bin is as long as all before it.
const FIRST: usize = 64;

/// Losses over windows of one length, in nats per byte.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Losses {
    /// Bytes of a window.
    pub length: usize,
    /// Mean over all windows.
    pub loss: f64,
    /// By position, in order.
    pub bins: Vec<Bin>,
    /// Loss of each window, in five decimals.
    pub windows: Vec<f64>,
}

/// Loss over consecutive positions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bin {
    /// The first position.
    pub from: usize,
    /// One past the last position.
    pub to: usize,
    /// Mean over these positions and all windows.
    pub loss: f64,
}

/// Losses with another window than that of the training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WindowLosses {
    /// Keys per query and kv head.
    pub window: usize,
    /// The losses.
    #[serde(flatten)]
    pub losses: Losses,
}

/// Evaluates a model on windows of equal length, each with the byte behind it, `batch` at a time.
pub fn evaluate(
    model: &Decoder,
    windows: &[&[u8]],
    batch: usize,
    device: &Device,
) -> Result<Losses> {
    let length = windows[0].len() - 1;
    let (mut by_window, mut by_position): (Vec<Tensor<1>>, Option<Tensor<1>>) = (Vec::new(), None);
    for windows in windows.chunks(batch.max(1)) {
        let batch = Batch::new(windows, device);
        let losses = model.try_token_losses(batch.inputs, batch.targets)?;
        by_window.push(losses.clone().mean_dim(1).flatten(0, 1));
        let sum = losses.sum_dim(0).flatten(0, 1);
        by_position = Some(added(by_position, sum));
    }
    let numbers = |tensor: Tensor<1>| -> Vec<f64> {
        let numbers = tensor.try_into_vec_as::<f32>();
        let numbers = numbers.expect("the losses can be read");
        numbers.into_iter().map(f64::from).collect()
    };
    let by_window = numbers(Tensor::cat(by_window, 0));
    let by_position = numbers(by_position.expect("there are windows"));
    let count = windows.len() as f64;
    let bins = bins(length).map(|(from, to)| Bin {
        from,
        to,
        loss: by_position[from..to].iter().sum::<f64>() / count / (to - from) as f64,
    });
    Ok(Losses {
        length,
        loss: finite(by_window.iter().sum::<f64>() / count, "loss of a window")?,
        bins: bins.collect(),
        windows: by_window.into_iter().map(rounded).collect(),
    })
}

/// The bins of a length: they double.
fn bins(length: usize) -> impl Iterator<Item = (usize, usize)> {
    let first = std::iter::once((0, FIRST.min(length)));
    let next = move |&(_, to): &(usize, usize)| (to < length).then(|| (to, (2 * to).min(length)));
    first.flat_map(move |first| std::iter::successors(Some(first), next))
}

fn rounded(loss: f64) -> f64 {
    (loss * 1e5).round() / 1e5
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_double_and_cover_every_position_once() {
        let all = |length| bins(length).collect::<Vec<_>>();
        assert_eq!(all(256), [(0, 64), (64, 128), (128, 256)]);
        assert_eq!(all(200), [(0, 64), (64, 128), (128, 200)]);
        assert_eq!(all(40), [(0, 40)]);
    }
}
