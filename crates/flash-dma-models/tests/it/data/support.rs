//! Random documents.

use crate::dir::Dir;
use flash_dma_models::data::{TokenFile, TokenFileWriter};
use rand::rngs::ChaCha8Rng;
use rand::{Rng, SeedableRng};
use std::path::Path;
use std::sync::Arc;

/// The names in a folder, in order.
pub fn names(dir: &Dir) -> Vec<String> {
    let entries = std::fs::read_dir(dir.path("")).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// A random number below `end`.
pub fn below(rng: &mut ChaCha8Rng, end: usize) -> usize {
    rng.next_u64() as usize % end
}

pub fn rng(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

/// Documents of 1 to `longest` random ids, many of them short.
pub fn documents(seed: u64, count: usize, longest: usize, vocabulary: usize) -> Vec<Vec<u32>> {
    let rng = &mut rng(seed);
    let document = |_| {
        let longest = 1 + below(rng, longest);
        let len = 1 + below(rng, longest);
        (0..len).map(|_| below(rng, vocabulary) as u32).collect()
    };
    (0..count).map(document).collect()
}

/// The ids of all documents of a file.
pub fn ids(file: &TokenFile) -> Vec<u32> {
    let mut ids = Vec::new();
    file.read(0..file.tokens(), &mut ids).unwrap();
    ids
}

/// Writes documents to a token file.
pub fn write(path: &Path, documents: &[Vec<u32>], vocabulary: usize) -> Arc<TokenFile> {
    let mut writer = TokenFileWriter::create(path, vocabulary).unwrap();
    for document in documents {
        writer.push(document).unwrap();
    }
    Arc::new(writer.finish().unwrap())
}
