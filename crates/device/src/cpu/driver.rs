//! The CPU's driver: arenas of plain memory, recordings as lists of prepared steps.

use super::beside::{Beside, Job};
use super::guard::{self, Guard};
use super::memory::{self, CpuMemory, Mapping, Regions, copy_bytes};
use super::numerics::{Lowering, Numerics};
use super::pool::Pool;
use super::step::{Scratch, Step, Team};
use crate::arena::{ArenaInner, Memory};
use crate::capture::CaptureState;
use crate::device::{DeviceKind, Driver, Transfer, Way};
use crate::graph::{Item, Node, RecordOptions, Recorded};
use crate::stopwatch::Marks;
use crate::{Arena, Error, Look, Region, Result, Span};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

/// The processor as a device.
#[derive(Debug)]
pub(super) struct CpuDriver {
    capture: CaptureState,
    /// `None`: every op runs its scalar reference.
    lowering: Option<Lowering>,
    executor: Arc<Mutex<Executor>>,
}

/// Runs steps, for one caller at a time.
struct Executor {
    pool: Pool,
    scratch: Mapping,
    size: Scratch,
    guard: Option<Guard>,
    /// The second stream, started when it is first needed.
    beside: Option<Beside>,
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor").field("pool", &self.pool).field("size", &self.size).finish()
    }
}

impl Executor {
    /// Makes room for the scratch of a step. Never during a replay.
    fn reserve(&mut self, need: Scratch) -> Result<()> {
        let fence = if self.guard.is_some() { guard::FENCE } else { 0 };
        let need = Scratch { shared: need.shared + fence, own: need.own + fence };
        let size = self.size.max(need.rounded());
        let bytes = size.shared + size.own * self.pool.threads();
        if bytes > self.scratch.len() {
            self.scratch = Mapping::new(bytes).ok_or(Error::OutOfMemory {
                region: Region::Workspace,
                needed: bytes as u64,
                available: memory::available(),
            })?;
        }
        self.size = size;
        Ok(())
    }

    /// Waits for the copies of the second stream.
    fn meet(&self) {
        if let Some(beside) = &self.beside {
            beside.wait();
        }
    }

    fn play(&self, program: &[Instruction]) {
        self.meet();
        let _awake = self.pool.awake();
        self.play_all(program);
    }

    fn play_all(&self, program: &[Instruction]) {
        for instruction in program {
            match instruction {
                Instruction::Step(step, asked) => self.play_step(&**step, *asked),
                Instruction::If(cond, body) => {
                    if cond.holds() {
                        self.play_all(body);
                    }
                }
                Instruction::While(cond, body) => {
                    while cond.holds() {
                        self.play_all(body);
                    }
                }
            }
        }
    }

    fn play_step(&self, step: &dyn Step, asked: Scratch) {
        let (pool, scratch, size) = (&self.pool, self.scratch.start(), self.size);
        let team = Team { pool, scratch, size, asked };
        match &self.guard {
            None => step.run(&team),
            Some(guard) => guard.run(step, &team),
        }
    }
}

/// A lowered item of a recording.
enum Instruction {
    /// A step and the scratch it asked for.
    Step(Box<dyn Step>, Scratch),
    If(Cond, Vec<Instruction>),
    While(Cond, Vec<Instruction>),
}

/// The address of a condition, a word in the arena.
struct Cond(*mut u32);

// SAFETY: an address in an arena the recording keeps; only the replaying thread reads it.
unsafe impl Send for Cond {}
// SAFETY: as above.
unsafe impl Sync for Cond {}

impl Cond {
    fn holds(&self) -> bool {
        // SAFETY: a checked, aligned word of the arena; atomic, because the host may write it meanwhile.
        unsafe { AtomicU32::from_ptr(self.0) }.load(Ordering::Relaxed) != 0
    }
}

impl CpuDriver {
    /// Lowers ops with `lowering`; with `None` they run their scalar references on the calling thread. With `guard`
    /// every step's scratch is checked.
    pub(super) fn new(
        threads: Option<usize>,
        lowering: Option<Lowering>,
        guard: Option<Guard>,
    ) -> CpuDriver {
        let pool = Pool::new(if lowering.is_none() { Some(1) } else { threads });
        let scratch = Mapping::new(0).expect("an empty mapping");
        let executor = Executor { pool, scratch, size: Scratch::default(), guard, beside: None };
        CpuDriver {
            capture: CaptureState::default(),
            lowering,
            executor: Arc::new(Mutex::new(executor)),
        }
    }

