//! Tests of the models, their data and generation: one program, so that Burn is linked once.

/// Fails with the text of an error that is another one.
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
mod training;
