//! Random problems over everything that the contract allows, each compared with the oracle in every output.
//!
//! A problem is a [`Spec`], one line of text. A [`Palette`] draws them from a seed; [`run`] computes one on an engine;
//! [`fuzz`] does so for many; [`shrunk`] makes a failing one as small as it can. `cargo xtask fuzz` is the command.

mod decode;
mod draw;
mod drive;
mod fit;
mod inputs;
mod large;
mod options;
mod record;
mod run;
mod selection;
mod shrink;
mod sink;
mod spec;
#[cfg(test)]
mod tests;
mod text;

pub use decode::{Decoder, Step};
pub use draw::{Palette, Profile};
pub use drive::{Limits, Share, assert_line, fuzz, regression_test, shrunk};
pub use fit::work;
pub use inputs::YARDSTICKS;
pub use large::Large;
pub use options::{CHOICES, Choice};
pub use record::{Cell, Failure, Record};
pub use run::{Fuzzed, Outcome, Passed, run};
pub use shrink::shrink;
pub use spec::{
    Axes, By, Decoding, Ends, Heads, MAX_STEP, Parts, Place, Selecting, Spec, Store, What,
};
