//! The matrix engines, and the choice among them.

pub use flash_dma_problem::Engine;
use flash_dma_problem::{AttentionError, EngineChoice, Obstacle, PassKind, PassedOver};

/// The environment variable that restricts the choice of engines, for comparisons: `portable` excludes the tensor
/// cores, `mma` the `wgmma` engine, in attention and in products of the whole process. Products in f32 are then exact
/// to f32 with `portable`, where tensor cores would multiply in TF32. Read at every call.
pub const ENGINE_VARIABLE: &str = "FLASH_DMA_ENGINE";

/// The engines of the kernels, the fastest first.
const ALL: [Engine; 3] = [Engine::Wgmma, Engine::Mma, Engine::Portable];

/// The engines that [`ENGINE_VARIABLE`] does not exclude, of [`ALL`].
pub(crate) fn allowed() -> Result<&'static [Engine], AttentionError> {
    match std::env::var(ENGINE_VARIABLE).as_deref() {
        Err(_) | Ok("" | "wgmma") => Ok(&ALL),
        Ok("mma") => Ok(&ALL[1..]),
        Ok("portable") => Ok(&ALL[2..]),
        Ok(other) => Err(AttentionError::Unsupported {
            what: format!("{ENGINE_VARIABLE}={other} (portable, mma or wgmma)"),
        }),
    }
}

/// True if [`ENGINE_VARIABLE`] does not exclude an engine.
pub(crate) fn is_allowed(engine: Engine) -> bool {
    engine == Engine::Portable || allowed().is_ok_and(|engines| engines.contains(&engine))
}

/// The reason why an engine has no configuration: it cannot serve the pass, or the call is wrong for every engine.
#[derive(Clone, Debug)]
pub(crate) enum Refusal {
    Obstacle(Obstacle),
    Error(AttentionError),
}

impl From<Obstacle> for Refusal {
    fn from(obstacle: Obstacle) -> Self {
        Self::Obstacle(obstacle)
    }
}

impl From<AttentionError> for Refusal {
    fn from(error: AttentionError) -> Self {
        Self::Error(error)
    }
}

impl Refusal {
    /// The error of a call that asks for `engine`.
    fn of(self, engine: Engine, pass: PassKind) -> AttentionError {
        match self {
            Self::Obstacle(obstacle) => AttentionError::Engine {
                engine,
                pass,
                obstacle,
            },
            Self::Error(error) => error,
        }
    }
}

/// The engine of a pass, its configuration, and the engines that were passed over for it.
pub(crate) struct Chosen<C> {
    pub engine: Engine,
    pub config: C,
    pub passed_over: Vec<PassedOver>,
}

impl<C> Chosen<C> {
    /// The engine that `choice` asks for, or the first that [`ENGINE_VARIABLE`] allows and `of` configures.
    pub(crate) fn new(
        choice: EngineChoice,
        pass: PassKind,
        of: impl Fn(Engine) -> Result<C, Refusal>,
    ) -> Result<Self, AttentionError> {
        let mut passed_over = Vec::new();
        let mut over = |engine, obstacle| {
            passed_over.push(PassedOver {
                pass,
                engine,
                obstacle,
            })
        };
        let (engine, config) = match choice {
            EngineChoice::Only(forced) => {
                let config = of(forced).map_err(|refusal| refusal.of(forced, pass))?;
                let faster = ALL.iter().take_while(|&&engine| engine != forced);
                faster.for_each(|&engine| over(engine, Obstacle::Forced(forced)));
                (forced, config)
            }
            EngineChoice::Fastest => {
                let allowed = allowed()?;
                let excluded = ALL.iter().filter(|engine| !allowed.contains(engine));
                excluded.for_each(|&engine| over(engine, Obstacle::Variable));
                let first = allowed.iter().find_map(|&engine| match of(engine) {
                    Ok(config) => Some(Ok((engine, config))),
                    // Nothing is left to try.
                    Err(refusal) if engine == Engine::Portable => {
                        Some(Err(refusal.of(engine, pass)))
                    }
                    Err(Refusal::Obstacle(obstacle)) => {
                        over(engine, obstacle);
                        None
                    }
                    Err(Refusal::Error(_)) => None,
                });
                first.expect("the portable kernels end the list")?
            }
        };
        Ok(Self {
            engine,
            config,
            passed_over,
        })
    }
}

/// The tensor cores' instruction of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Instruction {
    /// `mma.sync`: a warp multiplies 16 rows, operands in registers. sm_80 and newer.
    Mma,
    /// `wgmma`: four warps multiply 64 rows, operands in shared memory. sm_90 alone.
    Wgmma,
}
