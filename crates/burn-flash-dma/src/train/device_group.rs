//! Training on a sequence of which each device has a part, by the gradient of the whole.

use super::checkpointing::{add_gradients, resumed, untracked};
use super::neighbours::{Neighbours, group, is_consequence, silent};
use super::part_layers::PartLayers;
use super::parts::Parts;
use super::transfer::{Transfers, send, sends};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::{Device, Tensor};
use flash_dma_problem::AttentionError;
use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// A training step of a model of blocks `M`, for a [`DeviceGroup`]: the tokens, the targets, and how the model reads a part of them.
pub trait StepInParts<M>: Send + Sized + 'static {
    /// A block of the model, with one attention layer.
    type Block: Module;

    /// The step with its tensors on another device, moved by [`send`], or as it is if they are there.
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
    /// Errors of the layer.
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
                let there = Tensor::<1>::zeros([1], other).to_device(device);
                there.to_device(other).into_data();
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
        let neighbours = Neighbours::of(&self.devices, &self.transfers, self.timeout);
        for (place, neighbours) in neighbours.into_iter().enumerate() {
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
                        let _one_at_a_time = (device != home).then(|| transfers.begin());
                        let model = model.map(&mut Parameters { to: &device });
                        model.fork(&device.clone().autodiff())
                    };
                    let (loss, gradients) = read(&model, &parts, place, &step, neighbours)?;
                    let loss = loss.without_autodiff();
                    let _one_at_a_time = transfers.begin();
                    let mut sending = Sending {
                        from: gradients,
                        gradients: GradientsParams::new(),
                        to: &home,
                    };
                    model.visit(&mut sending);
                    Ok((send(loss, &home), sending.gradients))
                });
                let result = catch_unwind(read);
                let result = result.unwrap_or_else(|panic| Err(panicked(place, &*panic)));
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
}

/// Sends parameters to a device. Burn's `fork` moves the rest of a model, and makes them leaves there.
struct Parameters<'a> {
    to: &'a Device,
}

impl ModuleMapper for Parameters<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let is_trained = param.is_require_grad();
        let (id, value, mapper) = param.consume();
        let value = send(value.without_autodiff(), self.to).autodiff();
        Param::from_mapped_value(id, value.set_require_grad(is_trained), mapper)
    }
}

/// Sends gradients of a module's parameters to a device.
struct Sending<'a> {
    from: GradientsParams,
    gradients: GradientsParams,
    to: &'a Device,
}

impl ModuleVisitor for Sending<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.from.remove::<D>(param.id) {
            let gradient = send(gradient, self.to);
            self.gradients.register(param.id, gradient);
        }
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

fn panicked(place: usize, panic: &(dyn Any + Send)) -> AttentionError {
    let text = (panic.downcast_ref::<String>().map(String::as_str))
        .or_else(|| panic.downcast_ref::<&str>().copied());
    group(
        place,
        format!("panicked: {}", text.unwrap_or("without a text")),
    )
}
