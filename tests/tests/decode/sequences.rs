//! Sequences that grow token by token on the host, and the oracle's results for their last tokens.

use burn::tensor::{Device, Tensor};
use burn_flash_dma::cache::{AttentionCache, DynamicMaskCacheConfig, PagedCacheConfig};
use flash_dma_reference::compose::attended;
use flash_dma_reference::generate::normal;
use flash_dma_tests::decoding::check_rows;
use flash_dma_tests::prelude::*;
use flash_dma_tests::tensors::{dtype, floats, load, values};

/// The heads and the type of all sequences.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub q_heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub element: ElementType,
}

/// Two groups of two query heads, of a size that compiles and runs fast.
pub const fn shape(element: ElementType) -> Shape {
    Shape {
        q_heads: 4,
        kv_heads: 2,
        dim: 16,
        element,
    }
}

/// Everything that one sequence has been given, by head.
#[derive(Clone, Debug, Default)]
struct History {
    k: Vec<Vec<f64>>,
    v: Vec<Vec<f64>>,
    scores: Vec<Vec<f64>>,
}

impl History {
    fn take_back(&mut self, count: usize, dim: usize) {
        let heads = |all: &mut Vec<Vec<f64>>, width| {
            for head in all {
                head.truncate(head.len() - count * width);
            }
        };
        heads(&mut self.k, dim);
        heads(&mut self.v, dim);
        heads(&mut self.scores, 1);
    }
}

/// Sequences with the tokens they have been given.
pub struct Sequences {
    pub shape: Shape,
    /// The keys that a query keeps; `None` keeps all.
    rule: Option<SelectionRule>,
    /// How many of the last keys a query attends to, if no rule selects any; `None` is all.
    last: Option<usize>,
    scored: bool,
    role: ScoreRole,
    options: AttentionOptions,
    /// `[sequence][head]`: scores still to come, the next one last.
    coming: Vec<Vec<Vec<f64>>>,
    kind: Scores,
    histories: Vec<History>,
    rng: Rng,
}

/// New tokens of every sequence, on a device.
#[derive(Clone)]
pub struct Tokens {
    pub q: Tensor<4>,
    pub k: Tensor<4>,
    pub v: Tensor<4>,
    pub scores: Option<Tensor<3>>,
    /// The queries on the host, `[sequence, q_heads, tokens, dim]`.
    host_q: Vec<f64>,
    count: usize,
}

impl Sequences {
    /// `kind` is the kind of scores; without it there are none.
    pub fn new(
        shape: Shape,
        batch: usize,
        kind: Option<Scores>,
        options: AttentionOptions,
        seed: u64,
    ) -> Self {
        let mut sequences = Self {
            shape,
            rule: options.keep_window.map(SelectionRule::top),
            last: None,
            scored: kind.is_some(),
            role: ScoreRole::default(),
            options,
            coming: Vec::new(),
            kind: kind.unwrap_or(Scores::Normal),
            histories: Vec::new(),
            rng: Rng::new(seed),
        };
        sequences.histories = vec![sequences.empty(); batch];
        sequences
    }

    /// Sets a rule with the same window.
    pub fn under(mut self, rule: SelectionRule) -> Self {
        assert_eq!(self.options.keep_window, Some(rule.window));
        self.rule = Some(rule);
        self
    }

    /// Sets the role of the scores.
    pub fn with_role(mut self, role: ScoreRole) -> Self {
        self.role = role;
        self
    }

    /// Limits a query to the last keys.
    pub fn of_last(mut self, keys: Option<usize>) -> Self {
        self.last = keys;
        self
    }

    /// An empty cache of slots for them.
    pub fn in_slots<B: Backend>(self, burn: &Burn<B>) -> Decoder {
        let (shape, rule) = (self.shape, self.rule.expect("slots"));
        let config =
            DynamicMaskCacheConfig::new(self.batch(), shape.kv_heads, shape.dim, self.options)
                .with_recent(Some(rule.recent))
                .with_sinks(Some(rule.sinks))
                .with_score_role(Some(self.role))
                .with_dtype(dtype(shape.element).into());
        Decoder::new(self, config.init(burn.device()))
    }

