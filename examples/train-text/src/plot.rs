//! Loss curves as a PNG.

use std::path::Path;

use plotters::backend::BitMapBackend;
use plotters::prelude::*;
use plotters_backend::text_anchor::{HPos, VPos};
use plotters_backend::{BackendColor, BackendCoord, BackendTextStyle, DrawingErrorKind};

use crate::curves::Curve;
use crate::error::Error;
use crate::font;

const SIZE: (u32, u32) = (1000, 620);

/// Pixels a glyph's dot is wide: at one, a label is hard to read on a dense screen.
const DOT: i32 = 2;

/// The size at which plotters, which does not ask the backend here, reckons with the width that a
/// glyph has: 0.455 of the size a character.
const LEGEND_SIZE: i32 = 27;

/// Draws training loss (thin) and validation loss (thick, with markers) of every run, and the
/// unigram entropy as a line to beat.
///
/// # Errors
///
/// [`Error::Unusable`] if the file cannot be written.
pub fn draw(path: &Path, curves: &[Curve], entropy: f64) -> Result<(), Error> {
    let unusable = |reason: String| Error::Unusable {
        path: path.into(),
        reason,
    };
    let backend = WithGlyphs(BitMapBackend::new(path, SIZE));
    draw_on(backend, curves, entropy).map_err(|error| unusable(error.to_string()))
}

type DrawingError<B> = DrawingAreaErrorKind<<B as DrawingBackend>::ErrorType>;

fn draw_on<B: DrawingBackend>(
    backend: B,
    curves: &[Curve],
    entropy: f64,
) -> Result<(), DrawingError<B>> {
    let area = backend.into_drawing_area();
    area.fill(&WHITE)?;
    let (steps, losses) = ranges(curves, entropy);
    let small = ("sans-serif", 14).into_font();
    let mut chart = ChartBuilder::on(&area)
        .caption("Loss in nats a byte", ("sans-serif", 18))
        .margin(18)
        .x_label_area_size(50)
        .y_label_area_size(60)
        .build_cartesian_2d(0.0..steps, losses.clone())?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc("step")
        .x_label_formatter(&|step| format!("{step:.0}"))
        .y_label_formatter(&|loss| format!("{loss:.1}"))
        .label_style(small.clone())
        .axis_desc_style(small.clone())
        .draw()?;

    let colours = [
        RGBColor(0, 90, 181),
        RGBColor(200, 80, 0),
        RGBColor(0, 130, 80),
    ];
    for (curve, &colour) in curves.iter().zip(colours.iter().cycle()) {
        let thin = colour.mix(0.5);
        chart
            .draw_series(LineSeries::new(smoothed(&curve.train), thin))?
            .label(format!("{} training, w = {}", curve.label, curve.window))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 24, y)], thin));
        let points = || curve.valid.iter().map(|&(step, loss)| (step as f64, loss));
        chart
            .draw_series(LineSeries::new(points(), colour.stroke_width(3)))?
            .label(format!("{} validation, w = {}", curve.label, curve.window))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 24, y)], colour.stroke_width(3)));
        chart.draw_series(points().map(|point| Circle::new(point, 4, colour.filled())))?;
    }
    chart
        .draw_series(LineSeries::new(
            [(0.0, entropy), (steps, entropy)],
            BLACK.mix(0.6),
        ))?
        .label("byte unigram entropy")
        .legend(|(x, y)| PathElement::new([(x, y), (x + 24, y)], BLACK.mix(0.6)));
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .legend_area_size(36)
        .margin(12)
        .label_font(("sans-serif", LEGEND_SIZE))
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    area.present()
}

/// The last step, and the losses worth showing.
fn ranges(curves: &[Curve], entropy: f64) -> (f64, std::ops::Range<f64>) {
    let points = || {
        curves
            .iter()
            .flat_map(|curve| curve.train.iter().chain(&curve.valid))
    };
    let losses = || {
        points()
            .map(|&(_, loss)| loss)
            .filter(|loss| loss.is_finite())
    };
    let steps = points().map(|&(step, _)| step).max().unwrap_or(1).max(1) as f64;
    let lowest = losses().fold(entropy, f64::min);
    let highest = losses().fold(entropy, f64::max);
    // A loss that blew up must not flatten the rest: uniform bytes cost ln 256 = 5.55.
    (
        steps,
        (lowest - 0.2).max(0.0)..(highest + 0.2).min(6.5).max(lowest + 0.5),
    )
}

/// The mean over a moving range of about a hundredth of the run, and no more than 500 points.
fn smoothed(points: &[(usize, f64)]) -> Vec<(f64, f64)> {
    let width = (points.len() / 100).max(1);
    let every = (points.len() / 500).max(1);
    points
        .windows(width)
        .step_by(every)
        .map(|range| {
            let mean = range.iter().map(|&(_, loss)| loss).sum::<f64>() / width as f64;
            (range[width - 1].0 as f64, mean)
        })
        .filter(|(_, loss)| loss.is_finite())
        .collect()
}

