//! The machine's processor, and how much processor time this process used.

use std::process::Command;

/// The processor, as the kernel names it.
pub(crate) fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        info.lines()
            .find(|line| line.starts_with(name))
            .and_then(|line| line.split(": ").nth(1))
            .unwrap_or("?")
            .to_string()
    };
    format!(
        "{} family {} model {}",
        field("model name"),
        field("cpu family"),
        field("model\t")
    )
}

/// The output of a command, or "unknown".
pub(crate) fn output(program: &str, args: &[&str]) -> String {
    (Command::new(program).args(args).output().ok())
        .filter(|output| output.status.success())
        .and_then(|output| String::from_utf8(output.stdout).ok())
        .map_or("unknown".into(), |text| text.trim().into())
}

/// Processor time of every thread of this process so far, in milliseconds; NaN where the kernel does not say (it is
/// Linux's `schedstat`). Unlike elapsed time, it hardly depends on other processes.
pub(crate) fn cpu_millis() -> f64 {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else {
        return f64::NAN;
    };
    let nanos = threads.flatten().map(|thread| {
        let text = std::fs::read_to_string(thread.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<f64>().ok()
    });
    nanos
        .sum::<Option<f64>>()
        .map_or(f64::NAN, |nanos| nanos / 1e6)
}
