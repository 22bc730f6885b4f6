//! The results of every kind of problem, against the oracle, and what is refused.

mod bad_input;
mod empty;
mod nan;
mod results;
mod selection;
mod tensor_cores;