    fn executor(&self) -> MutexGuard<'_, Executor> {
        lock(&self.executor)
    }

    fn lower_node(&self, memory: CpuMemory, node: &Node) -> Box<dyn Step> {
        match &self.lowering {
            Some(lowering) => node.op.prepare_cpu(&memory, lowering),
            None => Box::new(Reference { op: node.op.clone(), memory }),
        }
    }

    fn lower(&self, memory: CpuMemory, items: &[Item], need: &mut Scratch) -> Vec<Instruction> {
        let lower = |item: &Item| match item {
            Item::Node(node) => {
                let step = self.lower_node(memory, node);
                let asked = step.scratch();
                *need = need.max(asked);
                Instruction::Step(step, asked)
            }
            Item::If { cond, body } => {
                let cond = Cond(memory.address(*cond).cast());
                Instruction::If(cond, self.lower(memory, body, need))
            }
            Item::While { cond, body } => {
                let cond = Cond(memory.address(*cond).cast());
                Instruction::While(cond, self.lower(memory, body, need))
            }
        };
        items.iter().map(lower).collect()
    }
}

/// Whether the host may access the span at any time.
fn shared(span: Span) -> bool {
    span.region == Region::HostMapped
}

fn lock(executor: &Mutex<Executor>) -> MutexGuard<'_, Executor> {
    // A replay only reads the executor, so a replay that panicked leaves it consistent.
    executor.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// An op's scalar reference as a step.
struct Reference {
    op: crate::Op,
    memory: CpuMemory,
}

impl Step for Reference {
    fn run(&self, _team: &Team<'_>) {
        self.op.reference(&self.memory);
    }
}

impl Driver for CpuDriver {
    fn capture(&self) -> &CaptureState {
        &self.capture
    }

    fn describe(&self) -> String {
        let threads = self.executor().pool.threads();
        let how = match &self.lowering {
            Some(lowering) if lowering.ggml() => format!("{}, as ggml rounds", lowering.features),
            Some(lowering) => lowering.features.to_string(),
            None => "scalar references".into(),
        };
        format!("CPU, {threads} thread{}, {how}", if threads == 1 { "" } else { "s" })
    }

    fn kind(&self) -> DeviceKind {
        DeviceKind::Cpu
    }

    fn numerics(&self) -> Numerics {
        self.lowering.map_or(Numerics::Fast, |lowering| lowering.numerics)
    }

    fn memory_free(&self) -> Result<u64> {
        Ok(memory::available())
    }

    fn allocate(&self, sizes: [u64; 5]) -> Result<Box<dyn Memory>> {
        Ok(Box::new(Regions::new(sizes, memory::available())?))
    }

    fn copy(&self, arena: &Arena, from: Span, to: Span, beside: bool) -> Result<()> {
        let (source, target) = (arena.inner.address(from), arena.inner.address(to));
        let shared = shared(from) || shared(to);
        let (from, to, bytes) = (source, target, from.len as usize);
        let mut executor = self.executor();
        if beside {
            if executor.beside.is_none() {
                let failed = |error: std::io::Error| Error::NoDevice {
                    asked: "a copying thread".into(),
                    reason: error.to_string(),
                };
                executor.beside = Some(Beside::new().map_err(failed)?);
            }
            let stream = executor.beside.as_ref().expect("made above");
            stream.start(Job { from, to, bytes, shared, _arena: arena.inner.clone() });
            return Ok(());
        }
        executor.meet();
        // SAFETY: both spans were checked and do not overlap; no replay runs while the lock is held.
        unsafe { copy_bytes(from as *const u8, to as *mut u8, bytes, shared) };
        Ok(())
    }

    unsafe fn transfer(&self, pieces: &[Transfer], _way: Way) -> Result<()> {
        for piece in pieces {
            let (from, to) = (piece.from as *const u8, piece.to as *mut u8);
            // SAFETY: the caller's promise; all memory is the host's.
            unsafe { copy_bytes(from, to, piece.bytes, piece.shared) };
        }
        Ok(())
    }

    fn marks(&self, count: usize) -> Result<Box<dyn Marks>> {
        Ok(Box::new(Instants(vec![None; count])))
    }

