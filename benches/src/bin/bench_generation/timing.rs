//! The ways in which a token is timed.

use crate::Options;
use crate::session::{Prompt, Session, VOCABULARY};
use burn::tensor::{Device, Int, Tensor, capture};
use burn_flash_dma::product;
use flash_dma_benches::launches::{Launches, Watch};
use flash_dma_benches::shares::Launched;
use flash_dma_benches::stats::Millis;
use flash_dma_models::generate::Generator;
use flash_dma_models::nn::Decoder;
use serde::Serialize;
use std::error::Error;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

/// The sides of the matrices that keep a device busy.
const BUSY_SIDE: usize = 8192;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A token's times. See the [program](crate).
pub struct Times {
    /// Of a run without waiting, per token.
    pub queued: Millis,
    /// Of each token that was read.
    pub token_read: Millis,
    /// Of each token that the host chose.
    pub logits_read: Millis,
    /// Until the call has returned.
    pub enqueue: Millis,
    /// Of each token that a generator hands out, its steps launched.
    pub generated: Millis,
    /// The same, its steps replayed.
    pub generated_replayed: Millis,
    /// Of a captured token.
    pub replayed: Replayed,
    /// The launches of a token, if they were watched.
    pub launched: Option<Launched>,
    /// Whether all ways have written the same tokens.
    pub same_tokens: bool,
    /// The most memory that the allocator had reserved before the captured token and the products that keep the device
    /// busy.
    pub peak_bytes: Option<u64>,
}

/// A captured token.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Replayed {
    /// Of a run of replays, per token.
    Ms(Millis),
    /// Why there is none.
    Missing(String),
}

impl Times {
    /// Times the tokens behind a session, which stays where it is.
    pub fn of(
        session: &Session,
        writer: &Decoder,
        prompt: &Prompt,
        options: &Options,
        device: &Device,
    ) -> Result<Self> {
        let (queued, written) = queued(&mut warm(session, options, device)?, options, device)?;
        let (token_read, read) = each(
            &mut warm(session, options, device)?,
            options,
            device,
            |session| tokens_of(session.step()?),
        )?;
        let (logits_read, chosen) = each(
            &mut warm(session, options, device)?,
            options,
            device,
            |session| {
                let tokens = choose(session.logits()?)?;
                session.write(&tokens, device);
                Ok(tokens)
            },
        )?;
        let enqueue = enqueue(&mut warm(session, options, device)?, options, device)?;
        let (launched_steps, launched_text) = generated(writer, prompt, options, false)?;
        let (replayed_steps, replayed_text) = generated(writer, prompt, options, true)?;
        let peak_bytes = device.memory_pool_usage().map(|usage| usage.bytes_reserved);
        let launched = match options.no_profile {
            true => None,
            false => Some(launched(
                &mut warm(session, options, device)?,
                options,
                device,
            )?),
        };
        Ok(Self {
            queued,
            token_read,
            logits_read,
            enqueue,
            same_tokens: [read, chosen, launched_text, replayed_text]
                .iter()
                .all(|tokens| *tokens == written),
            generated: launched_steps,
            generated_replayed: replayed_steps,
            peak_bytes,
            launched,
            // Last: a capture that fails may leave the device in a state that nobody has planned for.
            replayed: match options.no_graph {
                true => Replayed::Missing("not asked for".into()),
                false => replayed(warm(session, options, device)?, options, device)?,
            },
        })
    }
}

