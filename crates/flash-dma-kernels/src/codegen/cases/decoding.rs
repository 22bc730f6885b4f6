//! Appending to caches and decode steps.

use crate::codegen::cases::{Case, HEADS, case, tensor};
use crate::codegen::cuda::Gpu;
use crate::decode::append::{append, append_pages};
use crate::decode::args::{Cache, ChunkOutputs, Pages, Slots, StepInputs, StepOutputs, Tokens};
use crate::decode::chunk::chunk_keys;
use crate::decode::plan_on;
use crate::host::engine::Engine;
use crate::{AttentionOptions, CacheShape, ElementType, ScoreRole, SelectionRule, Storage};
use cubecl::client::Client;
use cubecl::prelude::TensorBinding;

/// Slots per head, and tokens per page.
const WINDOW: usize = 2048;
const PAGE: usize = 256;

pub(crate) fn all() -> Vec<Case> {
    use ElementType::{Bf16, F16, F32};
    let mut cases = Vec::new();
    for (element, head_dim, paged) in [
        (Bf16, 32, false),
        (Bf16, 64, false),
        (Bf16, 64, true),
        (Bf16, 96, false),
        (Bf16, 128, false),
        (Bf16, 128, true),
        (Bf16, 256, false),
        (F16, 128, false),
        (F32, 128, false),
        (F32, 128, true),
    ] {
        let kind = if paged { "pages" } else { "slots" };
        let name = format!("decode-{element}-d{head_dim}-{kind}");
        cases.push(case(name, move |client| {
            let call = Decoding::new(element, head_dim, paged);
            call.append(client);
            call.step(client, 1, AttentionOptions::new());
            call.step(client, 16, AttentionOptions::new());
        }));
    }
    cases.push(case("decode-bf16-d128-softcap".into(), |client| {
        let call = Decoding::new(Bf16, 128, false);
        call.step(client, 1, AttentionOptions::new().with_softcap(30.0));
    }));
    cases.push(case("decode-bf16-d128-scored".into(), |client| {
        let mut call = Decoding::new(Bf16, 128, true);
        call.scored = true;
        call.append(client);
        call.step(client, 1, AttentionOptions::new());
    }));
    // The rule is in numbers, but the rank of a chunk's keys is another kernel's.
    cases.push(case("decode-bf16-d128-sinks".into(), |client| {
        let mut call = Decoding::new(Bf16, 128, false);
        (call.recent, call.sinks) = (128, 4);
        call.append(client);
        call.step(client, 1, AttentionOptions::new());
    }));
    cases.push(case("decode-bf16-d128-ranks".into(), |client| {
        let mut call = Decoding::new(Bf16, 128, false);
        call.role = ScoreRole::Rank;
        call.step(client, 1, AttentionOptions::new());
        call.step(client, 16, AttentionOptions::new());
    }));
    // Pages that exceed 32-bit indices.
    cases.push(case("decode-bf16-d128-64bit".into(), |client| {
        let mut call = Decoding::new(Bf16, 128, true);
        call.pages = 1 << 16;
        call.append(client);
        call.step(client, 1, AttentionOptions::new());
    }));
    cases.extend(on_mma());
    cases
}

/// Steps on `mma`, on each kind of device.
fn on_mma() -> impl Iterator<Item = Case> {
    [(64, false), (128, false), (128, true), (256, false)]
        .map(|(head_dim, paged)| {
            let kind = if paged { "pages" } else { "slots" };
            let name = format!("decode-mma-d{head_dim}-{kind}");
            let mut call = Decoding::new(ElementType::Bf16, head_dim, paged);
            call.engines = &[Engine::Mma];
            Case {
                gpus: &Gpu::ALL,
                ..case(name, move |client| {
                    call.step(client, 1, AttentionOptions::new());
                })
            }
        })
        .into_iter()
}

