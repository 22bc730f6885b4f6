//! Cases of attention under masks and biases, and their comparison with the oracle.

use super::{MaskedCall, MaskedEngine};
use crate::expected::Expected;
use crate::{Grads, Layout};
use flash_dma_problem::{AttentionOptions, ElementType, Problem};
use flash_dma_reference::generate::{gradients, normal};
use flash_dma_reference::masked::{Broadcast, MaskedInputs};
use flash_dma_reference::{NaiveBackward, Rng};

/// The pattern of a mask.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pattern {
    /// Each entry visible with this probability.
    Random(f64),
    /// Tiles of this many queries and keys are alternately visible and hidden, along both axes.
    Tiles(usize, usize),
    /// Nothing is visible.
    Nothing,
    /// The `w` keys of greatest random score of each row.
    Top(usize),
    /// The `w` keys up to each query's position.
    Window(usize),
    /// One in this many keys: every second of them visible to all queries, the others to most.
    Columns(usize),
}

/// One problem with random inputs.
#[must_use]
#[derive(Clone, Debug)]
pub struct MaskedCase {
    /// Batch, query heads, kv heads, queries, keys, elements per row.
    pub sizes: [usize; 6],
    /// Element type of q, k, v.
    pub element: ElementType,
    /// Options, without a window.
    pub options: AttentionOptions,
    /// Shape and pattern of the mask.
    pub mask: Option<([usize; 4], Pattern)>,
    /// Shape of the bias.
    pub bias: Option<[usize; 4]>,
    /// True if the mask is passed as the pairs that it hides.
    pub hidden: bool,
    /// The layout of the tensors in memory.
    pub layout: Layout,
    /// True if the LSE has a gradient, too.
    pub grad_lse: bool,
    /// Standard deviation of `q`, `k` and `v`.
    pub deviation: f64,
    /// The seed of the random numbers.
    pub seed: u64,
    /// Additional seeds at which the naive implementation's error is measured. In 16 bits most of a gradient's error
    /// comes from the rows of `out` that happen to be rounded worst: in a small tensor one seed is a poor measure, and
    /// an engine that is exact except for that rounding may have up to six times the error of one seed.
    pub yardsticks: u64,
}

impl MaskedCase {
    /// A case without mask, bias or causal masking, in f32, with heads that lie token by token.
    pub fn new(sizes: [usize; 6]) -> Self {
        Self {
            sizes,
            element: ElementType::F32,
            options: AttentionOptions::new().with_causal(false),
            mask: None,
            bias: None,
            hidden: false,
            layout: Layout::Transposed,
            grad_lse: true,
            deviation: 1.0,
            seed: sizes.iter().fold(7, |seed, &n| seed * 131 + n as u64),
            yardsticks: 0,
        }
    }

    /// Sets the mask.
    pub fn mask(mut self, shape: [usize; 4], pattern: Pattern) -> Self {
        self.mask = Some((shape, pattern));
        self
    }

    /// Sets a normal bias.
    pub fn bias(mut self, shape: [usize; 4]) -> Self {
        self.bias = Some(shape);
        self
    }

    /// Turns causal masking on or off.
    pub fn causal(mut self, causal: bool) -> Self {
        self.options.causal = causal;
        self
    }

    /// Sets the element type.
    pub fn element(mut self, element: ElementType) -> Self {
        self.element = element;
        self.yardsticks = if element == ElementType::F32 { 0 } else { 3 };
        self
    }

    /// Sets the layout in memory.
    pub fn layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// Sizes and options.
    pub fn problem(&self) -> Problem {
        let [batch, q_heads, kv_heads, q_len, k_len, dim] = self.sizes;
        let (q, kv) = ([batch, q_heads, q_len, dim], [batch, kv_heads, k_len, dim]);
        crate::problem(q, kv, false, self.element, &self.options)
    }

    pub(crate) fn visible(&self, rng: &mut Rng) -> Option<Broadcast<bool>> {
        let (shape, pattern) = self.mask?;
        let rows = 0..shape[..3].iter().product();
        let values = rows.flat_map(|row: usize| pattern.row(row % shape[2].max(1), shape, rng));
        Some(Broadcast {
            shape,
            values: values.collect(),
        })
    }

