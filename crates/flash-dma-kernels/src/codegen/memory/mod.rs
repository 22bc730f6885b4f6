//! The memory that the passes request on every device, and the number of kernels that they compile, without a GPU: on
//! devices that record both. Buffers take no memory here, so problems may be as large as they like.

mod masked;

use crate::args::RankLearning;
use crate::backward::Backward;
use crate::codegen::cuda::Gpu;
use crate::codegen::tensors::{Attention, tensor};
use crate::codegen::{kernel_name, recorder};
use crate::host::engine::Engine;
use crate::host::pass::Plan;
use crate::host::peak::peak_of;
use crate::planning::{largest_batch, longest, required_bytes};
use crate::select::select_workspace;
use crate::{AttentionError, AttentionOptions, ElementType, Forward, Passes, Problem, select};
use cubecl::client::Client;
use cubecl::ir::AddressType;
use cubecl_runtime::id::KernelId;
use flash_dma_problem::memory::tensor_bytes;
use std::collections::{BTreeMap, HashSet};

const ENGINES: [Engine; 3] = [Engine::Portable, Engine::Mma, Engine::Wgmma];

/// One sequence of 8 kv heads, and 4 query heads each.
fn problem(lengths: [usize; 2], head_dim: usize, options: Option<AttentionOptions>) -> Problem {
    problem_of(1, [8, 4], lengths, head_dim, options)
}

/// `options` come with scores.
fn problem_of(
    batch: usize,
    [kv_heads, group]: [usize; 2],
    [q_len, k_len]: [usize; 2],
    head_dim: usize,
    options: Option<AttentionOptions>,
) -> Problem {
    let q = [batch, kv_heads * group, q_len, head_dim];
    let kv = [batch, kv_heads, k_len, head_dim];
    let scores = options.map(|_| &kv[..3]);
    let options = options.unwrap_or_default();
    Problem::new(&q, &kv, &kv, scores, ElementType::Bf16, &options).expect("a valid problem")
}

fn window(keys: usize) -> Option<AttentionOptions> {
    Some(AttentionOptions::new().with_keep_window(keys))
}

type Tensors = Attention<Problem>;

impl Tensors {
    /// Adds runners-up, and kept keys that learn.
    fn with_runners_up(mut self, client: &Client, p: &Problem) -> Self {
        let words = || tensor(client, p.scores_shape(), 4);
        let selection = self.inputs.selection.as_mut().expect("there are scores");
        selection.learning = Some(RankLearning {
            ends: words(),
            max_live: p.window.saturating_add(p.window / 4),
            kept_from: Some(words()),
        });
        self.grads.rank = Some(words());
        self
    }

    /// The bytes that the selection requested and announced.
    fn select(&self, client: &Client, p: &Problem) -> Option<[usize; 2]> {
        let selection = self.inputs.selection.clone()?;
        let said = select_workspace(client, p.scores_shape(), p.window);
        let peak = peak_of(client, || {
            select(client, selection.scores, p.window, selection.intervals).expect("a selection");
        });
        Some([peak.requested, said])
    }
}

impl<P: Backward<Gradients: Clone>> Attention<P> {
    /// The bytes that both passes requested and announced on an engine; `None` if it does not support the problem.
    fn passes(&self, client: &Client, problem: &P, engine: Engine) -> [Option<[usize; 2]>; 2] {
        let Self { inputs, saved, .. } = self;
        let forward = problem.plan_forward(client, inputs, Some(engine));
        let backward = problem.plan_backward(client, inputs, saved, Some(engine));
        [
            requested(client, forward, self.outputs()),
            requested(client, backward, self.grads.clone()),
        ]
    }
}

/// The bytes that a pass requested and announced; `None` if its engine does not support the problem.
fn requested<Outputs>(
    client: &Client,
    plan: Result<Plan<'_, Outputs>, AttentionError>,
    outputs: Outputs,
) -> Option<[usize; 2]> {
    let plan = match plan {
        Ok(plan) => plan,
        Err(AttentionError::Engine { .. }) => return None,
        Err(error) => panic!("{error}"),
    };
    let said = plan.workspace_bytes();
    let peak = peak_of(client, || plan.run(outputs).expect("a valid call"));
    Some([peak.requested, said])
}

/// Compares the bytes that both passes requested and announced, and counts the passes that an engine supports.
fn compare(passes: [Option<[usize; 2]>; 2], compared: &mut [usize; 2], what: &str) {
    for ((name, pass), count) in ["forward", "backward"]
        .into_iter()
        .zip(passes)
        .zip(compared)
    {
        if let Some([requested, said]) = pass {
            assert_eq!(requested, said, "{name}, {what}");
            *count += 1;
        }
    }
}

fn fastest(gpu: Gpu) -> Engine {
    match gpu {
        Gpu::H200 => Engine::Wgmma,
        _ => Engine::Mma,
    }
}

