//! `doge serve`: prompts in over HTTP, lines of text out. Waiting requests are answered as one batch.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, TrySendError, channel, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use flash_dma_models::LanguageModel;
use flash_dma_models::data::TextStream;
use flash_dma_models::generate::{Ended, Event, Generator, Sampler};
use httparse::Status;
use serde::{Deserialize, Serialize};

use crate::{Drafter, Drafting, Error, Folder, Place, Sampling, piece};

/// Maximum bytes of a request's head.
const HEAD: usize = 16 << 10;

/// Maximum bytes of a request's body.
const BODY: usize = 1 << 20;

/// Time limit for each read from and write to a client.
const PATIENCE: Duration = Duration::from_secs(30);

/// Answers prompts over HTTP.
///
/// `POST /generate` takes `{"prompt": "…", "max_new": 64, "stop": ["\n"]}` and sends one line of JSON per token.
/// Requests that wait at the same time are answered as one batch; those that arrive while a batch is written wait for
/// its end. There is no encryption and no log-in: it listens on this machine only, unless --address says otherwise.
#[derive(Debug, Parser)]
pub struct Cli {
    /// Folder of the model.
    #[arg(long, value_name = "DIR")]
    weights: PathBuf,
    /// Address to listen on; port 0 picks a free one.
    #[arg(long, default_value = "127.0.0.1:8080")]
    address: String,
    /// Maximum number of new tokens of a text.
    #[arg(long, value_name = "TOKENS", default_value_t = 256)]
    max_new: usize,
    /// Number of prompt tokens read at once.
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    chunk: usize,
    /// Maximum number of requests in a batch.
    #[arg(long, default_value_t = 16)]
    batch: usize,
    /// Time that a batch waits to fill up, in milliseconds.
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 5)]
    gather: u64,
    /// Requests that may wait for the next batch; others are refused with status 503.
    #[arg(long, default_value_t = 64)]
    waiting: usize,
    #[command(flatten)]
    sampling: Sampling,
    #[command(flatten)]
    drafting: Drafting,
    #[command(flatten)]
    place: Place,
}

/// Serves until the process ends: one thread has the model, and each connection a thread of its own.
pub fn run(cli: &Cli) -> Result<(), Error> {
    if [cli.max_new, cli.chunk, cli.batch].contains(&0) {
        return Err("--max-new, --chunk and --batch must be at least 1".into());
    }
    let sampler = cli.sampling.sampler()?;
    let (device, dtype) = cli.place.open()?;
    let engine = Engine {
        folder: Folder::read(&cli.weights, dtype, &device)?,
        drafter: cli.drafting.open(dtype, &device)?,
        sampler,
        max_new: cli.max_new,
        chunk: cli.chunk,
        batch: cli.batch,
        gather: Duration::from_millis(cli.gather),
    };
    let unusable = |error: io::Error| format!("{}: {error}", cli.address);
    let listener = TcpListener::bind(&cli.address).map_err(unusable)?;
    println!("listening on {}", listener.local_addr().map_err(unusable)?);
    // ANCHOR: serve
    let (queue, jobs) = sync_channel(cli.waiting);
    let engine = Arc::new(engine);
    let worker = engine.clone();
    thread::spawn(move || worker.work(&jobs));
    loop {
        let (connection, _) = listener.accept().map_err(unusable)?;
        let (engine, queue) = (engine.clone(), queue.clone());
        thread::spawn(move || engine.answer(connection, &queue));
    }
    // ANCHOR_END: serve
}

/// A client's request.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    /// Text to continue.
    prompt: String,
    /// Maximum number of new tokens; capped by the server's limit, which is also the default.
    max_new: Option<usize>,
    /// Strings that end the text: the token that completes one is the last one sent.
    #[serde(default)]
    stop: Vec<String>,
}

/// The server's answer: a line of JSON each, sent as soon as it is known.
#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Line {
    /// The text of one more token.
    Text(String),
    /// The end of the text.
    End {
        reason: Reason,
        tokens: usize,
        /// Number of requests answered together.
        batch: usize,
    },
    /// The text cannot go on.
    Error(String),
}

/// Why a text ended.
#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Reason {
    /// At the model's end, or a stop of the request.
    Stop,
    /// At the maximum length.
    Length,
}

/// Status and reason of a refusal.
type Refusal = (u16, String);

/// A request that has been checked.
struct Job {
    prompt: Vec<u32>,
    max_new: usize,
    stop: Vec<String>,
    lines: Sender<Line>,
}

