//! The units of a cube that share a list or a sum: planes that count themselves by ballot and scan.

use cubecl::client::Client;
use cubecl::ir::features::Plane;
use cubecl::prelude::*;

/// Lanes of a plane that these kernels can use: a ballot is one word.
const LANES: usize = 32;

/// The planes of a cube. Without plane operations they have one unit; the kernels are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Team {
    /// Units per plane: 32, or 1.
    pub lanes: usize,
    pub planes: usize,
}

impl Team {
    /// `planes` planes if the device's have 32 lanes and cubes may have that many units. Otherwise planes of one unit:
    /// 16, to fill the planes of a GPU of another kind, or 1 where units are threads of a processor.
    pub(crate) fn new(client: &Client, planes: usize) -> Self {
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

    pub(crate) fn units(&self) -> usize {
        self.lanes * self.planes
    }

    pub(crate) fn cube_dim(&self) -> CubeDim {
        CubeDim::new_1d(self.units() as u32)
    }
}

#[derive(CubeType, Clone, Copy)]
pub(crate) struct Member {
    pub plane: usize,
    pub lane: usize,
    /// The bits of the lanes before this one.
    pub before: u32,
}

#[cube]
impl Member {
    pub(crate) fn this(#[comptime] team: Team) -> Member {
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

/// The sum of the values of this lane and of those before it. Every lane must take part.
#[cube]
pub(crate) fn sum_up_to(value: u32, member: &Member, #[comptime] team: Team) -> u32 {
    let mut sum = value;
    if comptime!(team.lanes > 1) {
        #[unroll]
        for step in 0..comptime!(team.lanes.ilog2()) {
            let distance = comptime!(1u32 << step);
            let other = plane_shuffle_up(sum, distance);
            sum += select(member.lane as u32 >= distance, other, 0u32);
        }
    }
    sum
}

/// The sum of the values of all lanes of the plane. Every lane must take part.
#[cube]
pub(crate) fn sum_of(value: u32, #[comptime] team: Team) -> u32 {
    let mut sum = value;
    if comptime!(team.lanes > 1) {
        sum = plane_sum(value);
    }
    sum
}

/// One bit per lane of the plane, set if its `flag` is. Every lane must take part.
#[cube]
pub(crate) fn ballot(flag: bool, #[comptime] team: Team) -> u32 {
    let mut bits = u32::cast_from(flag);
    if comptime!(team.lanes > 1) {
        bits = plane_ballot(flag).extract(0usize);
    }
    bits
}

/// The lanes of the plane whose `value`, below `2^bits`, is this lane's, one bit each. Every lane must take part.
#[cube]
pub(crate) fn same_lanes(value: u32, #[comptime] bits: u32, #[comptime] team: Team) -> u32 {
    let mut same = ballot(true, team);
    if comptime!(team.lanes > 1) {
        #[unroll]
        for bit in 0..bits {
            let is_set = value & comptime!(1u32 << bit) != 0u32;
            let set = ballot(is_set, team);
            same &= select(is_set, set, !set);
        }
    }
    same
}

/// The value of the first of `lanes`, at least one. Every lane must take part.
#[cube]
pub(crate) fn first_value(value: u32, lanes: u32, #[comptime] team: Team) -> u32 {
    let mut first = value;
    if comptime!(team.lanes > 1) {
        first = plane_shuffle(value, lanes.trailing_zeros());
    }
    first
}
