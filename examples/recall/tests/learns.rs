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
        seed: 1,
        ..Settings::of(arm, Size::Smallest)
    };
    let outcome = train(&settings, &Device::flex(), |_| {}).expect("the sizes fit");
    outcome.last.accuracy
}

/// Over seeds 0 to 2 (2026-11-23) ours answered 95 to 100 %, on this one 100 %. Over seeds 0 to 5 frozen scores answered
/// 20 to 42 %, and scores that are added to the logits 66 to 98 %; on this seed 26 and 70 %, and without runners-up 27 %.
#[test]
fn learned_scores_answer_more_questions_than_frozen_ones() {
    let (ours, frozen) = (answered(Arm::Ours), answered(Arm::Frozen));
    assert!(ours > frozen + 0.5, "ours {ours:.3}, frozen {frozen:.3}");
    let added = answered(Arm::Added);
    assert!(added > frozen + 0.2, "added {added:.3}, frozen {frozen:.3}");
}