    fn write(&self, arena: &ArenaInner, to: &[Span], mut bytes: &[u8]) -> Result<()> {
        let executor = self.executor();
        executor.meet();
        for &span in to {
            let (these, rest) = bytes.split_at(span.len as usize);
            let target = arena.address(span) as *mut u8;
            // SAFETY: the span was checked and has this length; no replay runs while the lock is held.
            unsafe { copy_bytes(these.as_ptr(), target, these.len(), shared(span)) };
            bytes = rest;
        }
        Ok(())
    }

    fn read(&self, arena: &ArenaInner, from: &[Span], look: Look<'_>) -> Result<()> {
        let executor = self.executor();
        executor.meet();
        let mut at = 0;
        for &span in from {
            let (source, len) = (arena.address(span) as *const u8, span.len as usize);
            if shared(span) {
                // Another thread may write these bytes at the same time, so `look` gets a copy.
                let mut copy = vec![0u8; len];
                // SAFETY: as for `write`.
                unsafe { copy_bytes(source, copy.as_mut_ptr(), len, true) };
                look(at, &copy);
            } else {
                // SAFETY: as for `write`; the lock is held while `look` runs.
                look(at, unsafe { std::slice::from_raw_parts(source, len) });
            }
            at += len;
        }
        Ok(())
    }

    fn prepare(&self, _items: &[Item], _options: RecordOptions) -> Result<()> {
        Ok(())
    }

    fn run(&self, arena: &Arena, node: &Node, _options: RecordOptions) -> Result<()> {
        let step = self.lower_node(CpuMemory::of(&arena.inner), node);
        let mut executor = self.executor();
        let asked = step.scratch();
        executor.reserve(asked)?;
        executor.play(&[Instruction::Step(step, asked)]);
        Ok(())
    }

    fn record(
        &self,
        arena: &Arena,
        name: &str,
        items: &[Item],
        _options: RecordOptions,
    ) -> Result<Box<dyn Recorded>> {
        let mut need = Scratch::default();
        let program = self.lower(CpuMemory::of(&arena.inner), items, &mut need);
        self.executor().reserve(need)?;
        let (executor, arena) = (self.executor.clone(), arena.clone());
        Ok(Box::new(CpuRecording { name: name.into(), program, executor, _arena: arena }))
    }

    fn sync(&self) -> Result<()> {
        self.executor().meet();
        Ok(())
    }
}

/// A launch is done when it returns, so a mark is a point in time.
#[derive(Debug)]
struct Instants(Vec<Option<Instant>>);

impl Marks for Instants {
    fn mark(&mut self, index: usize) -> Result<()> {
        self.0[index] = Some(Instant::now());
        Ok(())
    }

    fn micros(&self, from: usize, to: usize) -> Result<f64> {
        let (Some(from), Some(to)) = (self.0[from], self.0[to]) else { return Ok(0.0) };
        Ok(to.saturating_duration_since(from).as_secs_f64() * 1e6)
    }
}

/// Prepared steps, and the memory they point into.
struct CpuRecording {
    name: String,
    program: Vec<Instruction>,
    executor: Arc<Mutex<Executor>>,
    _arena: Arena,
}

impl std::fmt::Debug for CpuRecording {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CpuRecording({}, {} steps)", self.name, count(&self.program))
    }
}

fn count(program: &[Instruction]) -> usize {
    let nodes = |instruction: &Instruction| match instruction {
        Instruction::Step(..) => 1,
        Instruction::If(_, body) | Instruction::While(_, body) => 1 + count(body),
    };
    program.iter().map(nodes).sum()
}

fn bytes(program: &[Instruction]) -> usize {
    let size = |instruction: &Instruction| {
        size_of::<Instruction>()
            + match instruction {
                Instruction::Step(step, _) => size_of_val(&**step),
                Instruction::If(_, body) | Instruction::While(_, body) => bytes(body),
            }
    };
    program.iter().map(size).sum()
}

impl Recorded for CpuRecording {
    fn replay(&self) -> Result<()> {
        lock(&self.executor).play(&self.program);
        Ok(())
    }

    fn bytes(&self) -> u64 {
        bytes(&self.program) as u64
    }

    fn device_nodes(&self) -> usize {
        count(&self.program)
    }
}
