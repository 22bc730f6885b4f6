//! A training step as a Burn user waits for it: the decoder of `flash-dma-models`, or one attention layer of it,
//! forward, backward, clipping and AdamW. `benches/train_peer.py` times the same model in PyTorch and prints the same
//! row.
//!
//! Every process times one configuration, since the memory that an allocator has reserved is never given back. A row is
//! one line of JSON. Times of steps are the host's, each from an idle device to one that is idle again; one more step
//! then runs with a measurement around each kernel, which says where the time goes.

mod row;
mod task;

use burn::module::Module;
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use burn_flash_dma::train::clip_gradients;
use clap::{Parser, ValueEnum};
use flash_dma_benches::device::{DeviceName, DtypeName};
use flash_dma_benches::launches::{Launches, Watch};
use flash_dma_benches::shares::Launched;
use flash_dma_benches::stats::Millis;
use row::{Features, Memory, Profile, Row};
use serde::Serialize;
use std::convert::Infallible;
use std::error::Error;
use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;
use task::{LayerTask, ModelTask, Task};

/// Times training steps of one configuration, and prints a row of JSON.
#[derive(Clone, Debug, Parser, Serialize)]
struct Options {
    /// The whole model, or one attention layer.
    #[arg(long, value_enum, default_value = "model")]
    what: What,
    /// Transformer blocks; of a layer ignored.
    #[arg(long, default_value_t = 8)]
    layers: usize,
    /// Width of the residual stream.
    #[arg(long, default_value_t = 1024)]
    d_model: usize,
    /// Query heads.
    #[arg(long, default_value_t = 8)]
    heads: usize,
    /// Key and value heads.
    #[arg(long, default_value_t = 2)]
    kv_heads: usize,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 32768)]
    seq: usize,
    /// Sequences of a step.
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Keys that a query attends to; all of them if left out.
    #[arg(long)]
    window: Option<usize>,
    /// Element type of the activations; parameters and the optimiser's state are f32.
    #[arg(long, value_enum, default_value = "bf16")]
    dtype: DtypeName,
    /// Keeps only the inputs of the model's blocks, and computes the rest a second time.
    #[arg(long)]
    checkpoint: bool,
    /// Device.
    #[arg(long, value_enum, default_value = "cuda")]
    device: DeviceName,
    /// Steps that are timed.
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Steps before them, the first of which is reported by itself.
    #[arg(long, default_value_t = 4)]
    warm_up: usize,
    /// Leaves out the step that times each kernel.
    #[arg(long)]
    #[serde(skip)]
    no_profile: bool,
    /// Kernels to list, the slowest first.
    #[arg(long, default_value_t = 12)]
    #[serde(skip)]
    kernels: usize,
    /// A file to append the row to.
    #[arg(long)]
    #[serde(skip)]
    json: Option<PathBuf>,
}

/// What is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
enum What {
    Model,
    Layer,
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    if options.warm_up == 0 || options.steps == 0 {
        return Err("--warm-up and --steps must be at least 1".into());
    }
    let device = options.device.open(options.dtype)?;
    device.seed(0);
    let row = match options.what {
        What::Model => measure(ModelTask::new(&options, &device), &options, &device)?,
        What::Layer => measure(LayerTask::new(&options, &device), &options, &device)?,
    };
    let line = serde_json::to_string(&row)?;
    println!("{line}");
    if let Some(path) = &options.json {
        let mut file = std::fs::File::options()
            .create(true)
            .append(true)
            .open(path)?;
        writeln!(file, "{line}")?;
    }
    Ok(())
}

/// A training under way.
struct Training<T: Task> {
    task: T,
    /// Taken by a step and put back.
    module: Option<T::Module>,
    optimiser: ModuleOptimizer,
}

const LEARNING_RATE: f64 = 3e-4;

/// The gradients of all parameters together are clipped to this norm.
const MAX_NORM: f64 = 1.0;

/// AdamW, for gradients that are clipped.
fn optimiser() -> ModuleOptimizer {
    AdamWConfig::new()
        .with_beta_2(0.95)
        .with_epsilon(1e-8)
        .with_weight_decay(0.01)
        .init()
}

