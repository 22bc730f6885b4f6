//! What is compared.

use flash_dma_kernels::product::{Choice, Instruction, Route, Routine, Tile, Tiling};

/// A route, in a number of parts; `None` is what the library chooses.
pub type Candidate = Option<Choice>;

/// Its name, without its parts.
pub fn name(candidate: Candidate) -> String {
    let Some(choice) = candidate else {
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

/// The candidate in another number of parts, into which it cuts the sums; the rule decides by itself.
pub fn in_parts(candidate: Candidate, parts: usize) -> Candidate {
    candidate.map(|choice| Choice { parts, ..choice })
}

/// A route in one part.
pub const fn whole(route: Route) -> Candidate {
    Some(Choice { route, parts: 1 })
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
    let mut all = vec![None, whole(Route::FewRows), whole(Route::Standard)];
    all.extend(Tile::ALL.map(|tile| whole(Route::Wgmma(tile))));
    all
}

/// All candidates, those that matter most first.
pub fn all() -> Vec<Candidate> {
    let mut all = vec![None, whole(Route::Standard)];
    all.extend(Tile::ALL.map(|tile| whole(Route::Wgmma(tile))));
    let inferred = |routine: Routine| whole(Route::Library(routine, None));
    let sized = |routine: Routine| {
        let instruction = routine.instruction();
        let sizes = match instruction {
            Instruction::Mma => &MMA_SIZES[..],
            Instruction::Cmma => &CMMA_SIZES[..],
        };
        sizes.iter().map(move |&(partition, planes)| {
            let tiling = Tiling {
                instruction,
                partition,
                planes,
            };
            whole(Route::Library(routine, Some(tiling)))
        })
    };
    let first_sizes = 2;
    all.extend(VARIED.map(inferred));
    all.extend((VARIED.into_iter()).flat_map(|routine| sized(routine).take(first_sizes)));
    let others = Routine::ALL.iter().copied();
    all.extend(
        others
            .filter(|routine| !VARIED.contains(routine))
            .map(inferred),
    );
    all.extend((VARIED.into_iter()).flat_map(|routine| sized(routine).skip(first_sizes)));
    all
}
