//! A server of one address: prompts in, lines of text out. Requests that wait are answered as one batch.

mod http;

use std::net::{TcpListener, TcpStream};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, TrySendError, channel, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use flash_dma_models::Decoder;
use flash_dma_models::data::{DataError, TextStream};
use flash_dma_models::generate::{Ended, Event, Generator, Sampler};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::folder::Folder;
use crate::options::Drafter;

/// What a client sends: `{"prompt": "…", "max_new": 64, "stop": ["\n"]}`, of which the prompt must be there.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// The text to go on from.
    pub prompt: String,
    /// The most new tokens; the server's own bound, if it is less or there is none.
    pub max_new: Option<usize>,
    /// Texts that end the text: the token that completes one is the last that is sent.
    #[serde(default)]
    pub stop: Vec<String>,
}

/// What the server sends: a line of JSON each, as soon as it is known. The last one says how the text ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Line {
    /// The text of one more token.
    Text(String),
    /// The end of the text.
    End(End),
    /// The text cannot go on.
    Error(String),
}

/// How a text ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct End {
    /// Why there is no more of it.
    pub reason: Reason,
    /// Its tokens.
    pub tokens: usize,
    /// The requests that were answered together.
    pub batch: usize,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reason {
    /// The model, or a stop of the request, said so.
    Stop,
    /// It has as many tokens as were asked for.
    Length,
}

/// How the server answers.
pub struct Settings {
    /// How tokens are drawn.
    pub sampler: Sampler,
    /// The most new tokens of a text.
    pub max_new: usize,
    /// Tokens of a prompt that are read at once.
    pub chunk: usize,
    /// The most requests of a batch.
    pub batch: usize,
    /// How long a batch that is not full waits for more requests.
    pub gather: Duration,
    /// Requests that may wait beside the batch; others are refused.
    pub waiting: usize,
}

/// A model that answers.
pub struct Engine {
    /// The model and its vocabulary.
    pub folder: Folder,
    /// What proposes tokens.
    pub drafter: Drafter,
    /// How it answers.
    pub settings: Settings,
}

/// A request that has been checked.
struct Job {
    prompt: Vec<u32>,
    max_new: usize,
    stop: Vec<String>,
    lines: Sender<Line>,
}

/// Answers until the process ends: one thread has the model, and each connection a thread of its own.
///
/// # Errors
///
/// [`Error::Address`] if connections can no longer be accepted.
pub fn serve(listener: &TcpListener, engine: Engine) -> Result<(), Error> {
    // ANCHOR: serve
    let (queue, jobs) = sync_channel(engine.settings.waiting);
    let engine = Arc::new(engine);
    let worker = engine.clone();
    thread::spawn(move || worker.work(&jobs));
    loop {
        let (connection, _) = listener.accept().map_err(|source| Error::Address {
            address: "the listening socket".into(),
            source,
        })?;
        let (engine, queue) = (engine.clone(), queue.clone());
        thread::spawn(move || engine.answer(connection, &queue));
    }
    // ANCHOR_END: serve
}

impl Engine {
    /// The device of the model.
    pub fn device(&self) -> Device {
        self.folder.model.device()
    }

    /// Reads a request, hands it over, and sends the lines as they come.
    fn answer(&self, connection: TcpStream, queue: &SyncSender<Job>) {
        let mut connection = http::Connection::new(connection);
        let (sender, lines) = channel();
        let accepted = (connection.read())
            .and_then(|body| self.check(&body, sender))
            .and_then(|job| match queue.try_send(job) {
                Ok(()) => Ok(()),
                Err(TrySendError::Full(_)) => Err((503, "too many requests wait".into())),
                Err(TrySendError::Disconnected(_)) => Err((500, "the model has stopped".into())),
            });
        // A client that has gone needs no answer; when its lines are dropped, its text ends.
        let sent = match accepted {
            Ok(()) => connection.stream(lines),
            Err((status, reason)) => connection.refuse(status, &reason),
        };
        drop(sent);
    }

    /// Refuses what the model cannot go on from, before it waits.
    fn check(&self, body: &[u8], lines: Sender<Line>) -> Result<Job, (u16, String)> {
        let wrong = |reason: String| (400, reason);
        let request: Request =
            serde_json::from_slice(body).map_err(|error| wrong(error.to_string()))?;
        let Settings { max_new, .. } = self.settings;
        let job = Job {
            prompt: (self.folder.prompt(&request.prompt))
                .map_err(|error| wrong(error.to_string()))?,
            max_new: request.max_new.unwrap_or(max_new).min(max_new),
            stop: request.stop,
            lines,
        };
        if job.prompt.is_empty() {
            return Err(wrong("the prompt has no tokens".into()));
        }
        if job.max_new == 0 || job.stop.iter().any(String::is_empty) {
            return Err(wrong("max_new is 0, or a stop is empty".into()));
        }
        if !self.fits(job.prompt.len(), job.max_new) {
            let (prompt, new) = (job.prompt.len(), job.max_new);
            let reason =
                format!("{prompt} tokens, and {new} to follow, are more than the model reads");
            return Err(wrong(reason));
        }
        Ok(job)
    }

