//! What is printed of a configuration. `benches/train_peer.py` prints the same keys, as far as PyTorch knows them.

use crate::Options;
use flash_dma_benches::kernel_kinds::Kind;
use flash_dma_benches::shares::{Launched, Share, Shares};
use flash_dma_benches::stats::Millis;
use serde::Serialize;
use std::collections::BTreeMap;

/// One configuration.
#[derive(Serialize)]
pub struct Row {
    /// Whose training step it is.
    pub implementation: String,
    /// The device, as Burn prints it.
    pub device: String,
    /// The configuration.
    #[serde(flatten)]
    pub options: Options,
    /// What the program was built with.
    #[serde(flatten)]
    pub features: Features,
    /// Trained numbers.
    pub parameters: usize,
    /// The first step, which compiles: from an idle device until it is idle again.
    pub first_step_ms: f64,
    /// The others.
    pub step_ms: Millis,
    /// Of the median.
    pub tokens_per_second: f64,
    /// The most memory that the allocator had reserved after a step; it gives none back.
    pub peak_bytes: Option<u64>,
    /// Memory in use.
    pub memory: Option<Memory>,
    /// The losses of the first and the last step.
    pub losses: [f64; 2],
    /// Where the time of a step goes.
    pub profile: Option<Profile>,
}

/// What the program was built with.
#[derive(Serialize)]
pub struct Features {
    /// Burn's fusion.
    pub fusion: bool,
    /// Burn's autotune.
    pub autotune: bool,
}

/// Memory in use, between phases of a step.
#[derive(Serialize)]
pub struct Memory {
    /// Before a step: parameters and the optimiser's state.
    pub state_bytes: u64,
    /// What the forward pass leaves for the backward pass.
    pub activation_bytes: u64,
}

/// Where the time of a step goes.
#[derive(Serialize)]
pub struct Profile {
    /// Launches of a step.
    pub launches: usize,
    /// Launches of which the device has no time.
    pub not_timed: usize,
    /// The sum of the kernels' times.
    pub kernels_ms: f64,
    /// The median step less that sum: what the device waits for the host, and gaps between kernels.
    pub host_gap_ms: f64,
    /// By phase: forward, backward, update.
    pub phases: BTreeMap<&'static str, Share>,
    /// By kind of kernel. All of the update counts as the optimiser's.
    pub kinds: BTreeMap<Kind, Share>,
    /// The kernels that take longest, by path.
    pub kernels: Vec<(String, Share)>,
}

impl Profile {
    /// The profile of a step's three phases; `step_ms` is the time of a step that was not watched.
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
            launches: phases.iter().map(|phase| phase.launched).sum(),
            not_timed: phases.iter().map(Launched::not_timed).sum(),
            kernels_ms: shares.total.ms,
            host_gap_ms: step_ms - shares.total.ms,
            phases: by_phase,
            kernels: shares.slowest(kernels),
            kinds: shares.kinds,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_dma_benches::shares::Launch;

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
        assert_eq!((profile.launches, profile.not_timed), (5, 1));
        assert_eq!((profile.kernels_ms, profile.host_gap_ms), (7.5, 2.5));
        let kinds = [
            (Kind::Product, 2, 6.0),
            (Kind::ElementWise, 2, 0.5),
            (Kind::Optimiser, 1, 1.0),
        ];
        for (kind, launches, ms) in kinds {
            let share = profile.kinds[&kind];
            assert_eq!((share.launches, share.ms), (launches, ms), "{kind:?}");
        }
        assert_eq!(profile.phases["backward"].ms, 4.0);
        assert_eq!(profile.kernels.len(), 1);
        assert_eq!(
            profile.kernels[0].0,
            "cubek_matmul::matmul_entry::MatmulEntry"
        );
    }
}
