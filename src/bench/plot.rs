//! Pictures of figures, as SVG.

use super::{decode, mixed, prefill};
use anyhow::{Result, anyhow};
use plotters::prelude::*;
use std::path::Path;

const SIZE: (u32, u32) = (860, 520);

/// Lines of points with a legend; x is logarithmic.
fn lines(
    path: &Path,
    title: &str,
    x: &str,
    y: &str,
    series: &[(String, Vec<(f64, f64)>)],
) -> Result<()> {
    let points = || series.iter().flat_map(|(_, points)| points);
    let (low, high) =
        points().fold((f64::MAX, 1.0f64), |(low, high), p| (low.min(p.0), high.max(p.0)));
    let top = points().fold(0.0f64, |top, p| top.max(p.1)) * 1.1;
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
        .build_cartesian_2d((low..high * 1.05).log_scale(), 0.0..top)
        .map_err(failed)?;
    chart
        .configure_mesh()
        .x_desc(x)
        .y_desc(y)
        .light_line_style(BLACK.mix(0.06))
        .draw()
        .map_err(failed)?;
    for (index, (name, points)) in series.iter().enumerate() {
        let color = Palette99::pick(index).to_rgba();
        chart
            .draw_series(
                LineSeries::new(points.iter().copied(), color.stroke_width(2)).point_size(3),
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

/// Milliseconds per step over the batch, beside what memory allows.
pub(crate) fn decode(path: &Path, model: &str, figures: &[decode::Figure]) -> Result<()> {
    let measured = figures.iter().map(|f| (f64::from(f.batch), f.ms)).collect();
    let floor = figures.iter().map(|f| (f64::from(f.batch), f.floor_ms)).collect();
    let series = [("measured".to_owned(), measured), ("memory floor".to_owned(), floor)];
    lines(path, &format!("{model}: decode step"), "sequences", "ms per step", &series)
}

/// Tokens per second over the tokens of a step, by backend.
pub(crate) fn prefill(path: &Path, model: &str, figures: &[prefill::Figure]) -> Result<()> {
    let mut series: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    for f in figures {
        let point = (f64::from(f.tokens), f.tokens_per_second);
        match series.iter_mut().find(|(name, _)| *name == f.backend) {
            Some((_, points)) => points.push(point),
            None => series.push((f.backend.clone(), vec![point])),
        }
    }
    lines(path, &format!("{model}: prefill"), "tokens of a step", "tokens per second", &series)
}

/// Time between tokens of a running request over a run, by the tokens a step may feed; grey where a prompt
/// was being fed in the first run.
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
