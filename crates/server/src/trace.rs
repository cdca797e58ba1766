//! Step records to a file, one JSON object a line, without ever holding up a step or failing a request.

use crate::link::StepRecord;
use prometheus_client::metrics::counter::Counter;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

/// Records that may wait for the disk before they are dropped.
const WAITING: usize = 65_536;

/// Hands records to a thread that writes them. Records that the disk is too slow for or has no room for
/// are dropped and counted, never waited for.
pub struct TraceWriter {
    /// `None` only while it is being dropped.
    records: Option<SyncSender<StepRecord>>,
    writer: Option<JoinHandle<()>>,
    dropped: Counter,
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
    /// Creates (or empties) the file; what cannot be written to it is counted in `dropped`.
    pub fn create(path: &Path, dropped: Counter) -> io::Result<Self> {
        let file = File::create(path)?;
        let (records, inbox) = sync_channel(WAITING);
        let thread = std::thread::Builder::new().name("trace".into());
        let lost = dropped.clone();
        let writer = thread.spawn(move || write_all(file, inbox, &lost))?;
        Ok(Self { records: Some(records), writer: Some(writer), dropped })
    }

    /// Keeps a record if there is room.
    pub fn write(&mut self, record: &StepRecord) {
        let Some(records) = &self.records else { return };
        match records.try_send(record.clone()) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => {
                let dropped = self.dropped.inc() + 1;
                if dropped.is_power_of_two() {
                    tracing::warn!(dropped, "the trace file is too slow");
                }
            }
            // The thread said why it ended.
            Err(TrySendError::Disconnected(_)) => {
                self.dropped.inc();
            }
        }
    }
}

fn write_all(file: File, inbox: Receiver<StepRecord>, dropped: &Counter) {
    let mut out = BufWriter::new(file);
    // Flushed whenever there is nothing more to write, so that a reader sees what has happened.
    while let Ok(record) = inbox.recv() {
        let batch = std::iter::once(record).chain(inbox.try_iter());
        let mut unwritten = 0;
        let mut written = Ok(());
        for record in batch {
            unwritten += 1;
            written = write_one(&mut out, &record);
            if written.is_err() {
                break;
            }
        }
        if let Err(e) = written.and_then(|()| out.flush()) {
            // What the buffer took may be lost with the rest; the last line may be half a record.
            dropped.inc_by(unwritten + inbox.try_iter().count() as u64);
            tracing::error!(%e, "the trace ends here");
            return;
        }
    }
}

fn write_one(out: &mut impl Write, record: &StepRecord) -> io::Result<()> {
    serde_json::to_writer(&mut *out, record)?;
    out.write_all(b"\n")
}
