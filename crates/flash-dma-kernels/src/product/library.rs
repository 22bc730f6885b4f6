//! CubeK's products.

use crate::host::check::elem_type;
use crate::host::engine::{Engine, is_allowed};
use cubecl::client::Client;
use cubecl::prelude::TensorBinding;
use cubek_matmul::definition::{MatmulElems, MatmulGlobalElems, MatmulProblem};
use cubek_matmul::launch::launch_ref;
use cubek_matmul::multi_level;
use cubek_matmul::multi_level::components::global::{InputLoadFlow, LoadFlows};
use cubek_matmul::multi_level::components::stage::PartitionBuffering;
use cubek_matmul::multi_level::components::tile::TileMatmulKind;
use cubek_matmul::multi_level::definition::{BatchMatmulBlueprint, TilingScheme};
use cubek_matmul::multi_level::routines::select_swizzle;
use cubek_matmul::multi_level::stage::SwizzleModes;
use cubek_matmul::routine::BlueprintStrategy;
use cubek_matmul::strategy::Strategy;
use cubek_matmul::tiled;
use cubek_matmul::tiled::cmma::CmmaStrategy;
use cubek_std::cube_count::{CubeCountStrategy, GlobalOrder, HypercubeBlueprint, SmAllocation};
use cubek_std::{InputBinding, MatrixLayout};
use flash_dma_problem::ElementType;

macro_rules! routines {
    ($($name:ident)*) => {
        /// A routine of CubeK on tensor cores, by the name of its strategy there: how the tiles are buffered, how they are
        /// copied, and the instruction.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(missing_docs)]
        pub enum Routine {
            $($name,)*
            /// The routine of the tile language, by plain loads.
            TiledCmma,
            /// The same by `cp.async`.
            TiledAsyncCmma,
            /// The same by the tensor memory accelerator.
            TiledTmaCmma,
        }

        impl Routine {
            /// All routines.
            pub const ALL: &'static [Self] = &[
                $(Self::$name,)*
                Self::TiledCmma, Self::TiledAsyncCmma, Self::TiledTmaCmma,
            ];

            /// Its name.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)*
                    Self::TiledCmma => "TiledCmma",
                    Self::TiledAsyncCmma => "TiledAsyncCmma",
                    Self::TiledTmaCmma => "TiledTmaCmma",
                }
            }

            fn inferred(self) -> Strategy {
                match self {
                    $(Self::$name => multi_level::Strategy::$name(BlueprintStrategy::default()).into(),)*
                    Self::TiledCmma => tiled_cmma(CmmaStrategy::default()),
                    Self::TiledAsyncCmma => tiled_cmma(CmmaStrategy::async_copy()),
                    Self::TiledTmaCmma => tiled_cmma(CmmaStrategy::tma()),
                }
            }

            /// With a blueprint; the routines of the tile language take none of this kind.
            fn forced(self, blueprint: BatchMatmulBlueprint) -> Option<Strategy> {
                match self {
                    $(Self::$name => {
                        Some(multi_level::Strategy::$name(BlueprintStrategy::Forced(blueprint)).into())
                    })*
                    Self::TiledCmma | Self::TiledAsyncCmma | Self::TiledTmaCmma => None,
                }
            }
        }
    };
}

routines! {
    SimpleCyclicCmma SimpleCyclicMma SimpleStridedCmma SimpleStridedMma SimpleTilewiseCmma SimpleTilewiseMma
    SimpleAsyncStridedCmma SimpleAsyncStridedMma SimpleAsyncCyclicCmma SimpleAsyncCyclicMma SimpleTmaCmma SimpleTmaMma
    DoubleCyclicCmma DoubleCyclicMma DoubleTilewiseCmma DoubleTilewiseMma DoubleHybridCmma DoubleHybridMma
    DoubleAsyncCyclicCmma DoubleAsyncCyclicMma DoubleAsyncStridedCmma DoubleAsyncStridedMma DoubleTmaCmma DoubleTmaMma
    SpecializedCyclicCmma SpecializedCyclicMma SpecializedStridedCmma SpecializedStridedMma SpecializedTmaCmma
    SpecializedTmaMma OrderedDoubleCmma OrderedDoubleMma
}

