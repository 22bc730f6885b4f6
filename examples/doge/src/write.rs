//! The command line of `doge`, and what it asks for.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use burn::tensor::FloatDType;
use clap::{ArgGroup, Parser};
use flash_dma_models::data::TextStream;
use flash_dma_models::generate::{Beams, Ended, Generator};

use doge::error::Error;
use doge::folder::Folder;
use doge::options::{Drafter, Drafting, Place, Sampling};
use doge::{fresh, loss};

/// Writes what follows prompts with a Doge in Hugging Face's files.
///
/// --weights is a folder with config.json, model.safetensors (or its shards and their index) and tokenizer.json, as it is
/// downloaded from the Hub. A single text is shown token by token; of several, each line when it is whole, after the
/// number of its prompt. Times and how a text ended go to the standard error.
#[derive(Debug, Clone, Parser)]
#[command(version)]
#[command(group(ArgGroup::new("task").required(true).multiple(true).args(["prompt", "check_loss", "fresh"])))]
pub struct Cli {
    /// Folder of the model.
    #[arg(long, value_name = "DIR", required_unless_present = "fresh")]
    pub weights: Option<PathBuf>,
    /// Text to go on from; give it several times for several texts at once.
    #[arg(long, value_name = "TEXT")]
    pub prompt: Vec<String>,
    /// The most new tokens of each text.
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    pub max_new: usize,
    /// Text that ends a text, beside the model's own end: a sequence of tokens, as the tokenizer reads it alone.
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Tokens of a prompt that are read at once.
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    pub chunk: usize,
    /// Follow so many texts at a time and show the most likely one; draws nothing.
    #[arg(long, value_name = "COUNT", conflicts_with_all = ["draft", "lookup"])]
    pub beams: Option<usize>,
    #[command(flatten)]
    pub sampling: Sampling,
    #[command(flatten)]
    pub drafting: Drafting,
    #[command(flatten)]
    pub place: Place,
    /// Compare the loss of a sentence about Paris with that of Doge-20M in `transformers`, or with LOSS; in f32. The exit
    /// code is 1 if they differ.
    #[arg(long, value_name = "LOSS", num_args = 0..=1, default_missing_value = "2.779")]
    pub check_loss: Option<f32>,
    /// Write a small model with random parameters and a tokenizer of bytes into this folder, to try the programs on.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["weights", "prompt", "check_loss"])]
    pub fresh: Option<PathBuf>,
}

/// How a run ended.
pub enum Outcome {
    /// With what was asked for.
    Done,
    /// The loss is not the expected one.
    Disagrees,
}

/// Does what is asked for.
///
/// # Errors
///
/// [`Error`] if the options, the device or the folder cannot be used.
pub fn run(cli: &Cli) -> Result<Outcome, Error> {
    let (device, dtype) = cli.place.open()?;
    let Some(dir) = &cli.weights else {
        let dir = cli.fresh.as_ref().expect("one of the two is given");
        fresh::write(dir, &fresh::config(), cli.sampling.seed, &device)?;
        return Ok(Outcome::Done);
    };
    if let Some(expected) = cli.check_loss {
        let folder = Folder::read(dir, FloatDType::F32, &device)?;
        let loss = loss::of_sentence(&folder)?;
        let agrees = loss::agrees(loss, expected);
        let verdict = if agrees { "agrees" } else { "does not agree" };
        println!("loss {loss:.4}, expected {expected}: {verdict}");
        if !agrees {
            return Ok(Outcome::Disagrees);
        }
    }
    if cli.prompt.is_empty() {
        return Ok(Outcome::Done);
    }
    let folder = Folder::read(dir, dtype, &device)?;
    let drafter = cli.drafting.open(dtype, &device)?;
    match cli.beams {
        Some(beams) => search(cli, &folder, &Beams::new(beams))?,
        None => write(cli, &folder, &drafter)?,
    }
    Ok(Outcome::Done)
}

/// The generator and the prompts of a command line.
fn generator<'f>(
    cli: &Cli,
    folder: &'f Folder,
) -> Result<(Generator<'f, flash_dma_models::doge::Doge>, Vec<Vec<u32>>), Error> {
    // ANCHOR: generator
    let stops: Result<Vec<_>, _> = (cli.stop.iter())
        .map(|text| folder.vocabulary.encode(text))
        .collect();
    let generator = Generator::new(&folder.model)
        .with_sampler(cli.sampling.sampler())
        .with_max_new(cli.max_new)
        .with_stop(&folder.stops)
        .with_stop_sequences(&stops?)
        .with_chunk(cli.chunk);
    let prompts: Result<Vec<_>, _> = cli.prompt.iter().map(|text| folder.prompt(text)).collect();
    // ANCHOR_END: generator
    Ok((generator, prompts?))
}

/// Writes what follows each prompt, as it comes.
fn write(cli: &Cli, folder: &Folder, drafter: &Drafter) -> Result<(), Error> {
    let (generator, prompts) = generator(cli, folder)?;
    let begun = Instant::now();
    // ANCHOR: stream
    let mut shown: Vec<Shown> = (0..prompts.len())
        .map(|index| Shown::new(folder, (prompts.len() > 1).then_some(index)))
        .collect();
    let mut failed = None;
    let (texts, report) = drafter.generate(&generator, &prompts, |event| {
        let text = &mut shown[event.sequence];
        match text.push(event.token, event.ended) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                failed = Some(error);
                ControlFlow::Break(())
            }
        }
    })?;
    // ANCHOR_END: stream
    if let Some(error) = failed {
        return Err(error);
    }
    let tokens: usize = texts.iter().map(|text| text.tokens.len()).sum();
    let seconds = begun.elapsed().as_secs_f64();
    for (index, text) in texts.iter().enumerate() {
        let ended = match text.ended {
            Ended::Stop(_) | Ended::StopSequence(_) => "a stop",
            Ended::Length | Ended::Callback => "its length",
        };
        eprintln!(
            "text {index}: {} tokens, ended by {ended}",
            text.tokens.len()
        );
    }
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
fn search(cli: &Cli, folder: &Folder, beams: &Beams) -> Result<(), Error> {
    let (generator, prompts) = generator(cli, folder)?;
    for (index, prompt) in prompts.iter().enumerate() {
        let best = generator.try_beams(prompt, beams)?;
        for beam in best {
            let mut text = Shown::new(folder, (prompts.len() > 1).then_some(index));
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
    /// The prompt's number, if there are several, and the line that is not whole yet.
    line: Option<(usize, String)>,
}

impl<'f> Shown<'f> {
    fn new(folder: &'f Folder, index: Option<usize>) -> Self {
        Self {
            stream: folder.vocabulary.stream(),
            line: index.map(|index| (index, String::new())),
        }
    }

    fn push(&mut self, token: u32, ended: Option<Ended>) -> Result<(), Error> {
        let mut piece = self.stream.push(token)?;
        if ended.is_some() {
            piece.push_str(&self.stream.finish()?);
        }
        match &mut self.line {
            None => print!("{piece}"),
            Some((index, line)) => {
                line.push_str(&piece);
                while let Some((whole, rest)) = line.split_once('\n') {
                    println!("{index}: {whole}");
                    *line = rest.to_owned();
                }
                if ended.is_some() && !line.is_empty() {
                    print!("{index}: {line}");
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
