//! Decode steps and appends: the timed cases and their device buffers.

use crate::tensor::Tensor;
use cubecl::client::Client;
use flash_dma_kernels::internals::{DecodeTuning, decode_tuned};
use flash_dma_kernels::{
    AppendProblem, Cache, CacheShape, DecodeProblem, Engine, Pages, Slots, StepInputs, StepOutputs,
    Tokens, append, append_pages, decode,
};
use flash_dma_problem::{AttentionOptions, ElementType};
use flash_dma_reference::Rng;
use half::bf16;

/// Number of tokens appended to a cache at once; a longer context repeats the same rows with other scores.
const CHUNK: usize = 16 << 10;

/// Tokens per page.
const PAGE: usize = 256;

/// A cache, its tokens, and the timed step.
#[derive(Clone, Copy, Debug)]
pub struct Decoding {
    /// Name in the rows.
    pub name: &'static str,
    pub batch: usize,
    /// Query heads, key/value heads.
    pub heads: [usize; 2],
    pub head_dim: usize,
    /// Number of tokens in the cache before the step.
    pub context: usize,
    /// Slots per kv head; `None` keeps all keys, in pages.
    pub window: Option<usize>,
    /// Tokens of a step.
    pub tokens: usize,
}

/// A layer of a current language model, 8 sequences of it: 32 query and 8 key/value heads of 128.
const fn layer(
    name: &'static str,
    context: usize,
    window: Option<usize>,
    tokens: usize,
) -> Decoding {
    Decoding {
        name,
        batch: 8,
        heads: [32, 8],
        head_dim: 128,
        context,
        window,
        tokens,
    }
}

/// The reference implementation's headline shape: 2 query heads and 1 key/value head of 64.
const fn small(name: &'static str, context: usize, window: Option<usize>) -> Decoding {
    Decoding {
        batch: 1,
        heads: [2, 1],
        head_dim: 64,
        ..layer(name, context, window, 1)
    }
}

/// Every case.
pub const DECODINGS: &[Decoding] = &[
    layer("layer-b8-w2048-c16k", 16 << 10, Some(2048), 1),
    layer("layer-b8-w2048-c64k", 64 << 10, Some(2048), 1),
    layer("layer-b8-w2048-c128k", 128 << 10, Some(2048), 1),
    layer("layer-b8-w2048-c1m", 1 << 20, Some(2048), 1),
    layer("layer-b8-w2048-c128k-m4", 128 << 10, Some(2048), 4),
    layer("layer-b8-w2048-c128k-m16", 128 << 10, Some(2048), 16),
    Decoding {
        batch: 1,
        ..layer("layer-b1-w2048-c128k", 128 << 10, Some(2048), 1)
    },
    small("small-w1024-c512k", 512 << 10, Some(1024)),
    layer("layer-b8-dense-c16k", (16 << 10) - 1, None, 1),
    layer("layer-b8-dense-c128k", (128 << 10) - 1, None, 1),
    layer("layer-b8-dense-c16k-m4", (16 << 10) - 4, None, 4),
    Decoding {
        batch: 1,
        ..layer("layer-b1-dense-c128k", (128 << 10) - 1, None, 1)
    },
    small("small-dense-c16k", (16 << 10) - 1, None),
    small("small-dense-c128k", (128 << 10) - 1, None),
    small("small-dense-c512k", (512 << 10) - 1, None),
];

/// Steps that pages have room for before they are rewound.
const MOST_STEPS: usize = 2048;

/// Normal values in bf16, repeated: drawing all of them would take too long.
fn rows(client: &Client, shape: &[usize], rng: &mut Rng) -> Tensor {
    let some: Vec<bf16> = (0..65_521).map(|_| bf16::from_f64(rng.normal())).collect();
    let values = some.into_iter().cycle().take(shape.iter().product());
    Tensor::of(client, shape, &values.collect::<Vec<_>>())
}

/// Normal scores.
fn scores(client: &Client, shape: &[usize], rng: &mut Rng) -> Tensor {
    Tensor::words(client, shape, |_| (rng.normal() as f32).to_bits())
}

/// The tokens of a call.
#[derive(Debug)]
struct TokenRows {
    k: Tensor,
    v: Tensor,
    scores: Option<Tensor>,
}

