//! Totals of launches, by kind and by kernel.

use crate::kernel_kinds::{Kind, path};
use serde::Serialize;
use std::collections::BTreeMap;

/// The launches of some work.
#[derive(Clone, Debug, Default)]
pub struct Launched {
    /// Number of launches.
    pub launched: usize,
    /// Timed launches, in order.
    pub timed: Vec<Launch>,
}

/// A launch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Launch {
    /// CubeCL's name of the kernel.
    pub name: &'static str,
    /// Device time, if measured.
    pub milliseconds: Option<f64>,
    /// End relative to the beginning of the measurement, if the device reports it.
    pub ended_ms: Option<f64>,
}

impl Launched {
    /// Number of launches without a time.
    pub fn not_timed(&self) -> usize {
        let timed = |launch: &&Launch| launch.milliseconds.is_some();
        self.launched - self.timed.iter().filter(timed).count()
    }

    /// Time from the begin of the first kernel to the end of the last.
    pub fn span_ms(&self) -> Option<f64> {
        let (first, last) = (self.timed.first()?, self.timed.last()?);
        Some(last.ended_ms? - (first.ended_ms? - first.milliseconds?))
    }
}

/// Launches of one kind, phase or kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Share {
    /// Number of launches.
    pub launches: usize,
    /// Sum of their device times.
    pub ms: f64,
}

impl Share {
    /// Adds a launch.
    pub fn add(&mut self, launch: &Launch) {
        self.launches += 1;
        self.ms += launch.milliseconds.unwrap_or_default();
    }
}

/// The kernels of some work.
#[derive(Serialize)]
pub struct Profile {
    /// Launches.
    pub launches: usize,
    /// Number of launches without a time.
    pub not_timed: usize,
    /// The sum of the kernels' times.
    pub kernels_ms: f64,
    /// By kind of kernel.
    pub kinds: BTreeMap<Kind, Share>,
    /// Slowest kernels, by path.
    pub kernels: Vec<(String, Share)>,
}

/// Launches by kind and by kernel.
#[derive(Clone, Debug, Default)]
pub struct Shares {
    /// All of them.
    pub total: Share,
    /// By kind of kernel.
    pub kinds: BTreeMap<Kind, Share>,
    kernels: BTreeMap<&'static str, Share>,
}

impl Shares {
    /// Adds a launch as one of a kind.
    pub fn add_as(&mut self, kind: Kind, launch: &Launch) {
        let of_kernel = self.kernels.entry(path(launch.name)).or_default();
        let of_kind = self.kinds.entry(kind).or_default();
        for share in [of_kernel, of_kind, &mut self.total] {
            share.add(launch);
        }
    }

    /// Adds a launch as one of the kind that its name implies.
    pub fn add(&mut self, launch: &Launch) {
        self.add_as(Kind::of(launch.name), launch);
    }

    /// Profile of the added launches, with at most `kernels` kernels.
    pub fn profile(self, launched: &[Launched], kernels: usize) -> Profile {
        Profile {
            launches: launched.iter().map(|phase| phase.launched).sum(),
            not_timed: launched.iter().map(Launched::not_timed).sum(),
            kernels_ms: self.total.ms,
            kernels: self.slowest(kernels),
            kinds: self.kinds,
        }
    }

    /// Slowest kernels, by path, at most `count`.
    fn slowest(&self, count: usize) -> Vec<(String, Share)> {
        let named = |(name, share): (&&str, &Share)| ((*name).to_owned(), *share);
        let mut slowest: Vec<_> = self.kernels.iter().map(named).collect();
        slowest.sort_by(|(_, a), (_, b)| b.ms.total_cmp(&a.ms));
        slowest.truncate(count);
        slowest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(name: &'static str, milliseconds: f64, ended_ms: f64) -> Launch {
        Launch {
            name,
            milliseconds: Some(milliseconds),
            ended_ms: Some(ended_ms),
        }
    }

    #[test]
    fn launches_span_from_the_first_begin_to_the_last_end() {
        let launched = Launched {
            launched: 3,
            timed: vec![launch("a", 2.0, 10.0), launch("b", 1.0, 13.5)],
        };
        assert_eq!(launched.span_ms(), Some(5.5));
        assert_eq!(launched.not_timed(), 1);
        assert_eq!(Launched::default().span_ms(), None);
    }

    #[test]
    fn launches_add_up_by_kind_and_by_kernel() {
        let mut shares = Shares::default();
        for (name, ms) in [
            ("cubek_matmul::a::A<f32>", 1.0),
            ("cubek_matmul::a::A<bf16>", 2.0),
            ("cubek_reduce::b::B", 4.0),
        ] {
            shares.add(&launch(name, ms, ms));
        }
        let share = |launches, ms| Share { launches, ms };
        assert_eq!(shares.total, share(3, 7.0));
        let product = share(2, 3.0);
        assert_eq!(shares.kinds[&Kind::Product], product);
        let slowest = shares.slowest(2);
        assert_eq!(slowest[0].0, "cubek_reduce::b::B");
        assert_eq!(slowest[1], ("cubek_matmul::a::A".to_owned(), product));
        assert_eq!(shares.slowest(1).len(), 1);
    }
}