    /// Whether the model reads so many tokens.
    fn fits(&self, prompt: usize, new: usize) -> bool {
        let limit = self.folder.model.max_len();
        limit.is_none_or(|limit| prompt.saturating_add(new) <= limit)
    }

    // ANCHOR: work
    /// Takes the requests that wait, as many as go into a batch, and answers them together.
    fn work(&self, jobs: &Receiver<Job>) {
        let mut held = None;
        while let Some(first) = held.take().or_else(|| jobs.recv().ok()) {
            let mut batch = vec![first];
            let until = Instant::now() + self.settings.gather;
            while batch.len() < self.settings.batch {
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

    /// Whether the longest prompt and the longest text of a batch with one more request are together no longer than the
    /// model reads: a batch has one length for all.
    fn fit_together(&self, batch: &[Job], job: &Job) -> bool {
        let all = || batch.iter().chain([job]);
        let prompt = all().map(|job| job.prompt.len()).max().unwrap_or(0);
        self.fits(prompt, all().map(|job| job.max_new).max().unwrap_or(0))
    }

    // ANCHOR: write
    /// Answers a batch.
    fn write(&self, batch: Vec<Job>) {
        let settings = &self.settings;
        let generator = Generator::new(&self.folder.model)
            .with_sampler(settings.sampler)
            .with_max_new(batch.iter().map(|job| job.max_new).max().unwrap_or(0))
            .with_stop(&self.folder.stops)
            .with_chunk(settings.chunk);
        let prompts: Vec<Vec<u32>> = batch.iter().map(|job| job.prompt.clone()).collect();
        let size = batch.len();
        let mut answers: Vec<Answer> = (batch.into_iter())
            .map(|job| Answer::new(job, self.folder.vocabulary.stream(), size))
            .collect();
        let on_event = |event: Event| answers[event.sequence].push(event);
        if let Err(error) = self.drafter.generate(&generator, &prompts, on_event) {
            for answer in &answers {
                // Those that have ended no longer listen.
                answer.job.lines.send(Line::Error(error.to_string())).ok();
            }
        }
    }
    // ANCHOR_END: write
}

/// A text that is being sent.
struct Answer<'v> {
    job: Job,
    stream: TextStream<'v>,
    text: String,
    size: usize,
}

impl<'v> Answer<'v> {
    fn new(job: Job, stream: TextStream<'v>, size: usize) -> Self {
        Self {
            job,
            stream,
            text: String::new(),
            size,
        }
    }

    /// Sends a token. The text ends where its client asked for it, or does not listen any more.
    fn push(&mut self, event: Event) -> ControlFlow<()> {
        let tokens = event.index + 1;
        let last = event.ended.is_some() || tokens >= self.job.max_new;
        let piece = match self.piece(event.token, last) {
            Ok(piece) => piece,
            Err(error) => return self.send([Line::Error(error.to_string())], true),
        };
        self.text.push_str(&piece);
        let reason = match event.ended {
            Some(Ended::Stop(_) | Ended::StopSequence(_)) => Some(Reason::Stop),
            _ if self.stopped(piece.len()) => Some(Reason::Stop),
            _ if tokens >= self.job.max_new => Some(Reason::Length),
            _ => None,
        };
        let end = |reason| {
            Line::End(End {
                reason,
                tokens,
                batch: self.size,
            })
        };
        let text = (!piece.is_empty()).then_some(Line::Text(piece));
        let lines: Vec<Line> = text.into_iter().chain(reason.map(end)).collect();
        self.send(lines, reason.is_some())
    }

    /// The text of a token, with what is left behind the last one.
    fn piece(&mut self, token: u32, last: bool) -> Result<String, DataError> {
        let mut piece = self.stream.push(token)?;
        if last {
            piece.push_str(&self.stream.finish()?);
        }
        Ok(piece)
    }

    /// Whether one of the stops lies within the text and ends in its last bytes.
    fn stopped(&self, last: usize) -> bool {
        self.job.stop.iter().any(|stop| {
            let from = self.text.len() - last;
            let found = self.text.rfind(stop.as_str());
            found.is_some_and(|at| at + stop.len() > from)
        })
    }

    fn send(&self, lines: impl IntoIterator<Item = Line>, last: bool) -> ControlFlow<()> {
        let sent = lines
            .into_iter()
            .try_for_each(|line| self.job.lines.send(line));
        match sent.is_err() || last {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }
}