impl TokenRows {
    fn new(client: &Client, case: &Decoding, tokens: usize, rng: &mut Rng) -> Self {
        let shape = [case.batch, case.heads[1], tokens, case.head_dim];
        Self {
            k: rows(client, &shape, rng),
            v: rows(client, &shape, rng),
            scores: case.window.map(|_| scores(client, &shape[..3], rng)),
        }
    }

    fn tokens(&self) -> Tokens {
        Tokens {
            k: self.k.binding(),
            v: self.v.binding(),
            scores: self.scores.as_ref().map(Tensor::binding),
        }
    }
}

/// Device buffers of a case in bf16, its cache filled, and the calls on them, which panic if the kernels refuse.
#[derive(Debug)]
pub struct DecodeBuffers {
    case: Decoding,
    /// Sizes of the cache.
    pub shape: CacheShape,
    /// The engine of the steps.
    pub engine: Engine,
    /// The fixed choices of the engine.
    pub tuning: DecodeTuning,
    step: DecodeProblem,
    prefill: AppendProblem,
    /// Tensors of [`Slots`] or [`Pages`]; the last counts the tokens each sequence has received.
    cache: Vec<Tensor>,
    q: Tensor,
    new: TokenRows,
    chunk: TokenRows,
    out: Tensor,
    lse: Tensor,
}

impl DecodeBuffers {
    /// Random tokens, and a cache with the case's context.
    pub fn new(client: &Client, case: Decoding) -> Self {
        let element = ElementType::Bf16;
        let mut rng = Rng::new(5);
        let max_pages = (case.context + MOST_STEPS * case.tokens).div_ceil(PAGE);
        let [batch, kv_heads, dim] = [case.batch, case.heads[1], case.head_dim];
        let shape = match case.window {
            Some(window) => CacheShape::slots(batch, kv_heads, window, dim, element),
            None => {
                let sizes = [max_pages * batch, PAGE, max_pages];
                CacheShape::pages(batch, kv_heads, sizes, dim, element)
            }
        };
        let shape = shape.expect("a valid case");
        let kv = shape.kv_shape();
        let mut cache = vec![Tensor::empty(client, &kv, 2), Tensor::empty(client, &kv, 2)];
        if case.window.is_some() {
            for empty in [f32::NEG_INFINITY.to_bits(), u32::MAX] {
                cache.push(Tensor::words(client, &kv[..3], |_| empty));
            }
        } else {
            // The pages of the sequences are interleaved.
            let page = |n: usize| (n % max_pages * batch + n / max_pages) as u32;
            cache.push(Tensor::words(client, &[batch, max_pages], page));
        }
        cache.push(Tensor::zeros(client, &[batch]));

        let chunk_len = case.context.min(CHUNK);
        let q = [batch, case.heads[0], case.tokens, dim];
        let new = [batch, kv_heads, case.tokens, dim];
        let scores = case.window.map(|_| &new[..3]);
        let options = AttentionOptions {
            keep_window: case.window,
            ..AttentionOptions::new()
        };
        let step = shape
            .decode(&q, &new, &new, scores, element, case.context, &options)
            .expect("a valid case");
        let chunk = [batch, kv_heads, chunk_len, dim];
        let chunk_scores = case.window.map(|_| &chunk[..3]);
        let prefill = shape
            .append(&chunk, &chunk, chunk_scores, element, 0)
            .expect("a valid case");
        let mut buffers = Self {
            case,
            shape,
            engine: Engine::Portable,
            tuning: DecodeTuning::default(),
            step,
            prefill,
            cache,
            q: rows(client, &q, &mut rng),
            new: TokenRows::new(client, &case, case.tokens, &mut rng),
            chunk: TokenRows::new(client, &case, chunk_len, &mut rng),
            out: Tensor::empty(client, &q, 2),
            lse: Tensor::empty(client, &q[..3], 4),
        };
        buffers.engine = decode::plan(client, &step, &buffers.inputs())
            .map_or(Engine::Portable, |plan| plan.engine());
        for _ in 0..case.context / chunk_len {
            if let Some(scores) = &mut buffers.chunk.scores {
                *scores = self::scores(client, &chunk[..3], &mut rng);
            }
            buffers.append(client);
        }
        buffers.set_held(client, case.context);
        buffers
    }

