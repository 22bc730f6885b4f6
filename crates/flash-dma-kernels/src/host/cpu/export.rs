//! Exports the two functions of `round.s` from the process.

#[cfg(test)]
mod tests;

use crate::host::cpu::{linked::ROUND_F32, linked::exported};
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd};

/// f64 → bf16.
const ROUND_F64: &CStr = c"__truncdfbf2";

std::arch::global_asm!(include_str!("round.s"));

unsafe extern "C" {
    /// First byte of the shared object.
    #[link_name = "flash_dma_round_begin"]
    static BEGIN: u8;
    /// The byte after its last.
    #[link_name = "flash_dma_round_end"]
    static END: u8;

    fn memfd_create(name: *const c_char, flags: c_uint) -> c_int;
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
}

/// Runs before `main`, or when the library that holds it is loaded.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_START: extern "C" fn() = export;

/// Exports the functions, unless there are some already. Where that is impossible (no `/proc`, say), kernels with bf16
/// are refused later, where an error can be returned.
extern "C" fn export() {
    if exported(ROUND_F32).is_none() || exported(ROUND_F64).is_none() {
        let _ = load();
    }
}

fn load() -> std::io::Result<()> {
    const CLOSE_ON_EXEC: c_uint = 1;
    const NOW: c_int = 0x2;
    const GLOBAL: c_int = 0x100;

    // SAFETY: `round.s` lays the bytes out one after the other between its two labels.
    let object = unsafe {
        let length = (&raw const END).offset_from_unsigned(&raw const BEGIN);
        std::slice::from_raw_parts(&raw const BEGIN, length)
    };
    // SAFETY: the name ends with a zero byte.
    let descriptor = unsafe { memfd_create(c"flash-dma-round".as_ptr(), CLOSE_ON_EXEC) };
    if descriptor < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made, and nothing else owns it.
    let mut file = unsafe { File::from_raw_fd(descriptor) };
    file.write_all(object)?;
    let path = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    // SAFETY: the path ends with a zero byte; the object has no code that runs when it is loaded. It stays loaded, so
    // its functions stay valid. Failure leaves the names unexported.
    unsafe { dlopen(path.as_ptr(), NOW | GLOBAL) };
    Ok(())
}
