//! The book's table of the products of a training step.

use super::markdown::{distinct, wrapped};
use serde::Deserialize;
use std::collections::BTreeSet;
use std::fmt::Write;

const PASSES: [&str; 3] = ["forward", "input", "weight"];

/// `products.json`.
#[derive(Clone, Debug, Deserialize)]
pub struct Products {
    device: String,
    rows: Vec<Product>,
}

#[derive(Clone, Debug, Deserialize)]
struct Product {
    layer: String,
    pass: String,
    candidate: String,
    tflops: Option<f64>,
    commit: String,
}

/// Whose product it is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Maker {
    /// What the rule takes.
    Ours,
    /// What Burn takes without autotune.
    Burn,
    /// A routine of CubeK by its name.
    CubeK,
}

impl Maker {
    /// `None` for our own kernels by their names, of which the rule takes one.
    fn of(candidate: &str) -> Option<Self> {
        match candidate {
            "rule" => Some(Self::Ours),
            "standard" => Some(Self::Burn),
            name if name.starts_with("wgmma") => None,
            _ => Some(Self::CubeK),
        }
    }

    fn suffix(self) -> &'static str {
        match self {
            Self::Ours => "",
            Self::Burn => ", as Burn takes it without autotune",
            Self::CubeK => ", the fastest of CubeK's routines",
        }
    }
}

impl Products {
    /// A line for each layer's products by the rule, and for what was timed beside them.
    #[must_use]
    pub fn table(&self) -> String {
        let mut text = "| TFLOP/s | forward | gradient of the input | gradient of the weight |\n\
                        |---|---|---|---|\n"
            .to_owned();
        for layer in distinct(self.rows.iter().map(|row| &row.layer[..])) {
            for maker in [Maker::Ours, Maker::Burn, Maker::CubeK] {
                let rates = PASSES.map(|pass| self.fastest(layer, pass, maker));
                if rates.iter().all(Option::is_none) {
                    continue;
                }
                let cells = rates.map(|rate| match rate {
                    Some(rate) if rate < 10.0 => format!("{rate:.1}"),
                    Some(rate) => format!("{rate:.0}"),
                    None => "–".into(),
                });
                let _ = writeln!(
                    text,
                    "| {layer}{} | {} |",
                    maker.suffix(),
                    cells.join(" | ")
                );
            }
        }
        let commits: BTreeSet<&str> = self.rows.iter().map(|row| &row.commit[..]).collect();
        let commits = Vec::from_iter(commits).join("`, `");
        let origin = format!("{}; commits `{commits}`.", self.device);
        text + "\n" + &wrapped(&origin, "")
    }

    fn fastest(&self, layer: &str, pass: &str, maker: Maker) -> Option<f64> {
        let is = |row: &&Product| {
            row.layer == layer && row.pass == pass && Maker::of(&row.candidate) == Some(maker)
        };
        let rates = self.rows.iter().filter(is).filter_map(|row| row.tflops);
        rates.max_by(f64::total_cmp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_has_a_line_for_each_that_made_its_products() {
        let row = |layer: &str, pass: &str, candidate: &str, tflops: &str| {
            format!(
                r#"{{"layer":"{layer}","pass":"{pass}","candidate":"{candidate}","tflops":{tflops},"commit":"c"}}"#
            )
        };
        let rows = [
            row("q/o", "forward", "rule", "455.4"),
            row("q/o", "forward", "wgmma-128", "460"),
            row("q/o", "input", "rule", "448.7"),
            row("k/v", "weight", "standard", "1.13"),
            row("q/o", "forward", "TmaMma", "150"),
            row("q/o", "forward", "CyclicMma", "207.2"),
            row("q/o", "input", "CyclicMma", "null"),
        ];
        let record = format!(r#"{{"device":"a GPU","rows":[{}]}}"#, rows.join(","));
        let products: Products = serde_json::from_str(&record).unwrap();
        let table = products.table();
        let lines: Vec<&str> = table.lines().skip(2).collect();
        assert_eq!(
            lines,
            [
                "| q/o | 455 | 449 | – |",
                "| q/o, the fastest of CubeK's routines | 207 | – | – |",
                "| k/v, as Burn takes it without autotune | – | – | 1.1 |",
                "",
                "a GPU; commits `c`."
            ]
        );
    }
}
