//! The memory that a training step, or a part of one, leaves behind.

use crate::alone::alone;
use crate::case::{self, random};
use burn::tensor::{Device, Tensor};
use burn_flash_dma::AttentionError;
use burn_flash_dma::nn::{
    DynamicMaskAttention, DynamicMaskAttentionConfig, Rope, ScoreLearning, Selection,
};
use burn_flash_dma::train::{Parts, try_in_parts};
use std::cell::RefCell;

const LEN: usize = 24;
const WIDTH: usize = 32;

/// Bytes in use on the device when nothing runs on it.
fn bytes_in_use(device: &Device) -> u64 {
    device.sync().expect("no kernel fails");
    let usage = device.memory_pool_usage();
    usage.expect("the runtime tells").bytes_in_use
}

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
        bytes_in_use(&device)
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

/// A part that has no graph yet leaves less on the device than its queries take.
#[test]
fn a_part_leaves_its_rows_alone() {
    let _alone = case::alone();
    alone!();
    let (len, width) = (64, 256);
    let device = Device::cpu().autodiff();
    let config = DynamicMaskAttentionConfig::new(width, 4)
        .with_n_kv_heads(Some(1))
        .with_selection(Selection::keep(4));
    let layer = config.init(&device);
    let x = Tensor::<3>::zeros([1, len, width], &device);
    let used = RefCell::new(Vec::new());
    let done = try_in_parts(
        &layer,
        &Parts::new(1, 6 * len, len),
        |layer: &DynamicMaskAttention, _, parts| {
            let out = parts.try_attend(layer, x.clone())?;
            used.borrow_mut().push(bytes_in_use(&device));
            match used.borrow().len() {
                5 => Err(AttentionError::ZeroWindow),
                _ => Ok(out),
            }
        },
        |_, _, out| Ok(out.sum()),
    );
    done.expect_err("it ends before the first graph");
    let used = used.into_inner();
    // Three parts, of which each may leave less than this.
    let queries = (len * width * size_of::<f32>()) as u64;
    assert!(used[4] < used[1] + 3 * queries, "{used:?}");
}
