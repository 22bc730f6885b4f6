//! Loaders: every row once an epoch, and the same batches after an interruption.

use crate::support::{Dir, below, documents, rng, write};
use burn::tensor::Device;
use flash_dma_models::data::{
    Batch, Batching, DataError, Loader, LoaderState, PackedRows, Remainder, TokenFile,
};
use std::fs;
use std::sync::Arc;

/// A file whose ids are all different, so that a batch says which rows it has.
fn counted(dir: &Dir, tokens: usize) -> Arc<TokenFile> {
    let mut documents = Vec::new();
    let mut next = 0;
    for document in documents_of(tokens) {
        documents.push((next..next + document).collect());
        next += document;
    }
    write(&dir.path("tokens"), &documents, tokens)
}

/// Lengths that add up to `tokens`.
fn documents_of(tokens: usize) -> Vec<u32> {
    let mut left = tokens;
    let mut lengths = Vec::new();
    for document in documents(7, tokens, 20, 2) {
        let len = document.len().min(left);
        lengths.push(len as u32);
        left -= len;
        if left == 0 {
            break;
        }
    }
    lengths
}

/// All that a batch has, as numbers: the rows of inputs, targets, weights, and the lengths of documents.
pub type Contents = (Vec<Vec<i64>>, Vec<i64>, Vec<f32>, Vec<Vec<usize>>);

pub fn contents(batch: Batch) -> Contents {
    let [_, len] = batch.inputs.dims();
    let inputs = batch.inputs.try_into_vec_as::<i64>().unwrap();
    (
        inputs.chunks(len).map(<[i64]>::to_vec).collect(),
        batch.targets.try_into_vec_as::<i64>().unwrap(),
        batch.weights.try_into_vec_as::<f32>().unwrap(),
        batch.documents.lengths().to_vec(),
    )
}

/// The rows of the next `batches`, by their first tokens divided by the length.
fn rows(loader: &mut Loader, batches: usize) -> Vec<usize> {
    let len = loader.rows().row_len();
    let batches = loader.take(batches).map(|batch| contents(batch.unwrap()).0);
    let first = |row: Vec<i64>| row[0] as usize / len;
    batches.flatten().map(first).collect()
}

#[test]
fn an_epoch_serves_every_row_once() {
    let dir = Dir::new();
    let rng = &mut rng(5);
    for round in 0..40 {
        let tokens = 2 + below(rng, 400);
        let packed = PackedRows::new(counted(&dir, tokens), 1 + below(rng, 12)).unwrap();
        let count = packed.rows();
        let batch = 1 + below(rng, count);
        let batching = Batching::new(batch).shuffled(round);
        let all: Vec<usize> = (0..count).collect();
        for remainder in [Remainder::Smaller, Remainder::Dropped] {
            let batching = batching.with_remainder(remainder);
            let mut loader = Loader::new(packed.clone(), batching, &Device::flex()).unwrap();
            for _ in 0..3 {
                let batches = loader.batches();
                let mut served = rows(&mut loader, batches);
                assert_eq!(served.len(), loader.served());
                served.sort_unstable();
                served.dedup();
                match remainder {
                    Remainder::Smaller => assert_eq!(served, all),
                    Remainder::Dropped => assert_eq!(served.len(), count / batch * batch),
                }
            }
            assert_eq!((loader.state().epoch, loader.state().batch), (3, 0));
        }
    }
}

#[test]
fn the_order_depends_on_the_seed_and_on_the_epoch() {
    let dir = Dir::new();
    let packed = PackedRows::new(counted(&dir, 401), 4).unwrap();
    let loader = |batching| Loader::new(packed.clone(), batching, &Device::flex()).unwrap();
    let plain = &mut loader(Batching::new(10));
    let in_order: Vec<usize> = (0..100).collect();
    assert_eq!(rows(plain, 10), in_order);
    assert_eq!(rows(plain, 10), in_order);
    let (one, two) = (
        &mut loader(Batching::new(10).shuffled(1)),
        &mut loader(Batching::new(10).shuffled(2)),
    );
    let first = rows(one, 10);
    assert_ne!(first, in_order);
    let second = rows(one, 10);
    assert_ne!(first, second);
    assert_ne!(first, rows(two, 10));
    // Rows that are left out are others in every epoch.
    let odd = &mut loader(Batching::new(30).shuffled(1));
    assert_eq!(rows(odd, 3), first[..90]);
    assert_eq!(rows(odd, 3), second[..90]);
    one.begin(0);
    assert_eq!(rows(one, 10), first);
    one.begin(1);
    assert_eq!(rows(one, 10), second);
}

#[test]
fn the_order_is_that_of_every_version() {
    let dir = Dir::new();
    let packed = PackedRows::new(counted(&dir, 41), 4).unwrap();
    let batching = Batching::new(10).shuffled(42);
    let mut loader = Loader::new(packed, batching, &Device::flex()).unwrap();
    assert_eq!(rows(&mut loader, 2), GOLDEN);
}

/// Two epochs of ten rows by the seed 42. Another order would make saved states resume with other batches.
const GOLDEN: [usize; 20] = [3, 2, 1, 7, 5, 4, 0, 6, 9, 8, 6, 2, 3, 9, 5, 7, 1, 8, 4, 0];

