//! From the inputs of a pass to its launches, once for every pass: an engine is chosen or refused, the device and the
//! tensors are checked, and only then is anything launched.

use crate::host::check::{check_grid, check_type};
use crate::host::engine::{Chosen, Engine, Instruction, Refusal};
use crate::host::portable_warning::warn;
use crate::host::range::range;
use cubecl::client::Client;
use cubecl::ir::{DeviceProperties, HardwareProperties};
use flash_dma_problem::{
    AttentionError, ElementType, EngineChoice, Obstacle, PassKind, PassedOver, Problem,
};
use std::fmt::{self, Debug, Formatter};

/// A pass and its inputs, as [`Plan`] needs them.
pub(crate) trait Pass {
    type Outputs;
    type Portable;
    type Matrix;

    /// The most buffers of any of its kernels.
    const BINDINGS: u32;
    const KIND: PassKind;

    /// The properties of its rows that a plan needs.
    fn rows(&self) -> Rows;

    fn portable(&self, hardware: &HardwareProperties) -> Result<Self::Portable, AttentionError>;

    /// The configuration for an instruction, or the reason for having none. Only the inputs' strides and offsets are
    /// read.
    fn matrix(
        &self,
        instruction: Instruction,
        properties: &DeviceProperties,
    ) -> Result<Self::Matrix, Refusal>;

    /// The most cubes along each axis.
    fn cubes(&self, config: &ConfigOf<Self>) -> [usize; 3];

    /// The peak number of bytes in buffers that the launches hold at once, if there are pairs.
    fn workspace_bytes(&self, config: &ConfigOf<Self>) -> usize;

    fn check(&self, outputs: &Self::Outputs) -> Result<(), AttentionError>;

    /// Writes the outputs of checked tensors without pairs.
    fn launch_empty(&self, client: &Client, outputs: Self::Outputs);

    /// Launches the kernels on checked tensors with pairs.
    fn launch(&self, client: &Client, config: ConfigOf<Self>, outputs: Self::Outputs);
}

/// The properties of a pass's rows that its plan needs.
pub(crate) struct Rows {
    pub element: ElementType,
    pub choice: EngineChoice,
    /// True if there are a query and a key, so that there is something to compute.
    pub paired: bool,
    /// Bytes of the ALiBi slopes; 0 without.
    pub alibi: usize,
}

impl From<&Problem> for Rows {
    fn from(problem: &Problem) -> Self {
        Self {
            element: problem.element,
            choice: problem.engine,
            paired: ![problem.batch, problem.q_len, problem.k_len].contains(&0),
            alibi: (problem.alibi).map_or(0, |slopes| size_of_val(slopes.values())),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Config<P, M> {
    Portable(P),
    Matrix(M),
}

pub(crate) type ConfigOf<P> = Config<<P as Pass>::Portable, <P as Pass>::Matrix>;

/// A pass on a chosen engine, which the device can run. Nothing is launched before [`run`](Self::run).
#[must_use = "a plan does nothing until it is run"]
pub struct Plan<'a, Outputs> {
    properties: &'a DeviceProperties,
    pass: PassKind,
    engine: Engine,
    passed_over: Vec<PassedOver>,
    workspace_bytes: usize,
    run: Box<dyn FnOnce(Outputs) -> Result<(), AttentionError> + 'a>,
}

impl<'a, Outputs> Plan<'a, Outputs> {
    /// The plan of `pass` on `engine`, on the one that its problem asks for, or on the first engine that supports it.
    pub(crate) fn new<P: Pass<Outputs = Outputs> + 'a>(
        client: &'a Client,
        engine: Option<Engine>,
        pass: P,
    ) -> Result<Self, AttentionError> {
        let properties = client.properties();
        let choice = engine.map_or(pass.rows().choice, EngineChoice::Only);
        let matrix = |instruction| pass.matrix(instruction, properties).map(Config::Matrix);
        let chosen = Chosen::new(choice, P::KIND, |engine| match engine {
            Engine::Portable => Ok(Config::Portable(pass.portable(&properties.hardware)?)),
            Engine::Mma => matrix(Instruction::Mma),
            Engine::Wgmma => matrix(Instruction::Wgmma),
            _ => Err(Obstacle::OtherBackend.into()),
        })?;
        let plan = Self::with(client, chosen.engine, chosen.config, pass)?;
        Ok(Self {
            passed_over: chosen.passed_over,
            ..plan
        })
    }

    /// [`new`](Self::new) with a given configuration.
    pub(crate) fn with<P: Pass<Outputs = Outputs> + 'a>(
        client: &'a Client,
        engine: Engine,
        config: ConfigOf<P>,
        pass: P,
    ) -> Result<Self, AttentionError> {
        let Rows {
            element,
            paired,
            alibi,
            ..
        } = pass.rows();
        check_type(client, element)?;
        check_grid(client, P::BINDINGS, pass.cubes(&config))?;
        Ok(Self {
            properties: client.properties(),
            pass: P::KIND,
            engine,
            passed_over: Vec::new(),
            workspace_bytes: match paired {
                true => pass.workspace_bytes(&config) + alibi,
                false => 0,
            },
            run: Box::new(move |outputs| {
                pass.check(&outputs)?;
                match paired {
                    true => pass.launch(client, config, outputs),
                    false => pass.launch_empty(client, outputs),
                }
                Ok(())
            }),
        })
    }

    /// The engine that the pass runs on.
    #[must_use]
    pub fn engine(&self) -> Engine {
        self.engine
    }

    /// The engines that were considered before it, the fastest first, and the reasons why they do not run the pass.
    #[must_use]
    pub fn passed_over(&self) -> &[PassedOver] {
        &self.passed_over
    }

    /// The bytes that [`run`](Self::run) allocates on the device: the peak total of the buffers that it holds at once,
    /// each at its requested size, without its arguments.
    ///
    /// A buffer is free for the next request on the stream once the launches that use it are enqueued, so consecutive
    /// calls need as much as the largest of them. The client's pool rounds sizes up and keeps its memory.
    #[must_use]
    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// Checks inputs and outputs and launches the pass, asynchronously on the client's stream.
    ///
    /// If it is [`Engine::Portable`] on a device with tensor cores, for a reason that the caller can change, the first
    /// run for that reason warns through the crate `log`.
    ///
    /// # Errors
    ///
    /// [`AttentionError`] if a tensor does not fit the problem, or if one is missing that the problem has or given that
    /// it has not. Nothing is launched and nothing written in that case.
    pub fn run(self, outputs: Outputs) -> Result<(), AttentionError> {
        let engine = self.engine.name();
        let _range = match self.pass {
            PassKind::Backward => range!("backward", engine),
            PassKind::Decode => range!("decode", engine),
            _ => range!("forward", engine),
        };
        (self.run)(outputs)?;
        warn(self.properties, self.pass, self.engine, &self.passed_over);
        Ok(())
    }
}

impl<Outputs> Debug for Plan<'_, Outputs> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plan")
            .field("engine", &self.engine)
            .field("passed_over", &self.passed_over)
            .field("workspace_bytes", &self.workspace_bytes)
            .finish_non_exhaustive()
    }
}
