//! The linear in two phases: rows of x are normalised (and quantised, for packed weights) into scratch, then the rows
//! of w are divided among the threads; each chunk reads its weights once.

use super::acts::Acts;
use super::finish::Finish;
use super::{k_blocks, packed, plain};
#[cfg(target_arch = "x86_64")]
use super::{panel, split};
use crate::DType;
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
#[cfg(target_arch = "x86_64")]
use crate::cpu::numerics::Numerics;
use crate::cpu::pack;
use crate::cpu::simd::Level;
use crate::cpu::step::{Scratch, Step, Team, chunks, falling, falling_part, part};
use crate::cpu::view::{Matrix, Words, load_floats, round_to};
use crate::op::LinearChain;
use crate::ops::rms_norm::NormStep;
#[cfg(target_arch = "x86_64")]
use crate::variant::Pick;

/// Rows of x up to which one thread prepares them all.
const FEW: usize = 4;

struct LinearStep {
    x: Matrix,
    w: Matrix,
    norm: Option<NormStep>,
    live: Option<Words>,
    finish: Finish,
    kernel: Kernel,
    /// How many rows are multiplied by plain weights.
    many: Many,
    level: Level,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kernel {
    /// Rows of w as f32 (converted when read), dot products in f32.
    Plain,
    /// Packed weights, integer dot products.
    Packed(packed::Kind),
    /// Blocks of 256, integer dot products in ggml's order.
    KBlocks,
}

/// How many rows are multiplied by plain weights.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Many {
    /// As few rows are.
    Plain,
    /// In bf16 parts, on AMX.
    #[cfg(target_arch = "x86_64")]
    Split,
    /// By panels that stay in a core's cache.
    #[cfg(target_arch = "x86_64")]
    Panels,
}

impl LinearChain {
    pub(crate) fn prepare(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        let level = lowering.level;
        let kernel = match self.w.dtype {
            DType::P4 | DType::P8 => Kernel::Packed(packed::Kind::of(lowering)),
            dtype if lowering.ggml() && k_blocks::takes(dtype) => Kernel::KBlocks,
            _ => Kernel::Plain,
        };
        let product = LinearStep {
            x: Matrix::new(memory, &self.x),
            w: Matrix::new(memory, &self.w),
            norm: self.norm.as_ref().map(|norm| norm.resolve(memory, lowering)),
            live: self.live.map(|live| Words::of_span(memory, live)),
            finish: Finish::new(self, memory, lowering),
            kernel,
            many: many(self, memory, lowering),
            level,
        };
        match &self.rope {
            None => Box::new(product),
            Some(rope) => Box::new(RotatedStep { product, rope: rope.prepare(memory, lowering) }),
        }
    }
}

