//! The table of compiled kernels: its file form, its printed form, and what counts as growth.

use crate::process::Result;
use std::collections::BTreeMap;
use std::fmt;

/// How much a kernel may grow before the gate fails: what a small change of the code may cost.
pub struct Bounds {
    /// Registers a thread.
    pub registers: u32,
    /// Bytes of spill stores, spill loads and stack, each, a thread.
    pub spill: u32,
    /// Bytes of shared memory a cube.
    pub shared: u32,
}

/// The gate's bounds.
pub const BOUNDS: Bounds = Bounds {
    registers: 8,
    spill: 16,
    shared: 256,
};

/// The most shared memory a cube may have, in bytes.
fn shared_limit(arch: &str) -> u32 {
    match arch {
        "sm_80" => 163 * 1024,
        _ => 227 * 1024,
    }
}

/// What the generator wrote: a tab-separated file with a header, of which the columns `name` and
/// `shared_bytes` (dynamic shared memory a cube) are read.
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
    /// Dynamic shared memory a cube, which the compiler does not see.
    pub shared: u32,
}

impl Variant {
    /// Whether an older architecture could launch it: tiles are cut to the shared memory of the device, which
    /// for these variants is Hopper's.
    pub fn launches_before_hopper(&self) -> bool {
        !self.name.ends_with("_wgmma") && self.shared <= shared_limit("sm_80")
    }
}