    /// An empty cache of so many pages for them, which grows.
    pub fn in_pages<B: Backend>(
        self,
        burn: &Burn<B>,
        max_len: usize,
        page_len: usize,
        pages: usize,
    ) -> Decoder {
        let shape = self.shape;
        let config = PagedCacheConfig::new(self.batch(), shape.kv_heads, shape.dim, max_len)
            .with_page_len(page_len)
            .with_pages(pages)
            .with_grow_by(2)
            .with_options(self.options)
            .with_scored(self.scored)
            .with_dtype(dtype(shape.element).into());
        Decoder::new(self, config.init(burn.device()))
    }

    pub fn batch(&self) -> usize {
        self.histories.len()
    }

    pub fn lengths(&self) -> Vec<usize> {
        self.histories
            .iter()
            .map(|h| h.k[0].len() / self.shape.dim)
            .collect()
    }

    fn empty(&self) -> History {
        let heads = vec![Vec::new(); self.shape.kv_heads];
        History {
            k: heads.clone(),
            v: heads.clone(),
            scores: heads,
        }
    }

    pub fn reorder(&mut self, indices: &[usize]) {
        self.histories = indices.iter().map(|&i| self.histories[i].clone()).collect();
    }

    /// Replaces a sequence by the first tokens of another.
    pub fn share_prefix(&mut self, from: usize, into: usize, tokens: usize) {
        self.histories[into] = self.histories[from].clone();
        let more = self.lengths()[into] - tokens;
        self.histories[into].take_back(more, self.shape.dim);
    }

    pub fn reset(&mut self, sequence: usize) {
        self.histories[sequence] = self.empty();
    }

    /// Drops the last `count` tokens of every sequence.
    pub fn take_back(&mut self, count: usize) {
        for history in &mut self.histories {
            history.take_back(count, self.shape.dim);
        }
    }

    /// Appends the sequences of `others`.
    pub fn join(&mut self, others: Self) {
        self.histories.extend(others.histories);
    }

    fn next_score(&mut self, sequence: usize, head: usize) -> f64 {
        while self.coming.len() <= sequence {
            self.coming.push(vec![Vec::new(); self.shape.kv_heads]);
        }
        if self.coming[sequence][head].is_empty() {
            let mut scores = self.kind.head(64, &mut self.rng);
            scores.reverse();
            self.coming[sequence][head] = scores;
        }
        self.coming[sequence][head].pop().expect("just filled")
    }

    /// Gives every sequence `count` more tokens.
    pub fn grow(&mut self, count: usize, device: &Device) -> Tokens {
        let Shape {
            q_heads,
            kv_heads,
            dim,
            element,
        } = self.shape;
        let batch = self.batch();
        let (mut k, mut v, mut scores) = (Vec::new(), Vec::new(), Vec::new());
        for sequence in 0..batch {
            for head in 0..kv_heads {
                let rows = |rng: &mut Rng| normal(count * dim, 1.0, element, rng);
                let (new_k, new_v) = (rows(&mut self.rng), rows(&mut self.rng));
                let new: Vec<f64> = (0..count)
                    .map(|_| self.next_score(sequence, head))
                    .collect();
                let history = &mut self.histories[sequence];
                history.k[head].extend(&new_k);
                history.v[head].extend(&new_v);
                history.scores[head].extend(&new);
                k.extend(new_k);
                v.extend(new_v);
                scores.extend(new);
            }
        }
        let host_q = normal(batch * q_heads * count * dim, 1.0, element, &mut self.rng);
        let rows =
            |values: &[f64], heads| load(values, [batch, heads, count, dim], element, device);
        let scored = || floats(&scores, [batch, kv_heads, count], device);
        Tokens {
            q: rows(&host_q, q_heads),
            k: rows(&k, kv_heads),
            v: rows(&v, kv_heads),
            scores: self.scored.then(scored),
            host_q,
            count,
        }
    }

    /// Everything that a sequence has been given, for a cache of one sequence: `k`, `v` and the scores, if it has any.
    pub fn given(
        &self,
        sequence: usize,
        device: &Device,
    ) -> (Tensor<4>, Tensor<4>, Option<Tensor<3>>) {
        let Shape { kv_heads, dim, .. } = self.shape;
        let history = &self.histories[sequence];
        let len = history.k[0].len() / dim;
        let element = self.shape.element;
        let rows =
            |heads: &[Vec<f64>]| load(&heads.concat(), [1, kv_heads, len, dim], element, device);
        let scores = || floats(&history.scores.concat(), [1, kv_heads, len], device);
        let (k, v) = (rows(&history.k), rows(&history.v));
        (k, v, self.scored.then(scores))
    }