    /// The random inputs.
    pub fn inputs(&self) -> MaskedInputs {
        let problem = self.problem();
        let (q, kv) = (problem.q_shape(), problem.kv_shape());
        let mut rng = Rng::new(self.seed);
        let size = |shape: &[usize; 4]| shape.iter().product::<usize>();
        let mut draw = |shape| normal(size(shape), self.deviation, self.element, &mut rng);
        let (q, k, v) = (draw(&q), draw(&kv), draw(&kv));
        let bias = self.bias.map(|shape| Broadcast {
            shape,
            values: normal(size(&shape), 1.0, ElementType::F32, &mut rng),
        });
        let visible = self.visible(&mut rng);
        MaskedInputs {
            problem,
            q,
            k,
            v,
            visible,
            bias,
        }
    }

    /// Random gradients of the results.
    pub fn gradients(&self, inputs: &MaskedInputs) -> Grads {
        let (out, lse) = gradients(&inputs.problem, self.seed);
        let lse = self.grad_lse.then_some(lse);
        Grads { out, lse }
    }

    /// The call of these inputs with random gradients.
    pub fn call(&self, inputs: &MaskedInputs) -> MaskedCall {
        MaskedCall::new(inputs, self.layout, self.hidden, &self.gradients(inputs))
    }

    /// The expected results for these inputs and gradients.
    pub fn expected(&self, inputs: &MaskedInputs, grads: &Grads) -> Expected {
        let (grad_out, grad_lse) = grads.parts();
        Self::expected_by(inputs, grads, inputs.naive_backward(grad_out, grad_lse))
    }

    /// [`expected`](Self::expected) with the gradients of q, k, v and the bias by which an engine's are measured.
    pub fn expected_by(
        inputs: &MaskedInputs,
        grads: &Grads,
        (naive, naive_bias): (NaiveBackward, Option<Vec<f64>>),
    ) -> Expected {
        let (p, (grad_out, grad_lse)) = (&inputs.problem, grads.parts());
        let mut expected = Expected::new(p, inputs.forward(), &inputs.naive_forward());
        let exact = inputs.backward(grad_out, grad_lse);
        expected.qkv(p, [exact.q, exact.k, exact.v], &naive);
        if let (Some(bias), Some(of_bias)) = (&inputs.bias, exact.bias.zip(naive_bias)) {
            expected.gradient("dbias", &bias.shape, of_bias);
        }
        expected
    }

    /// The expected results at the other seeds, under these inputs' mask: measures of the naive implementation's error.
    pub fn others(&self, inputs: &MaskedInputs, grad_lse: bool) -> Vec<Expected> {
        let seeds = (1..=self.yardsticks).map(|n| self.seed.wrapping_add(n << 32));
        seeds
            .map(|seed| self.at_seed(seed, inputs, grad_lse))
            .collect()
    }

    fn at_seed(&self, seed: u64, inputs: &MaskedInputs, grad_lse: bool) -> Expected {
        let case = Self {
            seed,
            grad_lse,
            ..self.clone()
        };
        let mut other = case.inputs();
        other.visible.clone_from(&inputs.visible);
        case.expected(&other, &case.gradients(&other))
    }

    /// Compares everything that the engine computes with the oracle.
    pub fn check<E: MaskedEngine>(&self, engine: &E) {
        self.check_inputs(engine, &self.inputs());
    }

    /// [`check`](Self::check) with the given inputs instead of random ones.
    pub fn check_inputs<E: MaskedEngine>(&self, engine: &E, inputs: &MaskedInputs) {
        self.check_gradients(engine, inputs, &self.gradients(inputs));
    }

