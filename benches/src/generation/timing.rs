//! The ways to time a token.

use super::Options;
use super::row::Profile;
use super::session::{Prompt, Session, VOCABULARY};
use crate::Result;
use crate::launches::Launches;
use crate::model::clock;
use crate::shares::Launched;
use crate::stats::Millis;
use burn::tensor::{Device, Int, Tensor, capture};
use burn_flash_dma::product;
use flash_dma_models::generate::Generator;
use flash_dma_models::nn::Decoder;
use serde::Serialize;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

/// Side of the matrices that keep a device busy.
const BUSY_SIDE: usize = 8192;

/// Times of a token. See the [command](super).
#[derive(Serialize)]
struct TokenTimes {
    /// A run without waiting, per token.
    queued: Millis,
    /// Each token that was read.
    token_read: Millis,
    /// Each token that the host chose.
    logits_read: Millis,
    /// Until the call has returned.
    enqueue: Millis,
    /// Each token that a generator returns, with launched steps.
    generated: Millis,
    /// Each token that a generator returns, with replayed steps.
    generated_replayed: Millis,
    /// A captured token.
    replayed: Replayed,
}

/// All measurements after the prompt.
#[derive(Serialize)]
pub struct Times {
    token_ms: TokenTimes,
    /// From the median of `queued`, over all sequences.
    tokens_per_second: f64,
    /// True if all ways have written the same tokens.
    same_tokens: bool,
    /// Maximum memory that the allocator had reserved before the captured token and the products that keep the device
    /// busy.
    peak_bytes: Option<u64>,
    /// Kernels of a token. Engines without launches, and builds without CubeCL, have none.
    profile: Option<Profile>,
}

/// A captured token.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Replayed {
    /// Time per token of a run of replays.
    Ms(Millis),
    /// Reason for its absence.
    Missing(String),
}

/// Times tokens after a session, which is not changed.
pub struct Timing<'a> {
    pub session: &'a Session,
    pub writer: &'a Decoder,
    pub prompt: &'a Prompt,
    pub options: &'a Options,
    pub device: &'a Device,
}

/// The tokens that were written, one step after the other.
type Written = Vec<Vec<i32>>;

