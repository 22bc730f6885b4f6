//! What chooses the keys: ours, and the controls.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use train_text::model::Keys;

/// What chooses the keys that a query attends to. Every arm has the same parameters, initial values and data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arm {
    /// All keys.
    Dense,
    /// Linear scores that only rank the keys, and a quarter of the window recent.
    Ours,
    /// The last keys.
    Sliding,
}

impl Arm {
    /// The name as it is written after `--arms`, and in the rows.
    ///
    /// # Panics
    ///
    /// Never: no arm is hidden.
    pub fn name(self) -> String {
        let value = self.to_possible_value().expect("no arm is hidden");
        value.get_name().to_owned()
    }

    /// How the model's layers choose. Those of [`Dense`](Self::Dense) have no window to choose for.
    pub fn keys(self) -> Keys {
        match self {
            Self::Dense | Self::Ours => Keys::Learned,
            Self::Sliding => Keys::Sliding,
        }
    }
}