/// A backend that draws text with [`font`] instead of the system's fonts.
struct WithGlyphs<B>(B);

impl<B: DrawingBackend> DrawingBackend for WithGlyphs<B> {
    type ErrorType = B::ErrorType;

    fn get_size(&self) -> (u32, u32) {
        self.0.get_size()
    }

    fn ensure_prepared(&mut self) -> Result<(), DrawingErrorKind<B::ErrorType>> {
        self.0.ensure_prepared()
    }

    fn present(&mut self) -> Result<(), DrawingErrorKind<B::ErrorType>> {
        self.0.present()
    }

    fn draw_pixel(
        &mut self,
        point: BackendCoord,
        colour: BackendColor,
    ) -> Result<(), DrawingErrorKind<B::ErrorType>> {
        self.0.draw_pixel(point, colour)
    }

    fn estimate_text_size<S: BackendTextStyle>(
        &self,
        text: &str,
        _: &S,
    ) -> Result<(u32, u32), DrawingErrorKind<B::ErrorType>> {
        Ok((
            (font::width(text) * DOT) as u32,
            (font::HEIGHT * DOT) as u32,
        ))
    }

    fn draw_text<S: BackendTextStyle>(
        &mut self,
        text: &str,
        style: &S,
        (x, y): BackendCoord,
    ) -> Result<(), DrawingErrorKind<B::ErrorType>> {
        let (width, height) = (font::width(text) * DOT, font::HEIGHT * DOT);
        let left = match style.anchor().h_pos {
            HPos::Left => 0,
            HPos::Center => -width / 2,
            HPos::Right => -width,
        };
        let top = match style.anchor().v_pos {
            VPos::Top => 0,
            VPos::Center => -height / 2,
            VPos::Bottom => -height,
        };
        let turn = style.transform();
        for (dot_x, dot_y) in font::dots(text) {
            for (dx, dy) in (0..DOT).flat_map(|dx| (0..DOT).map(move |dy| (dx, dy))) {
                let at = turn.transform(left + dot_x * DOT + dx, top + dot_y * DOT + dy);
                self.draw_pixel((x + at.0, y + at.1), style.color())?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curves::Timings;

    fn curve(label: &str, train: Vec<(usize, f64)>, valid: Vec<(usize, f64)>) -> Curve {
        let timings = Timings::default();
        Curve {
            label: label.into(),
            window: 8,
            parameters: 1,
            train,
            valid,
            timings,
        }
    }

    #[test]
    fn a_plot_is_a_png_with_both_curves_labels_and_axes() {
        let path = std::env::temp_dir().join(format!("train-text-plot-{}.png", std::process::id()));
        let fall = |end: f64| {
            let train = (1..=100)
                .map(|step| (step, 5.5 - end * step as f64 / 100.0))
                .collect();
            curve("sparse", train, vec![(50, 4.0), (100, 5.5 - end)])
        };
        draw(&path, &[fall(3.0), fall(2.0)], 3.3).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(bytes[..8], *b"\x89PNG\r\n\x1a\n");
        // The header chunk: width and height in pixels.
        let number = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!(
            (&bytes[12..16], number(16), number(20)),
            (&b"IHDR"[..], SIZE.0, SIZE.1)
        );
        assert_eq!(bytes[bytes.len() - 8..bytes.len() - 4], *b"IEND");
    }

    #[test]
    fn text_reaches_the_bitmap_without_a_font() {
        let mut pixels = vec![255u8; 120 * 40 * 3];
        let area = WithGlyphs(BitMapBackend::with_buffer(&mut pixels, (120, 40)));
        let area = area.into_drawing_area();
        area.draw(&Text::new("1.5", (4, 4), ("sans-serif", 14)))
            .unwrap();
        area.present().unwrap();
        drop(area);
        let dark = pixels.chunks(3).filter(|pixel| pixel[0] < 128).count();
        let dots = font::dots("1.5").count();
        assert_eq!(dark, dots * (DOT * DOT) as usize);
    }

    #[test]
    fn no_steps_and_a_loss_that_is_no_number_are_drawn_too() {
        let path = std::env::temp_dir().join(format!("train-text-nan-{}.png", std::process::id()));
        let nan = curve("sparse", vec![(1, f64::NAN), (2, 1e9)], vec![(2, f64::NAN)]);
        draw(&path, &[nan, curve("dense", vec![], vec![])], 3.3).unwrap();
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn smoothing_keeps_a_constant_and_the_last_step() {
        let points: Vec<_> = (1..=1000).map(|step| (step, 2.5)).collect();
        let smooth = smoothed(&points);
        assert!(smooth.len() <= 500);
        assert!(smooth.iter().all(|&(_, loss)| (loss - 2.5).abs() < 1e-12));
        assert!(smooth.last().unwrap().0 >= 999.0);
    }
}
