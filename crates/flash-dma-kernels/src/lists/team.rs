//! How the units of a cube share a list: planes that count themselves by ballot.

use cubecl::client::Client;
use cubecl::ir::features::Plane;
use cubecl::prelude::*;

/// Lanes of a plane that these kernels can use: a ballot is one word.
const LANES: usize = 32;

/// The planes of a cube. A runtime without plane operations has planes of one unit; the kernels are the
/// same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Team {
    /// Units a plane: 32, or 1.
    pub lanes: usize,
    /// Planes a cube.
    pub planes: usize,
}

impl Team {
    /// `planes` planes if the device's have 32 lanes and cubes may have as many units. Else planes of
    /// one unit: 16, to fill the planes of a GPU of another kind, or 1 where units are threads of a
    /// processor.
    pub(super) fn new(client: &Client, planes: usize) -> Self {
        let properties = client.properties();
        let hardware = &properties.hardware;
        let has_lanes = [hardware.plane_size_min, hardware.plane_size_max] == [LANES as u32; 2]
            && properties.features.plane.contains(Plane::Ops);
        let (lanes, planes) = match hardware.plane_size_max {
            _ if has_lanes && hardware.max_units_per_cube as usize >= LANES * planes => {
                (LANES, planes)
            }
            0 | 1 => (1, 1),
            _ => (1, 16),
        };
        Self { lanes, planes }
    }

    /// The units of a cube.
    pub(super) fn cube_dim(&self) -> CubeDim {
        CubeDim::new_1d((self.lanes * self.planes) as u32)
    }
}

/// Where a unit is in its team.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Member {
    pub plane: usize,
    pub lane: usize,
    /// The bits of the lanes before this one.
    pub before: u32,
}

#[cube]
impl Member {
    pub(super) fn this(#[comptime] team: Team) -> Member {
        let mut plane = UNIT_POS as usize;
        let mut lane = 0usize;
        if comptime!(team.lanes > 1) {
            plane = PLANE_POS as usize;
            lane = UNIT_POS_PLANE as usize;
        }
        Member {
            plane,
            lane,
            before: (1u32 << lane as u32) - 1u32,
        }
    }
}

/// A bit for each lane of the plane: whether its `flag` is set. Every lane must take part.
#[cube]
pub(super) fn ballot(flag: bool, #[comptime] team: Team) -> u32 {
    let mut bits = u32::cast_from(flag);
    if comptime!(team.lanes > 1) {
        bits = plane_ballot(flag).extract(0usize);
    }
    bits
}
