//! Plots of measurements, as SVG.

use super::{decode, mixed, prefill, replay};
use anyhow::{Result, anyhow};
use plotters::prelude::*;
use std::path::Path;

const SIZE: (u32, u32) = (860, 520);

/// A name in the legend, and its points.
type Series = (String, Vec<(f64, f64)>);

/// The scale of the vertical axis.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scale {
    FromZero,
    Logarithmic,
}

/// Lines of points with a legend; x is logarithmic.
fn lines(
    path: &Path,
    title: &str,
    (x, y): (&str, &str),
    scale: Scale,
    series: &[Series],
) -> Result<()> {
    // A logarithmic axis is a linear axis of exponents, labelled with the values.
    let height = |y: f64| if scale == Scale::Logarithmic { y.max(1e-9).log10() } else { y };
    let points = || series.iter().flat_map(|(_, points)| points);
    let (low, high) =
        points().fold((f64::MAX, 1.0f64), |(low, high), p| (low.min(p.0), high.max(p.0)));
    let top = height(points().fold(0.0f64, |top, p| top.max(p.1)) * 1.1);
    let bottom = match scale {
        Scale::FromZero => 0.0,
        Scale::Logarithmic => height(points().fold(f64::MAX, |low, p| low.min(p.1)) * 0.8),
    };
    let low = low.min(high / 2.0).max(0.5);
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    let failed =
        |error: DrawingAreaErrorKind<std::io::Error>| anyhow!("{}: {error}", path.display());
    root.fill(&WHITE).map_err(failed)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 20))
        .margin(16)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d((low..high * 1.05).log_scale(), bottom..top)
        .map_err(failed)?;
    chart
        .configure_mesh()
        .x_desc(x)
        .y_desc(y)
        .y_label_formatter(&|y: &f64| match scale {
            Scale::FromZero => format!("{y}"),
            Scale::Logarithmic => format!("{:.3}", 10f64.powf(*y)),
        })
        .light_line_style(BLACK.mix(0.06))
        .draw()
        .map_err(failed)?;
    for (index, (name, points)) in series.iter().enumerate() {
        let color = Palette99::pick(index).to_rgba();
        chart
            .draw_series(
                LineSeries::new(points.iter().map(|&(x, y)| (x, height(y))), color.stroke_width(2))
                    .point_size(3),
            )
            .map_err(failed)?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()
        .map_err(failed)?;
    root.present().map_err(failed)?;
    Ok(())
}

/// Adds a point to the series of this name.
fn add(series: &mut Vec<Series>, name: String, point: (f64, f64)) {
    match series.iter_mut().find(|(other, _)| *other == name) {
        Some((_, points)) => points.push(point),
        None => series.push((name, vec![point])),
    }
}

/// Roofline plot: operations per second over operations per byte read. A point on the roof reads at
/// the full bandwidth.
pub(crate) fn roofline(path: &Path, model: &str, figures: &[decode::Figure]) -> Result<()> {
    let mut series: Vec<Series> = Vec::new();
    for f in figures {
        let name = format!("{}, {} tokens of context", f.backend, f.context);
        let point = (f.flops_per_byte, f.teraflops);
        add(&mut series, name, point);
    }
    let bandwidth = figures.iter().map(|f| f.read_bandwidth).fold(0.0, f64::max);
    let mut roof: Vec<(f64, f64)> =
        figures.iter().map(|f| (f.flops_per_byte, f.flops_per_byte * bandwidth * 1e-12)).collect();
    roof.sort_by(|a, b| a.0.total_cmp(&b.0));
    series.push((format!("roof: {:.2} TB/s read", bandwidth * 1e-12), roof));
    let labels = ("operations per byte read", "10¹² operations per second");
    lines(path, &format!("{model}: decode"), labels, Scale::Logarithmic, &series)
}

/// Host preparation time and device idle time per step, by preparation mode.
pub(crate) fn replay(path: &Path, model: &str, figures: &[replay::Figure]) -> Result<()> {
    let mut series: Vec<Series> = Vec::new();
    for f in figures {
        let idle = f.step_ms * 1e3 * (1.0 - f.device_busy).max(0.0);
        for (what, us) in [("host preparation", f.preparation_us), ("device idle", idle)] {
            let name = format!("{}: {what}", f.prep);
            add(&mut series, name, (f64::from(f.batch), us));
        }
    }
    let title = format!("{model}: preparing a decode step");
    lines(path, &title, ("sequences", "µs per step"), Scale::FromZero, &series)
}

/// Tokens per second over the tokens of a step, by backend.
pub(crate) fn prefill(path: &Path, model: &str, figures: &[prefill::Figure]) -> Result<()> {
    let mut series: Vec<Series> = Vec::new();
    for f in figures {
        let point = (f64::from(f.tokens), f.tokens_per_second);
        add(&mut series, f.backend.clone(), point);
    }
    let labels = ("tokens of a step", "tokens per second");
    lines(path, &format!("{model}: prefill"), labels, Scale::FromZero, &series)
}

/// Time between tokens of a running request over the run, one plot per budget; grey while a prompt
/// is in progress.
pub(crate) fn mixed(path: &Path, model: &str, runs: &[mixed::Run]) -> Result<()> {
    let gaps = || runs.iter().flat_map(|run| &run.gaps);
    let end = gaps().fold(1.0f64, |end, gap| end.max(gap.0));
    let top = gaps().fold(0.0f64, |top, gap| top.max(gap.1)) * 1.15;
    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    let failed =
        |error: DrawingAreaErrorKind<std::io::Error>| anyhow!("{}: {error}", path.display());
    root.fill(&WHITE).map_err(failed)?;
    let areas = root.split_evenly((runs.len().max(1), 1));
    for (area, run) in areas.iter().zip(runs) {
        let mut chart = ChartBuilder::on(area)
            .caption(format!("{model}: steps of at most {} tokens", run.budget), ("sans-serif", 16))
            .margin(10)
            .x_label_area_size(32)
            .y_label_area_size(64)
            .build_cartesian_2d(0.0..end, 0.0..top)
            .map_err(failed)?;
        chart
            .configure_mesh()
            .x_desc("ms")
            .y_desc("ms since the token before")
            .light_line_style(BLACK.mix(0.06))
            .draw()
            .map_err(failed)?;
        let grey = BLACK.mix(0.12).filled();
        let bands =
            run.fed.iter().map(|&(from, to)| Rectangle::new([(from, 0.0), (to, top)], grey));
        chart.draw_series(bands).map_err(failed)?;
        let color = Palette99::pick(0).to_rgba();
        let points = run.gaps.iter().map(|&gap| Circle::new(gap, 2, color.filled()));
        chart.draw_series(points).map_err(failed)?;
    }
    root.present().map_err(failed)?;
    Ok(())
}
