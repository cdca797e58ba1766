//! Worker threads for slow jobs (parsing, rendering and tokenizing large bodies, encoding large
//! responses), so that they do not delay streams and `/health` on the HTTP threads.

use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Jobs over fewer bytes run on the calling thread, because a handover would cost more.
pub(crate) const INLINE: usize = 4 * 1024;
/// One thread takes no jobs over more bytes than this, so that short jobs never wait for long ones.
const SHORT: usize = 64 * 1024;
/// Freed memory is returned to the system after jobs over this many bytes in total.
const TRIM_BYTES: u64 = 1 << 20;
/// Added to the nice value of the threads: about a tenth of the CPU time of an engine thread.
const NICE: i32 = 10;
/// The shortest interval between two trims.
const TRIM_EVERY: Duration = Duration::from_secs(1);

/// Why a job was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkError {
    /// The queue is full.
    #[error("{0} requests are waiting to be processed, which is the limit; retry later")]
    Full(u64),
    /// The job panicked.
    #[error("internal error: processing the request panicked")]
    Panicked,
}

/// The configuration of a pool.
#[derive(Clone, Debug)]
pub struct WorkConfig {
    /// The name of the threads.
    pub name: &'static str,
    /// The number of threads; if there are several, one takes only short jobs.
    pub threads: usize,
    /// Stack size of each thread in bytes.
    pub stack: usize,
    /// Jobs that may wait.
    pub waiting: u64,
    /// Returns freed memory to the system; called after large jobs, at most once a second.
    pub trim: Option<fn()>,
}

/// A pool of worker threads, which end when it is dropped.
pub struct Work {
    shared: Arc<Shared>,
}

struct Shared {
    queue: Mutex<Queue>,
    more: Condvar,
    most: u64,
    trim: Option<fn()>,
}

#[derive(Default)]
struct Queue {
    short: VecDeque<Job>,
    long: VecDeque<Job>,
    /// Numbers the jobs in order of arrival.
    count: u64,
    closed: bool,
    /// Bytes processed since the last trim.
    worked: u64,
    trimmed: Option<Instant>,
}

struct Job {
    number: u64,
    bytes: usize,
    run: Box<dyn FnOnce() + Send>,
}

impl Work {
    /// Starts the threads.
    pub fn start(config: &WorkConfig) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            more: Condvar::new(),
            most: config.waiting,
            trim: config.trim,
        });
        let work = Self { shared: shared.clone() };
        for i in 0..config.threads.max(1) {
            let shared = shared.clone();
            let only_short = i == 0 && config.threads > 1;
            std::thread::Builder::new().name(config.name.into()).stack_size(config.stack).spawn(
                move || {
                    // Steps on the same cores take precedence. Failure to lower the priority is
                    // harmless.
                    let _ = rustix::process::nice(NICE);
                    shared.serve(only_short);
                },
            )?;
        }
        Ok(work)
    }

    /// Runs `job` over `bytes` bytes: on the calling thread if they are few, else on a worker. A
    /// queued job is skipped if its caller has gone.
    pub async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, WorkError> {
        if bytes < INLINE {
            return catch_unwind(AssertUnwindSafe(job)).map_err(|panic| panicked(&*panic));
        }
        self.hand_over(bytes, job).await
    }

    /// Like [`Work::run`], but always on a worker.
    pub(crate) async fn hand_over<T: Send + 'static>(
        &self,
        bytes: usize,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, WorkError> {
        let (done, result) = oneshot::channel();
        let run = Box::new(move || {
            if !done.is_closed() {
                let made = catch_unwind(AssertUnwindSafe(job)).map_err(|panic| panicked(&*panic));
                // An error means that the caller has gone and needs no result.
                let _ = done.send(made);
            }
        });
        {
            let mut queue = self.shared.lock();
            let waiting = (queue.short.len() + queue.long.len()) as u64;
            if waiting >= self.shared.most {
                return Err(WorkError::Full(waiting));
            }
            queue.count += 1;
            let job = Job { number: queue.count, bytes, run };
            if bytes <= SHORT { queue.short.push_back(job) } else { queue.long.push_back(job) }
        }
        // Wakes all threads, because a single one might be the thread that takes no long jobs.
        self.shared.more.notify_all();
        result.await.unwrap_or(Err(WorkError::Panicked))
    }
}

fn panicked(panic: &(dyn Any + Send)) -> WorkError {
    let why = panic.downcast_ref::<String>().map(String::as_str);
    let why = why.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no panic message");
    tracing::error!(why, "a job for a request panicked");
    WorkError::Panicked
}

impl Drop for Work {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.more.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn serve(&self, only_short: bool) {
        let mut queue = self.lock();
        loop {
            if let Some(job) = queue.next(only_short) {
                drop(queue);
                (job.run)();
                queue = self.lock();
                queue.worked += job.bytes as u64;
                continue;
            }
            if queue.closed {
                return;
            }
            queue = match self.trim_due(&queue) {
                None => self.more.wait(queue).unwrap_or_else(|e| e.into_inner()),
                Some(Duration::ZERO) => {
                    queue.worked = 0;
                    queue.trimmed = Some(Instant::now());
                    drop(queue);
                    if let Some(trim) = self.trim {
                        trim();
                    }
                    self.lock()
                }
                Some(wait) => {
                    self.more.wait_timeout(queue, wait).unwrap_or_else(|e| e.into_inner()).0
                }
            };
        }
    }

