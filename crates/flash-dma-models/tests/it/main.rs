//! Tests of the models, their data and generation: one program, so that Burn is linked once.

/// Fails with the error's text if it is another error.
macro_rules! assert_error {
    ($error:expr, $($pattern:tt)+) => {{
        let error = $error;
        assert!(matches!(&error, $($pattern)+), "{error}");
    }};
}

mod data;
mod dir;
mod doge;
mod generate;
mod in_parts;
mod training;
