//! `serve`: see `serve --help`.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

use doge::error::Error;
use doge::folder::Folder;
use doge::options::{Drafting, Place, Sampling};
use doge::server::{Engine, Settings, serve};

/// Answers prompts over HTTP with a Doge in Hugging Face's files.
///
/// `POST /generate` takes `{"prompt": "…", "max_new": 64, "stop": ["\n"]}` and sends one line of JSON per token. Requests
/// that wait at the same time are answered as one batch; those that come while a batch is written wait for its end.
/// There is no encryption and no log-in: it listens on this machine unless --address says otherwise.
#[derive(Debug, Clone, Parser)]
#[command(version)]
struct Cli {
    /// Folder of the model.
    #[arg(long, value_name = "DIR")]
    weights: PathBuf,
    /// Address to listen on; port 0 is any that is free.
    #[arg(long, default_value = "127.0.0.1:8080")]
    address: String,
    /// The most new tokens of a text.
    #[arg(long, value_name = "TOKENS", default_value_t = 256)]
    max_new: usize,
    /// Tokens of a prompt that are read at once.
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    chunk: usize,
    /// The most requests of a batch.
    #[arg(long, default_value_t = 16)]
    batch: usize,
    /// How long a batch that is not full waits for more requests, in milliseconds.
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 5)]
    gather: u64,
    /// Requests that may wait beside the batch; others are refused with status 503.
    #[arg(long, default_value_t = 64)]
    waiting: usize,
    #[command(flatten)]
    sampling: Sampling,
    #[command(flatten)]
    drafting: Drafting,
    #[command(flatten)]
    place: Place,
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("serve: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(cli: &Cli) -> Result<(), Error> {
    if [cli.max_new, cli.chunk, cli.batch].contains(&0) {
        let reason = "--max-new, --chunk and --batch must be at least 1";
        return Err(Error::Options(reason.into()));
    }
    let sampler = cli.sampling.sampler();
    sampler
        .try_check()
        .map_err(|error| Error::Options(error.to_string()))?;
    let (device, dtype) = cli.place.open()?;
    let engine = Engine {
        folder: Folder::read(&cli.weights, dtype, &device)?,
        drafter: cli.drafting.open(dtype, &device)?,
        settings: Settings {
            sampler,
            max_new: cli.max_new,
            chunk: cli.chunk,
            batch: cli.batch,
            gather: Duration::from_millis(cli.gather),
            waiting: cli.waiting,
        },
    };
    let unusable = |source| Error::Address {
        address: cli.address.clone(),
        source,
    };
    let listener = TcpListener::bind(&cli.address).map_err(unusable)?;
    println!("listening on {}", listener.local_addr().map_err(unusable)?);
    serve(&listener, engine)
}
