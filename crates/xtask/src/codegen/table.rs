//! The table of compiled kernels: its file form, its printed form, and what counts as growth.

use super::spills::Spills;
use crate::process::Result;
use std::collections::BTreeMap;
use std::fmt;

/// How much a kernel may grow before the gate fails: what a small change of the code may cost.
pub struct Bounds {
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of stack per thread. Spills are checked by [`Spills`].
    pub stack: u32,
    /// Bytes of shared memory per cube.
    pub shared: u32,
}

/// The gate's bounds.
pub const BOUNDS: Bounds = Bounds {
    registers: 8,
    stack: 16,
    shared: 256,
};

/// The most shared memory that a cube may have, in bytes.
fn shared_limit(arch: &str) -> u32 {
    match arch {
        "sm_80" => 163 * 1024,
        "sm_89" | "sm_120" => 99 * 1024,
        _ => 227 * 1024,
    }
}

/// The generator's output: a tab-separated file with a header, of which the columns `name`, `arches` and `shared_bytes`
/// (dynamic shared memory per cube) are read.
#[derive(Debug)]
pub struct Manifest {
    /// The variants, in the generator's order.
    pub variants: Vec<Variant>,
}

/// One generated source, `<name>.cu`.
#[derive(Debug, PartialEq, Eq)]
pub struct Variant {
    /// The file's stem.
    pub name: String,
    /// The architectures whose devices launch it.
    pub arches: Vec<String>,
    /// Dynamic shared memory per cube, which the compiler does not see.
    pub shared: u32,
}

impl Manifest {
    /// Reads the manifest.
    ///
    /// # Errors
    /// When a column is missing, a number is malformed, or there is no variant.
    pub fn parse(text: &str) -> Result<Self> {
        let mut lines = text.lines().filter(|line| !line.is_empty());
        let header: Vec<&str> = lines.next().unwrap_or_default().split('\t').collect();
        let column = |name: &str| {
            let found = header.iter().position(|h| *h == name);
            found.ok_or_else(|| format!("the generator's manifest has no column {name}"))
        };
        let columns = (column("name")?, column("arches")?, column("shared_bytes")?);
        let (name, arches, shared) = columns;
        let variants = lines
            .map(|line| {
                let cells: Vec<&str> = line.split('\t').collect();
                match (
                    cells.get(name),
                    cells.get(arches),
                    cells.get(shared).and_then(|s| s.parse().ok()),
                ) {
                    (Some(name), Some(arches), Some(shared)) => Ok(Variant {
                        name: (*name).to_owned(),
                        arches: arches.split(',').map(str::to_owned).collect(),
                        shared,
                    }),
                    _ => Err(format!("the generator's manifest has a bad row: {line}")),
                }
            })
            .collect::<Result<Vec<_>>>()?;
        if variants.is_empty() {
            return Err("the generator's manifest lists no variant".into());
        }
        Ok(Self { variants })
    }
}

/// Kernels by (variant, architecture).
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// The rows.
    pub rows: BTreeMap<(String, String), Row>,
}

/// The resources of one compiled kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    registers: u32,
    spill_stores: u32,
    spill_loads: u32,
    stack: u32,
    /// Static and dynamic, in bytes per cube.
    shared: u32,
    /// `mma.sync` instructions of the PTX.
    mma: u32,
    /// `wgmma.mma_async` instructions of the PTX.
    wgmma: u32,
    /// A hash of the source and of all else that the figures depend on; in hexadecimal digits in the file.
    key: u64,
}

const COLUMNS: [&str; 10] = [
    "variant",
    "arch",
    "registers",
    "spill_stores",
    "spill_loads",
    "stack",
    "shared",
    "mma",
    "wgmma",
    "key",
];

impl Row {
    fn cells(&self) -> [u32; 7] {
        [
            self.registers,
            self.spill_stores,
            self.spill_loads,
            self.stack,
            self.shared,
            self.mma,
            self.wgmma,
        ]
    }

    /// The bytes of spills, whichever of stores and loads is more.
    pub fn spills(&self) -> u32 {
        self.spill_stores.max(self.spill_loads)
    }
}

/// The instruction that a variant is named after, if any, and its count in the row.
fn tensor_instructions(name: &str, row: &Row) -> Option<(&'static str, u32)> {
    let kernel = name.rsplit('.').next()?.split('-').next()?;
    match kernel {
        // Sums of rows, read as the other `mma` kernels read them.
        "delta_mma" => None,
        _ if kernel.ends_with("_wgmma") => Some(("wgmma", row.wgmma)),
        _ if kernel.ends_with("_mma") => Some(("mma", row.mma)),
        _ => None,
    }
}

