//! Loaders: every row once an epoch, in parts and slices too, and the same batches after an interruption.

use crate::data::support::{below, documents, rng, write};
use crate::dir::Dir;
use burn::data::dataloader::DataLoader;
use burn::data::dataset::Dataset;
use burn::tensor::Device;
use flash_dma_models::data::{Batch, DataError, Loader, LoaderState, PackedRows, TokenFile};
use std::error::Error;
use std::sync::Arc;

/// A file with all ids different, so that a batch shows which rows it has.
fn counted(dir: &Dir, tokens: usize) -> Arc<TokenFile> {
    let ids: Vec<u32> = (0..tokens as u32).collect();
    let mut rest = &ids[..];
    let mut all = Vec::new();
    for document in documents(7, tokens, 20, 2) {
        let (document, others) = rest.split_at(document.len().min(rest.len()));
        all.push(document.to_vec());
        rest = others;
    }
    write(&dir.path("tokens"), &all, tokens)
}

/// 25 rows of 8 tokens, the last of which is padded.
pub fn packed(dir: &Dir) -> PackedRows {
    let mut documents = documents(2, 100, 30, 50);
    let mut left: usize = 197;
    for document in &mut documents {
        document.truncate(left);
        left -= document.len();
    }
    let rows = PackedRows::new(write(&dir.path("tokens"), &documents, 50), 8).unwrap();
    assert_eq!((rows.len(), left), (25, 0));
    rows
}

fn loader(rows: &PackedRows, batch: usize, seed: u64) -> Loader {
    Loader::new(rows.clone(), batch, seed, &Device::flex()).unwrap()
}

/// Contents of a batch as numbers: rows of inputs, targets, weights, and lengths of documents.
type Contents = (Vec<Vec<i64>>, Vec<i64>, Vec<f32>, Vec<Vec<usize>>);

fn contents(batch: Batch) -> Contents {
    let [_, len] = batch.inputs.dims();
    let inputs = batch.inputs.try_into_vec_as::<i64>().unwrap();
    (
        inputs.chunks(len).map(<[i64]>::to_vec).collect(),
        batch.targets.try_into_vec_as::<i64>().unwrap(),
        batch.weights.try_into_vec_as::<f32>().unwrap(),
        batch.documents.lengths().to_vec(),
    )
}

/// Batches of one iterator.
fn served(loader: &dyn DataLoader<Batch>) -> Vec<Contents> {
    let batches = loader.iter();
    batches.map(|batch| contents(batch.unwrap())).collect()
}

/// Rows of one iterator, by their first tokens divided by the length.
fn rows(loader: &Loader, len: usize) -> Vec<usize> {
    let rows = served(loader).into_iter().flat_map(|batch| batch.0);
    rows.map(|row| row[0] as usize / len).collect()
}

#[test]
fn an_epoch_serves_every_row_once() {
    let dir = Dir::new();
    let rng = &mut rng(5);
    for round in 0..40 {
        let (tokens, len) = (2 + below(rng, 400), 1 + below(rng, 12));
        let packed = PackedRows::new(counted(&dir, tokens), len).unwrap();
        let batch = 1 + below(rng, packed.len());
        let loader = loader(&packed, batch, round);
        for epoch in 1..=3 {
            let mut served = rows(&loader, len);
            assert_eq!(served.len(), loader.num_items());
            served.sort_unstable();
            served.dedup();
            assert_eq!(served.len(), packed.len() / batch * batch);
            assert_eq!(loader.state().step, epoch * loader.batches());
        }
    }
}

#[test]
fn the_order_depends_on_the_seed_and_on_the_epoch() {
    let dir = Dir::new();
    let packed = PackedRows::new(counted(&dir, 401), 4).unwrap();
    let in_order: Vec<usize> = (0..100).collect();
    let [one, two] = [1, 2].map(|seed| loader(&packed, 10, seed));
    let first = rows(&one, 4);
    assert_ne!(first, in_order);
    let second = rows(&one, 4);
    assert_ne!(first, second);
    assert_ne!(first, rows(&two, 4));
    // Different rows are left out in every epoch.
    let odd = loader(&packed, 30, 1);
    assert_eq!(rows(&odd, 4), first[..90]);
    assert_eq!(rows(&odd, 4), second[..90]);
    one.begin(0);
    assert_eq!(rows(&one, 4), first);
    one.begin(1);
    assert_eq!(rows(&one, 4), second);
}

/// Two epochs of ten rows by the seed 42. If another version of Burn had another order, saved states would resume
/// with other batches.
#[test]
fn the_order_stays_the_same() {
    let dir = Dir::new();
    let packed = PackedRows::new(counted(&dir, 41), 4).unwrap();
    let loader = loader(&packed, 10, 42);
    let orders = [rows(&loader, 4), rows(&loader, 4)];
    let golden = [
        [1, 4, 9, 0, 8, 7, 2, 5, 6, 3],
        [2, 8, 5, 6, 7, 0, 9, 1, 3, 4],
    ];
    assert_eq!(orders, golden);
}

