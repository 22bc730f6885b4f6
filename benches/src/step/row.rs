//! The printed row of a configuration. `benches/train_peer.py` prints the same keys, as far as PyTorch knows them.

use super::Options;
use crate::kernel_kinds::Kind;
use crate::model::Origin;
use crate::shares::{self, Launched, Share, Shares};
use crate::stats::Millis;
use serde::Serialize;
use std::collections::BTreeMap;

/// One configuration.
#[derive(Serialize)]
pub struct Row {
    /// Origin of the measurement.
    #[serde(flatten)]
    pub origin: Origin,
    /// The configuration.
    #[serde(flatten)]
    pub options: Options,
    /// Number of trained parameters.
    pub parameters: usize,
    /// First step, which compiles: from idle device to idle device.
    pub first_step_ms: f64,
    /// The other steps.
    pub step_ms: Millis,
    /// From the median.
    pub tokens_per_second: f64,
    /// Maximum memory that the allocator had reserved after a step; it gives none back.
    pub peak_bytes: Option<u64>,
    /// Memory in use.
    pub memory: Option<Memory>,
    /// Losses of the first and the last step.
    pub losses: [f64; 2],
    /// Profile of a step.
    pub profile: Option<Profile>,
}

/// Memory in use, between phases of a step.
#[derive(Serialize)]
pub struct Memory {
    /// Before a step: parameters and the optimiser's state.
    pub state_bytes: u64,
    /// Memory that the forward pass leaves for the backward pass.
    pub activation_bytes: u64,
}

/// Profile of a step.
#[derive(Serialize)]
pub struct Profile {
    /// By kind and by kernel. The whole update counts as the optimiser's.
    #[serde(flatten)]
    pub all: shares::Profile,
    /// The median step minus the kernels' times: waiting for the host, and gaps between kernels.
    pub host_gap_ms: f64,
    /// By phase: forward, backward, update.
    pub phases: BTreeMap<&'static str, Share>,
}

impl Profile {
    /// Profile of a step's three phases; `step_ms` is the time of a step without profiling.
    pub fn new(phases: &[Launched; 3], step_ms: f64, kernels: usize) -> Self {
        let (mut by_phase, mut shares) = (BTreeMap::new(), Shares::default());
        for (name, phase) in ["forward", "backward", "update"].into_iter().zip(phases) {
            let of_phase: &mut Share = by_phase.entry(name).or_default();
            for launch in &phase.timed {
                of_phase.add(launch);
                match name {
                    "update" => shares.add_as(Kind::Optimiser, launch),
                    _ => shares.add(launch),
                }
            }
        }
        Self {
            host_gap_ms: step_ms - shares.total.ms,
            phases: by_phase,
            all: shares.profile(phases, kernels),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shares::Launch;

    fn phase(launches: &[(&'static str, Option<f64>)]) -> Launched {
        let launch = |&(name, milliseconds)| Launch {
            name,
            milliseconds,
            ended_ms: None,
        };
        Launched {
            launched: launches.len(),
            timed: launches.iter().map(launch).collect(),
        }
    }

    #[test]
    fn a_profile_adds_up_by_phase_and_by_kind() {
        let product = "cubek_matmul::matmul_entry::MatmulEntry<f32>";
        let fused = "burn_cubecl_fusion::optim::elemwise_fuse::ElemwiseFuse";
        let phases = [
            phase(&[(product, Some(2.0)), (fused, Some(0.5))]),
            phase(&[(product, Some(4.0)), (fused, None)]),
            phase(&[(fused, Some(1.0))]),
        ];
        let profile = Profile::new(&phases, 10.0, 1);
        let all = &profile.all;
        assert_eq!((all.launches, all.not_timed), (5, 1));
        assert_eq!((all.kernels_ms, profile.host_gap_ms), (7.5, 2.5));
        let kinds = [
            (Kind::Product, 2, 6.0),
            (Kind::ElementWise, 2, 0.5),
            (Kind::Optimiser, 1, 1.0),
        ];
        for (kind, launches, ms) in kinds {
            let share = all.kinds[&kind];
            assert_eq!((share.launches, share.ms), (launches, ms), "{kind:?}");
        }
        assert_eq!(profile.phases["backward"].ms, 4.0);
        assert_eq!(all.kernels.len(), 1);
        assert_eq!(all.kernels[0].0, "cubek_matmul::matmul_entry::MatmulEntry");
    }
}
