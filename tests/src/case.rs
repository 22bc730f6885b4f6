//! A case: a computation, and its comparison with the oracle.

use crate::expected::Expected;
use crate::{Engine, Grads, Layout, Outputs};
use flash_dma_problem::{AttentionOptions, ElementType, Problem};
use flash_dma_reference::generate::{self, Scores};
use flash_dma_reference::{Inputs, NaiveBackward};

/// One problem with random inputs. The default is causal self-attention of 2 sequences with 2 heads
/// of 16 elements over one kv head, with normal scores and a third of the keys kept, in f32.
#[must_use]
#[derive(Clone, Debug)]
pub struct Case {
    /// Sequences.
    pub batch: usize,
    /// Query heads.
    pub q_heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Queries.
    pub q_len: usize,
    /// Keys.
    pub k_len: usize,
    /// Elements per row.
    pub head_dim: usize,
    /// Element type.
    pub element: ElementType,
    /// Options.
    pub options: AttentionOptions,
    /// `None` for plain attention.
    pub scores: Option<Scores>,
    /// Standard deviation of `q`, `k` and `v`.
    pub deviation: f64,
    /// The layout of the tensors in memory.
    pub layout: Layout,
    /// True if the LSE has a gradient, too.
    pub grad_lse: bool,
    /// The seed of the random numbers.
    pub seed: u64,
}

/// The problem of shapes and options that are known to be good.
pub fn problem(
    q: [usize; 4],
    kv: [usize; 4],
    scores: bool,
    element: ElementType,
    options: &AttentionOptions,
) -> Problem {
    Problem::new(&q, &kv, &kv, scores.then_some(&kv[..3]), element, options).expect("a good case")
}

/// Pairs of queries and keys from which a sequence is long.
const LONG: usize = 500_000;

impl Case {
    /// The default case with as many queries and keys as given: two sequences, or a long one, which takes the oracle as
    /// much time as several short ones.
    pub fn new(q_len: usize, k_len: usize) -> Self {
        Self {
            batch: if q_len * k_len > LONG { 1 } else { 2 },
            q_heads: 2,
            kv_heads: 1,
            q_len,
            k_len,
            head_dim: 16,
            element: ElementType::F32,
            options: AttentionOptions::new().with_keep_window((k_len / 3).max(1)),
            scores: Some(Scores::Normal),
            deviation: 1.0,
            layout: Layout::Contiguous,
            grad_lse: true,
            seed: (q_len * 4096 + k_len) as u64,
        }
    }

    /// Sets the numbers of query and key/value heads.
    pub fn heads(mut self, q_heads: usize, kv_heads: usize) -> Self {
        (self.q_heads, self.kv_heads) = (q_heads, kv_heads);
        self
    }

    /// Sets the head dimension.
    pub fn dim(mut self, head_dim: usize) -> Self {
        self.head_dim = head_dim;
        self
    }

    /// Sets the element type.
    pub fn element(mut self, element: ElementType) -> Self {
        self.element = element;
        self
    }

    /// Sets the number of keys kept.
    pub fn window(mut self, window: usize) -> Self {
        self.options.keep_window = Some(window);
        self
    }

    /// Sees all keys from every query.
    pub fn full(mut self) -> Self {
        self.options.causal = false;
        self
    }

    /// Changes the options.
    pub fn options(mut self, change: impl FnOnce(AttentionOptions) -> AttentionOptions) -> Self {
        self.options = change(self.options);
        self
    }

    /// Sets the kind of scores.
    pub fn scores(mut self, scores: Scores) -> Self {
        self.scores = Some(scores);
        self
    }

    /// Removes scores and window.
    pub fn plain(mut self) -> Self {
        self.scores = None;
        self.options.keep_window = None;
        self
    }

    /// Sets the standard deviation of `q`, `k`, `v`.
    pub fn deviation(mut self, deviation: f64) -> Self {
        self.deviation = deviation;
        self
    }

