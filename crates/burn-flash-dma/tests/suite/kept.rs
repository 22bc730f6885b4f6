//! Memory that a graph keeps for the backward pass of a layer, measured by a counting allocator.

use super::alone::alone;
use crate::case::random;
use crate::layer::recast;
use burn::nn::{LinearConfig, RmsNormConfig, SwiGluConfig};
use burn::tensor::{DType, Device, Tensor};
use burn_flash_dma::nn::{DynamicMaskAttentionConfig, Rope, Scores, Selection};
use burn_flash_dma::{linear, rms_norm, swiglu};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes in use.
static IN_USE: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: every call is forwarded to the system allocator; otherwise only counters change.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        IN_USE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's own promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's own promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const TOKENS: usize = 4096;
const WIDTH: usize = 64;

/// Bytes a pass leaves behind besides its result, in units of a 16-bit tensor as wide as its input.
fn left(device: &Device, pass: impl Fn(Tensor<3>) -> Tensor<3>) -> f64 {
    let input = |tokens| {
        let x = random::<3>([1, tokens, WIDTH], device).cast(DType::BF16);
        x.detach().require_grad()
    };
    // One-time allocations, such as a thread's memory, exist after it; a backward pass leaves nothing of its graph.
    drop(pass(input(TOKENS)).sum().backward());
    let x = input(TOKENS);
    let before = IN_USE.load(Ordering::Relaxed);
    let out = pass(x);
    let unit = TOKENS * WIDTH * 2;
    (IN_USE.load(Ordering::Relaxed) - before) as f64 / unit as f64
        - out.dims()[2] as f64 / WIDTH as f64
}

#[test]
fn a_block_keeps_what_its_gradients_are_made_of_and_nothing_else() {
    alone!();
    let device = Device::flex().autodiff();
    let norm = recast(RmsNormConfig::new(WIDTH).init(&device), DType::BF16);
    for scores in [Scores::Dma, Scores::Ranking] {
        // A key/value head is a quarter as wide as the tokens.
        let attention = DynamicMaskAttentionConfig::new(WIDTH, 4)
            .with_n_kv_heads(Some(1))
            .with_selection(Selection::keep(32))
            .with_rope(Some(Rope::new(TOKENS)))
            .with_scores(scores)
            .init(&device);
        let attention = recast(attention, DType::BF16);
        let kept = left(&device, |x| {
            attention.forward(rms_norm(x, norm.gamma.val(), 1e-5))
        });
        // q, k and v as projected; the output, its residual, and its copy for the output projection.
        let mut tensors = 1.0 + 0.25 + 0.25 + 1.0 + 1.0 + 1.0;
        // The LSE of each of four heads and its rounding error, in f32.
        tensors += 0.125 + 0.125;
        if scores == Scores::Dma {
            // v once more: rows of all heads for the product of the steps; a joint product of q, k and v does not
            // have them.
            tensors += 0.25;
        }
        let near = (tensors..tensors + 0.375).contains(&kept);
        assert!(near, "{scores:?}: {kept}");
    }

    let hidden = 3 * WIDTH;
    let gate = SwiGluConfig::new(WIDTH, hidden).init(&device);
    let down = LinearConfig::new(hidden, WIDTH).init(&device);
    let kept = left(&device, |x| {
        let x = rms_norm(x, norm.gamma.val(), 1e-5);
        let up = linear(&gate.linear_outer, x.clone());
        linear(&down, swiglu(linear(&gate.linear_inner, x), up))
    });
    assert!((6.0..6.1).contains(&kept), "{kept}");
}
