//! Ranges of NVIDIA's tools extension, through `libnvToolsExt.so.1`, which CUDA has up to version 12. The library is
//! looked for once; without it nothing happens. Not run on a GPU.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

const LIBRARY: &CStr = c"libnvToolsExt.so.1";
/// `RTLD_LAZY`.
const LAZY: c_int = 1;

type Push = unsafe extern "C" fn(*const c_char) -> c_int;
type Pop = unsafe extern "C" fn() -> c_int;

/// `nvtxRangePushA` and `nvtxRangePop`: the ranges of a thread are nested.
#[derive(Clone, Copy)]
struct Functions {
    push: Push,
    pop: Pop,
}

pub(crate) struct Range(Option<Functions>);

impl Range {
    /// `name` ends in a zero byte.
    pub(crate) fn new(name: &'static str) -> Self {
        static LOADED: OnceLock<Option<Functions>> = OnceLock::new();
        Self::with(*LOADED.get_or_init(|| Functions::load(LIBRARY)), name)
    }

    fn with(functions: Option<Functions>, name: &'static str) -> Self {
        let name = CStr::from_bytes_with_nul(name.as_bytes()).expect("names end in a zero byte");
        if let Some(functions) = functions {
            // SAFETY: the name ends with a zero byte and lives as long as the program.
            unsafe { (functions.push)(name.as_ptr()) };
        }
        Self(functions)
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        if let Some(functions) = self.0 {
            // SAFETY: the function takes nothing. The range was opened on this thread, which it cannot leave: it is part
            // of one whose span is entered.
            unsafe { (functions.pop)() };
        }
    }
}

impl Functions {
    /// Loads them from a library, which stays loaded; `None` if it or one of them is missing.
    fn load(library: &CStr) -> Option<Self> {
        unsafe extern "C" {
            fn dlopen(name: *const c_char, mode: c_int) -> *mut c_void;
            fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
        }
        // SAFETY: the name ends with a zero byte; loading NVIDIA's library runs no code but its own initialisation.
        let handle = unsafe { dlopen(library.as_ptr(), LAZY) };
        if handle.is_null() {
            return None;
        }
        // SAFETY: the handle is open, and the names end with a zero byte.
        let symbol = |name: &CStr| unsafe { dlsym(handle, name.as_ptr()) };
        let (push, pop) = (symbol(c"nvtxRangePushA"), symbol(c"nvtxRangePop"));
        if push.is_null() || pop.is_null() {
            return None;
        }
        // SAFETY: these are the types that the header declares for these names.
        unsafe {
            Some(Self {
                push: std::mem::transmute::<*mut c_void, Push>(push),
                pop: std::mem::transmute::<*mut c_void, Pop>(pop),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    thread_local! {
        static SEEN: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    }

    unsafe extern "C" fn push(name: *const c_char) -> c_int {
        // SAFETY: `Range` passes names that end with a zero byte.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        SEEN.with_borrow_mut(|seen| seen.push(name.into_owned()));
        0
    }

    unsafe extern "C" fn pop() -> c_int {
        SEEN.with_borrow_mut(|seen| seen.push("pop".into()));
        0
    }

    #[test]
    fn ranges_are_pushed_and_popped_in_order() {
        let functions = Some(Functions { push, pop });
        let outer = Range::with(functions, "outer\0");
        drop(Range::with(functions, "inner\0"));
        drop(outer);
        SEEN.with_borrow(|seen| assert_eq!(seen[..], ["outer", "inner", "pop", "pop"]));
    }

    #[test]
    fn nothing_happens_without_the_library() {
        assert!(Functions::load(c"libthere-is-no-such-library.so.1").is_none());
        // A library without the functions: the process itself has no name, so take one that every process has.
        assert!(Functions::load(c"libc.so.6").is_none());
        drop(Range::with(None, "nothing\0"));
    }
}