    /// Sets the layout of the tensors in memory.
    pub fn layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// Sizes and options.
    pub fn problem(&self) -> Problem {
        let q = [self.batch, self.q_heads, self.q_len, self.head_dim];
        let kv = [self.batch, self.kv_heads, self.k_len, self.head_dim];
        let scores = self.scores.is_some();
        problem(q, kv, scores, self.element, &self.options)
    }

    /// The random inputs.
    pub fn inputs(&self) -> Inputs {
        let kind = self.scores.unwrap_or(Scores::Normal);
        generate::inputs(self.problem(), kind, self.deviation, self.seed)
    }

    /// Random gradients of the results.
    pub fn gradients(&self, inputs: &Inputs) -> Grads {
        let (out, lse) = generate::gradients(&inputs.problem, self.seed);
        let lse = self.grad_lse.then_some(lse);
        Grads { out, lse }
    }

    /// Compares everything that the engine computes with the oracle.
    pub fn check<E: Engine>(&self, engine: &E) {
        self.check_inputs(engine, &self.inputs());
    }

    /// [`Case::check`] with the given inputs instead of random ones.
    pub fn check_inputs<E: Engine>(&self, engine: &E, inputs: &Inputs) {
        self.check_gradients(engine, inputs, &self.gradients(inputs));
    }

    /// [`Case::check_inputs`] with the given gradients instead of random ones.
    pub fn check_gradients<E: Engine>(&self, engine: &E, inputs: &Inputs, grads: &Grads) {
        if engine.lacks(self.element) {
            return;
        }
        let call = engine.call(inputs, self.layout, grads);
        let (outputs, actual) = engine.backward(&call).unwrap_or_else(|refused| {
            panic!("{} refuses {self:?}: {}", E::NAME, refused.error);
        });
        // NaN leaves few elements for measuring the naive implementation's error.
        let mut given = [&inputs.q, &inputs.k, &inputs.v, &grads.out]
            .into_iter()
            .flatten();
        let clean = || {
            let clean = given.any(|x| !x.is_finite()).then(|| {
                let clean = self.inputs();
                let random = Grads::random(&clean.problem, self.seed);
                let lse = random.lse.filter(|_| grads.lse.is_some());
                expected(&clean, &Grads { lse, ..random })
            });
            clean.into_iter().collect()
        };
        let has_scores = inputs.problem.has_scores;
        assert_eq!(actual.scores.is_some(), has_scores, "dscores");
        let what = format!("{} at {self:?}", E::NAME);
        expected(inputs, grads).check(clean, &outputs, &actual.given(), what);
    }

    /// Compares the results of a forward pass of `inputs` with the oracle; `how` identifies it in the failure.
    pub fn check_outputs(&self, inputs: &Inputs, outputs: &Outputs, how: &str) {
        let of = |x: &Inputs| Expected::new(&x.problem, x.forward(), &x.naive_forward());
        let clean = || vec![of(&self.inputs())];
        of(inputs).check(clean, outputs, &[], format!("{how} at {self:?}"));
    }
}

/// The expected results for these inputs and gradients.
pub fn expected(inputs: &Inputs, grads: &Grads) -> Expected {
    let (grad_out, grad_lse) = grads.parts();
    expected_by(inputs, grads, inputs.naive_backward(grad_out, grad_lse))
}

/// [`expected`] with the gradients by which an engine's are measured.
pub fn expected_by(inputs: &Inputs, grads: &Grads, naive: NaiveBackward) -> Expected {
    let (p, (grad_out, grad_lse)) = (&inputs.problem, grads.parts());
    let mut expected = Expected::new(p, inputs.forward(), &inputs.naive_forward());
    let exact = inputs.backward(grad_out, grad_lse);
    expected.qkv(p, [exact.q, exact.k, exact.v], &naive);
    if let Some(of_scores) = exact.scores.zip(naive.scores) {
        expected.gradient("dscores", &p.scores_shape(), of_scores);
    }
    expected
}
