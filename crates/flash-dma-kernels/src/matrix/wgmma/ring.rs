//! The barriers of a ring of stages in shared memory.

use crate::matrix::ptx::{shared_address, uniform, value};
use crate::matrix::wgmma::panel::publish;
use cubecl::prelude::*;

/// Two `mbarrier`s per stage: *full*, at which every copying unit arrives when its part of a tile has landed, and
/// *empty*, at which every unit arrives when it is done with the tile. Unlike with a barrier of the cube, a warpgroup
/// may thus be one tile ahead of another.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Ring {
    /// The shared-memory address of `[stages, 2]` barriers of 8 bytes.
    base: u32,
}

#[cube]
impl Ring {
    /// The barriers of `stages` stages: `fillers` units arrive at the full ones, `users` at the empty ones. All units
    /// of the cube call it; it ends with a barrier of the cube.
    pub(crate) fn new(
        #[comptime] stages: usize,
        #[comptime] fillers: usize,
        #[comptime] users: usize,
    ) -> Ring {
        let words = Shared::<[u64]>::new_aligned_slice(comptime!(2 * stages), 8usize);
        let base = uniform(shared_address(&words[0..1]) as usize) as u32;
        if UNIT_POS == 0 {
            #[unroll]
            for i in 0..comptime!(2 * stages) {
                gpu_asm!(
                    "mbarrier.init.shared::cta.b64 [{}], {n};",
                    in(_) value::<u32>(base + comptime!(8 * i as u32)),
                    n = const comptime!(if i % 2 == 0 { fillers } else { users }),
                    options(explicit_mem, reads_address_space shared, writes_address_space shared)
                );
            }
        }
        // Visible to the tensor memory accelerator as well.
        publish();
        sync_cube();
        Ring { base }
    }

    /// The address of the barrier that signals that `stage` is full.
    pub(crate) fn full(&self, stage: usize) -> u32 {
        self.base + 16 * stage as u32
    }

    /// Arrives at `stage`, whose phase completes once the `bytes` have landed that this unit is about to copy as boxes.
    pub(crate) fn arrive_expecting(&self, stage: usize, #[comptime] bytes: u32) {
        gpu_asm!(
            "{{ .reg .b64 t; mbarrier.arrive.expect_tx.shared::cta.b64 t, [{}], {n}; }}",
            in(_) value::<u32>(self.full(stage)),
            n = const bytes,
            options(explicit_mem, reads_address_space shared, writes_address_space shared)
        );
    }

    /// Arrives at `stage` once the `cp.async` copies that this unit has started have landed; it does not wait for them.
    pub(crate) fn arrive_copied(&self, stage: usize) {
        gpu_asm!(
            "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{}];",
            in(_) value::<u32>(self.full(stage)),
            options(explicit_mem, reads_address_space shared, writes_address_space shared)
        );
    }

    /// Arrives at `stage` with the data that this unit has stored there itself.
    pub(crate) fn arrive_stored(&self, stage: usize) {
        arrive(self.full(stage));
    }

    /// Signals that this unit is done with the tile in `stage`.
    pub(crate) fn arrive_empty(&self, stage: usize) {
        arrive(self.base + 16 * stage as u32 + 8);
    }

    /// Waits until `stage` has been filled for the `turn`-th time, from 0.
    pub(crate) fn wait_full(&self, stage: usize, turn: usize) {
        wait(self.full(stage), turn as u32 % 2);
    }

    /// Waits until all units are done with the `turn`-th fill of `stage`, from 0.
    pub(crate) fn wait_empty(&self, stage: usize, turn: usize) {
        wait(self.base + 16 * stage as u32 + 8, turn as u32 % 2);
    }
}

#[cube]
fn arrive(barrier: u32) {
    gpu_asm!(
        "{{ .reg .b64 t; mbarrier.arrive.shared::cta.b64 t, [{}]; }}",
        in(_) value::<u32>(barrier),
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

#[cube]
fn wait(barrier: u32, parity: u32) {
    gpu_asm!(
        "{{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [{}], {}; @!p bra AGAIN; }}",
        in(_) value::<u32>(barrier),
        in(_) value::<u32>(parity),
        options(explicit_mem, reads_address_space shared, writes_address_space shared)
    );
}

/// The order in which the warpgroups of a cube start their products: by index, each once per tile. This keeps them out
/// of step: one computes its exponentials while the tensor cores work for the others.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Turns {
    warpgroup: u32,
}

#[cube]
impl Turns {
    pub(crate) fn new() -> Turns {
        Turns {
            warpgroup: UNIT_POS_Y / 4,
        }
    }

    /// Waits until the warpgroup before this one, of `count`, has started the products of tile `tile`; the first waits
    /// for the last warpgroup's products of the previous tile.
    pub(crate) fn wait(&self, tile: usize, #[comptime] count: usize) {
        if comptime!(count > 1) && (self.warpgroup > 0 || tile > 0) {
            gpu_asm!(
                "bar.sync {}, 256;",
                in(_) value::<u32>(1 + self.warpgroup),
                options(explicit_mem, reads_address_space shared, writes_address_space shared)
            );
        }
    }

    /// Signals that this warpgroup has started the products of tile `tile` of `tiles`.
    pub(crate) fn pass(&self, tile: usize, tiles: usize, #[comptime] count: usize) {
        if comptime!(count > 1) {
            let last = self.warpgroup == comptime!(count as u32 - 1);
            if !last || tile + 1 < tiles {
                gpu_asm!(
                    "bar.arrive {}, 256;",
                    in(_) value::<u32>(select(last, 1u32, 2 + self.warpgroup)),
                    options(explicit_mem, reads_address_space shared, writes_address_space shared)
                );
            }
        }
    }
}
