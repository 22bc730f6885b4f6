//! The length of the main loops of the tensor-core kernels: each is read in one sitting.

/// The folders whose kernels are checked: the passes on tensor cores, without tests.
const KERNELS: [&str; 4] = [
    "crates/flash-dma-kernels/src/forward/mma.rs",
    "crates/flash-dma-kernels/src/forward/wgmma.rs",
    "crates/flash-dma-kernels/src/backward/dq/",
    "crates/flash-dma-kernels/src/backward/dkdv/",
];

/// The most lines of a loop, from its head to its closing brace.
const LIMIT: usize = 60;

/// Adds the loops of the file `name` that are too long to `faults`. Code is formatted by rustfmt, so the line that
/// closes a loop is the first one after it with a brace at its indentation.
pub fn faults(name: &str, text: &str, faults: &mut Vec<String>) {
    if !KERNELS.iter().any(|kernels| name.starts_with(kernels)) {
        return;
    }
    let lines: Vec<_> = text.lines().collect();
    for (number, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        if !["for ", "while ", "loop "]
            .iter()
            .any(|word| code.starts_with(word))
        {
            continue;
        }
        let close = format!("{}}}", &line[..line.len() - code.len()]);
        let rest = lines[number..].iter();
        let length = rest.take_while(|line| **line != close).count() + 1;
        if length > LIMIT {
            faults.push(format!(
                "{name}:{}: a loop of {length} lines, {LIMIT} are the most",
                number + 1
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loops_are_measured_to_their_closing_brace() {
        let of_length = |lines: usize| {
            let text = format!(
                "fn f() {{\n    for n in 0..2 {{\n{}    }}\n}}\n",
                "        g();\n".repeat(lines - 2)
            );
            let mut found = Vec::new();
            faults(
                "crates/flash-dma-kernels/src/forward/mma.rs",
                &text,
                &mut found,
            );
            found
        };
        assert!(of_length(LIMIT).is_empty());
        assert_eq!(of_length(LIMIT + 1).len(), 1);
        assert!(of_length(LIMIT + 1)[0].contains("mma.rs:2: a loop of 61 lines"));
    }

    #[test]
    fn other_files_may_loop_as_long_as_they_like() {
        let mut found = Vec::new();
        let text = format!("for n in 0..2 {{\n{}}}\n", "    g();\n".repeat(LIMIT));
        faults("crates/xtask/src/main.rs", &text, &mut found);
        assert!(found.is_empty());
    }
}