impl Timing<'_> {
    /// Times the tokens in all ways.
    pub fn times(&self) -> Result<Times> {
        let Self {
            options, device, ..
        } = self;
        let (queued, written) = self.queued()?;
        let (token_read, read) = self.each(false, |session| tokens_of(session.step()?))?;
        let (logits_read, chosen) = self.each(false, |session| {
            let tokens = choose(session.logits()?)?;
            session.write(&tokens, device);
            Ok(tokens)
        })?;
        // The tokens are held until they are computed.
        let (enqueue, _written) = self.each(true, |session| Ok(session.step()?))?;
        device.sync()?;
        let (generated, launched_text) = self.generated(false)?;
        let (generated_replayed, replayed_text) = self.generated(true)?;
        let peak_bytes = device.memory_pool_usage().map(|usage| usage.bytes_reserved);
        let profile = match options.model.no_profile {
            true => None,
            false => Some(self.launched()?)
                .filter(|launched| launched.launched > 0)
                .map(|launched| Profile::new(&launched, queued.median, options.model.kernels)),
        };
        // Last: a failed capture may leave the device in an undefined state.
        let replayed = match options.no_graph {
            true => Replayed::Missing("not asked for".into()),
            false => self.replayed()?,
        };
        let others = [read, chosen, launched_text, replayed_text];
        Ok(Times {
            token_ms: TokenTimes {
                queued,
                token_read,
                logits_read,
                enqueue,
                generated,
                generated_replayed,
                replayed,
            },
            tokens_per_second: options.model.batch as f64 / queued.median * 1e3,
            same_tokens: others.iter().all(|tokens| *tokens == written),
            peak_bytes,
            profile,
        })
    }

    /// A copy of the session that has written the tokens of the warm-up.
    fn warm(&self) -> Result<Session> {
        let mut session = self.session.clone();
        session.steps(self.options.warm_up)?;
        self.device.sync()?;
        Ok(session)
    }

    /// Time per token of each run, and the tokens of the first.
    fn queued(&self) -> Result<(Millis, Written)> {
        let (mut session, tokens) = (self.warm()?, self.options.tokens);
        let (mut first, mut times) = (None, Vec::new());
        for _ in 0..self.options.model.common.runs {
            let (all, written) = clock(self.device, || session.steps(tokens))?;
            times.push(all / tokens as f64);
            first.get_or_insert(written?);
        }
        let first = first.into_iter().flatten().map(tokens_of);
        Ok((Millis::of(times), first.collect::<Result<_>>()?))
    }

    /// Time until each call for a token of one run returns, and the results; `idle`: the calls begin on an idle
    /// device.
    fn each<T>(
        &self,
        idle: bool,
        token: impl Fn(&mut Session) -> Result<T>,
    ) -> Result<(Millis, Vec<T>)> {
        let mut session = self.warm()?;
        let (mut times, mut written) = (Vec::new(), Vec::new());
        for _ in 0..self.options.tokens {
            if idle {
                self.device.sync()?;
            }
            let start = Instant::now();
            written.push(token(&mut session)?);
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
        Ok((Millis::of(times), written))
    }

    /// Time of each token that a generator returns after the warm-up, and those tokens.
    fn generated(&self, replay: bool) -> Result<(Millis, Written)> {
        let Self {
            options, prompt, ..
        } = self;
        // The first token follows the prompt.
        let before = 1 + options.warm_up;
        let generator = Generator::new(self.writer)
            .with_chunk(options.chunk)
            .with_max_new(before + options.tokens)
            .with_replay(replay);
        let (mut times, mut last) = (Vec::new(), Instant::now());
        let texts = generator.try_stream(&prompt.rows, |event| {
            if event.sequence == 0 {
                let now = Instant::now();
                times.push((now - last).as_secs_f64() * 1e3);
                last = now;
            }
            ControlFlow::Continue(())
        })?;
        let token = |index: usize| texts.iter().map(move |text| text.tokens[index] as i32);
        let written = (before..before + options.tokens).map(|index| token(index).collect());
        Ok((Millis::of(times.split_off(before)), written.collect()))
    }

    /// Launches of a token that is queued after enough work to keep the device busy meanwhile.
    fn launched(&self) -> Result<Launched> {
        let (mut session, busy) = (self.warm()?, self.options.busy());
        // The first of them compiles.
        drop(self.busy(busy.min(1)));
        self.device.sync()?;
        let working = self.busy(busy);
        self.device.flush()?;
        let launches = Launches::time();
        let written = session.step()?;
        self.device.sync()?;
        let launched = launches.take();
        drop((working, written));
        Ok(launched)
    }

    /// Queues products one after another.
    fn busy(&self, products: usize) -> Option<Tensor<2>> {
        let dtype = self.options.model.place.dtype.burn();
        let zeros = || Tensor::<2>::zeros([BUSY_SIDE, BUSY_SIDE], (self.device, dtype.into()));
        (products > 0).then(|| {
            let factor = zeros();
            (0..products).fold(zeros(), |left, _| product(left, factor.clone()))
        })
    }

    /// Time per replay of a captured token.
    fn replayed(&self) -> Result<Replayed> {
        let (mut session, tokens) = (self.warm()?, self.options.tokens);
        let step = move || session.step();
        let captured = catch_unwind(AssertUnwindSafe(move || capture(self.device, step)));
        let mut graph = match captured {
            Ok(graph) => graph,
            Err(panic) => {
                let why = panic_text(&*panic);
                return Ok(Replayed::Missing(format!("the capture failed: {why}")));
            }
        };
        if let Err(error) = graph.output() {
            return Ok(Replayed::Missing(error.to_string()));
        }
        if !graph.is_hardware() {
            return Ok(Replayed::Missing("the device has captured no graph".into()));
        }
        let mut times = Vec::new();
        for _ in 0..=self.options.model.common.runs {
            let replays = || {
                for _ in 0..tokens {
                    // SAFETY: the model and the caches live in the captured closure, and nothing else uses them.
                    unsafe { graph.replay() };
                }
            };
            times.push(clock(self.device, replays)?.0 / tokens as f64);
        }
        // The first run is the warm-up.
        Ok(Replayed::Ms(Millis::of(times.split_off(1))))
    }
}

/// The tokens of `[batch, 1]`. Waits for the device.
fn tokens_of(tokens: Tensor<2, Int>) -> Result<Vec<i32>> {
    Ok(tokens.try_into_vec_as::<i32>()?)
}

/// The most likely token of each sequence, the first among equals, chosen on the host. Waits for the device.
fn choose(logits: Tensor<2>) -> Result<Vec<i32>> {
    let logits = logits.try_into_vec_as::<f32>()?;
    let best = |row: &[f32]| {
        let first = (0, f32::NEG_INFINITY);
        let better = |best: (usize, f32), (at, &logit): (usize, &f32)| {
            if logit > best.1 { (at, logit) } else { best }
        };
        row.iter().enumerate().fold(first, better).0 as i32
    };
    Ok(logits.chunks_exact(VOCABULARY).map(best).collect())
}

/// The text of a panic.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without a text")
}
