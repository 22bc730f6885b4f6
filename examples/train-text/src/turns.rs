//! Heads that are dealt the tokens of a text in turn, by an option of a command.

use crate::factor::is_factor;
use burn_flash_dma::nn::RoundRobin;

/// The penalty where none is given: more than any score of a normalised token.
const STRICT: f64 = 1000.0;

/// Reads `RUN` or `RUN:PENALTY`.
///
/// # Errors
///
/// One line if it is neither, or not a [`RoundRobin`] of f32.
pub fn parse(text: &str) -> Result<RoundRobin, String> {
    let (run, penalty) = text.split_once(':').unwrap_or((text, ""));
    let penalty = match penalty {
        "" => Ok(STRICT),
        penalty => penalty.parse(),
    };
    match (run.parse(), penalty) {
        (Ok(run @ 1..=0xffff), Ok(penalty)) if is_factor(penalty) => {
            Ok(RoundRobin::new(run, penalty))
        }
        _ => Err(format!(
            "`{text}` is not a run of 1 to 65535 tokens, or one and a penalty of at least 0, as 2:1.5"
        )),
    }
}

/// The same for the layer of this index among those that are dealt tokens, with twice as long runs as the one before it:
/// tokens that one layer deals to one head are dealt to several by the next.
#[must_use]
pub fn of_layer(dealt: RoundRobin, index: usize) -> RoundRobin {
    RoundRobin::new(dealt.run << index.min(14), dealt.penalty)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_and_a_penalty_are_read() {
        assert_eq!(parse("2"), Ok(RoundRobin::new(2, STRICT)));
        assert_eq!(parse("16:1.5"), Ok(RoundRobin::new(16, 1.5)));
        for wrong in [
            "", "0", "-1", "65536", "a", "2:a", "2:-1", "2:NaN", "2:1e39", ":1",
        ] {
            assert!(
                parse(wrong).unwrap_err().contains("is not a run"),
                "{wrong}"
            );
        }
    }

    #[test]
    fn runs_double_from_layer_to_layer() {
        let runs = [0, 1, 2, 99].map(|layer| of_layer(RoundRobin::new(3, 1.0), layer).run);
        assert_eq!(runs, [3, 6, 12, 3 << 14]);
    }
}
