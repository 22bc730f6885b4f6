//! Helpers of the tests.

use crate::testing::{Program, Scratch};
use burn::tensor::Device;
use flash_dma_models::doge::Doge;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// The program.
pub const DOGE: Program = Program(env!("CARGO_BIN_EXE_doge"));

impl Scratch {
    /// A new model.
    pub fn fresh(&self, name: &str) -> String {
        let dir = self.text(name);
        assert_eq!(DOGE.printed(&format!("fresh {dir} --seed 8"), &[]), "");
        dir
    }

    /// A model with parameters large enough that its texts are not of one letter, and without an end token.
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

/// The model of a folder.
pub fn read(dir: &Path) -> Doge {
    Doge::from_safetensors(dir, &Device::flex()).expect("a model")
}

/// A letter in the middle of a text, among those that are one token each.
pub fn letter_of(text: &str) -> char {
    let letters: Vec<char> = text.chars().filter(char::is_ascii).collect();
    *letters.get(letters.len() / 2).expect("letters")
}
