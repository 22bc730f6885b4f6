//! The conversion to bf16 on CubeCL's CPU runtime.
//!
//! LLVM compiles f32 → bf16 to a call of `__truncsfbf2` where the x86-64 CPU has no instruction for it (AVX512-BF16 or
//! AVX-NE-CONVERT), and f64 → bf16 to a call of `__truncdfbf2` on every CPU. CubeCL's just-in-time compiler looks such
//! functions up among the symbols that the process exports. They belong to the compiler's run-time library; libgcc has
//! them from GCC 13 on, so that on Debian 12, for example, linking every kernel with bf16 results would fail.
//!
//! With the feature `cpu` this module provides both functions. An executable exports its own functions only if the
//! linker is told to, and no build script of a library can tell it. So they come as a shared object of less than a
//! page, which `round.s` lays out in the program's constants, and which the program loads from memory when it starts:
//! kernels of Burn that run before the first of ours find them, too. Where the process exports such functions already,
//! nothing is loaded.

#[cfg(all(
    any(feature = "cpu", test),
    target_os = "linux",
    target_arch = "x86_64"
))]
mod export;

use cubecl::client::Client;

/// The text of `what` in [`Unsupported`](flash_dma_problem::AttentionError::Unsupported).
pub(crate) const NO_ROUNDING: &str = "tensors of bf16 on this CPU, which has no instruction for the conversion to them, \
                                      without the feature `cpu` of flash-dma-kernels";

/// True if kernels on the client's device can convert to bf16.
pub(crate) fn rounds_to_bf16(client: &Client) -> bool {
    // Only the CPU runtime counts cores.
    if client.properties().hardware.num_cpu_cores.is_none() {
        return true;
    }
    linked::rounds_to_bf16()
}

/// Other CPUs and systems: nothing is known to be missing.
#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
mod linked {
    pub(crate) fn rounds_to_bf16() -> bool {
        true
    }
}

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod linked {
    use std::ffi::{CStr, c_char, c_void};
    use std::ptr::NonNull;
    use std::sync::OnceLock;

    /// f32 → bf16.
    pub(crate) const ROUND_F32: &CStr = c"__truncsfbf2";

    pub(crate) fn rounds_to_bf16() -> bool {
        static ROUNDS: OnceLock<bool> = OnceLock::new();
        *ROUNDS.get_or_init(|| {
            is_x86_feature_detected!("avx512bf16")
                || is_x86_feature_detected!("avxneconvert")
                || exported(ROUND_F32).is_some()
        })
    }

    /// A function that the process exports.
    pub(crate) fn exported(name: &CStr) -> Option<NonNull<c_void>> {
        unsafe extern "C" {
            fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
        }
        // SAFETY: the name ends with a zero byte; a null handle represents everything that is exported.
        NonNull::new(unsafe { dlsym(std::ptr::null_mut(), name.as_ptr()) })
    }
}
