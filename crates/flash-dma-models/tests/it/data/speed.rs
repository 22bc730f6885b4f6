//! Speed of text to tokens, and of tokens to batches. Ignored unless asked for:
//!
//! ```sh
//! DATA_TEXT=text.jsonl DATA_TOKENIZER=tokenizer.json cargo test --release -p flash-dma-models \
//!     --features flex,data --test it -- --ignored --nocapture --test-threads 1 speed
//! ```
//!
//! `DATA_TEXT` is JSONL with the field `text`. Without `DATA_TOKENIZER` the tokens are bytes.

use crate::dir::Dir;
use burn::data::dataloader::DataLoader;
use burn::data::dataset::Dataset;
use burn::tensor::Device;
use flash_dma_models::data::{Loader, PackedRows, TextFormat, Vocabulary, write_tokens};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Prints the median, minimum and maximum rate of five runs of `units` units each.
fn rate(what: &str, units: f64, run: impl Fn()) {
    let seconds = |_| {
        let begin = Instant::now();
        run();
        begin.elapsed().as_secs_f64()
    };
    let mut rates: Vec<f64> = (0..5).map(seconds).map(|s| units / s).collect();
    rates.sort_by(f64::total_cmp);
    let [least, median, most] = [0, 2, 4].map(|at| rates[at]);
    println!("{what}: {median:.1} ({least:.1} to {most:.1})");
}

#[test]
#[ignore = "measures; needs DATA_TEXT"]
fn speed_of_text_to_tokens_to_batches() {
    let text = std::env::var("DATA_TEXT").expect("DATA_TEXT names a file");
    let vocabulary = match std::env::var("DATA_TOKENIZER") {
        Ok(path) => Vocabulary::from_file(path).unwrap(),
        Err(_) => Vocabulary::bytes(),
    };
    let field = "text".into();
    let format = TextFormat::Jsonl { field };
    let dir = Dir::new();
    let write = |out: &Path| write_tokens(out, [&text], &format, &vocabulary).unwrap();
    let first = write(&dir.path("first"));
    let (bytes, tokens) = (first.bytes as f64, first.file.tokens());
    println!("{} documents, {tokens} tokens, {bytes} bytes", first.read);
    for threads in [1, rayon::current_num_threads()] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        let pool = pool.build().unwrap();
        let what = format!("MB of text/s, {threads} threads");
        rate(&what, bytes / 1e6, || {
            let again = pool.install(|| write(&dir.path("again")));
            assert_eq!(again.file.fingerprint(), first.file.fingerprint());
        });
    }
    let file = Arc::new(first.file);
    let rows = PackedRows::new(file, 2048).unwrap();
    let served = (rows.len() * 2048) as f64 / 1e6;
    rate("million tokens/s in rows of 2048", served, || {
        for row in 0..rows.len() {
            assert_eq!(rows.row(row).unwrap().inputs().len(), 2048);
        }
    });
    let loader = Loader::new(rows, 8, 1, &Device::flex()).unwrap();
    let served = (loader.num_items() * 2048) as f64 / 1e6;
    let what = "million tokens/s in batches of 8 × 2048, shuffled";
    rate(what, served, || {
        for batch in loader.iter() {
            assert_eq!(batch.unwrap().inputs.dims(), [8, 2048]);
        }
    });
}
