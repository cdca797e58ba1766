//! Tells an event loop that calls have replies: a file descriptor that becomes readable.

use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;

/// One end of a pipe for the event loop, the other for the engine's thread.
#[derive(Debug)]
pub struct Wake {
    read: UnixStream,
    write: UnixStream,
    ready: Mutex<Vec<u64>>,
}

impl Wake {
    /// A new pipe; neither end blocks.
    pub fn new() -> io::Result<Self> {
        let (read, write) = UnixStream::pair()?;
        read.set_nonblocking(true)?;
        write.set_nonblocking(true)?;
        Ok(Self { read, write, ready: Mutex::default() })
    }

    /// The descriptor to wait for.
    pub fn fd(&self) -> RawFd {
        self.read.as_raw_fd()
    }

    /// The calls that have had replies since the last time.
    pub fn ready(&self) -> Vec<u64> {
        let mut bytes = [0; 64];
        // Emptied before the list is read, so that a later reply makes it readable again.
        while matches!((&self.read).read(&mut bytes), Ok(1..)) {}
        std::mem::take(&mut *self.ready.lock().unwrap_or_else(|e| e.into_inner()))
    }

    /// Adds a call; one byte per list is enough.
    pub(super) fn add(&self, call: u64) {
        let mut ready = self.ready.lock().unwrap_or_else(|e| e.into_inner());
        let first = ready.is_empty();
        if ready.last() != Some(&call) {
            ready.push(call);
        }
        drop(ready);
        if first {
            // A full pipe is readable, which is all that is wanted.
            let _ = (&self.write).write(&[1]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_makes_it_readable_once() {
        let wake = Wake::new().unwrap();
        let mut byte = [0; 8];
        assert!((&wake.read).read(&mut byte).is_err());
        for call in [3, 3, 4] {
            wake.add(call);
        }
        assert_eq!(wake.ready(), [3, 4]);
        assert!((&wake.read).read(&mut byte).is_err(), "nothing is left");
        wake.add(5);
        assert_eq!((&wake.read).read(&mut byte).unwrap(), 1);
        assert_eq!(wake.ready(), [5]);
    }
}
