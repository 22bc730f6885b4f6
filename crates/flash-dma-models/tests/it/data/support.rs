//! Random documents and folders that go away.

use flash_dma_models::data::{TokenFile, TokenFileWriter};
use rand::rngs::ChaCha8Rng;
use rand::{Rng, SeedableRng};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A folder of a test, removed at its end.
pub struct Dir(PathBuf);

impl Dir {
    pub fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("flash-dma-models-data-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// The path of a name in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Writes a file.
    pub fn file(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, contents).unwrap();
        path
    }

    /// The names in the folder, in order.
    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap();
        let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name();
        let mut names: Vec<String> = entries
            .map(name)
            .map(|n| n.into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
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

/// Writes documents to a token file.
pub fn write(path: &Path, documents: &[Vec<u32>], vocabulary: usize) -> Arc<TokenFile> {
    let mut writer = TokenFileWriter::create(path, vocabulary).unwrap();
    for document in documents {
        writer.push(document).unwrap();
    }
    Arc::new(writer.finish().unwrap())
}
