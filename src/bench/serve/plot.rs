//! Plots of load results: latency distributions, and tokens over time.

use anyhow::{Result, anyhow};
use load::{Latency, Report};
use plotters::prelude::*;

const SIZE: (u32, u32) = (860, 420);
const COLOURS: [RGBColor; 6] = [
    RGBColor(200, 116, 44),
    RGBColor(58, 111, 188),
    RGBColor(47, 138, 111),
    RGBColor(150, 80, 160),
    RGBColor(193, 63, 54),
    RGBColor(110, 110, 110),
];

/// A file name and its SVG text.
pub(super) type Picture = (String, String);

/// One plot per kind of latency, and one of tokens over time.
pub(super) fn all(reports: &[Report]) -> Result<Vec<Picture>> {
    type Times = fn(&Report) -> &Latency;
    let kinds: [(&str, &str, Times); 3] = [
        ("ttft.svg", "Time to first token", |r| &r.ttft),
        ("itl.svg", "Time between tokens", |r| &r.itl),
        ("e2e.svg", "End to end", |r| &r.e2e),
    ];
    let mut pictures = Vec::new();
    for (name, title, times) in kinds {
        let curves = reports.iter().map(|report| {
            let curve = times(report).curve.iter().zip(0..);
            let points = curve.map(|(ms, i)| (ms.max(1e-3), f64::from(i) / 2.0)).collect();
            (report.label.clone(), points)
        });
        pictures.push((name.to_string(), spread(title, curves.collect())?));
    }
    pictures.push(("tokens.svg".to_string(), over_time(reports)?));
    Ok(pictures)
}

type Curve = (String, Vec<(f64, f64)>);

/// A cumulative distribution: percent of requests over time, with a logarithmic time axis.
fn spread(title: &str, curves: Vec<Curve>) -> Result<String> {
    let all = || curves.iter().flat_map(|(_, points)| points.iter().map(|p| p.0));
    let least = all().fold(f64::INFINITY, f64::min).min(1e6) * 0.9;
    let most = all().fold(least * 2.0, f64::max) * 1.1;
    let least = with_a_tick(least, most);
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        area.fill(&WHITE).map_err(wrong)?;
        let mut chart = ChartBuilder::on(&area)
            .caption(title, ("sans-serif", 20))
            .margin(14)
            .x_label_area_size(38)
            .y_label_area_size(50)
            .build_cartesian_2d((least..most).log_scale(), 0f64..100f64)
            .map_err(wrong)?;
        chart
            .configure_mesh()
            .x_desc("ms")
            .y_desc("% at most")
            .light_line_style(WHITE)
            .x_label_formatter(&|ms| short(*ms))
            .draw()
            .map_err(wrong)?;
        for ((label, points), colour) in curves.into_iter().zip(COLOURS.iter().cycle()) {
            let line = LineSeries::new(points, colour.stroke_width(2));
            chart.draw_series(line).map_err(wrong)?.label(label).legend(move |(x, y)| {
                PathElement::new(vec![(x, y), (x + 18, y)], colour.stroke_width(3))
            });
        }
        legend(&mut chart)?;
        area.present().map_err(wrong)?;
    }
    Ok(svg)
}

/// A logarithmic axis has ticks at powers of ten, so it must start at one or contain one.
fn with_a_tick(least: f64, most: f64) -> f64 {
    let below = 10f64.powf(least.log10().floor());
    if below * 10.0 < most { least } else { below }
}

fn over_time(reports: &[Report]) -> Result<String> {
    let seconds = reports.iter().map(|r| r.timeline.tokens.len()).max().unwrap_or(1).max(2);
    let most = reports.iter().flat_map(|r| r.timeline.tokens.iter()).max().copied();
    let most = most.unwrap_or(1).max(1) as f64 * 1.1;
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        area.fill(&WHITE).map_err(wrong)?;
        let mut chart = ChartBuilder::on(&area)
            .caption("Tokens per second over the run", ("sans-serif", 20))
            .margin(14)
            .x_label_area_size(38)
            .y_label_area_size(62)
            .build_cartesian_2d(0f64..(seconds - 1) as f64, 0f64..most)
            .map_err(wrong)?;
        chart
            .configure_mesh()
            .x_desc("s")
            .y_desc("tok/s")
            .light_line_style(WHITE)
            .y_label_formatter(&|n| short(*n))
            .draw()
            .map_err(wrong)?;
        for (report, colour) in reports.iter().zip(COLOURS.iter().cycle()) {
            let points = report.timeline.tokens.iter().zip(0u32..);
            let points = points.map(|(tokens, second)| (f64::from(second), *tokens as f64));
            let line = LineSeries::new(points, colour.stroke_width(2));
            let label = report.label.clone();
            chart.draw_series(line).map_err(wrong)?.label(label).legend(move |(x, y)| {
                PathElement::new(vec![(x, y), (x + 18, y)], colour.stroke_width(3))
            });
        }
        legend(&mut chart)?;
        area.present().map_err(wrong)?;
    }
    Ok(svg)
}

fn legend<'a, C>(chart: &mut ChartContext<'a, SVGBackend<'a>, C>) -> Result<()>
where
    C: CoordTranslate,
{
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.85))
        .border_style(RGBColor(210, 210, 210))
        .label_font(("sans-serif", 13))
        .draw()
        .map_err(wrong)
}

fn wrong(e: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("cannot draw the plot: {e}")
}

fn short(n: f64) -> String {
    match n {
        n if n >= 1e6 => format!("{:.1}M", n / 1e6),
        n if n >= 1e4 => format!("{:.0}k", n / 1e3),
        n if n >= 10.0 => format!("{n:.0}"),
        n if n >= 0.01 || n == 0.0 => format!("{n:.2}"),
        n => format!("{n:.3}"),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use load::{Slo, Timeline};

    #[test]
    fn every_axis_has_a_tick() {
        assert_eq!(with_a_tick(230.0, 680.0), 100.0);
        assert_eq!(with_a_tick(3.0, 90.0), 3.0);
        assert_eq!(with_a_tick(1e-3, 20.0), 1e-3);
    }

    pub(crate) fn sample(label: &str, scale: f64) -> Report {
        let times = |n: i32| Latency::of((1..n).map(|i| f64::from(i) * scale).collect());
        Report {
            label: label.into(),
            base_url: "http://x".into(),
            model: "m".into(),
            load: "16 at once".into(),
            seconds: 3.0,
            requests: 10,
            succeeded: 10,
            errors: Default::default(),
            prompt_tokens: 10,
            cached_tokens: 0,
            output_tokens: 100,
            request_rate: 3.0 * scale,
            output_rate: 33.0 * scale,
            steady_rate: 34.0 * scale,
            ttft: times(100),
            itl: times(50),
            e2e: times(200),
            slo: Slo::default(),
            within: 0.9,
            goodput: 3.0,
            timeline: Timeline {
                tokens: vec![10, 20, 30],
                finished: vec![0, 5, 5],
                failed: vec![0, 0, 0],
            },
        }
    }

    #[test]
    fn every_plot_is_drawn_even_without_data() {
        let mut empty = sample("empty", 1.0);
        for times in [&mut empty.ttft, &mut empty.itl, &mut empty.e2e] {
            *times = Latency::default();
        }
        empty.timeline = Timeline::default();
        for reports in [vec![sample("a", 1.0), sample("b", 2.0)], vec![empty]] {
            let pictures = all(&reports).unwrap();
            assert_eq!(pictures.len(), 4);
            for (name, svg) in pictures {
                assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{name}");
            }
        }
    }
}
