//! Calls that together launch every variant. A case only adds variants that no earlier case has launched.

mod decoding;
mod masked;
mod norm;
mod products;
mod training;
mod zoh;

use crate::args::{RankLearning, Selection};
use crate::codegen::cuda::Gpu;
use crate::codegen::tensors::{self, tensor};
use crate::host::engine::Engine;
use crate::pattern::intervals::tiles::QueryTiles;
use crate::pattern::intervals::{live_keys, tile_key_lists};
use crate::{AlibiSlopes, AttentionOptions, Dropout, ElementType, Problem, select};
use cubecl::client::Client;
use flash_dma_problem::AttentionError;

pub(crate) struct Case {
    pub name: String,
    pub gpus: &'static [Gpu],
    pub run: Box<dyn Fn(&Client)>,
}

/// Enough keys for three levels of the selection's tree, and enough heads to fill cubes.
const HEADS: usize = 8;
const K_LEN: usize = 128 << 10;
/// Keys too many for a selection by blocks.
const SORTED_K_LEN: usize = 1 << 20;
/// Keys of problems whose buffers exceed 32-bit indices.
const LONG_K_LEN: usize = 512 << 20;

pub(crate) fn all() -> Vec<Case> {
    let mut cases = selection();
    cases.extend(attention());
    cases.extend(decoding::all());
    cases.extend(masked::all());
    cases.extend(norm::all());
    cases.extend(products::all());
    cases.extend(training::all());
    cases.extend(zoh::all());
    cases
}

/// Selection and key lists, with 32 and 64 bit addresses.
pub(crate) fn selection() -> Vec<Case> {
    let select = |name: String, k_len, window| {
        case(name, move |client| {
            selected(client, k_len, window);
        })
    };
    let mut cases = vec![select("select-long".into(), SORTED_K_LEN, 2048)];
    for (suffix, k_len) in [("", K_LEN), ("-64bit", LONG_K_LEN)] {
        cases.push(select(format!("select{suffix}"), k_len, 2048));
        cases.push(select(format!("select-all{suffix}"), k_len, k_len));
        cases.push(case(format!("lists{suffix}"), move |client| {
            let options = AttentionOptions::new().with_keep_window(2048);
            let (shape, element) = ([1, HEADS, k_len, 64], ElementType::Bf16);
            let scores = Some(&shape[..3]);
            let problem = Problem::new(&shape, &shape, &shape, scores, element, &options);
            let problem = problem.expect("a valid problem");
            let live = live_keys(client, &problem, &selected(client, k_len, 2048));
            let tiles = QueryTiles::new(&problem, 64);
            let slice = tiles.slices(HEADS).next().expect("there are queries");
            tile_key_lists(client, &problem, &live, &tiles, slice);
        }));
    }
    cases
}

