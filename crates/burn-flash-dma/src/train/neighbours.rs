//! Transfers between the devices of a group within a step.

use super::carry_gradient::CarryGradient;
use super::transfer::{Transfers, send};
use crate::nn::Carry;
use burn::tensor::Device;
use flash_dma_problem::AttentionError;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// A device's links to those of the parts before and behind its own.
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
    /// Links of each device, in the order of the parts.
    pub(super) fn of(devices: &[Device], transfers: &Transfers, timeout: Duration) -> Vec<Self> {
        let none = |_| Self {
            before: None,
            after: None,
            transfers: transfers.clone(),
            timeout,
        };
        let mut all: Vec<_> = (0..devices.len()).map(none).collect();
        for place in 1..all.len() {
            let (give, given) = channel();
            let (ask, asked) = channel();
            let to = |place: usize| (place, devices[place].clone());
            all[place - 1].after = Some((Link::new(to(place)), give, asked));
            all[place].before = Some((Link::new(to(place - 1)), given, ask));
        }
        all
    }

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
            false => {
                let reason = format!("sent rows of another layer, {sent:?} in place of {own:?}");
                Err(group(link.place, reason))
            }
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
            rows: rows.map(|rows| send(rows, &link.device)),
            ranks: send(ranks, &link.device),
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
        let CarryGradient {
            rows,
            ranks,
            charge,
        } = gradient;
        let _one_at_a_time = self.transfers.begin();
        let gradient = CarryGradient {
            rows: rows.map(|rows| send(rows, &link.device)),
            ranks: send(ranks, &link.device),
            charge: charge.map(|charge| charge.map(|sums| send(sums, &link.device))),
        };
        link.send(ask, gradient)
    }
}

const STOPPED: &str = "stopped";
const SILENT: &str = "did not answer within";

pub(super) fn group(device: usize, reason: String) -> AttentionError {
    AttentionError::Group { device, reason }
}

fn stopped(place: usize) -> AttentionError {
    group(place, STOPPED.to_owned())
}

pub(super) fn silent(place: usize, timeout: Duration) -> AttentionError {
    group(place, format!("{SILENT} {} s", timeout.as_secs_f32()))
}

/// True of the error of a device that waited for another.
pub(super) fn is_consequence(error: &AttentionError) -> bool {
    matches!(
        error,
        AttentionError::Group { reason, .. } if reason == STOPPED || reason.starts_with(SILENT)
    )
}
