//! Sequences that the kernels decode, and their comparison with one pass over the whole sequence.

use crate::engines::kernels::{planned, ran};
use crate::engines::{Kernels, Pass, Target};
use crate::{Layout, Raw};
use cubecl::prelude::TensorBinding;
use flash_dma_kernels::internals::{DecodeTuning, decode_tuned};
use flash_dma_kernels::{
    Cache, CacheShape, ChunkOutputs, Engine, Outputs, Pages, SelectionRule, Slots, StepInputs,
    StepOutputs, Tokens, append, append_pages, chunk_keys, decode, forward, select,
};
use flash_dma_problem::{AttentionError, AttentionOptions, ElementType, Problem};
use flash_dma_reference::compare::{OUTPUT, compare, compare_lse};
use flash_dma_reference::generate::{Scores, inputs};
use flash_dma_reference::{Inputs, compose::attended};

const F32: ElementType = ElementType::F32;

/// Sequences of random tokens, and the pieces in which a cache gets them. The default is 2 sequences with 4 query
/// heads over 2 kv heads of 64 elements and normal scores, f32, one token at a time from an empty cache.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// Sequences.
    pub batch: usize,
    /// Query heads, key/value heads.
    pub heads: [usize; 2],
    /// Tokens.
    pub len: usize,
    /// Elements per row.
    pub head_dim: usize,
    /// Element type.
    pub element: ElementType,
    /// The keys that a kv head has slots for; `None` is a cache of pages.
    pub rule: Option<SelectionRule>,
    /// Whether pages have scores.
    pub biased: bool,
    /// Tokens per page.
    pub page_len: usize,
    /// The kind of scores.
    pub scores: Scores,
    /// Scale and softcap.
    pub options: AttentionOptions,
    /// The layout of the new tokens in memory.
    pub layout: Layout,
    /// Tokens that are appended before the first step.
    pub prefill: usize,
    /// Tokens of the steps, cycled through.
    pub pieces: Vec<usize>,
    /// One in this many steps is compared; the last always is.
    pub every: usize,
    /// The fixed choices of the kernel.
    pub tuning: DecodeTuning,
    /// The seed of the random numbers.
    pub seed: u64,
}

impl Sequence {
    /// The default with as many tokens and slots as given.
    #[must_use]
    pub fn new(len: usize, window: Option<usize>) -> Self {
        Self {
            batch: 2,
            heads: [4, 2],
            len,
            head_dim: 64,
            element: F32,
            rule: window.map(SelectionRule::top),
            biased: false,
            page_len: 32,
            scores: Scores::Normal,
            options: AttentionOptions::new(),
            layout: Layout::Contiguous,
            prefill: 0,
            pieces: vec![1],
            every: 1,
            tuning: DecodeTuning::default(),
            seed: 1,
        }
    }

    fn scored(&self) -> bool {
        self.rule.is_some() || self.biased
    }

    fn options(&self) -> AttentionOptions {
        AttentionOptions {
            keep_window: self.rule.map(|rule| rule.window),
            ..self.options
        }
    }

    /// The inputs of the whole decoding.
    ///
    /// # Panics
    ///
    /// If the sizes are not those of a problem.
    #[must_use]
    pub fn inputs(&self) -> Inputs {
        let q = [self.batch, self.heads[0], self.len, self.head_dim];
        let k = [self.batch, self.heads[1], self.len, self.head_dim];
        let scores = self.scored().then_some(&k[..3]);
        let problem = Problem::new(&q, &k, &k, scores, self.element, &self.options());
        inputs(problem.expect("a good case"), self.scores, 1.0, self.seed)
    }

    /// Decodes the sequences and compares with the oracle: steps with the last rows of one pass, live sets with its
    /// selection.
    ///
    /// # Panics
    ///
    /// If something differs.
    pub fn check<T: Target>(&self, kernels: &Kernels<T>) {
        self.check_inputs(kernels, &self.inputs());
    }

    /// [`check`](Self::check) of given inputs.
    ///
    /// # Panics
    ///
    /// If something differs.
    pub fn check_inputs<T: Target>(&self, kernels: &Kernels<T>, all: &Inputs) {
        let mut cache = Held::new(kernels, self);
        if self.prefill > 0 {
            cache.append(all, self.prefill);
            cache.check_live(all);
        }
        let mut steps = 0;
        for &piece in self.pieces.iter().cycle() {
            let to = (cache.held + piece).min(self.len);
            let from = cache.held;
            let (out, lse) = cache.step(all, to);
            steps += 1;
            if steps % self.every == 0 || to == self.len {
                self.compare(all, from, to, (&out, &lse));
                cache.check_live(all);
            }
            if to == self.len {
                return;
            }
        }
    }

