//! From files to training and validation text.
//!
//! The corpus is one byte string: its files in the order of their paths, a blank line between two.
//! It is cut into up to sixteen blocks of equal length, and the last tenth of every block is
//! validation text. So validation text comes from all over the corpus, in runs of many windows, and
//! no training window reaches into it.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::rng::Rng;

/// The endings of the files that make the default corpus: this repository's sources and documents.
const SOURCE_ENDINGS: [&str; 4] = ["rs", "md", "toml", "py"];

/// Directories without text of a person's making.
const SKIPPED_DIRECTORIES: [&str; 2] = ["target", "runs"];

/// Every block gives one part in ten to validation.
const VALID_SHARE: usize = 10;

const MAX_BLOCKS: usize = 16;

/// A block's validation text is at least this many windows long, if the corpus allows it.
const WINDOWS_A_BLOCK: usize = 4;

/// The text to train on.
#[derive(Debug, Clone)]
pub struct Corpus {
    /// Where it came from.
    pub source: PathBuf,
    /// How many files it joins.
    pub files: usize,
    /// The text.
    pub bytes: Vec<u8>,
}

impl Corpus {
    /// Reads a file, or every text file under a directory.
    ///
    /// Under a directory, hidden entries, `target` and `runs` are skipped, and so is a file that is
    /// not UTF-8. A single file is taken as it is: the model reads bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if something cannot be read, [`Error::EmptyCorpus`] if it holds no text.
    pub fn read(source: &Path) -> Result<Self, Error> {
        let is_dir = fs::metadata(source).map_err(Error::io(source))?.is_dir();
        if is_dir {
            Self::from_directory(source, |_| true)
        } else {
            let bytes = fs::read(source).map_err(Error::io(source))?;
            Self {
                source: source.into(),
                files: 1,
                bytes,
            }
            .not_empty()
        }
    }

    /// The sources and documentation of this repository.
    ///
    /// # Errors
    ///
    /// [`Error::NoRepository`] if the program does not run inside it, and as for [`Corpus::read`].
    pub fn own_repository() -> Result<Self, Error> {
        let root = workspace_root().ok_or(Error::NoRepository)?;
        Self::from_directory(&root, |path| {
            let ending = path.extension().and_then(|ending| ending.to_str());
            ending.is_some_and(|ending| SOURCE_ENDINGS.contains(&ending))
        })
    }

    fn from_directory(root: &Path, wanted: impl Fn(&Path) -> bool) -> Result<Self, Error> {
        let mut paths = Vec::new();
        walk(root, &mut paths)?;
        paths.retain(|path| wanted(path));
        // By components: the order does not depend on the system's separator or locale.
        paths.sort();
        let (mut files, mut bytes) = (0, Vec::new());
        for path in paths {
            let text = fs::read(&path).map_err(Error::io(&path))?;
            if text.is_empty() || std::str::from_utf8(&text).is_err() {
                continue;
            }
            if files > 0 {
                bytes.push(b'\n');
            }
            files += 1;
            bytes.extend(text);
        }
        Self {
            source: root.into(),
            files,
            bytes,
        }
        .not_empty()
    }

    fn not_empty(self) -> Result<Self, Error> {
        if self.bytes.is_empty() {
            Err(Error::EmptyCorpus(self.source))
        } else {
            Ok(self)
        }
    }

    /// A fingerprint of the text (FNV-1a): a run can be resumed on the same text only.
    pub fn fingerprint(&self) -> String {
        let hash = self
            .bytes
            .iter()
            .fold(0xcbf2_9ce4_8422_2325u64, |hash, &byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
            });
        format!("{hash:016x}")
    }

    /// The entropy of one byte drawn from the corpus, in nats: what a model reaches that knows how
    /// often each byte occurs and nothing else.
    pub fn unigram_entropy(&self) -> f64 {
        unigram_entropy(&self.bytes)
    }
}

/// Entropy of the bytes' frequencies, in nats a byte.
pub fn unigram_entropy(bytes: &[u8]) -> f64 {
    let mut counts = [0u64; 256];
    for &byte in bytes {
        counts[usize::from(byte)] += 1;
    }
    let total = bytes.len() as f64;
    -counts
        .iter()
        .filter(|&&count| count > 0)
        .map(|&count| count as f64 / total)
        .map(|p| p * p.ln())
        .sum::<f64>()
}