#[test]
fn a_resumed_loader_serves_the_same_batches() {
    let dir = Dir::new();
    let rng = &mut rng(11);
    let file = write(&dir.path("tokens"), &documents(1, 60, 40, 300), 300);
    let packed = PackedRows::new(file, 16).unwrap();
    for batch in [1, 3, 5] {
        let new = || loader(&packed, batch, 9);
        let never_stopped = new();
        let batches = never_stopped.batches();
        let whole: Vec<_> = (0..4).flat_map(|_| served(&never_stopped)).collect();
        for _ in 0..6 {
            let stop = below(rng, 3 * batches);
            let stopped = new();
            // Burn gets a copy for its device; both share the position.
            let burns = stopped.to_device(&Device::flex());
            for _ in 0..stop / batches {
                served(&*burns);
            }
            let mut last = burns.iter();
            assert_eq!(last.by_ref().take(stop % batches).count(), stop % batches);
            assert_eq!(last.progress().items_processed, stop % batches * batch);
            let saved = serde_json::to_string(&stopped.state()).unwrap();
            let state: LoaderState = serde_json::from_str(&saved).unwrap();
            assert_eq!(state.step, stop);
            let resumed = new();
            resumed.resume(&state).unwrap();
            let rest: Vec<_> = (stop / batches..4).flat_map(|_| served(&resumed)).collect();
            assert_eq!(rest, whole[stop..], "from batch {stop}");
        }
    }
}

#[test]
fn a_state_of_another_loader_is_refused_and_changes_nothing() {
    let dir = Dir::new();
    let documents = documents(1, 60, 40, 300);
    let file = write(&dir.path("tokens"), &documents, 300);
    let mut others = documents.clone();
    // As many tokens, of other documents.
    let moved = others[20].remove(0);
    others[19].push(moved);
    let other = write(&dir.path("other"), &others, 300);
    let rows = |len| PackedRows::new(file.clone(), len).unwrap();
    let state = |rows, batch, seed| {
        let loader = loader(&rows, batch, seed);
        loader.iter().next().unwrap().unwrap();
        loader.state()
    };
    let refused = |state: &LoaderState| {
        let loader = loader(&rows(16), 4, 3);
        let before = loader.state();
        let error = loader.resume(state).unwrap_err();
        assert!(matches!(error, DataError::State { .. }), "{error}");
        assert_eq!(loader.state(), before);
        error.to_string()
    };
    refused(&state(PackedRows::new(other, 16).unwrap(), 4, 3));
    let fewer = PackedRows::of(file.clone(), 0..40, 16).unwrap();
    refused(&state(fewer, 4, 3));
    refused(&state(rows(16), 5, 3));
    refused(&state(rows(16), 4, 4));
    let text = refused(&state(rows(15), 4, 3));
    for part in [
        "the state is that of another loader: ",
        "row_len: 15",
        "row_len: 16",
    ] {
        assert!(text.contains(part), "{text}");
    }
    let same = loader(&rows(16), 4, 3);
    same.resume(&state(rows(16), 4, 3)).unwrap();
}

