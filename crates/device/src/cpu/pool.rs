//! The threads that run a replay: one per core this process may use, the caller among them.
//!
//! Work is divided into chunks that threads take from one counter, so a thread that the system delays delays no more
//! than its current chunk. Workers spin between the ops of a replay and for a moment after it, then park.

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

/// Polls of the counter before parking: about half a millisecond.
const SPINS: u32 = 10_000;
/// Polls of the counter before yielding the core to other threads.
const PATIENCE: u32 = 2_000;

/// The current work; its arguments are the numbers of chunk and worker.
type Work = *const (dyn Fn(usize, usize) + Sync);

#[repr(align(128))]
struct Line<T>(T);

struct Shared {
    /// Chunks in the high half, the next chunk in the low half. A chunk belongs to the thread that took its number;
    /// while a chunk is being run, `work` does not change.
    ticket: Line<AtomicU64>,
    done: Line<AtomicU32>,
    work: UnsafeCell<Option<Work>>,
    active: AtomicBool,
    quit: AtomicBool,
    panicked: AtomicBool,
    started: AtomicU32,
    sleepers: AtomicU32,
    lock: Mutex<()>,
    wake: Condvar,
}

// SAFETY: `work` is written only by the thread that runs the pool, and only while no chunk is being run; it is read
// only by a thread that holds a chunk, taken with acquire order after the write.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer in `work` is never used outside `Pool::run`.
unsafe impl Send for Shared {}

impl Shared {
    /// Takes a chunk and runs it; false when none is left.
    fn take(&self, worker: usize) -> bool {
        let seen = self.ticket.0.load(Ordering::Relaxed);
        if seen as u32 >= (seen >> 32) as u32 {
            return false;
        }
        let ticket = self.ticket.0.fetch_add(1, Ordering::AcqRel);
        let (chunks, chunk) = ((ticket >> 32) as u32, ticket as u32);
        if chunk >= chunks {
            return false;
        }
        // SAFETY: this thread holds a chunk, so the owner waits in `Pool::run` and the closure lives.
        let work = unsafe { (*self.work.get()).map(|work| &*work) };
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            if let Some(work) = work {
                work(chunk as usize, worker);
            }
        }));
        if outcome.is_err() {
            self.panicked.store(true, Ordering::Relaxed);
        }
        self.done.0.fetch_add(1, Ordering::Release);
        true
    }

    fn serve(&self, worker: usize) {
        let mut spins = 0u32;
        while !self.quit.load(Ordering::Relaxed) {
            if self.take(worker) {
                spins = 0;
                continue;
            }
            std::hint::spin_loop();
            spins += 1;
            if spins.is_multiple_of(PATIENCE) {
                std::thread::yield_now();
            }
            if spins >= SPINS && !self.active.load(Ordering::Relaxed) {
                self.park();
                spins = 0;
            }
        }
    }

    fn park(&self) {
        let mut guard = self.lock.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while !self.active.load(Ordering::SeqCst) && !self.quit.load(Ordering::SeqCst) {
            guard = self.wake.wait(guard).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    fn wake_all(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = self.lock.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            self.wake.notify_all();
        }
    }
}

/// A pool of pinned threads; one caller at a time uses it.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool({} threads)", self.threads())
    }
}

impl Pool {
    /// `threads` threads in all, never more than the cores this process may use; `None` for all.
    pub(crate) fn new(threads: Option<usize>) -> Pool {
        let cores = cores();
        let threads = threads.unwrap_or(cores.len()).clamp(1, cores.len().max(1));
        let shared = Arc::new(Shared {
            ticket: Line(AtomicU64::new(0)),
            done: Line(AtomicU32::new(0)),
            work: UnsafeCell::new(None),
            active: AtomicBool::new(false),
            quit: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            started: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        });
        let spawn = |worker: usize| {
            let (shared, core) = (shared.clone(), cores[worker]);
            let name = format!("dacapo-cpu-{worker}");
            let thread = std::thread::Builder::new().name(name).spawn(move || {
                pin(core);
                shared.started.fetch_add(1, Ordering::Release);
                shared.serve(worker);
            });
            thread.ok()
        };
        // If a thread cannot be started, fewer threads do all the work.
        let workers: Vec<_> = (1..threads).map_while(spawn).collect();
        // Wait until the threads have started, so that the first replay does not.
        while (shared.started.load(Ordering::Acquire) as usize) < workers.len() {
            std::thread::yield_now();
        }
        Pool { shared, workers }
    }

