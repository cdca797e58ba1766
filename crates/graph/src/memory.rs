//! An exact account of memory. Everything but the graphs themselves is laid out before there is any
//! memory; graphs are measured when they are recorded.

use crate::plan::bytes;
use crate::{Phase, ShapeKey};
use device::{Region, Report};
use serde::Serialize;

/// A line of the account.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Line {
    /// What for.
    pub what: String,
    /// How much.
    pub bytes: u64,
}

/// The memory of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Account {
    /// Regions, then graphs per phase.
    pub lines: Vec<Line>,
}

impl Account {
    /// From an arena's report and what the runners recorded.
    pub fn new(report: &Report, recorded: &[(ShapeKey, u64)]) -> Account {
        let region =
            |region: Region| Line { what: region.name().to_owned(), bytes: report.region(region) };
        let mut lines: Vec<Line> = Region::ALL.map(region).to_vec();
        for phase in Phase::ALL {
            let of_phase = || recorded.iter().filter(|(key, _)| key.phase == phase);
            let bytes = of_phase().map(|(_, bytes)| bytes).sum();
            lines.push(Line { what: format!("{} {phase} graphs", of_phase().count()), bytes });
        }
        Account { lines }
    }

    /// Bytes on the device: everything but host-mapped memory.
    pub fn device_total(&self) -> u64 {
        let host = Region::HostMapped.name();
        self.lines.iter().filter(|line| line.what != host).map(|line| line.bytes).sum()
    }

    /// For people.
    pub fn table(&self) -> String {
        let mut text = String::new();
        for Line { what, bytes: count } in &self.lines {
            text.push_str(&format!("{what:<24} {:>12}\n", bytes(*count)));
        }
        text + &format!("{:<24} {:>12}\n", "on the device", bytes(self.device_total()))
    }
}
