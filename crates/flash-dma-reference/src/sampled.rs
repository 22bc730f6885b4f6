//! The oracle on a sample, for problems whose tensors are too large to compute whole.
//!
//! Nothing here copies a tensor: [`Source`] reads single rows through closures, so that a bf16 buffer of many gigabytes
//! is never converted. There are two kinds of samples, which miss different faults:
//!
//! - [`Source::rows`] picks query rows and gives their outputs, LSE and `dq` by definition, and the gradients of
//!   *every* key **if the gradients of `out` and `lse` are zero in all other rows** (whose content must be finite: 0
//!   times NaN is NaN). Run a backward pass with such gradients: `dq` in other rows and all gradients of keys that the
//!   sample does not touch must be exactly zero ([`first_nonzero`] checks that). It shares nothing with the pass that
//!   it checks. It does not see a fault that needs many rows with gradients: a contribution of an unsampled query that
//!   is lost or counted twice, or an accuracy lost in a long sum.
//! - [`Source::keys`] picks keys of one kv head and sums their gradients over every query that attends to them, from
//!   the `out` and `lse` that the forward pass has saved, as a backward pass does. It sees lost queries at those keys.
//!   It does not see a wrong `out` or `lse` (their sampled rows do), nor faults at other keys.
//!
//! The cost is about `rows · window · head_dim` and `keys · queries · head_dim` multiplications, plus a sort of the
//! scores of each sampled head.

mod choose;
mod keys;
mod parallel;

pub use choose::{attended_keys, spread};
pub use keys::SampledKeys;

use crate::compare::{self, Exact, Failure, Report};
use crate::naive::{self, Mean};
use crate::rows::{self, At, Keys, Pairs, Tensors};
use crate::{Forward, select};
use flash_dma_problem::{ElementType, Problem};
use std::collections::BTreeMap;

/// Fills a slice with the row of that number, counted over all leading axes of a contiguous tensor.
pub type ReadRow<'a> = &'a (dyn Fn(usize, &mut [f64]) + Sync);

/// The rows of a contiguous tensor in memory, for [`ReadRow`].
pub fn reader<T: Copy + Into<f64> + Sync>(
    values: &[T],
) -> impl Fn(usize, &mut [f64]) + Sync + use<'_, T> {
    |row, into| {
        let at = row * into.len();
        let values = &values[at..at + into.len()];
        for (x, &value) in into.iter_mut().zip(values) {
            *x = value.into();
        }
    }
}

/// The inputs of one problem, one row at a time. Values must be exactly those that the engine gets.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    /// Sizes and options.
    pub problem: Problem,
    /// Rows of `[batch, q_heads, q_len, head_dim]`.
    pub q: ReadRow<'a>,
    /// Rows of `[batch, kv_heads, k_len, head_dim]`.
    pub k: ReadRow<'a>,
    /// Rows of `[batch, kv_heads, k_len, head_dim]`.
    pub v: ReadRow<'a>,
    /// `[batch, kv_heads, k_len]`; given exactly if the problem has scores.
    pub scores: Option<&'a [f32]>,
    /// Rows of `[batch, q_heads, q_len, head_dim]`.
    pub grad_out: ReadRow<'a>,
    /// `[batch, q_heads, q_len]`; `None` is zero.
    pub grad_lse: Option<&'a [f32]>,
}

/// Some rows of a tensor: the exact values, and those of the naive implementation.
#[derive(Clone, Debug)]
pub struct Sampled {
    /// The numbers of the rows, ascending, over all leading axes of the tensor.
    pub rows: Vec<usize>,
    /// Elements of a row.
    pub width: usize,
    /// The rows in f64, one after another.
    pub exact: Exact,
    /// The rows of the naive implementation.
    pub naive: Vec<f64>,
}

/// The results that a sample of query rows determines.
#[derive(Clone, Debug)]
pub struct SampledRows {
    /// `out` of the sampled rows.
    pub out: Sampled,
    /// `lse` of the sampled rows, one element wide.
    pub lse: Sampled,
    /// `dq` of the sampled rows.
    pub q: Sampled,
    /// `dk` of the keys that the sampled rows attend to, if no other row has a gradient.
    pub k: Sampled,
    /// `dv` of the same keys.
    pub v: Sampled,
    /// `dscores` of the same keys, one element wide; given exactly if the problem has scores.
    pub scores: Option<Sampled>,
}

impl Sampled {
    fn empty(width: usize) -> Self {
        Self {
            rows: Vec::new(),
            width,
            exact: Exact::zeros(0),
            naive: Vec::new(),
        }
    }

    /// Adds the rows of another sample of the tensor, whose numbers are all greater.
    ///
    /// # Panics
    ///
    /// If they are not, or the rows have another width.
    pub fn append(&mut self, mut other: Self) {
        assert_eq!(self.width, other.width, "width");
        assert!(
            self.rows.last() < other.rows.first() || other.rows.is_empty(),
            "the order of the rows"
        );
        self.rows.append(&mut other.rows);
        self.exact.values.append(&mut other.exact.values);
        self.exact.magnitude.append(&mut other.exact.magnitude);
        self.naive.append(&mut other.naive);
    }

