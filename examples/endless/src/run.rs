//! Reading and writing by turns, and what is measured.

use std::fs::File;
use std::io::Write;
use std::time::Instant;

use serde::Serialize;
use train_text::data::Corpus;
use train_text::error::Error;
use train_text::generate::{Generator, draw, sampler};
use train_text::sample::printable;

use crate::Cli;
use crate::model::{self, Trained};

/// What is measured at a stop.
#[derive(Debug, Serialize)]
struct Stop {
    /// Bytes read and written before the stretch.
    context: usize,
    /// Bytes read a second since the last stop, in chunks.
    read_per_second: Option<f64>,
    /// Bytes of the stretch.
    written: usize,
    /// Median time of a byte written: the model's step, the copy of the logits to the host and the draw.
    milliseconds_a_byte: Option<f64>,
    /// Bytes that all caches take.
    cache_bytes: usize,
    /// Bytes in use and bytes reserved on the device, parameters included, where it tells.
    device_bytes: Option<[u64; 2]>,
}

/// Reads and writes up to the context that was asked for.
pub fn run(cli: &Cli) -> Result<(), Error> {
    let corpus = match &cli.data {
        Some(path) => Corpus::read(path)?,
        None => Corpus::own_repository()?,
    };
    let Trained { model, settings } = model::open(cli, &corpus)?;
    let json_error = || Error::io(cli.json.clone().unwrap_or_default());
    let json = cli.json.as_ref().map(File::create).transpose();
    let mut json = json.map_err(json_error())?;
    println!(
        "{} layers of {} kv heads, window {}, {}; trained on contexts of {} bytes. Further on attention is as exact \
         and as fast, but the text is only as good as that training: it never saw such positions, nor \
         ranked so many keys.",
        settings.layers,
        settings.kv_heads,
        settings.window,
        settings.dtype.name(),
        settings.seq,
    );

    let mut generator = Generator::new(&model)?;
    // Compiles what reading and writing launch, so that it is not part of the times.
    for count in [cli.chunk, 1, 1, cli.chunk] {
        generator.read(&vec![b' '; count])?;
    }
    generator.reset();
    let mut session = Session {
        generator,
        corpus: &corpus.bytes,
        at: 0,
        logits: Vec::new(),
        drawn: 0,
        cli,
    };
    match &cli.prompt {
        Some(prompt) => session.logits = session.generator.read(prompt.as_bytes())?,
        None => session.read_to(256.min(cli.context))?,
    }
    println!(
        "   context |  read B/s | written | ms/byte | bytes/s | cache bytes | device MiB in use, reserved"
    );
    let mut target = session.generator.context().max(1024);
    loop {
        let before = session.generator.context();
        let start = Instant::now();
        if !cli.write_only {
            session.read_to(target.min(cli.context))?;
        }
        let seconds = start.elapsed().as_secs_f64();
        let context = session.generator.context();
        let times = session.write(match cli.write_only {
            true => target.min(cli.context).saturating_sub(context),
            false => cli.write,
        })?;
        let stop = Stop {
            context,
            read_per_second: (context > before).then(|| (context - before) as f64 / seconds),
            written: times.len(),
            milliseconds_a_byte: median(times),
            cache_bytes: session.generator.cache_bytes(),
            device_bytes: session.generator.device_bytes(),
        };
        println!("{}", row(&stop));
        if let Some(file) = &mut json {
            let line = serde_json::to_string(&stop).expect("a stop's keys are strings");
            writeln!(file, "{line}").map_err(json_error())?;
        }
        if session.generator.context() >= cli.context {
            return Ok(());
        }
        target = 4 * target.max(context);
    }
}

/// A model in the middle of a text.
struct Session<'a> {
    generator: Generator,
    /// Read over and over, from `at` on.
    corpus: &'a [u8],
    at: usize,
    /// Of the byte that follows the last one.
    logits: Vec<f32>,
    /// Bytes that have been drawn.
    drawn: usize,
    cli: &'a Cli,
}

impl Session<'_> {
    /// Reads the corpus up to a context of `target` bytes, waiting for the device at the end only.
    fn read_to(&mut self, target: usize) -> Result<(), Error> {
        let mut last = None;
        while self.generator.context() < target {
            let count = (target - self.generator.context()).min(self.cli.chunk);
            let chunk = self.corpus.iter().cycle().skip(self.at).take(count);
            let chunk: Vec<u8> = chunk.copied().collect();
            self.at = (self.at + count) % self.corpus.len();
            last = Some(self.generator.enqueue(&chunk)?);
        }
        if let Some(logits) = last.map(|logits| logits.try_into_vec_as::<f32>()) {
            self.logits = logits.expect("the logits can be read");
        }
        Ok(())
    }

    /// Writes `count` bytes, and returns the seconds that each took.
    fn write(&mut self, count: usize) -> Result<Vec<f64>, Error> {
        let mut times = Vec::with_capacity(count);
        let mut text = Vec::new();
        let cli = self.cli;
        let sampler = sampler(cli.seed, cli.temperature, cli.top_k, cli.top_p)?;
        for _ in 0..count {
            let start = Instant::now();
            let byte = draw(&sampler, &self.logits, self.drawn)?;
            self.drawn += 1;
            self.logits = self.generator.read(&[byte])?;
            times.push(start.elapsed().as_secs_f64());
            text.push(byte);
            if !self.cli.quiet && (byte == b'\n' || text.len() >= 80) {
                stream(&text);
                text.clear();
            }
        }
        if !self.cli.quiet {
            stream(&text);
            println!();
        }
        Ok(times)
    }
}

fn stream(text: &[u8]) {
    print!("{}", printable(text));
    // A closed terminal shows nothing, which is no reason to stop measuring.
    std::io::stdout().flush().ok();
}

fn median(mut times: Vec<f64>) -> Option<f64> {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).map(|seconds| seconds * 1e3)
}

fn row(stop: &Stop) -> String {
    let number = |value: Option<f64>, digits: usize| {
        value.map_or_else(|| "-".into(), |value| format!("{value:.digits$}"))
    };
    let device = stop.device_bytes.map(|bytes| {
        let [used, reserved] = bytes.map(|bytes| bytes as f64 / f64::from(1 << 20));
        format!("{used:.1}, {reserved:.1}")
    });
    let per_second = stop.milliseconds_a_byte.map(|time| 1e3 / time);
    format!(
        "{:>10} | {:>9} | {:>7} | {:>7} | {:>7} | {:>11} | {}",
        stop.context,
        number(stop.read_per_second, 0),
        stop.written,
        number(stop.milliseconds_a_byte, 3),
        number(per_second, 0),
        stop.cache_bytes,
        device.unwrap_or_else(|| "-".into())
    )
}
