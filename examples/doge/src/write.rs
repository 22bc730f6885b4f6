//! `doge write`: texts on the terminal.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use clap::Parser;
use flash_dma_models::data::{DataError, TextStream};
use flash_dma_models::doge::Doge;
use flash_dma_models::generate::{Beams, Ended, Generator};

use crate::{Drafting, Error, Folder, Place, Sampling, piece};

/// Writes texts after prompts.
///
/// A single text is shown token by token; several are shown line by line, each complete line after the number of its
/// prompt. Times and the reasons for ending go to the standard error.
#[derive(Debug, Parser)]
pub struct Cli {
    /// Folder of the model.
    #[arg(long, value_name = "DIR")]
    weights: PathBuf,
    /// Text to continue; repeat for several texts at once.
    #[arg(long, value_name = "TEXT", required = true)]
    prompt: Vec<String>,
    /// Maximum number of new tokens of each text.
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    max_new: usize,
    /// Text that ends a text, besides the model's own end tokens: a sequence of tokens, as the tokenizer splits it on
    /// its own.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Number of prompt tokens read at once.
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    chunk: usize,
    /// Follow this many texts at a time and show the most likely one; draws nothing.
    #[arg(long, value_name = "COUNT", conflicts_with_all = ["draft", "lookup"])]
    beams: Option<usize>,
    #[command(flatten)]
    sampling: Sampling,
    #[command(flatten)]
    drafting: Drafting,
    #[command(flatten)]
    place: Place,
}

/// Writes a text after each prompt, as it comes.
pub fn run(cli: &Cli) -> Result<(), Error> {
    let (device, dtype) = cli.place.open()?;
    let folder = Folder::read(&cli.weights, dtype, &device)?;
    let drafter = cli.drafting.open(dtype, &device)?;
    // ANCHOR: generator
    let stops: Result<Vec<_>, _> = (cli.stop.iter())
        .map(|text| folder.vocabulary.encode(text))
        .collect();
    let generator = Generator::new(&folder.model)
        .with_sampler(cli.sampling.sampler()?)
        .with_max_new(cli.max_new)
        .with_stop(&folder.stops)
        .with_stop_sequences(&stops?)
        .with_chunk(cli.chunk);
    let prompts: Result<Vec<_>, _> = cli.prompt.iter().map(|text| folder.prompt(text)).collect();
    // ANCHOR_END: generator
    let prompts = prompts?;
    let begun = Instant::now();
    // ANCHOR: stream
    let mut shown: Vec<Shown> = (0..prompts.len())
        .map(|index| Shown::new(&folder, (prompts.len() > 1).then_some(index)))
        .collect();
    if let Some(beams) = cli.beams {
        return search(&generator, &prompts, &Beams::new(beams), &mut shown);
    }
    let mut failed = None;
    let (texts, report) = drafter.generate(&generator, &prompts, |event| {
        match shown[event.sequence].push(event.token, event.ended) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                failed = Some(error);
                ControlFlow::Break(())
            }
        }
    })?;
    // ANCHOR_END: stream
    if let Some(error) = failed {
        return Err(error.into());
    }
    for (index, text) in texts.iter().enumerate() {
        let ended = match text.ended {
            Ended::Stop(_) | Ended::StopSequence(_) => "a stop",
            Ended::Length | Ended::Callback => "its length",
        };
        let tokens = text.tokens.len();
        eprintln!("text {index}: {tokens} tokens, ended by {ended}");
    }
    let tokens: usize = texts.iter().map(|text| text.tokens.len()).sum();
    let seconds = begun.elapsed().as_secs_f64();
    eprintln!("{tokens} tokens in {seconds:.2} s, prompts included");
    if let Some(report) = report {
        eprintln!(
            "{} of {} proposed tokens accepted, {} written in {} steps",
            report.accepted, report.proposed, report.written, report.steps
        );
    }
    Ok(())
}

/// Shows the most likely text of each prompt.
fn search(
    generator: &Generator<'_, Doge>,
    prompts: &[Vec<u32>],
    beams: &Beams,
    shown: &mut [Shown],
) -> Result<(), Error> {
    for (prompt, text) in prompts.iter().zip(shown) {
        for beam in generator.try_beams(prompt, beams)? {
            let (last, tokens) = beam.tokens.split_last().expect("a beam has a token");
            for &token in tokens {
                text.push(token, None)?;
            }
            text.push(*last, Some(beam.ended))?;
            eprintln!("log probability {:.4}", beam.log_probability);
        }
    }
    Ok(())
}

/// A text on the terminal.
struct Shown<'f> {
    stream: TextStream<'f>,
    /// Number of the prompt, if there are several, and the incomplete line.
    line: Option<(usize, String)>,
}

impl<'f> Shown<'f> {
    fn new(folder: &'f Folder, index: Option<usize>) -> Self {
        Self {
            stream: folder.vocabulary.stream(),
            line: index.map(|index| (index, String::new())),
        }
    }

    fn push(&mut self, token: u32, ended: Option<Ended>) -> Result<(), DataError> {
        let piece = piece(&mut self.stream, token, ended.is_some())?;
        match &mut self.line {
            None => print!("{piece}"),
            Some((index, line)) => {
                line.push_str(&piece);
                while let Some((whole, rest)) = line.split_once('\n') {
                    println!("{index}: {whole}");
                    *line = rest.to_owned();
                }
                if ended.is_some() && !line.is_empty() {
                    print!("{index}: {}", std::mem::take(line));
                }
            }
        }
        if ended.is_some() {
            println!();
        }
        // A closed terminal shows nothing, which is no reason to stop.
        std::io::stdout().flush().ok();
        Ok(())
    }
}