#[test]
fn a_resumed_loader_serves_the_same_batches() {
    let dir = Dir::new();
    let rng = &mut rng(11);
    for (round, remainder) in [Remainder::Dropped, Remainder::Smaller]
        .into_iter()
        .enumerate()
    {
        let seed = round as u64;
        let file = write(&dir.path("tokens"), &documents(seed, 60, 40, 300), 300);
        let packed = PackedRows::new(file, 16).unwrap();
        for batch in [1, 3, 5] {
            let batching = Batching::new(batch)
                .shuffled(seed)
                .with_remainder(remainder);
            let new = || Loader::new(packed.clone(), batching, &Device::flex()).unwrap();
            let steps = 3 * new().batches() + 2;
            let whole: Vec<_> = new().take(steps).map(|b| contents(b.unwrap())).collect();
            for _ in 0..6 {
                let stop = below(rng, steps);
                let mut stopped = new();
                assert_eq!(stopped.by_ref().take(stop).count(), stop);
                let saved = serde_json::to_string(&stopped.state()).unwrap();
                drop(stopped);
                let state: LoaderState = serde_json::from_str(&saved).unwrap();
                assert_eq!(state.epoch, stop / new().batches());
                let mut resumed = new();
                resumed.resume(&state).unwrap();
                let rest = resumed.take(steps - stop);
                let rest: Vec<_> = rest.map(|batch| contents(batch.unwrap())).collect();
                assert_eq!(rest, whole[stop..], "from batch {stop}");
            }
        }
    }
}

#[test]
fn a_state_of_another_loader_is_refused_and_changes_nothing() {
    let dir = Dir::new();
    let documents = documents(1, 60, 40, 300);
    let file = write(&dir.path("tokens"), &documents, 300);
    let mut others = documents.clone();
    others[20][0] ^= 1;
    let other = write(&dir.path("other"), &others, 300);
    let device = Device::flex();
    let rows = |len| PackedRows::new(file.clone(), len).unwrap();
    let batching = Batching::new(4).shuffled(3);
    let state = |rows, batching| {
        let mut loader = Loader::new(rows, batching, &device).unwrap();
        loader.next().unwrap().unwrap();
        loader.state()
    };
    let refused = |state: &LoaderState, expected: &str| {
        let mut loader = Loader::new(rows(16), batching, &device).unwrap();
        let before = loader.state();
        match loader.resume(state) {
            Err(DataError::State { what, .. }) => assert_eq!(what, expected),
            other => panic!("{expected}: {other:?}"),
        }
        assert_eq!(loader.state(), before);
    };
    let other = PackedRows::new(other, 16).unwrap();
    refused(&state(other, batching), "the file");
    let part = PackedRows::of(file.clone(), 0..40, 16).unwrap();
    refused(&state(part, batching), "the range of tokens");
    refused(&state(rows(15), batching), "the length of a row");
    let what = "the number of rows of a batch";
    refused(&state(rows(16), Batching::new(5).shuffled(3)), what);
    refused(&state(rows(16), Batching::new(4).shuffled(4)), "the order");
    refused(&state(rows(16), Batching::new(4)), "the order");
    let smaller = batching.with_remainder(Remainder::Smaller);
    refused(&state(rows(16), smaller), "the remainder");
    let mut beyond = state(rows(16), batching);
    beyond.batch = 1000;
    refused(&beyond, "the batch in its epoch");
    let error = Loader::new(rows(16), batching, &device)
        .unwrap()
        .resume(&state(rows(15), batching))
        .unwrap_err();
    let text = "the state is that of another loader: the length of a row is 15, here 16";
    assert_eq!(error.to_string(), text);
}

#[test]
fn a_loader_without_a_batch_is_refused() {
    let dir = Dir::new();
    let packed = PackedRows::new(counted(&dir, 33), 8).unwrap();
    let new = |batching| Loader::new(packed.clone(), batching, &Device::flex());
    let error = new(Batching::new(0)).unwrap_err();
    assert_eq!(error.to_string(), "the number of rows of a batch is 0");
    let error = new(Batching::new(5)).unwrap_err();
    assert_eq!(error.to_string(), "4 rows, which make no batch of 5");
    let smaller = Batching::new(5).with_remainder(Remainder::Smaller);
    assert_eq!(rows(&mut new(smaller).unwrap(), 1), [0, 1, 2, 3]);
}

#[test]
fn a_damaged_file_is_an_error_at_its_batch() {
    let dir = Dir::new();
    write(&dir.path("tokens"), &[(0..33).collect()], 100);
    let mut bytes = fs::read(dir.path("tokens")).unwrap();
    // Token 20, of the third of four rows.
    bytes[64 + 40] = 200;
    let file = TokenFile::open(dir.file("damaged", bytes)).unwrap();
    let packed = PackedRows::new(Arc::new(file), 8).unwrap();
    let mut loader = Loader::new(packed, Batching::new(1), &Device::flex()).unwrap();
    assert!(loader.by_ref().take(2).all(|batch| batch.is_ok()));
    for _ in 0..2 {
        let error = loader.next().unwrap().unwrap_err();
        assert!(
            matches!(
                error,
                DataError::Token {
                    position: 20,
                    id: 200,
                    ..
                }
            ),
            "{error}"
        );
    }
    assert_eq!(loader.state().batch, 2);
}
