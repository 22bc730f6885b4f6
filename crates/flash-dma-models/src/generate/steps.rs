//! Steps of one token, replayed from a device graph where possible.

use super::batch::Batch;
use super::error::GenerateError;
use crate::language_model::LanguageModel;
use burn::backend::{Backend, BackendTypes, Dispatch};
use burn::tensor::{Device, Int, Tensor};
use burn_flash_dma::cache::try_overwrite;

type Graph = <Dispatch as BackendTypes>::GraphPrimitive;

/// Steps launched before one is recorded: the first ones choose their kernels and allocate memory, which a recording
/// must not.
const WARM_UP: usize = 3;

pub(super) struct Steps<'a, M: ?Sized> {
    batch: Batch<'a, M>,
    chunk: usize,
    records: bool,
    way: Way,
}

enum Way {
    /// Launched.
    Launched,
    /// Launched, and recorded after the warm-up.
    WarmUp(Box<WarmUp>),
    /// Replayed from a recording.
    Replayed(Box<Recorded>),
}

struct WarmUp {
    preparation: Preparation,
    /// `[sequences, 1]`.
    input: Tensor<2, Int>,
    /// Number of steps taken, including the next.
    steps: usize,
}

/// A recorded step. The memory it reads and writes is here, in the batch's caches and in the model.
struct Recorded {
    graph: Graph,
    /// `[sequences, 1]`.
    input: Tensor<2, Int>,
    /// `[sequences, 1, vocabulary]`.
    logits: Tensor<3>,
}

/// Keeps a device prepared to record until it is dropped.
struct Preparation(Device);

impl Preparation {
    fn new(device: &Device) -> Option<Self> {
        let prepared = Dispatch::graph_prepare(device.as_dispatch()).is_ok();
        prepared.then(|| Self(device.clone()))
    }

    /// Records the launches of `step`: `None` if the device has no recording.
    fn record<T>(
        self,
        step: impl FnOnce() -> Result<T, GenerateError>,
    ) -> Option<(Result<T, GenerateError>, Option<Graph>)> {
        Dispatch::graph_start_capture(self.0.as_dispatch()).ok()?;
        let result = step();
        let graph = Dispatch::graph_stop_capture(self.0.as_dispatch()).ok();
        // The end of the recording also ended the preparation.
        std::mem::forget(self);
        Some((result, graph))
    }
}

impl Drop for Preparation {
    fn drop(&mut self) {
        // Nothing to keep: no recording has begun.
        let _ = Dispatch::graph_stop_capture(self.0.as_dispatch());
    }
}

impl<'a, M: LanguageModel + ?Sized> Steps<'a, M> {
    /// Steps of a batch that has read its prompts in chunks of `chunk`, for reading them again.
    pub(super) fn new(batch: Batch<'a, M>, chunk: usize, records: bool) -> Self {
        Self {
            batch,
            chunk,
            records,
            way: Way::Launched,
        }
    }

    /// Replaces sequence `i` by sequence `indices[i]`.
    pub(super) fn keep(&mut self, indices: &[usize]) -> Result<(), GenerateError> {
        // Their caches move.
        self.launch();
        self.batch.keep(indices)
    }

    /// Reads the last token of each text, and returns the logits after it: `[sequences, 1, vocabulary]`. `known` are
    /// the tokens on the device, if they are there.
    pub(super) fn read(
        &mut self,
        texts: &[&[u32]],
        known: Option<Tensor<2, Int>>,
    ) -> Result<Tensor<3>, GenerateError> {
        let replays = self.records && self.batch.can_replay();
        if !replays {
            self.launch();
        }
        let last = texts.iter().map(|text| &text[text.len() - 1..]);
        let ids: Vec<i32> = last.clone().map(|token| token[0] as i32).collect();
        match std::mem::replace(&mut self.way, Way::Launched) {
            Way::Launched => {
                let tokens = known.unwrap_or_else(|| self.batch.tokens(last.clone()));
                if !replays {
                    return self.batch.read(tokens, 1);
                }
                let Some(preparation) = Preparation::new(&self.batch.model.device()) else {
                    self.records = false;
                    return self.batch.read(tokens, 1);
                };
                self.batch.set_recorded(true);
                // A tensor of its own, as it is overwritten.
                let input = self.batch.tokens(last);
                self.warm_up(Box::new(WarmUp {
                    preparation,
                    input,
                    steps: 1,
                }))
            }
            Way::WarmUp(mut warm_up) => {
                warm_up.input = try_overwrite(warm_up.input, &ids)?;
                warm_up.steps += 1;
                match warm_up.steps <= WARM_UP {
                    true => self.warm_up(warm_up),
                    false => self.record(*warm_up, texts),
                }
            }
            Way::Replayed(recorded) => self.replay(*recorded, &ids),
        }
    }

    fn warm_up(&mut self, warm_up: Box<WarmUp>) -> Result<Tensor<3>, GenerateError> {
        let logits = self.batch.read(warm_up.input.clone(), 1)?;
        self.way = Way::WarmUp(warm_up);
        Ok(logits)
    }

    fn record(&mut self, warm_up: WarmUp, texts: &[&[u32]]) -> Result<Tensor<3>, GenerateError> {
        let input = warm_up.input;
        let recording = (warm_up.preparation).record(|| self.batch.read(input.clone(), 1));
        let Some((logits, graph)) = recording else {
            self.records = false;
            self.batch.set_recorded(false);
            return self.batch.read(input, 1);
        };
        let logits = logits?;
        let Some(graph) = graph else {
            // The caches lack the token that they have counted.
            self.records = false;
            let (batch, logits) = Batch::prefill(self.batch.model, texts, self.chunk)?;
            self.batch = batch;
            return Ok(logits);
        };
        let recorded = Recorded {
            graph,
            input,
            logits,
        };
        self.run(recorded)
    }

    fn replay(&mut self, recorded: Recorded, last: &[i32]) -> Result<Tensor<3>, GenerateError> {
        let input = try_overwrite(recorded.input, last)?;
        self.batch.replayed(1);
        self.run(Recorded { input, ..recorded })
    }

    fn run(&mut self, recorded: Recorded) -> Result<Tensor<3>, GenerateError> {
        let device = self.batch.model.device();
        // SAFETY: the input, the logits and the caches are as they were recorded, since `keep` and every launched
        // step drop the graph first; the model outlives this; only this thread uses all of them, between replays.
        unsafe { Dispatch::graph_replay(device.as_dispatch(), &recorded.graph) }
            .map_err(|error| GenerateError::Device(error.to_string()))?;
        let logits = recorded.logits.clone();
        self.way = Way::Replayed(Box::new(recorded));
        Ok(logits)
    }

    /// Launches the next step, and starts over after it.
    fn launch(&mut self) {
        self.way = Way::Launched;
        self.batch.set_recorded(false);
    }
}
