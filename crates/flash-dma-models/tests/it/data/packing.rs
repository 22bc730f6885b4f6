//! Rows and batches: no token is lost or read twice, and nothing crosses a document's end.

use crate::data::support::{below, documents, rng, write};
use crate::dir::Dir;
use burn::data::dataset::Dataset;
use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};
use burn_flash_dma::{Documents, Selector};
use flash_dma_models::data::{Batch, DataError, PackedRows, Row};
use std::ops::Range;

/// Checks rows against the rule, token by token; `documents` are those of the rows.
fn check(rows: &PackedRows, documents: &[Vec<u32>]) {
    let len = rows.row_len();
    let mut tokens: Vec<(usize, u32)> = Vec::new();
    for (number, document) in documents.iter().enumerate() {
        tokens.extend(document.iter().map(|&id| (number, id)));
    }
    let all: Vec<Row> = (0..rows.len()).map(|row| rows.row(row).unwrap()).collect();
    let (mut inputs, mut targets) = (0, 0);
    for (number, row) in all.iter().enumerate() {
        let lengths = [row.inputs().len(), row.targets().len(), row.weights().len()];
        assert_eq!(lengths, [len; 3]);
        assert_eq!(row.documents().iter().sum::<usize>(), len);
        assert!(row.documents().iter().all(|&tokens| tokens > 0));
        let mut runs = Vec::new();
        let mut padding = 0;
        for place in 0..len {
            let here = tokens.get(number * len + place);
            let next = tokens.get(number * len + place + 1);
            assert_eq!(row.inputs()[place], here.map_or(0, |token| token.1));
            assert_eq!(row.targets()[place], next.map_or(0, |token| token.1));
            let counts = here.is_some() && here.map(|t| t.0) == next.map(|t| t.0);
            assert_eq!(row.weights()[place], f32::from(u8::from(counts)));
            inputs += usize::from(here.is_some());
            targets += usize::from(here.is_some() && next.is_some());
            padding += usize::from(here.is_none());
            runs.push(here.map(|token| token.0));
        }
        let runs = runs.chunk_by(|a, b| a == b).map(<[_]>::len);
        assert_eq!(row.documents(), runs.collect::<Vec<_>>());
        assert_eq!(row.padding(), padding);
        assert!(padding == 0 || number + 1 == all.len());
    }
    // Every token but the first is a target, so every token is in a row.
    assert_eq!(targets, tokens.len() - 1);
    let last_is_only_a_target = (tokens.len() - 1).is_multiple_of(len);
    assert_eq!(inputs, tokens.len() - usize::from(last_is_only_a_target));
}

#[test]
fn no_token_is_lost_or_read_twice() {
    let dir = Dir::new();
    let rng = &mut rng(31);
    for seed in 0..120 {
        let (count, longest) = (2 + below(rng, 30), 1 + below(rng, 40));
        let documents = documents(seed, count, longest, 1000);
        let file = write(&dir.path("tokens"), &documents, 1000);
        let len = 1 + below(rng, 50);
        check(&PackedRows::new(file.clone(), len).unwrap(), &documents);
        let start = below(rng, count);
        let end = start + below(rng, count - start + 1);
        let range = Range { start, end };
        match PackedRows::of(file, range.clone(), len) {
            Ok(rows) => check(&rows, &documents[range]),
            Err(error) => {
                assert!(matches!(error, DataError::NoRow { .. }), "{error}");
                assert!(documents[range].concat().len() < 2);
            }
        }
    }
}

#[test]
fn rows_of_nothing_are_refused() {
    let dir = Dir::new();
    let file = write(&dir.path("tokens"), &[vec![1], vec![2, 3]], 10);
    let of = |range, len| PackedRows::of(file.clone(), range, len).unwrap_err();
    assert_eq!(of(0..2, 0).to_string(), "the length of a row is 0");
    assert_eq!(of(0..3, 4).to_string(), "documents 0 to 3 of 2");
    let backwards = Range { start: 2, end: 1 };
    assert!(matches!(of(backwards, 4), DataError::Documents { .. }));
    assert_eq!(of(0..1, 4).to_string(), "1 tokens; a row takes at least 2");
    assert!(matches!(of(1..1, 4), DataError::NoRow { tokens: 0 }));
    // One row, mostly padding.
    let row = PackedRows::new(file, 100).unwrap().row(0).unwrap();
    assert_eq!((row.documents(), row.padding()), (&[1, 2, 97][..], 97));
}

fn batch(seed: u64, device: &Device) -> (Vec<Row>, Batch) {
    let dir = Dir::new();
    let file = write(&dir.path("tokens"), &documents(seed, 12, 30, 500), 500);
    let rows = PackedRows::new(file, 24).unwrap();
    let rows: Vec<Row> = (0..rows.len()).map(|row| rows.row(row).unwrap()).collect();
    assert!(rows.len() > 2 && rows.last().unwrap().padding() > 0);
    let batch = Batch::new(&rows, device);
    (rows, batch)
}

