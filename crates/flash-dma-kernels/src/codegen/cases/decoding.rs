//! Appending to caches and decode steps.

use crate::codegen::cases::{Case, HEADS, case, with};
use crate::codegen::cuda::Gpu;
use crate::codegen::tensors::{self, tensor};
use crate::decode::append::{append, append_pages};
use crate::decode::args::{Cache, ChunkOutputs};
use crate::decode::chunk::chunk_keys;
use crate::decode::plan_on;
use crate::host::engine::Engine;
use crate::{AttentionOptions, CacheShape, ElementType, ScoreRole, SelectionRule};
use cubecl::client::Client;

/// Slots per head, and tokens per page.
const WINDOW: usize = 2048;
const PAGE: usize = 256;

pub(crate) fn all() -> Vec<Case> {
    use ElementType::{Bf16, F16, F32};
    let call = |element, head_dim, paged| Decoding::new(element, head_dim, paged);
    let (slots, pages) = (call(Bf16, 128, false), call(Bf16, 128, true));
    let calls = [
        call(Bf16, 32, false),
        call(Bf16, 64, false),
        call(Bf16, 64, true),
        call(Bf16, 96, false),
        slots,
        pages,
        call(Bf16, 256, false),
        call(F16, 128, false),
        call(F32, 128, false),
        call(F32, 128, true),
    ];
    let options = AttentionOptions::new().with_softcap(30.0);
    let of_one = |call: Decoding| with(call, |c| c.steps = &[1]);
    let capped = with(of_one(slots), |c| (c.appends, c.options) = (false, options));
    let scored = with(of_one(pages), |c| c.scored = true);
    // The rule is a runtime argument, but the rank of a chunk's keys is computed by another kernel.
    let sinks = with(of_one(slots), |c| (c.recent, c.sinks) = (128, 4));
    let ranks = with(slots, |c| (c.appends, c.role) = (false, ScoreRole::Rank));
    // Pages that exceed 32-bit indices.
    let huge = with(of_one(pages), |c| c.pages = 1 << 16);
    let mut cases = Vec::new();
    for call in calls {
        let name = format!("decode-{}-d{}-{}", call.element, call.head_dim, call.kind());
        cases.push(call.case(name));
    }
    for (name, call) in [
        ("softcap", capped),
        ("scored", scored),
        ("sinks", sinks),
        ("ranks", ranks),
        ("64bit", huge),
    ] {
        cases.push(call.case(format!("decode-bf16-d128-{name}")));
    }
    // On `mma`, on each kind of device.
    for (head_dim, paged) in [(64, false), (128, false), (128, true), (256, false)] {
        let on_mma = with(of_one(call(Bf16, head_dim, paged)), |c| {
            (c.appends, c.engines) = (false, &[Engine::Mma]);
        });
        let name = format!("decode-mma-d{head_dim}-{}", on_mma.kind());
        cases.push(with(on_mma.case(name), |case| case.gpus = &Gpu::ALL));
    }
    cases
}

#[derive(Clone, Copy)]
struct Decoding {
    element: ElementType,
    head_dim: usize,
    paged: bool,
    scored: bool,
    pages: usize,
    /// Recent keys and sinks, of slots.
    recent: usize,
    sinks: usize,
    role: ScoreRole,
    /// True if there is a prefill first.
    appends: bool,
    /// Tokens of each step.
    steps: &'static [usize],
    options: AttentionOptions,
    /// Engines to launch, if they support the problem; the portable one supports all.
    engines: &'static [Engine],
}

impl Decoding {
    fn new(element: ElementType, head_dim: usize, paged: bool) -> Self {
        Self {
            element,
            head_dim,
            paged,
            scored: false,
            pages: 1024,
            recent: 0,
            sinks: 0,
            role: ScoreRole::default(),
            appends: true,
            steps: &[1, 16],
            options: AttentionOptions::new(),
            engines: &[Engine::Portable, Engine::Mma],
        }
    }

    fn case(self, name: String) -> Case {
        case(name, move |client| {
            if self.appends {
                self.append(client);
            }
            self.steps
                .iter()
                .for_each(|&tokens| self.step(client, tokens));
        })
    }

    fn kind(&self) -> &'static str {
        if self.paged { "pages" } else { "slots" }
    }

    fn shape(&self) -> CacheShape {
        let (element, head_dim) = (self.element, self.head_dim);
        if self.paged {
            let sizes = [self.pages, PAGE, self.pages];
            let shape = CacheShape::pages(1, HEADS, sizes, head_dim, element);
            match self.scored {
                true => shape.map(CacheShape::with_scores),
                false => shape,
            }
        } else {
            let rule = SelectionRule {
                window: WINDOW,
                recent: self.recent,
                sinks: self.sinks,
            };
            CacheShape::slots(1, HEADS, rule, head_dim, element)
                .map(|shape| shape.with_score_role(self.role))
        }
        .expect("a valid cache")
    }

    fn append(&self, client: &Client) {
        const LEN: usize = 4096;
        let (shape, new) = (self.shape(), [1, HEADS, LEN, self.head_dim]);
        let scores = shape.has_scores().then_some(&new[..3]);
        let problem = shape.append(&new, &new, scores, self.element, 0);
        let problem = problem.expect("a valid append");
        let tokens = tensors::tokens(client, &shape, LEN);
        match tensors::cache(client, &shape) {
            Cache::Pages(pages) => append_pages(client, &problem, pages, tokens),
            Cache::Slots(slots) => {
                let all = [1, HEADS, WINDOW + LEN, self.head_dim];
                let rows = || tensor(client, all, self.element.size());
                let words = || tensor(client, [1, HEADS, WINDOW + LEN], 4);
                let keys = ChunkOutputs {
                    k: rows(),
                    v: rows(),
                    scores: words(),
                    rank: shape.has_sinks().then(words),
                };
                let (given, cached) = (tokens.clone(), slots.clone());
                chunk_keys(client, &problem, cached, given, keys).expect("a valid chunk");
                append(client, &problem, slots, tokens)
            }
        }
        .expect("a valid append");
    }

    fn step(&self, client: &Client, tokens: usize) {
        let q = [1, 4 * HEADS, tokens, self.head_dim];
        let new = [1, HEADS, tokens, self.head_dim];
        let shape = self.shape();
        let scores = shape.has_scores().then_some(&new[..3]);
        let options = AttentionOptions {
            keep_window: (!self.paged).then_some(WINDOW),
            ..self.options
        };
        let problem = shape.decode(&q, &new, &new, scores, self.element, 0, &options);
        let problem = problem.expect("a valid step");
        for &engine in self.engines {
            let (inputs, outputs) = tensors::step(client, &problem);
            let plan = plan_on(engine, client, &problem, &inputs);
            let result = plan.and_then(|plan| plan.run(outputs));
            // The tensor cores do not support f32.
            let served = result.is_ok() || engine == Engine::Mma;
            assert!(served, "{result:?} of {problem:?}");
        }
    }
}
