//! What the tests share.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

use burn::tensor::Device;
use flash_dma_models::doge::Doge;

/// A folder that is removed when the test has passed.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("doge-{name}-{}", std::process::id()));
        std::fs::remove_dir_all(&folder).ok();
        std::fs::create_dir_all(&folder).expect("the folder for scratch can be written");
        Self(folder)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// A new model.
    pub fn fresh(&self, name: &str) -> String {
        let dir = text(&self.path(name));
        assert_eq!(printed(&format!("fresh {dir} --seed 8"), &[]), "");
        dir
    }

    /// A model with so large parameters that its texts are not of one letter, and without a token that ends them.
    pub fn model(&self, name: &str, seed: u64) -> String {
        // All tests of a process draw from one generator.
        static ONE: Mutex<()> = Mutex::new(());
        let (dir, device) = (self.fresh(name), Device::flex());
        let config = read(Path::new(&dir)).config().clone();
        let config = config
            .with_initializer_range(0.4)
            .with_other(serde_json::Map::new());
        let drawing = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        device.seed(seed);
        let model = config.try_init(&device).expect("a model");
        model.save_safetensors(&dir).expect("it is written");
        drop(drawing);
        dir
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

/// The model of a folder.
pub fn read(dir: &Path) -> Doge {
    Doge::from_safetensors(dir, &Device::flex()).expect("a model")
}

/// A path as an argument.
pub fn text(path: &Path) -> String {
    path.to_str().expect("a path of letters").to_owned()
}

/// The program.
pub fn doge() -> Command {
    Command::new(env!("CARGO_BIN_EXE_doge"))
}

/// A call of the program with the words of a line, and further arguments behind them.
pub fn call(line: &str, more: &[&str]) -> Output {
    let output = doge().args(line.split(' ')).args(more).output();
    output.expect("cargo has built the program")
}

/// What the program prints.
pub fn printed(line: &str, more: &[&str]) -> String {
    let output = call(line, more);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{line} {more:?}: {error}");
    String::from_utf8(output.stdout).expect("it prints text")
}

/// What the program says when it refuses its arguments.
pub fn refused(line: &str, more: &[&str]) -> String {
    let output = call(line, more);
    assert_eq!(output.status.code(), Some(2), "{line} {more:?}");
    String::from_utf8(output.stderr).expect("it prints text")
}

/// A letter in the middle of a text, of those that are a token each.
pub fn letter_of(text: &str) -> char {
    let letters: Vec<char> = text.chars().filter(char::is_ascii).collect();
    *letters.get(letters.len() / 2).expect("letters")
}
