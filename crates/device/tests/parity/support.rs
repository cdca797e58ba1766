//! Lays out a case in the same way on every device, runs it, and compares the outputs.

use device::cpu::{self, Limit, Numerics};
use device::ops::Access;
use device::{
    Arena, DType, Device, DeviceChoice, DeviceKind, Item, Node, Op, OpenArena, RecordOptions,
    Region, Span, StepLimits, StepState, Tensor,
};
use half::{bf16, f16};
use std::cell::OnceCell;

/// A small seeded generator: the same case on every device and in every run.
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// In `0..below`.
    pub(crate) fn below(&mut self, below: usize) -> usize {
        (self.next() >> 33) as usize % below
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// In −1..1.
    pub(crate) fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn floats(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.float() * scale).collect()
    }
}

/// An arena being laid out, with the initial contents of its spans. Between any two spans there are bytes that belong
/// to no span.
pub(crate) struct Layout {
    open: OpenArena,
    spans: Vec<Span>,
    init: Vec<(Span, Vec<u8>)>,
}

/// Bytes between two spans, at least.
const RED_ZONE: u64 = 256;
/// Their value: NaN in every float format, and an index past the end of anything.
const RED: u8 = 0xFF;

impl Layout {
    fn new() -> Layout {
        Layout { open: OpenArena::new(), spans: Vec::new(), init: Vec::new() }
    }

    pub(crate) fn alloc(&mut self, region: Region, name: &str, bytes: u64) -> Span {
        let span = self.open.alloc(region, name, bytes);
        self.open.alloc(region, "red zone", RED_ZONE);
        self.spans.push(span);
        span
    }

    pub(crate) fn state(&mut self, limits: StepLimits) -> StepState {
        StepState::lay_out(limits, |region, name, bytes| self.alloc(region, name, bytes))
            .expect("limits of a few rows")
    }

    pub(crate) fn bytes(&mut self, region: Region, name: &str, bytes: Vec<u8>) -> Span {
        let span = self.alloc(region, name, bytes.len() as u64);
        self.init.push((span, bytes));
        span
    }

    /// Sets the contents of a span before the ops run.
    pub(crate) fn set(&mut self, span: Span, bytes: Vec<u8>) {
        assert_eq!(span.len as usize, bytes.len());
        self.init.push((span, bytes));
    }

    /// A matrix with `gap` poisoned elements between rows.
    pub(crate) fn floats(
        &mut self,
        dtype: DType,
        rows: usize,
        cols: usize,
        gap: usize,
        values: &[f32],
    ) -> Tensor {
        assert_eq!(values.len(), rows * cols);
        let stride = cols + gap;
        let mut padded = vec![f32::NAN; rows * stride];
        for row in 0..rows {
            padded[row * stride..][..cols].copy_from_slice(&values[row * cols..][..cols]);
        }
        let span = self.bytes(Region::Workspace, "floats", encode(dtype, &padded));
        let (rows, cols, stride) = (rows as u32, cols as u32, stride as u32);
        Tensor { span, dtype, rows, cols, stride }
    }

    /// A matrix of NaN.
    pub(crate) fn poison(&mut self, dtype: DType, rows: usize, cols: usize, gap: usize) -> Tensor {
        self.floats(dtype, rows, cols, gap, &vec![f32::NAN; rows * cols])
    }

    pub(crate) fn words(&mut self, words: &[u32]) -> Tensor {
        let span = self.bytes(Region::State, "words", words_to_bytes(words));
        Tensor::vector(span, DType::U32, words.len() as u32)
    }
}

pub(crate) fn words_to_bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(crate) fn bytes_to_words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Floats in a plain dtype.
pub(crate) fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        DType::E4M3 => {
            let mut bytes = Vec::new();
            dtype.encode(values, &mut bytes);
            bytes
        }
        other => panic!("{other:?} is not plain"),
    }
}

/// Back to f32.
pub(crate) fn decode(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let halves = || bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    match dtype {
        DType::F32 => bytes_to_words(bytes).into_iter().map(f32::from_bits).collect(),
        DType::F16 => halves().map(|b| f16::from_le_bytes(b).to_f32()).collect(),
        DType::BF16 => halves().map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
        DType::E4M3 => dtype.decode(bytes),
        other => panic!("{other:?} is not plain"),
    }
}

/// Random whole blocks of a GGUF type; scales are small and finite.
pub(crate) fn random_blocks(rng: &mut Rng, dtype: DType, elems: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..dtype.bytes(elems)).map(|_| rng.next() as u8).collect();
    let halves: &[usize] = match dtype {
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 => &[0],
        DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K => &[0, 2],
        DType::Q2K => &[80, 82],
        DType::Q3K => &[108],
        DType::Q6K => &[208],
        other => panic!("{other:?} has no blocks"),
    };
    // Blocks of 256 have scales of scales, of about 32: numbers are as large as those of the other types.
    let size = if dtype.block_elems() == 256 { 0.05 / 32.0 } else { 0.05 };
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        for at in halves {
            let scale = f16::from_f32(rng.float() * size);
            block[*at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
    }
    bytes
}

