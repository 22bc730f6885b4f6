//! The memory that a call holds at once, as it is requested: for tests of what the workspaces promise.

use cubecl::client::Client;
use cubecl::future::block_on;
use cubecl::server::{Handle, WeakBufferBinding};
use cubecl::{MemoryScope, MemoryUsage};
use std::cell::RefCell;

thread_local! {
    static PEAK: RefCell<Option<Observed>> = const { RefCell::new(None) };
}

/// What [`peak_of`] saw.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Peak {
    /// The most bytes of scratch buffers that this thread held at once, as it requested them.
    pub requested: usize,
    /// The most bytes that the runtime counted as in use beyond those before the call, at the same moments.
    pub in_use: u64,
    /// Scratch buffers requested.
    pub buffers: usize,
}

#[derive(Default)]
struct Observed {
    held: Vec<(WeakBufferBinding, usize)>,
    before: u64,
    peak: Peak,
}

/// Runs `run` and watches the scratch buffers that its calls request on this thread. The device is waited for at
/// each, so that a buffer counts for as long as the host holds it, however far the device is behind. A runtime whose
/// threads let go of a finished launch late can make the numbers too great, never too small.
#[doc(hidden)]
pub fn peak_of(client: &Client, run: impl FnOnce()) -> Peak {
    PEAK.set(Some(Observed {
        before: usage(client).bytes_in_use,
        ..Observed::default()
    }));
    run();
    PEAK.take().unwrap_or_default().peak
}

fn usage(client: &Client) -> MemoryUsage {
    block_on(client.sync()).expect("no earlier call has failed");
    client.memory_report(MemoryScope::CurrentStream).usage()
}

/// Notes a new scratch buffer of so many bytes, if someone watches.
pub(crate) fn observe(client: &Client, buffer: &Handle, bytes: usize) {
    PEAK.with_borrow_mut(|observed| {
        let Some(observed) = observed else { return };
        let in_use = usage(client).bytes_in_use;
        observed.held.retain(|(held, _)| held.upgrade().is_some());
        let binding = buffer.clone().binding();
        observed.held.push((binding.downgrade(), bytes));
        let requested = observed.held.iter().map(|(_, bytes)| bytes).sum();
        let peak = &mut observed.peak;
        peak.requested = peak.requested.max(requested);
        peak.in_use = peak.in_use.max(in_use.saturating_sub(observed.before));
        peak.buffers += 1;
    });
}