    fn compare(&self, all: &Inputs, from: usize, to: usize, (out, lse): (&[f64], &[f64])) {
        let p = &all.problem;
        let q = [p.batch, p.q_heads, to - from, p.head_dim];
        let k = [p.batch, p.kv_heads, to, p.head_dim];
        let (rows, dim) = (p.batch * p.kv_heads, p.head_dim);
        let scores = self.scored().then_some(&k[..3]);
        let problem = Problem::new(&q, &k, &k, scores, p.element, &self.options());
        let prefix = Inputs {
            problem: problem.expect("a good case"),
            q: self.tokens(&all.q, p.batch * p.q_heads, dim, from, to),
            k: self.tokens(&all.k, rows, dim, 0, to),
            v: self.tokens(&all.v, rows, dim, 0, to),
            scores: (all.scores.as_ref()).map(|z| self.tokens(z, rows, 1, 0, to)),
        };
        let (exact, naive) = match &self.rule {
            Some(rule) => (prefix.forward_by(rule), prefix.naive_forward_by(rule)),
            None => (prefix.forward(), prefix.naive_forward()),
        };
        let context = || format!("tokens {from}..{to} of {self:?}");
        compare("out", &q, out, &exact.out, &naive.out, p.element, OUTPUT)
            .unwrap_or_else(|failure| panic!("{failure}\n{}", context()));
        compare_lse(&q[..3], lse, &exact.lse)
            .unwrap_or_else(|failure| panic!("{failure}\n{}", context()));
    }

    /// The tokens `from..to` of `[rows, len, width]`.
    fn tokens(
        &self,
        values: &[f64],
        rows: usize,
        width: usize,
        from: usize,
        to: usize,
    ) -> Vec<f64> {
        let row = |r: usize| {
            let first = r * self.len;
            &values[(first + from) * width..(first + to) * width]
        };
        (0..rows).flat_map(row).copied().collect()
    }
}

/// A cache on the device and the number of tokens that it has been given.
pub struct Held<'a, T> {
    kernels: &'a Kernels<T>,
    sequence: &'a Sequence,
    shape: CacheShape,
    cache: Cache,
    /// Tokens of each sequence so far.
    pub held: usize,
}

impl<'a, T: Target> Held<'a, T> {
    /// An empty cache, with rows of NaN.
    ///
    /// # Panics
    ///
    /// If the sizes are not those of a cache.
    #[must_use]
    pub fn new(kernels: &'a Kernels<T>, sequence: &'a Sequence) -> Self {
        let (batch, heads, dim) = (sequence.batch, sequence.heads[1], sequence.head_dim);
        let max_pages = sequence.len.div_ceil(sequence.page_len);
        let pages = max_pages * batch + 1;
        let shape = match sequence.rule {
            Some(rule) => CacheShape::slots(batch, heads, rule, dim, sequence.element),
            None => {
                let sizes = [pages, sequence.page_len, max_pages];
                CacheShape::pages(batch, heads, sizes, dim, sequence.element)
            }
        };
        let mut shape = shape.expect("a good case");
        if sequence.biased {
            shape = shape.with_scores();
        }
        let kv = shape.kv_shape();
        let filled = |shape: &[usize], value: f64, element| {
            let values = vec![value; shape.iter().product()];
            kernels.upload(&Raw::new(&values, shape, element, Layout::Contiguous))
        };
        let rows = || filled(&kv, f64::NAN, sequence.element);
        let words = |shape: &[usize], values: Vec<i32>| kernels.words(shape, &values);
        let cache = if sequence.rule.is_some() {
            Cache::Slots(Slots {
                k: rows(),
                v: rows(),
                score: filled(&kv[..3], f64::NEG_INFINITY, F32),
                position: words(&kv[..3], vec![-1; kv[0] * kv[1] * kv[2]]),
                seen: words(&[batch], vec![0; batch]),
            })
        } else {
            // Alternating, from the last page on.
            let page = |n: usize| (pages - 1 - n % max_pages * batch - n / max_pages) as i32;
            Cache::Pages(Pages {
                k: rows(),
                v: rows(),
                scores: sequence.biased.then(|| filled(&kv[..3], f64::NAN, F32)),
                table: words(
                    &[batch, max_pages],
                    (0..batch * max_pages).map(page).collect(),
                ),
                lengths: words(&[batch], vec![0; batch]),
            })
        };
        Self {
            kernels,
            sequence,
            shape,
            cache,
            held: 0,
        }
    }