    /// The time until the next trim; `None` if too little was processed.
    fn trim_due(&self, queue: &Queue) -> Option<Duration> {
        if self.trim.is_none() || queue.worked < TRIM_BYTES {
            return None;
        }
        let since = queue.trimmed.map_or(TRIM_EVERY, |at| at.elapsed());
        Some(TRIM_EVERY.saturating_sub(since))
    }
}

impl Queue {
    /// The oldest job that this thread may take.
    fn next(&mut self, only_short: bool) -> Option<Job> {
        let short = self.short.front().map(|job| job.number);
        let long = self.long.front().map(|job| job.number);
        match (short, long) {
            (Some(_), _) if only_short => self.short.pop_front(),
            (_, None) => self.short.pop_front(),
            (_, Some(_)) if only_short => None,
            (Some(short), Some(long)) if short < long => self.short.pop_front(),
            (_, Some(_)) => self.long.pop_front(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    fn config() -> WorkConfig {
        WorkConfig { name: "work", threads: 2, stack: 1 << 20, waiting: 4, trim: None }
    }

    fn thread() -> Option<String> {
        std::thread::current().name().map(Into::into)
    }

    #[tokio::test]
    async fn small_jobs_run_inline_and_large_ones_on_workers() {
        let work = Work::start(&config()).unwrap();
        let here = thread();
        assert_eq!(work.run(INLINE - 1, thread).await.unwrap(), here);
        assert_eq!(work.run(INLINE, thread).await.unwrap().as_deref(), Some("work"));
        let panic = || -> u32 { panic!("planted") };
        assert_eq!(work.run(0, panic).await, Err(WorkError::Panicked));
        assert_eq!(work.run(INLINE, panic).await, Err(WorkError::Panicked));
        assert_eq!(work.run(INLINE, || 7).await, Ok(7));
    }

    #[tokio::test]
    async fn short_jobs_do_not_wait_for_long_ones() {
        let work = Arc::new(Work::start(&config()).unwrap());
        let (go, stop) = std::sync::mpsc::channel::<()>();
        let long = {
            let work = work.clone();
            tokio::spawn(async move { work.run(SHORT + 1, move || stop.recv().is_err()).await })
        };
        let behind = {
            let work = work.clone();
            tokio::spawn(async move { work.run(SHORT + 1, || true).await })
        };
        for _ in 0..100 {
            assert_eq!(work.run(SHORT, || 1).await, Ok(1));
        }
        assert!(!long.is_finished() && !behind.is_finished());
        drop(go);
        assert_eq!(long.await.unwrap(), Ok(true));
        assert_eq!(behind.await.unwrap(), Ok(true));
    }

    #[tokio::test]
    async fn a_full_queue_refuses_and_abandoned_jobs_are_skipped() {
        let work = Arc::new(Work::start(&WorkConfig { threads: 1, ..config() }).unwrap());
        let (go, stop) = std::sync::mpsc::channel::<()>();
        let (began, begun) = std::sync::mpsc::channel::<()>();
        let first = {
            let work = work.clone();
            let job = move || {
                began.send(()).unwrap();
                stop.recv().is_err()
            };
            tokio::spawn(async move { work.run(INLINE, job).await })
        };
        tokio::task::yield_now().await;
        begun.recv().unwrap();
        let done = Arc::new(AtomicU64::new(0));
        let mut waiting: Vec<_> = (0..4)
            .map(|_| {
                let done = done.clone();
                Box::pin(work.run(INLINE, move || done.fetch_add(1, Ordering::Relaxed)))
            })
            .collect();
        for job in &mut waiting {
            assert!(futures_poll(job.as_mut()).is_none());
        }
        assert_eq!(work.run(INLINE, || 0).await, Err(WorkError::Full(4)));
        drop(waiting);
        drop(go);
        assert_eq!(first.await.unwrap(), Ok(true));
        // The abandoned jobs reach the front of the queue and are skipped.
        while work.run(INLINE, || 0).await != Ok(0) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(done.load(Ordering::Relaxed), 0);
    }

    fn futures_poll<F: Future>(future: std::pin::Pin<&mut F>) -> Option<F::Output> {
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        match future.poll(&mut cx) {
            std::task::Poll::Ready(made) => Some(made),
            std::task::Poll::Pending => None,
        }
    }

    #[tokio::test]
    async fn memory_is_trimmed_after_large_jobs_only() {
        static TRIMMED: AtomicU64 = AtomicU64::new(0);
        let trim = || {
            TRIMMED.fetch_add(1, Ordering::Relaxed);
        };
        let work = Work::start(&WorkConfig { trim: Some(trim), ..config() }).unwrap();
        work.run(SHORT, || ()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(TRIMMED.load(Ordering::Relaxed), 0);
        work.run(TRIM_BYTES as usize, || ()).await.unwrap();
        for _ in 0..1000 {
            if TRIMMED.load(Ordering::Relaxed) > 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("memory was not trimmed");
    }
}
