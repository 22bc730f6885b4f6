//! The results that the oracle expects of a call, and the comparisons: of an engine with the oracle, or of two ways to
//! compute the same.

use crate::{Grads, Outputs, problem};
use core::fmt;
use flash_dma_problem::{ElementType, Interval, Problem};
use flash_dma_reference::compare::{
    ARITHMETIC, Failure, GRADIENT, OUTPUT, compare_by, compare_lse, naive_error, sum,
};
use flash_dma_reference::masked::{Broadcast, MaskedInputs};
use flash_dma_reference::round::{epsilon, round};
use flash_dma_reference::{Exact, Forward, Inputs, NaiveBackward, NaiveForward};

/// How much larger than a gradient its terms may be: those of a rank are as large as the logits if the LSE has a
/// gradient, 3e38 for a mask of the least numbers.
const TERMS: f64 = 64.0;

/// A gradient by definition, and by the naive implementation.
pub type Both = (Exact, Vec<f64>);

#[derive(Clone, Debug)]
struct Tensor {
    name: &'static str,
    shape: Vec<usize>,
    element: ElementType,
    factor: f64,
    exact: Exact,
    naive_error: f64,
}

impl Tensor {
    /// Compares with other exact results, and other errors of the naive implementation.
    fn compare(&self, actual: &[f64], exact: &Exact, naive_error: f64) -> Result<(), Failure> {
        let Self {
            name,
            shape,
            element,
            factor,
            ..
        } = self;
        compare_by(name, shape, actual, exact, naive_error, *element, *factor).map(drop)
    }
}

/// The expected results of a call.
#[must_use]
#[derive(Clone, Debug)]
pub struct Expected {
    /// `out`, then the gradients in the order in which they were added.
    tensors: Vec<Tensor>,
    lse_shape: [usize; 3],
    lse: Exact,
    k_len: usize,
}

impl Expected {
    /// Outputs, without gradients.
    pub fn new(problem: &Problem, exact: Forward, naive: &NaiveForward) -> Self {
        let out = Tensor {
            name: "out",
            shape: problem.q_shape().into(),
            element: problem.element,
            factor: OUTPUT,
            naive_error: naive_error(&exact.out, &naive.out),
            exact: exact.out,
        };
        Self {
            tensors: vec![out],
            lse_shape: problem.lse_shape(),
            lse: exact.lse,
            k_len: problem.k_len,
        }
    }

    /// Measures the naive implementation's error at other inputs of the same kind, too: few rows are a poor measure.
    pub fn with_yardsticks(mut self, others: impl IntoIterator<Item = Self>) -> Self {
        for other in others {
            for (tensor, other) in self.tensors.iter_mut().zip(other.tensors) {
                tensor.naive_error = tensor.naive_error.max(other.naive_error);
            }
        }
        self
    }

    /// Adds a gradient in f32.
    pub fn gradient(&mut self, name: &'static str, shape: &[usize], (exact, naive): Both) {
        self.add(name, shape, ElementType::F32, exact, &naive);
    }