fn tiled_cmma(strategy: CmmaStrategy) -> Strategy {
    tiled::Strategy::Cmma(BlueprintStrategy::Inferred(strategy)).into()
}

/// The instruction of a [`Routine`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Instruction {
    /// WMMA, 16 x 16 x 16.
    Cmma,
    /// `mma.sync`, 16 x 8 x 16.
    Mma,
}

/// Sizes of a [`Routine`], in place of its own choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tiling {
    /// The instruction, which must be the routine's.
    pub instruction: Instruction,
    /// Instructions of a plane along m, n and k.
    pub partition: [u32; 3],
    /// Planes of a cube along m and n.
    pub planes: [u32; 2],
}

impl Tiling {
    /// The rows and columns that one cube computes.
    #[must_use]
    pub fn tile(&self) -> [usize; 2] {
        let [m, n, _] = self.instruction.sizes();
        [
            (m * self.partition[0] * self.planes[0]) as usize,
            (n * self.partition[1] * self.planes[1]) as usize,
        ]
    }
}

impl Instruction {
    fn sizes(self) -> [u32; 3] {
        match self {
            Self::Cmma => [16, 16, 16],
            Self::Mma => [16, 8, 16],
        }
    }
}

impl Routine {
    /// Its instruction.
    #[must_use]
    pub fn instruction(self) -> Instruction {
        if self.name().ends_with("Cmma") {
            Instruction::Cmma
        } else {
            Instruction::Mma
        }
    }

    /// Whether the tensor memory accelerator copies its operands.
    #[must_use]
    pub fn copies_boxes(self) -> bool {
        self.name().contains("Tma")
    }

    /// K-stages that it consumes per iteration.
    fn stages(self) -> u32 {
        match self.name().starts_with("Simple") {
            true => 1,
            false => 2,
        }
    }
}

/// A product of CubeK: A `[(batch,) m, k]`, B `[(batch,) k, n]`, out `[(batch,) m, n]`.
pub(super) struct LibraryProduct {
    pub a: TensorBinding,
    pub b: TensorBinding,
    pub element: ElementType,
    pub out: TensorBinding,
    pub out_element: ElementType,
}

impl LibraryProduct {
    /// Launches a routine, or returns why it refuses.
    pub(super) fn by(
        &self,
        client: &Client,
        routine: Routine,
        tiling: Option<Tiling>,
    ) -> Result<(), String> {
        let strategy = match tiling {
            None => routine.inferred(),
            Some(tiling) => {
                let blueprint = self.blueprint(client, routine, tiling)?;
                (routine.forced(blueprint)).ok_or("it takes no sizes")?
            }
        };
        self.launch(client, &strategy)
    }

    /// Launches what Burn's products take without autotune, or returns why nothing serves.
    ///
    /// It is CubeK's `Strategy::Auto`, but what refuses a product is followed by the next routine where that panics, and
    /// [`ENGINE_VARIABLE`](crate::host::engine::ENGINE_VARIABLE) may exclude the tensor cores.
    pub(super) fn standard(&self, client: &Client) -> Result<(), String> {
        use multi_level::Strategy as Kind;
        let tensor_cores = Kind::SimpleCyclicCmma(BlueprintStrategy::default());
        let units = Kind::SimpleUnit(BlueprintStrategy::default());
        let mut refused = Vec::new();
        let kinds = [tensor_cores, units, Kind::Naive];
        let excluded = usize::from(!is_allowed(Engine::Mma));
        for kind in kinds.into_iter().skip(excluded) {
            match self.launch(client, &kind.into()) {
                Ok(()) => return Ok(()),
                Err(why) => refused.push(why),
            }
        }
        Err(refused.join("; "))
    }

