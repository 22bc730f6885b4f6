//! The model of the tutorial's first chapter, and its pictures.

use crate::testing::Scratch;
use burn::tensor::Device;
use burn_flash_dma::Selector;
use std::collections::BTreeSet;
use tutorial::model::{Model, Scores};
use tutorial::picture::{Cell, Picture};
use tutorial::task::{LENGTH, Random, Texts};
use tutorial::training::{Arm, Rate, WARM_UP, WINDOW, evaluate};

#[test]
fn the_rate_rises_and_then_does_what_the_arm_says() {
    let steps = 400;
    for rate in [Rate::Falling, Rate::Constant] {
        assert_eq!(rate.at(0, steps), 0.0);
        assert!(rate.at(WARM_UP / 2, steps) < rate.at(WARM_UP, steps));
        let falls = rate.at(steps - 1, steps) < rate.at(WARM_UP, steps);
        assert_eq!(falls, rate == Rate::Falling);
    }
}

/// Only learned scores have a gradient, and runners-up change it.
#[test]
fn runners_up_reach_the_scores() {
    let device = Device::flex().autodiff();
    let model = Model::seeded(0, &device);
    let texts = Texts::draw(2, &mut Random(0), &device);
    let gradient = |scores, runners_up| -> Option<f32> {
        let selector = Selector::top(WINDOW).runners_up(runners_up);
        let (logits, _) = model.forward(&texts, scores, &selector);
        let gradients = logits.square().sum().backward();
        let gradient = model.score_proj.val().grad(&gradients)?;
        Some(gradient.abs().sum().into_scalar::<f32>())
    };
    let (kept, all) = (gradient(Scores::Linear, 0), gradient(Scores::Linear, 4));
    assert!(kept.is_some_and(|sum| sum > 0.0));
    assert_ne!(kept, all);
    assert_eq!(gradient(Scores::Random, 4), None);
    assert_eq!(gradient(Scores::Zoh, 4), None);
}

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
        let kept = |cell: &&Cell| !matches!(cell, Cell::Future | Cell::Gone);
        let kept = row.iter().filter(kept).count();
        assert_eq!(kept, (position + 1).min(WINDOW), "{position}");
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
    let columns: BTreeSet<usize> = full.facts.iter().map(|fact| fact / 2).collect();
    assert_eq!(lines[0].matches('▼').count(), columns.len());
    assert!(full.lines(true)[LENGTH / 4].contains("\u{1b}[1;32m█"));
    let random = Arm {
        scores: Scores::Random,
        ..Arm::LEARNED
    };
    assert!(picture(random).lines(false)[LENGTH / 4].contains('·'));
}

/// Painted again, the bars equal the cells.
#[test]
fn the_bars_are_the_cells() {
    let picture = picture(Arm::LEARNED);
    let svg = picture.svg();
    let mut painted = vec![Cell::Future.hex(); LENGTH * LENGTH];
    for bar in svg.lines().filter(|line| line.starts_with("<rect x=")) {
        let fields: Vec<&str> = bar.split('"').collect();
        let number = |at: usize| fields[at].parse::<usize>().unwrap() / 5;
        for position in number(3)..number(3) + number(7) {
            painted[position * LENGTH + number(1)] = fields[9].to_owned();
        }
    }
    let cells: Vec<String> = picture.cells.iter().map(|&cell| cell.hex()).collect();
    assert_eq!(painted, cells);
}

#[test]
fn the_file_holds_a_dot_for_every_cell() {
    let picture = picture(Arm::LEARNED);
    let scratch = Scratch::new();
    let path = scratch.path("picture.png");
    picture.write_png(&path).unwrap();
    let file = std::io::BufReader::new(std::fs::File::open(&path).unwrap());
    let mut reader = png::Decoder::new(file).read_info().unwrap();
    let mut dots = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut dots).unwrap();
    assert_eq!((info.width, info.height), (640, 640));
    let fact = picture.facts[0];
    // The fact's own position, where it is newest.
    let dot = 3 * ((fact * 5 + 2) * 640 + fact * 5 + 2);
    let kept = picture.cells[fact * LENGTH + fact] == Cell::Fact;
    assert_eq!(dots[dot..dot + 3] == Cell::Fact.color(), kept);
}
