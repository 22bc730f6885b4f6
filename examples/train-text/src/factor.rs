//! Numbers on the command line that the layers compute with in f32.

use burn_flash_dma::{LeaveOneOut, RankSoftmax};

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
    LeaveOneOut::new(number(besides)?).map_err(|error| error.to_string())
}

/// What an option says that the ranks of a head compete for, by the factor on them.
///
/// # Errors
///
/// Why not, in a line.
pub fn rank_softmax(inverse_temperature: &str) -> Result<RankSoftmax, String> {
    RankSoftmax::new(number(inverse_temperature)?).map_err(|error| error.to_string())
}

fn number(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| "not a number".to_owned())
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