/// Every branch of the workspaces: no scores, one chunk of queries and several, parts in a fixed order, one list for
/// all queries, slices of lists, few queries with split keys, nothing at all.
#[test]
fn every_pass_requests_the_workspace_it_says() {
    const K: usize = 1024;
    let full = |keys| window(keys).map(|options| options.with_causal(false));
    let fixed = |keys| window(keys).map(|options| options.with_deterministic(true));
    let problems: Vec<Problem> = [
        ([4 * K, 4 * K], None),
        ([1, 32 * K], None),
        ([32 * K, 32 * K], window(2 * K)),
        ([32 * K, 32 * K], fixed(2 * K)),
        ([32 * K, 32 * K], full(2 * K)),
        ([512 * K, 512 * K], window(16 * K)),
        ([1024 * K, 1024 * K], window(100)),
        ([33, 1773], window(728)),
        ([700, 4096], window(100)),
        ([1773, 33], window(16)),
        ([255, 255], window(1000)),
        ([0, 9], window(3)),
        ([9, 0], window(3)),
    ]
    .into_iter()
    .flat_map(|(lengths, options)| [64, 128].map(|dim| problem(lengths, dim, options)))
    .collect();
    for gpu in [Gpu::H200, Gpu::A100, Gpu::Rtx4090] {
        let client = recorder::client(gpu);
        let mut compared = [[0; 2]; 3];
        recorder::record(&client, |client| {
            for p in &problems {
                let tensors = Tensors::scored(client, p);
                if let Some([requested, said]) = tensors.select(client, p) {
                    assert_eq!(requested, said, "the selection on {gpu:?}, {p:?}");
                }
                for (engine, compared) in ENGINES.into_iter().zip(&mut compared) {
                    let passes = tensors.passes(client, p, engine);
                    compare(passes, compared, &format!("{engine:?}, {gpu:?}, {p:?}"));
                }
                if p.has_scores {
                    let tensors = tensors.with_runners_up(client, p);
                    for engine in ENGINES {
                        let [_, backward] = tensors.passes(client, p, engine);
                        let what = format!("runners-up, {engine:?}, {gpu:?}, {p:?}");
                        compare([None, backward], &mut [0; 2], &what);
                    }
                }
            }
        });
        let all = [problems.len(); 2];
        let wgmma = if gpu == Gpu::H200 { all } else { [0; 2] };
        assert_eq!(compared, [all, all, wgmma], "{gpu:?}");
    }
}

/// Twice the tokens take at most twice the memory plus the lists' budget, whether or not the window grows with them.
#[test]
fn memory_is_linear_in_the_tokens_up_to_four_million() {
    const LISTS: usize = 144 << 20;
    let client = recorder::client(Gpu::H200);
    recorder::record(&client, |client| {
        let windows: [fn(usize) -> usize; 2] = [|_| 2048, |n| n / 8];
        let cases = windows.into_iter().flat_map(|w| [(w, false), (w, true)]);
        for (window_of, deterministic) in cases {
            let workspaces = |n: usize| {
                let options = window(window_of(n)).map(|o| o.with_deterministic(deterministic));
                let p = problem([n; 2], 128, options);
                let tensors = Tensors::scored(client, &p);
                ENGINES.map(|engine| {
                    let (inputs, saved) = (&tensors.inputs, &tensors.saved);
                    let forward = p.plan_forward(client, inputs, Some(engine));
                    let backward = p.plan_backward(client, inputs, saved, Some(engine));
                    [
                        forward.expect("served").workspace_bytes(),
                        backward.expect("served").workspace_bytes(),
                    ]
                })
            };
            let mut n = 16 << 10;
            let mut last = workspaces(n);
            while n < 4 << 20 {
                n *= 2;
                let next = workspaces(n);
                for (last, next) in last.iter().flatten().zip(next.iter().flatten()) {
                    let linear = *next <= 2 * last + LISTS;
                    assert!(linear, "{last} to {next} bytes at {n} tokens");
                }
                last = next;
            }
        }
    });
}

/// A call's [`required_bytes`] are the tensors that it is given and the greatest workspace.
#[test]
fn a_plan_is_the_tensors_and_the_greatest_workspace() {
    for gpu in [Gpu::H200, Gpu::A100] {
        let client = recorder::client(gpu);
        recorder::record(&client, |client| {
            for (lengths, options) in [
                ([32 << 10; 2], window(2048)),
                ([5000; 2], None),
                ([7, 900], window(64)),
            ] {
                let p = problem(lengths, 128, options);
                let mut tensors = Tensors::scored(client, &p);
                let selecting = tensors.select(client, &p);
                let selecting = selecting.map_or(0, |[requested, _]| requested);
                let passes = |tensors: &Tensors| {
                    let passes = tensors.passes(client, &p, fastest(gpu));
                    passes.map(|pass| pass.expect("served")[0])
                };
                let [forward, backward] = passes(&tensors);
                if p.has_scores {
                    tensors = tensors.with_runners_up(client, &p);
                }
                let [_, ranked] = passes(&tensors);
                let most = selecting.max(forward);
                for (passes, workspace) in [
                    (Passes::Forward, most),
                    (Passes::ForwardAndBackward, most.max(backward)),
                    (Passes::WithRunnersUp, most.max(ranked)),
                ] {
                    let expected = tensor_bytes(&p, passes) as usize + workspace;
                    assert_eq!(required_bytes(client, &p, passes), Ok(expected), "{p:?}");
                }
            }
        });
    }
}

