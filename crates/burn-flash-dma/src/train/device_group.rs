//! Training on a sequence of which each device has a part, by the gradient of the whole.

use super::checkpointing::{add_gradients, resumed, untracked};
use super::part_layers::{CarryGradient, PartLayers};
use super::parts::Parts;
use crate::nn::Carry;
use burn::module::Module;
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::{Device, Tensor};
use flash_dma_problem::AttentionError;
use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// A training step of a model of blocks `M`, for a [`DeviceGroup`]: the tokens, the targets, and how the model reads a part of them.
pub trait StepInParts<M>: Send + Sized + 'static {
    /// A block of the model, with one attention layer.
    type Block: Module;

    /// The step with its tensors on another device, as it is if they are there.
    #[must_use]
    fn to_device(&self, device: &Device) -> Self;

    /// Input of the first block, `[batch, len, d_model]`: these tokens of each sequence.
    ///
    /// # Errors
    ///
    /// Any; the step ends with it.
    fn input(&self, model: &M, tokens: Range<usize>) -> Result<Tensor<3>, AttentionError>;

    /// The blocks of the model, in order.
    fn blocks<'a>(&self, model: &'a M) -> &'a [Self::Block];

    /// A block: its input to its output. It calls its attention layer by [`PartLayers::try_attend`] in place of its `forward`.
    ///
    /// # Errors
    ///
    /// Those of the layer.
    fn block(
        &self,
        block: &Self::Block,
        x: Tensor<3>,
        layers: &mut PartLayers,
    ) -> Result<Tensor<3>, AttentionError>;

    /// The part's share of the loss, `[1]`, from the output of the last block. The shares add up to the loss.
    ///
    /// # Errors
    ///
    /// Any; the step ends with it.
    fn loss(
        &self,
        model: &M,
        tokens: Range<usize>,
        x: Tensor<3>,
    ) -> Result<Tensor<1>, AttentionError>;
}

type Job = Box<dyn FnOnce() + Send>;

/// The loss and the gradients of a step, or of a device's part of it.
type Learned = Result<(Tensor<1>, GradientsParams), AttentionError>;

/// Devices of which each reads a part of every sequence, at the same time, with a thread for each.
///
/// Behind a boundary between parts, a layer that keeps `window` keys needs at most that many of the earlier ones, and the
/// runners-up. So each layer sends these rows to the next device, and their gradients come back: as many bytes however long the
/// sequences are. The result is the gradient of the whole, up to rounding. Layers are refused as by
/// [`DynamicMaskAttention::check_in_parts`](crate::nn::DynamicMaskAttention::check_in_parts).
///
/// GPUs of NVIDIA send to each other by NCCL, which must be installed. A device may be given twice, which is of use in tests.
///
/// A device that fails ends the step on all of them: those that wait for it stop, and the step returns its error. If one does not
/// answer within [a time](Self::with_timeout), all later steps of the group fail: its thread is still busy, and only the end of
/// the process is sure to stop it. The model is as it was; checkpoints can be read with any number of devices.
pub struct DeviceGroup {
    devices: Vec<Device>,
    workers: Vec<Sender<Job>>,
    transfers: Transfers,
    timeout: Duration,
    /// A device that did not answer.
    lost: Option<AttentionError>,
}

/// Transfers are queued one at a time: two devices that sent to each other in different orders would wait for ever.
#[derive(Clone, Default)]
struct Transfers(Arc<Mutex<()>>);

