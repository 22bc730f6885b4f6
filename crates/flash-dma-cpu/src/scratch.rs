//! Memory that each thread reuses from task to task.

use std::cell::RefCell;

/// A grow-only buffer aligned to a cache line, as the widest vector loads need. It reuses the memory of an earlier
/// buffer of the same thread, if there is some.
#[derive(Default)]
pub(crate) struct Buffer(Vec<Line>);

const LINE: usize = 16;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; LINE]);

// SAFETY: an array of f32, without padding since its size equals its alignment.
unsafe impl bytemuck::Zeroable for Line {}
// SAFETY: as above; `Copy`, `'static`, every bit pattern is valid.
unsafe impl bytemuck::Pod for Line {}

thread_local! {
    /// Memory of the buffers that were dropped.
    static FREE: RefCell<Vec<Vec<Line>>> = const { RefCell::new(Vec::new()) };
}

impl Buffer {
    /// The first `len` elements, with undefined content.
    pub(crate) fn get(&mut self, len: usize) -> &mut [f32] {
        let lines = len.div_ceil(LINE);
        if self.0.is_empty() && lines > 0 {
            self.0 = reuse(lines);
        }
        if self.0.len() < lines {
            self.0.resize(lines, Line([0.0; LINE]));
        }
        &mut bytemuck::cast_slice_mut(&mut self.0)[..len]
    }

    /// The first `len` elements, as the last writer left them.
    pub(crate) fn read(&self, len: usize) -> &[f32] {
        &bytemuck::cast_slice(&self.0)[..len]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let memory = std::mem::take(&mut self.0);
        if !memory.is_empty() {
            // At the end of the thread the list may be gone already; so is the memory then.
            let _ = FREE.try_with(|free| free.borrow_mut().push(memory));
        }
    }
}

/// The smallest free memory of at least this size, otherwise the greatest there is.
fn reuse(lines: usize) -> Vec<Line> {
    FREE.with_borrow_mut(|free| {
        let fits = |memory: &Vec<Line>| match memory.len().checked_sub(lines) {
            Some(surplus) => (0, surplus),
            None => (1, lines - memory.len()),
        };
        let best = (0..free.len()).min_by_key(|&i| fits(&free[i]));
        best.map_or_else(Vec::new, |i| free.swap_remove(i))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_buffers_memory_is_used_again() {
        let place = |buffer: &Buffer| buffer.0.as_ptr();
        let (mut small, mut large) = (Buffer::default(), Buffer::default());
        small.get(20).fill(1.0);
        large.get(2000).fill(2.0);
        let (at_small, at_large) = (place(&small), place(&large));
        drop(large);
        drop(small);
        let (mut a, mut b, mut c) = (Buffer::default(), Buffer::default(), Buffer::default());
        assert_eq!(a.get(30).len(), 30);
        assert_eq!(b.get(40).len(), 40);
        c.get(1).fill(0.0);
        assert_eq!((place(&a), place(&b)), (at_small, at_large));
        assert_eq!((a.read(20), b.read(40)), (&[1.0; 20][..], &[2.0; 40][..]));
    }
}