    /// Compares an engine's rows by the rule of [`compare`](mod@compare); `shape` is that of the whole tensor, and the
    /// indices of the report and of the failure are in it.
    ///
    /// # Errors
    ///
    /// The worst element, if one is out of bounds.
    pub fn compare(
        &self,
        name: &str,
        shape: &[usize],
        actual: ReadRow,
        element: ElementType,
        factor: f64,
    ) -> Result<Report, Failure> {
        let (rows, actual) = ([self.rows.len(), self.width], self.read(actual));
        let (exact, naive) = (&self.exact, &self.naive);
        let result = compare::compare(name, &rows, &actual, exact, naive, element, factor);
        self.at_home(shape, result)
    }

    /// Compares an engine's rows by the rule for an LSE.
    ///
    /// # Errors
    ///
    /// The errors of [`compare`](Self::compare).
    pub fn compare_lse(&self, shape: &[usize], actual: ReadRow) -> Result<Report, Failure> {
        let actual = self.read(actual);
        let rows = [self.rows.len(), self.width];
        let result = compare::compare_lse(&rows, &actual, &self.exact);
        self.at_home(shape, result)
    }

    fn read(&self, actual: ReadRow) -> Vec<f64> {
        read_rows(actual, &self.rows, self.width)
    }

    fn at_home(&self, shape: &[usize], result: Result<Report, Failure>) -> Result<Report, Failure> {
        let index = |index: &[usize]| match index {
            &[row, column] => compare::unravel(self.rows[row] * self.width + column, shape),
            _ => Vec::new(),
        };
        match result {
            Ok(report) => Ok(Report {
                index: index(&report.index),
                ..report
            }),
            Err(failure) => Err(Failure {
                index: index(&failure.index),
                shape: shape.into(),
                ..failure
            }),
        }
    }
}

fn read_rows(tensor: ReadRow, rows: &[usize], width: usize) -> Vec<f64> {
    let mut values = vec![0.0; rows.len() * width];
    for (&row, into) in rows.iter().zip(values.chunks_exact_mut(width)) {
        tensor(row, into);
    }
    values
}

/// The first row among the first `len`, other than `rows` (ascending), that has a nonzero element, with its values.
#[must_use]
pub fn first_nonzero(
    actual: ReadRow,
    len: usize,
    width: usize,
    rows: &[usize],
) -> Option<(usize, Vec<f64>)> {
    let chunk = len.div_ceil(1024).max(1);
    let found = parallel::map(len.div_ceil(chunk), |n| {
        let mut values = vec![0.0; width];
        let mut numbers = n * chunk..len.min((n + 1) * chunk);
        let row = numbers.find(|row| {
            rows.binary_search(row).is_err() && {
                actual(*row, &mut values);
                values.iter().any(|&x| x != 0.0)
            }
        })?;
        Some((row, values))
    });
    found.into_iter().flatten().next()
}

impl Source<'_> {
    /// Computes everything that these query rows determine. A row's number counts over batch, query head and query.
    ///
    /// # Panics
    ///
    /// If a row is not one of the problem's, or `scores` or `grad_lse` do not have the problem's shape.
    #[must_use]
    pub fn rows(&self, rows: &[usize]) -> SampledRows {
        self.check();
        let mut heads: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for &row in rows {
            heads.entry(self.kv_head(row)).or_default().push(row);
        }
        let heads: Vec<_> = heads.into_iter().collect();
        let parts = parallel::map(heads.len(), |n| {
            let (head, rows) = &heads[n];
            let mut rows = rows.clone();
            rows.sort_unstable();
            rows.dedup();
            Part::new(self, *head, rows).solve()
        });
        let (dim, has_scores) = (self.problem.head_dim, self.problem.has_scores);
        let mut all = SampledRows {
            out: Sampled::empty(dim),
            lse: Sampled::empty(1),
            q: Sampled::empty(dim),
            k: Sampled::empty(dim),
            v: Sampled::empty(dim),
            scores: has_scores.then(|| Sampled::empty(1)),
        };
        for part in parts {
            all.out.append(part.out);
            all.lse.append(part.lse);
            all.q.append(part.q);
            all.k.append(part.k);
            all.v.append(part.v);
            if let (Some(all), Some(part)) = (&mut all.scores, part.scores) {
                all.append(part);
            }
        }
        all
    }

    /// The kv head, counted over the batch, that a query row reads.
    fn kv_head(&self, row: usize) -> usize {
        let p = &self.problem;
        let head = row / p.q_len;
        let heads = p.batch * p.q_heads;
        assert!(head < heads, "row {row} is not in the problem");
        head / p.group()
    }

    fn check(&self) {
        let p = &self.problem;
        assert_eq!(p.has_scores, self.scores.is_some(), "scores");
        if let Some(scores) = self.scores {
            assert_eq!(scores.len(), p.batch * p.kv_heads * p.k_len, "scores");
        }
        if let Some(grad_lse) = self.grad_lse {
            assert_eq!(grad_lse.len(), p.batch * p.q_heads * p.q_len, "grad_lse");
        }
    }

    /// The scores of a kv head in f64; `None` without scores.
    fn head_scores(&self, head: usize) -> Option<Vec<f64>> {
        let len = self.problem.k_len;
        let scores = &self.scores?[head * len..(head + 1) * len];
        Some(scores.iter().copied().map(f64::from).collect())
    }

    fn read(&self, tensor: ReadRow, rows: &[usize]) -> Vec<f64> {
        read_rows(tensor, rows, self.problem.head_dim)
    }
}

