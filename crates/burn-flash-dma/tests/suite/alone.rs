//! Tests that need a process of their own.

use std::process::Command;

/// Marks a process that runs one test alone.
const MARK: &str = "FLASH_DMA_ALONE";

/// Runs the rest of the test in a process of its own, for process-wide state such as a seed or an allocator.
macro_rules! alone {
    () => {
        fn here() {}
        if $crate::alone::ran_elsewhere(std::any::type_name_of_val(&here)) {
            return;
        }
    };
}
pub(crate) use alone;

/// Runs the test with the function `here` in another process and returns true; returns false in that process.
pub fn ran_elsewhere(here: &str) -> bool {
    if std::env::var_os(MARK).is_some() {
        return false;
    }
    let path = here.strip_suffix("::here").expect("the macro's function");
    let (_, test) = path.split_once("::").expect("a path in this program");
    let program = std::env::current_exe().expect("this program");
    let mut command = Command::new(program);
    command
        .args(["--exact", test, "--nocapture"])
        .env(MARK, "1");
    let output = command.output().expect("a process");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{stdout}{stderr}");
    assert!(stdout.contains("1 passed"), "{stdout}");
    true
}
