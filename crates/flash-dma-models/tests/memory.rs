//! Memory saved by checkpointing: the peak of a step, counted by the allocator that Flex uses.
#![cfg(all(feature = "flex", feature = "autodiff"))]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::prelude::*;
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, Rope, Selection};
use flash_dma_models::nn::{Activations, DecoderConfig};

struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded to the system allocator; the counters are separate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(held, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Peak bytes of a step beyond those before it, and its loss.
fn step(layers: usize, activations: Activations) -> (usize, f64) {
    let device = Device::flex().autodiff();
    device.seed(0);
    let attention = DynamicMaskAttentionConfig::new(64, 2)
        .with_n_kv_heads(Some(1))
        .with_rope(Some(Rope::new(512)))
        .with_selection(Selection::keep(64));
    let model = DecoderConfig::new(attention, layers)
        .with_local_window(None)
        .with_activations(activations)
        .init(&device);
    let bytes: Vec<i32> = (0..513).map(|n| n * n % 251).collect();
    let tokens = |from: usize| {
        let data = TensorData::new(bytes[from..from + 512].to_vec(), [1, 512]);
        Tensor::<2, Int>::from_data(data, &device)
    };
    // Parameters are made on first use.
    let loss = model.try_loss(tokens(0), tokens(1)).expect("it fits");
    let _ = loss.into_scalar::<f64>();
    let before = HELD.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    let loss = model.try_loss_and_backward(tokens(0), tokens(1), None);
    let (loss, backward) = loss.expect("it fits");
    let gradients = backward();
    assert!(gradients.len() > layers);
    let most = MOST.load(Ordering::Relaxed) - before;
    (most, loss.into_scalar::<f64>())
}

#[test]
fn memory_that_is_recomputed_grows_by_little_more_than_the_inputs_of_blocks() {
    let [kept, recomputed] = [Activations::Kept, Activations::Recomputed]
        .map(|activations| [2, 8].map(|layers| step(layers, activations)));
    for (kept, recomputed) in kept.iter().zip(&recomputed) {
        assert_eq!(kept.1, recomputed.1, "the loss");
    }
    let a_block = |[few, many]: [(usize, f64); 2]| (many.0 - few.0) / 6;
    let (kept, recomputed) = (a_block(kept), a_block(recomputed));
    println!("{kept} bytes a block are kept, {recomputed} if it is recomputed");
    // The input of a block, 512 rows of 64 numbers; its parameters' gradients; selections.
    let input = 512 * 64 * 4;
    assert!(recomputed < kept / 3);
    assert!(recomputed > input);
}