/// The sampled rows of one kv head with the keys that they attend to, gathered: a small problem of one head with
/// explicit lists of the keys that each row attends to.
struct Part {
    problem: Problem,
    /// The whole problem, to which the rows belong.
    whole: Problem,
    rows: Vec<usize>,
    /// Row numbers in `k`.
    keys: Vec<usize>,
    pairs: Vec<Keys>,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    grad_out: Vec<f64>,
    grad_lse: Option<Vec<f64>>,
}

impl Pairs for Part {
    fn row(&self, [_, _, i]: At) -> Keys {
        self.pairs[i].clone()
    }

    fn alibi(&self, _: &Problem, [_, _, i]: At) -> impl Fn(usize) -> f64 {
        let (p, row) = (&self.whole, self.rows[i]);
        let alibi = rows::alibi(p, row / p.q_len % p.q_heads, row % p.q_len);
        move |j| alibi(self.keys[j] % p.k_len)
    }

    fn weights(&self, _: &Problem, [_, _, i]: At) -> impl Fn(usize) -> f64 {
        let (p, row) = (&self.whole, self.rows[i]);
        let weights = p.dropout_weights(row / p.q_len, row % p.q_len);
        move |j| f64::from(weights(self.keys[j] % p.k_len))
    }
}

impl Part {
    fn new(source: &Source, head: usize, rows: Vec<usize>) -> Self {
        let p = &source.problem;
        let scores = source.head_scores(head);
        let ranked = scores.as_deref().map(select::ranked);
        let keys_of = |row: &usize| -> Keys {
            let query = row % p.q_len;
            let keys = match &ranked {
                Some(ranked) => select::take(ranked, p.window, p.position(query)),
                None => rows::visible(p, query).collect(),
            };
            let score = |j: usize| scores.as_ref().map_or(0.0, |scores| scores[j]);
            keys.into_iter().map(|j| (j, score(j))).collect()
        };
        let mut pairs: Vec<_> = rows.iter().map(keys_of).collect();
        let mut keys: Vec<usize> = pairs.iter().flatten().map(|&(j, _)| j).collect();
        keys.sort_unstable();
        keys.dedup();
        for (j, _) in pairs.iter_mut().flatten() {
            *j = keys.binary_search(j).expect("every pair's key is listed");
        }
        keys.iter_mut().for_each(|j| *j += head * p.k_len);
        let mut problem = *p;
        (problem.batch, problem.q_heads, problem.kv_heads) = (1, 1, 1);
        (problem.q_len, problem.k_len) = (rows.len(), keys.len());
        Self {
            problem,
            whole: *p,
            q: source.read(source.q, &rows),
            k: source.read(source.k, &keys),
            v: source.read(source.v, &keys),
            grad_out: source.read(source.grad_out, &rows),
            grad_lse: (source.grad_lse)
                .map(|g| rows.iter().map(|&row| f64::from(g[row])).collect()),
            rows,
            keys,
            pairs,
        }
    }

    fn solve(&self) -> SampledRows {
        let tensors = Tensors::new(&self.problem, [&self.q, &self.k, &self.v]);
        let grads = (&self.grad_out[..], self.grad_lse.as_deref());
        let Forward { out, lse } = rows::forward(&tensors, self);
        let mut scores = Exact::zeros(self.keys.len());
        let sink = |_, j, ds, size| scores.add(j, ds, size);
        let [dq, dk, dv] = rows::backward(&tensors, self, grads, sink);
        let naive = naive::forward(&tensors, self);
        let mut naive_scores = vec![0.0f32; self.keys.len()];
        let sink = |_, j: usize, ds| naive_scores[j] += ds;
        let naive_grads = naive::backward(&tensors, self, grads, Mean::OfOutput, sink);
        let sampled = |rows: &Vec<usize>, width, exact, naive| Sampled {
            rows: rows.clone(),
            width,
            exact,
            naive,
        };
        let dim = self.problem.head_dim;
        let naive_scores = naive_scores.into_iter().map(f64::from).collect();
        SampledRows {
            out: sampled(&self.rows, dim, out, naive.out),
            lse: sampled(&self.rows, 1, lse, naive.lse),
            q: sampled(&self.rows, dim, dq, naive_grads.q),
            k: sampled(&self.keys, dim, dk, naive_grads.k),
            v: sampled(&self.keys, dim, dv, naive_grads.v),
            scores: (self.problem.has_scores).then(|| sampled(&self.keys, 1, scores, naive_scores)),
        }
    }
}
