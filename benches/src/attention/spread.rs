//! Differences between the gradients of repeated calls.

use super::buffers::Buffers;
use super::row::Phase;
use cubecl::client::Client;
use flash_dma_problem::ElementType;

/// Prints how far each gradient of `repeats` more calls of a backward phase deviates from the first call's. Relative
/// differences are those of elements that are at least a thousandth of the gradient's root mean square.
pub fn print(client: &Client, buffers: &Buffers, what: &str, phase: Phase, repeats: usize) {
    let gradients = || {
        buffers.launch(client, phase);
        let element = buffers.problem.element;
        let rows = ["dq", "dk", "dv"].into_iter().zip(&buffers.grads);
        let rows = rows.map(|(name, tensor)| (name, tensor.read_as(client, element)));
        let scores = (buffers.grad_scores.iter())
            .map(|tensor| ("dscores", tensor.read_as(client, ElementType::F32)));
        rows.chain(scores).collect::<Vec<_>>()
    };
    let first = gradients();
    let mut spreads: Vec<_> = (first.iter())
        .map(|(_, values)| Spread::new(values))
        .collect();
    for _ in 0..repeats {
        for ((spread, (_, first)), (_, values)) in spreads.iter_mut().zip(&first).zip(gradients()) {
            spread.add(first, &values);
        }
    }
    for (spread, (name, _)) in spreads.iter().zip(&first) {
        let differing = spread.differs.iter().filter(|differs| **differs).count();
        println!(
            "{what} {name:8} {repeats} repeats: at most {:.3e} ({:.3e} relative), rms {:.3e}, {:.2} % of the elements differ",
            spread.absolute,
            spread.relative,
            spread.rms,
            100.0 * differing as f64 / spread.differs.len().max(1) as f64,
        );
    }
}

/// Deviation of one gradient over repeated calls from the first call's.
struct Spread {
    /// Greatest difference of an element.
    absolute: f32,
    /// Greatest difference relative to the element.
    relative: f32,
    /// Root mean square of the gradient.
    rms: f32,
    /// Elements that differ in some repeat.
    differs: Vec<bool>,
}

impl Spread {
    fn new(first: &[f32]) -> Self {
        let squares: f64 = first.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        Self {
            absolute: 0.0,
            relative: 0.0,
            rms: (squares / first.len().max(1) as f64).sqrt() as f32,
            differs: vec![false; first.len()],
        }
    }

    fn add(&mut self, first: &[f32], values: &[f32]) {
        for ((x, y), differs) in first.iter().zip(values).zip(&mut self.differs) {
            if x.to_bits() == y.to_bits() {
                continue;
            }
            *differs = true;
            let apart = (x - y).abs();
            self.absolute = self.absolute.max(apart);
            if x.abs() >= 1e-3 * self.rms {
                self.relative = self.relative.max(apart / x.abs());
            }
        }
    }
}
