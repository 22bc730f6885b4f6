//! The memory that a training step leaves behind.

use crate::alone::alone;
use crate::case::{self, random};
use burn::tensor::{Device, Tensor};
use burn_flash_dma::nn::{
    DynamicMaskAttention, DynamicMaskAttentionConfig, Rope, ScoreLearning, Selection,
};

const LEN: usize = 24;
const WIDTH: usize = 32;

/// Bytes in use on the device after each of some steps.
fn steps(config: &DynamicMaskAttentionConfig) -> Vec<u64> {
    let device = Device::cpu();
    let layer: DynamicMaskAttention = config.init(&device.clone().autodiff());
    let first: Tensor<3> = random([1, LEN, WIDTH], &device);
    let step = |_| {
        // Tokens with a graph, as after the first layer.
        let x = first.clone().autodiff().require_grad() * 2.0;
        let loss = layer.forward(x).square().mean();
        drop(loss.backward());
        drop(loss);
        device.sync().expect("no kernel fails");
        let usage = device.memory_pool_usage();
        usage.expect("the runtime tells").bytes_in_use
    };
    (0..4).map(step).collect()
}

/// Includes scores that nothing trains, whose graph no backward pass reaches.
#[test]
fn a_training_step_holds_no_memory_when_it_is_done() {
    let _alone = case::alone();
    // Memory left on the device by other tests is freed while they run.
    alone!();
    let (none, new) = (ScoreLearning::none, ScoreLearning::new);
    for (selection, learning) in [
        (Selection::keep(8), new()),
        (Selection::last(8), none()),
        (Selection::keep(LEN), none().with_runners_up(None)),
        (Selection::keep(8), new().with_tokens(true)),
    ] {
        let config = DynamicMaskAttentionConfig::new(WIDTH, 2)
            .with_rope(Some(Rope::new(LEN)))
            .with_selection(selection)
            .with_learning(Some(learning));
        let [.., before, last] = steps(&config)[..] else {
            unreachable!("there are four steps");
        };
        assert_eq!(before, last, "{config:?}");
    }
}