impl Table {
    /// Reads the committed form.
    ///
    /// # Errors
    /// When the header or a row is malformed.
    pub fn parse(text: &str) -> Result<Self> {
        match text.split_once('\n') {
            Some((header, rows)) if header == COLUMNS.join("\t") => Self::from_rows(rows),
            _ => Err("docs/codegen.tsv has another header; --bless rewrites it".into()),
        }
    }

    /// Reads rows without a header.
    ///
    /// # Errors
    /// When one is malformed.
    pub(super) fn from_rows(text: &str) -> Result<Self> {
        let row = |line: &str| {
            let (variant, rest) = line.split_once('\t')?;
            let (arch, numbers) = rest.split_once('\t')?;
            let (numbers, key) = numbers.rsplit_once('\t')?;
            let key = u64::from_str_radix(key, 16).ok()?;
            let numbers: Vec<u32> = numbers.split('\t').map_while(|n| n.parse().ok()).collect();
            let [
                registers,
                spill_stores,
                spill_loads,
                stack,
                shared,
                mma,
                wgmma,
            ] = numbers.try_into().ok()?;
            let row = Row {
                registers,
                spill_stores,
                spill_loads,
                stack,
                shared,
                mma,
                wgmma,
                key,
            };
            Some(((variant.to_owned(), arch.to_owned()), row))
        };
        let lines = text.lines().filter(|line| !line.is_empty());
        let rows = lines
            .map(|line| row(line).ok_or_else(|| format!("bad row: {line}")))
            .collect::<Result<BTreeMap<_, _>>>()?;
        Ok(Self { rows })
    }

    /// Violations that no table excuses: too much shared memory for the architecture, a tensor-core kernel without its
    /// instruction, and spills that are not accounted for.
    pub fn violations(&self, spills: &Spills) -> Vec<String> {
        let mut faults = Vec::new();
        for ((name, arch), row) in &self.rows {
            let mut fault = |what: String| faults.push(format!("{name} {arch}: {what}"));
            if row.shared > shared_limit(arch) {
                fault(format!(
                    "{} bytes of shared memory, the architecture has {}",
                    row.shared,
                    shared_limit(arch)
                ));
            }
            if let Some((instruction, 0)) = tensor_instructions(name, row) {
                fault(format!("has no {instruction} instruction"));
            }
            let allowed = spills.allowed(name, arch);
            if row.spills() > allowed {
                fault(format!(
                    "spills {} bytes, docs/codegen-spills.tsv allows {allowed}",
                    row.spills()
                ));
            }
        }
        faults
    }

    /// Growth over the committed table beyond the bounds, and kernels that only one of the two has.
    pub fn growth(&self, expected: &Self) -> Vec<String> {
        let mut faults = Vec::new();
        for (key, row) in &self.rows {
            let mut fault = |what: String| faults.push(format!("{} {}: {what}", key.0, key.1));
            let Some(old) = expected.rows.get(key) else {
                fault("not in the committed table".into());
                continue;
            };
            for (column, new, old, bound) in [
                ("registers", row.registers, old.registers, BOUNDS.registers),
                ("stack", row.stack, old.stack, BOUNDS.stack),
                ("shared", row.shared, old.shared, BOUNDS.shared),
            ] {
                if new > old + bound {
                    fault(format!("{column} {old} -> {new}, more than {bound} above"));
                }
            }
            for (column, new, old) in [("mma", row.mma, old.mma), ("wgmma", row.wgmma, old.wgmma)] {
                if new < old {
                    fault(format!("{column} instructions {old} -> {new}"));
                }
            }
        }
        let lost = expected
            .rows
            .keys()
            .filter(|key| !self.rows.contains_key(key));
        faults.extend(lost.map(|(name, arch)| {
            format!("{name} {arch}: in the committed table, but no longer generated")
        }));
        faults
    }

    /// The rows as [`Table::from_rows`] reads them.
    pub fn lines(&self) -> String {
        let mut text = String::new();
        for ((name, arch), row) in &self.rows {
            let cells = row.cells().map(|n| n.to_string());
            text += &format!("{name}\t{arch}\t{}\t{:016x}\n", cells.join("\t"), row.key);
        }
        text
    }

    /// The table for a terminal.
    pub fn pretty(&self) -> String {
        let names = self.rows.keys().map(|(name, _)| name.len());
        let width = names.max().unwrap_or(0).max(COLUMNS[0].len());
        let line = |name: &str, arch: &str, cells: [String; 7]| {
            let cells: String = cells
                .iter()
                .zip(&COLUMNS[2..])
                .fold(String::new(), |line, (c, h)| {
                    line + &format!("  {c:>width$}", width = h.len().max(6))
                });
            format!("{name:width$}  {arch:6}{cells}\n")
        };
        let header = [2, 3, 4, 5, 6, 7, 8].map(|i| COLUMNS[i].to_owned());
        let mut text = line(COLUMNS[0], COLUMNS[1], header);
        for ((name, arch), row) in &self.rows {
            text += &line(name, arch, row.cells().map(|n| n.to_string()));
        }
        text
    }
}