/// A model that answers.
struct Engine {
    folder: Folder,
    drafter: Drafter,
    sampler: Sampler,
    max_new: usize,
    chunk: usize,
    batch: usize,
    gather: Duration,
}

impl Engine {
    /// Reads a request, queues it, and sends the lines as they come.
    fn answer(&self, mut connection: TcpStream, queue: &SyncSender<Job>) {
        // Without limits a silent client would hold its thread, and nothing else.
        connection.set_read_timeout(Some(PATIENCE)).ok();
        connection.set_write_timeout(Some(PATIENCE)).ok();
        connection.set_nodelay(true).ok();
        let (sender, lines) = channel();
        let accepted = read(&mut connection)
            .and_then(|body| self.check(&body, sender))
            .and_then(|job| match queue.try_send(job) {
                Ok(()) => Ok(()),
                Err(TrySendError::Full(_)) => Err((503, "too many requests wait".into())),
                Err(TrySendError::Disconnected(_)) => Err((500, "the model has stopped".into())),
            });
        // A client that has gone needs no answer; dropping its lines ends its text.
        let sent = match accepted {
            Ok(()) => send(&mut connection, 200, lines),
            Err((status, reason)) => send(&mut connection, status, [Line::Error(reason)]),
        };
        sent.ok();
    }

    /// Refuses a request that the model cannot continue, before it waits.
    fn check(&self, body: &[u8], lines: Sender<Line>) -> Result<Job, Refusal> {
        let request: Request =
            serde_json::from_slice(body).map_err(|error| (400, error.to_string()))?;
        let prompt = self.folder.prompt(&request.prompt);
        let prompt = prompt.map_err(|error| (400, error.to_string()))?;
        let max_new = request.max_new.unwrap_or(self.max_new).min(self.max_new);
        if prompt.is_empty() {
            return Err((400, "the prompt has no tokens".into()));
        }
        if max_new == 0 || request.stop.iter().any(String::is_empty) {
            return Err((400, "max_new is 0, or a stop is empty".into()));
        }
        if !self.fits(prompt.len(), max_new) {
            let sizes = format!("{} tokens, and {max_new} to follow", prompt.len());
            return Err((400, format!("{sizes}, are more than the model reads")));
        }
        Ok(Job {
            prompt,
            max_new,
            stop: request.stop,
            lines,
        })
    }

    /// True if the model can read this many tokens.
    fn fits(&self, prompt: usize, new: usize) -> bool {
        let limit = self.folder.model.max_len();
        limit.is_none_or(|limit| prompt.saturating_add(new) <= limit)
    }

    // ANCHOR: work
    /// Takes the waiting requests, up to a full batch, and answers them together.
    fn work(&self, jobs: &Receiver<Job>) {
        let mut held = None;
        while let Some(first) = held.take().or_else(|| jobs.recv().ok()) {
            let mut batch = vec![first];
            let until = Instant::now() + self.gather;
            while batch.len() < self.batch {
                let left = until.saturating_duration_since(Instant::now());
                let Ok(job) = jobs.recv_timeout(left) else {
                    break;
                };
                if !self.fit_together(&batch, &job) {
                    held = Some(job);
                    break;
                }
                batch.push(job);
            }
            self.write(batch);
        }
    }
    // ANCHOR_END: work

    /// True if, with one more request, the batch's longest prompt and longest text together fit the model: a batch
    /// has one length for all.
    fn fit_together(&self, batch: &[Job], job: &Job) -> bool {
        let all = || batch.iter().chain([job]);
        let prompt = all().map(|job| job.prompt.len()).max().unwrap_or(0);
        self.fits(prompt, all().map(|job| job.max_new).max().unwrap_or(0))
    }

    // ANCHOR: write
    /// Answers a batch.
    fn write(&self, batch: Vec<Job>) {
        let generator = Generator::new(&self.folder.model)
            .with_sampler(self.sampler)
            .with_max_new(batch.iter().map(|job| job.max_new).max().unwrap_or(0))
            .with_stop(&self.folder.stops)
            .with_chunk(self.chunk);
        let prompts: Vec<Vec<u32>> = batch.iter().map(|job| job.prompt.clone()).collect();
        let size = batch.len();
        let answer = |job| Answer {
            job,
            stream: self.folder.vocabulary.stream(),
            text: String::new(),
            size,
        };
        let mut answers: Vec<Answer> = batch.into_iter().map(answer).collect();
        let on_event = |event: Event| answers[event.sequence].push(event);
        if let Err(error) = self.drafter.generate(&generator, &prompts, on_event) {
            for answer in &answers {
                // Requests that have ended no longer listen.
                answer.job.lines.send(Line::Error(error.to_string())).ok();
            }
        }
    }
    // ANCHOR_END: write
}