    /// Adds the gradients of the numbers added to the logits, if there are any, and of the rank: separately if `apart`,
    /// otherwise in one.
    pub(crate) fn bias_and_rank(
        &mut self,
        (name, shape): (&'static str, &[usize]),
        bias: Option<Both>,
        rank: Option<Both>,
        apart: bool,
    ) {
        let (bias, rank) = match (bias, rank) {
            (Some(bias), Some(rank)) if !apart => (Some(sum(bias, &rank)), None),
            (bias, rank) => (bias, rank.filter(|_| apart)),
        };
        for (name, both) in [(name, bias), ("rank", rank)] {
            if let Some(both) = both {
                self.gradient(name, shape, both);
            }
        }
    }

    /// The same without the gradient `name`, which nobody asked for.
    pub(crate) fn without(mut self, name: &str) -> Self {
        self.tensors.retain(|tensor| tensor.name != name);
        self
    }

    /// Adds the gradients of q, k and v.
    pub fn qkv(&mut self, p: &Problem, [q, k, v]: [Exact; 3], naive: &NaiveBackward) {
        self.add("dq", &p.q_shape(), p.element, q, &naive.q);
        self.add("dk", &p.kv_shape(), p.element, k, &naive.k);
        self.add("dv", &p.kv_shape(), p.element, v, &naive.v);
    }

    fn add(
        &mut self,
        name: &'static str,
        shape: &[usize],
        element: ElementType,
        exact: Exact,
        naive: &[f64],
    ) {
        self.tensors.push(Tensor {
            name,
            shape: shape.into(),
            element,
            factor: GRADIENT,
            naive_error: naive_error(&exact, naive),
            exact,
        });
    }

    pub(crate) fn rows(&self) -> (&[f64], &[f64]) {
        (&self.tensors[0].exact.values, &self.lse.values)
    }

    /// Changes each row's output and LSE, and the share of the arithmetic's error that the gradients are allowed.
    pub(crate) fn change_rows(
        &mut self,
        out: impl Fn(usize, &mut [f64], &mut [f64]),
        lse: impl Fn(usize, &mut f64, &mut f64),
        gradients: f64,
    ) {
        let width = self.width("out").max(1);
        let (first, others) = self.tensors.split_first_mut().expect("there is an output");
        let exact = &mut first.exact;
        let rows = (exact.values.chunks_mut(width)).zip(exact.magnitude.chunks_mut(width));
        (rows.enumerate()).for_each(|(row, (values, magnitude))| out(row, values, magnitude));
        let rows = (self.lse.values.iter_mut()).zip(&mut self.lse.magnitude);
        (rows.enumerate()).for_each(|(row, (value, magnitude))| lse(row, value, magnitude));
        for tensor in others {
            (tensor.exact.magnitude.iter_mut()).for_each(|size| *size *= gradients);
        }
    }

    /// Compares outputs and gradients, the latter in the order in which they were added. NaN, or few pairs, leave few
    /// elements for measuring the naive implementation: before a failure is reported, its errors at `others`, inputs of
    /// the same kind, count, too. They take as long as the expected results, and most results are right without them.
    ///
    /// # Panics
    ///
    /// With `what`, and the worst element of every tensor that is wrong.
    pub fn check(
        &self,
        others: impl FnOnce() -> Vec<Self>,
        outputs: &Outputs,
        gradients: &[&[f64]],
        what: impl fmt::Display,
    ) {
        if let Err(failures) = self.compare(others, outputs, gradients) {
            panic!("{what}:\n{failures}");
        }
    }

    /// [`check`](Self::check) without a panic; returns true if it needed `others`.
    ///
    /// # Errors
    ///
    /// The worst element of every tensor that is wrong, one line each.
    ///
    /// # Panics
    ///
    /// If there are not as many gradients as were added.
    pub fn compare(
        &self,
        others: impl FnOnce() -> Vec<Self>,
        outputs: &Outputs,
        gradients: &[&[f64]],
    ) -> Result<bool, String> {
        let Err(failures) = self.compare_with(&[], outputs, gradients) else {
            return Ok(false);
        };
        match others() {
            others if others.is_empty() => Err(failures),
            others => (self.compare_with(&others, outputs, gradients)).map(|()| true),
        }
    }

    fn compare_with(
        &self,
        others: &[Self],
        outputs: &Outputs,
        gradients: &[&[f64]],
    ) -> Result<(), String> {
        assert_eq!(gradients.len() + 1, self.tensors.len(), "gradients");
        let mut failures = Vec::new();
        let actual = [&outputs.out[..]]
            .into_iter()
            .chain(gradients.iter().copied());
        for (n, actual) in actual.enumerate() {
            let errors = [self].into_iter().chain(others);
            let naive_error = errors.map(|x| x.tensors[n].naive_error).fold(0.0, f64::max);
            let tensor = &self.tensors[n];
            failures.extend(tensor.compare(actual, &tensor.exact, naive_error).err());
        }
        failures.extend(compare_lse(&self.lse_shape, &outputs.lse, &self.lse).err());
        let failures: Vec<String> = failures.iter().map(ToString::to_string).collect();
        match failures.is_empty() {
            true => Ok(()),
            false => Err(failures.join("\n")),
        }
    }

    /// True if a finite element exceeds, within one per cent, the greatest f16 if it is of that type, or comes within a
    /// factor of 64 of the greatest f32, so that a partial sum of its terms may exceed that: an engine's result for it
    /// proves nothing.
    pub fn exceeds_its_type(&self) -> bool {
        let past = |element, x: f64| match element {
            ElementType::F16 => round(1.01 * x, ElementType::F16).is_infinite(),
            ElementType::F32 | ElementType::Bf16 => TERMS * x.abs() > f64::from(f32::MAX),
        };
        let past = |tensor: &Tensor| {
            let mut values = tensor.exact.values.iter();
            values.any(|&x| x.is_finite() && past(tensor.element, x))
        };
        self.tensors.iter().any(past)
    }

    /// Compares the results of two calls that should agree, in the rows for which `kept` holds: rows of the last axis,
    /// or elements of the LSE and of the scores' gradient. They may differ by the tolerance of the tensor; the LSE, by
    /// two units in the last place of its terms, the greatest logit and the logarithm of a sum.
    pub fn check_same(
        &self,
        name: &str,
        first: &[f64],
        second: &[f64],
        kept: impl Fn(usize) -> bool,
        what: impl fmt::Display,
    ) {
        let width = self.width(name);
        let keep = |x: &[f64]| -> Vec<f64> {
            let kept = |(at, &x)| if kept(at / width) { x } else { 0.0 };
            x.iter().enumerate().map(kept).collect()
        };
        let (first, second) = (keep(first), keep(second));
        let result = if name == "lse" {
            // Half of the two units for each: the greatest logit is at most the LSE and this logarithm.
            let sum = (self.k_len.max(1) as f64).ln();
            let terms = first.iter().map(|x| (x.abs() + 2.0 * sum) / ARITHMETIC);
            let magnitude = terms.zip(&self.lse.magnitude).map(zero_where_untouched);
            let exact = Exact {
                magnitude: magnitude.collect(),
                values: first,
            };
            compare_lse(&self.lse_shape, &second, &exact).map(drop)
        } else {
            let tensor = self.tensor(name);
            let exact = Exact {
                values: first,
                magnitude: tensor.exact.magnitude.clone(),
            };
            tensor.compare(&second, &exact, tensor.naive_error)
        };
        result.unwrap_or_else(|failure| panic!("{what}: {failure}"));
    }

    /// Compares one tensor with the oracle.
    pub fn check_one(&self, name: &str, actual: &[f64], what: impl fmt::Display) {
        let tensor = self.tensor(name);
        let result = tensor.compare(actual, &tensor.exact, tensor.naive_error);
        result.unwrap_or_else(|failure| panic!("{what}: {failure}"));
    }

    /// Compares a gradient with the sum of the gradients of its call's parts, each within the tensor's tolerance.
    pub fn check_sum(
        &self,
        name: &str,
        whole: &[f64],
        parts: &[Vec<f64>],
        what: impl fmt::Display,
    ) {
        let tensor = self.tensor(name);
        let calls = parts.len() as f64 + 1.0;
        let mut sum = vec![0.0; whole.len()];
        // A part is rounded to a type of its own size, which may cancel in the sum.
        let mut rounded = vec![0.0; whole.len()];
        for part in parts {
            assert_eq!(part.len(), whole.len(), "{name}");
            for (at, x) in part.iter().enumerate() {
                sum[at] += x;
                rounded[at] += x.abs();
            }
        }
        let (unit, arithmetic) = (
            epsilon(tensor.element),
            ARITHMETIC * f64::from(f32::EPSILON),
        );
        let terms = (tensor.exact.magnitude.iter().zip(&rounded))
            .map(|(magnitude, rounded)| calls * magnitude + unit / arithmetic * rounded);
        let magnitude = terms.zip(&tensor.exact.magnitude).map(zero_where_untouched);
        let exact = Exact {
            values: whole.to_vec(),
            magnitude: magnitude.collect(),
        };
        let result = tensor.compare(&sum, &exact, calls * tensor.naive_error);
        result.unwrap_or_else(|failure| panic!("{what}: {failure}"));
    }

    fn tensor(&self, name: &str) -> &Tensor {
        let named = self.tensors.iter().find(|tensor| tensor.name == name);
        named.unwrap_or_else(|| panic!("no {name} is expected"))
    }

    fn width(&self, name: &str) -> usize {
        match name {
            "lse" => 1,
            _ => match self.tensor(name).shape[..] {
                [_, _, _, width] => width,
                _ => 1,
            },
        }
    }
}

/// The pairs that train the rank.
#[derive(Clone, Debug, Default)]
pub struct Learning {
    /// Pairs of runners-up, none of which is attended to.
    pub runners_up: Option<Broadcast<bool>>,
    /// Pairs of kept keys, all of which are attended to.
    pub kept: Option<Broadcast<bool>>,
    /// If ranks compete, each key's share of its head's total gradient, which is subtracted:
    /// `[batch, kv_heads, k_len]`.
    pub shares: Option<Vec<f64>>,
}

impl Learning {
    /// The exact gradient of the rank and the naive implementation's, `[batch, kv_heads, k_len]`.
    pub(crate) fn gradient(&self, inputs: &MaskedInputs, grads: &Grads) -> Option<Both> {
        let (grad_out, grad_lse) = grads.parts();
        let gained = self.runners_up.as_ref().map(|pairs| {
            (
                inputs.rank_gradient(pairs, grad_out, grad_lse),
                inputs.naive_rank_gradient(pairs, grad_out, grad_lse),
            )
        });
        let lost = self.kept.as_ref().map(|pairs| {
            (
                inputs.left_out_gradient(pairs, grad_out, grad_lse),
                inputs.naive_left_out_gradient(pairs, grad_out, grad_lse),
            )
        });
        let both = match (gained, lost) {
            (Some(gained), Some(lost)) => Some(sum(gained, &lost)),
            (gained, lost) => gained.or(lost),
        };
        match &self.shares {
            None => both,
            Some(shares) => both.map(|both| charged(both, shares, inputs.problem.k_len)),
        }
    }
}

/// A rank's gradient minus the shares of its sum over a head.
fn charged((mut exact, mut naive): Both, shares: &[f64], k_len: usize) -> Both {
    let charge = |gradient: &mut [f64]| {
        for (head, shares) in gradient.chunks_mut(k_len).zip(shares.chunks(k_len)) {
            let sum: f64 = head.iter().sum();
            (head.iter_mut().zip(shares)).for_each(|(g, share)| *g -= share * sum);
        }
    };
    charge(&mut exact.values);
    charge(&mut naive);
    for (head, shares) in (exact.magnitude.chunks_mut(k_len)).zip(shares.chunks(k_len)) {
        let sum: f64 = head.iter().sum();
        for (size, share) in head.iter_mut().zip(shares) {
            *size += share * sum;
        }
    }
    (exact, naive)
}

/// The expected results of keys shown by some pairs, with a bias per key, and the gradient of the rank: separate if
/// `apart`, otherwise added to that of the bias, which is called `dscores`.
///
/// # Panics
///
/// If the inputs have no bias.
pub fn expected_of_rank(
    inputs: &MaskedInputs,
    learning: &Learning,
    grads: &Grads,
    apart: bool,
) -> Expected {
    let (p, (grad_out, grad_lse)) = (&inputs.problem, grads.parts());
    let mut expected = Expected::new(p, inputs.forward(), &inputs.naive_forward());
    let exact = inputs.backward(grad_out, grad_lse);
    let (naive, naive_bias) = inputs.naive_backward(grad_out, grad_lse);
    expected.qkv(p, [exact.q, exact.k, exact.v], &naive);
    let (bias, rank) = (exact.bias.zip(naive_bias), learning.gradient(inputs, grads));
    assert!(bias.is_some(), "a bias");
    expected.bias_and_rank(("dscores", &p.scores_shape()), bias, rank, apart);
    expected
}

/// The pairs of kv heads, given the keys that a head, counted over all sequences, shows at a position.
pub(crate) fn visible(p: &Problem, shown: &dyn Fn(usize, i64) -> Vec<bool>) -> Broadcast<bool> {
    let heads = 0..p.batch * p.kv_heads;
    let rows = heads.flat_map(|head| (0..p.q_len).map(move |i| (head, p.position(i))));
    let row = |(head, position)| shown(head, position);
    Broadcast {
        shape: [p.batch, p.kv_heads, p.q_len, p.k_len],
        values: rows.flat_map(row).collect(),
    }
}

/// The pairs for which `shown` holds, given a key's index in `[batch, kv_heads, k_len]` and a position.
pub(crate) fn pairs(p: &Problem, shown: impl Fn(usize, i64) -> bool) -> Broadcast<bool> {
    visible(p, &|head, position| {
        let keys = head * p.k_len..(head + 1) * p.k_len;
        keys.map(|key| shown(key, position)).collect()
    })
}

/// The pairs that attend, for keys `[batch, kv_heads, k_len]`.
pub(crate) fn attended(p: &Problem, intervals: &[Interval]) -> Broadcast<bool> {
    pairs(p, |key, position| intervals[key].contains(position))
}

/// The pairs of runners-up, for keys `[batch, kv_heads, k_len]` that cease to be one at the positions `far`.
pub(crate) fn runners_up(p: &Problem, intervals: &[Interval], far: &[u32]) -> Broadcast<bool> {
    pairs(p, |key, position| {
        (i64::from(intervals[key].end)..i64::from(far[key])).contains(&position)
    })
}

/// The same problem under a mask of the pairs of kv heads, with a bias per key.
pub(crate) fn masked(
    inputs: &Inputs,
    visible: Option<Broadcast<bool>>,
    bias: Option<&Vec<f64>>,
) -> MaskedInputs {
    let p = &inputs.problem;
    let options = crate::masked::options(p);
    MaskedInputs {
        problem: problem(p.q_shape(), p.kv_shape(), false, p.element, &options),
        q: inputs.q.clone(),
        k: inputs.k.clone(),
        v: inputs.v.clone(),
        visible,
        bias: bias.map(|bias| Broadcast {
            shape: [p.batch, p.kv_heads, 1, p.k_len],
            values: bias.clone(),
        }),
    }
}

/// A magnitude, unless no pair contributes to its element: such an element is exact.
fn zero_where_untouched((magnitude, oracle): (f64, &f64)) -> f64 {
    if *oracle == 0.0 { 0.0 } else { magnitude }
}
