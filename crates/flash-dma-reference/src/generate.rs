//! Seeded inputs, already rounded to the type that an engine gets.

use crate::{Inputs, Rng, round::round};
use flash_dma_problem::{ElementType, Problem};

/// The kind of a head's scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scores {
    /// Independent standard normal.
    Normal,
    /// Three distinct values, zero with both signs among them.
    Ties,
    /// One value.
    AllEqual,
    /// Normal; the last third and a few others are −∞.
    Padded,
    /// All −∞: nothing is attended.
    AllPadded,
    /// Normal with NaN at one key in eight; a few −∞.
    Nan,
    /// Normal, sorted ascending: every new key is selected and evicts the oldest.
    Increasing,
    /// Normal, sorted descending: the first keys stay forever.
    Decreasing,
    /// Rising with the index under noise: a soft sliding window.
    Recency,
    /// Falling with the index under noise: few of the later keys are ever selected.
    Fading,
    /// Normal times 1000, of either sign: one key takes nearly all of a row's weight.
    Large,
    /// Blocks of 32 keys alternate between high and low, so whole key tiles are inactive.
    Blocks,
    /// Normal; one run of keys in four is dealt to the head, and the others rank 12 lower.
    Turns,
}

impl Scores {
    /// All kinds.
    pub const ALL: [Self; 13] = [
        Self::Normal,
        Self::Ties,
        Self::AllEqual,
        Self::Padded,
        Self::AllPadded,
        Self::Nan,
        Self::Increasing,
        Self::Decreasing,
        Self::Recency,
        Self::Fading,
        Self::Large,
        Self::Blocks,
        Self::Turns,
    ];

    /// The scores of one head, each an f32.
    #[must_use]
    pub fn head(self, len: usize, rng: &mut Rng) -> Vec<f64> {
        let mut z: Vec<f64> = (0..len).map(|_| f64::from(rng.normal() as f32)).collect();
        match self {
            Self::Normal => {}
            Self::Ties => z.fill_with(|| [-1.0, -0.0, 0.0, 0.5][rng.below(4)]),
            Self::AllEqual => z.fill(0.25),
            Self::AllPadded => z.fill(f64::NEG_INFINITY),
            Self::Padded => change(&mut z, |j, z| {
                let hidden = 3 * j >= 2 * len || rng.below(10) == 0;
                if hidden { f64::NEG_INFINITY } else { z }
            }),
            Self::Nan => change(&mut z, |_, z| match rng.below(16) {
                0 | 1 => f64::NAN,
                2 => f64::NEG_INFINITY,
                _ => z,
            }),
            Self::Increasing => z.sort_by(f64::total_cmp),
            Self::Decreasing => z.sort_by(|a, b| b.total_cmp(a)),
            Self::Recency => change(&mut z, |j, z| z + 4.0 * j as f64 / len as f64),
            Self::Fading => change(&mut z, |j, z| z - 4.0 * j as f64 / len as f64),
            Self::Large => change(&mut z, |_, z| 1e3 * z),
            Self::Blocks => change(&mut z, |j, z| 0.1 * z + [2.0, -6.0][j / 32 % 2]),
            Self::Turns => {
                let (run, own) = ([1, 4, 16][rng.below(3)], rng.below(4));
                change(&mut z, |j, z| if j / run % 4 == own { z } else { z - 12.0 });
            }
        }
        z
    }
}

/// Changes each value by its index, to an f32.
fn change(values: &mut [f64], mut to: impl FnMut(usize, f64) -> f64) {
    for (j, z) in values.iter_mut().enumerate() {
        *z = f64::from(to(j, *z) as f32);
    }
}

/// `len` independent normal values of the element type with standard deviation `scale`.
#[must_use]
pub fn normal(len: usize, scale: f64, element: ElementType, rng: &mut Rng) -> Vec<f64> {
    (0..len)
        .map(|_| round(scale * rng.normal(), element))
        .collect()
}

/// Random inputs: `q`, `k` and `v` normal with standard deviation `scale` in the problem's element type, every head's
/// scores of the given kind (unused if the problem has none).
#[must_use]
pub fn inputs(problem: Problem, scores: Scores, scale: f64, seed: u64) -> Inputs {
    let mut rng = Rng::new(seed);
    let (p, element) = (problem, problem.element);
    let q_size = p.q_shape().iter().product();
    let kv_size = p.kv_shape().iter().product();
    Inputs {
        problem,
        q: normal(q_size, scale, element, &mut rng),
        k: normal(kv_size, scale, element, &mut rng),
        v: normal(kv_size, scale, element, &mut rng),
        scores: p.has_scores.then(|| {
            let heads = 0..p.batch * p.kv_heads;
            heads.flat_map(|_| scores.head(p.k_len, &mut rng)).collect()
        }),
    }
}

/// Random gradients of `out` (in the problem's element type) and of the LSE (f32).
#[must_use]
pub fn gradients(problem: &Problem, seed: u64) -> (Vec<f64>, Vec<f64>) {
    let mut rng = Rng::new(seed ^ 0x6772_6164);
    let size = problem.q_shape().iter().product();
    (
        normal(size, 1.0, problem.element, &mut rng),
        normal(size / problem.head_dim, 1.0, ElementType::F32, &mut rng),
    )
}