/// A text being sent.
struct Answer<'v> {
    job: Job,
    stream: TextStream<'v>,
    text: String,
    /// Requests of the batch.
    size: usize,
}

impl Answer<'_> {
    /// Sends a token. Ends the text if its client asked for that, or no longer listens.
    fn push(&mut self, event: Event) -> ControlFlow<()> {
        let (tokens, batch) = (event.index + 1, self.size);
        let full = tokens >= self.job.max_new;
        let last = full || event.ended.is_some();
        let piece = match piece(&mut self.stream, event.token, last) {
            Ok(piece) => piece,
            Err(error) => return self.send([Line::Error(error.to_string())], true),
        };
        self.text.push_str(&piece);
        let reason = match event.ended {
            Some(Ended::Stop(_) | Ended::StopSequence(_)) => Some(Reason::Stop),
            _ if self.stopped(piece.len()) => Some(Reason::Stop),
            _ if full => Some(Reason::Length),
            _ => None,
        };
        let last = reason.is_some();
        let end = reason.map(|reason| Line::End {
            reason,
            tokens,
            batch,
        });
        let text = (!piece.is_empty()).then_some(Line::Text(piece));
        self.send(text.into_iter().chain(end), last)
    }

    /// True if one of the stops is in the text and ends in its last bytes.
    fn stopped(&self, last: usize) -> bool {
        self.job.stop.iter().any(|stop| {
            let from = self.text.len() - last;
            let found = self.text.rfind(stop.as_str());
            found.is_some_and(|at| at + stop.len() > from)
        })
    }

    fn send(&self, lines: impl IntoIterator<Item = Line>, last: bool) -> ControlFlow<()> {
        let mut lines = lines.into_iter();
        let sent = lines.try_for_each(|line| self.job.lines.send(line));
        match sent.is_err() || last {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }
}

/// Reads the body of `POST /generate`.
fn read(connection: &mut TcpStream) -> Result<Vec<u8>, Refusal> {
    let broken = |error: io::Error| (400, format!("the request ends early: {error}"));
    let (mut bytes, mut chunk) = (Vec::new(), [0; 4096]);
    let (head, length, waits) = loop {
        let mut fields = [httparse::EMPTY_HEADER; 64];
        let mut request = httparse::Request::new(&mut fields);
        let parsed = request
            .parse(&bytes)
            .map_err(|error| (400, error.to_string()));
        if let Status::Complete(head) = parsed? {
            let field = |name: &str| {
                let mut fields = request.headers.iter();
                let field = fields.find(|field| field.name.eq_ignore_ascii_case(name))?;
                std::str::from_utf8(field.value).ok()
            };
            match (request.method, request.path) {
                (Some("POST"), Some("/generate")) => {}
                (_, Some("/generate")) => return Err((405, "the method must be POST".into())),
                _ => return Err((404, "the address is /generate".into())),
            }
            let length = field("content-length").and_then(|length| length.parse::<usize>().ok());
            let length = length.ok_or((411, "the request needs a Content-Length".to_owned()))?;
            break (head, length, field("expect").is_some());
        }
        if bytes.len() > HEAD {
            let reason = format!("the head of the request has more than {HEAD} bytes");
            return Err((431, reason));
        }
        match connection.read(&mut chunk).map_err(broken)? {
            0 => return Err((400, "the head of the request does not end".into())),
            read => bytes.extend(&chunk[..read]),
        }
    };
    if length > BODY {
        return Err((413, format!("the request has more than {BODY} bytes")));
    }
    if waits {
        let go_on = b"HTTP/1.1 100 Continue\r\n\r\n";
        connection.write_all(go_on).map_err(broken)?;
    }
    let begun = bytes.len().min(head + length);
    bytes.resize(head + length, 0);
    connection.read_exact(&mut bytes[begun..]).map_err(broken)?;
    Ok(bytes.split_off(head))
}

/// Sends lines until there are no more, then closes the connection, which ends the answer.
fn send(
    connection: &mut TcpStream,
    status: u16,
    lines: impl IntoIterator<Item = Line>,
) -> io::Result<()> {
    let kind = "Content-Type: application/x-ndjson\r\nConnection: close";
    write!(connection, "HTTP/1.1 {status} \r\n{kind}\r\n\r\n")?;
    for line in lines {
        let text = serde_json::to_string(&line)? + "\n";
        connection.write_all(text.as_bytes())?;
    }
    Ok(())
}
