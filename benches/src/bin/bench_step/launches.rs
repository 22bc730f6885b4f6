//! The kernels that a phase of a step launches, with their times on the device.

use crate::row::Phase;

#[cfg(feature = "cube")]
pub use cube::Launches;
#[cfg(not(feature = "cube"))]
pub use none::Launches;

/// Without CubeCL there are no kernels.
#[cfg(not(feature = "cube"))]
mod none {
    use super::Phase;

    /// Nothing to watch.
    pub struct Launches;

    impl Launches {
        /// Watches nothing.
        pub fn watch(_profile: bool) -> Self {
            Self
        }

        /// No launches.
        pub fn take(&self) -> Phase {
            Phase::default()
        }
    }
}

#[cfg(feature = "cube")]
mod cube {
    use super::Phase;
    use crate::row::Launch;
    use cubecl::future::block_on;
    use cubecl::logging::{
        Duration, LaunchObservation, LaunchObserver, ProfileDuration, TimingMethod, TimingRequest,
    };
    use std::sync::{Arc, Mutex};

    /// Watches every launch of the process from now on.
    pub struct Launches {
        kept: Arc<Kept>,
        _observation: Option<LaunchObservation>,
    }

    impl Launches {
        /// Watches if `profile`. Nothing waits for a kernel, so they run one behind the other as in any step; the host
        /// is slower than in any step.
        pub fn watch(profile: bool) -> Self {
            let kept = Arc::new(Kept::default());
            let observation = profile.then(|| LaunchObservation::new(kept.clone()));
            Self {
                kept,
                _observation: observation,
            }
        }

        /// The launches since the last call. The device is to be idle.
        pub fn take(&self) -> Phase {
            let mut kept = self.kept.0.lock().expect("no holder of the lock panics");
            let taken = std::mem::take(&mut *kept);
            drop(kept);
            let launch = |(name, time)| Launch {
                name,
                milliseconds: match time {
                    Time::Read(time) => Some(time),
                    Time::Unread(profile) => {
                        block_on(profile.resolve()).map(|ticks| ticks.duration())
                    }
                }
                .map(|time| time.as_secs_f64() * 1e3),
            };
            Phase {
                launched: taken.launched,
                timed: taken.timed.into_iter().map(launch).collect(),
            }
        }
    }

    #[derive(Default)]
    struct Kept(Mutex<Taken>);

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
            change(&mut self.0.lock().expect("no holder of the lock panics"));
        }
    }

    impl LaunchObserver for Kept {
        fn launched(&self, _kernel: &'static str) {
            self.change(|kept| kept.launched += 1);
        }

        fn timing(&self) -> TimingRequest {
            TimingRequest::Deferred
        }

        fn profiled(&self, kernel: &'static str, profile: ProfileDuration) {
            self.change(|kept| kept.timed.push((kernel, Time::Unread(profile))));
        }

        fn timed(&self, kernel: &'static str, duration: Duration, _method: TimingMethod) {
            self.change(|kept| kept.timed.push((kernel, Time::Read(duration))));
        }
    }
}