    /// Threads that run chunks, the caller included.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Wakes the workers for several calls to [`Pool::run`]; they stay awake until the result is dropped.
    pub(crate) fn awake(&self) -> Awake<'_> {
        self.shared.active.store(true, Ordering::SeqCst);
        self.shared.wake_all();
        Awake(self)
    }

    /// Runs `work(chunk, worker)` for every chunk; the caller is worker 0.
    ///
    /// # Panics
    /// If a chunk panicked, after all are done.
    pub(crate) fn run(&self, chunks: usize, work: &(dyn Fn(usize, usize) + Sync)) {
        if chunks <= 1 || self.workers.is_empty() {
            (0..chunks).for_each(|chunk| work(chunk, 0));
            return;
        }
        let shared = &*self.shared;
        let chunks = u32::try_from(chunks).expect("fewer than 2^32 chunks");
        // SAFETY: no chunk is being run (the last `run` waited for all of them), so no thread reads `work`; the
        // lifetime is erased, and this function does not return before every chunk is done.
        unsafe {
            let erased: Work =
                std::mem::transmute::<*const (dyn Fn(usize, usize) + Sync), Work>(work);
            *shared.work.get() = Some(erased);
        }
        shared.done.0.store(0, Ordering::Relaxed);
        shared.ticket.0.store(u64::from(chunks) << 32, Ordering::Release);
        while shared.take(0) {}
        let mut spins = 0u32;
        while shared.done.0.load(Ordering::Acquire) < chunks {
            std::hint::spin_loop();
            spins += 1;
            if spins.is_multiple_of(PATIENCE) {
                std::thread::yield_now();
            }
        }
        if shared.panicked.swap(false, Ordering::Relaxed) {
            panic!("a chunk of an op panicked");
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.quit.store(true, Ordering::SeqCst);
        {
            let _guard = self.shared.lock.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            self.shared.wake.notify_all();
        }
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its chunks, so there is nothing to report.
            let _ = worker.join();
        }
    }
}

/// Keeps the workers awake.
pub(crate) struct Awake<'a>(&'a Pool);

impl Drop for Awake<'_> {
    fn drop(&mut self) {
        self.0.shared.active.store(false, Ordering::SeqCst);
    }
}

/// The cores this process may use, one per physical core, no more than its CPU quota.
fn cores() -> Vec<usize> {
    let allowed = affinity();
    let mut firsts = Vec::new();
    let cores: Vec<usize> = allowed
        .into_iter()
        .filter(|core| {
            let first = first_sibling(*core).unwrap_or(*core);
            let fresh = !firsts.contains(&first);
            firsts.push(first);
            fresh
        })
        .collect();
    let most = quota().unwrap_or(cores.len()).max(1);
    if cores.is_empty() { vec![0] } else { cores.into_iter().take(most).collect() }
}

fn affinity() -> Vec<usize> {
    // SAFETY: a zeroed CPU set is an empty one.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel fills the set, whose size is given.
    let failed = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) } != 0;
    if failed {
        return Vec::new();
    }
    // SAFETY: the index stays inside the set.
    (0..libc::CPU_SETSIZE as usize).filter(|core| unsafe { libc::CPU_ISSET(*core, &set) }).collect()
}

fn first_sibling(core: usize) -> Option<usize> {
    let path = format!("/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list");
    let list = std::fs::read_to_string(path).ok()?;
    list.trim().split([',', '-']).next()?.parse().ok()
}

/// Whole cores of the control group's CPU quota.
fn quota() -> Option<usize> {
    let limit = std::fs::read_to_string("/sys/fs/cgroup/cpu.max").ok()?;
    let mut words = limit.split_whitespace().map(|word| word.parse::<usize>().ok());
    let (quota, period) = (words.next()??, words.next()??);
    Some(quota / period.max(1))
}

/// Pins the calling thread to a core; without permission, the system schedules it freely.
fn pin(core: usize) {
    // SAFETY: a zeroed CPU set is an empty one, and `core` came from such a set.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
    }
}
