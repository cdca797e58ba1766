//! The log of a server: a thread writes lines to standard error from a bounded queue. Logging never
//! blocks or fails; a line that does not fit or cannot be written is dropped and counted.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};
use tracing_subscriber::EnvFilter;

/// Bytes that may wait to be written; about twenty thousand lines.
const MOST_WAITING: usize = 2 << 20;
/// Overhead of a line in bytes, besides its text.
const LINE: usize = 64;
/// How long the end of the program waits for the last lines to be written.
const LAST_LINES: Duration = Duration::from_secs(1);
/// The pause between two attempts to write to a non-blocking standard error.
const PAUSE: Duration = Duration::from_millis(10);

/// The log of the process, and whether its lines are JSON.
static LOG: OnceLock<(Log, bool)> = OnceLock::new();

/// Starts the thread and directs the log to it; `RUST_LOG` is the filter. Returns the counter of
/// dropped lines.
pub(crate) fn start(json: bool) -> io::Result<Arc<AtomicU64>> {
    let log = Log::start(io::stderr())?;
    let dropped = log.0.dropped.clone();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let lines = log.clone();
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(io::IsTerminal::is_terminal(&io::stderr()))
        // Internal errors would go to standard error, which is what cannot be written.
        .log_internal_errors(false)
        .with_writer(move || lines.clone());
    match json {
        true => builder.json().init(),
        false => builder.compact().init(),
    }
    if LOG.set((log, json)).is_ok() {
        std::panic::set_hook(Box::new(|panic| {
            let thread = std::thread::current();
            let thread = thread.name().unwrap_or("unnamed");
            let trace = std::backtrace::Backtrace::capture();
            tracing::error!(thread, %panic, %trace, "a thread panicked");
        }));
    }
    Ok(dropped)
}

/// Sends a line to the thread, as a log event if the log is JSON; false if the log is not started.
pub(crate) fn note(text: &str) -> bool {
    match LOG.get() {
        None => return false,
        Some((log, false)) => log.push(format!("{text}\n").as_bytes()),
        Some((_, true)) => match text.split_once(": ") {
            Some(("error", rest)) => tracing::error!("{rest}"),
            Some(("warning", rest)) => tracing::warn!("{rest}"),
            _ => tracing::info!("{text}"),
        },
    }
    true
}

/// Waits, for a bounded time, until all lines are written.
pub(crate) fn finish() {
    if let Some((log, _)) = LOG.get() {
        log.drain(LAST_LINES);
    }
}

/// A queue of lines for the writer thread.
#[derive(Clone)]
struct Log(Arc<Queue>);

struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
    dropped: Arc<AtomicU64>,
}

#[derive(Default)]
struct Waiting {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    /// Whether a line is being written.
    writing: bool,
}

impl Log {
    fn start(out: impl Write + Send + 'static) -> io::Result<Log> {
        let (waiting, changed) = (Mutex::default(), Condvar::new());
        let log = Log(Arc::new(Queue { waiting, changed, dropped: Arc::default() }));
        let writer = log.clone();
        std::thread::Builder::new().name("log".into()).spawn(move || writer.write_all(out))?;
        Ok(log)
    }

