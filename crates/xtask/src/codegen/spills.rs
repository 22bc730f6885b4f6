//! The spills that are accepted, each with its reason.

use super::table::Table;
use crate::process::Result;

/// The accepted spills: a tab-separated file with the columns `variant` (`*` matches any characters), `arch`, `bytes`
/// (of stores or of loads, per thread) and `why`.
#[derive(Debug)]
pub struct Spills {
    rows: Vec<Row>,
}

#[derive(Debug)]
struct Row {
    variant: String,
    arch: String,
    bytes: u32,
}

const HEADER: &str = "variant\tarch\tbytes\twhy";

impl Spills {
    /// Reads the file.
    ///
    /// # Errors
    /// When the header or a row is malformed, or a row states no reason.
    pub fn parse(text: &str) -> Result<Self> {
        let bad = |line: &str| format!("docs/codegen-spills.tsv has a bad row: {line}");
        let mut lines = text.lines().filter(|line| !line.is_empty());
        match lines.next() {
            Some(HEADER) => {}
            header => return Err(bad(header.unwrap_or_default())),
        }
        let row = |line: &str| {
            let cells: Vec<&str> = line.split('\t').collect();
            let [variant, arch, bytes, why] = cells.try_into().ok()?;
            (!why.trim().is_empty()).then_some(Row {
                variant: variant.to_owned(),
                arch: arch.to_owned(),
                bytes: bytes.parse().ok()?,
            })
        };
        let rows = lines
            .map(|line| row(line).ok_or_else(|| bad(line)))
            .collect::<Result<_>>()?;
        Ok(Self { rows })
    }

    /// Bytes that the variant may spill.
    pub fn allowed(&self, variant: &str, arch: &str) -> u32 {
        let rows = self.rows.iter().filter(|row| row.covers(variant, arch));
        rows.map(|row| row.bytes).max().unwrap_or(0)
    }

    /// The rows that no kernel of a complete table needs anymore.
    pub fn unused(&self, table: &Table) -> Vec<String> {
        let spilling = |row: &&Row| {
            let mut kernels = table.rows.iter();
            !kernels.any(|((name, arch), kernel)| kernel.spills() > 0 && row.covers(name, arch))
        };
        let unused = self.rows.iter().filter(spilling);
        unused
            .map(|row| {
                format!(
                    "{} {}: docs/codegen-spills.tsv excuses spills that are gone",
                    row.variant, row.arch
                )
            })
            .collect()
    }
}

impl Row {
    fn covers(&self, variant: &str, arch: &str) -> bool {
        matches(&self.variant, variant) && matches(&self.arch, arch)
    }
}

/// Whether `text` is the pattern, in which `*` matches any characters.
fn matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((head, tail)) => text.strip_prefix(head).is_some_and(|rest| {
            (0..=rest.len())
                .filter(|&i| rest.is_char_boundary(i))
                .any(|i| matches(tail, &rest[i..]))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_any_characters() {
        assert!(matches("*.dq", "bf16-d128.dq"));
        assert!(!matches("*.dq", "bf16-d128.dq_mma"));
        assert!(matches("bf16-*.dq*", "bf16-d128.dq_mma-2"));
        assert!(matches("a", "a") && !matches("a", "b") && matches("*", ""));
    }

    #[test]
    fn the_widest_allowance_holds_and_idle_ones_are_told() {
        let text = format!("{HEADER}\n*.dq\t*\t8\twhy\nx.*\tsm_80\t16\twhy\nz\t*\t4\twhy\n");
        let spills = Spills::parse(&text).unwrap();
        assert_eq!(spills.allowed("x.dq", "sm_80"), 16);
        assert_eq!(spills.allowed("x.dq", "sm_90a"), 8);
        assert_eq!(spills.allowed("y", "sm_80"), 0);
        let table = "x.dq\tsm_80\t40\t4\t0\t0\t0\t0\t0\tff\nz\tsm_80\t40\t0\t0\t0\t0\t0\t0\tff\n";
        let unused = spills.unused(&Table::from_rows(table).unwrap());
        assert_eq!(unused.len(), 1);
        assert!(unused[0].starts_with("z *: "));
    }

    #[test]
    fn an_allowance_needs_a_reason() {
        assert!(Spills::parse(&format!("{HEADER}\n*.dq\t*\t8\t \n")).is_err());
        assert!(Spills::parse("variant\tarch\n").is_err());
    }
}