/// Lays out a case: its ops, and the spans to compare afterwards.
pub(crate) type Build<'a> = &'a dyn Fn(&mut Layout) -> (Vec<Op>, Vec<Span>);

/// Called with a device's name, the reference's output and the device's output.
pub(crate) type Compare<'a> = &'a dyn Fn(&str, &[Vec<u8>], &[Vec<u8>]);

/// Every fast device of this machine, by name. `DACAPO_TEST_DEVICE=cuda` leaves out the CPU, for tools that check the
/// GPU and slow everything down.
pub(crate) fn devices() -> Vec<(String, Device)> {
    if std::env::var("DACAPO_TEST_DEVICE").is_ok_and(|only| only == "cuda") {
        return vec![("cuda".to_owned(), gpu().expect("DACAPO_TEST_DEVICE asks for a GPU"))];
    }
    let limits = [Limit::None, Limit::Avx512, Limit::Avx2, Limit::Portable];
    let open = |limit| cpu::open_guarded(Some(2), Numerics::Fast, limit).expect("a CPU");
    let cpus = limits.into_iter().map(|limit| (format!("cpu {limit:?}"), open(limit)));
    cpus.chain(gpu().map(|gpu| ("cuda".to_owned(), gpu))).collect()
}

/// The GPU, if there is one; prints a line if there is none. Each test has its own, so that one may record while
/// another replays.
fn gpu() -> Option<Device> {
    let open = || match Device::open(DeviceChoice::Cuda(0)) {
        Ok((device, _)) => Some(device),
        Err(reason) => {
            eprintln!("skipped: no GPU ({reason})");
            None
        }
    };
    thread_local! {
        static GPU: OnceCell<Option<Device>> = const { OnceCell::new() };
    }
    GPU.with(|gpu| gpu.get_or_init(open).clone())
}

/// Whether there is a GPU with the kernels for Hopper.
pub(crate) fn gpu_is_hopper() -> bool {
    gpu().and_then(|gpu| gpu.gpu()).is_some_and(|gpu| gpu.capability.0 == 9)
}

/// Whether a device supports an op: packed formats and rotated neighbours are only on the CPU.
fn knows(device: &Device, op: &Op) -> bool {
    let unpacked = |dtype: DType| !matches!(dtype, DType::P4 | DType::P8);
    let known = |op: &Op| match op {
        Op::Linear(op) => unpacked(op.w.dtype),
        Op::Embed(op) => unpacked(op.table.dtype),
        Op::RopeKv(op) => op.pairs.is_halves(),
        Op::Experts(op) => unpacked(op.gate_up.dtype) && unpacked(op.down.dtype),
        _ => true,
    };
    device.kind() == DeviceKind::Cpu || op.members().iter().all(known)
}

/// Gives ops the scratch that the device needs.
pub(crate) fn give_scratch(device: &Device, open: &mut OpenArena, ops: &mut [Op]) -> Option<Span> {
    let target = device.target();
    let need = ops.iter().map(|op| target.scratch_bytes(op)).max().unwrap_or(0);
    let span = (need > 0).then(|| open.alloc(Region::State, "scratch", need));
    ops.iter_mut().for_each(|op| {
        op.set_scratch(span);
    });
    span
}

/// The contents of an arena before ops ran. What no op may write must be the same afterwards, to the byte.
struct Before {
    regions: Vec<(Span, Vec<u8>)>,
}

impl Before {
    /// Fills the bytes that belong to no span; spans must not overlap.
    fn new(device: &Device, arena: &Arena, spans: &[Span]) -> Before {
        let look = |region: Region| {
            let whole = Span { arena: arena.id(), region, offset: 0, len: arena.size(region) };
            let mut owned: Vec<Span> =
                spans.iter().copied().filter(|span| span.region == region).collect();
            owned.sort();
            let mut end = 0;
            let mut gaps = Vec::new();
            for span in owned.into_iter().chain([whole.part(whole.len, 0)]) {
                assert!(end <= span.offset, "two spans overlap");
                gaps.push(whole.part(end, span.offset - end));
                end = span.end();
            }
            let bytes: u64 = gaps.iter().map(|gap| gap.len).sum();
            device.write_all(arena, &gaps, &vec![RED; bytes as usize]).expect("a write");
            (whole, device.read(arena, whole).expect("a read"))
        };
        // AddressSanitizer checks the same bytes, and would report these reads of them.
        let regions = if cfg!(dacapo_asan) { Vec::new() } else { Region::ALL.to_vec() };
        Before { regions: regions.into_iter().map(look).collect() }
    }

