//! The machine's processor, and how much processor time this process used.

/// The processor, as the kernel names it.
pub fn machine() -> String {
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

/// Processor time of every thread of this process so far, in milliseconds; NaN where the kernel does not say (it is
/// Linux's `schedstat`). Unlike elapsed time, it hardly depends on other processes.
pub fn cpu_millis() -> f64 {
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
