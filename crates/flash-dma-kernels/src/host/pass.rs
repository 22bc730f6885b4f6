//! From the inputs of a pass to its launches, once for every pass: an engine is chosen or refused, the device and the
//! tensors are checked, and only then is anything launched.

use crate::host::check::{check_grid, check_type};
use crate::host::engine::{Engine, Instruction};
use cubecl::client::Client;
use cubecl::ir::{DeviceProperties, HardwareProperties};
use flash_dma_problem::{AttentionError, ElementType, Problem};
use std::fmt::{self, Debug, Formatter};

/// A pass and its inputs: what [`Plan`] has to know of it.
pub(crate) trait Pass {
    /// The tensors that it writes.
    type Outputs;
    /// What [`Engine::Portable`] is configured by.
    type Portable;
    /// What the tensor cores are configured by.
    type Matrix;

    /// The most buffers of any of its kernels.
    const BINDINGS: u32;
    /// What an error that an engine is not supported says before and after the engine.
    const NAME: [&'static str; 2] = [""; 2];

    /// The rows that it computes with.
    fn rows(&self) -> Rows;

    /// The configuration for single units.
    fn portable(&self, hardware: &HardwareProperties) -> Result<Self::Portable, AttentionError>;

    /// The configuration for an instruction; `None` if that does not support the problem. The inputs' strides and
    /// offsets are read, no more.
    fn matrix(
        &self,
        instruction: Instruction,
        properties: &DeviceProperties,
    ) -> Result<Option<Self::Matrix>, AttentionError>;

    /// The most cubes along each axis.
    fn cubes(&self, config: &ConfigOf<Self>) -> [usize; 3];

    /// The peak number of bytes in buffers that the launches hold at once, if there are pairs.
    fn workspace_bytes(&self, config: &ConfigOf<Self>) -> usize;

    /// Checks every tensor.
    fn check(&self, outputs: &Self::Outputs) -> Result<(), AttentionError>;

    /// Writes the outputs of checked tensors without pairs.
    fn launch_empty(&self, client: &Client, outputs: Self::Outputs);

    /// Launches the kernels on checked tensors with pairs.
    fn launch(&self, client: &Client, config: ConfigOf<Self>, outputs: Self::Outputs);
}

/// The rows that a pass computes with.
pub(crate) struct Rows {
    pub element: ElementType,
    pub head_dim: usize,
    /// Whether there are a query and a key, so that there is something to compute.
    pub paired: bool,
    /// Whether pairs are dropped, which single units alone compute.
    pub dropout: bool,
}

impl From<&Problem> for Rows {
    fn from(problem: &Problem) -> Self {
        Self {
            element: problem.element,
            head_dim: problem.head_dim,
            paired: ![problem.batch, problem.q_len, problem.k_len].contains(&0),
            dropout: problem.dropout.is_some(),
        }
    }
}

/// The configuration of a kind of engine.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Config<P, M> {
    Portable(P),
    Matrix(M),
}

pub(crate) type ConfigOf<P> = Config<<P as Pass>::Portable, <P as Pass>::Matrix>;

/// A pass on a chosen engine, which the device can run. Nothing is launched before [`run`](Self::run).
#[must_use = "a plan does nothing until it is run"]
pub struct Plan<'a, Outputs> {
    engine: Engine,
    workspace_bytes: usize,
    run: Box<dyn FnOnce(Outputs) -> Result<(), AttentionError> + 'a>,
}

impl<'a, Outputs> Plan<'a, Outputs> {
    /// The plan of `pass` on `engine`, or on the first engine that supports it.
    pub(crate) fn new<P: Pass<Outputs = Outputs> + 'a>(
        client: &'a Client,
        engine: Option<Engine>,
        pass: P,
    ) -> Result<Self, AttentionError> {
        let properties = client.properties();
        let configure = |engine: Engine| match engine.instruction() {
            None => pass.portable(&properties.hardware).map(Config::Portable),
            Some(_) if pass.rows().dropout => Err(refusal(engine, P::NAME, &pass.rows())),
            Some(instruction) => (pass.matrix(instruction, properties)?)
                .map(Config::Matrix)
                .ok_or_else(|| refusal(engine, P::NAME, &pass.rows())),
        };
        let (engine, config) = match engine {
            Some(engine) => (engine, configure(engine)?),
            None => Engine::first(configure)?,
        };
        Self::with(client, engine, config, pass)
    }

    /// As [`new`](Self::new), with a given configuration.
    pub(crate) fn with<P: Pass<Outputs = Outputs> + 'a>(
        client: &'a Client,
        engine: Engine,
        config: ConfigOf<P>,
        pass: P,
    ) -> Result<Self, AttentionError> {
        let Rows {
            element, paired, ..
        } = pass.rows();
        check_type(client, element)?;
        check_grid(client, P::BINDINGS, pass.cubes(&config))?;
        Ok(Self {
            engine,
            workspace_bytes: if paired {
                pass.workspace_bytes(&config)
            } else {
                0
            },
            run: Box::new(move |outputs| {
                pass.check(&outputs)?;
                if paired {
                    pass.launch(client, config, outputs);
                } else {
                    pass.launch_empty(client, outputs);
                }
                Ok(())
            }),
        })
    }

    /// The engine that it runs on.
    #[must_use]
    pub fn engine(&self) -> Engine {
        self.engine
    }

    /// The bytes that [`run`](Self::run) needs on the device besides its arguments: the peak total of the buffers that
    /// it holds at once, each at its requested size.
    ///
    /// A buffer is free for the next request on the stream once the launches that use it are enqueued, so consecutive
    /// calls need as much as the largest of them. The client's pool rounds sizes up and keeps its memory.
    #[must_use]
    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// Checks inputs and outputs and launches the pass, asynchronously on the client's stream.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if a tensor does not fit the problem, or if one is missing that the problem has or given that
    /// it has not. Nothing is launched and nothing written in that case.
    pub fn run(self, outputs: Outputs) -> Result<(), AttentionError> {
        (self.run)(outputs)
    }
}

/// The error that an engine does not support a pass over `rows`.
fn refusal(engine: Engine, [before, after]: [&str; 2], rows: &Rows) -> AttentionError {
    let (element, dim) = (rows.element, rows.head_dim);
    let with = if rows.dropout { " with dropout" } else { "" };
    AttentionError::Unsupported {
        what: format!(
            "{before}the {engine:?} engine for {after}{element} of head dimension {dim}{with}"
        ),
    }
}

impl<Outputs> Debug for Plan<'_, Outputs> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plan")
            .field("engine", &self.engine)
            .field("workspace_bytes", &self.workspace_bytes)
            .finish_non_exhaustive()
    }
}
