//! The oracle's side: the same inputs in f64, and the expected results.

use flash_dma_kernels::{ElementType, Problem};
use flash_dma_reference::Inputs;
use flash_dma_reference::compare::{Failure, GRADIENT, OUTPUT, Report, compare, compare_lse};
use flash_dma_reference::generate::{self, Scores};
use flash_dma_reference::select::intervals;
use std::error::Error;

/// Inputs of one call and their exact results.
pub struct Oracle {
    problem: Problem,
    /// `q`, `k`, `v` and the scores.
    pub inputs: Inputs,
    /// The gradient of `out`.
    pub grad_out: Vec<f64>,
}

impl Oracle {
    /// Random inputs with scores that favour recent keys, rounded to the problem's element type.
    pub fn new(problem: Problem, seed: u64) -> Self {
        Self {
            problem,
            inputs: generate::inputs(problem, Scores::Recency, 1.0, seed),
            grad_out: generate::gradients(&problem, seed).0,
        }
    }

    /// The scores; the problem has some.
    pub fn scores(&self) -> &[f64] {
        self.inputs.scores.as_ref().expect("the problem has scores")
    }

    /// Checks that intervals are equal, word by word.
    pub fn check_intervals(&self, actual: &[f64]) -> Result<(), Box<dyn Error>> {
        let expected: Vec<f64> = self
            .scores()
            .chunks(self.problem.k_len)
            .flat_map(|head| intervals(head, self.problem.window))
            .flat_map(|interval| [f64::from(interval.first), f64::from(interval.end)])
            .collect();
        if let Some(at) = (0..expected.len()).find(|&i| actual[i] != expected[i]) {
            let (actual, expected) = (actual[at], expected[at]);
            return Err(format!("intervals: word {at} is {actual}, not {expected}").into());
        }
        let live = expected.chunks(2).filter(|i| i[1] > i[0]).count();
        let keys = expected.len() / 2;
        println!("  intervals  equal; {live} of {keys} keys ever live");
        Ok(())
    }

    /// Checks outputs: their error against f64 may be twice that of a naive implementation in the same type; the LSE
    /// may have only the error of f32 arithmetic.
    pub fn check_forward(&self, out: &[f64], lse: &[f64]) -> Result<(), Failure> {
        let (exact, naive) = (self.inputs.forward(), self.inputs.naive_forward());
        let p = &self.problem;
        let (shape, element) = (p.q_shape(), p.element);
        let result = compare("out", &shape, out, &exact.out, &naive.out, element, OUTPUT);
        show("out", &result?);
        show("lse", &compare_lse(&p.lse_shape(), lse, &exact.lse)?);
        Ok(())
    }

    /// Checks gradients: their error may be three times the naive implementation's.
    pub fn check_backward(&self, [q, k, v, scores]: [&[f64]; 4]) -> Result<(), Failure> {
        let exact = self.inputs.backward(&self.grad_out, None);
        let naive = self.inputs.naive_backward(&self.grad_out, None);
        let of_scores = exact.scores.expect("the problem has scores");
        let by_naive = naive.scores.expect("the problem has scores");
        let (p, element, single) = (&self.problem, self.problem.element, ElementType::F32);
        let shape = p.scores_shape();
        let [q_shape, kv_shape] = [p.q_shape(), p.kv_shape()];
        for (name, shape, actual, exact, naive, element) in [
            ("dq", &q_shape[..], q, exact.q, naive.q, element),
            ("dk", &kv_shape, k, exact.k, naive.k, element),
            ("dv", &kv_shape, v, exact.v, naive.v, element),
            ("dscores", &shape, scores, of_scores, by_naive, single),
        ] {
            let result = compare(name, shape, actual, &exact, &naive, element, GRADIENT);
            show(name, &result?);
        }
        Ok(())
    }
}

fn show(name: &str, report: &Report) {
    let (error, bound, percent) = (report.error, report.bound, report.ratio * 100.0);
    println!("  {name:10} worst error {error:.1e}, {percent:.0} % of the bound {bound:.1e}");
}