    /// [`check_inputs`](Self::check_inputs) with the given gradients instead of random ones.
    pub fn check_gradients<E: MaskedEngine>(
        &self,
        engine: &E,
        inputs: &MaskedInputs,
        grads: &Grads,
    ) {
        if engine.lacks(self.element) {
            return;
        }
        let bias = inputs.bias.iter().flat_map(|bias| &bias.values);
        let mut given = [&inputs.q, &inputs.k, &inputs.v, &grads.out]
            .into_iter()
            .flatten()
            .chain(bias);
        let others = || {
            let mut others = self.others(inputs, grads.lse.is_some());
            // NaN leaves few elements as well.
            if given.any(|x| !x.is_finite()) {
                others.push(self.at_seed(self.seed, inputs, grads.lse.is_some()));
            }
            others
        };
        let expected = self.expected(inputs, grads);
        self.check_expected(engine, inputs, grads, &expected, others);
    }

    /// [`check_gradients`](Self::check_gradients) with given expected results, as the oracle may take longer than all
    /// engines.
    pub fn check_expected<E: MaskedEngine>(
        &self,
        engine: &E,
        inputs: &MaskedInputs,
        grads: &Grads,
        expected: &Expected,
        others: impl FnOnce() -> Vec<Expected>,
    ) {
        if engine.lacks(self.element) {
            return;
        }
        let call = MaskedCall::new(inputs, self.layout, self.hidden, grads);
        let (outputs, grads) = engine.masked(&call).unwrap_or_else(|refused| {
            panic!("{} refuses {self:?}: {}", E::NAME, refused.error);
        });
        assert_eq!(grads.bias.is_some(), inputs.bias.is_some(), "dbias");
        let what = format!("{} at {self:?}", E::NAME);
        expected.check(others, &outputs, &grads.given(), what);
    }
}

impl Pattern {
    /// The keys that a row of a mask of `shape` shows.
    fn row(self, query: usize, shape: [usize; 4], rng: &mut Rng) -> Vec<bool> {
        let keys = shape[3];
        match self {
            Self::Random(density) => (0..keys).map(|_| rng.uniform() < density).collect(),
            Self::Tiles(rows, columns) => (0..keys)
                .map(|j| (j / columns + query / rows).is_multiple_of(2))
                .collect(),
            Self::Nothing => vec![false; keys],
            Self::Top(window) => {
                let scores: Vec<f64> = (0..keys).map(|_| rng.uniform()).collect();
                top(&scores, keys, window)
            }
            Self::Window(window) => {
                let position = query as i64 + keys as i64 - shape[2] as i64;
                (0..keys as i64)
                    .map(|j| j <= position && j + window as i64 > position)
                    .collect()
            }
            Self::Columns(every) => (0..keys)
                .map(|j| {
                    let most = rng.uniform() < 0.8;
                    j.is_multiple_of(every) && (most || j.is_multiple_of(2 * every))
                })
                .collect(),
        }
    }
}

/// Shows each query the `window` keys of greatest bias among those that causal masking leaves it:
/// `[batch, heads, q_len, k_len]` of the bias's batches and heads.
///
/// # Panics
///
/// If there is no bias, or it does not have all keys.
pub fn top_of_bias(inputs: &MaskedInputs, window: usize) -> Broadcast<bool> {
    let p = &inputs.problem;
    let bias = inputs.bias.as_ref().expect("there is a bias");
    let [batch, heads, queries, keys] = bias.shape;
    assert_eq!(keys, p.k_len, "a bias of all keys");
    let rows = (0..batch * heads).flat_map(|head| (0..p.q_len).map(move |i| (head, i)));
    let values = rows.flat_map(|(head, i)| {
        let row = head * queries + i % queries;
        let seen = (p.position(i) + 1).max(0) as usize;
        top(&bias.values[row * keys..(row + 1) * keys], seen, window)
    });
    Broadcast {
        shape: [batch, heads, p.q_len, keys],
        values: values.collect(),
    }
}

/// The `window` greatest of the first `seen` scores.
fn top(scores: &[f64], seen: usize, window: usize) -> Vec<bool> {
    let mut order: Vec<usize> = (0..seen).collect();
    if window < seen {
        order.select_nth_unstable_by(window, |&a, &b| scores[b].total_cmp(&scores[a]));
    }
    let mut row = vec![false; scores.len()];
    order.iter().take(window).for_each(|&j| row[j] = true);
    row
}
