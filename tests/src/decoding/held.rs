//! A cache on a device, and the steps and chunks that the kernels take over it.

use super::{F32, Sequence};
use crate::call::picked;
use crate::engines::kernels::{planned, ran};
use crate::engines::{Kernels, Pass, Target};
use crate::{Layout, Outputs, Raw};
use cubecl::prelude::TensorBinding;
use flash_dma_kernels::internals::decode_tuned;
use flash_dma_kernels::{
    Cache, CacheShape, ChunkOutputs, Forward, Pages, Slots, StepInputs, StepOutputs, Tokens,
    append, append_pages, chunk_keys, decode, select,
};
use flash_dma_problem::{Appending, MAX_DECODE_TOKENS, Problem, ScoreRole};
use flash_dma_reference::{Inputs, compose::attended};

/// The page at place `n` of the table `[batch, max_pages]`: the sequences take them in turn, from the last one on.
fn page(batch: usize, max_pages: usize, n: usize) -> i32 {
    (max_pages * batch - n % max_pages * batch - n / max_pages) as i32
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
    pub fn new(kernels: &'a Kernels<T>, sequence: &'a Sequence) -> Self {
        let (batch, heads, dim) = (sequence.batch, sequence.heads[1], sequence.head_dim);
        // With room for a guess past the end.
        let max_pages = (sequence.len + MAX_DECODE_TOKENS).div_ceil(sequence.page_len);
        let pages = max_pages * batch + 1;
        let shape = match sequence.rule {
            Some(rule) => CacheShape::slots(batch, heads, rule, dim, sequence.element),
            None => {
                let sizes = [pages, sequence.page_len, max_pages];
                CacheShape::pages(batch, heads, sizes, dim, sequence.element)
            }
        };
        let mut shape = (shape.expect("a good case")).with_score_role(sequence.role);
        if sequence.biased {
            shape = shape.with_scores();
        }
        if let Some(keys) = sequence.last {
            shape = shape.with_window(keys).expect("a good case");
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
            let table = (0..batch * max_pages).map(|n| page(batch, max_pages, n));
            Cache::Pages(Pages {
                k: rows(),
                v: rows(),
                scores: sequence.biased.then(|| filled(&kv[..3], f64::NAN, F32)),
                table: words(&[batch, max_pages], table.collect()),
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

    /// The tokens from the held ones up to `to`, followed by `wrong` others, the first of the sequence; and the shape
    /// of their rows.
    fn tokens(&self, all: &Inputs, to: usize, wrong: usize) -> (Tokens, [usize; 4]) {
        let s = self.sequence;
        let new = [s.batch, s.heads[1], to - self.held + wrong, s.head_dim];
        let part =
            |values: &[f64], width| picked(values, s.len, width, (self.held..to).chain(0..wrong));
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
    pub fn append(&mut self, all: &Inputs, to: usize) {
        let (tokens, new) = self.tokens(all, to, 0);
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

    /// Replaces the first `count` pages of every sequence by those of the first one.
    pub fn share(&mut self, count: usize) {
        let (batch, kernels) = (self.sequence.batch, self.kernels);
        if let Cache::Pages(pages) = &mut self.cache {
            let max_pages = pages.table.shape[1];
            let shared = |n: usize| match n % max_pages {
                at if at < count => page(batch, max_pages, at),
                _ => page(batch, max_pages, n),
            };
            let table: Vec<i32> = (0..batch * max_pages).map(shared).collect();
            pages.table = kernels.words(&[batch, max_pages], &table);
        }
    }

    /// A decode step of the tokens up to `to`: its output and LSE.
    pub fn step(&mut self, all: &Inputs, to: usize) -> Outputs {
        let result = self.attend(all, to, 0, Appending::Now);
        self.held = to;
        result
    }

    /// A decode step that appends nothing, of the tokens up to `to` followed by `wrong` others: the output and the LSE
    /// of the former.
    pub fn guess(&self, all: &Inputs, to: usize, wrong: usize) -> Outputs {
        let Outputs { out, lse } = self.attend(all, to, wrong, Appending::Later);
        let own = 0..to - self.held;
        let len = own.end + wrong;
        Outputs {
            out: picked(&out, len, self.sequence.head_dim, own.clone()),
            lse: picked(&lse, len, 1, own),
        }
    }

    fn attend(&self, all: &Inputs, to: usize, wrong: usize, appending: Appending) -> Outputs {
        let s = self.sequence;
        let (tokens, new) = self.tokens(all, to, wrong);
        let q = [s.batch, s.heads[0], new[2], s.head_dim];
        let query = picked(&all.q, s.len, s.head_dim, (self.held..to).chain(0..wrong));
        let query = self
            .kernels
            .upload(&Raw::new(&query, &q, s.element, s.layout));
        let scores = self.shape.has_scores().then_some(&new[..3]);
        let (held, options) = (self.held, s.options());
        let problem = self
            .shape
            .decode(&q, &new, &new, scores, s.element, held, &options)
            .expect("a good case")
            .with_appending(appending);
        let client = &self.kernels.client;
        let out = self.kernels.output(&q, s.element, 0);
        let lse = self.kernels.output(&q[..3], F32, 0);
        let inputs = StepInputs { q: query, tokens };
        let engine = Kernels::<T>::forced(planned(&decode::plan(client, &problem, &inputs)));
        ran(Pass::Decode, engine);
        let outputs = StepOutputs {
            cache: self.cache.clone(),
            out: out.binding(),
            lse: lse.binding(),
        };
        let plan = decode_tuned(engine, s.tuning, client, &problem, &inputs);
        plan.and_then(|plan| plan.run(outputs))
            .unwrap_or_else(|error| panic!("{error} for {s:?}"));
        Outputs {
            out: self.kernels.read(&out),
            lse: self.kernels.read(&lse),
        }
    }

    /// Runs the chunk of tokens up to `to` over the slots and itself, by a pass over [`chunk_keys`], and then appends
    /// it.
    ///
    /// # Panics
    ///
    /// If the kernels refuse, or the cache has pages.
    pub fn chunk(&mut self, all: &Inputs, to: usize) -> Outputs {
        let s = self.sequence;
        let rule = s.rule.expect("slots");
        let (tokens, new) = self.tokens(all, to, 0);
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
        let shape = attention.intervals_shape();
        let intervals = kernels.words(&shape, &vec![0; shape.iter().product()]);
        let (kept, into) = (rule.kept(), intervals.clone());
        select(client, rank.binding(), kept, into).expect("a good case");
        let added = match s.role {
            ScoreRole::RankAndBias => z.binding(),
            // Hidden keys are in no interval.
            ScoreRole::Rank => {
                let zeros = vec![0.0; keys[..3].iter().product()];
                kernels.upload(&Raw::new(&zeros, &keys[..3], F32, Layout::Contiguous))
            }
        };
        let query = picked(&all.q, s.len, s.head_dim, self.held..to);
        let given = flash_dma_kernels::Inputs {
            q: kernels.upload(&Raw::new(&query, &q, s.element, s.layout)),
            k: k.binding(),
            v: v.binding(),
            selection: Some(flash_dma_kernels::Selection {
                scores: added,
                intervals,
                learning: None,
            }),
        };
        let out = kernels.output(&q, s.element, 0);
        let lse = kernels.output(&q[..3], F32, 0);
        let plan = attention.plan_forward(client, &given, None);
        ran(Pass::Decode, planned(&plan));
        let outputs = flash_dma_kernels::Outputs::new(out.binding(), lse.binding());
        plan.and_then(|plan| plan.run(outputs))
            .expect("a good case");
        self.append(all, to);
        Outputs {
            out: kernels.read(&out),
            lse: kernels.read(&lse),
        }
    }

    /// The positions that the last token attends to, ascending, for each sequence and head; `None` with pages.
    pub fn live(&self) -> Option<Vec<Vec<usize>>> {
        let (Cache::Slots(slots), Some(rule)) = (&self.cache, self.sequence.rule) else {
            return None;
        };
        let hidden = f32::NEG_INFINITY.to_bits() as i32;
        let [position, score] = [&slots.position, &slots.score].map(|x| self.read_words(x));
        let rows = position.chunks(rule.window).zip(score.chunks(rule.window));
        let row = |(position, score): (&[i32], &[i32])| {
            let slots = position.iter().zip(score);
            let shown = slots.filter(|&(_, &score)| score != hidden);
            let mut live: Vec<usize> = shown.map(|(&x, _)| x as usize).collect();
            live.sort_unstable();
            live
        };
        Some(rows.map(row).collect())
    }

    /// Compares the live sets with the oracle's selection; nothing with pages.
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

    /// The bits of the cache's content.
    pub fn bits(&self) -> Vec<Vec<u8>> {
        let (rows, words) = match &self.cache {
            Cache::Slots(slots) => {
                let of = slots.clone();
                ([of.k, of.v], vec![of.score, of.position, of.seen])
            }
            Cache::Pages(pages) => {
                let of = pages.clone();
                let words = [of.table, of.lengths].into_iter().chain(of.scores);
                ([of.k, of.v], words.collect())
            }
        };
        let size = self.sequence.element.size();
        let read = |tensor, size| self.kernels.read_bytes(tensor, size);
        let rows = rows.iter().map(|tensor| read(tensor, size));
        rows.chain(words.iter().map(|tensor| read(tensor, 4)))
            .collect()
    }

    fn read_words(&self, tensor: &TensorBinding) -> Vec<i32> {
        let bytes = self.kernels.read_bytes(tensor, 4);
        let words = bytes.chunks_exact(4);
        words.map(bytemuck::pod_read_unaligned).collect()
    }

    /// Compares the output of a chunk with the oracle.
    pub fn compare(&self, all: &Inputs, from: usize, outputs: &Outputs) {
        self.sequence.compare(all, from, self.held, outputs);
    }
}
