//! What the table of generated code says of architectures on which nothing has run.

use std::collections::BTreeMap;

/// The architecture of the GPU whose suite is recorded.
const RUN: &str = "sm_90a";

/// What the table of generated code has of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Code {
    Masks,
    All,
}

impl Code {
    /// The cell of the table.
    pub(super) fn shown(self) -> &'static str {
        match self {
            Self::Masks => "those of masks compiled only",
            Self::All => "compiled only",
        }
    }
}

/// The engines of each architecture but the GPU's that ran.
pub(super) type Compiled<'a> = BTreeMap<&'a str, BTreeMap<&'static str, Code>>;

/// Reads `docs/codegen.tsv`: variants are `set.kernel` with a suffix behind `-`; the columns before the
/// last, the key, count instructions of tensor cores.
pub(super) fn compiled(table: &str) -> Compiled<'_> {
    let mut all = Compiled::new();
    for row in table.lines().skip(1) {
        let columns: Vec<&str> = row.split('\t').collect();
        let [variant, arch, .., mma, wgmma, _key] = columns[..] else {
            continue;
        };
        if arch == RUN {
            continue;
        }
        let (set, kernel) = variant.split_once('.').unwrap_or(("", variant));
        let kernel = kernel.split('-').next().unwrap_or_default();
        let engines = all.entry(arch).or_default();
        let engine = match (kernel, mma, wgmma) {
            (_, "0", "0") if ["forward", "dq", "dkdv"].contains(&kernel) => "portable",
            (_, "0", "0") => continue,
            (_, _, "0") => "mma",
            _ => "wgmma",
        };
        let code = match set.starts_with("masked") {
            true => Code::Masks,
            false => Code::All,
        };
        let known = engines.entry(engine).or_insert(code);
        if code == Code::All {
            *known = code;
        }
    }
    all
}

/// The architectures in order of their numbers, those side by side whose engines are the same.
pub(super) fn alike<'a>(compiled: &Compiled<'a>) -> Vec<Vec<&'a str>> {
    let mut archs: Vec<&str> = compiled.keys().copied().collect();
    archs.sort_by_key(|arch| number(arch).parse::<u32>().unwrap_or(u32::MAX));
    let mut groups: Vec<Vec<&str>> = Vec::new();
    for arch in archs {
        match groups.last_mut() {
            Some(group) if compiled[group[0]] == compiled[arch] => group.push(arch),
            _ => groups.push(vec![arch]),
        }
    }
    groups
}

fn number(arch: &str) -> &str {
    arch.trim_start_matches("sm_")
        .trim_end_matches(char::is_alphabetic)
}

/// `sm_89, 100, 120`.
pub(super) fn joined(archs: &[&str]) -> String {
    let numbers: Vec<&str> = archs.iter().map(|arch| number(arch)).collect();
    format!("sm_{}", numbers.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_compiles_is_told_by_engine_and_architecture() {
        let table = "variant\tarch\tregisters\tmma\twgmma\tkey\n\
                     bf16.forward\tsm_80\t1\t0\t0\tff\n\
                     bf16.forward_mma-A100\tsm_80\t1\t8\t0\tff\n\
                     masked.dq_mma\tsm_80\t1\t8\t0\tff\n\
                     masked.dq_mma\tsm_120\t1\t8\t0\tff\n\
                     masked.dq_mma\tsm_89\t1\t8\t0\tff\n\
                     bf16.fill\tsm_89\t1\t0\t0\tff\n\
                     bf16.forward_wgmma\tsm_90a\t1\t0\t8\tff\n";
        let compiled = compiled(table);
        assert_eq!(
            compiled["sm_80"],
            [("mma", Code::All), ("portable", Code::All)].into()
        );
        assert_eq!(compiled["sm_89"], [("mma", Code::Masks)].into());
        let groups = alike(&compiled);
        let names: Vec<String> = groups.iter().map(|group| joined(group)).collect();
        assert_eq!(names, ["sm_80", "sm_89, 120"]);
    }
}
