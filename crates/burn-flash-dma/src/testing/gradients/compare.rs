//! Comparison of results with the oracle.

use super::data::{Data, Values};
use super::passes::Results;
use super::report::{Checked, Sample};
use crate::finite::index_of;
use flash_dma_problem::{ElementType, Problem, TensorName};
use flash_dma_reference::compare::{GRADIENT, OUTPUT};
use flash_dma_reference::sampled::{
    Sampled, SampledKeys, SampledRows, attended_keys, first_nonzero, spread,
};
use flash_dma_reference::{Failure, Rng};

/// Number of kv heads whose keys are sampled.
const KEY_HEADS: usize = 2;

/// The expected results.
pub struct Expected {
    rows: SampledRows,
    keys: SampledKeys,
}

impl Expected {
    pub fn new(data: &Data, rows: &[usize], keys: usize, results: &Results) -> Self {
        let p = &data.problem;
        let mut rng = Rng::new(data.seed);
        // The output that the backward pass uses.
        let out = |row: usize, into: &mut [f64]| {
            results.out.row(row, into);
            if let Some(residual) = &results.residual {
                let mut lost = vec![0.0; into.len()];
                residual.row(row, &mut lost);
                into.iter_mut().zip(lost).for_each(|(x, lost)| *x += lost);
            }
        };
        let lse = |row: usize, into: &mut [f64]| results.lse.row(row, into);
        data.with_source(|source| {
            let heads = spread(p.batch * p.kv_heads, KEY_HEADS, &mut rng).into_iter();
            let sampled = heads.map(|head| {
                let keys = attended_keys(&source.intervals(head), keys, &mut rng);
                source.keys(head, &keys, &out, &lse)
            });
            let keys = sampled.reduce(|mut all, later| {
                all.append(later);
                all
            });
            Self {
                rows: source.rows(rows),
                keys: keys.expect("a problem that is not empty has a head"),
            }
        })
    }

    /// Comparisons that passed, and those that failed, the worst first.
    pub fn compare(
        &self,
        p: &Problem,
        results: &Results,
    ) -> (Vec<Checked>, Vec<(Sample, Failure)>) {
        use Sample::{Keys, Rows};
        use TensorName::{GradKey, GradQuery, GradScores, GradValue, Lse, Out};
        let mut log = Log {
            element: p.element,
            checked: Vec::new(),
            failures: Vec::new(),
        };
        let (rows, keys) = (&self.rows, &self.keys);
        let (whole, of_rows) = (&results.whole, &results.of_rows);
        let (q, kv, scores) = (p.q_shape(), p.kv_shape(), p.scores_shape());
        log.add(Out, Rows, &q, &rows.out, &results.out, OUTPUT);
        log.add(Lse, Rows, &p.lse_shape(), &rows.lse, &results.lse, OUTPUT);
        log.add(GradQuery, Rows, &q, &rows.q, &whole.q, GRADIENT);
        log.add(GradKey, Keys, &kv, &keys.k, &whole.k, GRADIENT);
        log.add(GradValue, Keys, &kv, &keys.v, &whole.v, GRADIENT);
        if let (Some(exact), Some(actual)) = (&keys.scores, &whole.scores) {
            log.add(GradScores, Keys, &scores, exact, actual, GRADIENT);
        }
        log.add_all(GradQuery, &q, &rows.q, &of_rows.q);
        log.add_all(GradKey, &kv, &rows.k, &of_rows.k);
        log.add_all(GradValue, &kv, &rows.v, &of_rows.v);
        if let (Some(exact), Some(actual)) = (&rows.scores, &of_rows.scores) {
            log.add_all(GradScores, &scores, exact, actual);
        }
        log.finish()
    }
}

struct Log {
    element: ElementType,
    checked: Vec<Checked>,
    failures: Vec<(Sample, Failure)>,
}

impl Log {
    fn add(
        &mut self,
        tensor: TensorName,
        sample: Sample,
        shape: &[usize],
        exact: &Sampled,
        actual: &Values,
        factor: f64,
    ) {
        // LSE and the gradient of scores are always f32.
        let element = match shape.len() {
            4 => self.element,
            _ => ElementType::F32,
        };
        let actual = |row: usize, into: &mut [f64]| actual.row(row, into);
        let result = match tensor {
            TensorName::Lse => exact.compare_lse(shape, &actual),
            _ => exact.compare(&tensor.to_string(), shape, &actual, element, factor),
        };
        match result {
            Ok(worst) => self.checked.push(Checked {
                tensor,
                sample,
                rows: exact.rows.len(),
                worst,
            }),
            Err(failure) => self.failures.push((sample, failure)),
        }
    }

    /// A gradient of the sampled rows only: all others are zero.
    fn add_all(&mut self, tensor: TensorName, shape: &[usize], exact: &Sampled, actual: &Values) {
        self.add(tensor, Sample::OfRows, shape, exact, actual, GRADIENT);
        let len = shape.iter().product::<usize>() / exact.width;
        let actual = |row: usize, into: &mut [f64]| actual.row(row, into);
        let Some((row, values)) = first_nonzero(&actual, len, exact.width, &exact.rows) else {
            return;
        };
        let column = values.iter().position(|&x| x != 0.0).unwrap_or(0);
        let failure = Failure {
            name: tensor.to_string(),
            shape: shape.into(),
            index: index_of(row * exact.width + column, shape),
            actual: values[column],
            exact: 0.0,
            bound: 0.0,
            failed: values.iter().filter(|&&x| x != 0.0).count(),
            len: values.len(),
        };
        self.failures.push((Sample::OfRows, failure));
    }

