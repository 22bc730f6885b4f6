//! `bench step`: a training step as a Burn user experiences it: the model of the example `train-text`, or one
//! attention layer of it, forward, backward, clipping and AdamW. `benches/train_peer.py` times the same model in
//! PyTorch and prints the same row.
//!
//! Every process times one configuration, since an allocator never gives back reserved memory. A row is one line of
//! JSON. Times of steps are the host's, each from idle device to idle device; one more step then runs with a
//! measurement around each kernel, to show where the time goes.

mod layer;
mod row;
mod task;

use crate::Result;
use crate::launches::Launches;
use crate::model::{Model, Origin, append, clock};
use crate::shares::Launched;
use crate::stats::Millis;
use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::tensor::{Device, Tensor};
use burn_flash_dma::train::{AdamWConfig, optimize};
use clap::{Args, ValueEnum};
use layer::LayerTask;
use row::{Memory, Profile, Row};
use serde::Serialize;
use task::{ModelTask, Task};

/// Times training steps of one configuration, and prints a row of JSON.
#[derive(Args, Clone, Debug, Serialize)]
pub struct Options {
    /// The whole model, or one attention layer.
    #[arg(long, value_enum, default_value = "model")]
    what: What,
    #[command(flatten)]
    #[serde(flatten)]
    model: Model,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 32768)]
    seq: usize,
    /// Tokens of the vocabulary.
    #[arg(long, default_value_t = 256)]
    vocabulary: usize,
    /// Keep only the inputs of the model's blocks, and recompute the rest.
    #[arg(long)]
    checkpoint: bool,
    /// Read the sequences in parts of this many tokens, which the model computes twice, all but the last.
    #[arg(long, value_name = "TOKENS", conflicts_with = "checkpoint")]
    part: Option<std::num::NonZeroUsize>,
    /// Devices of which each reads a part of every sequence.
    #[arg(long, value_name = "NUMBER", conflicts_with_all = ["checkpoint", "part"])]
    devices: Option<std::num::NonZeroUsize>,
    /// Steps before the timed ones, the first of which is reported separately. In the first few the host waits more often.
    #[arg(long, default_value_t = 8)]
    warm_up: usize,
}

/// Model to train.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
enum What {
    Model,
    Layer,
}

/// Times the steps, and prints the row.
pub fn run(options: &Options) -> Result {
    append(&measured(options)?, &options.model.common)
}

fn measured(options: &Options) -> Result<Row> {
    if options.part.is_some() && options.what == What::Layer {
        return Err("--part is for --what model".into());
    }
    if options.warm_up == 0 || options.model.common.runs == 0 {
        return Err("--warm-up and --runs must be at least 1".into());
    }
    let device = options.model.place.open()?;
    match options.what {
        What::Model => measure(ModelTask::new(options, &device)?, options, &device),
        What::Layer => measure(LayerTask::new(options, &device)?, options, &device),
    }
}

/// A training under way.
struct Training<T: Task> {
    task: T,
    /// Taken by a step and put back.
    module: Option<T::Module>,
    optimiser: ModuleOptimizer,
}

const LEARNING_RATE: f64 = 3e-4;

/// Maximum global norm of the gradients.
const MAX_NORM: f64 = 1.0;

/// AdamW, for clipped gradients.
fn optimiser() -> ModuleOptimizer {
    AdamWConfig::new()
        .with_beta_2(0.95)
        .with_epsilon(1e-8)
        .with_weight_decay(0.01)
        .init()
}

impl<T: Task> Training<T> {
    /// A step and its loss; `after` is called after the forward pass, the backward pass and the update.
    fn step(&mut self, mut after: impl FnMut() -> Result) -> Result<Tensor<1>> {
        let module = self.module.take().expect("no step is under way");
        let (loss, backward) = self.task.forward(&module);
        after()?;
        let gradients = backward();
        after()?;
        let optimiser = &mut self.optimiser;
        let (module, _) = optimize(optimiser, LEARNING_RATE, module, gradients, MAX_NORM);
        self.module = Some(module);
        after()?;
        Ok(loss)
    }
}