    /// The tokens from those that are held up to `to`, and the shape of their rows.
    fn tokens(&self, all: &Inputs, to: usize) -> (Tokens, [usize; 4]) {
        let s = self.sequence;
        let new = [s.batch, s.heads[1], to - self.held, s.head_dim];
        let part =
            |values: &[f64], width| s.tokens(values, s.batch * s.heads[1], width, self.held, to);
        let upload = |values: &[f64], shape: &[usize], element, layout| {
            self.kernels
                .upload(&Raw::new(values, shape, element, layout))
        };
        let tokens = Tokens {
            k: upload(&part(&all.k, s.head_dim), &new, s.element, s.layout),
            v: upload(&part(&all.v, s.head_dim), &new, s.element, s.layout),
            scores: (all.scores.as_ref())
                .map(|z| upload(&part(z, 1), &new[..3], F32, Layout::Contiguous)),
        };
        (tokens, new)
    }

    /// Appends the tokens up to `to`.
    ///
    /// # Panics
    ///
    /// If the kernels refuse.
    pub fn append(&mut self, all: &Inputs, to: usize) {
        let (tokens, new) = self.tokens(all, to);
        let scores = self.shape.has_scores().then_some(&new[..3]);
        let problem = self
            .shape
            .append(&new, &new, scores, self.sequence.element, self.held)
            .expect("a good case");
        let client = &self.kernels.client;
        match self.cache.clone() {
            Cache::Slots(slots) => append(client, &problem, slots, tokens),
            Cache::Pages(pages) => append_pages(client, &problem, pages, tokens),
        }
        .expect("a good case");
        self.held = to;
    }

    /// A decode step of the tokens up to `to`: its output and LSE.
    ///
    /// # Panics
    ///
    /// If the kernels refuse.
    pub fn step(&mut self, all: &Inputs, to: usize) -> (Vec<f64>, Vec<f64>) {
        let s = self.sequence;
        let (tokens, new) = self.tokens(all, to);
        let q = [s.batch, s.heads[0], to - self.held, s.head_dim];
        let query = s.tokens(&all.q, s.batch * s.heads[0], s.head_dim, self.held, to);
        let query = self
            .kernels
            .upload(&Raw::new(&query, &q, s.element, s.layout));
        let scores = self.shape.has_scores().then_some(&new[..3]);
        let (held, options) = (self.held, s.options());
        let problem = self
            .shape
            .decode(&q, &new, &new, scores, s.element, held, &options)
            .expect("a good case");
        let client = &self.kernels.client;
        let out = self.kernels.output(&q, s.element, 0);
        let lse = self.kernels.output(&q[..3], F32, 0);
        let inputs = StepInputs { q: query, tokens };
        let choice = planned(&decode::plan(client, &problem, &inputs));
        let engine = match T::ENGINE {
            Some(forced) if choice != Engine::Portable => forced,
            _ => choice,
        };
        ran(Pass::Decode, engine);
        let outputs = StepOutputs {
            cache: self.cache.clone(),
            out: out.binding(),
            lse: lse.binding(),
        };
        let plan = decode_tuned(engine, s.tuning, client, &problem, &inputs);
        match plan.and_then(|plan| plan.run(outputs)) {
            Ok(()) => {}
            // Sizes of the tensor-core kernel that this device or these pages do not support.
            Err(AttentionError::Unsupported { what }) => panic!("unsupported: {what} for {s:?}"),
            Err(error) => panic!("{error} for {s:?}"),
        }
        self.held = to;
        (self.kernels.read(&out), self.kernels.read(&lse))
    }

