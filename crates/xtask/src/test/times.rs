//! Times of tests, from the moments at which a program's results appear.

use std::fmt::Write;
use std::time::Duration;

/// A test, and the time from its program's start to its end.
#[derive(Debug, PartialEq, Eq)]
pub struct Ended {
    pub name: String,
    pub time: Duration,
}

/// Number of tests a program runs at once.
pub fn threads() -> usize {
    let told = std::env::var("RUST_TEST_THREADS").ok();
    let all = || std::thread::available_parallelism().map_or(1, usize::from);
    told.and_then(|threads| threads.parse().ok())
        .unwrap_or_else(all)
}

/// Time of each test of a program: tests start in the order of their names, as many as there are threads, then one
/// whenever one ends.
pub fn of(ended: &[Ended], threads: usize) -> impl Iterator<Item = (Duration, &str)> {
    let mut order: Vec<&Ended> = ended.iter().collect();
    order.sort_by(|a, b| a.name.cmp(&b.name));
    order.into_iter().enumerate().map(move |(n, test)| {
        let start = n
            .checked_sub(threads)
            .map_or(Duration::ZERO, |free| ended[free].time);
        (test.time.saturating_sub(start), &test.name[..])
    })
}

/// The slowest tests, one per line.
pub fn slowest(times: &[(Duration, String)], count: usize) -> String {
    let mut order: Vec<&(Duration, String)> = times.iter().collect();
    order.sort_by_key(|(time, _)| std::cmp::Reverse(*time));
    let mut text = String::from("the slowest tests\n");
    for (time, name) in order.into_iter().take(count) {
        let _ = writeln!(text, "{:7.1} s  {name}", time.as_secs_f64());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(tests: &[(&str, u64)]) -> Vec<Ended> {
        let test = |&(name, time): &(&str, u64)| Ended {
            name: name.into(),
            time: Duration::from_secs(time),
        };
        tests.iter().map(test).collect()
    }

    #[test]
    fn a_test_starts_when_a_thread_is_free() {
        // Two threads: a and b start at once, c after b, d after a.
        let ended = ended(&[("b", 2), ("a", 5), ("c", 6), ("d", 9)]);
        let seconds: Vec<_> = of(&ended, 2)
            .map(|(time, name)| (time.as_secs(), name))
            .collect();
        assert_eq!(seconds, [(5, "a"), (2, "b"), (4, "c"), (4, "d")]);
        let alone: Vec<_> = of(&ended[..1], 8).map(|(time, _)| time.as_secs()).collect();
        assert_eq!(alone, [2]);
    }

    #[test]
    fn the_slowest_come_first() {
        let times = [1, 30, 2].map(|s| (Duration::from_secs(s), format!("p: {s}")));
        let expected = "the slowest tests\n   30.0 s  p: 30\n    2.0 s  p: 2\n";
        assert_eq!(slowest(&times, 2), expected);
    }
}