fn measure<T: Task>(task: T, options: &Options, device: &Device) -> Result<Row> {
    let module = task.init(&device.clone().autodiff());
    let parameters = module.num_params();
    let mut training = Training {
        task,
        module: Some(module),
        optimiser: optimiser(),
    };
    let mut peak = None;
    let mut time = |training: &mut Training<T>| -> Result<(f64, Tensor<1>)> {
        let (time, loss) = clock(device, || training.step(|| Ok(())))?;
        peak = peak.max(device.memory_pool_usage().map(|usage| usage.bytes_reserved));
        Ok((time, loss?.without_autodiff()))
    };
    let (first_step_ms, loss) = time(&mut training)?;
    let first_loss = loss.try_into_scalar::<f64>()?;
    for _ in 1..options.warm_up {
        time(&mut training)?;
    }
    let Model { common, batch, .. } = &options.model;
    let mut times = Vec::with_capacity(common.runs);
    let mut last_loss = f64::NAN;
    for _ in 0..common.runs {
        let (step, loss) = time(&mut training)?;
        times.push(step);
        last_loss = loss.try_into_scalar::<f64>()?;
    }
    if !(first_loss.is_finite() && last_loss.is_finite()) {
        return Err(format!("the loss went from {first_loss} to {last_loss}").into());
    }
    let step = Millis::of(times);
    let (phases, memory) = watch(&mut training, !options.model.no_profile, device)?;
    // Engines without launches, and builds without CubeCL, have no profile.
    let profile = (phases.iter().any(|phase| phase.launched > 0))
        .then(|| Profile::new(&phases, step.median, options.model.kernels));
    Ok(Row {
        origin: Origin::new(&options.model.place, device),
        options: options.clone(),
        parameters,
        first_step_ms,
        step_ms: step,
        tokens_per_second: (batch * options.seq) as f64 / step.median * 1e3,
        peak_bytes: peak,
        memory,
        losses: [first_loss, last_loss],
        profile,
    })
}

/// One more step, phase by phase: its launches if asked for, and the memory allocated between the phases.
fn watch<T: Task>(
    training: &mut Training<T>,
    timed: bool,
    device: &Device,
) -> Result<([Launched; 3], Option<Memory>)> {
    let in_use = || device.memory_pool_usage().map(|usage| usage.bytes_in_use);
    device.sync()?;
    let before = in_use();
    let launches = timed.then(Launches::time);
    let mut phases = Vec::with_capacity(3);
    let mut between = None;
    training.step(|| {
        device.sync()?;
        // After the forward pass.
        if phases.is_empty() {
            between = in_use();
        }
        phases.push(launches.as_ref().map(Launches::take).unwrap_or_default());
        Ok(())
    })?;
    let phases = <[Launched; 3]>::try_from(phases).map_err(|_| "a step has three phases")?;
    let memory = before.zip(between).map(|(state, with_activations)| Memory {
        state_bytes: state,
        activation_bytes: with_activations.saturating_sub(state),
    });
    Ok((phases, memory))
}

#[cfg(test)]
mod tests {
    use crate::Cli;
    use clap::Parser;
    use serde_json::Value;

    fn row(arguments: &[&str]) -> Value {
        let tiny = "bench step --device flex --dtype f32 --seq 48 --d-model 32 --heads 2 --kv-heads 1 --layers 2 --runs 2 \
                    --warm-up 1";
        let line = tiny.split_whitespace().chain(arguments.iter().copied());
        let crate::Command::Step(options) = Cli::parse_from(line).command else {
            unreachable!("it is the command's name")
        };
        serde_json::to_value(super::measured(&options).unwrap()).unwrap()
    }

    #[test]
    fn the_model_is_trained_and_timed() {
        let row = row(&["--window", "8", "--batch", "2"]);
        assert_eq!(row["implementation"], "burn");
        assert_eq!(row["what"], "model");
        assert_eq!(row["window"], 8);
        assert_eq!(row["seq"], 48);
        assert_eq!(row["step_ms"]["runs"], 2);
        // Bytes that are all equally likely.
        let first = row["losses"][0].as_f64().expect("a number");
        assert!((first - 256f64.ln()).abs() < 0.5, "{first}");
        let seconds = row["step_ms"]["median"].as_f64().expect("a number") / 1e3;
        let tokens = row["tokens_per_second"].as_f64().expect("a number");
        assert!((tokens * seconds - 96.0).abs() < 1e-6);
        assert!(row["first_step_ms"].as_f64().expect("a number") > 0.0);
        assert!(row["parameters"].as_u64().expect("a count") > 30_000);
    }

    #[test]
    fn a_sequence_is_read_in_parts() {
        for (option, number) in [("part", 20), ("devices", 3)] {
            let (flag, count) = (format!("--{option}"), number.to_string());
            let row = row(&["--window", "8", "--batch", "2", &flag, &count]);
            assert_eq!(row[option], number);
            let first = row["losses"][0].as_f64().expect("a number");
            assert!((first - 256f64.ln()).abs() < 0.5, "{first}");
        }
    }

    #[test]
    fn devices_share_the_input_of_a_layer() {
        let row = row(&["--what", "layer", "--window", "8", "--devices", "3"]);
        assert_eq!(row["what"], "layer");
        assert_eq!(row["devices"], 3);
        assert!(row["losses"][1].as_f64().expect("a number").is_finite());
    }

    #[test]
    fn the_layer_is_trained_dense_if_no_window_is_given() {
        let row = row(&["--what", "layer"]);
        assert_eq!(row["what"], "layer");
        assert_eq!(row["window"], Value::Null);
        assert!(row["losses"][1].as_f64().expect("a number").is_finite());
    }
}
