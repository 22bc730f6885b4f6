//! Pictures of a selection: which position attends to which key.

use crate::task::{FACTS, LENGTH};
use crate::training::Outcome;
use std::io;
use std::path::Path;

/// What a position does with a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cell {
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
    cells: Vec<Cell>,
    /// The places of the facts.
    facts: Vec<usize>,
}

impl Picture {
    /// What one key/value head keeps of the first text.
    ///
    /// # Panics
    /// When there is no such head.
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
        let cells = (0..LENGTH * LENGTH)
            .map(|at| cell(at / LENGTH, at % LENGTH))
            .collect();
        Self { cells, facts }
    }

    /// Lines for a terminal: two keys and four positions a character, the first and the third of the four drawn;
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
                let bits = four
                    .iter()
                    .rev()
                    .fold(0, |bits, &cell| 2 * bits + usize::from(kept(cell)));
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

    /// The picture as an SVG, five units a cell: a bar per key, downwards from its own position.
    pub fn svg(&self) -> String {
        const UNITS: usize = 5;
        let size = LENGTH * UNITS;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {size} {size}\" width=\"{size}\" \
             height=\"{size}\">\n<rect width=\"{size}\" height=\"{size}\" fill=\"{}\"/>\n",
            hex(Cell::Future)
        );
        for key in 0..LENGTH {
            let column = |position: usize| self.cells[position * LENGTH + key];
            let kept = (key..LENGTH).take_while(|&position| column(position) != Cell::Gone);
            let end = key + kept.count();
            let mut bar = |from: usize, to: usize| {
                if from < to {
                    let (x, y, height) = (key * UNITS, from * UNITS, (to - from) * UNITS);
                    let color = hex(column(from));
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
    /// When the file cannot be written.
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
            dots.extend(color(self.cells[row * LENGTH + column]));
        }
        writer.write_image_data(&dots).map_err(io::Error::other)?;
        writer.finish().map_err(io::Error::other)
    }
}

/// Red, green and blue.
fn color(cell: Cell) -> [u8; 3] {
    match cell {
        Cell::Future => [255, 255, 255],
        Cell::Gone => [226, 231, 236],
        Cell::Distractor => [59, 118, 175],
        Cell::Fact => [38, 150, 74],
        Cell::Question => [226, 146, 52],
    }
}

fn hex(cell: Cell) -> String {
    let [red, green, blue] = color(cell);
    format!("#{red:02x}{green:02x}{blue:02x}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Model, Scores};
    use crate::training::{Arm, WINDOW, evaluate};
    use burn::tensor::Device;

    fn picture(arm: Arm) -> Picture {
        let model = Model::seeded(0, &Device::flex().autodiff());
        Picture::of(&evaluate(&model, arm.scores, &arm.selector()), 1)
    }

    /// A head keeps 16 keys, and every key begins at its own position.
    #[test]
    fn a_position_keeps_what_its_window_allows() {
        let picture = picture(Arm::LEARNED);
        for position in 0..LENGTH {
            let row = &picture.cells[position * LENGTH..][..LENGTH];
            let kept = row
                .iter()
                .filter(|&&cell| cell != Cell::Future && cell != Cell::Gone);
            assert_eq!(kept.count(), (position + 1).min(WINDOW), "{position}");
            assert!(row[position + 1..].iter().all(|&cell| cell == Cell::Future));
        }
    }

    #[test]
    fn the_terminal_shows_the_cells() {
        let full = picture(Arm::DENSE);
        let lines = full.lines(false);
        assert_eq!(lines.len(), 1 + LENGTH / 4);
        // With every key kept the picture is a triangle.
        assert_eq!(lines[1].chars().next(), Some('▙'));
        assert!(lines[LENGTH / 4].starts_with(&"█".repeat(LENGTH / 2 - 2)));
        assert_eq!(lines[0].matches('▼').count(), {
            let mut columns: Vec<usize> = full.facts.iter().map(|fact| fact / 2).collect();
            columns.sort_unstable();
            columns.dedup();
            columns.len()
        });
        assert!(full.lines(true)[LENGTH / 4].contains("\u{1b}[1;32m█"));
        assert!(
            picture(Arm {
                scores: Scores::Random,
                ..Arm::LEARNED
            })
            .lines(false)[LENGTH / 4]
                .contains('·')
        );
    }

    /// Painted again, the bars are the cells.
    #[test]
    fn the_bars_are_the_cells() {
        let picture = picture(Arm::LEARNED);
        let svg = picture.svg();
        let mut painted = vec![hex(Cell::Future); LENGTH * LENGTH];
        for bar in svg.lines().filter(|line| line.starts_with("<rect x=")) {
            let fields: Vec<&str> = bar.split('"').collect();
            let number = |at: usize| fields[at].parse::<usize>().unwrap() / 5;
            for position in number(3)..number(3) + number(7) {
                painted[position * LENGTH + number(1)] = fields[9].to_owned();
            }
        }
        let cells: Vec<String> = picture.cells.iter().map(|&cell| hex(cell)).collect();
        assert_eq!(painted, cells);
    }

    #[test]
    fn the_file_holds_a_dot_for_every_cell() {
        let picture = picture(Arm::LEARNED);
        let path = std::env::temp_dir().join(format!("tutorial-{}.png", std::process::id()));
        picture.write_png(&path).unwrap();
        let file = io::BufReader::new(std::fs::File::open(&path).unwrap());
        let mut reader = png::Decoder::new(file).read_info().unwrap();
        let mut dots = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut dots).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!((info.width, info.height), (640, 640));
        let fact = picture.facts[0];
        // The fact's own position, where it is newest.
        let dot = 3 * ((fact * 5 + 2) * 640 + fact * 5 + 2);
        let kept = picture.cells[fact * LENGTH + fact] == Cell::Fact;
        assert_eq!(dots[dot..dot + 3] == color(Cell::Fact), kept);
    }
}
