//! The plots of a device's rows.

use super::chart::{Chart, Point, Series};
use super::join::Report;
use crate::roof::Roof;
use crate::rows::Phase;
use crate::workloads::{Workload, find};

impl Report {
    /// Every plot that has a point: name and SVG.
    ///
    /// # Errors
    ///
    /// When a line has two points at one place.
    pub fn plots(&self) -> Result<Vec<(&'static str, String)>, String> {
        let charts = [
            ("forward-by-length", by_length(self, Phase::EndToEnd), 2.0),
            ("backward-by-length", by_length(self, Phase::Backward), 2.0),
            ("forward-by-window", by_window(self), 2.0),
            ("roofline", roofline(self, self.roof.as_ref()), 10.0),
        ];
        let mut plots = Vec::new();
        for (name, chart, base) in charts {
            if let Some(svg) = chart.svg(base)? {
                plots.push((name, svg));
            }
        }
        Ok(plots)
    }
}

/// The family of the plots: causal layers of 32 query heads and 8 key/value heads of 128, bf16, one sequence.
fn is_layer(w: &Workload) -> bool {
    find("layer-n32k-w2048").is_some_and(|layer| w.is_family(layer))
}

fn time(report: &Report, w: &Workload, phase: Phase) -> Option<f64> {
    report.best(w, phase).map(|row| row.ms.median)
}

/// A line through the layers for which `place` returns an x.
fn line(
    report: &Report,
    phase: Phase,
    name: &str,
    place: impl Fn(&Workload) -> Option<usize>,
    ms: impl Fn(&Workload) -> Option<f64>,
) -> Series {
    let layers = report.workloads(phase).filter(|w| is_layer(w));
    let point = |w: &Workload| {
        let (x, y) = (place(w)? as f64, ms(w)?);
        let name = w.name.into();
        Some(Point { x, y, name })
    };
    Series {
        name: name.into(),
        points: layers.filter_map(point).collect(),
        line: true,
    }
}

/// Time over the length, ours and the peers'.
fn by_length(report: &Report, phase: Phase) -> Chart {
    let with = |window| move |w: &Workload| (w.window == window).then_some(w.len);
    let ours = |name, window| {
        let ms = |w: &Workload| time(report, w, phase);
        line(report, phase, name, with(window), ms)
    };
    // Dense attention has no window, so each shape of these rows occurs once.
    let peer = |name, key| {
        let ms = |w: &Workload| report.dense(w, key, phase);
        line(report, phase, name, with(Some(2048)), ms)
    };
    let (title, what) = match phase {
        Phase::Backward => ("Backward", ""),
        _ => ("Forward", ", selection included"),
    };
    Chart {
        title: format!("{title}, H 32/8, D 128, bf16, causal{what}"),
        x: "queries and keys".into(),
        y: "ms".into(),
        series: vec![
            ours("ours, w 2048", Some(2048)),
            ours("ours, dense", None),
            peer("FlashAttention-2", "sdpa-flash dense"),
            peer("cuDNN", "sdpa-cudnn dense"),
        ],
    }
}

/// Time over the window at 32K keys.
fn by_window(report: &Report) -> Chart {
    let series = |name, phase| {
        let place = |w: &Workload| w.window.filter(|_| w.len == 32768);
        let ms = |w: &Workload| time(report, w, phase);
        line(report, phase, name, place, ms)
    };
    Chart {
        title: "N 32K, H 32/8, D 128, bf16, causal".into(),
        x: "keys per query".into(),
        y: "ms".into(),
        series: vec![
            series("selection", Phase::Select),
            series("selection and forward", Phase::EndToEnd),
            series("backward", Phase::Backward),
        ],
    }
}

/// Rate over operations per byte, and what the device allows.
fn roofline(report: &Report, roof: Option<&Roof>) -> Chart {
    let points = |phase: Phase, sparse: bool| -> Vec<Point> {
        let rows = report
            .phase(phase)
            .filter(|(w, _)| w.window.is_some() == sparse);
        rows.filter_map(|(w, row)| {
            let flops = phase.flops(&w.problem().ok()?)? as f64;
            let (x, y) = (flops / row.bytes? as f64, row.tflops?);
            let name = w.name.into();
            Some(Point { x, y, name })
        })
        .collect()
    };
    let mut series = Vec::new();
    for (name, phase, sparse) in [
        ("forward, sparse", Phase::Forward, true),
        ("forward, dense", Phase::Forward, false),
        ("backward, sparse", Phase::Backward, true),
        ("backward, dense", Phase::Backward, false),
    ] {
        let points = points(phase, sparse);
        series.push(Series {
            name: name.into(),
            points,
            line: false,
        });
    }
    if let Some(roof) = roof {
        let ridge = roof.bf16_tflops * 1e3 / roof.copy_gbs;
        let all = series.iter().flat_map(|s| &s.points);
        let end = all.map(|p| p.x).fold(2.0 * ridge, f64::max);
        let start = ridge / 4.0;
        let corners = [
            (start, start * roof.copy_gbs / 1e3),
            (ridge, roof.bf16_tflops),
            (end, roof.bf16_tflops),
        ];
        let corner = |(x, y)| {
            let name = "roof.json".into();
            Point { x, y, name }
        };
        series.push(Series {
            name: "measured roof, bf16".into(),
            points: corners.map(corner).to_vec(),
            line: true,
        });
    }
    Chart {
        title: "Useful rate over arithmetic intensity".into(),
        x: "operations per byte (active pairs, one pass over the tensors)".into(),
        y: "TFLOP/s on active pairs".into(),
        series,
    }
}