fn walk(directory: &Path, paths: &mut Vec<PathBuf>) -> Result<(), Error> {
    for entry in fs::read_dir(directory).map_err(Error::io(directory))? {
        let entry = entry.map_err(Error::io(directory))?;
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        // The entry's own type: a symbolic link is neither a directory nor a file and is not
        // followed, so links cannot make the walk endless.
        let kind = entry.file_type().map_err(Error::io(&path))?;
        if name.starts_with('.') {
            continue;
        }
        if kind.is_dir() && !SKIPPED_DIRECTORIES.contains(&name.as_ref()) {
            walk(&path, paths)?;
        } else if kind.is_file() {
            paths.push(path);
        }
    }
    Ok(())
}

/// The nearest directory upwards that holds a workspace's manifest: from the crate when Cargo runs
/// the program, otherwise from the working directory.
fn workspace_root() -> Option<PathBuf> {
    let start = std::env::var_os("CARGO_MANIFEST_DIR")
        .map(PathBuf::from)
        .or_else(|| std::env::current_dir().ok())?;
    start
        .ancestors()
        .find(|directory| {
            fs::read_to_string(directory.join("Cargo.toml"))
                .is_ok_and(|manifest| manifest.lines().any(|line| line.trim() == "[workspace]"))
        })
        .map(Path::to_path_buf)
}

/// A corpus cut into training and validation text for windows of `seq` bytes.
///
/// A window is `seq + 1` bytes: its first `seq` are the input, its last `seq` the targets.
#[derive(Debug, Clone)]
pub struct Text {
    bytes: Vec<u8>,
    seq: usize,
    train: Vec<Range<usize>>,
    valid: Vec<Range<usize>>,
}

impl Text {
    /// Splits a corpus.
    ///
    /// # Errors
    ///
    /// [`Error::TinyCorpus`] if its validation tenth is shorter than a window.
    pub fn split(corpus: Corpus, seq: usize) -> Result<Self, Error> {
        let Corpus { source, bytes, .. } = corpus;
        let (len, window) = (bytes.len(), seq + 1);
        let needed = window * VALID_SHARE;
        if len < needed {
            return Err(Error::TinyCorpus {
                path: source,
                bytes: len,
                seq,
                needed,
            });
        }
        let blocks = (len / (needed * WINDOWS_A_BLOCK)).clamp(1, MAX_BLOCKS);
        let (mut train, mut valid) = (Vec::new(), Vec::new());
        for block in 0..blocks {
            let (start, end) = (block * len / blocks, (block + 1) * len / blocks);
            let cut = end - (end - start) / VALID_SHARE;
            train.push(start..cut);
            valid.push(cut..end);
        }
        Ok(Self {
            bytes,
            seq,
            train,
            valid,
        })
    }

    /// Bytes of training text.
    pub fn train_bytes(&self) -> usize {
        self.train.iter().map(Range::len).sum()
    }

    /// Bytes of validation text.
    pub fn valid_bytes(&self) -> usize {
        self.valid.iter().map(Range::len).sum()
    }

    /// The first bytes of the validation text: a prompt the model has not been trained on.
    pub fn prompt(&self, len: usize) -> &[u8] {
        let start = self.valid[0].start;
        &self.bytes[start..start + len.min(self.seq)]
    }

    /// The window that begins at byte `start`.
    pub fn window(&self, start: usize) -> &[u8] {
        &self.bytes[start..start + self.seq + 1]
    }

    /// A random training window's start; every position of the training text is equally likely.
    pub fn random_train_start(&self, rng: &mut Rng) -> usize {
        let starts = |range: &Range<usize>| range.len() - self.seq;
        let mut at = rng.below(self.train.iter().map(starts).sum());
        for range in &self.train {
            if at < starts(range) {
                return range.start + at;
            }
            at -= starts(range);
        }
        unreachable!("`at` is below the sum of all starts");
    }

    /// At most `max` validation windows, evenly spread, no target byte in two of them.
    pub fn valid_starts(&self, max: usize) -> Vec<usize> {
        let all: Vec<usize> = self
            .valid
            .iter()
            .flat_map(|range| {
                (0..(range.len() - 1) / self.seq).map(|window| range.start + window * self.seq)
            })
            .collect();
        let kept = max.min(all.len());
        (0..kept)
            .map(|window| all[window * all.len() / kept])
            .collect()
    }
}

#[cfg(test)]
#[path = "data_tests.rs"]
mod tests;
