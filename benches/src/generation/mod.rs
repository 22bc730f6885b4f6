//! `bench generation`: generation as a Burn user experiences it. The model of `bench step` reads a prompt in chunks,
//! then writes the most likely token repeatedly. `benches/generate_peer.py` times the same model in PyTorch, with
//! dense attention.
//!
//! Every process times one configuration; a row is one line of JSON. A token is timed in several ways, each from the
//! caches as the prompt left them:
//!
//! - `queued`: tokens are fed back on the device, and the host waits after the last;
//! - `token_read`: the same, but the host waits for each token, as when showing the text;
//! - `logits_read`: the host waits for the logits, chooses the token and uploads it, as when sampling;
//! - `enqueue`: until the call has returned, from an idle device, without the driver's part, which is on a thread of
//!   CubeCL's;
//! - `generated`: a `Generator` returns each token, which waits for it; its steps are launched;
//! - `generated_replayed`: the same, with steps replayed from a device graph;
//! - `replayed`: one token captured in a device graph, replayed at its one position.
//!
//! One more token runs with a measurement around each kernel. To keep the host's time out of the kernels', work that
//! keeps the device busy is queued first (`--busy`). `span_ms` is the time from the first kernel's begin to the last
//! one's end; if it is much more than the sum, the device still waited for the host. Each time includes that of an
//! event: for the kernels' own times, `benches/ncu_token.py` runs this program under `ncu` with `--count-only`.
//!
//! The rotary tables reach as far as the program goes, unless `--context` is given: positions past a table are
//! computed in every layer of every token.

mod row;
mod session;
mod timing;

use crate::Result;
use crate::launches::Launches;
use crate::model::{Model, Origin, append, clock};
use crate::place::DeviceName;
use burn::module::Module;
use clap::Args;
use flash_dma_models::nn::DecoderConfig;
use row::{Counts, Row};
use serde::Serialize;
use session::{Prompt, Session};
use timing::Timing;

/// Times the tokens of one configuration, and prints a row of JSON.
#[derive(Args, Clone, Debug, Serialize)]
pub struct Options {
    #[command(flatten)]
    #[serde(flatten)]
    model: Model,
    /// Tokens of each prompt.
    #[arg(long, default_value_t = 8192)]
    prompt: usize,
    /// Number of prompt tokens read at once.
    #[arg(long, default_value_t = 1024)]
    chunk: usize,
    /// Tokens of a run. `--runs` counts runs with queued tokens, and of replays; the ways that time each token make
    /// one run.
    #[arg(long, default_value_t = 64)]
    tokens: usize,
    /// Tokens before each timed run.
    #[arg(long, default_value_t = 8)]
    warm_up: usize,
    /// Positions of the rotary tables [default: all that are reached].
    #[arg(long)]
    context: Option<usize>,
    /// Products of two square matrices of 8192 that keep the device busy while the profiled token is queued [default:
    /// 16 on CUDA, otherwise none].
    #[arg(long)]
    #[serde(skip)]
    busy: Option<usize>,
    /// Skip the captured token.
    #[arg(long)]
    #[serde(skip)]
    no_graph: bool,
    /// Times nothing: prints how many kernels are launched before the first token after the warm-up, and by it.
    #[arg(long)]
    #[serde(skip)]
    count_only: bool,
}

impl Options {
    fn check(&self) -> Result {
        let Model { common, batch, .. } = &self.model;
        if [self.prompt, self.tokens, common.runs, self.chunk, *batch].contains(&0) {
            return Err(
                "--prompt, --tokens, --runs, --chunk and --batch must be at least 1".into(),
            );
        }
        Ok(())
    }

    /// Number of positions that the longest of the runs reaches.
    fn positions(&self) -> usize {
        // A capture runs the token up to five times.
        self.prompt + self.warm_up + self.model.common.runs * self.tokens + 5
    }

    fn config(&self) -> DecoderConfig {
        let context = self.context.unwrap_or_else(|| self.positions());
        // If all keys are kept, a cache of constant size has room for all positions.
        let window = self.model.window.or(Some(self.positions()));
        let model = Model {
            window,
            ..self.model.clone()
        };
        model.decoder(context)
    }

    fn busy(&self) -> usize {
        let default = match self.model.place.device {
            DeviceName::Cuda => 16,
            _ => 0,
        };
        self.busy.unwrap_or(default)
    }
}

