//! How much the gradients of repeated calls differ.

use crate::buffers::{Buffers, Tensor, decode, read};
use cubecl::client::Client;
use flash_dma_problem::ElementType;
use std::fmt;

/// How far one gradient of repeated calls deviates from the first call's.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    /// The name of the gradient.
    pub name: &'static str,
    /// Calls compared with the first.
    pub repeats: usize,
    /// The greatest absolute difference of an element.
    pub absolute: f32,
    /// The greatest difference relative to the element, of elements that are at least a thousandth of
    /// the gradient's root mean square.
    pub relative: f32,
    /// The root mean square of the gradient.
    pub rms: f32,
    /// The share of elements that differ in some repeat.
    pub differing: f64,
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:8} {} repeats: at most {:.3e} ({:.3e} relative), rms {:.3e}, {:.2} % of the elements differ",
            self.name,
            self.repeats,
            self.absolute,
            self.relative,
            self.rms,
            100.0 * self.differing
        )
    }
}

/// The spread of every gradient over `repeats` more calls of `backward`.
pub fn spread(
    client: &Client,
    buffers: &Buffers,
    backward: fn(&Buffers, &Client),
    repeats: usize,
) -> Vec<Spread> {
    let gradients = || {
        backward(buffers, client);
        let element = buffers.problem.element;
        let values = |tensor: &Tensor, element| decode(&read(client, tensor), element);
        let [q, k, v] = buffers
            .grads
            .each_ref()
            .map(|tensor| values(tensor, element));
        let mut all = vec![("dq", q), ("dk", k), ("dv", v)];
        if let Some(scores) = &buffers.grad_scores {
            all.push(("dscores", values(scores, ElementType::F32)));
        }
        all
    };
    let first = gradients();
    let mut spreads: Vec<Spread> = first
        .iter()
        .map(|(name, values)| Spread {
            name,
            repeats,
            absolute: 0.0,
            relative: 0.0,
            rms: rms(values),
            differing: 0.0,
        })
        .collect();
    let mut differs: Vec<Vec<bool>> = (first.iter())
        .map(|(_, values)| vec![false; values.len()])
        .collect();
    for _ in 0..repeats {
        for (n, (_, values)) in gradients().into_iter().enumerate() {
            let spread = &mut spreads[n];
            for (at, (x, y)) in first[n].1.iter().zip(&values).enumerate() {
                if x.to_bits() == y.to_bits() {
                    continue;
                }
                differs[n][at] = true;
                let apart = (x - y).abs();
                spread.absolute = spread.absolute.max(apart);
                if x.abs() >= 1e-3 * spread.rms {
                    spread.relative = spread.relative.max(apart / x.abs());
                }
            }
        }
    }
    for (spread, differs) in spreads.iter_mut().zip(&differs) {
        let count = differs.iter().filter(|differs| **differs).count();
        spread.differing = count as f64 / differs.len().max(1) as f64;
    }
    spreads
}

fn rms(values: &[f32]) -> f32 {
    let squares: f64 = values.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    (squares / values.len().max(1) as f64).sqrt() as f32
}