impl Transfers {
    fn begin(&self) -> MutexGuard<'_, ()> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DeviceGroup {
    /// A group of these devices, in the order of the parts that they get.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Unsupported`] if there is no device, or several of which one cannot send to the others itself.
    pub fn try_new(devices: &[Device]) -> Result<Self, AttentionError> {
        let refuse = |what: &str| {
            let what = what.to_owned();
            Err(AttentionError::Unsupported { what })
        };
        let devices: Vec<_> = (devices.iter().cloned())
            .map(Device::without_autodiff)
            .collect();
        let Some(first) = devices.first() else {
            return refuse("a group of no devices");
        };
        if devices.iter().any(|device| device != first) && !devices.iter().all(sends) {
            return refuse(
                "a group of devices that cannot send to each other (GPUs of NVIDIA with NCCL can)",
            );
        }
        // Contact is made here, pair by pair: on the way, two threads could wait for each other's.
        for (nth, device) in devices.iter().enumerate().skip(1) {
            for other in [first, &devices[nth - 1]] {
                let sent = Tensor::<1>::zeros([1], other).to_device(device);
                sent.to_device(other).into_data();
            }
        }
        let workers = devices.iter().map(|_| {
            let (sender, jobs) = channel::<Job>();
            thread::spawn(move || jobs.into_iter().for_each(|job| job()));
            sender
        });
        Ok(Self {
            workers: workers.collect(),
            devices,
            transfers: Transfers::default(),
            timeout: Duration::from_secs(300),
            lost: None,
        })
    }

    /// How long a step may take, and a device may wait for another: 300 seconds by default. A first step compiles kernels.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// The devices, in the order of the parts.
    #[must_use]
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// The loss and the gradients of a step whose sequences are cut into a part for each device, on the device of the model.
    ///
    /// # Errors
    ///
    /// [`AttentionError::Unsupported`] if there are more or fewer parts than devices, [`AttentionError::Group`] if a device
    /// panics or does not answer, or did not in an earlier step; otherwise those of the step.
    pub fn try_gradients<M: Module + 'static, S: StepInParts<M>>(
        &mut self,
        model: &M,
        parts: &Parts,
        step: &S,
    ) -> Result<(Tensor<1>, GradientsParams), AttentionError> {
        if let Some(lost) = &self.lost {
            return Err(lost.clone());
        }
        let (count, devices) = (parts.ranges().len(), self.devices.len());
        if count != devices {
            let what = format!("{count} parts on {devices} devices");
            return Err(AttentionError::Unsupported { what });
        }
        // Its parameters are made now, if they have not been read yet.
        let home = untracked(model).devices();
        let home = home.first().unwrap_or(&self.devices[0]).clone();
        let home = home.without_autodiff();
        let (sender, results) = channel();
        for (place, neighbours) in self.neighbours().into_iter().enumerate() {
            let (model, parts, sender) = (model.clone(), parts.clone(), sender.clone());
            let (device, home) = (self.devices[place].clone(), home.clone());
            let transfers = self.transfers.clone();
            let step = {
                let _one_at_a_time = transfers.begin();
                step.to_device(&device)
            };
            let job: Job = Box::new(move || {
                let read = AssertUnwindSafe(|| {
                    let model = {
                        let _one_at_a_time = transfers.begin();
                        model.fork(&device.autodiff())
                    };
                    let (loss, gradients) = read(&model, &parts, place, &step, neighbours)?;
                    let _one_at_a_time = transfers.begin();
                    let loss = loss.without_autodiff().to_device(&home);
                    Ok((loss, gradients.to_device(&home, &model)))
                });
                let result =
                    catch_unwind(read).unwrap_or_else(|panic| Err(panicked(place, &*panic)));
                // Nobody listens once the step has been given up.
                let _ = sender.send((place, result));
            });
            // A thread ends with its group only.
            let _ = self.workers[place].send(job);
        }
        drop(sender);
        self.collect(model, &results)
    }

    fn collect<M: Module>(&mut self, model: &M, results: &Receiver<(usize, Learned)>) -> Learned {
        let deadline = Instant::now() + self.timeout;
        let mut done: Vec<_> = self.devices.iter().map(|_| None).collect();
        while done.iter().any(Option::is_none) {
            let left = deadline.saturating_duration_since(Instant::now());
            let Ok((place, result)) = results.recv_timeout(left) else {
                break;
            };
            done[place] = Some(result);
        }
        let lost = done.iter().position(Option::is_none);
        self.lost = lost.map(|place| silent(place, self.timeout));
        let mut failed = None;
        let (mut losses, mut gradients) = (Vec::new(), GradientsAccumulator::new());
        for result in done.into_iter().flatten() {
            match result {
                Ok((loss, own)) => {
                    losses.push(loss);
                    gradients.accumulate(model, own);
                }
                // Those that waited for a device say less than it does.
                Err(error) if failed.as_ref().is_none_or(is_consequence) => failed = Some(error),
                Err(_) => {}
            }
        }
        match (failed, &self.lost) {
            (Some(error), Some(lost)) if is_consequence(&error) => Err(lost.clone()),
            (Some(error), _) => Err(error),
            (None, Some(lost)) => Err(lost.clone()),
            (None, None) => Ok((Tensor::cat(losses, 0).sum(), gradients.grads())),
        }
    }

    fn neighbours(&self) -> Vec<Neighbours> {
        let none = |_| Neighbours {
            before: None,
            after: None,
            transfers: self.transfers.clone(),
            timeout: self.timeout,
        };
        let mut all: Vec<_> = (0..self.devices.len()).map(none).collect();
        for place in 1..all.len() {
            let (give, given) = channel();
            let (ask, asked) = channel();
            let to = |place: usize| (place, self.devices[place].clone());
            all[place - 1].after = Some((Link::new(to(place)), give, asked));
            all[place].before = Some((Link::new(to(place - 1)), given, ask));
        }
        all
    }
}