    fn finish(mut self) -> (Vec<Checked>, Vec<(Sample, Failure)>) {
        // First the failures beyond any bound: NaN, or values where nothing belongs.
        let ratio = |failure: &Failure| {
            let ratio = (failure.actual - failure.exact).abs() / failure.bound;
            if ratio.is_nan() { f64::INFINITY } else { ratio }
        };
        self.failures
            .sort_by(|(_, a), (_, b)| ratio(b).total_cmp(&ratio(a)));
        (self.checked, self.failures)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::AttentionOptions;
    use burn::tensor::{Device, f16};

    /// f16, 5 queries after 45 keys, 3 query heads on each kv head.
    fn small() -> Problem {
        let (q, kv) = ([2, 6, 5, 16], [2, 2, 50, 16]);
        let options = AttentionOptions::new().with_keep_window(9);
        Problem::new(&q, &kv, &kv, Some(&kv[..3]), ElementType::F16, &options).unwrap()
    }

    /// Failures after an element was spoiled, and its index.
    fn failures(
        spoil: impl FnOnce(&mut Results, &Expected) -> usize,
    ) -> (usize, Vec<(Sample, Failure)>) {
        let data = Data::new(&small(), 3);
        let rows = data.choose_rows(8, 4);
        let mut results = Results::new(&data, &rows, &Device::flex().autodiff()).unwrap();
        let expected = Expected::new(&data, &rows, 12, &results);
        assert!(expected.compare(&data.problem, &results).1.is_empty());
        let at = spoil(&mut results, &expected);
        (at, expected.compare(&data.problem, &results).1)
    }

    fn add(values: &mut Values, at: usize, error: f32) {
        match values {
            Values::F32(values) => values[at] += error,
            Values::F16(values) => values[at] = f16::from_f32(values[at].to_f32() + error),
            Values::Bf16(_) => unreachable!("the problem is f16"),
        }
    }

    fn flat(index: &[usize], shape: &[usize]) -> usize {
        index.iter().zip(shape).fold(0, |at, (i, n)| at * n + i)
    }

    /// Spoils one element of a sampled row, and expects exactly that one to be named.
    fn names(
        tensor: TensorName,
        sample: Sample,
        of: impl FnOnce(&Expected) -> &Sampled,
        values: impl FnOnce(&mut Results) -> &mut Values,
    ) {
        let (at, failures) = failures(|results, expected| {
            let sampled = of(expected);
            let at = sampled.rows[sampled.rows.len() / 2] * sampled.width + sampled.width / 2;
            add(values(results), at, 0.5);
            at
        });
        let [(found, failure)] = &failures[..] else {
            panic!("{tensor}: {failures:?}");
        };
        assert_eq!((*found, &failure.name), (sample, &tensor.to_string()));
        assert_eq!(flat(&failure.index, &failure.shape), at, "{failure}");
        assert_eq!(failure.failed, 1);
    }

    #[test]
    fn a_spoiled_element_of_each_tensor_is_named() {
        use Sample::{Keys, OfRows, Rows};
        use TensorName::{GradKey, GradQuery, GradScores, GradValue, Lse, Out};
        names(Out, Rows, |e| &e.rows.out, |r| &mut r.out);
        names(Lse, Rows, |e| &e.rows.lse, |r| &mut r.lse);
        names(GradQuery, Rows, |e| &e.rows.q, |r| &mut r.whole.q);
        names(GradKey, Keys, |e| &e.keys.k, |r| &mut r.whole.k);
        names(GradValue, Keys, |e| &e.keys.v, |r| &mut r.whole.v);
        names(
            GradScores,
            Keys,
            |e| e.keys.scores.as_ref().unwrap(),
            |r| r.whole.scores.as_mut().unwrap(),
        );
        names(GradQuery, OfRows, |e| &e.rows.q, |r| &mut r.of_rows.q);
        names(GradKey, OfRows, |e| &e.rows.k, |r| &mut r.of_rows.k);
        names(GradValue, OfRows, |e| &e.rows.v, |r| &mut r.of_rows.v);
        names(
            GradScores,
            OfRows,
            |e| e.rows.scores.as_ref().unwrap(),
            |r| r.of_rows.scores.as_mut().unwrap(),
        );
    }

    #[test]
    fn what_is_written_where_nothing_belongs_is_named() {
        let (at, failures) = failures(|results, expected| {
            let row = (0..200).find(|row| expected.rows.k.rows.binary_search(row).is_err());
            let at = row.expect("the window leaves keys out") * 16 + 3;
            add(&mut results.of_rows.k, at, 1e-3);
            at
        });
        let [(sample, failure)] = &failures[..] else {
            panic!("{failures:?}");
        };
        assert_eq!(*sample, Sample::OfRows);
        assert_eq!(failure.name, "the gradient of k");
        assert_eq!(flat(&failure.index, &failure.shape), at);
    }

    #[test]
    fn the_worst_failure_comes_first() {
        let (_, failures) = failures(|results, expected| {
            add(&mut results.out, expected.rows.out.rows[1] * 16, 0.1);
            add(&mut results.whole.q, expected.rows.q.rows[2] * 16, f32::NAN);
            add(&mut results.whole.v, expected.keys.v.rows[3] * 16, 100.0);
            0
        });
        let names: Vec<&str> = failures.iter().map(|(_, f)| f.name.as_str()).collect();
        assert_eq!(names, ["the gradient of q", "the gradient of v", "out"]);
    }
}
