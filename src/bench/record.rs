//! Records of measurements, with command, machine, version and date.

use crate::output::Output;
use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// The results with everything needed to reproduce them.
pub(crate) fn record(device: &str, figures: &impl Serialize) -> Result<Value> {
    let command: Vec<String> = std::env::args().skip(1).collect();
    Ok(json!({
        "command": format!("dacapo {}", command.join(" ")),
        "version": env!("CARGO_PKG_VERSION"),
        "date": today(),
        "device": device,
        "machine": machine(),
        "figures": serde_json::to_value(figures)?,
    }))
}

/// Writes a record to a file, or to standard output for `-`.
pub(crate) fn write(path: &Path, record: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(record)? + "\n";
    if path == Path::new("-") {
        return Ok(Output::new().write_all(text.as_bytes())?);
    }
    std::fs::write(path, text).with_context(|| path.display().to_string())
}

fn machine() -> String {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("model name"))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    });
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    format!("{}, {cores} threads", cpu.unwrap_or_else(|| std::env::consts::ARCH.into()))
}

fn today() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    date(seconds / 86_400)
}

/// The date `days` days after 1970-01-01.
fn date(days: u64) -> String {
    // Years begin in March here, so that the leap day is the last day of a year; every 400 years
    // have the same number of days.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let of_month = of_year - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    format!("{:04}-{month:02}-{of_month:02}", era * 400 + year + carry)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right() {
        for (days, expected) in [
            (0, "1970-01-01"),
            (59, "1970-03-01"),
            (11_016, "2000-02-29"),
            (19_782, "2024-02-29"),
            (20_772, "2026-11-15"),
        ] {
            assert_eq!(date(days), expected);
        }
    }
}