    fn launch(&self, client: &Client, strategy: &Strategy) -> Result<(), String> {
        let element = elem_type(self.element);
        let mut elements = MatmulElems::from_globals(&self.globals());
        debug_assert_eq!(elements.acc_global, elem_type(self.out_element));
        launch_ref(
            strategy,
            client,
            InputBinding::new(self.a.clone(), element),
            InputBinding::new(self.b.clone(), element),
            self.out.clone(),
            &mut elements,
        )
        .map_err(|error| error.to_string().trim().to_owned())
    }

    fn globals(&self) -> MatmulGlobalElems {
        let element = elem_type(self.element);
        MatmulGlobalElems {
            lhs: element,
            rhs: element,
            out: elem_type(self.out_element),
        }
    }

    /// As CubeK's own selection builds one, with other sizes.
    fn blueprint(
        &self,
        client: &Client,
        routine: Routine,
        tiling: Tiling,
    ) -> Result<BatchMatmulBlueprint, String> {
        if tiling.instruction != routine.instruction() {
            return Err("the sizes are those of another instruction".into());
        }
        let [tile_m, tile_n, tile_k] = tiling.instruction.sizes();
        let kind = match tiling.instruction {
            Instruction::Cmma => TileMatmulKind::Cmma,
            Instruction::Mma => TileMatmulKind::Mma,
        };
        let size = self.element.size();
        let address = (self.a.required_address_type(size))
            .max(self.b.required_address_type(size))
            .max(self.out.required_address_type(self.out_element.size()));
        let problem = MatmulProblem::from_shapes_and_strides(
            self.a.shape.clone(),
            self.b.shape.clone(),
            self.out.shape.clone(),
            self.a.strides.clone(),
            self.b.strides.clone(),
            self.out.strides.clone(),
            self.globals(),
            address,
            None,
            None,
        )
        .map_err(|error| error.to_string())?;
        let ([pm, pn, pk], [planes_m, planes_n]) = (tiling.partition, tiling.planes);
        let scheme = TilingScheme::builder()
            .with_tile_size((tile_m, tile_n, tile_k).into())
            .with_partition_size((pm, pn, pk).into())
            .with_stage_size((planes_m, planes_n, 1).into())
            .build()?;
        let hardware = &client.properties().hardware;
        let cubes = match hardware.num_streaming_multiprocessors {
            Some(num_sms) => CubeCountStrategy::Sm {
                num_sms,
                sm_usage: SmAllocation::Exact,
                cubes_first: true,
            },
            None => CubeCountStrategy::FromProblem,
        };
        let hypercube = HypercubeBlueprint::builder()
            .global_order(GlobalOrder::SwizzleRow(4))
            .cube_count_strategy(cubes)
            .build();
        let buffering = match pn {
            0 | 1 => PartitionBuffering::Single,
            _ => PartitionBuffering::Double,
        };
        let mut builder =
            BatchMatmulBlueprint::builder(kind, scheme, hardware.plane_size_max, &problem)
                .partition_buffering(buffering)
                .stage_buffering(routine.stages())
                .hypercube_blueprint(hypercube);
        if routine.name().starts_with("Specialized") {
            builder = builder.load_specialization_config(LoadFlows {
                lhs: InputLoadFlow::LoadOnly,
                rhs: InputLoadFlow::LoadOnly,
            });
        }
        if kind.should_swizzle(client) {
            let [m, n, depth] = [
                scheme.elements_per_stage_along_m(),
                scheme.elements_per_stage_along_n(),
                scheme.elements_per_stage_along_k(),
            ]
            .map(|elements| elements as usize);
            let of = |layout, rows, columns| {
                let width = match layout {
                    MatrixLayout::RowMajor => columns,
                    MatrixLayout::ColMajor => rows,
                };
                select_swizzle(width, elem_type(self.element), 16 / size)
            };
            builder = builder.shared_swizzle(SwizzleModes {
                lhs: of(problem.lhs_layout, m, depth),
                rhs: of(problem.rhs_layout, depth, n),
                ..SwizzleModes::default()
            });
        }
        Ok(builder.build())
    }
}
