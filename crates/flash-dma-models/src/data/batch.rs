//! Rows on a device.

use super::rows::Row;
use burn::data::dataloader::batcher::Batcher;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_flash_dma::Documents;
use std::ops::Range;

/// Inputs and targets of a training step.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Input tokens, `[batch, len]`.
    pub inputs: Tensor<2, Int>,
    /// Token after each of them, `[batch, len]`.
    pub targets: Tensor<2, Int>,
    /// 1 for each target in its input's document, 0 for all others and for padding: `[batch, len]`, f32.
    pub weights: Tensor<2>,
    /// Documents of each row, for the [`Selector`](burn_flash_dma::Selector) or for
    /// [`DynamicMaskInput`](burn_flash_dma::nn::DynamicMaskInput): no token attends to another document.
    pub documents: Documents,
    tokens: usize,
    predicted: usize,
    /// Targets that count in the batch that this is a part of, on all devices.
    counted: usize,
}

impl Batch {
    /// The rows on a device.
    ///
    /// # Panics
    ///
    /// If there are no rows, or rows differ in length.
    #[must_use]
    pub fn new(rows: &[Row], device: &Device) -> Self {
        Self::part(rows, 0..rows.len(), device)
    }

    /// Some rows of a batch, of which the others are on other devices.
    pub(super) fn part(batch: &[Row], served: Range<usize>, device: &Device) -> Self {
        let predicted = |rows: &[Row]| {
            let weights = rows.iter().flat_map(Row::weights);
            weights.filter(|&&weight| weight != 0.0).count()
        };
        let (rows, counted) = (&batch[served], predicted(batch));
        let len = rows.first().expect("a row").inputs().len();
        let alike = rows.iter().all(|row| row.inputs().len() == len);
        assert!(alike, "rows of different lengths");
        let shape = [rows.len(), len];
        let ints = |of: fn(&Row) -> &[u32]| {
            let ids: Vec<i32> = rows.iter().flat_map(of).map(|&id| id as i32).collect();
            Tensor::from_data(TensorData::new(ids, shape), device)
        };
        let weights: Vec<f32> = rows.iter().flat_map(Row::weights).copied().collect();
        let padding: usize = rows.iter().map(Row::padding).sum();
        Self {
            inputs: ints(Row::inputs),
            targets: ints(Row::targets),
            tokens: rows.len() * len - padding,
            predicted: predicted(rows),
            counted,
            weights: Tensor::from_data(TensorData::new(weights, shape), (device, DType::F32)),
            documents: Documents::from_lengths(rows.iter().map(|row| row.documents().to_vec())),
        }
    }

    /// The same tokens as shorter texts, `[batch * pieces, len / pieces]`: cuts each row, and documents across a cut,
    /// whose rest becomes a document of its own.
    ///
    /// # Panics
    ///
    /// If the length is not a multiple of `pieces`.
    #[must_use]
    pub fn cut(self, pieces: usize) -> Self {
        let [rows, len] = self.inputs.dims();
        assert!(
            pieces > 0 && len % pieces == 0,
            "{len} tokens in {pieces} pieces"
        );
        let (shape, documents) = ([rows * pieces, len / pieces], self.documents.lengths());
        let lengths = documents.iter().flat_map(|row| cut(row, len / pieces));
        Self {
            documents: Documents::from_lengths(lengths),
            inputs: self.inputs.reshape(shape),
            targets: self.targets.reshape(shape),
            weights: self.weights.reshape(shape),
            ..self
        }
    }

    /// Number of input tokens, without padding.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Number of targets that count.
    #[must_use]
    pub fn predicted(&self) -> usize {
        self.predicted
    }

    /// Mean, `[1]` in f32, of `losses` `[batch · len]` over the targets that count; 0 if there are none. A loss that
    /// does not count is ignored, even NaN.
    ///
    /// Of a batch in parts on several devices, it is this part's share of the mean: their sum divided by the number of
    /// targets that count in all parts.
    ///
    /// Such losses come, for example, from `burn_flash_dma::train::token_losses`.
    ///
    /// # Panics
    ///
    /// If losses and targets differ in number.
    #[must_use]
    pub fn mean(&self, losses: Tensor<1>) -> Tensor<1> {
        let [rows, len] = self.weights.dims();
        assert_eq!(losses.dims(), [rows * len], "the number of losses");
        let left_out = self.weights.clone().reshape([rows * len]).equal_elem(0);
        let counted = losses.cast(DType::F32).mask_fill(left_out, 0);
        counted.sum() / self.counted.max(1) as f64
    }

    /// Weights, `[batch, len]`, of which the mean over all tokens of weighted losses is [`mean`](Self::mean): those of
    /// [`Decoder::try_loss_and_backward`](crate::nn::Decoder::try_loss_and_backward).
    #[must_use]
    pub fn weights_of_mean(&self) -> Tensor<2> {
        let [rows, len] = self.weights.dims();
        self.weights.clone() * ((rows * len) as f64 / self.counted.max(1) as f64)
    }
}

/// Lengths of the documents of each piece of a row; `documents` add up to whole pieces.
fn cut(documents: &[usize], piece: usize) -> Vec<Vec<usize>> {
    let (mut pieces, mut room) = (Vec::new(), 0);
    for &document in documents {
        let mut left = document;
        while left > 0 {
            if room == 0 {
                pieces.push(Vec::new());
                room = piece;
            }
            let part = left.min(room);
            pieces.last_mut().expect("one was begun").push(part);
            (left, room) = (left - part, room - part);
        }
    }
    pieces
}

/// Batches rows in Burn's data loaders: `DataLoaderBuilder::new(RowBatcher).batch_size(5).build(rows)` serves all
/// rows in the order of their file.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowBatcher;

impl Batcher<Row, Batch> for RowBatcher {
    fn batch(&self, rows: Vec<Row>, device: &Device) -> Batch {
        Batch::new(&rows, device)
    }
}
