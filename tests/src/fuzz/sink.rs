//! A sink logit of each query head, which has no key and takes a share of every row's weight.
//!
//! A row becomes `w = sigmoid(lse - logit)` times its keys' output, and its LSE is `ln(e^lse + e^logit)`. The gradients
//! follow from those of the keys by the chain rule.

use crate::Grads;
use crate::expected::Expected;
use flash_dma_problem::Problem;
use flash_dma_reference::Exact;

/// The sink of a problem's rows, `[batch, q_heads, q_len]`.
pub(super) struct Sink {
    rows: Vec<Row>,
    /// The gradients of the keys' outputs and of their LSEs.
    grads: Grads,
    /// The gradient of the logits, `[q_heads]`.
    grad_logits: Exact,
}

struct Row {
    logit: f64,
    lse: f64,
    /// The part of the weight that the keys keep.
    share: f64,
}

impl Sink {
    /// The sink for keys whose results are `of_keys`.
    pub(super) fn new(of_keys: &Expected, p: &Problem, logits: &[f64], grads: &Grads) -> Self {
        let (out, lse) = of_keys.rows();
        let (grad_out, grad_lse) = grads.parts();
        let head_of = |row: usize| row / p.q_len % p.q_heads;
        let row = |(row, &lse): (usize, &f64)| {
            let logit = logits[head_of(row)];
            let share = 1.0 / (1.0 + (logit - lse).exp());
            Row { logit, lse, share }
        };
        let rows: Vec<Row> = lse.iter().enumerate().map(row).collect();
        let zeros = || vec![0.0; p.q_heads];
        let (mut of_out, mut of_lse) = (Vec::new(), Vec::new());
        let (mut values, mut magnitude) = (zeros(), zeros());
        let width = p.head_dim;
        for (n, row) in rows.iter().enumerate() {
            let (out, grad) = (&out[n * width..][..width], &grad_out[n * width..][..width]);
            let dlse = grad_lse.map_or(0.0, |grad| grad[n]);
            let terms = out.iter().zip(grad).map(|(x, g)| x * g);
            let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
            let slope = row.share * (1.0 - row.share);
            let all = 1.0 - row.share;
            of_out.extend(grad.iter().map(|g| g * row.share));
            of_lse.push(sum * slope + dlse * row.share);
            let sensitivity = 1.0 + row.lse.abs().min(1e30) + row.logit.abs();
            values[head_of(n)] += dlse * all - sum * slope;
            // f32 has the difference of a share from 1 to an epsilon of 1.
            let lost = size * row.share + dlse.abs();
            magnitude[head_of(n)] += (dlse.abs() * all + size * slope) * sensitivity + lost;
        }
        Self {
            rows,
            grads: Grads {
                out: of_out,
                lse: Some(of_lse),
            },
            grad_logits: Exact { values, magnitude },
        }
    }

    pub(super) fn gradients(&self) -> &Grads {
        &self.grads
    }

    /// The results of keys and sink, from those of the keys for [these](Self::gradients) gradients.
    pub(super) fn added_to(self, mut of_keys: Expected) -> Expected {
        let rows = &self.rows;
        of_keys.change_rows(
            |row, out, magnitude| {
                let Row { logit, share, .. } = rows[row];
                for (x, size) in out.iter_mut().zip(magnitude) {
                    *size = share * (*size + x.abs() * (2.0 + logit.abs()));
                    *x *= share;
                }
            },
            |row, lse, magnitude| {
                let Row { logit, .. } = rows[row];
                let most = lse.max(logit);
                *lse = most + ((*lse - most).exp() + (logit - most).exp()).ln();
                *magnitude += 1.0 + logit.abs();
            },
            // The share is one more factor of a row's gradients, with an error of its own.
            3.0,
        );
        let naive = self.grad_logits.values.clone();
        of_keys.gradient("dsink", &[naive.len()], (self.grad_logits, naive));
        of_keys
    }
}