    fn compare(self, device: &Device, arena: &Arena, ops: &[Op]) {
        let mut written = Vec::new();
        ops.iter().for_each(|op| written_by(op, &mut written));
        for (whole, mut before) in self.regions {
            let after = device.read(arena, whole).expect("a read");
            for span in written.iter().filter(|span| span.region == whole.region) {
                let range = span.offset as usize..span.end() as usize;
                before[range.clone()].copy_from_slice(&after[range]);
            }
            let wrong = before.iter().zip(&after).position(|(before, after)| before != after);
            let (device, region) = (device.describe(), whole.region.name());
            assert!(wrong.is_none(), "{device} wrote byte {wrong:?} of {region}: {ops:?}");
        }
    }
}

/// The spans that an op writes. The CPU runs the members of a fused op, which write what they pass on, too.
fn written_by(op: &Op, written: &mut Vec<Span>) {
    op.visit_spans(&mut |span, access| {
        if access != Access::Read {
            written.push(span);
        }
    });
    if let Op::Fused(fused) = op {
        fused.members.iter().for_each(|member| written_by(member, written));
    }
}

/// Runs ops, recorded as one graph, and returns what the named spans hold afterwards.
pub(crate) fn run(device: &Device, build: Build<'_>) -> Vec<Vec<u8>> {
    let mut layout = Layout::new();
    let (mut ops, outs) = build(&mut layout);
    let Layout { mut open, mut spans, init } = layout;
    spans.extend(give_scratch(device, &mut open, &mut ops));
    let arena = device.seal(open).expect("memory");
    for (span, bytes) in &init {
        device.write(&arena, *span, bytes).expect("a write");
    }
    let before = Before::new(device, &arena, &spans);
    let mut recording = device.record(&arena, "case", RecordOptions::default()).expect("idle");
    for op in &ops {
        let node = Node { op: op.clone(), name: "case".into(), layer: None };
        recording.push(Item::Node(node)).expect("a valid op");
    }
    for graph in recording.finish().expect("a recording") {
        graph.replay().expect("a replay");
    }
    before.compare(device, &arena, &ops);
    outs.into_iter().map(|span| device.read(&arena, span).expect("a read")).collect()
}

/// Runs a case on every device; `compare(device, reference, got)` gets the bytes of each.
pub(crate) fn against_reference(build: Build<'_>, compare: Compare<'_>) {
    let reference = cpu::open(None, true).expect("a CPU");
    let want = run(&reference, build);
    let (ops, _) = build(&mut Layout::new());
    for (name, device) in devices() {
        if ops.iter().all(|op| knows(&device, op)) {
            compare(&name, &want, &run(&device, build));
        }
    }
}

/// How far a result may be from the reference: the rounding of its dtype, and the order of f32 sums.
pub(crate) fn tolerance(dtype: DType) -> f32 {
    match dtype {
        DType::F32 => 2e-5,
        DType::F16 => 1.5e-3,
        DType::BF16 => 1e-2,
        // The neighbouring value, if the reference rounded a last bit otherwise.
        DType::E4M3 => 0.13,
        other => panic!("{other:?} is not a float"),
    }
}

/// The first element outside the tolerance, relative to `scale` or the value; NaN must be exactly where the reference has
/// it.
pub(crate) fn difference(dtype: DType, scale: f32, want: &[u8], got: &[u8]) -> Option<String> {
    let (want, got) = (decode(dtype, want), decode(dtype, got));
    assert_eq!(want.len(), got.len());
    want.iter().zip(&got).enumerate().find_map(|(i, (want, got))| {
        let close = (want - got).abs() <= tolerance(dtype) * scale.max(want.abs());
        let same_nan = want.is_nan() && got.is_nan();
        (!close && !same_nan).then(|| format!("element {i} is {got}, reference {want}"))
    })
}

/// The same for rows of `cols` columns whose parts are weighed: also the first row whose error is more than the tolerance
/// of its norm. A wrong part with a small weight hides from the elements' tolerance, not from this.
pub(crate) fn row_difference(
    dtype: DType,
    scale: f32,
    cols: usize,
    want: &[u8],
    got: &[u8],
) -> Option<String> {
    if let Some(difference) = difference(dtype, scale, want, got) {
        return Some(difference);
    }
    let norm = |row: &[f32]| row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    let (want, got) = (decode(dtype, want), decode(dtype, got));
    let rows = want.chunks(cols).zip(got.chunks(cols)).enumerate();
    rows.into_iter().find_map(|(row, (want, got))| {
        let error: Vec<f32> = want.iter().zip(got).map(|(want, got)| want - got).collect();
        let share = norm(&error) / norm(want);
        let far = share > f64::from(tolerance(dtype));
        far.then(|| format!("row {row} differs by {share:.1e} of its norm"))
    })
}

/// Equal within the tolerance of [`difference`].
#[track_caller]
pub(crate) fn assert_close(what: &str, dtype: DType, scale: f32, want: &[u8], got: &[u8]) {
    if let Some(difference) = difference(dtype, scale, want, got) {
        panic!("{what}: {difference}");
    }
}
