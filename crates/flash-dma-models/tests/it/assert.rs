//! Assertions.

/// Fails with the error's text if it is another error.
macro_rules! assert_error {
    ($error:expr, $($pattern:tt)+) => {{
        let error = $error;
        assert!(matches!(&error, $($pattern)+), "{error}");
    }};
}
