//! The kernels that some work launches, with their times on the device.

use crate::shares::{Launch, Launched};
use cubecl::future::block_on;
use cubecl::logging::{
    Duration, LaunchObservation, LaunchObserver, ProfileDuration, TimingMethod, TimingRequest,
};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// What is recorded of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// Nothing.
    Nothing,
    /// That it happened. The host is as fast as ever.
    Count,
    /// Its time on the device, too. Nothing waits for a kernel, so kernels run one behind the other as they always do;
    /// the host is slower. A device that waits for the host in the meantime counts that time as the kernel's.
    Times,
}

/// Watches every launch of the process from now on, until it is dropped.
pub struct Launches {
    kept: Arc<Kept>,
    begin: Instant,
    _observation: Option<LaunchObservation>,
}

impl Launches {
    /// Begins to watch.
    pub fn watch(watch: Watch) -> Self {
        let request = match watch {
            Watch::Times => TimingRequest::Deferred,
            Watch::Nothing | Watch::Count => TimingRequest::None,
        };
        let kept = Arc::new(Kept {
            request,
            taken: Mutex::default(),
        });
        let watches = watch != Watch::Nothing;
        let observation = watches.then(|| LaunchObservation::new(kept.clone()));
        Self {
            kept,
            begin: Instant::now(),
            _observation: observation,
        }
    }

    /// The launches since the last call. The device is to be idle. Panics if a thread has panicked while it launched.
    pub fn take(&self) -> Launched {
        let mut kept = self
            .kept
            .taken
            .lock()
            .expect("no holder of the lock panics");
        let taken = std::mem::take(&mut *kept);
        drop(kept);
        let launch = |(name, time)| {
            let (milliseconds, ended) = match time {
                Time::Read(time) => (Some(time), None),
                Time::Unread(profile) => match block_on(profile.resolve()) {
                    None => (None, None),
                    Some(ticks) => {
                        let ended = ticks.end_duration_since(self.begin);
                        (Some(ticks.duration()), Some(ended))
                    }
                },
            };
            let [milliseconds, ended_ms] =
                [milliseconds, ended].map(|time| time.map(|time| time.as_secs_f64() * 1e3));
            Launch {
                name,
                milliseconds,
                ended_ms,
            }
        };
        Launched {
            launched: taken.launched,
            timed: taken.timed.into_iter().map(launch).collect(),
        }
    }
}

struct Kept {
    /// The same as long as it is installed.
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
    fn change(&self, change: impl FnOnce(&mut Taken)) {
        change(&mut self.taken.lock().expect("no holder of the lock panics"));
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
