//! Pictures of a selection: which position attends to which key.

use crate::task::{FACTS, LENGTH};
use crate::training::Outcome;
use std::io;
use std::path::Path;

/// State of a key at a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cell {
    /// The key is not there yet.
    Future,
    /// The key was dropped.
    Gone,
    /// A distractor, kept.
    Distractor,
    /// A fact, kept.
    Fact,
    /// A question, kept.
    Question,
}

/// One text's selection: keys across, positions down.
#[derive(Clone, Debug)]
pub struct Picture {
    /// `[LENGTH, LENGTH]`, a row per position.
    pub cells: Vec<Cell>,
    /// Positions of the facts.
    pub facts: Vec<usize>,
}

impl Picture {
    /// Keys that one key/value head keeps of the first text.
    ///
    /// # Panics
    /// If there is no such head.
    pub fn of(outcome: &Outcome, head: usize) -> Self {
        let intervals = outcome.intervals.tensor();
        let words = intervals.clone().slice([0..1, head..head + 1]);
        let words = words.into_data_as::<i32>();
        let words: Vec<i32> = words.iter::<i32>().collect();
        let facts = outcome.texts.places[0].clone();
        let cell = |position: usize, key: usize| {
            if key > position {
                return Cell::Future;
            }
            let kept = (words[2 * key]..words[2 * key + 1]).contains(&(position as i32));
            match (kept, key >= LENGTH - FACTS) {
                (false, _) => Cell::Gone,
                (true, true) => Cell::Question,
                (true, false) if facts.contains(&key) => Cell::Fact,
                (true, false) => Cell::Distractor,
            }
        };
        let cells = (0..LENGTH * LENGTH).map(|at| cell(at / LENGTH, at % LENGTH));
        let cells = cells.collect();
        Self { cells, facts }
    }

    /// Lines for a terminal: two keys and four positions per character, the first and the third of the four drawn;
    /// columns of facts are marked above. `color` uses the terminal's green for facts.
    pub fn lines(&self, color: bool) -> Vec<String> {
        // From the bits: upper left, upper right, lower left, lower right.
        const QUADRANTS: [char; 16] = [
            ' ', '▘', '▝', '▀', '▖', '▌', '▞', '▛', '▗', '▚', '▐', '▜', '▄', '▙', '▟', '█',
        ];
        let kept = |cell: Cell| matches!(cell, Cell::Distractor | Cell::Fact | Cell::Question);
        let marks = (0..LENGTH / 2).map(|column| {
            let fact = self.facts.iter().any(|&fact| fact / 2 == column);
            if fact { '▼' } else { ' ' }
        });
        let mut lines = vec![marks.collect::<String>()];
        for top in (0..LENGTH).step_by(4) {
            let mut line = String::new();
            for left in (0..LENGTH).step_by(2) {
                let four = [(0, 0), (0, 1), (2, 0), (2, 1)]
                    .map(|(down, right)| self.cells[(top + down) * LENGTH + left + right]);
                let with = |bits: usize, &cell: &Cell| 2 * bits + usize::from(kept(cell));
                let bits = four.iter().rev().fold(0, with);
                let character = match four {
                    _ if bits > 0 => QUADRANTS[bits],
                    four if four.contains(&Cell::Gone) => '·',
                    _ => ' ',
                };
                if color && four.contains(&Cell::Fact) {
                    line += &format!("\u{1b}[1;32m{character}\u{1b}[0m");
                } else {
                    line.push(character);
                }
            }
            lines.push(line.trim_end().to_owned());
        }
        lines
    }

    /// The picture as an SVG, five units a cell: a bar per key, down from its own position.
    pub fn svg(&self) -> String {
        const UNITS: usize = 5;
        let size = LENGTH * UNITS;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {size} {size}\" width=\"{size}\" \
             height=\"{size}\">\n<rect width=\"{size}\" height=\"{size}\" fill=\"{}\"/>\n",
            Cell::Future.hex()
        );
        for key in 0..LENGTH {
            let column = |position: usize| self.cells[position * LENGTH + key];
            let kept = (key..LENGTH).take_while(|&position| column(position) != Cell::Gone);
            let end = key + kept.count();
            let mut bar = |from: usize, to: usize| {
                if from < to {
                    let (x, y, height) = (key * UNITS, from * UNITS, (to - from) * UNITS);
                    let color = column(from).hex();
                    svg += &format!(
                        "<rect x=\"{x}\" y=\"{y}\" width=\"{UNITS}\" height=\"{height}\" fill=\"{color}\"/>\n"
                    );
                }
            };
            bar(key, end);
            bar(end, LENGTH);
        }
        svg + "</svg>\n"
    }

    /// Writes a PNG, five dots a cell.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write_png(&self, path: &Path) -> io::Result<()> {
        const DOTS: usize = 5;
        let file = io::BufWriter::new(std::fs::File::create(path)?);
        let size = (LENGTH * DOTS) as u32;
        let mut encoder = png::Encoder::new(file, size, size);
        encoder.set_color(png::ColorType::Rgb);
        let mut writer = encoder.write_header().map_err(io::Error::other)?;
        let mut dots = Vec::with_capacity(3 * (LENGTH * DOTS).pow(2));
        for at in 0..(LENGTH * DOTS).pow(2) {
            let (row, column) = (at / (LENGTH * DOTS) / DOTS, at % (LENGTH * DOTS) / DOTS);
            dots.extend(self.cells[row * LENGTH + column].color());
        }
        writer.write_image_data(&dots).map_err(io::Error::other)?;
        writer.finish().map_err(io::Error::other)
    }
}

impl Cell {
    /// Red, green and blue.
    pub fn color(self) -> [u8; 3] {
        match self {
            Self::Future => [255, 255, 255],
            Self::Gone => [226, 231, 236],
            Self::Distractor => [59, 118, 175],
            Self::Fact => [38, 150, 74],
            Self::Question => [226, 146, 52],
        }
    }

    /// The colour as in web pages.
    pub fn hex(self) -> String {
        let [red, green, blue] = self.color();
        format!("#{red:02x}{green:02x}{blue:02x}")
    }
}