    /// The chunk of tokens up to `to` over the slots and itself, by the forward pass over [`chunk_keys`]; which is then
    /// appended.
    ///
    /// # Panics
    ///
    /// If the kernels refuse, or the cache has pages.
    pub fn chunk(&mut self, all: &Inputs, to: usize) -> (Vec<f64>, Vec<f64>) {
        let s = self.sequence;
        let rule = s.rule.expect("slots");
        let (tokens, new) = self.tokens(all, to);
        let Cache::Slots(slots) = self.cache.clone() else {
            panic!("slots");
        };
        let (client, kernels) = (&self.kernels.client, self.kernels);
        let keys = [s.batch, s.heads[1], rule.window + new[2], s.head_dim];
        let [k, v] = [(); 2].map(|()| kernels.output(&keys, s.element, 0));
        let [z, rank] = [(); 2].map(|()| kernels.output(&keys[..3], F32, 0));
        let problem = self
            .shape
            .append(&new, &new, Some(&new[..3]), s.element, self.held)
            .expect("a good case");
        let target = ChunkOutputs {
            k: k.binding(),
            v: v.binding(),
            scores: z.binding(),
            rank: (rule.sinks > 0).then(|| rank.binding()),
        };
        chunk_keys(client, &problem, slots, tokens, target).expect("a good case");
        let rank = if rule.sinks > 0 { &rank } else { &z };

        let q = [s.batch, s.heads[0], new[2], s.head_dim];
        let options = s.options();
        let attention =
            Problem::new(&q, &keys, &keys, Some(&keys[..3]), s.element, &options).expect("good");
        let intervals = self.chunk_intervals(rank.binding(), rule, attention.intervals_shape());
        let query = s.tokens(&all.q, s.batch * s.heads[0], s.head_dim, self.held, to);
        let given = flash_dma_kernels::Inputs {
            q: kernels.upload(&Raw::new(&query, &q, s.element, s.layout)),
            k: k.binding(),
            v: v.binding(),
            selection: Some(flash_dma_kernels::Selection {
                scores: z.binding(),
                intervals,
                far: None,
            }),
        };
        let out = kernels.output(&q, s.element, 0);
        let lse = kernels.output(&q[..3], F32, 0);
        let plan = forward::plan(client, &attention, &given);
        ran(Pass::Decode, planned(&plan));
        let outputs = Outputs::new(out.binding(), lse.binding());
        plan.and_then(|plan| plan.run(outputs))
            .expect("a good case");
        self.append(all, to);
        (kernels.read(&out), kernels.read(&lse))
    }

    /// The intervals of the keys of a chunk.
    fn chunk_intervals(
        &self,
        rank: TensorBinding,
        rule: SelectionRule,
        shape: [usize; 4],
    ) -> TensorBinding {
        let nothing = vec![0; shape.iter().product()];
        let intervals = self.kernels.words(&shape, &nothing);
        let (client, to) = (&self.kernels.client, intervals.clone());
        select(client, rank, rule.kept(), to).expect("a good case");
        intervals
    }

    /// The positions of the keys that the last token attends to, ascending, of each sequence and head; nothing with
    /// pages.
    #[must_use]
    pub fn live(&self) -> Option<Vec<Vec<usize>>> {
        let (Cache::Slots(slots), Some(rule)) = (&self.cache, self.sequence.rule) else {
            return None;
        };
        let hidden = f32::NEG_INFINITY.to_bits() as i32;
        let (position, score) = (
            self.read_words(&slots.position),
            self.read_words(&slots.score),
        );
        let rows = position.chunks(rule.window).zip(score.chunks(rule.window));
        let row = |(position, score): (&[i32], &[i32])| {
            let shown = position
                .iter()
                .zip(score)
                .filter(|&(_, &score)| score != hidden);
            let mut live: Vec<usize> = shown.map(|(&x, _)| x as usize).collect();
            live.sort_unstable();
            live
        };
        Some(rows.map(row).collect())
    }

    /// Compares the live sets with the oracle's selection; nothing with pages.
    ///
    /// # Panics
    ///
    /// If they differ.
    pub fn check_live(&self, all: &Inputs) {
        let (Cache::Slots(slots), Some(live)) = (&self.cache, self.live()) else {
            return;
        };
        let sequence = self.sequence;
        let scores = all.scores.as_ref().expect("slots have scores");
        for (row, live) in live.iter().enumerate() {
            let head = &scores[row * sequence.len..row * sequence.len + self.held];
            let rule = sequence.rule.expect("slots");
            let want = attended(head, &rule, self.held - 1);
            let held = self.held;
            assert!(*live == want, "row {row} after {held} of {sequence:?}");
        }
        let seen = self.read_words(&slots.seen);
        assert!(seen.iter().all(|&n| n as usize == self.held));
    }

    fn read_words(&self, tensor: &TensorBinding) -> Vec<i32> {
        let bytes = self.kernels.read_bytes(tensor);
        let words = bytes.chunks_exact(4);
        words.map(bytemuck::pod_read_unaligned).collect()
    }

    /// The output of a chunk against the oracle.
    ///
    /// # Panics
    ///
    /// If it differs.
    pub fn compare(&self, all: &Inputs, from: usize, result: &(Vec<f64>, Vec<f64>)) {
        self.sequence
            .compare(all, from, self.held, (&result.0, &result.1));
    }
}
