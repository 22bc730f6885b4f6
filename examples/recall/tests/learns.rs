//! The smallest size, as CI trains it: learned scores must answer more questions than the same scores left as they were
//! drawn.
#![cfg(feature = "flex")]

use burn::tensor::Device;
use recall::arm::Arm;
use recall::settings::{Settings, Size};
use recall::task::Layout;
use recall::train::train;
use train_text::device::{DeviceName, DtypeName};

/// The share of questions answered after training.
fn answered(arm: Arm) -> f64 {
    let size = Size::Smallest;
    let settings = Settings {
        device: DeviceName::Flex,
        dtype: DtypeName::F32,
        arm,
        layout: Layout::Scattered,
        tokens: size.tokens(),
        window: Settings::window(arm, size.tokens(), 8),
        sizes: size.sizes(),
        steps: size.steps(),
        batch: size.batch(),
        rate: 1e-3,
        seed: 1,
    };
    let outcome = train(&settings, &Device::flex(), |_| {}).expect("the sizes fit");
    outcome.last.accuracy
}

/// Over seeds 0 to 5 (2026-11-23) frozen scores answered 20 to 42 %, ours 66 to 98 %; on this seed 26 and 70 %, and
/// without runners-up 27 %.
#[test]
fn learned_scores_answer_more_questions_than_frozen_ones() {
    let (ours, frozen) = (answered(Arm::Ours), answered(Arm::Frozen));
    assert!(ours > frozen + 0.2, "ours {ours:.3}, frozen {frozen:.3}");
}
