//! Tests of the models, their data and generation: one program, so that Burn is linked once.

mod data;
mod doge;
mod generate;
mod training;
