//! What is compared.

use flash_dma_kernels::product::{Choice, Instruction, Route, Routine, Tile, Tiling};

/// A way to multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Candidate {
    /// What the library chooses.
    Rule,
    /// One route, in a number of parts.
    Forced(Choice),
}

impl Candidate {
    /// Its name, without its parts.
    pub fn name(self) -> String {
        let Self::Forced(choice) = self else {
            return "rule".into();
        };
        match choice.route {
            Route::Standard => "standard".into(),
            Route::FewRows => "few-rows".into(),
            Route::Wgmma(tile) => format!("wgmma-{}", tile.columns()),
            Route::Library(routine, None) => routine.name().into(),
            Route::Library(routine, Some(tiling)) => {
                let Tiling {
                    partition: [m, n, k],
                    planes: [pm, pn],
                    ..
                } = tiling;
                format!("{}[{m}x{n}x{k} {pm}x{pn}]", routine.name())
            }
            other => format!("{other:?}"),
        }
    }

    /// Into how many parts it cuts the sums; `None` if the rule decides.
    pub fn parts(self) -> Option<usize> {
        match self {
            Self::Rule => None,
            Self::Forced(choice) => Some(choice.parts),
        }
    }

    /// With another number of parts.
    pub fn in_parts(self, parts: usize) -> Self {
        match self {
            Self::Rule => self,
            Self::Forced(choice) => Self::Forced(Choice { parts, ..choice }),
        }
    }
}

/// Sizes for `mma.sync`, whose tile is 16 x 8 x 16: partition of a plane, then planes of a cube.
const MMA_SIZES: [([u32; 3], [u32; 2]); 8] = [
    ([2, 16, 2], [4, 1]),
    ([4, 8, 2], [2, 2]),
    ([2, 8, 4], [4, 1]),
    ([2, 16, 4], [4, 1]),
    ([2, 16, 2], [8, 1]),
    ([4, 16, 2], [4, 1]),
    ([1, 16, 2], [8, 1]),
    ([2, 8, 2], [8, 1]),
];

/// Sizes for WMMA, 16 x 16 x 16.
const CMMA_SIZES: [([u32; 3], [u32; 2]); 3] = [
    ([2, 8, 2], [4, 1]),
    ([4, 4, 2], [2, 2]),
    ([2, 8, 2], [8, 1]),
];

/// The routines whose sizes are varied.
const VARIED: [Routine; 8] = [
    Routine::SpecializedTmaMma,
    Routine::DoubleTmaMma,
    Routine::DoubleCyclicMma,
    Routine::SpecializedCyclicMma,
    Routine::DoubleAsyncCyclicMma,
    Routine::OrderedDoubleMma,
    Routine::SimpleTmaMma,
    Routine::DoubleCyclicCmma,
];

/// The candidates of a decoding step.
pub fn decoding() -> Vec<Candidate> {
    let forced = |route| Candidate::Forced(Choice { route, parts: 1 });
    let mut all = vec![
        Candidate::Rule,
        forced(Route::FewRows),
        forced(Route::Standard),
    ];
    all.extend(Tile::ALL.map(|tile| forced(Route::Wgmma(tile))));
    all
}

/// All candidates, those that matter most first.
pub fn all() -> Vec<Candidate> {
    let forced = |route| Candidate::Forced(Choice { route, parts: 1 });
    let mut all = vec![Candidate::Rule, forced(Route::Standard)];
    all.extend(Tile::ALL.map(|tile| forced(Route::Wgmma(tile))));
    let inferred = |routine: &Routine| forced(Route::Library(*routine, None));
    all.extend(VARIED.iter().map(inferred));
    let first_sizes = 2;
    let sized = |routine: Routine, sizes: &[([u32; 3], [u32; 2])]| {
        let instruction = routine.instruction();
        let with = |&(partition, planes): &([u32; 3], [u32; 2])| {
            let tiling = Tiling {
                instruction,
                partition,
                planes,
            };
            forced(Route::Library(routine, Some(tiling)))
        };
        sizes.iter().map(with).collect::<Vec<_>>()
    };
    let sizes_of = |routine: Routine| match routine.instruction() {
        Instruction::Mma => &MMA_SIZES[..],
        Instruction::Cmma => &CMMA_SIZES[..],
    };
    for routine in VARIED {
        all.extend(sized(routine, &sizes_of(routine)[..first_sizes]));
    }
    let others = Routine::ALL.iter();
    all.extend(
        others
            .filter(|routine| !VARIED.contains(routine))
            .map(inferred),
    );
    for routine in VARIED {
        all.extend(sized(routine, &sizes_of(routine)[first_sizes..]));
    }
    all
}
