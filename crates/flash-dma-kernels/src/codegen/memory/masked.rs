//! Memory requests of masked passes and decode steps.

use crate::args::{Outputs, Saved};
use crate::codegen::cases::tensor;
use crate::codegen::memory::{Compiled, ENGINES, Gpu, recorder, requested};
use crate::decode::args::{Cache, Pages, Slots, StepInputs, StepOutputs, Tokens};
use crate::host::engine::Engine;
use crate::pattern::mask::args::{MaskBits, MaskedGradients, MaskedInputs};
use crate::{
    AttentionOptions, CacheShape, ElementType, MaskedProblem, Storage, backward, decode, forward,
};
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
    let options = AttentionOptions::new();
    MaskedProblem::new(&q, &kv, &kv, mask, bias, ElementType::Bf16, &options)
        .expect("a valid problem")
}

/// The bytes that both passes requested and announced.
fn masked_passes(
    client: &Client,
    problem: &MaskedProblem,
    engine: Engine,
) -> [Option<[usize; 2]>; 2] {
    let p = &problem.attention;
    let words = |shape| tensor(client, shape, 4);
    let [q, out, grad_out, grad_q] = [(); 4].map(|()| tensor(client, p.q_shape(), 2));
    let [k, v, grad_k, grad_v] = [(); 4].map(|()| tensor(client, p.kv_shape(), 2));
    let lse = tensor(client, p.lse_shape(), 4);
    let plan = problem.plan.map(|geometry| MaskBits {
        bits: tensor(client, geometry.bits_shape(), 4),
        counts: words(geometry.counts_shape()),
    });
    let bias = problem.bias.map(words);
    let inputs = MaskedInputs {
        q,
        k,
        v,
        plan,
        bias,
    };
    let saved = Saved {
        out: out.clone(),
        residual: Some(out.clone()),
        lse: lse.clone(),
        lse_rest: None,
        grad_out,
        grad_lse: None,
    };
    let grads = MaskedGradients {
        q: grad_q,
        k: grad_k,
        v: grad_v,
        bias: problem.bias.map(words),
    };
    let forward = forward::plan_on(engine, client, problem, &inputs);
    let backward = backward::plan_on(engine, client, problem, &inputs, &saved);
    [
        requested(
            client,
            forward,
            Outputs {
                residual: Some(out.clone()),
                ..Outputs::new(out, lse)
            },
        ),
        requested(client, backward, grads),
    ]
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
                    for (pass, n) in ["forward", "backward"].into_iter().zip(0..2) {
                        let Some([requested, said]) = passes[n] else {
                            continue;
                        };
                        assert_eq!(requested, said, "{pass}, {engine:?}, {gpu:?}, {problem:?}");
                        compared[n] += 1;
                    }
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
    let scored = shape.has_scores();
    let slots = shape.rule().map(|rule| rule.window);
    let options = AttentionOptions {
        keep_window: slots,
        ..AttentionOptions::new()
    };
    let scores = scored.then_some(&new[..3]);
    let problem = shape
        .decode(&q, &new, &new, scores, shape.element, 0, &options)
        .expect("a valid step");
    let kv = shape.kv_shape();
    let rows = || tensor(client, kv, 2);
    let cache = match shape.storage {
        Storage::Pages { max_pages, .. } => Cache::Pages(Pages {
            k: rows(),
            v: rows(),
            scores: scored.then(|| tensor(client, [kv[0], kv[1], kv[2]], 4)),
            table: tensor(client, [2, max_pages], 4),
            lengths: tensor(client, [2], 4),
        }),
        _ => {
            let window = slots.expect("slots have a window");
            let words = || tensor(client, [2, HEADS, window], 4);
            Cache::Slots(Slots {
                k: rows(),
                v: rows(),
                score: words(),
                position: words(),
                seen: tensor(client, [2], 4),
            })
        }
    };
    let tokens = Tokens {
        k: tensor(client, new, 2),
        v: tensor(client, new, 2),
        scores: scored.then(|| tensor(client, [2, HEADS, tokens], 4)),
    };
    let [q, out] = [(); 2].map(|()| tensor(client, q, 2));
    let lse = tensor(client, problem.lse_shape(), 4);
    let inputs = StepInputs { q, tokens };
    let plan = decode::plan_on(engine, client, &problem, &inputs);
    requested(client, plan, StepOutputs { cache, out, lse })
}

#[test]
fn a_decode_step_requests_the_workspace_it_says() {
    let pages = || CacheShape::pages(2, HEADS, [64, 256, 32], 128, ElementType::Bf16).unwrap();
    let shapes = [
        CacheShape::slots(2, HEADS, 2048, 128, ElementType::Bf16).unwrap(),
        CacheShape::slots(2, HEADS, 7, 128, ElementType::Bf16).unwrap(),
        pages(),
        pages().with_scores(),
    ];
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
        let engine = match gpu {
            Gpu::H200 => Engine::Wgmma,
            _ => Engine::Mma,
        };
        let mut compiled = Compiled::default();
        for n in (8..=15).map(|log| 1 << log) {
            for len in [n, n + 1, n - 3] {
                let problem =
                    masked_problem([len; 2], Some([2, 1, len, len]), Some([1, 1, 1, len]));
                compiled.add(&client, |client| {
                    let passes = masked_passes(client, &problem, engine);
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
            let shape = CacheShape::slots(2, HEADS, window, 128, ElementType::Bf16).unwrap();
            compiled.add(&client, |client| {
                step(client, shape, 1, Engine::Mma).expect("served");
            });
        }
        compiled.check(&most, &format!("{gpu:?}"));
    }
}
