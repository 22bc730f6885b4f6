//! Helpers for tests of the programs: a folder for files, calls of a program, and the calls shown in documents.
#![allow(dead_code, reason = "no program's tests use all of it")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A folder that is removed at the end of its test.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-{}-{number}", env!("CARGO_PKG_NAME"), std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::remove_dir_all(&folder).ok();
        fs::create_dir_all(&folder).expect("the folder for scratch can be written");
        Self(folder)
    }

    /// The path of a name in the folder; of the folder, by the name "".
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// [`path`](Self::path) as an argument.
    pub fn text(&self, name: &str) -> String {
        text(&self.path(name))
    }

    /// Writes a file, and returns its path as an argument.
    pub fn file(&self, name: &str, contents: impl AsRef<[u8]>) -> String {
        fs::write(self.path(name), contents).expect("the folder is there");
        self.text(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

/// A path as an argument.
pub fn text(path: &Path) -> String {
    path.to_str().expect("a path of letters").to_owned()
}

/// A program of the crate, by its path.
pub struct Program(pub &'static str);

impl Program {
    /// Calls with the words of a line, followed by more arguments.
    pub fn call(&self, line: &str, more: &[&str]) -> Output {
        let words = line.split_whitespace().chain(more.iter().copied());
        let output = Command::new(self.0).args(words).output();
        output.expect("cargo has built the program")
    }

    /// Its output.
    #[track_caller]
    pub fn printed(&self, line: &str, more: &[&str]) -> String {
        let output = self.call(line, more);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{line} {more:?}: {error}");
        String::from_utf8(output.stdout).expect("it prints text")
    }

    /// Error for refused arguments, without the program's name before it and the newline after it.
    #[track_caller]
    pub fn refused(&self, line: &str, more: &[&str]) -> String {
        let output = self.call(line, more);
        let error = String::from_utf8(output.stderr).expect("it prints text");
        assert_eq!(output.status.code(), Some(2), "{line} {more:?}: {error}");
        let name = concat!(env!("CARGO_PKG_NAME"), ": ");
        let reason = error.strip_prefix(name).expect("the program's name");
        reason.trim_end().to_owned()
    }

    /// Reads the package's calls shown in pages, and returns their number. With `--help` appended, a call is parsed
    /// and not carried out.
    #[track_caller]
    pub fn reads_calls_in(&self, pages: &[&str]) -> usize {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut calls = 0;
        for page in pages {
            let text = fs::read_to_string(root.join(page).with_extension("md")).expect("the page");
            // A call may continue in the next line.
            for line in text.replace("\\\n", " ").lines() {
                let line = line.split('#').next().unwrap_or_default();
                let package = concat!(" -p ", env!("CARGO_PKG_NAME"), " ");
                let is_call = line.starts_with("cargo run ") && line.contains(package);
                let Some((_, options)) = line.split_once(" -- ").filter(|_| is_call) else {
                    continue;
                };
                // Text between quotation marks is one word.
                let parts = options.split(['"', '\'']).enumerate();
                let words = parts.flat_map(|(at, part)| match at % 2 {
                    0 => part.split_whitespace().collect(),
                    _ => vec![part],
                });
                self.printed("", &words.chain(["--help"]).collect::<Vec<_>>());
                calls += 1;
            }
        }
        calls
    }
}