/// How many rows are multiplied. With fixed kernels every row is multiplied in the same way, however many there are,
/// ggml's numerics have an order of their own, and products of bf16 parts are not exact.
#[cfg(target_arch = "x86_64")]
fn many(op: &LinearChain, memory: &CpuMemory, lowering: &Lowering) -> Many {
    let w = Matrix::new(memory, &op.w);
    match lowering.features.amx_bf16 {
        _ if lowering.ggml() || op.pick == Pick::Fixed => Many::Plain,
        true if split::takes(&w) && lowering.numerics != Numerics::Exact => Many::Split,
        _ if lowering.level == Level::Avx512 && panel::takes(&w) => Many::Panels,
        _ => Many::Plain,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn many(_op: &LinearChain, _memory: &CpuMemory, _lowering: &Lowering) -> Many {
    Many::Plain
}

/// A linear followed by the rotation of its rows.
struct RotatedStep {
    product: LinearStep,
    rope: Box<dyn Step>,
}

impl Step for RotatedStep {
    fn scratch(&self) -> Scratch {
        self.product.scratch().max(self.rope.scratch())
    }

    fn run(&self, team: &Team<'_>) {
        self.product.run(team);
        self.rope.run(team);
    }
}

impl LinearStep {
    /// Row `row` of x, normalised.
    fn input(&self, row: usize, values: &mut [f32], scratch: &mut [f32]) {
        // SAFETY: a row of x.
        unsafe { load_floats(self.x.dtype, self.x.at(row, 0), values) };
        if let Some(norm) = &self.norm {
            norm.apply(values, scratch);
            if self.x.dtype != DType::F32 {
                values.iter_mut().for_each(|value| *value = round_to(self.x.dtype, *value));
            }
        }
    }

    fn prepare_rows(&self, team: &Team<'_>, rows: usize, store: &(dyn Fn(usize, &[f32]) + Sync)) {
        let cols = self.x.cols;
        let as_they_are = self.norm.is_none() && self.x.dtype == DType::F32;
        let chunks = if rows <= FEW { 1 } else { chunks(rows, team.threads()) };
        team.parallel(chunks, &|chunk, worker| {
            if as_they_are {
                for row in part(rows, chunks, chunk) {
                    // SAFETY: a row of x.
                    let x = unsafe { std::slice::from_raw_parts(self.x.at(row, 0).cast(), cols) };
                    store(row, x);
                }
                return;
            }
            // SAFETY: this worker's own scratch.
            let (values, scratch) = unsafe { team.own(worker).floats(2 * cols) }.split_at_mut(cols);
            for row in part(rows, chunks, chunk) {
                self.input(row, values, scratch);
                store(row, values);
            }
        });
    }

    fn run_plain(&self, team: &Team<'_>, rows: usize) {
        let cols = self.x.cols;
        let inputs = team.shared(self.x.rows * cols * size_of::<f32>()).cast::<f32>();
        let at = SharedInputs(inputs);
        self.prepare_rows(team, rows, &|row, values| {
            // SAFETY: row `row` of the shared scratch, written by this chunk alone.
            unsafe {
                std::ptr::copy_nonoverlapping(values.as_ptr(), at.row(row, cols), cols);
            }
        });
        let units = self.w.rows.div_ceil(plain::ROWS);
        let chunks = cut(units, self.w.dtype.bytes(plain::ROWS * cols), rows, team.threads());
        team.parallel(chunks, &|chunk, worker| {
            let task = plain::Task {
                w: &self.w,
                inputs: at.row(0, cols),
                rows,
                finish: &self.finish,
                level: self.level,
            };
            let scratch = team.own(worker).bytes(plain::own_bytes(cols)).cast();
            for unit in part(units, chunks, chunk) {
                // SAFETY: rows of w, inputs prepared above, this worker's scratch.
                unsafe { task.run(unit * plain::ROWS, scratch) };
            }
        });
    }

    #[cfg(target_arch = "x86_64")]
    fn run_split(&self, team: &Team<'_>, rows: usize) {
        let cols = self.x.cols;
        let inputs = split::Inputs::new(team.shared(split::shared_bytes(rows, cols)), cols);
        self.prepare_rows(team, rows, &|row, values| {
            // SAFETY: the processor has AVX-512; row `row` is written by this chunk alone.
            unsafe { inputs.store(row, values) };
        });
        // SAFETY: as above, and no chunk runs now.
        unsafe { inputs.fill(rows) };
        let tiles = self.w.rows / 16;
        let group = split::group(&self.w).min(split::share(tiles, team.threads()));
        team.parallel(tiles.div_ceil(group), &|chunk, worker| {
            let own = team.own(worker).bytes(split::own_bytes(&self.w));
            let task = split::Task { w: &self.w, inputs, rows, finish: &self.finish, own };
            // SAFETY: tiles of w, rows prepared above; the processor has AMX bf16.
            unsafe { task.run(chunk * group..((chunk + 1) * group).min(tiles)) };
        });
    }

    #[cfg(target_arch = "x86_64")]
    fn run_panels(&self, team: &Team<'_>, rows: usize) {
        let cols = self.x.cols;
        let direct = self.norm.is_none().then(|| panel::Inputs::direct(&self.x)).flatten();
        let inputs = direct.unwrap_or_else(|| {
            let bytes = panel::shared_bytes(rows, cols);
            let inputs = panel::Inputs::copied(team.shared(bytes), cols);
            self.prepare_rows(team, rows, &|row, values| {
                // SAFETY: row `row` is written by this chunk alone.
                unsafe { inputs.store(row, values) };
            });
            inputs
        });
        let (panels, threads) = (panel::count(&self.w), team.threads());
        team.parallel(falling(panels, threads), &|chunk, worker| {
            let own = team.own(worker).bytes(panel::own_bytes(&self.w));
            let task = panel::Task::new(&self.w, inputs, rows, &self.finish, own);
            // SAFETY: panels of w, rows prepared above; the processor has AVX-512.
            unsafe { task.run(falling_part(panels, threads, chunk)) };
        });
    }

    fn run_k_blocks(&self, team: &Team<'_>, rows: usize) {
        let cols = self.x.cols;
        let at = team.shared(k_blocks::Acts::bytes(self.x.rows, cols));
        let acts = k_blocks::Acts::new(at, self.x.rows, cols);
        self.prepare_rows(team, rows, &|row, values| {
            // SAFETY: row `row` of the shared scratch, written by this chunk alone.
            unsafe { acts.store(&self.w, row, rows, values) };
        });
        let units = self.w.rows.div_ceil(plain::ROWS);
        let chunks = cut(units, self.w.dtype.bytes(plain::ROWS * cols), rows, team.threads());
        team.parallel(chunks, &|chunk, worker| {
            let (w, finish, level) = (&self.w, &self.finish, self.level);
            let task = k_blocks::Task { w, acts: &acts, rows, finish, level };
            let scratch = team.own(worker).bytes(k_blocks::own_bytes(cols));
            for unit in part(units, chunks, chunk) {
                // SAFETY: rows of w, rows stored above, this worker's scratch.
                unsafe { task.run(unit * plain::ROWS, scratch) };
            }
        });
    }

    fn run_packed(&self, team: &Team<'_>, rows: usize, kind: packed::Kind) {
        let bytes = Acts::bytes(self.x.rows, self.x.cols);
        let acts = Acts::new(team.shared(bytes), self.x.rows, self.x.cols);
        self.prepare_rows(team, rows, &|row, values| {
            // SAFETY: row `row` of the shared scratch, written by this chunk alone.
            unsafe {
                acts.store(self.level, row, values);
                if let packed::Kind::Ggml { .. } = kind {
                    acts.round_sums(row);
                }
            };
        });
        let units = self.w.rows / pack::ROWS;
        let bytes = self.w.dtype.bytes(pack::ROWS * self.x.cols);
        // With many rows the next group's weights are prefetched while this one is multiplied.
        let (many, threads) = (rows >= packed::MANY, team.threads());
        let chunks = if many { falling(units, threads) } else { cut(units, bytes, rows, threads) };
        team.parallel(chunks, &|chunk, worker| {
            let groups = match many {
                true => falling_part(units, threads, chunk),
                false => part(units, chunks, chunk),
            };
            let task = packed::Task {
                dtype: self.w.dtype,
                w: self.w.start(),
                acts: &acts,
                rows,
                finish: &self.finish,
                own: team.own(worker).bytes(packed::own_bytes(self.x.cols)),
            };
            // SAFETY: groups of w, rows prepared above; the kind was detected.
            unsafe { task.run(kind, groups) };
        });
    }
}

/// The number of chunks: bytes decide for few rows (bandwidth), work for many.
fn cut(units: usize, unit_bytes: usize, rows: usize, threads: usize) -> usize {
    if threads == 1 {
        return 1.min(units);
    }
    let bytes = units * unit_bytes;
    let target = (bytes / (8 * threads)).clamp(48 << 10, 256 << 10);
    let by_bytes = (bytes * rows.min(32)).div_ceil(target);
    by_bytes.clamp(threads, 64 * threads).min(units).max(1)
}

/// The shared inputs of a linear with plain weights.
struct SharedInputs(*mut f32);

// SAFETY: chunks write different rows, and all are written before any is read.
unsafe impl Sync for SharedInputs {}

impl SharedInputs {
    fn row(&self, row: usize, cols: usize) -> *mut f32 {
        self.0.wrapping_add(row * cols)
    }
}

impl Step for LinearStep {
    fn scratch(&self) -> Scratch {
        let (rows, cols) = (self.x.rows, self.x.cols);
        let floats = |count: usize| count * size_of::<f32>();
        match self.kernel {
            Kernel::Plain => {
                let plain = Scratch {
                    shared: floats(rows * cols),
                    own: floats(2 * cols).max(plain::own_bytes(cols)),
                };
                match self.many {
                    #[cfg(target_arch = "x86_64")]
                    Many::Split => plain.max(Scratch {
                        shared: split::shared_bytes(rows, cols),
                        own: split::own_bytes(&self.w),
                    }),
                    #[cfg(target_arch = "x86_64")]
                    Many::Panels => plain.max(Scratch {
                        shared: panel::shared_bytes(rows, cols),
                        own: panel::own_bytes(&self.w),
                    }),
                    _ => plain,
                }
            }
            Kernel::Packed(_) => Scratch {
                shared: Acts::bytes(rows, cols),
                own: floats(2 * cols).max(packed::own_bytes(cols)),
            },
            Kernel::KBlocks => Scratch {
                shared: k_blocks::Acts::bytes(rows, cols),
                own: floats(2 * cols).max(k_blocks::own_bytes(cols)),
            },
        }
    }

    fn run(&self, team: &Team<'_>) {
        let rows = self.live.map_or(self.x.rows, |live| self.x.rows.min(live.get(0) as usize));
        match self.kernel {
            _ if rows == 0 => {}
            Kernel::Plain => match self.many {
                #[cfg(target_arch = "x86_64")]
                Many::Split if rows >= split::LEAST => self.run_split(team, rows),
                #[cfg(target_arch = "x86_64")]
                Many::Panels if rows >= panel::LEAST => self.run_panels(team, rows),
                _ => self.run_plain(team, rows),
            },
            Kernel::Packed(kind) => self.run_packed(team, rows, kind),
            Kernel::KBlocks => self.run_k_blocks(team, rows),
        }
    }
}
