//! The memory that a call holds at once, at its requested sizes, for tests of the announced workspaces.

use cubecl::client::Client;
use cubecl::future::block_on;
use cubecl::server::{Handle, WeakBufferBinding};
use cubecl::{MemoryScope, MemoryUsage};
use std::cell::RefCell;

thread_local! {
    static PEAK: RefCell<Option<Observed>> = const { RefCell::new(None) };
}

/// The measurements of [`peak_of`].
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

/// Runs `run` and watches the scratch buffers that its calls request on this thread. It waits for the device at each
/// request, so that a buffer counts for as long as the host holds it, however far the device lags. If a runtime's
/// threads release a finished launch late, the numbers can be too large, never too small.
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

/// Records a new scratch buffer of the given size, if a [`peak_of`] is watching.
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
