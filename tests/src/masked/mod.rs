//! Attention under masks and biases: its cases, their comparison with the oracle, and the engines.

mod burn;
mod cpu;
mod kernels;

use crate::engine::skip;
use crate::{Engine, Outputs};
use flash_dma_problem::{AttentionError, AttentionOptions, ElementType, MaskedProblem};
use flash_dma_reference::compare::{GRADIENT, OUTPUT, compare_by, compare_lse, naive_error};
use flash_dma_reference::generate::{gradients, normal};
use flash_dma_reference::masked::{Broadcast, MaskedInputs};
use flash_dma_reference::{Exact, Rng};

/// What the backward pass gives, contiguous.
#[derive(Clone, Debug)]
pub struct MaskedGradients {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: Vec<f64>,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub k: Vec<f64>,
    /// `[batch, kv_heads, k_len, head_dim]`.
    pub v: Vec<f64>,
    /// In the bias's own shape.
    pub bias: Option<Vec<f64>>,
}

/// A call of the forward and the backward pass.
#[derive(Clone, Debug)]
pub struct MaskedCall {
    /// The oracle's inputs.
    pub inputs: MaskedInputs,
    /// Whether the mask is passed as what it hides.
    pub hidden: bool,
    /// The gradient of `out`.
    pub grad_out: Vec<f64>,
    /// The gradient of the LSE.
    pub grad_lse: Option<Vec<f64>>,
}

impl MaskedCall {
    /// The problem with the shapes of mask and bias.
    ///
    /// # Panics
    ///
    /// If they do not fit.
    #[must_use]
    pub fn problem(&self) -> MaskedProblem {
        let p = &self.inputs.problem;
        let (q, kv) = (p.q_shape(), p.kv_shape());
        let mask = self.inputs.visible.as_ref().map(|m| m.shape);
        let bias = self.inputs.bias.as_ref().map(|b| b.shape);
        let options = AttentionOptions {
            keep_window: None,
            causal: p.causal,
            scale: Some(p.scale),
            softcap: p.softcap,
            deterministic: p.deterministic,
        };
        let slice = |shape: &Option<[usize; 4]>| shape.map(Vec::from);
        let (mask, bias) = (slice(&mask), slice(&bias));
        MaskedProblem::new(
            &q,
            &kv,
            &kv,
            mask.as_deref(),
            bias.as_deref(),
            p.element,
            &options,
        )
        .expect("a good case")
    }
}

/// An implementation of attention under masks and biases.
pub trait MaskedEngine: Engine {
    /// The plan's counts of a mask of this problem, `[batch, heads, query_blocks, key_blocks]`.
    fn counts(&self, call: &MaskedCall) -> Vec<u32>;

    /// The forward pass and then the backward pass.
    ///
    /// # Errors
    ///
    /// If the engine refuses.
    fn masked(&self, call: &MaskedCall) -> Result<(Outputs, MaskedGradients), AttentionError>;
}

/// What a mask looks like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pattern {
    /// Each entry visible with this probability.
    Random(f64),
    /// Blocks of 64 keys alternate between visible and hidden, the other way round every 32 queries.
    Tiles,
    /// Nothing is visible.
    Nothing,
    /// The `w` keys of greatest random score of each row.
    Top(usize),
    /// The `w` keys up to each query's position.
    Window(usize),
}

/// One problem with random inputs.
#[derive(Clone, Debug)]
pub struct MaskedCase {
    /// Batch, query heads, kv heads, queries, keys, elements a row.
    pub sizes: [usize; 6],
    /// Element type of q, k, v.
    pub element: ElementType,
    /// Options, without a window.
    pub options: AttentionOptions,
    /// Shape of the mask and what it looks like.
    pub mask: Option<([usize; 4], Pattern)>,
    /// Shape of the bias.
    pub bias: Option<[usize; 4]>,
    /// Whether the mask is passed as what it hides.
    pub hidden: bool,
    /// Standard deviation of `q`, `k` and `v`.
    pub deviation: f64,
    /// Of the random numbers.
    pub seed: u64,
}

impl MaskedCase {
    /// Without mask, bias or causal masking, in f32.
    #[must_use]
    pub fn new(sizes: [usize; 6]) -> Self {
        Self {
            sizes,
            element: ElementType::F32,
            options: AttentionOptions::new().with_causal(false),
            mask: None,
            bias: None,
            hidden: false,
            deviation: 1.0,
            seed: sizes.iter().fold(7, |seed, &n| seed * 131 + n as u64),
        }
    }

    /// With a mask.
    #[must_use]
    pub fn mask(mut self, shape: [usize; 4], pattern: Pattern) -> Self {
        self.mask = Some((shape, pattern));
        self
    }

    /// With a normal bias.
    #[must_use]
    pub fn bias(mut self, shape: [usize; 4]) -> Self {
        self.bias = Some(shape);
        self
    }

    /// With causal masking.
    #[must_use]
    pub fn causal(mut self) -> Self {
        self.options.causal = true;
        self
    }

    /// In another type.
    #[must_use]
    pub fn element(mut self, element: ElementType) -> Self {
        self.element = element;
        self
    }