/// What a device has to do with those of the parts before and behind its own.
pub(super) struct Neighbours {
    before: Option<(Link, Receiver<Carry>, Sender<CarryGradient>)>,
    after: Option<(Link, Sender<Carry>, Receiver<CarryGradient>)>,
    transfers: Transfers,
    timeout: Duration,
}

/// Another device of the group.
struct Link {
    place: usize,
    device: Device,
}

impl Link {
    fn new((place, device): (usize, Device)) -> Self {
        Self { place, device }
    }

    fn send<T>(&self, to: &Sender<T>, value: T) -> Result<(), AttentionError> {
        to.send(value).map_err(|_| stopped(self.place))
    }

    fn receive<T>(&self, from: &Receiver<T>, timeout: Duration) -> Result<T, AttentionError> {
        from.recv_timeout(timeout).map_err(|error| match error {
            RecvTimeoutError::Timeout => silent(self.place, timeout),
            RecvTimeoutError::Disconnected => stopped(self.place),
        })
    }
}

impl Neighbours {
    pub(super) fn is_first(&self) -> bool {
        self.before.is_none()
    }

    /// The next layer's carry, as large as `none`, which is that in front of the first part.
    pub(super) fn carry(&self, none: Carry) -> Result<Carry, AttentionError> {
        let Some((link, given, _)) = &self.before else {
            return Ok(none);
        };
        let carry = link.receive(given, self.timeout)?;
        let (sent, own) = (carry.rows[0].dims(), none.rows[0].dims());
        match sent == own {
            true => Ok(carry),
            false => Err(group(
                link.place,
                format!("sent rows of another layer, {sent:?} in place of {own:?}"),
            )),
        }
    }

    /// Sends the carry behind a layer's part, if there is a part behind it.
    pub(super) fn give(&self, carry: impl FnOnce() -> Carry) -> Result<(), AttentionError> {
        let Some((link, give, _)) = &self.after else {
            return Ok(());
        };
        let Carry { rows, ranks, seen } = carry();
        let _one_at_a_time = self.transfers.begin();
        let carry = Carry {
            rows: rows.map(|rows| rows.to_device(&link.device)),
            ranks: ranks.to_device(&link.device),
            seen,
        };
        link.send(give, carry)
    }

    /// The gradient of the carry that was given last, and has not been asked for.
    pub(super) fn asked(&self) -> Result<Option<CarryGradient>, AttentionError> {
        match &self.after {
            Some((link, _, asked)) => link.receive(asked, self.timeout).map(Some),
            None => Ok(None),
        }
    }

