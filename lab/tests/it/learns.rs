//! The smallest size, as CI trains it: learned scores must answer more questions than scores at their initial values.

use burn::tensor::Device;
use lab::arm::Arm;
use lab::settings::{Settings, Size, Task};
use lab::train::run;

/// The share of questions answered after training.
fn answered(arm: Arm, seed: u64) -> f64 {
    let settings = Settings {
        seed,
        // Fewer than the size's: enough, and under three minutes for both arms in an unoptimised build on two cores.
        steps: 220,
        ..Settings::of(Task::Recall, arm, Size::Smallest)
    };
    let outcome = run(&settings, None, &Device::flex(), None, |_| {}).expect("the sizes fit");
    outcome.evaluation.accuracy.expect("of recall")
}

fn learned_scores_answer_more(seed: u64) {
    let [ours, frozen] = [Arm::Ours, Arm::Frozen].map(|arm| answered(arm, seed));
    println!("ours {ours:.3}, frozen {frozen:.3}");
    assert!(ours > frozen + 0.5, "ours {ours:.3}, frozen {frozen:.3}");
}

#[test]
fn learned_scores_answer_more_questions_than_frozen_ones_of_seed_0() {
    learned_scores_answer_more(0);
}

#[test]
fn learned_scores_answer_more_questions_than_frozen_ones_of_seed_1() {
    learned_scores_answer_more(1);
}