/// Times the tokens, and prints the row.
pub fn run(options: &Options) -> Result {
    options.check()?;
    let common = &options.model.common;
    match options.count_only {
        true => append(&count(options)?, common),
        false => append(&measure(options)?, common),
    }
}

/// Launches up to the first token after the warm-up, and its own.
fn count(options: &Options) -> Result<Counts> {
    let launches = Launches::count();
    let device = options.model.place.open()?;
    let model = options.config().init(&device).for_generation();
    let prompt = Prompt::new(options, &device);
    let mut session = Session::new(&model, options.model.batch)?;
    session.read(&prompt)?;
    session.steps(options.warm_up)?;
    device.sync()?;
    let before = launches.take().launched;
    session.step()?;
    device.sync()?;
    Ok(Counts {
        before,
        token: launches.take().launched,
    })
}

fn measure(options: &Options) -> Result<Row> {
    let device = options.model.place.open()?;
    let model = options.config().init(&device).for_generation();
    device.sync()?;
    let prompt = Prompt::new(options, &device);
    // The first reading compiles.
    let read = || -> Result<(f64, Session)> {
        let mut session = Session::new(&model, options.model.batch)?;
        let (time, read) = clock(&device, || session.read(&prompt))?;
        Ok((time, read.map(|()| session)?))
    };
    let (first_prompt_ms, first_session) = read()?;
    drop(first_session);
    let (prompt_ms, session) = read()?;
    let timing = Timing {
        session: &session,
        writer: &model,
        prompt: &prompt,
        options,
        device: &device,
    };
    let times = timing.times()?;
    Ok(Row {
        origin: Origin::new(&options.model.place, &device),
        options: options.clone(),
        parameters: model.num_params(),
        cache_bytes: session.cache_bytes(),
        first_prompt_ms,
        prompt_ms,
        times,
    })
}

#[cfg(test)]
mod tests {
    use crate::Cli;
    use clap::Parser;
    use serde_json::Value;

    fn row(arguments: &[&str]) -> Value {
        let tiny = "bench generation --device flex --dtype f32 --d-model 32 --heads 2 --kv-heads 1 --layers 2 --prompt 40 \
                    --local-window 4 --chunk 24 --tokens 5 --runs 2 --warm-up 1";
        let line = tiny.split_whitespace().chain(arguments.iter().copied());
        let crate::Command::Generation(options) = Cli::parse_from(line).command else {
            unreachable!("it is the command's name")
        };
        serde_json::to_value(super::measure(&options).unwrap()).unwrap()
    }

    #[test]
    fn every_way_of_timing_writes_the_same_tokens() {
        let row = row(&["--window", "8", "--batch", "3"]);
        assert_eq!(row["same_tokens"], true);
        let times = &row["token_ms"];
        assert_eq!(times["queued"]["runs"], 2);
        for way in [
            "token_read",
            "logits_read",
            "enqueue",
            "generated",
            "generated_replayed",
        ] {
            assert_eq!(times[way]["runs"], 5, "{way}");
        }
        let median = times["queued"]["median"].as_f64().expect("a number");
        let tokens = row["tokens_per_second"].as_f64().expect("a number");
        assert!((tokens * median / 1e3 - 3.0).abs() < 1e-6);
        // Three sequences.
        assert_eq!(row["cache_bytes"], 3 * cache_bytes(8));
        // Flex launches nothing and has no graphs.
        assert_eq!(row["profile"], Value::Null);
        assert!(times["replayed"]["missing"].is_string(), "{times}");
    }

    #[test]
    fn without_a_window_every_key_is_kept() {
        let row = row(&[]);
        assert_eq!(row["window"], Value::Null);
        assert_eq!(row["same_tokens"], true);
        // 40 of the prompt, one of the warm-up, two runs of five tokens, and five of a capture.
        let keys = 40 + 1 + 2 * 5 + 5;
        assert_eq!(row["cache_bytes"], cache_bytes(keys));
    }

    /// Bytes of a sequence's caches: a local layer of 4 slots and one of `slots`, one head of 16 features, f32,
    /// scores and positions.
    fn cache_bytes(slots: usize) -> usize {
        let layer = |slots: usize| slots * (2 * 16 * 4 + 8) + 4;
        layer(4) + layer(slots)
    }
}
