//! Independent pieces of work, distributed over all cores.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// The results of `work` for `0..len`, in order.
pub fn map<T: Send>(len: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let threads = thread::available_parallelism()
        .map_or(1, usize::from)
        .min(len);
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::with_capacity(len));
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    if n >= len {
                        break;
                    }
                    let result = work(n);
                    results.lock().expect("no push panics").push((n, result));
                }
            });
        }
    });
    let mut results = results.into_inner().expect("no push panics");
    results.sort_by_key(|&(n, _)| n);
    results.into_iter().map(|(_, result)| result).collect()
}
