//! The log of a server: lines go to standard error by a thread of their own, from a queue with a
//! bound. Whoever logs never waits and never fails; a line that finds no room or cannot be written is
//! dropped and counted.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};
use tracing_subscriber::EnvFilter;

/// Bytes that may wait for whoever reads standard error; about twenty thousand lines.
const MOST_WAITING: usize = 2 << 20;
/// What a line costs besides its text.
const LINE: usize = 64;
/// How long the end of the program waits for its last lines to be read.
const LAST_LINES: Duration = Duration::from_secs(1);
/// Between two attempts at a standard error that another program made non-blocking.
const PAUSE: Duration = Duration::from_millis(10);

/// The process has one standard error, and so one log; and whether its lines are JSON.
static LOG: OnceLock<(Log, bool)> = OnceLock::new();

/// Starts the thread, and sends what is logged to it; `RUST_LOG` chooses what that is. Gives the
/// number of lines dropped so far, which goes on counting.
pub(crate) fn start(json: bool) -> io::Result<Arc<AtomicU64>> {
    let log = Log::start(io::stderr())?;
    let dropped = log.0.dropped.clone();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let lines = log.clone();
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(io::IsTerminal::is_terminal(&io::stderr()))
        // It would say so on standard error, which is what cannot be written.
        .log_internal_errors(false)
        .with_writer(move || lines.clone());
    match json {
        true => builder.json().init(),
        false => builder.compact().init(),
    }
    if LOG.set((log, json)).is_ok() {
        std::panic::set_hook(Box::new(|panic| {
            let thread = std::thread::current();
            let thread = thread.name().unwrap_or("without a name");
            let trace = std::backtrace::Backtrace::capture();
            tracing::error!(thread, %panic, %trace, "a thread panicked");
        }));
    }
    Ok(dropped)
}

/// Sends a line to the thread, as one of the log where all lines are JSON; false where there is no thread.
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

/// Waits until what was logged is written, but not for long.
pub(crate) fn finish() {
    if let Some((log, _)) = LOG.get() {
        log.drain(LAST_LINES);
    }
}

/// Lines on their way to a thread that writes them.
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
    /// A line was taken and is not written yet.
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

    /// What the thread does, for as long as the process lives.
    fn write_all(&self, mut out: impl Write) {
        let mut told = 0;
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
            // Somebody reads again, and may want to know what is missing.
            let dropped = self.0.dropped.load(Ordering::Relaxed);
            if dropped > told {
                tracing::warn!(lines = dropped - told, "log lines were dropped: nobody took them");
                told = dropped;
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

    /// Waits until nothing waits; false if that took too long.
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
        // A queue of lines is as good after a panic as before.
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

    /// A standard error that takes a line when it is allowed to, and fails when told to.
    struct Slow {
        allowed: Receiver<io::Result<()>>,
        written: Sender<String>,
    }

    impl Write for Slow {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            self.allowed.recv().unwrap_or(Ok(()))?;
            // In halves: a pipe may take part of a line.
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
    fn lines_arrive_in_order_and_whole() {
        let (log, allow, lines) = slow();
        for word in ["one\n", "two\n"] {
            log.push(word.as_bytes());
        }
        assert!(!log.drain(Duration::from_millis(20)), "nobody reads");
        // A moment in which nothing can be taken is not the end.
        allow.send(Err(io::ErrorKind::WouldBlock.into())).unwrap();
        drop(allow);
        assert!(log.drain(Duration::from_secs(60)));
        assert_eq!(lines.try_iter().collect::<String>(), "one\ntwo\n");
        assert_eq!(log.0.dropped.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_reader_that_stops_costs_bounded_memory_and_nobodys_time() {
        let (log, _allow, _lines) = slow();
        let line = [b'x'; 100];
        let most = (MOST_WAITING / (line.len() + LINE)) as u64;
        for _ in 0..most + 1000 {
            log.push(&line);
        }
        let dropped = log.0.dropped.load(Ordering::Relaxed);
        // One may be in the thread's hands.
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
