//! Fills the slots of adapters beside steps: a thread copies, and the engine asks what is done.

use super::{Adapted, Adapter};
use crate::executor::GraphExecutor;
use crate::lane::Lane;
use device::Span;
use engine::exec::ExecError;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// How long the engine's thread waits for a slot when it has nothing else to do.
const MOMENT: Duration = Duration::from_millis(1);

/// A slot and its adapter, and what went wrong.
type Filled = (u32, u64, device::Result<()>);

/// The thread, started when it is first needed.
#[derive(Debug)]
pub(super) struct Filler {
    lane: Option<Lane<Filled>>,
    reports: (Sender<Filled>, Receiver<Filled>),
}

impl Filler {
    pub(super) fn new() -> Filler {
        Filler { lane: None, reports: channel() }
    }
}

impl GraphExecutor {
    /// Begins to put an adapter into a slot, counted from 1.
    pub(crate) fn fill_slot(&mut self, slot: u32, number: u64) {
        let Some(origin) = &self.holding.origin else { return };
        let runners = self.runners();
        let (device, arena) = (self.device().clone(), runners.arena().clone());
        let of = |adapted: &Adapted| adapted.spans(runners.bindings(), slot - 1);
        let spans: Vec<Span> = origin.drafted.written.adapted.iter().flat_map(of).collect();
        let total: u64 = spans.iter().map(|span| span.len).sum();
        // One that was forgotten adds nothing: its requests are refused before.
        let empty = || Arc::new(Adapter { bytes: vec![0; total as usize], rank: 0 });
        let adapter = self.adapters.known.get(&number).cloned().unwrap_or_else(empty);
        let Filler { lane, reports } = &mut self.adapters.filler;
        let lane =
            lane.get_or_insert_with(|| Lane::new("adapters", reports.0.clone(), Arc::default()));
        lane.give(Box::new(move |_| {
            (slot, number, device.write_apart(&arena, &spans, &adapter.bytes))
        }));
    }

    /// Adds the slots that were filled; with `block` it waits a moment for one.
    pub(crate) fn filled_slots(
        &mut self,
        filled: &mut Vec<(u32, u64)>,
        block: bool,
    ) -> Result<(), ExecError> {
        let reports = &self.adapters.filler.reports.1;
        let first = if block { reports.recv_timeout(MOMENT).ok() } else { None };
        for (slot, number, result) in first.into_iter().chain(reports.try_iter()) {
            result.map_err(|error| ExecError::StateLost(error.to_string()))?;
            filled.push((slot, number));
        }
        Ok(())
    }
}
