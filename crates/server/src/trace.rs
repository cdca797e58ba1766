//! Writes step records to a file, one JSON object per line, without delaying steps or failing
//! requests.

use crate::link::StepRecord;
use prometheus_client::metrics::counter::Counter;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

/// Records queued for the disk; further ones are dropped.
const WAITING: usize = 65_536;

/// Queues records for a writer thread. If the disk is too slow or full, records are dropped and
/// counted.
pub(crate) struct TraceWriter {
    /// `None` only during drop.
    records: Option<SyncSender<StepRecord>>,
    writer: Option<JoinHandle<()>>,
    dropped: Counter,
}

impl Drop for TraceWriter {
    fn drop(&mut self) {
        // Closing the channel ends the thread once the queue is written.
        self.records = None;
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

impl TraceWriter {
    /// Creates or truncates the file; `dropped` counts records that could not be written.
    pub(crate) fn create(path: &Path, dropped: Counter) -> io::Result<Self> {
        let file = File::create(path)?;
        let (records, inbox) = sync_channel(WAITING);
        let thread = std::thread::Builder::new().name("trace".into());
        let lost = dropped.clone();
        let writer = thread.spawn(move || write_all(file, inbox, &lost))?;
        Ok(Self { records: Some(records), writer: Some(writer), dropped })
    }

    /// Queues a record, or drops it if the queue is full.
    pub(crate) fn write(&mut self, record: &StepRecord) {
        let Some(records) = &self.records else { return };
        match records.try_send(record.clone()) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => {
                let dropped = self.dropped.inc() + 1;
                if dropped.is_power_of_two() {
                    tracing::warn!(
                        dropped,
                        "step records dropped: writing the trace file is too slow"
                    );
                }
            }
            // The thread has logged why it ended.
            Err(TrySendError::Disconnected(_)) => {
                self.dropped.inc();
            }
        }
    }
}

fn write_all(file: File, inbox: Receiver<StepRecord>, dropped: &Counter) {
    let mut out = BufWriter::new(file);
    // Flushed whenever the queue is empty, so that the file is current.
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
            // Buffered records may be lost too, and the last line of the file may be incomplete.
            dropped.inc_by(unwritten + inbox.try_iter().count() as u64);
            tracing::error!(%e, "writing the trace file failed; the trace ends here");
            return;
        }
    }
}

fn write_one(out: &mut impl Write, record: &StepRecord) -> io::Result<()> {
    serde_json::to_writer(&mut *out, record)?;
    out.write_all(b"\n")
}
