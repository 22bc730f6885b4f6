//! Memory requests of masked passes and decode steps.

use crate::codegen::memory::{Compiled, ENGINES, Gpu, compare, fastest, recorder, requested};
use crate::codegen::tensors::{self, Attention};
use crate::host::engine::Engine;
use crate::{AttentionOptions, CacheShape, ElementType, MaskedProblem, decode};
use cubecl::client::Client;

const HEADS: usize = 8;

/// A problem of `HEADS` kv heads and 4 query heads each, with the shapes of a mask and of a bias.
fn masked_problem(
    [q_len, k_len]: [usize; 2],
    mask: Option<[usize; 4]>,
    bias: Option<[usize; 4]>,
) -> MaskedProblem {
    let (q, kv) = ([2, 4 * HEADS, q_len, 128], [2, HEADS, k_len, 128]);
    let [mask, bias] = [&mask, &bias].map(|shape| shape.as_ref().map(<[usize; 4]>::as_slice));
    let (element, options) = (ElementType::Bf16, AttentionOptions::new());
    MaskedProblem::new(&q, &kv, &kv, mask, bias, element, &options).expect("a valid problem")
}

/// The bytes that both passes requested and announced.
fn masked_passes(
    client: &Client,
    problem: &MaskedProblem,
    engine: Engine,
) -> [Option<[usize; 2]>; 2] {
    let mut tensors = Attention::masked(client, problem);
    (tensors.saved.lse_rest, tensors.saved.grad_lse) = (None, None);
    tensors.passes(client, problem, engine)
}

/// Masks and biases of every broadcast that the lists distinguish, and short and empty problems.
#[test]
fn a_masked_pass_requests_the_workspace_it_says() {
    const N: usize = 8 << 10;
    let problems = [
        masked_problem([N; 2], Some([1, HEADS, N, N]), None),
        masked_problem([N; 2], Some([2, 1, N, N]), Some([1, 1, 1, N])),
        masked_problem([N; 2], Some([1, 4 * HEADS, N, N]), Some([2, HEADS, 1, N])),
        masked_problem([N; 2], Some([1, 1, 1, N]), Some([1, 4 * HEADS, 1, N])),
        masked_problem([N; 2], None, Some([2, 4 * HEADS, 1, N])),
        masked_problem([N; 2], Some([1, 1, N, N]), Some([1, HEADS, N, N])),
        masked_problem([N; 2], None, Some([1, 1, N, N])),
        masked_problem([33, 1773], Some([2, HEADS, 33, 1773]), None),
        masked_problem([1773, 33], Some([1, 1, 1773, 1]), Some([1, 1, 1773, 1])),
        masked_problem([1773, 33], None, Some([2, HEADS, 1, 1])),
        masked_problem([0, 9], Some([1, 1, 1, 9]), None),
        masked_problem([9, 0], None, None),
    ];
    for gpu in [Gpu::H200, Gpu::A100] {
        let client = recorder::client(gpu);
        let mut compared = [[0; 2]; 3];
        recorder::record(&client, |client| {
            for problem in &problems {
                for (engine, compared) in ENGINES.into_iter().zip(&mut compared) {
                    let passes = masked_passes(client, problem, engine);
                    let what = format!("{engine:?}, {gpu:?}, {problem:?}");
                    compare(passes, compared, &what);
                }
            }
        });
        let all = problems.len();
        // `mma` does not compute the gradient of a bias that not all queries share.
        let wgmma = if gpu == Gpu::H200 { [all; 2] } else { [0; 2] };
        assert_eq!(compared, [[all; 2], [all, all - 4], wgmma], "{gpu:?}");
    }
}

/// The cache of a shape with 2 sequences, and `tokens` new ones of each.
fn step(client: &Client, shape: CacheShape, tokens: usize, engine: Engine) -> Option<[usize; 2]> {
    let (q, new) = ([2, 4 * HEADS, tokens, 128], [2, HEADS, tokens, 128]);
    let options = AttentionOptions {
        keep_window: shape.rule().map(|rule| rule.window),
        ..AttentionOptions::new()
    };
    let scores = shape.has_scores().then_some(&new[..3]);
    let problem = shape.decode(&q, &new, &new, scores, shape.element, 0, &options);
    let problem = problem.expect("a valid step");
    let (inputs, outputs) = tensors::step(client, &problem);
    let plan = decode::plan_on(engine, client, &problem, &inputs);
    requested(client, plan, outputs)
}

fn slots(window: usize) -> CacheShape {
    CacheShape::slots(2, HEADS, window, 128, ElementType::Bf16).unwrap()
}

#[test]
fn a_decode_step_requests_the_workspace_it_says() {
    let pages = CacheShape::pages(2, HEADS, [64, 256, 32], 128, ElementType::Bf16).unwrap();
    let shapes = [slots(2048), slots(7), pages, pages.with_scores()];
    for gpu in [Gpu::H200, Gpu::A100] {
        let client = recorder::client(gpu);
        recorder::record(&client, |client| {
            for (shape, tokens) in shapes.iter().flat_map(|shape| [(shape, 1), (shape, 16)]) {
                for engine in [Engine::Portable, Engine::Mma] {
                    let sizes = step(client, *shape, tokens, engine);
                    let [requested, said] = sizes.expect("served");
                    assert_eq!(requested, said, "{engine:?}, {gpu:?}, {tokens}, {shape:?}");
                }
            }
        });
    }
}

/// Masks and biases of 256 to 32K tokens.
#[test]
fn kernels_do_not_grow_in_number_under_masks() {
    let most = [
        // Sizes of cubes, the least for few queries.
        ("forward_wgmma", 3),
        ("forward_mma", 2),
        ("dq_wgmma", 3),
        ("dq_mma", 2),
        // Key tiles of 64 keys where tiles of 128 are few.
        ("dkdv_wgmma", 2),
        ("query_list", 2),
        // A smaller cube for few elements.
        ("sum_heads", 2),
    ];
    for gpu in [Gpu::H200, Gpu::A100] {
        let client = recorder::client(gpu);
        let mut compiled = Compiled::default();
        for n in (8..=15).map(|log| 1 << log) {
            for len in [n, n + 1, n - 3] {
                let (mask, bias) = (Some([2, 1, len, len]), Some([1, 1, 1, len]));
                let problem = masked_problem([len; 2], mask, bias);
                compiled.add(&client, |client| {
                    let passes = masked_passes(client, &problem, fastest(gpu));
                    assert!(passes.iter().all(Option::is_some), "{problem:?}");
                });
            }
        }
        compiled.check(&most, &format!("{gpu:?}"));
    }
}

/// Slots of 16 to 64K keys.
#[test]
fn kernels_of_a_decode_step_do_not_grow_in_number_with_the_cache() {
    // The units of a merge follow the parts of the keys: 128 to 1024, a power of two.
    let most = [("finish_slots", 4)];
    for gpu in [Gpu::H200, Gpu::A100] {
        let client = recorder::client(gpu);
        let mut compiled = Compiled::default();
        for window in (4..=16).map(|log| 1 << log) {
            compiled.add(&client, |client| {
                step(client, slots(window), 1, Engine::Mma).expect("served");
            });
        }
        compiled.check(&most, &format!("{gpu:?}"));
    }
}
