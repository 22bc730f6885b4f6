//! What the arms share. A file of its own: Flex draws for all threads of a process from one generator.
#![cfg(feature = "flex")]

use burn::tensor::{Device, TensorData};
use recall::arm::Arm;
use recall::model::Model;
use recall::settings::{Settings, Size};

/// A weight of the last layer, which is drawn after those of the scores before it.
fn weight(arm: Arm) -> TensorData {
    let settings = Settings::of(arm, Size::Small);
    let device = Device::flex().autodiff();
    device.seed(5);
    let model = Model::new(&settings, &device);
    let last = model.blocks.last().expect("the size has layers");
    last.attention.q_proj.weight.val().into_data()
}

#[test]
fn arms_with_one_score_form_begin_with_equal_parameters() {
    for arm in [Arm::Dense, Arm::Frozen, Arm::Added] {
        assert_eq!(weight(arm), weight(Arm::Ours), "{arm:?}");
    }
}