#[derive(Clone, Copy)]
struct Decoding {
    element: ElementType,
    head_dim: usize,
    paged: bool,
    /// Pages with scores.
    scored: bool,
    pages: usize,
    /// Recent keys and sinks, of slots.
    recent: usize,
    sinks: usize,
    /// What the scores of slots are for.
    role: ScoreRole,
    /// Those to launch, if they support the problem; the portable one supports all.
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
            engines: &[Engine::Portable, Engine::Mma],
        }
    }

    fn shape(&self) -> CacheShape {
        let (element, head_dim) = (self.element, self.head_dim);
        if self.paged {
            let sizes = [self.pages, PAGE, self.pages];
            let shape = CacheShape::pages(1, HEADS, sizes, head_dim, element);
            shape.map(|shape| {
                if self.scored {
                    shape.with_scores()
                } else {
                    shape
                }
            })
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

    fn cache(&self, client: &Client) -> Cache {
        let shape = self.shape();
        let kv = shape.kv_shape();
        let rows = || tensor(client, kv, self.element.size());
        let words = || tensor(client, [1, HEADS, WINDOW], 4);
        match shape.storage {
            Storage::Pages { max_pages, .. } => Cache::Pages(Pages {
                k: rows(),
                v: rows(),
                scores: shape
                    .has_scores()
                    .then(|| tensor(client, [kv[0], kv[1], kv[2]], 4)),
                table: tensor(client, [1, max_pages], 4),
                lengths: tensor(client, [1], 4),
            }),
            _ => Cache::Slots(Slots {
                k: rows(),
                v: rows(),
                score: words(),
                position: words(),
                seen: tensor(client, [1], 4),
            }),
        }
    }

    fn tokens(&self, client: &Client, tokens: usize) -> Tokens {
        let new = [1, HEADS, tokens, self.head_dim];
        let rows = || tensor(client, new, self.element.size());
        Tokens {
            k: rows(),
            v: rows(),
            scores: (self.shape().has_scores()).then(|| tensor(client, [1, HEADS, tokens], 4)),
        }
    }

    /// A prefill.
    fn append(&self, client: &Client) {
        const LEN: usize = 4096;
        let (shape, new) = (self.shape(), [1, HEADS, LEN, self.head_dim]);
        let scores = shape.has_scores().then_some(&new[..3]);
        let problem = shape
            .append(&new, &new, scores, self.element, 0)
            .expect("a valid append");
        let tokens = self.tokens(client, LEN);
        match self.cache(client) {
            Cache::Pages(pages) => append_pages(client, &problem, pages, tokens),
            Cache::Slots(slots) => {
                let all = [1, HEADS, WINDOW + LEN, self.head_dim];
                let rows = || -> TensorBinding { tensor(client, all, self.element.size()) };
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

    fn step(&self, client: &Client, tokens: usize, options: AttentionOptions) {
        let q = [1, 4 * HEADS, tokens, self.head_dim];
        let new = [1, HEADS, tokens, self.head_dim];
        let shape = self.shape();
        let scores = shape.has_scores().then_some(&new[..3]);
        let options = AttentionOptions {
            keep_window: (!self.paged).then_some(WINDOW),
            ..options
        };
        let problem = shape
            .decode(&q, &new, &new, scores, self.element, 0, &options)
            .expect("a valid step");
        for &engine in self.engines {
            let rows = || tensor(client, q, self.element.size());
            let inputs = StepInputs {
                q: rows(),
                tokens: self.tokens(client, tokens),
            };
            let outputs = StepOutputs {
                cache: self.cache(client),
                out: rows(),
                lse: tensor(client, problem.lse_shape(), 4),
            };
            let result =
                plan_on(engine, client, &problem, &inputs).and_then(|plan| plan.run(outputs));
            // The tensor cores do not support f32.
            assert!(
                result.is_ok() || engine == Engine::Mma,
                "{result:?} of {problem:?}"
            );
        }
    }
}
