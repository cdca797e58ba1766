//! A GPU's primary context and the one stream everything runs on.

use super::api::{CopyAttributes, DriverApi};
use super::cache::Cache;
use super::launch::{Target, arch};
use super::library;
use super::tuned::Tuned;
use crate::device::{Transfer, Way};
use crate::{Error, Result, notice};
use cudarc::driver::sys;
use std::cell::Cell;
use std::ffi::{CStr, c_int};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, RwLock, RwLockReadGuard, RwLockWriteGuard};
use sys::CUdevice_attribute as Attribute;

/// A GPU as found, before anything is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its number, as in `cuda:N`.
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Bytes of its memory.
    pub memory: u64,
    /// What lowering needs to know.
    pub target: Target,
}

/// The GPUs the driver sees.
pub(crate) fn gpus() -> Result<Vec<Gpu>> {
    let api = &library::driver()?.api;
    let mut count = 0;
    // SAFETY: writes one int.
    unsafe { api.cuDeviceGetCount(&mut count) }?;
    (0..count as u32).map(|ordinal| gpu(api, ordinal).map(|(gpu, _)| gpu)).collect()
}

fn gpu(api: &DriverApi, ordinal: u32) -> Result<(Gpu, sys::CUdevice)> {
    let mut device = 0;
    // SAFETY: writes one handle.
    unsafe { api.cuDeviceGet(&mut device, ordinal as c_int) }?;
    let mut name = [0 as std::ffi::c_char; 128];
    // SAFETY: the buffer has the length given.
    unsafe { api.cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int, device) }?;
    // SAFETY: the driver ends the name with NUL within the buffer.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let mut memory = 0;
    // SAFETY: writes one size.
    unsafe { api.cuDeviceTotalMem_v2(&mut memory, device) }?;
    let read = |which| -> Result<u32> {
        let mut value = 0;
        // SAFETY: writes one int.
        unsafe { api.cuDeviceGetAttribute(&mut value, which, device) }?;
        Ok(value as u32)
    };
    let capability = (
        read(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        read(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    );
    let sms = read(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let target = Target {
        capability,
        sms,
        shared_per_block: read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        shared_per_sm: read(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
        l2: read(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.into(),
        tuned: Tuned::of_machine(&Cache::of_user(), &arch(capability), sms),
    };
    Ok((Gpu { ordinal, name, memory: memory as u64, target }, device))
}

/// An open GPU.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) api: &'static DriverApi,
    pub(crate) gpu: Gpu,
    pub(crate) raw: sys::CUcontext,
    pub(crate) stream: Stream,
    /// A stream for copies that need not wait for `stream`, and the event that `stream` then waits for; created on
    /// first use.
    beside: OnceLock<(Stream, Event)>,
    /// Streams for copies that nothing waits for but the thread that asked, one each way; created on first use.
    apart: [OnceLock<Stream>; 2],
}

// SAFETY: driver handles may be used from any thread; `bind` makes the context current first.
unsafe impl Send for Context {}
// SAFETY: the driver's calls on contexts and streams are thread-safe.
unsafe impl Sync for Context {}

impl Context {
    /// Opens GPU `ordinal`. Its primary context stays until the process ends, so that a thread's
    /// binding to it never dangles.
    pub(crate) fn open(ordinal: u32) -> Result<Arc<Context>> {
        let api = &library::driver()?.api;
        let count = gpus()?.len();
        if ordinal as usize >= count {
            return Err(Error::NoDevice {
                asked: format!("cuda:{ordinal}"),
                reason: format!("the driver sees {count} GPU(s)"),
            });
        }
        let (gpu, device) = gpu(api, ordinal)?;
        let _turn = may_wait();
        let mut raw = std::ptr::null_mut();
        // SAFETY: the device handle is the driver's own.
        unsafe { api.cuDevicePrimaryCtxRetain(&mut raw, device) }?;
        bind(api, raw)?;
        let stream = Stream::new(api)?;
        Ok(Arc::new(Context {
            api,
            gpu,
            raw,
            stream,
            beside: OnceLock::new(),
            apart: Default::default(),
        }))
    }

    /// Makes the context current on this thread; every path into the driver starts here.
    pub(crate) fn bind(&self) -> Result<&'static DriverApi> {
        bind(self.api, self.raw)?;
        Ok(self.api)
    }

    /// Copies on the second stream, while `stream` may be running. Work launched on `stream` from now on waits for
    /// the copy.
    pub(crate) fn copy_beside(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        let api = self.bind()?;
        if self.beside.get().is_none() {
            let made = (Stream::new(api)?, Event::new(api)?);
            // If another thread was faster, this pair is dropped.
            drop(self.beside.set(made));
        }
        let (stream, done) = self.beside.get().expect("set above");
        // SAFETY: the caller checked both ranges against a living arena.
        unsafe { api.cuMemcpyAsync(to, from, bytes, stream.raw) }?;
        done.record(stream)?;
        // SAFETY: both belong to this context; the event was just recorded.
        unsafe { api.cuStreamWaitEvent(self.stream.raw, done.raw, 0) }
    }

    /// Copies on a stream of its own, and waits for that.
    ///
    /// # Safety
    /// As [`crate::device::Driver::transfer`].
    pub(crate) unsafe fn transfer(&self, pieces: &[Transfer], way: Way) -> Result<()> {
        let api = self.bind()?;
        let lane = &self.apart[way as usize];
        if lane.get().is_none() {
            // If another thread was faster, this stream is dropped.
            drop(lane.set(Stream::new(api)?));
        }
        let stream = lane.get().expect("set above").raw;
        let issue = |piece: &Transfer| {
            // SAFETY: the caller's promise; addresses of the host are told apart by the driver.
            unsafe { api.cuMemcpyAsync(piece.to, piece.from, piece.bytes, stream) }
        };
        // One by one, thousands of small copies take longer to issue than to do.
        let issued = match library::newer_driver().filter(|_| pieces.iter().all(|p| p.pinned)) {
            Some(newer) if pieces.len() > 1 => {
                let all = |of: fn(&Transfer) -> u64| pieces.iter().map(of).collect::<Vec<_>>();
                let (mut to, mut from) = (all(|piece| piece.to), all(|piece| piece.from));
                let mut bytes: Vec<usize> = pieces.iter().map(|piece| piece.bytes).collect();
                let (mut how, mut first) = (CopyAttributes::in_order(), 0);
                // SAFETY: the caller's promise; the lists live until the call returns.
                unsafe {
                    newer.cuMemcpyBatchAsync_v2(
                        to.as_mut_ptr(),
                        from.as_mut_ptr(),
                        bytes.as_mut_ptr(),
                        pieces.len(),
                        &mut how,
                        &mut first,
                        1,
                        stream,
                    )
                }
            }
            _ => pieces.iter().try_for_each(issue),
        };
        // Waited for even if one could not be issued: those before it use the same places.
        // SAFETY: the stream lives as long as the context.
        let waited = unsafe { api.cuStreamSynchronize(stream) };
        issued.and(waited)
    }

    /// Waits for everything launched.
    pub(crate) fn sync(&self) -> Result<()> {
        // SAFETY: the stream lives as long as the context.
        unsafe { self.bind()?.cuStreamSynchronize(self.stream.raw) }
    }

    /// An error if something that was launched has failed; never waits.
    pub(crate) fn alive(&self) -> Result<()> {
        // SAFETY: `bind` made the context current; the stream lives as long as it.
        unsafe { self.bind()?.stream_is_done(self.stream.raw) }.map(|_| ())
    }

    /// Waits for all work of all streams of the process.
    pub(crate) fn sync_all(&self) -> Result<()> {
        // SAFETY: `bind` made the context current.
        unsafe { self.bind()?.cuCtxSynchronize() }
    }

    /// Bytes of device memory that are free.
    pub(crate) fn memory_free(&self) -> Result<u64> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two sizes.
        unsafe { self.bind()?.cuMemGetInfo_v2(&mut free, &mut total) }?;
        Ok(free as u64)
    }
}

fn bind(api: &DriverApi, context: sys::CUcontext) -> Result<()> {
    thread_local! {
        static BOUND: Cell<usize> = const { Cell::new(0) };
    }
    if BOUND.get() != context as usize {
        // SAFETY: primary contexts are never released here, so the handle is valid.
        unsafe { api.cuCtxSetCurrent(context) }?;
        BOUND.set(context as usize);
    }
    Ok(())
}

/// A stream that does not wait for the default stream.
#[derive(Debug)]
pub(crate) struct Stream {
    api: &'static DriverApi,
    pub(crate) raw: sys::CUstream,
}

impl Stream {
    /// A stream of the context that is current.
    pub(crate) fn new(api: &'static DriverApi) -> Result<Stream> {
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a context is current.
        unsafe { api.cuStreamCreate(&mut raw, flags) }?;
        Ok(Stream { api, raw })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once; its context is never released.
        report(unsafe { self.api.cuStreamDestroy_v2(self.raw) });
    }
}

/// A point in a stream's work that can be waited for and timed.
#[derive(Debug)]
pub(crate) struct Event {
    api: &'static DriverApi,
    raw: sys::CUevent,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    /// An event of the context that is current.
    pub(crate) fn new(api: &'static DriverApi) -> Result<Event> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: a context is current.
        unsafe { api.cuEventCreate(&mut raw, 0) }?;
        Ok(Event { api, raw })
    }

    /// Marks the end of everything in the stream so far.
    pub(crate) fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both belong to the current context.
        unsafe { self.api.cuEventRecord(self.raw, stream.raw) }
    }

    /// Waits for everything before the mark.
    pub(crate) fn wait(&self) -> Result<()> {
        // SAFETY: the event lives.
        unsafe { self.api.cuEventSynchronize(self.raw) }
    }

    /// Microseconds from `earlier` to this event.
    pub(crate) fn since(&self, earlier: &Event) -> Result<f64> {
        let mut ms = 0.0;
        // SAFETY: both events were recorded with timing.
        unsafe { self.api.cuEventElapsedTime(&mut ms, earlier.raw, self.raw) }?;
        Ok(f64::from(ms) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        report(unsafe { self.api.cuEventDestroy_v2(self.raw) });
    }
}

/// Calls that may wait for the whole GPU (allocating, freeing, loading and unloading code) would break a capture that
/// another thread has open. They take this lock for reading; a capture takes it for writing.
static WHOLE_GPU: RwLock<()> = RwLock::new(());

/// Held around a call that may wait for the whole GPU.
pub(crate) fn may_wait() -> RwLockReadGuard<'static, ()> {
    WHOLE_GPU.read().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Held while a capture is open.
pub(crate) fn capturing() -> RwLockWriteGuard<'static, ()> {
    WHOLE_GPU.write().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// A graph is not destroyed while another thread launches one. Launches take this lock for reading, so that they do not
/// wait for a capture.
static GRAPHS: RwLock<()> = RwLock::new(());

/// Held around the launch of a graph.
pub(crate) fn launching() -> RwLockReadGuard<'static, ()> {
    GRAPHS.read().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Held while a graph is destroyed.
pub(crate) fn destroying() -> RwLockWriteGuard<'static, ()> {
    GRAPHS.write().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Reports a failure in a drop, which cannot return it. Only the first one: on a GPU that failed, every later release
/// fails, too.
pub(crate) fn report(outcome: Result<()>) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if let Err(problem) = outcome
        && !SAID.swap(true, Ordering::Relaxed)
    {
        notice::say(format_args!("while releasing: {problem} (later failures are not shown)"));
    }
}
