//! Both runners and the mailbox they share.

use super::{Decode, Prefill, Progress, Ran, RunError, Runner, RunnerConfig};
use crate::compile::{Bindings, CompileTarget};
use crate::mail::{Mailbox, StepInput, StepOutput};
use crate::program::Program;
use crate::{Counters, Phase, ShapeKey};
use device::{Arena, Device, Region, Span};
use std::sync::Arc;
use std::time::Duration;

/// A step that is on its way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launched {
    /// Its launch number, as the device counts: 1, 2, 3, …
    pub number: u64,
    /// How it ran.
    pub ran: Ran,
}

/// What can replay, so that a scheduler never forms a step that cannot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coverage {
    /// Most rows of a decode step.
    pub decode_rows: u32,
    /// Most tokens of a prefill step.
    pub prefill_tokens: u32,
    /// Most rows of a prefill step.
    pub prefill_rows: u32,
}

/// A model that is ready to run steps.
#[derive(Debug)]
pub struct Runners {
    device: Device,
    arena: Arena,
    bindings: Arc<Bindings>,
    /// Steps of one token per row.
    pub decode: Runner<Decode>,
    /// Steps with prompt chunks.
    pub prefill: Runner<Prefill>,
    mailbox: Mailbox,
}

impl Runners {
    /// Makes all plans and puts the step's state to its beginning. Weights and rope table are the
    /// caller's to fill, before or after.
    pub fn new(
        device: &Device,
        arena: &Arena,
        program: Program,
        target: CompileTarget,
        bindings: Bindings,
        decode: RunnerConfig,
        prefill: RunnerConfig,
    ) -> Result<Runners, RunError> {
        let (program, bindings) = (Arc::new(program), Arc::new(bindings));
        let mailbox = Mailbox::new(arena, &bindings.state)?;
        let decode =
            Runner::new(device, arena, program.clone(), target.clone(), bindings.clone(), decode)?;
        let prefill = Runner::new(device, arena, program, target, bindings.clone(), prefill)?;
        let (device, arena) = (device.clone(), arena.clone());
        let mut runners = Runners { device, arena, bindings, decode, prefill, mailbox };
        runners.reset()?;
        Ok(runners)
    }

    /// Records all graphs of both phases, decode first.
    pub fn record_all(
        &mut self,
        progress: &mut dyn FnMut(Phase, Progress),
    ) -> Result<(), RunError> {
        // Both phases' kernels together: a cold cache is filled in the time of its slowest kernels.
        let mut wanted = self.decode.wanted();
        wanted.extend(self.prefill.wanted());
        self.decode.prepare(&wanted)?;
        self.decode.record_buckets(&mut |at| progress(Phase::Decode, at))?;
        self.prefill.record_buckets(&mut |at| progress(Phase::Prefill, at))
    }

    /// What recording at start came to, in one line: graphs, seconds without compiling, bytes.
    pub fn recording(&self) -> String {
        fn phase(what: &str, recorded: &[(ShapeKey, u64)], time: Duration) -> String {
            let bytes = recorded.iter().map(|(_, bytes)| bytes).sum();
            let (count, seconds) = (recorded.len(), time.as_secs_f64());
            format!("{count} {what} in {seconds:.3} s, {}", crate::plan::bytes(bytes))
        }
        let (decode, prefill) = (&self.decode, &self.prefill);
        let decode = phase("decode", &decode.recorded(), decode.recording_time());
        let prefill = phase("prefill", &prefill.recorded(), prefill.recording_time());
        format!("graphs recorded: {decode}; {prefill}")
    }

    /// Records all graphs again, after a weight change.
    pub fn re_record(&mut self, progress: &mut dyn FnMut(Phase, Progress)) -> Result<(), RunError> {
        self.decode.re_record(&mut |at| progress(Phase::Decode, at))?;
        self.prefill.re_record(&mut |at| progress(Phase::Prefill, at))
    }

    /// Empties every seat and starts counting launches anew: after an error that may have lost state.
    pub fn reset(&mut self) -> Result<(), RunError> {
        self.device.sync()?;
        let state = &self.bindings.state;
        let tables = crate::slot::SLOTS.iter().filter_map(|slot| (slot.table)(state));
        let spans: Vec<Span> = tables
            .map(|table| table.span)
            .chain(self.bindings.scratch)
            .chain(state.mail)
            .chain([state.ring])
            .collect();
        for span in spans {
            debug_assert!(span.region != Region::Weights && span.region != Region::Kv);
            self.device.write(&self.arena, span, &vec![0; span.len as usize])?;
        }
        self.mailbox = Mailbox::new(&self.arena, state)?;
        Ok(())
    }

    /// What it computes.
    pub fn program(&self) -> &Program {
        self.decode.program()
    }

    /// What can replay.
    pub fn coverage(&self) -> Coverage {
        let prefill_tokens = self.prefill.coverage();
        let prefill_rows = prefill_tokens.min(self.bindings.state.limits.rows);
        Coverage { decode_rows: self.decode.coverage(), prefill_tokens, prefill_rows }
    }

    /// What happened so far, per phase.
    pub fn counters(&self, phase: Phase) -> &Counters {
        match phase {
            Phase::Decode => self.decode.counters(),
            Phase::Prefill => self.prefill.counters(),
        }
    }

    /// Launches whose results have not been taken.
    pub fn in_flight(&self) -> u64 {
        self.mailbox.in_flight()
    }

    /// Starts a step. An error leaves the device as it was unless it is [`RunError::Device`].
    pub fn launch(&mut self, input: &StepInput) -> Result<Launched, RunError> {
        let shape = input.shape();
        let choice = match shape.phase {
            Phase::Decode => self.decode.choose(&shape)?,
            Phase::Prefill => self.prefill.choose(&shape)?,
        };
        let number = self.mailbox.post(input, &choice.key)?;
        let ran = self.copy_pages(&input.copies).and_then(|()| match shape.phase {
            Phase::Decode => self.decode.run(&shape, &choice),
            Phase::Prefill => self.prefill.run(&shape, &choice),
        });
        match ran {
            Ok(ran) => {
                self.mailbox.sent();
                Ok(Launched { number, ran })
            }
            Err(error) => {
                self.mailbox.not_sent();
                Err(error)
            }
        }
    }

    /// The result of the oldest step whose result has not been taken, when it is there.
    pub fn poll(&mut self) -> Result<Option<StepOutput>, RunError> {
        Ok(self.mailbox.take()?)
    }

    /// Waits for everything launched, then takes the oldest result.
    pub fn wait(&mut self) -> Result<Option<StepOutput>, RunError> {
        self.device.sync()?;
        self.poll()
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The memory.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Where things lie in it.
    pub fn bindings(&self) -> &Bindings {
        &self.bindings
    }

    fn copy_pages(&self, copies: &[(u32, u32)]) -> Result<(), RunError> {
        for &(from, to) in copies {
            for node in self.decode.copy_page(from, to) {
                self.device.run(&self.arena, &node)?;
            }
        }
        Ok(())
    }
}
