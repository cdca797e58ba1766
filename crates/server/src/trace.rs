//! Step records to a file, one JSON object a line, without ever holding up a step.

use crate::link::StepRecord;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

/// Records that may wait for the disk before they are dropped.
const WAITING: usize = 65_536;

/// Hands records to a thread that writes them. Records the disk is too slow for are dropped and
/// counted in the log, never waited for.
pub struct TraceWriter {
    /// `None` only while it is being dropped.
    records: Option<SyncSender<StepRecord>>,
    writer: Option<JoinHandle<()>>,
    dropped: u64,
}

impl Drop for TraceWriter {
    fn drop(&mut self) {
        // The thread ends when it has written what is left.
        self.records = None;
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

impl TraceWriter {
    /// Creates (or empties) the file.
    pub fn create(path: &Path) -> io::Result<Self> {
        let file = File::create(path)?;
        let (records, inbox) = sync_channel(WAITING);
        let thread = std::thread::Builder::new().name("trace".into());
        let writer = thread.spawn(move || write_all(file, inbox))?;
        Ok(Self { records: Some(records), writer: Some(writer), dropped: 0 })
    }

    /// Keeps a record if there is room.
    pub fn write(&mut self, record: &StepRecord) {
        let Some(records) = &self.records else { return };
        if let Err(TrySendError::Full(_)) = records.try_send(record.clone()) {
            if self.dropped.is_power_of_two() || self.dropped == 0 {
                tracing::warn!(dropped = self.dropped + 1, "the trace file is too slow");
            }
            self.dropped += 1;
        }
    }
}

fn write_all(file: File, inbox: Receiver<StepRecord>) {
    let mut out = BufWriter::new(file);
    // Flushed whenever there is nothing more to write, so that a reader sees what has happened.
    while let Ok(record) = inbox.recv() {
        let mut next = Some(record);
        while let Some(record) = next {
            let written = serde_json::to_writer(&mut out, &record)
                .map_err(io::Error::from)
                .and_then(|()| out.write_all(b"\n"));
            if let Err(e) = written {
                tracing::error!(%e, "the trace ends here");
                return;
            }
            next = inbox.try_recv().ok();
        }
        if let Err(e) = out.flush() {
            tracing::error!(%e, "the trace ends here");
            return;
        }
    }
}