    /// The call.
    ///
    /// # Panics
    ///
    /// If the shapes do not fit.
    #[must_use]
    pub fn call(&self) -> MaskedCall {
        let [batch, q_heads, kv_heads, q_len, k_len, dim] = self.sizes;
        let (q, kv) = ([batch, q_heads, q_len, dim], [batch, kv_heads, k_len, dim]);
        let problem = crate::problem(q, kv, false, self.element, &self.options);
        let mut rng = Rng::new(self.seed);
        let size = |shape: &[usize; 4]| shape.iter().product::<usize>();
        let mut draw = |shape| normal(size(shape), self.deviation, self.element, &mut rng);
        let (q, k, v) = (draw(&q), draw(&kv), draw(&kv));
        let bias = self.bias.map(|shape| Broadcast {
            shape,
            values: normal(size(&shape), 1.0, ElementType::F32, &mut rng),
        });
        let visible = self.mask.map(|(shape, pattern)| Broadcast {
            shape,
            values: (0..shape[0] * shape[1] * shape[2])
                .flat_map(|row| pattern.row(row % shape[2].max(1), shape, &mut rng))
                .collect(),
        });
        let (grad_out, grad_lse) = gradients(&problem, self.seed);
        MaskedCall {
            inputs: MaskedInputs {
                problem,
                q,
                k,
                v,
                visible,
                bias,
            },
            hidden: self.hidden,
            grad_out,
            grad_lse: self.seed.is_multiple_of(2).then_some(grad_lse),
        }
    }

    /// Compares everything that the engine computes with the oracle.
    ///
    /// # Panics
    ///
    /// With the worst element of every tensor that is wrong.
    pub fn check<E: MaskedEngine>(&self, engine: &E) {
        self.check_call(engine, &self.call());
    }

    /// As [`check`](Self::check), with inputs that were changed.
    ///
    /// # Panics
    ///
    /// With the worst element of every tensor that is wrong.
    pub fn check_call<E: MaskedEngine>(&self, engine: &E, call: &MaskedCall) {
        if !engine.supports(self.element) {
            return skip::<E>(&format!("{}", self.element));
        }
        let (outputs, grads) =
            (engine.masked(call)).unwrap_or_else(|e| panic!("{} refuses {self:?}: {e}", E::NAME));
        let (inputs, p) = (&call.inputs, &call.inputs.problem);
        let exact = inputs.forward();
        let mut failures = Vec::new();
        failures.extend(compare_lse(&p.lse_shape(), &outputs.lse, &exact.lse).err());
        let [q, kv] = [p.q_shape(), p.kv_shape()];
        let back = inputs.backward(&call.grad_out, call.grad_lse.as_deref());
        let (naive, naive_bias) = inputs.naive_backward(&call.grad_out, call.grad_lse.as_deref());
        let mut note = |name: &str,
                        shape: &[usize],
                        actual: &[f64],
                        exact: &Exact,
                        naive: &[f64],
                        element,
                        factor| {
            let naive = naive_error(exact, naive);
            failures.extend(compare_by(name, shape, actual, exact, naive, element, factor).err());
        };
        let (e, f) = (p.element, ElementType::F32);
        let naive_out = inputs.naive_forward().out;
        note("out", &q, &outputs.out, &exact.out, &naive_out, e, OUTPUT);
        note("dq", &q, &grads.q, &back.q, &naive.q, e, GRADIENT);
        note("dk", &kv, &grads.k, &back.k, &naive.k, e, GRADIENT);
        note("dv", &kv, &grads.v, &back.v, &naive.v, e, GRADIENT);
        assert_eq!(grads.bias.is_some(), self.bias.is_some(), "dbias");
        if let (Some(actual), Some(exact), Some(naive)) = (&grads.bias, &back.bias, &naive_bias) {
            let shape = self.bias.expect("there is a bias");
            note("dbias", &shape, actual, exact, naive, f, GRADIENT);
        }
        let failures: Vec<String> = failures.iter().map(ToString::to_string).collect();
        assert!(
            failures.is_empty(),
            "{} at {self:?}:\n{}",
            E::NAME,
            failures.join("\n")
        );
    }
}

impl Pattern {
    /// Which keys a row of a mask of `shape` shows.
    fn row(self, query: usize, shape: [usize; 4], rng: &mut Rng) -> Vec<bool> {
        let keys = shape[3];
        match self {
            Self::Random(density) => (0..keys).map(|_| rng.uniform() < density).collect(),
            Self::Tiles => (0..keys)
                .map(|j| (j / 64 + query / 32).is_multiple_of(2))
                .collect(),
            Self::Nothing => vec![false; keys],
            Self::Top(window) => {
                let scores: Vec<f64> = (0..keys).map(|_| rng.uniform()).collect();
                let mut order: Vec<usize> = (0..keys).collect();
                order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
                let mut row = vec![false; keys];
                order.iter().take(window).for_each(|&j| row[j] = true);
                row
            }
            Self::Window(window) => {
                let position = query as i64 + keys as i64 - shape[2] as i64;
                (0..keys as i64)
                    .map(|j| j <= position && j + window as i64 > position)
                    .collect()
            }
        }
    }
}
