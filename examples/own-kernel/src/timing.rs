//! How long a launch takes.

use cubecl::client::Client;
use std::error::Error;
use std::time::{Duration, Instant};

/// The time of a launch, of several measurements.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// The shortest.
    pub least: Duration,
    /// The median.
    pub median: Duration,
    /// The longest.
    pub most: Duration,
}

// ANCHOR: time
/// Measures `samples` times how long `launches` launches take until the device has finished, divided by their number,
/// after one sample that counts nothing: the first launch compiles.
///
/// # Errors
///
/// What a launch or the device says.
///
/// # Panics
///
/// If `samples` or `launches` is 0.
pub fn time<E: Error + 'static>(
    client: &Client,
    samples: usize,
    launches: u32,
    launch: impl Fn() -> Result<(), E>,
) -> Result<Timing, Box<dyn Error>> {
    let mut times = Vec::with_capacity(samples + 1);
    for _ in 0..=samples {
        let start = Instant::now();
        for _ in 0..launches {
            launch()?;
        }
        // A launch returns before the kernel has run; failures of the device show here, too.
        cubecl::future::block_on(client.sync())?;
        times.push(start.elapsed() / launches);
    }
    times.remove(0);
    times.sort_unstable();
    Ok(Timing {
        least: times[0],
        median: times[samples / 2],
        most: times[samples - 1],
    })
}
// ANCHOR_END: time