/// Forward and backward: every common head dimension in bf16, fewer in other types, and each option that changes the
/// code.
fn attention() -> Vec<Case> {
    use ElementType::{Bf16, F16, F32};
    let dense = AttentionOptions::new();
    let sparse = dense.with_keep_window(2048);
    let (dropout, slopes) = (dropout(), slopes());
    let (dropped, biased) = (sparse.with_dropout(dropout), sparse.with_alibi(slopes));
    let (full, fixed) = (sparse.with_causal(false), sparse.with_deterministic(true));
    let capped = sparse.with_softcap(30.0);

    let of = |head_dim, element| Attention::new(head_dim, element, Some(sparse));
    let [d64, d96, d128, f16] = [of(64, Bf16), of(96, Bf16), of(128, Bf16), of(128, F16)];
    let dims = [of(32, Bf16), d64, d96, d128, of(192, Bf16), of(256, Bf16)];
    let on = |call: Attention, options| with(call, |c| c.options = options);
    let unscored = |options| with(on(d128, options), |c| c.scored = false);
    let in_f32 = |call: Attention| with(call, |c| c.element = F32);
    let residual = |call: Attention| with(call, |c| c.residual = true);
    let few = |call: Attention| with(call, |c| (c.q_len, c.backward) = (16, false));
    let runners = |call: Attention| with(call, |c| c.runners_up = true);
    let left_out = |call| with(runners(call), |c| c.left_out = true);
    // The dk/dv kernel sums what kept keys learn.
    let kept = |call: Attention| {
        with(left_out(call), |c| {
            (c.constant_scores, c.grad_lse, c.engines) = (true, false, &[Engine::Wgmma]);
        })
    };
    let no_lse = |call: Attention| with(call, |c| c.grad_lse = false);
    let huge = |call: Attention| with(call, |c| c.k_len = LONG_K_LEN);
    // Enough chunks for tiles of 128 runners-up.
    let long = |call: Attention| with(call, |c| (c.q_len, c.k_len) = (1 << 15, 1 << 15));
    let unaligned = with(d128, |c| c.row_padding = 1);
    let repeated = |call: Attention| with(call, |c| c.repeats_keys = true);

    let mut calls: Vec<_> = dims.map(|call| ("", call)).into();
    calls.extend([
        ("", f16),
        ("", of(64, F32)),
        ("", of(256, F32)),
        ("-dense", unscored(dense)),
        ("-dense", in_f32(unscored(dense))),
        ("-full", on(d128, full)),
        ("-softcap", on(d128, capped)),
        ("-deterministic", on(d128, fixed)),
        ("-dropout", on(d128, dropped)),
        ("-alibi", on(d128, biased)),
        ("-alibi-softcap", on(d128, biased.with_softcap(30.0))),
        ("-alibi-dropout", on(d128, biased.with_dropout(dropout))),
        ("-dropout", on(d64, dropped)),
        ("-dropout", on(d96, dropped)),
        ("-dropout", on(f16, dropped)),
        ("-dropout-softcap", on(d128, dropped.with_softcap(30.0))),
        ("-dropout-residual", residual(on(d128, dropped))),
        ("-dense-dropout", unscored(dense.with_dropout(dropout))),
        ("-dense-alibi", unscored(dense.with_alibi(slopes))),
        ("-unaligned", unaligned),
        ("-dense-repeated", repeated(unscored(dense))),
        ("-64bit", huge(d128)),
        ("-residual", residual(d64)),
        ("-residual", residual(d128)),
        ("-residual", residual(of(256, Bf16))),
        ("-dense-residual", residual(unscored(dense))),
        ("-residual", residual(f16)),
        ("-few", few(d128)),
        ("-few-residual", residual(few(d128))),
        ("-few-dense", few(unscored(dense))),
        ("-few-dense-residual", residual(few(unscored(dense)))),
    ]);
    calls.extend(dims.map(|call| ("-runners", runners(call))));
    calls.extend([
        ("-runners", runners(f16)),
        ("-runners", runners(of(64, F32))),
        ("-runners-full", runners(on(d128, full))),
        ("-runners-softcap", runners(on(d128, capped))),
        ("-runners-alibi", runners(on(d128, biased))),
        ("-runners-deterministic", runners(on(d128, fixed))),
        ("-runners-no-lse", no_lse(runners(d128))),
        ("-runners-64bit", huge(runners(d128))),
        ("-runners-long", long(runners(d128))),
        ("-left-out", left_out(d64)),
        ("-left-out", left_out(d96)),
        ("-left-out", left_out(d128)),
        ("-left-out", left_out(of(64, F32))),
        ("-left-out-deterministic", left_out(on(d128, fixed))),
        ("-left-out-no-lse", no_lse(left_out(d128))),
        ("-left-out-long", long(left_out(d128))),
        ("-kept", kept(d64)),
        ("-kept", kept(d128)),
        ("-kept", kept(f16)),
        ("-kept-softcap", kept(on(d128, capped))),
        ("-kept-alibi", kept(on(d128, biased))),
        ("-kept-full", kept(on(d128, full))),
        ("-kept-long", long(kept(d128))),
    ]);
    let case = |(suffix, call): (&str, Attention)| {
        call.case(format!("{}-d{}{suffix}", call.element, call.head_dim))
    };
    calls.into_iter().map(case).chain(on_mma(sparse)).collect()
}

/// Attention on `mma`, on each kind of device with different limits: the head dimensions of most models.
fn on_mma(sparse: AttentionOptions) -> impl Iterator<Item = Case> {
    let calls = [
        ("mma-d64", 64, Some(sparse)),
        ("mma-d128", 128, Some(sparse)),
        ("mma-d256", 256, Some(sparse)),
        ("mma-d64-dense", 64, None),
        ("mma-d128-dense", 128, None),
    ];
    calls.into_iter().map(|(name, head_dim, options)| {
        let call = Attention::new(head_dim, ElementType::Bf16, options);
        let call = with(call, |c| c.engines = &[Engine::Mma]);
        with(call.case(name.into()), |case| case.gpus = &Gpu::ALL)
    })
}