/// The milliseconds of a call, from an idle device until it is idle again.
pub fn clock<T, E: Error + 'static>(
    device: &Device,
    call: impl FnOnce() -> std::result::Result<T, E>,
) -> Result<f64> {
    device.sync()?;
    let start = Instant::now();
    // What it returns lives until the device is idle: lazy engines leave out what nobody holds.
    let _returned = call()?;
    device.sync()?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

/// A session of its own that has written the tokens of the warm-up.
fn warm(session: &Session, options: &Options, device: &Device) -> Result<Session> {
    let mut session = session.clone();
    session.steps(options.warm_up)?;
    device.sync()?;
    Ok(session)
}

/// The time per token of each run, and the tokens of the first.
fn queued(
    session: &mut Session,
    options: &Options,
    device: &Device,
) -> Result<(Millis, Vec<Vec<i32>>)> {
    let mut first = None;
    let mut times = Vec::with_capacity(options.runs);
    for _ in 0..options.runs {
        let mut written = Vec::new();
        let all = clock(device, || {
            written = session.steps(options.tokens)?;
            Ok::<_, burn_flash_dma::AttentionError>(())
        })?;
        times.push(all / options.tokens as f64);
        first.get_or_insert(written);
    }
    let first = first.into_iter().flatten().map(tokens_of);
    Ok((Millis::of(times), first.collect::<Result<_>>()?))
}

/// The time of each token of one run, which the host waits for, and the tokens.
fn each(
    session: &mut Session,
    options: &Options,
    device: &Device,
    token: impl Fn(&mut Session) -> Result<Vec<i32>>,
) -> Result<(Millis, Vec<Vec<i32>>)> {
    device.sync()?;
    let (mut times, mut written) = (Vec::new(), Vec::new());
    for _ in 0..options.tokens {
        let start = Instant::now();
        written.push(token(session)?);
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok((Millis::of(times), written))
}

/// The time of each token that a generator hands out behind the warm-up, and those tokens.
fn generated(
    writer: &Decoder,
    prompt: &Prompt,
    options: &Options,
    replay: bool,
) -> Result<(Millis, Vec<Vec<i32>>)> {
    // The first token follows the prompt.
    let before = 1 + options.warm_up;
    let generator = Generator::new(writer)
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

/// The time in which a call returns, while the device is idle.
fn enqueue(session: &mut Session, options: &Options, device: &Device) -> Result<Millis> {
    let mut times = Vec::with_capacity(options.tokens);
    for _ in 0..options.tokens {
        device.sync()?;
        let start = Instant::now();
        let written = session.step()?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
        device.sync()?;
        drop(written);
    }
    Ok(Millis::of(times))
}

/// The launches of a token that is queued behind work enough to keep the device busy meanwhile.
fn launched(session: &mut Session, options: &Options, device: &Device) -> Result<Launched> {
    // The first of them compiles.
    drop(busy(options.busy().min(1), device, options));
    device.sync()?;
    let working = busy(options.busy(), device, options);
    device.flush()?;
    let launches = Launches::watch(Watch::Times);
    let written = session.step()?;
    device.sync()?;
    let launched = launches.take();
    drop((working, written));
    Ok(launched)
}

/// Queues products one behind the other.
fn busy(products: usize, device: &Device, options: &Options) -> Option<Tensor<2>> {
    let dtype = options.dtype.burn();
    let zeros = || Tensor::<2>::zeros([BUSY_SIDE, BUSY_SIDE], (device, dtype.into()));
    (products > 0).then(|| {
        let factor = zeros();
        (0..products).fold(zeros(), |left, _| product(left, factor.clone()))
    })
}

/// The time per replay of a captured token.
fn replayed(mut session: Session, options: &Options, device: &Device) -> Result<Replayed> {
    let step = move || session.step();
    let captured = catch_unwind(AssertUnwindSafe(move || capture(device, step)));
    let mut graph = match captured {
        Ok(graph) => graph,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            let why = text.unwrap_or("a panic without a text");
            return Ok(Replayed::Missing(format!("the capture failed: {why}")));
        }
    };
    if let Err(error) = graph.output() {
        return Ok(Replayed::Missing(error.to_string()));
    }
    if !graph.is_hardware() {
        return Ok(Replayed::Missing("the device has captured no graph".into()));
    }
    let mut times = Vec::with_capacity(options.runs);
    for run in 0..=options.runs {
        device.sync()?;
        let start = Instant::now();
        for _ in 0..options.tokens {
            // SAFETY: the model and the caches live in the captured closure, and nothing else uses them.
            unsafe { graph.replay() };
        }
        device.sync()?;
        // The first run is the warm-up.
        if run > 0 {
            times.push(start.elapsed().as_secs_f64() * 1e3 / options.tokens as f64);
        }
    }
    Ok(Replayed::Ms(Millis::of(times)))
}

/// The tokens of `[batch, 1]`. Waits for the device.
fn tokens_of(tokens: Tensor<2, Int>) -> Result<Vec<i32>> {
    Ok(tokens.try_into_vec_as::<i32>()?)
}

/// The most likely token of each sequence, the first of equals, chosen on the host. Waits for the device.
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