    fn push(&self, line: &[u8]) {
        let cost = line.len() + LINE;
        let mut waiting = self.waiting();
        if waiting.bytes + cost > MOST_WAITING {
            self.0.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        waiting.bytes += cost;
        waiting.lines.push_back(line.to_vec());
        drop(waiting);
        self.0.changed.notify_all();
    }

    /// The loop of the thread; it never ends.
    fn write_all(&self, mut out: impl Write) {
        let mut reported = 0;
        loop {
            let line = self.take();
            let written = write_line(&mut out, &line).is_ok();
            if !written {
                self.0.dropped.fetch_add(1, Ordering::Relaxed);
            }
            self.waiting().writing = false;
            self.0.changed.notify_all();
            if !written {
                continue;
            }
            // Writing works again: report the dropped lines.
            let dropped = self.0.dropped.load(Ordering::Relaxed);
            if dropped > reported {
                tracing::warn!(
                    lines = dropped - reported,
                    "log lines were dropped: standard error was not read"
                );
                reported = dropped;
            }
        }
    }

    fn take(&self) -> Vec<u8> {
        let mut waiting = self.waiting();
        loop {
            if let Some(line) = waiting.lines.pop_front() {
                waiting.bytes -= line.len() + LINE;
                waiting.writing = true;
                return line;
            }
            waiting = self.0.changed.wait(waiting).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }

    /// Waits until the queue is empty; false on timeout.
    fn drain(&self, within: Duration) -> bool {
        let end = Instant::now() + within;
        let mut waiting = self.waiting();
        while waiting.writing || !waiting.lines.is_empty() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let woken = self.0.changed.wait_timeout(waiting, left);
            waiting = woken.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        true
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        // A panic cannot leave the queue inconsistent.
        self.0.waiting.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// One event of `tracing` is one write.
impl Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn write_line(out: &mut impl Write, mut line: &[u8]) -> io::Result<()> {
    while !line.is_empty() {
        match out.write(line) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => line = &line[count..],
            Err(error) => match error.kind() {
                io::ErrorKind::Interrupted => {}
                io::ErrorKind::WouldBlock => std::thread::sleep(PAUSE),
                _ => return Err(error),
            },
        }
    }
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// A writer that writes when allowed to, and fails when told to.
    struct Slow {
        allowed: Receiver<io::Result<()>>,
        written: Sender<String>,
    }

    impl Write for Slow {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            self.allowed.recv().unwrap_or(Ok(()))?;
            // A pipe may accept only part of a line.
            let half = line.len().div_ceil(2);
            let _ = self.written.send(String::from_utf8_lossy(&line[..half]).into());
            Ok(half)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn slow() -> (Log, Sender<io::Result<()>>, Receiver<String>) {
        let ((allow, allowed), (written, lines)) = (channel(), channel());
        (Log::start(Slow { allowed, written }).unwrap(), allow, lines)
    }

    #[test]
    fn lines_arrive_complete_and_in_order() {
        let (log, allow, lines) = slow();
        for word in ["one\n", "two\n"] {
            log.push(word.as_bytes());
        }
        assert!(!log.drain(Duration::from_millis(20)), "nothing is read");
        // A write that would block is retried.
        allow.send(Err(io::ErrorKind::WouldBlock.into())).unwrap();
        drop(allow);
        assert!(log.drain(Duration::from_secs(60)));
        assert_eq!(lines.try_iter().collect::<String>(), "one\ntwo\n");
        assert_eq!(log.0.dropped.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_blocked_standard_error_costs_bounded_memory_and_blocks_no_caller() {
        let (log, _allow, _lines) = slow();
        let line = [b'x'; 100];
        let most = (MOST_WAITING / (line.len() + LINE)) as u64;
        for _ in 0..most + 1000 {
            log.push(&line);
        }
        let dropped = log.0.dropped.load(Ordering::Relaxed);
        // One line may already be with the writer thread.
        assert!((999..=1000).contains(&dropped), "{dropped}");
        assert!(log.waiting().bytes <= MOST_WAITING);
    }

    #[test]
    fn lines_that_cannot_be_written_are_counted() {
        let (log, allow, lines) = slow();
        for _ in 0..3 {
            log.push(b"lost");
            allow.send(Err(io::ErrorKind::StorageFull.into())).unwrap();
        }
        assert!(log.drain(Duration::from_secs(60)));
        log.push(b"kept");
        drop(allow);
        assert!(log.drain(Duration::from_secs(60)));
        assert_eq!(log.0.dropped.load(Ordering::Relaxed), 3);
        assert_eq!(lines.try_iter().collect::<String>(), "kept");
    }
}