fn slopes() -> AlibiSlopes {
    AlibiSlopes::standard(4 * HEADS)
}

fn dropout() -> Dropout {
    Dropout::new(0.1, 1).expect("a probability")
}

#[derive(Clone, Copy)]
struct Attention {
    head_dim: usize,
    element: ElementType,
    q_len: usize,
    k_len: usize,
    options: AttentionOptions,
    /// True if keys have scores.
    scored: bool,
    /// Elements between the rows of `k` and `v`.
    row_padding: usize,
    /// True if `k` and `v` have one token, which is read for all.
    repeats_keys: bool,
    /// The forward pass writes the residual of `out`, and the backward pass reads it.
    residual: bool,
    backward: bool,
    /// True if the LSE has a gradient.
    grad_lse: bool,
    /// True if the selection has runners-up.
    runners_up: bool,
    left_out: bool,
    /// True if the scores only rank the keys.
    constant_scores: bool,
    /// Engines to launch, if they support the problem; the portable one supports all.
    engines: &'static [Engine],
}

impl Attention {
    /// Without `options` there are no scores.
    fn new(head_dim: usize, element: ElementType, options: Option<AttentionOptions>) -> Self {
        Self {
            head_dim,
            element,
            q_len: 4096,
            k_len: K_LEN,
            options: options.unwrap_or_default(),
            scored: options.is_some(),
            row_padding: 0,
            repeats_keys: false,
            residual: false,
            backward: true,
            grad_lse: true,
            runners_up: false,
            left_out: false,
            constant_scores: false,
            engines: &[Engine::Portable, Engine::Mma, Engine::Wgmma],
        }
    }

    fn case(self, name: String) -> Case {
        case(name, move |client| self.run(client))
    }

    fn run(self, client: &Client) {
        let q = [1, 4 * HEADS, self.q_len, self.head_dim];
        let kv = [1, HEADS, self.k_len, self.head_dim];
        let (scores, size) = (self.scored.then_some(&kv[..3]), self.element.size());
        let problem = Problem::new(&q, &kv, &kv, scores, self.element, &self.options);
        let mut problem = problem.expect("a valid problem");
        if self.constant_scores {
            problem = problem.with_constant_scores();
        }
        let mut tensors = tensors::Attention::scored(client, &problem);
        let padded = || {
            let width = self.head_dim + self.row_padding;
            let mut padded = tensor(client, [1, HEADS, self.k_len, width], size);
            padded.shape = kv.into();
            if self.repeats_keys {
                padded.strides[2] = 0;
            }
            padded
        };
        (tensors.inputs.k, tensors.inputs.v) = (padded(), padded());
        let words = || tensor(client, problem.scores_shape(), 4);
        if let Some(selection) = &mut tensors.inputs.selection {
            *selection = selected(client, self.k_len, problem.window);
            selection.learning = self.runners_up.then(|| RankLearning {
                ends: words(),
                max_live: 2 * problem.window,
                kept_from: self.left_out.then(words),
            });
        }
        tensors.grads.rank = self.runners_up.then(words);
        tensors.saved.grad_lse = tensors.saved.grad_lse.filter(|_| self.grad_lse);
        tensors.saved.residual = self.residual.then(|| tensor(client, q, size));
        self.on_each(|engine| tensors.forward(client, &problem, Some(engine)));
        if self.backward {
            self.on_each(|engine| tensors.backward(client, &problem, Some(engine)));
        }
    }

    fn on_each(self, call: impl Fn(Engine) -> Result<(), AttentionError>) {
        for &engine in self.engines {
            let called = call(engine);
            assert!(called.is_ok() || engine != Engine::Portable, "{called:?}");
        }
    }
}

fn case(name: String, run: impl Fn(&Client) + 'static) -> Case {
    Case {
        name,
        gpus: Gpu::USUAL,
        run: Box::new(run),
    }
}

fn with<T>(mut call: T, change: impl FnOnce(&mut T)) -> T {
    change(&mut call);
    call
}

/// Scores and the intervals selected from them.
fn selected(client: &Client, k_len: usize, window: usize) -> Selection {
    let scores = tensor(client, [1, HEADS, k_len], size_of::<f32>());
    let intervals = tensor(client, [1, HEADS, k_len, 2], size_of::<u32>());
    select(client, scores.clone(), window, intervals.clone()).expect("a valid selection");
    Selection {
        scores,
        intervals,
        learning: None,
    }
}