    /// Checks the results of a step for the tokens that [`grow`](Self::grow) made last.
    pub fn check(&self, tokens: &Tokens, out: Tensor<4>, lse: Tensor<3>) {
        let Shape {
            q_heads,
            kv_heads,
            dim,
            element,
        } = self.shape;
        let count = tokens.count;
        assert_eq!(out.dims(), [self.batch(), q_heads, count, dim]);
        assert_eq!(out.dtype(), dtype(element));
        let (out, lse) = (values(out), values(lse));
        let options = self.options;
        for (sequence, history) in self.histories.iter().enumerate() {
            let len = history.k[0].len() / dim;
            let (q, kv) = ([1, q_heads, count, dim], [1, kv_heads, len, dim]);
            let scores = self.scored.then_some(&kv[..3]);
            let problem = Problem::new(&q, &kv, &kv, scores, element, &options).unwrap();
            let rows = q_heads * count;
            let size = rows * dim;
            let part = sequence * size..(sequence + 1) * size;
            let inputs = Inputs {
                problem,
                q: tokens.host_q[part.clone()].to_vec(),
                k: history.k.concat(),
                v: history.v.concat(),
                scores: self.scored.then(|| history.scores.concat()),
            };
            let rule = (self.rule.as_ref(), self.role);
            let what = format!("sequence {sequence}, tokens {}..{len}", len - count);
            let lse = &lse[sequence * rows..(sequence + 1) * rows];
            check_rows(&inputs, rule, self.last, (&out[part], lse), &what);
        }
    }

    /// The positions that each head keeps: `[sequence][head]`.
    pub fn live(&self) -> Vec<Vec<Vec<usize>>> {
        let rule = self.rule.expect("slots");
        let head = |scores: &Vec<f64>| match scores.len().checked_sub(1) {
            Some(last) => attended(scores, &rule, last),
            None => Vec::new(),
        };
        (self.histories.iter())
            .map(|history| history.scores.iter().map(head).collect())
            .collect()
    }
}

/// A cache, and the tokens that its sequences have been given.
pub struct Decoder {
    pub sequences: Sequences,
    pub cache: AttentionCache,
}

impl Decoder {
    pub fn new(sequences: Sequences, cache: impl Into<AttentionCache>) -> Self {
        Self {
            sequences,
            cache: cache.into(),
        }
    }

    /// Gives every sequence `count` more tokens, which are still to be stepped.
    pub fn grow(&mut self, count: usize) -> Tokens {
        self.sequences.grow(count, self.cache.device())
    }

    /// A step of `count` tokens against the oracle, and a check of the cache's content after it.
    pub fn step(&mut self, count: usize) {
        self.attend(count);
        self.check_held();
    }

    /// A step of `count` tokens against the oracle.
    pub fn attend(&mut self, count: usize) {
        let tokens = self.grow(count);
        let Tokens {
            q, k, v, scores, ..
        } = tokens.clone();
        let (out, lse) = self.cache.try_step_with_lse(q, k, v, scores).unwrap();
        self.sequences.check(&tokens, out, lse);
    }

    /// The lengths, and the keys that slots keep.
    pub fn check_held(&self) {
        assert_eq!(self.cache.lengths(), self.sequences.lengths());
        assert_eq!(self.cache.sequences(), self.sequences.batch());
        if let AttentionCache::DynamicMask(cache) = &self.cache {
            assert_eq!(cache.positions_sync(), self.sequences.live());
        }
    }

    pub fn reorder(&mut self, indices: &[usize]) {
        self.cache.reorder(indices);
        self.sequences.reorder(indices);
    }

    pub fn reset(&mut self, sequence: usize) {
        self.cache.reset(sequence);
        self.sequences.reset(sequence);
    }

    /// Steps of sequences of different lengths, reordered, repeated, dropped and restarted.
    pub fn beams_and_resets(&mut self, rounds: usize, rng: &mut Rng) {
        for round in 0..rounds {
            self.step([1, 1, 3, 20][rng.below(4)]);
            let batch = self.sequences.batch();
            match round % 4 {
                1 => {
                    let beams = (0..2 + rng.below(3)).map(|_| rng.below(batch));
                    self.reorder(&beams.collect::<Vec<_>>());
                }
                2 => self.reset(rng.below(batch)),
                _ => {}
            }
            self.check_held();
        }
    }
}