impl<T: Task> Training<T> {
    /// A step and its loss; `after` is called after the forward pass, the backward pass and the update.
    fn step<E>(&mut self, mut after: impl FnMut() -> Result<(), E>) -> Result<Tensor<1>, E> {
        let module = self.module.take().expect("no step is under way");
        let (loss, backward) = self.task.forward(&module);
        after()?;
        let mut gradients = backward();
        after()?;
        clip_gradients(&module, &mut gradients, MAX_NORM);
        self.module = Some(self.optimiser.step(LEARNING_RATE, module, gradients));
        after()?;
        Ok(loss)
    }
}

fn measure<T: Task>(task: T, options: &Options, device: &Device) -> Result<Row, Box<dyn Error>> {
    let module = task.init(&device.clone().autodiff());
    let parameters = module.num_params();
    let mut training = Training {
        task,
        module: Some(module),
        optimiser: optimiser(),
    };
    let mut peak = None;
    let mut clock = |training: &mut Training<T>| -> Result<(f64, Tensor<1>), Box<dyn Error>> {
        device.sync()?;
        let start = Instant::now();
        let loss = training.step(|| Ok::<_, Infallible>(()))?;
        device.sync()?;
        let time = start.elapsed().as_secs_f64() * 1e3;
        peak = peak.max(device.memory_pool_usage().map(|usage| usage.bytes_reserved));
        Ok((time, loss.without_autodiff()))
    };
    let (first_step_ms, loss) = clock(&mut training)?;
    let first_loss = loss.try_into_scalar::<f64>()?;
    for _ in 1..options.warm_up {
        clock(&mut training)?;
    }
    let mut times = Vec::with_capacity(options.steps);
    let mut last_loss = f64::NAN;
    for _ in 0..options.steps {
        let (time, loss) = clock(&mut training)?;
        times.push(time);
        last_loss = loss.try_into_scalar::<f64>()?;
    }
    if !(first_loss.is_finite() && last_loss.is_finite()) {
        return Err(format!("the loss went from {first_loss} to {last_loss}").into());
    }
    let step = Millis::of(times);
    let watched = match options.no_profile {
        true => Watch::Nothing,
        false => Watch::Times,
    };
    let (phases, memory) = watch(&mut training, watched, device)?;
    // Engines without launches, and builds without CubeCL, have no profile.
    let profile = (phases.iter().any(|phase| phase.launched > 0))
        .then(|| Profile::new(&phases, step.median, options.kernels));
    Ok(Row {
        implementation: "burn".into(),
        device: format!("{device:?}"),
        options: options.clone(),
        features: Features {
            fusion: cfg!(feature = "fusion"),
            autotune: cfg!(feature = "autotune"),
        },
        parameters,
        first_step_ms,
        step_ms: step,
        tokens_per_second: (options.batch * options.seq) as f64 / step.median * 1e3,
        peak_bytes: peak,
        memory,
        losses: [first_loss, last_loss],
        profile,
    })
}

/// One more step, phase by phase: its launches if asked for, and what is allocated between the phases.
fn watch<T: Task>(
    training: &mut Training<T>,
    watch: Watch,
    device: &Device,
) -> Result<([Launched; 3], Option<Memory>), Box<dyn Error>> {
    let in_use = || device.memory_pool_usage().map(|usage| usage.bytes_in_use);
    device.sync()?;
    let before = in_use();
    let launches = Launches::watch(watch);
    let mut phases = Vec::with_capacity(3);
    let mut between = None;
    training.step(|| {
        device.sync()?;
        // Of the forward pass.
        if phases.is_empty() {
            between = in_use();
        }
        phases.push(launches.take());
        Ok::<_, Box<dyn Error>>(())
    })?;
    let [forward, backward, update] =
        <[Launched; 3]>::try_from(phases).map_err(|_| "a step has three phases")?;

    let memory = before.zip(between).map(|(state, with_activations)| Memory {
        state_bytes: state,
        activation_bytes: with_activations.saturating_sub(state),
    });
    Ok(([forward, backward, update], memory))
}