impl Manifest {
    /// Reads the manifest.
    ///
    /// # Errors
    /// When a column is missing, a number is none, or there is no variant.
    pub fn parse(text: &str) -> Result<Self> {
        let mut lines = text.lines().filter(|line| !line.is_empty());
        let header: Vec<&str> = lines.next().unwrap_or_default().split('\t').collect();
        let column = |name: &str| {
            let found = header.iter().position(|h| *h == name);
            found.ok_or_else(|| format!("the generator's manifest has no column {name}"))
        };
        let (name, shared) = (column("name")?, column("shared_bytes")?);
        let variants = lines
            .map(|line| {
                let cells: Vec<&str> = line.split('\t').collect();
                match (
                    cells.get(name),
                    cells.get(shared).and_then(|s| s.parse().ok()),
                ) {
                    (Some(name), Some(shared)) => Ok(Variant {
                        name: (*name).to_owned(),
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

/// What one compiled kernel takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    registers: u32,
    spill_stores: u32,
    spill_loads: u32,
    stack: u32,
    /// Static and dynamic, bytes a cube.
    shared: u32,
}

const COLUMNS: [&str; 7] = [
    "variant",
    "arch",
    "registers",
    "spill_stores",
    "spill_loads",
    "stack",
    "shared",
];

impl Row {
    fn cells(&self) -> [u32; 5] {
        [
            self.registers,
            self.spill_stores,
            self.spill_loads,
            self.stack,
            self.shared,
        ]
    }
}

impl Table {
    /// Reads the committed form.
    ///
    /// # Errors
    /// When the header or a row is not that of the form.
    pub fn parse(text: &str) -> Result<Self> {
        match text.split_once('\n') {
            Some((header, rows)) if header == COLUMNS.join("\t") => Self::from_rows(rows),
            _ => Err("docs/codegen.tsv has another header; --bless rewrites it".into()),
        }
    }

    /// Adds the dynamic shared memory to what the compilers said.
    ///
    /// # Errors
    /// When a row is malformed or names no variant of the manifest.
    pub fn compiled(rows: &str, manifest: &Manifest) -> Result<Self> {
        let mut table = Self::from_rows(rows)?;
        for ((name, _), row) in &mut table.rows {
            let variant = manifest.variants.iter().find(|v| v.name == *name);
            row.shared += variant
                .ok_or_else(|| format!("{name} is not in the manifest"))?
                .shared;
        }
        Ok(table)
    }

    fn from_rows(text: &str) -> Result<Self> {
        let row = |line: &str| {
            let (variant, rest) = line.split_once('\t')?;
            let (arch, numbers) = rest.split_once('\t')?;
            let numbers: Vec<u32> = numbers.split('\t').map_while(|n| n.parse().ok()).collect();
            let [registers, spill_stores, spill_loads, stack, shared] = numbers.try_into().ok()?;
            let row = Row {
                registers,
                spill_stores,
                spill_loads,
                stack,
                shared,
            };
            Some(((variant.to_owned(), arch.to_owned()), row))
        };
        let lines = text.lines().filter(|line| !line.is_empty());
        let rows = lines
            .map(|line| row(line).ok_or_else(|| format!("bad row: {line}")))
            .collect::<Result<BTreeMap<_, _>>>()?;
        Ok(Self { rows })
    }

    /// What is worse than in the committed table, beyond the bounds; and kernels that only one of the two
    /// has.
    pub fn faults(&self, expected: &Self) -> Vec<String> {
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
            let Some(old) = expected.rows.get(&(name.clone(), arch.clone())) else {
                fault("not in the committed table".into());
                continue;
            };
            let spill = BOUNDS.spill;
            let bounds = [BOUNDS.registers, spill, spill, spill, BOUNDS.shared];
            for (i, (new, old)) in row.cells().into_iter().zip(old.cells()).enumerate() {
                if new > old + bounds[i] {
                    let column = COLUMNS[i + 2];
                    fault(format!(
                        "{column} {old} -> {new}, more than {} above",
                        bounds[i]
                    ));
                }
            }
        }
        for (name, arch) in expected
            .rows
            .keys()
            .filter(|key| !self.rows.contains_key(*key))
        {
            faults.push(format!(
                "{name} {arch}: in the committed table, but no longer generated"
            ));
        }
        faults
    }

    /// The table for a terminal.
    pub fn pretty(&self) -> String {
        let names = self.rows.keys().map(|(name, _)| name.len());
        let width = names.max().unwrap_or(0).max(COLUMNS[0].len());
        let line = |name: &str, arch: &str, cells: [String; 5]| {
            let cells: String = cells
                .iter()
                .zip(&COLUMNS[2..])
                .fold(String::new(), |line, (c, h)| {
                    line + &format!("  {c:>width$}", width = h.len().max(6))
                });
            format!("{name:width$}  {arch:6}{cells}\n")
        };
        let header = [2, 3, 4, 5, 6].map(|i| COLUMNS[i].to_owned());
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
        writeln!(f, "{}", COLUMNS.join("\t"))?;
        for ((name, arch), row) in &self.rows {
            let cells = row.cells().map(|n| n.to_string());
            writeln!(f, "{name}\t{arch}\t{}", cells.join("\t"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(rows: &str) -> Table {
        Table::from_rows(rows).unwrap()
    }

    #[test]
    fn the_committed_form_reads_back() {
        let table = table("a\tsm_80\t40\t0\t0\t8\t1024\nb\tsm_90a\t255\t16\t24\t0\t0\n");
        assert_eq!(Table::parse(&table.to_string()), Ok(table));
        assert!(Table::parse("variant\tregisters\n").is_err());
        assert!(Table::parse(&format!("{}\na\tsm_80\t1\t2\n", COLUMNS.join("\t"))).is_err());
    }

    #[test]
    fn dynamic_shared_memory_is_added() {
        let manifest = Manifest::parse("name\tunits\tshared_bytes\na\t128\t1000\n").unwrap();
        let table = Table::compiled("a\tsm_80\t40\t0\t0\t0\t24\n", &manifest).unwrap();
        assert_eq!(table.rows.values().next().unwrap().shared, 1024);
        assert!(Table::compiled("c\tsm_80\t40\t0\t0\t0\t24\n", &manifest).is_err());
        assert!(Manifest::parse("name\tunits\na\t128\n").is_err());
        assert!(Manifest::parse("name\tshared_bytes\n").is_err());
    }

    #[test]
    fn growth_beyond_the_bounds_is_a_fault() {
        let old = table("a\tsm_80\t40\t0\t0\t0\t1024\n");
        let within = table("a\tsm_80\t48\t16\t16\t16\t1280\n");
        assert_eq!(within.faults(&old), [] as [String; 0]);
        let better = table("a\tsm_80\t20\t0\t0\t0\t0\n");
        assert_eq!(better.faults(&old), [] as [String; 0]);

        let beyond = table("a\tsm_80\t49\t17\t17\t17\t1281\n");
        assert_eq!(beyond.faults(&old).len(), 5);
        assert_eq!(
            beyond.faults(&old)[0],
            "a sm_80: registers 40 -> 49, more than 8 above"
        );
    }

    #[test]
    fn new_lost_and_oversized_kernels_are_faults() {
        let old = table("a\tsm_80\t40\t0\t0\t0\t0\n");
        let new = table("b\tsm_80\t40\t0\t0\t0\t0\n");
        assert_eq!(
            new.faults(&old),
            [
                "b sm_80: not in the committed table",
                "a sm_80: in the committed table, but no longer generated"
            ]
        );
        let large = table("a\tsm_80\t40\t0\t0\t0\t166913\n");
        assert_eq!(large.faults(&large).len(), 1);
    }
}
