//! Factors on the command line that the layers compute with in f32.

/// Refuses what an option was given if it is negative or, as f32, not finite.
///
/// # Errors
///
/// A line that names the option.
pub fn check(option: &str, given: Option<f64>) -> Result<(), String> {
    match given.filter(|&given| !(0.0..f32::INFINITY).contains(&(given as f32))) {
        Some(given) => Err(format!("{option} {given}: at least 0, and finite in f32")),
        None => Ok(()),
    }
}