#[test]
fn a_planned_length_or_batch_fits_and_one_more_does_not() {
    let client = recorder::client(Gpu::H200);
    recorder::record(&client, |client| {
        let template = problem_of(3, [8, 4], [4096; 2], 128, window(2048));
        use Passes::{Forward, ForwardAndBackward, WithRunnersUp};
        for passes in [Forward, ForwardAndBackward, WithRunnersUp] {
            for bytes in [1 << 20, 1 << 30, 80 << 30, 140 << 30] {
                let needs = |sizes| {
                    let p = template.with_sizes(sizes).expect("valid sizes");
                    required_bytes(client, &p, passes).expect("served")
                };
                let n = longest(client, &template, passes, bytes).expect("served");
                let (fits, more) = (needs([3, n, n]) <= bytes, needs([3, n + 1, n + 1]) <= bytes);
                assert!(n > 0 && fits && !more, "{n} tokens of {bytes} bytes");
                let batch = largest_batch(client, &template, passes, bytes).expect("served");
                let fits = batch == 0 || needs([batch, 4096, 4096]) <= bytes;
                let more = needs([batch + 1, 4096, 4096]) <= bytes;
                assert!(fits && !more, "{batch} sequences of {bytes} bytes");
            }
        }
    });
}

/// Launches both passes on the engine that the problem chooses, selection included.
fn launch_all(client: &Client, p: &Problem) {
    let tensors = Tensors::scored(client, p);
    tensors.select(client, p);
    tensors.forward(client, p, None).expect("a valid call");
    tensors.backward(client, p, None).expect("a valid call");
}

/// The compiled kernels by name. Each counts once per difference in its code or in the size of its cubes; the 64-bit
/// form of a kernel, for tensors of 2^32 elements or bytes, counts as the 32-bit one.
#[derive(Default)]
struct Compiled(BTreeMap<String, HashSet<KernelId>>);

impl Compiled {
    fn add(&mut self, client: &Client, run: impl FnOnce(&Client)) {
        for kernel in recorder::record(client, run) {
            let mut id = kernel.id();
            id.address_type = AddressType::U32;
            let name = kernel_name(id.type_name()).to_owned();
            self.0.entry(name).or_default().insert(id);
        }
    }

    /// Kernels that are not in `most` are compiled at most once.
    fn check(&self, most: &[(&str, usize)], what: &str) {
        let more = self.0.iter().filter(|(name, ids)| {
            let most = most.iter().find(|(kernel, _)| kernel == name);
            ids.len() > most.map_or(1, |(_, most)| *most)
        });
        let more: Vec<(&String, usize)> = more.map(|(name, ids)| (name, ids.len())).collect();
        assert!(more.is_empty(), "{what}: {more:?}");
        assert!(!self.0.is_empty(), "{what}");
    }
}

/// The kernels of one configuration at 256 to 512K tokens, whole tiles or not, in one sequence to eight.
#[test]
fn kernels_do_not_grow_in_number_with_tokens_and_sequences() {
    let most = [
        // Three sizes of cubes, the least for few queries, and each split or not.
        ("forward_wgmma", 6),
        ("forward_mma", 4),
        ("merge", 1),
        // Three sizes of cubes; two on mma.
        ("dq_wgmma", 3),
        ("dq_mma", 2),
        // Key tiles of 64 keys where tiles of 128 are few; gradients alone, and added to those of other chunks.
        ("dkdv_wgmma", 4),
        ("dkdv_mma", 2),
        // Four sizes of blocks, and scores read one by one where a row is not a multiple of four.
        ("thresholds", 8),
        ("evictions", 8),
        // Tiles of the forward pass and of dq, and for many lists cubes of more planes.
        ("tile_keys", 4),
        // Two element types, and smaller cubes for few elements.
        ("fill", 4),
        ("scan_spans", 2),
    ];
    let gpus = [Gpu::H200, Gpu::A100].into_iter();
    for (gpu, options) in gpus.flat_map(|gpu| [(gpu, window(2048)), (gpu, None)]) {
        let client = recorder::client(gpu);
        let mut compiled = Compiled::default();
        for n in (8..=19).map(|log| 1 << log) {
            for (len, batch) in [(n, 1), (n, 2), (n, 8), (n + 1, 1), (n - 3, 3)] {
                let p = problem_of(batch, [8, 4], [len; 2], 128, options);
                compiled.add(&client, |client| launch_all(client, &p));
            }
        }
        compiled.check(&most, &format!("{gpu:?}, {options:?}"));
    }
}