#[test]
fn a_batch_holds_its_rows() {
    let (rows, batch) = batch(3, &Device::flex());
    assert_eq!(batch.inputs.dims(), [rows.len(), 24]);
    let ints = |tensor: Tensor<2, Int>| tensor.try_into_vec_as::<i64>().unwrap();
    let all = |of: fn(&Row) -> &[u32]| -> Vec<i64> {
        let ids = rows.iter().flat_map(of);
        ids.map(|&id| i64::from(id)).collect()
    };
    assert_eq!(ints(batch.inputs.clone()), all(Row::inputs));
    assert_eq!(ints(batch.targets.clone()), all(Row::targets));
    let weights = batch.weights.clone().try_into_vec_as::<f32>().unwrap();
    let expected: Vec<f32> = rows.iter().flat_map(Row::weights).copied().collect();
    assert_eq!(weights, expected);
    assert_eq!(weights.iter().sum::<f32>(), batch.predicted() as f32);
    let padding = rows.last().unwrap().padding();
    assert_eq!(batch.tokens(), rows.len() * 24 - padding);
}

#[test]
fn the_documents_reach_the_selection() {
    let device = Device::flex();
    let (rows, batch) = batch(4, &device);
    // The number of the document at each position.
    let ids = rows.iter().flat_map(|row| {
        let lengths = row.documents().iter().enumerate();
        lengths.flat_map(|(number, &len)| vec![number as i32; len])
    });
    let ids = TensorData::new(ids.collect::<Vec<i32>>(), [rows.len(), 24]);
    let ids = Tensor::<2, Int>::from_data(ids, &device);
    assert_eq!(Documents::from_ids(ids.clone()), batch.documents);

    let scores = Tensor::<3>::random([rows.len(), 2, 24], Distribution::Default, &device);
    let pairs = |selector: Selector| selector.select(scores.clone()).as_mask(24);
    let shape = [rows.len(), 2, 24, 24];
    let queries = ids.clone().reshape([rows.len(), 1, 24, 1]).expand(shape);
    let keys = ids.reshape([rows.len(), 1, 1, 24]).expand(shape);
    let across = queries.not_equal(keys);
    let count = |mask: Tensor<4, burn::tensor::Bool>| {
        let both = mask.bool_and(across.clone());
        both.int().sum().into_scalar::<i64>()
    };
    assert_eq!(count(pairs(Selector::top(6).documents(batch.documents))), 0);
    assert!(count(pairs(Selector::top(6))) > 0);
}

#[test]
fn the_mean_leaves_out_what_crosses_a_documents_end() {
    let device = Device::flex();
    let (rows, batch) = batch(5, &device);
    let counts: Vec<f32> = rows.iter().flat_map(Row::weights).copied().collect();
    // Losses that do not count are NaN, so that they would show.
    let loss = |(place, &counts): (usize, &f32)| match counts {
        0.0 => f32::NAN,
        _ => place as f32,
    };
    let losses: Vec<f32> = counts.iter().enumerate().map(loss).collect();
    let expected = losses.iter().filter(|loss| !loss.is_nan());
    let expected = expected.sum::<f32>() / batch.predicted() as f32;
    let mean = batch.mean(Tensor::from_floats(&losses[..], &device));
    let mean = mean.into_scalar::<f32>();
    let close = (mean - expected).abs() <= 1e-5 * expected;
    assert!(close, "{mean} {expected}");
}

#[test]
fn a_batch_that_predicts_nothing_has_the_mean_0() {
    let dir = Dir::new();
    let file = write(&dir.path("tokens"), &[vec![1], vec![2], vec![3]], 10);
    let row = PackedRows::new(file, 2).unwrap().row(0).unwrap();
    let batch = Batch::new(&[row], &Device::flex());
    assert_eq!(batch.predicted(), 0);
    let losses = Tensor::from_floats([1.0, 2.0], &Device::flex());
    assert_eq!(batch.mean(losses).into_scalar::<f32>(), 0.0);
}

/// A document across a cut becomes two, and the positions that count do not change.
#[test]
fn a_batch_is_cut_into_shorter_texts_and_its_documents_with_it() {
    let dir = Dir::new();
    let file = write(
        &dir.path("tokens"),
        &[(0..3).collect(), (3..8).collect(), (8..15).collect()],
        16,
    );
    let rows = PackedRows::new(file, 8).unwrap();
    let rows = [rows.row(0).unwrap(), rows.row(1).unwrap()];
    let device = Device::flex();
    let whole = Batch::new(&rows, &device);
    let values = |batch: &Batch| {
        let ints = [&batch.inputs, &batch.targets].map(|ids| ids.to_data().iter::<u32>().collect());
        let [inputs, targets]: [Vec<u32>; 2] = ints;
        let weights: Vec<f32> = batch.weights.to_data().iter().collect();
        (inputs, targets, weights)
    };
    let cut = whole.clone().cut(2);
    assert_eq!(cut.inputs.dims(), [4, 4]);
    assert_eq!(values(&cut), values(&whole));
    let lengths = [vec![3, 1], vec![4], vec![4], vec![3, 1]];
    assert_eq!(cut.documents.lengths(), lengths);
    let counted = [whole.tokens(), whole.predicted()];
    assert_eq!([cut.tokens(), cut.predicted()], counted);
    let uneven = std::panic::catch_unwind(|| whole.cut(3));
    assert!(uneven.is_err());
}