/// The committed form.
impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n{}", COLUMNS.join("\t"), self.lines())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows, each with a key.
    fn table(rows: &str) -> Table {
        Table::from_rows(&rows.replace('\n', "\t00ff\n")).unwrap()
    }

    #[test]
    fn the_committed_form_reads_back() {
        let table =
            table("a\tsm_80\t40\t0\t0\t8\t1024\t2\t0\nb\tsm_90a\t255\t16\t24\t0\t0\t0\t3\n");
        assert_eq!(Table::parse(&table.to_string()), Ok(table));
        let keyless = format!(
            "{}\na\tsm_80\t40\t0\t0\t8\t1024\t2\t0\n",
            COLUMNS.join("\t")
        );
        assert!(Table::parse(&keyless).is_err());
        assert!(Table::parse("variant\tregisters\n").is_err());
        assert!(Table::parse(&format!("{}\na\tsm_80\t1\t2\n", COLUMNS.join("\t"))).is_err());
    }

    #[test]
    fn the_manifest_names_variants_architectures_and_memory() {
        let text = "name\tarches\tunits\tshared_bytes\na\tsm_80,sm_90a\t128\t1000\n";
        let manifest = Manifest::parse(text).unwrap();
        let expected = Variant {
            name: "a".into(),
            arches: vec!["sm_80".into(), "sm_90a".into()],
            shared: 1000,
        };
        assert_eq!(manifest.variants, [expected]);
        assert!(Manifest::parse("name\tarches\tunits\na\tsm_80\t128\n").is_err());
        assert!(Manifest::parse("name\tarches\tshared_bytes\n").is_err());
    }

    #[test]
    fn growth_beyond_the_bounds_is_a_fault() {
        let old = table("a\tsm_80\t40\t0\t0\t0\t1024\t8\t4\n");
        let within = table("a\tsm_80\t48\t0\t0\t16\t1280\t8\t4\n");
        assert_eq!(within.growth(&old), [] as [String; 0]);
        let better = table("a\tsm_80\t20\t0\t0\t0\t0\t9\t5\n");
        assert_eq!(better.growth(&old), [] as [String; 0]);

        let beyond = table("a\tsm_80\t49\t0\t0\t17\t1281\t7\t3\n");
        assert_eq!(
            beyond.growth(&old),
            [
                "a sm_80: registers 40 -> 49, more than 8 above",
                "a sm_80: stack 0 -> 17, more than 16 above",
                "a sm_80: shared 1024 -> 1281, more than 256 above",
                "a sm_80: mma instructions 8 -> 7",
                "a sm_80: wgmma instructions 4 -> 3",
            ]
        );
    }

    #[test]
    fn new_and_lost_kernels_are_faults() {
        let old = table("a\tsm_80\t40\t0\t0\t0\t0\t0\t0\n");
        let new = table("b\tsm_80\t40\t0\t0\t0\t0\t0\t0\n");
        assert_eq!(
            new.growth(&old),
            [
                "b sm_80: not in the committed table",
                "a sm_80: in the committed table, but no longer generated"
            ]
        );
    }

    #[test]
    fn spills_and_missing_instructions_are_violations_whatever_is_committed() {
        let spills = Spills::parse("variant\tarch\tbytes\twhy\n*.dq\tsm_80\t16\treason\n").unwrap();
        let rows = table(
            "x.a_mma\tsm_80\t40\t0\t0\t0\t0\t0\t7\n\
             x.a_mma-2\tsm_80\t40\t0\t0\t0\t0\t7\t0\n\
             x.a_wgmma\tsm_90a\t40\t0\t0\t0\t0\t7\t0\n\
             x.delta_mma\tsm_80\t40\t0\t0\t0\t0\t0\t0\n\
             x.dq\tsm_80\t40\t8\t16\t0\t0\t0\t0\n\
             x.dq\tsm_90a\t40\t8\t16\t0\t166913\t0\t0\n\
             y.dq\tsm_80\t40\t20\t16\t0\t166913\t0\t0\n",
        );
        assert_eq!(
            rows.violations(&spills),
            [
                "x.a_mma sm_80: has no mma instruction",
                "x.a_wgmma sm_90a: has no wgmma instruction",
                "x.dq sm_90a: spills 16 bytes, docs/codegen-spills.tsv allows 0",
                "y.dq sm_80: 166913 bytes of shared memory, the architecture has 166912",
                "y.dq sm_80: spills 20 bytes, docs/codegen-spills.tsv allows 16",
            ]
        );
    }
}
