//! The smallest size, as CI trains it: learned scores must answer more questions than the same scores left as they were
//! drawn.
#![cfg(feature = "flex")]

use burn::tensor::Device;
use recall::arm::Arm;
use recall::settings::{Settings, Size};
use recall::train::train;

/// The share of questions answered after training.
fn answered(arm: Arm) -> f64 {
    let settings = Settings {
        seed: 2,
        // Fewer than the size's: enough, and under three minutes for both arms in an unoptimised build on two cores.
        steps: 220,
        ..Settings::of(arm, Size::Smallest)
    };
    let outcome = train(&settings, &Device::flex(), |_| {}).expect("the sizes fit");
    outcome.last.accuracy
}

/// On this seed (2026-11-26, `5305d4c`) ours answered everything after 176 steps, frozen scores 31 %. Not every seed learns as
/// soon: with 300 steps ours answered 55 to 100 % over seeds 0 to 8, and frozen ones 20 to 42 % over seeds 0 to 5.
#[test]
fn learned_scores_answer_more_questions_than_frozen_ones() {
    let (ours, frozen) = (answered(Arm::Ours), answered(Arm::Frozen));
    assert!(ours > frozen + 0.5, "ours {ours:.3}, frozen {frozen:.3}");
}
