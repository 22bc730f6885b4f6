//! Tests of the models, their data and generation: one program, so that Burn is linked once.

#[macro_use]
mod assert;
mod data;
mod dir;
mod doge;
mod generate;
mod in_parts;
mod training;