#[test]
fn a_loader_without_a_batch_is_refused() {
    let dir = Dir::new();
    let packed = PackedRows::new(counted(&dir, 33), 8).unwrap();
    for batch in [0, 5] {
        let error = Loader::new(packed.clone(), batch, 1, &Device::flex()).unwrap_err();
        let expected = format!("4 rows, which make no batch of {batch}");
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn a_damaged_file_is_an_error_at_its_batch() {
    let dir = Dir::new();
    let mut ids: Vec<u32> = (0..33).collect();
    // Of the third of four rows.
    ids[20] = 200;
    write(&dir.path("tokens"), &[ids], 256);
    let file = TokenFile::open(dir.path("tokens"), 100).unwrap();
    let loader = loader(&PackedRows::new(Arc::new(file), 8).unwrap(), 1, 1);
    let mut epoch = loader.iter();
    let good = epoch.by_ref().take_while(Result::is_ok).count();
    assert!(good < 4);
    for _ in 0..2 {
        let error = epoch.next().unwrap().unwrap_err();
        let source = error.source().and_then(|error| error.downcast_ref());
        let source: &DataError = source.expect("an error of the data");
        let expected = "token 20 is 200, of a vocabulary of 100";
        assert_eq!(source.to_string(), expected);
    }
    assert_eq!(loader.state().step, good);
}

#[test]
fn an_epoch_is_done_at_its_end() {
    let dir = Dir::new();
    let train = loader(&packed(&dir), 3, 4);
    let mut iterator = train.iter();
    let mut last = 0;
    while iterator.next().is_some() {
        let progress = iterator.progress();
        assert!(progress.items_processed > last);
        last = progress.items_processed;
    }
    assert!(iterator.next().is_none());
    assert!(iterator.progress().is_completed());
    assert_eq!(last, train.num_items());
}

#[test]
fn parts_are_the_epoch_in_pieces_and_any_of_them_may_be_the_first() {
    let dir = Dir::new();
    let packed = packed(&dir);
    let new = || loader(&packed, 3, 4);
    let whole = new();
    let epochs: Vec<_> = (0..2).flat_map(|_| served(&whole)).collect();
    // Eight batches an epoch.
    let sizes: [&[usize]; 4] = [&[8], &[2, 3, 3], &[1, 2, 1, 2, 2], &[1; 8]];
    for sizes in sizes {
        let parts = sizes.len();
        let train = new().with_parts(parts).unwrap();
        let mut all = Vec::new();
        for part in 0..2 * parts {
            let state = train.state();
            assert_eq!(state.step, all.len());
            let later = new().with_parts(parts).unwrap();
            later.begin(part);
            assert_eq!(later.state(), state);
            let resumed = new().with_parts(parts).unwrap();
            resumed.resume(&state).unwrap();
            let batches = served(&train);
            assert_eq!(served(&later), batches);
            assert_eq!(served(&resumed), batches);
            assert_eq!(batches.len(), sizes[part % parts]);
            all.extend(batches);
        }
        assert_eq!(all, epochs);
    }
    for parts in [0, 9] {
        let error = new().with_parts(parts).expect_err("it is refused");
        let text = format!("{parts} parts of an epoch of 8 batches");
        assert_eq!(error.to_string(), text);
    }
}

/// A batch in parts, as devices get them: all rows, and losses and gradients that add up.
#[test]
fn slices_have_a_part_of_every_batch() {
    let dir = Dir::new();
    let train = loader(&packed(&dir), 5, 4);
    let whole = train.slice(0, train.num_items());
    for devices in 1..=5 {
        let each = train.num_items() / devices;
        let ends = |device: usize| match device {
            last if last + 1 == devices => train.num_items(),
            _ => (device + 1) * each,
        };
        let slices: Vec<_> = (0..devices)
            .map(|device| train.slice(device * each, ends(device)))
            .collect();
        let items: usize = slices.iter().map(|slice| slice.num_items()).sum();
        assert_eq!(items, train.num_items());
        for _ in 0..2 {
            let mut parts: Vec<_> = slices.iter().map(|slice| slice.iter()).collect();
            let mut steps = 0;
            for batch in train.iter() {
                let batch = batch.unwrap();
                let parts: Vec<Batch> = parts
                    .iter_mut()
                    .map(|part| part.next().expect("as many batches").unwrap())
                    .collect();
                let mean = |batch: &Batch| {
                    let losses = batch.targets.clone().float().flatten(0, 1);
                    let weighted = losses.clone() * batch.weights_of_mean().flatten(0, 1);
                    let means = [batch.mean(losses), weighted.mean()];
                    means.map(|mean| mean.into_scalar::<f32>())
                };
                let sums = parts.iter().map(mean).fold([0.0; 2], |sums, mean| {
                    [sums[0] + mean[0], sums[1] + mean[1]]
                });
                for (sum, mean) in sums.into_iter().zip(mean(&batch)) {
                    assert!((sum - mean).abs() <= 1e-5 * mean, "{sum}, not {mean}");
                }
                let predicted: usize = parts.iter().map(Batch::predicted).sum();
                assert_eq!(predicted, batch.predicted());
                let rows: Vec<_> = parts
                    .into_iter()
                    .flat_map(|part| contents(part).0)
                    .collect();
                assert_eq!(rows, contents(batch).0);
                steps += 1;
            }
            assert_eq!(steps, train.batches());
            assert!(parts.iter_mut().all(|part| part.next().is_none()));
            assert!(parts.iter().all(|part| part.progress().is_completed()));
        }
    }
    assert_eq!(served(&*whole).len(), train.batches());
}

#[test]
fn a_slice_goes_on_where_the_loader_is() {
    let dir = Dir::new();
    let packed = packed(&dir);
    let (train, same) = (loader(&packed, 4, 4), loader(&packed, 4, 4));
    assert_eq!(train.iter().take(2).count(), 2);
    assert_eq!(same.iter().take(2).count(), 2);
    let slice = train.slice(0, train.num_items());
    assert_eq!(served(&*slice), served(&same));
    // It has its own position.
    assert_eq!(train.state().step, 2);
}

#[test]
#[should_panic(expected = "a device without a row of a batch: batches have 3")]
fn more_devices_than_rows_of_a_batch_are_refused() {
    let train = loader(&packed(&Dir::new()), 3, 4);
    train.slice(0, train.num_items() / 4);
}
