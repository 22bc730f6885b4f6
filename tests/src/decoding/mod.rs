//! Sequences that the kernels decode, and their comparison with one pass over the whole sequence.

mod held;

pub use held::Held;

use crate::call::picked;
use crate::engines::{Kernels, Target};
use crate::{Layout, Outputs};
use flash_dma_kernels::SelectionRule;
use flash_dma_kernels::internals::DecodeTuning;
use flash_dma_problem::{AttentionOptions, ElementType, Problem, ScoreRole};
use flash_dma_reference::Inputs;
use flash_dma_reference::compare::{OUTPUT, compare, compare_lse};
use flash_dma_reference::generate::{Scores, inputs};

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
    /// The rule for the slots of a kv head; `None` is a cache of pages.
    pub rule: Option<SelectionRule>,
    /// The role of the scores in slots.
    pub role: ScoreRole,
    /// True if pages have scores.
    pub biased: bool,
    /// How many of the last keys a query attends to; `None` is all keys of pages.
    pub last: Option<usize>,
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
    pub fn new(len: usize, window: Option<usize>) -> Self {
        Self {
            batch: 2,
            heads: [4, 2],
            len,
            head_dim: 64,
            element: F32,
            rule: window.map(SelectionRule::top),
            role: ScoreRole::default(),
            biased: false,
            last: None,
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
    pub fn inputs(&self) -> Inputs {
        let q = [self.batch, self.heads[0], self.len, self.head_dim];
        let k = [self.batch, self.heads[1], self.len, self.head_dim];
        let scores = self.scored().then_some(&k[..3]);
        let problem = Problem::new(&q, &k, &k, scores, self.element, &self.options());
        inputs(problem.expect("a good case"), self.scores, 1.0, self.seed)
    }

    /// Decodes and compares with the oracle: steps with the last rows of one pass, live sets with its selection.
    pub fn check<T: Target>(&self, kernels: &Kernels<T>) {
        self.check_inputs(kernels, &self.inputs());
    }

    /// [`check`](Self::check) of given inputs.
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
            let outputs = cache.step(all, to);
            steps += 1;
            if steps % self.every == 0 || to == self.len {
                self.compare(all, from, to, &outputs);
                cache.check_live(all);
            }
            if to == self.len {
                return;
            }
        }
    }

    fn compare(&self, all: &Inputs, from: usize, to: usize, outputs: &Outputs) {
        let p = &all.problem;
        let q = [p.batch, p.q_heads, to - from, p.head_dim];
        let k = [p.batch, p.kv_heads, to, p.head_dim];
        let dim = p.head_dim;
        let scores = self.scored().then_some(&k[..3]);
        let problem = Problem::new(&q, &k, &k, scores, p.element, &self.options());
        let prefix = Inputs {
            problem: problem.expect("a good case"),
            q: picked(&all.q, self.len, dim, from..to),
            k: picked(&all.k, self.len, dim, 0..to),
            v: picked(&all.v, self.len, dim, 0..to),
            scores: (all.scores.as_ref()).map(|z| picked(z, self.len, 1, 0..to)),
        };
        let rule = (self.rule.as_ref(), self.role);
        let what = format!("tokens {from}..{to} of {self:?}");
        check_rows(
            &prefix,
            rule,
            self.last,
            (&outputs.out, &outputs.lse),
            &what,
        );
    }
}

/// Compares results with the oracle's, for the keys that a rule selects, for the last ones, or for all.
pub fn check_rows(
    inputs: &Inputs,
    (rule, role): (Option<&SelectionRule>, ScoreRole),
    last: Option<usize>,
    (out, lse): (&[f64], &[f64]),
    what: &str,
) {
    let (exact, naive) = match (rule, last) {
        (Some(rule), _) => (
            inputs.forward_by(rule, role),
            inputs.naive_forward_by(rule, role),
        ),
        (None, Some(keys)) => (inputs.forward_last(keys), inputs.naive_forward_last(keys)),
        (None, None) => (inputs.forward(), inputs.naive_forward()),
    };
    let p = &inputs.problem;
    let (shape, e) = (p.q_shape(), p.element);
    compare("out", &shape, out, &exact.out, &naive.out, e, OUTPUT)
        .unwrap_or_else(|failure| panic!("{what}: {failure}"));
    compare_lse(&p.lse_shape(), lse, &exact.lse)
        .unwrap_or_else(|failure| panic!("{what}: {failure}"));
}
