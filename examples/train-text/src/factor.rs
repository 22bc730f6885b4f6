//! Numbers on the command line that the layers compute with in f32.

use burn_flash_dma::LeaveOneOut;

/// Whether a number is at least 0 and, as f32, finite.
pub(crate) fn is_factor(number: f64) -> bool {
    (0.0..f32::INFINITY).contains(&(number as f32))
}

/// What an option says that kept keys learn, by its weight besides them.
///
/// # Errors
///
/// Why not, in a line.
pub fn leave_one_out(besides: &str) -> Result<LeaveOneOut, String> {
    let besides: f64 = besides.parse().map_err(|_| "not a number".to_owned())?;
    LeaveOneOut::new(besides).map_err(|error| error.to_string())
}

/// Refuses what an option was given if it is negative or, as f32, not finite.
///
/// # Errors
///
/// A line that names the option.
pub fn check(option: &str, given: Option<f64>) -> Result<(), String> {
    match given.filter(|&given| !is_factor(given)) {
        Some(given) => Err(format!("{option} {given}: at least 0, and finite in f32")),
        None => Ok(()),
    }
}
