//! Kernels that some work launches, with their times on the device.

use crate::shares::{Launch, Launched};
use cubecl::future::block_on;
use cubecl::logging::{
    Duration, LaunchObservation, LaunchObserver, ProfileDuration, TimingMethod, TimingRequest,
};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Watches every launch of the process until it is dropped.
pub struct Launches {
    kept: Arc<Kept>,
    begin: Instant,
    _observation: LaunchObservation,
}

impl Launches {
    /// Counts launches from now on; does not slow the host.
    pub fn count() -> Self {
        Self::watch(TimingRequest::None)
    }

    /// Also takes the device time of each launch. Nothing waits for a kernel, so kernels run one after another as
    /// usual; the host is slower. If the device waits for the host in between, that time counts as the kernel's.
    pub fn time() -> Self {
        Self::watch(TimingRequest::Deferred)
    }

    fn watch(request: TimingRequest) -> Self {
        let kept = Arc::new(Kept {
            request,
            taken: Mutex::default(),
        });
        Self {
            kept: kept.clone(),
            begin: Instant::now(),
            _observation: LaunchObservation::new(kept),
        }
    }

    /// Launches since the last call. The device should be idle. Panics if a thread has panicked while it launched.
    pub fn take(&self) -> Launched {
        let taken = self.kept.change(std::mem::take);
        let launch = |(name, time)| {
            let (time, ended) = match time {
                Time::Read(time) => (Some(time), None),
                Time::Unread(profile) => (block_on(profile.resolve()))
                    .map(|ticks| (ticks.duration(), ticks.end_duration_since(self.begin)))
                    .unzip(),
            };
            let ms = |time: Duration| time.as_secs_f64() * 1e3;
            Launch {
                name,
                milliseconds: time.map(ms),
                ended_ms: ended.map(ms),
            }
        };
        Launched {
            launched: taken.launched,
            timed: taken.timed.into_iter().map(launch).collect(),
        }
    }
}

struct Kept {
    /// Active as long as it is held.
    request: TimingRequest,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    launched: usize,
    timed: Vec<(&'static str, Time)>,
}

enum Time {
    Read(Duration),
    Unread(ProfileDuration),
}

impl Kept {
    fn change<T>(&self, change: impl FnOnce(&mut Taken) -> T) -> T {
        change(&mut self.taken.lock().expect("no holder of the lock panics"))
    }
}

impl LaunchObserver for Kept {
    fn launched(&self, _kernel: &'static str) {
        self.change(|kept| kept.launched += 1);
    }

    fn timing(&self) -> TimingRequest {
        self.request
    }

    fn profiled(&self, kernel: &'static str, profile: ProfileDuration) {
        self.change(|kept| kept.timed.push((kernel, Time::Unread(profile))));
    }

    fn timed(&self, kernel: &'static str, duration: Duration, _method: TimingMethod) {
        self.change(|kept| kept.timed.push((kernel, Time::Read(duration))));
    }
}
