//! Measures the hardware of this machine: bandwidths, rates and latencies that performance is compared
//! with. Figures are medians of several runs after a warm-up.

mod cpu;
mod cuda;
mod matrix;

use device::{Device, DeviceKind, Result};
use serde::Serialize;
use std::time::Instant;

/// One figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// What was measured.
    pub what: String,
    /// How much.
    pub value: f64,
    /// Of what.
    pub unit: &'static str,
}

/// The figures of a device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Table {
    /// What was measured, in one line.
    pub device: String,
    /// The figures.
    pub rows: Vec<Row>,
}

impl Table {
    /// The figure of this name.
    pub fn value(&self, what: &str) -> Option<f64> {
        self.rows.iter().find(|row| row.what == what).map(|row| row.value)
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{}", self.device)?;
        let width = self.rows.iter().map(|row| row.what.chars().count()).max().unwrap_or(0);
        for Row { what, value, unit } in &self.rows {
            writeln!(f, "  {what:width$}  {value:>10.3} {unit}")?;
        }
        Ok(())
    }
}

/// Measures a device, and the CPU beside it if it is a GPU. `progress` gets the name of what is measured next.
pub fn run(device: &Device, progress: &mut dyn FnMut(&str)) -> Result<Table> {
    let mut rows = Vec::new();
    if device.kind() == DeviceKind::Cuda {
        cuda::measure(device, &mut rows, progress)?;
        cpu::measure(&device::cpu::open(None, false)?, &mut rows, progress)?;
    } else {
        cpu::measure(device, &mut rows, progress)?;
    }
    Ok(Table { device: device.describe(), rows })
}

/// Floating-point operations per second of a large bf16 GEMM on the device: what prefill is compared
/// with. On a GPU that is limited by power, the figure is one under load.
pub fn matrix_rate(device: &Device) -> Result<f64> {
    matrix::rate(device)
}

/// The device's read bandwidth in bytes per second: what every step is compared with.
pub fn read_bandwidth(device: &Device) -> Result<f64> {
    match device.kind() {
        DeviceKind::Cuda => cuda::read_bandwidth(device),
        DeviceKind::Cpu => cpu::read_bandwidth(),
    }
}

/// The median of `runs` results of `measure`, after one that does not count.
fn median(runs: usize, mut measure: impl FnMut() -> Result<f64>) -> Result<f64> {
    measure()?;
    let mut results = (0..runs).map(|_| measure()).collect::<Result<Vec<f64>>>()?;
    results.sort_by(f64::total_cmp);
    Ok(results[runs / 2])
}

/// Microseconds `f` takes on this thread.
fn host_us(f: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    f()?;
    Ok(start.elapsed().as_secs_f64() * 1e6)
}
