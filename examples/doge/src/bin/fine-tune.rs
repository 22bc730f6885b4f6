//! `fine-tune`: see `fine-tune --help`.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use burn::data::dataset::Dataset;
use burn::tensor::FloatDType;
use clap::Parser;
use flash_dma_models::Decoder;
use flash_dma_models::data::{PackedRows, TextFormat, TokenFile, write_tokens};

use doge::error::Error;
use doge::folder::{Folder, copy_beside};
use doge::loss;
use doge::options::Place;
use doge::train::{Plan, Rows, Start, Student, TARGETS, Tuning, loss_of, train};

/// Trains a Doge in Hugging Face's files on documents, and writes it in the same layout.
///
/// Adapters of low rank (LoRA) are trained on the products of every block and added to the weights at the end; with
/// --full all parameters are trained. Documents are packed into rows of one length and do not see each other.
#[derive(Debug, Clone, Parser)]
#[command(version)]
struct Cli {
    /// Folder of the model.
    #[arg(long, value_name = "DIR")]
    weights: PathBuf,
    /// Documents: JSON lines if the name ends in `.jsonl`, or else plain text with empty lines between them.
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    data: Vec<PathBuf>,
    /// The field of a JSON line that holds the text.
    #[arg(long, value_name = "NAME", default_value = "text")]
    field: String,
    /// Folder for the trained model; tokens, checkpoints and Burn's logs go into `training` below it.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Inner dimension of the adapters.
    #[arg(long, default_value_t = 8)]
    rank: usize,
    /// The adapters count alpha / rank times.
    #[arg(long, default_value_t = 16.0)]
    alpha: f64,
    /// Regular expression of the weights that get adapters.
    #[arg(long, value_name = "PATTERN", default_value = TARGETS)]
    targets: String,
    /// Train all parameters, without adapters.
    #[arg(long, conflicts_with_all = ["rank", "alpha", "targets"])]
    full: bool,
    /// Tokens of a row.
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    length: usize,
    /// Rows of a step.
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Passes over the documents.
    #[arg(long, default_value_t = 1)]
    epochs: usize,
    /// Checkpoints of an epoch. Before each the loss of the documents that are kept is measured.
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    checkpoints: usize,
    /// Go on behind the last checkpoint of --out, if there is one; all other options must be what they were.
    #[arg(long)]
    resume: bool,
    /// Learning rate at first; a cosine takes it to a tenth.
    #[arg(long, default_value_t = 1e-3)]
    rate: f64,
    /// One document in so many, the last ones, is kept to measure the loss on.
    #[arg(long, value_name = "COUNT", default_value_t = 10)]
    keep_one_in: usize,
    /// Write `expected.json` too: the logits of a text, for the script that compares them with `transformers`.
    #[arg(long)]
    expected: bool,
    /// Seed of the adapters and of the order.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    place: Place,
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("fine-tune: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(cli: &Cli) -> Result<(), Error> {
    let plan = plan(cli)?;
    let (device, dtype) = cli.place.open()?;
    let device = device.autodiff();
    device.seed(cli.seed);
    // ANCHOR: read
    // Parameters are f32 whatever the activations are: a small step is lost in 16 bits.
    let folder = Folder::read(&cli.weights, FloatDType::F32, &device)?;
    let rows = rows(cli, &folder)?;
    let student = Student::new(folder.model.with_dtype(dtype), &plan.tuning)?;
    // ANCHOR_END: read
    println!(
        "{} rows of {} tokens to train on, {} to measure; {} numbers are trained",
        rows.train.len(),
        cli.length,
        rows.valid.len(),
        student.trained(),
    );
    println!(
        "loss before {:.4}",
        loss_of(&student, &rows.valid, &device)?
    );
    let start = match cli.resume {
        true => Start::Checkpoint,
        false => Start::Anew,
    };
    let dir = cli.out.join("training");
    let student = train(student, &rows, &plan, &device, &dir, start)?;
    println!("loss after {:.4}", loss_of(&student, &rows.valid, &device)?);
    // ANCHOR: write
    let merged = student.merged();
    merged.save_safetensors(&cli.out)?;
    copy_beside(&cli.weights, &cli.out)?;
    // ANCHOR_END: write
    if cli.expected {
        let folder = Folder::read(&cli.out, FloatDType::F32, &merged.device())?;
        let path = cli.out.join("expected.json");
        let text = loss::expected(&folder)?;
        fs::write(&path, text).map_err(Error::io(&path))?;
    }
    println!("wrote {}", cli.out.display());
    Ok(())
}

/// What the command line asks for, if it means something.
fn plan(cli: &Cli) -> Result<Plan, Error> {
    let refuse = |reason: &str| Err(Error::Options(reason.into()));
    if [cli.batch, cli.epochs, cli.length, cli.checkpoints].contains(&0) {
        return refuse("--batch, --epochs, --length and --checkpoints must be at least 1");
    }
    if cli.keep_one_in < 2 {
        return refuse("--keep-one-in must be at least 2");
    }
    if !(cli.rate.is_finite() && cli.rate > 0.0 && cli.rate <= 1.0) {
        return refuse("--rate must be above 0 and at most 1");
    }
    if !cli.alpha.is_finite() {
        return refuse("--alpha must be a number");
    }
    let tuning = match cli.full {
        true => Tuning::Full,
        false => Tuning::Lora {
            rank: cli.rank,
            alpha: cli.alpha,
            targets: cli.targets.clone(),
        },
    };
    Ok(Plan {
        tuning,
        batch: cli.batch,
        epochs: cli.epochs,
        parts: cli.checkpoints,
        rate: cli.rate,
        seed: cli.seed,
    })
}

/// The documents as rows, of which the last are kept to measure.
fn rows(cli: &Cli, folder: &Folder) -> Result<Rows, Error> {
    let limit = folder.model.config().max_position_embeddings;
    if cli.length > limit {
        let reason = format!("--length must be at most {limit}, which the model reads");
        return Err(Error::Options(reason));
    }
    let dir = cli.out.join("training");
    fs::create_dir_all(&dir).map_err(Error::io(&dir))?;
    // ANCHOR: data
    let file = Arc::new(tokens(cli, folder, &dir.join("tokens"))?);
    let documents = file.documents();
    let kept = documents.div_ceil(cli.keep_one_in).min(documents / 2);
    let rows = |of| PackedRows::of(file.clone(), of, cli.length);
    Ok(Rows {
        train: rows(0..documents - kept)?,
        valid: rows(documents - kept..documents)?,
    })
    // ANCHOR_END: data
}

/// The documents as a token file.
fn tokens(cli: &Cli, folder: &Folder, out: &std::path::Path) -> Result<TokenFile, Error> {
    let lines = |path: &PathBuf| path.extension().is_some_and(|end| end == "jsonl");
    let format = match cli.data.iter().filter(|path| lines(path)).count() {
        0 => TextFormat::Separated(String::new()),
        all if all == cli.data.len() => TextFormat::Jsonl {
            field: cli.field.clone(),
        },
        _ => {
            let reason = "--data has JSON lines and plain text: give one kind";
            return Err(Error::Options(reason.into()));
        }
    };
    Ok(write_tokens(out, &cli.data, &format, &folder.vocabulary)?.file)
}