    /// Sets the number of tokens each sequence has received: the same step then writes the same rows again.
    fn set_held(&mut self, client: &Client, held: usize) {
        let last = self.cache.len() - 1;
        self.cache[last] = Tensor::words(client, &[self.case.batch], |_| held as u32);
    }

    fn cache(&self) -> Cache {
        let tensor = |i: usize| self.cache[i].binding();
        match self.case.window {
            Some(_) => Cache::Slots(Slots {
                k: tensor(0),
                v: tensor(1),
                score: tensor(2),
                position: tensor(3),
                seen: tensor(4),
            }),
            None => Cache::Pages(Pages {
                k: tensor(0),
                v: tensor(1),
                scores: None,
                table: tensor(2),
                lengths: tensor(3),
            }),
        }
    }

    /// Appends a chunk of 16K tokens (or the context, if shorter).
    pub fn append(&self, client: &Client) {
        let tokens = self.chunk.tokens();
        match self.cache() {
            Cache::Slots(slots) => append(client, &self.prefill, slots, tokens),
            Cache::Pages(pages) => append_pages(client, &self.prefill, pages, tokens),
        }
        .expect("a valid case");
    }

    /// A decode step. Pages do not grow without bound: call [`rewind`](Self::rewind) before they are full.
    pub fn step(&self, client: &Client) {
        self.step_on(self.engine, self.tuning, client);
    }

    fn inputs(&self) -> StepInputs {
        StepInputs {
            q: self.q.binding(),
            tokens: self.new.tokens(),
        }
    }

    fn step_on(&self, engine: Engine, tuning: DecodeTuning, client: &Client) {
        let outputs = StepOutputs {
            cache: self.cache(),
            out: self.out.binding(),
            lse: self.lse.binding(),
        };
        decode_tuned(engine, tuning, client, &self.step, &self.inputs())
            .and_then(|plan| plan.run(outputs))
            .expect("an engine that serves the case");
    }

    /// Resets the pages to hold only the context.
    pub fn rewind(&mut self, client: &Client) {
        if self.case.window.is_none() {
            self.set_held(client, self.case.context);
        }
    }

    /// Compares the engine with the portable one. With slots, the step's tokens have scores of −∞, because other
    /// tokens would change the cache between the two runs. (The tests cover new tokens.) Panics if they differ by
    /// more than two roundings of an output.
    pub fn check(&mut self, client: &Client) {
        self.rewind(client);
        let scores = self.new.scores.take();
        self.new.scores = (scores.as_ref())
            .map(|z| Tensor::words(client, z.shape(), |_| f32::NEG_INFINITY.to_bits()));
        self.step(client);
        let got = self.out.read_as(client, ElementType::Bf16);
        self.rewind(client);
        self.step_on(Engine::Portable, DecodeTuning::default(), client);
        let want = self.out.read_as(client, ElementType::Bf16);
        self.rewind(client);
        self.new.scores = scores;
        let scale = want.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        for (i, (g, w)) in got.iter().zip(&want).enumerate() {
            assert!(
                (g - w).abs() <= 0.016 * scale,
                "{}: element {i} is {g}, and {w} on the portable engine",
                self.case.name
            );
        }
    }

    /// Bytes of a step.
    pub fn step_bytes(&self) -> u64 {
        self.step.bytes(self.keys()) as u64
    }

    /// Bytes of an append: the scores, the rows that stay, and their destinations; at most the rows of the window.
    pub fn append_bytes(&self) -> u64 {
        let p = &self.prefill;
        let heads = p.cache.batch * p.cache.kv_heads;
        let rows = p.tokens.min(p.cache.capacity());
        let scores = 4 * p.tokens * usize::from(p.cache.has_scores());
        (heads * (scores + 2 * rows * 2 * p.cache.head_dim * 2)) as u64
    }

    /// Number of keys that a kv head holds.
    pub fn keys(&self) -> usize {
        let Decoding {
            window, context, ..
        } = self.case;
        window.map_or(context, |window| window.min(context))
    }
}