    /// Sends the gradient of a carry to where it came from.
    pub(super) fn ask(&self, gradient: CarryGradient) -> Result<(), AttentionError> {
        let Some((link, _, ask)) = &self.before else {
            return Ok(());
        };
        let _one_at_a_time = self.transfers.begin();
        link.send(ask, gradient.to_device(&link.device))
    }
}

/// A device's part of a step: its share of the loss, and of all gradients.
///
/// The graph of each block is two: of the attention and what follows, and of the projections in front of it. What later parts ask
/// of keys and values comes in between, and nothing waits within Burn's backward pass.
fn read<M: Module, S: StepInParts<M>>(
    model: &M,
    parts: &Parts,
    place: usize,
    step: &S,
    neighbours: Neighbours,
) -> Result<(Tensor<1>, GradientsParams), AttentionError> {
    let tokens = &parts.ranges()[place];
    let mut layers = PartLayers::on_device(neighbours, parts, place);
    let leaf = |x: &Tensor<3>| x.clone().detach().set_require_grad(true);
    let input = step.input(model, tokens.clone())?;
    let blocks = step.blocks(model);
    let mut passes = Vec::with_capacity(blocks.len());
    let mut x = input.clone();
    for (nth, block) in blocks.iter().enumerate() {
        let start = leaf(&x);
        x = step.block(block, start.clone(), &mut layers)?;
        assert_eq!(
            layers.called(),
            nth + 1,
            "attention layers up to block {nth}"
        );
        passes.push((block, start, x.clone()));
    }
    let output = leaf(&x);
    drop(x);
    let loss = step.loss(model, tokens.clone(), output.clone())?;
    let share = loss.clone().detach();
    let mut gradients = GradientsParams::new();
    let mut grads = loss.backward();
    let mut slope = output.grad_remove(&mut grads);
    add_gradients(model, grads, &mut gradients);
    while let Some((block, start, out)) = passes.pop() {
        let own = slope.unwrap_or_else(|| out.clone().without_autodiff().zeros_like());
        let mut grads = resumed(out, own).backward();
        let [projections, scores] = layers.pass_back(&mut grads)?;
        slope = start.grad_remove(&mut grads);
        add_gradients(block, grads, &mut gradients);
        if let Some(zero) = projections {
            let mut grads = zero.backward();
            let more = start.grad_remove(&mut grads);
            slope = slope
                .into_iter()
                .chain(more)
                .reduce(|slope, more| slope + more);
            add_gradients(block, grads, &mut gradients);
        }
        if let Some(zero) = scores {
            add_gradients(block, zero.backward(), &mut gradients);
        }
    }
    if let Some(slope) = slope
        && input.is_tracked()
    {
        add_gradients(model, resumed(input, slope).backward(), &mut gradients);
    }
    Ok((share, gradients))
}

const STOPPED: &str = "stopped";
const SILENT: &str = "did not answer within";

fn group(device: usize, reason: String) -> AttentionError {
    AttentionError::Group { device, reason }
}

fn stopped(place: usize) -> AttentionError {
    group(place, STOPPED.to_owned())
}

fn silent(place: usize, timeout: Duration) -> AttentionError {
    group(place, format!("{SILENT} {} s", timeout.as_secs_f32()))
}

fn panicked(place: usize, panic: &(dyn Any + Send)) -> AttentionError {
    let text = (panic.downcast_ref::<String>().map(String::as_str))
        .or_else(|| panic.downcast_ref::<&str>().copied());
    group(
        place,
        format!("panicked: {}", text.unwrap_or("without a text")),
    )
}

/// True of the error of a device that waited for another.
fn is_consequence(error: &AttentionError) -> bool {
    matches!(
        error,
        AttentionError::Group { reason, .. } if reason == STOPPED || reason.starts_with(SILENT)
    )
}

/// True if a device sends to others itself.
#[cfg(feature = "cube")]
pub(super) fn sends(device: &Device) -> bool {
    crate::memory::client(device).is_ok_and(|client| client.has_device_transport())
}

#[cfg(not(feature = "cube"))]
pub(super) fn sends(_: &Device) -> bool {
    false
}
