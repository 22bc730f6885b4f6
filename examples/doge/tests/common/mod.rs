//! What the tests of the programs share.
#![allow(dead_code, reason = "each of them uses a part")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

use burn::tensor::Device;
use doge::fresh;
use flash_dma_models::doge::DogeConfig;

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

    /// A model with so large parameters that its texts are not of one letter, and without a token that ends them.
    pub fn model(&self, name: &str, seed: u64) -> String {
        let config = fresh::config().with_initializer_range(0.4);
        self.model_of(name, &config.with_other(serde_json::Map::new()), seed)
    }

    /// A model of a configuration.
    pub fn model_of(&self, name: &str, config: &DogeConfig, seed: u64) -> String {
        // All tests of a process draw from one generator.
        static ONE: Mutex<()> = Mutex::new(());
        let drawing = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let dir = self.path(name);
        fresh::write(&dir, config, seed, &Device::flex()).expect("the model is written");
        drop(drawing);
        text(&dir)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

/// A path as an argument.
pub fn text(path: &Path) -> String {
    path.to_str().expect("a path of letters").to_owned()
}

/// A call of a program.
pub fn call(program: &str, arguments: &[&str]) -> Output {
    let output = Command::new(program).args(arguments).output();
    output.expect("cargo has built the program")
}

/// What a program prints.
pub fn printed(program: &str, arguments: &[&str]) -> String {
    let output = call(program, arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {error}");
    String::from_utf8(output.stdout).expect("a program prints text")
}

/// What a program that refuses its arguments says.
pub fn refused(program: &str, arguments: &[&str]) -> String {
    let output = call(program, arguments);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    String::from_utf8(output.stderr).expect("a program prints text")
}

/// A letter in the middle of a text, of those that are a token each.
pub fn letter_of(text: &str) -> char {
    let letters: Vec<char> = text.chars().filter(char::is_ascii).collect();
    *letters.get(letters.len() / 2).expect("letters")
}
