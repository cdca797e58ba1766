//! `kernels/persistent.cu`: one kernel for all layers, if they are small and alike. Other layers have no such kernel.
//!
//! Its blocks wait for each other, so all of them must be resident at the same time: there are at most as many as
//! multiprocessors, and each takes more than half of one. Earlier kernels do not need these blocks to end, and later
//! kernels cannot start before all of these blocks have started.

use crate::cuda::launch::{Arg, Lowered, Target, TensorMap};
use crate::cuda::lower::{Kernel, aligned};
use crate::op::{Activation, Attention, AttentionChain, Epilogue, LinearChain, Norm, RopeKv};
use crate::ops::{Access, SpanVisitor, Traffic, require, require_scratch};
use crate::{DType, Error, Op, Result, Span, Tensor};

/// Warps that compute; one more fetches.
const WARPS: u32 = 8;
const THREADS: u32 = WARPS * 32 + 32;
/// Columns that the warps take at a time, four per lane: `CHUNK` in the kernel. A lane holds one such part of the
/// residual stream.
const CHUNK: u32 = WARPS * 32 * 4;
/// Bytes of a stage: 8 rows of a chunk of weights with room between them, or two pages of a KV head.
const STAGE: u32 = 17 << 10;
/// Bytes of a row of a warp's slice of x.
const SLICE: u32 = CHUNK / WARPS * 2 + 64;
/// Rows of x: the columns of a matrix instruction.
const MOST_ROWS: u32 = 8;
/// Elements of a head: a lane of a warp has four of them.
const MOST_DIM: u32 = 32 * 4;
/// Query heads per KV head: a warp prepares each of them, and two more prepare k and v.
const MOST_GROUP: u32 = WARPS - 2;
/// Bytes of a layer in the argument table: its addresses.
const LAYER: u32 = 9 * 8;
/// Layers: a kernel has 4 KiB of parameters, of which the other arguments take at most 320 bytes with their alignment.
const MOST_LAYERS: usize = ((4096 - 320) / LAYER) as usize;
/// Registers of a thread: each quarter of a multiprocessor has 16 Ki for its share of the warps, given out in eights.
const REGISTERS: u32 = (16 << 10) / ((THREADS / 32).div_ceil(4) * 32) / 8 * 8;
/// Of these, what is neither received words nor the residual stream: fragments, sums, addresses. From the registers
/// that NVRTC reports.
const OTHER_REGISTERS: u32 = 38;
/// The same for each chunk.
const CHUNK_REGISTERS: u32 = 6;

/// The name in errors.
const NAME: &str = "layers";

/// The members of a run of decoder layers: linears and attention, alone or fused.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layers<'a> {
    pub(crate) members: &'a [Op],
    /// Where blocks exchange activations.
    pub(crate) exchange: Option<Span>,
}

impl Layers<'_> {
    /// Checks what the members do not check themselves.
    pub(crate) fn check(&self) -> Result<()> {
        for member in self.members {
            let allowed = LinearChain::of(member).is_some() || AttentionChain::of(member).is_some();
            require(allowed, NAME, || format!("{} cannot be a member", member.name()))?;
        }
        let Some(exchange) = self.exchange else { return Ok(()) };
        require_scratch(Some(exchange), NAME)?;
        let mut apart = true;
        for member in self.members {
            member.visit_spans(&mut |span, _| apart &= !span.overlaps(exchange));
        }
        require(apart, NAME, || "a member touches the exchange buffer".into())
    }

    pub(crate) fn describe(&self) -> String {
        format!("layers: {} ops as one", self.members.len())
    }

    pub(crate) fn traffic(&self) -> Traffic {
        self.members.iter().map(Op::traffic).fold(Traffic::default(), |a, b| Traffic {
            weights: a.weights + b.weights,
            values: a.values + b.values,
        })
    }

    /// Values from outside are read; values between members are only written.
    pub(crate) fn visit_spans(&self, visit: SpanVisitor<'_>) {
        let mut written: Vec<Span> = Vec::new();
        for member in self.members {
            member.visit_spans(&mut |span, access| {
                if access != Access::Write && !written.contains(&span) {
                    visit(span, Access::Read);
                }
                if access != Access::Read && !written.contains(&span) {
                    written.push(span);
                    visit(span, Access::Write);
                }
            });
        }
        if let Some(exchange) = self.exchange {
            visit(exchange, Access::Update);
        }
    }

    /// A text of everything that decides how long it takes; `None` unless it is the layers of a decode step.
    pub(crate) fn shape_text(&self) -> Option<String> {
        let Layer { qkv, attention, up, .. } = Layer::of(self.members.get(..5)?)?;
        let (kv, count) = (&attention.kv, self.members.len() / 5);
        Some(format!(
            "layers {count}x{}x{}:{} {}:{}x{} {:?}",
            qkv.x.rows,
            qkv.x.cols,
            up.y.cols,
            attention.q_heads,
            kv.heads,
            kv.head_dim,
            qkv.w.dtype
        ))
    }

    /// Why the persistent kernel cannot run these members on `target`; `None` if it can.
    pub(crate) fn unfit(&self, target: &Target) -> Option<String> {
        self.plan(target).err()
    }

    pub(crate) fn exchange_bytes(&self, target: &Target) -> u64 {
        self.plan(target).map_or(0, |plan| plan.words() * 8)
    }

    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let refused = |problem: String| Error::Contract { op: NAME.into(), problem };
        let plan = self.plan(target).map_err(|why| refused(format!("no kernel: {why}")))?;
        let needs = plan.words() * 8;
        let exchange = self.exchange.filter(|exchange| exchange.len >= needs).ok_or_else(|| {
            let room = self.exchange.map_or(0, |exchange| exchange.len);
            refused(format!("the kernel needs {needs} bytes to exchange and has {room}"))
        })?;
        Ok(vec![plan.launch(target, exchange)])
    }

    fn plan(&self, target: &Target) -> std::result::Result<Plan, String> {
        fits(target.capability.0 == 9, || "the kernel is for compute capability 9".into())?;
        let layers = self.members.chunks(5).map(Layer::of).collect::<Option<Vec<_>>>();
        let layers = layers.ok_or("the members are not layers of five nodes")?;
        Plan::new(layers, target)
    }
}

/// The five members of a layer.
struct Layer {
    qkv: LinearChain,
    norm1: Norm,
    attention: Attention,
    rope: RopeKv,
    o: LinearChain,
    up: LinearChain,
    norm2: Norm,
    down: LinearChain,
}

impl Layer {
    fn of(members: &[Op]) -> Option<Layer> {
        let [qkv, attention, o, up, down] = members else { return None };
        let AttentionChain { attention, rope } = AttentionChain::of(attention)?;
        let [Some(qkv), Some(o), Some(up), Some(down)] = [qkv, o, up, down].map(LinearChain::of)
        else {
            return None;
        };
        let (norm1, norm2, rope) = (qkv.norm?, up.norm?, *rope?);
        Some(Layer { qkv, norm1, attention, rope, o, up, norm2, down })
    }

    /// Whether each member works on the output of the previous one, in place and in bf16.
    fn chained(&self) -> bool {
        let Layer { qkv, attention, rope, o, up, down, .. } = self;
        let adds = |linear: &LinearChain, x: Tensor| {
            linear.epilogue == Epilogue::Residual(x) && linear.y == x && linear.norm.is_none()
        };
        let x = qkv.x;
        let products = [qkv, o, up, down];
        qkv.epilogue == Epilogue::Store
            && up.epilogue == Epilogue::GateMul(Activation::Silu)
            && adds(o, x)
            && adds(down, x)
            && (qkv.y, attention.out, up.x, up.y) == (attention.qkv, o.x, x, down.x)
            && rope.qkv == attention.qkv
            && products.iter().all(|linear| linear.bias.is_none() && linear.lora.is_none())
            && products.iter().all(|linear| plain(&linear.w))
            && products.iter().all(|linear| linear.handoff.is_nothing())
            && rope.pairs.is_halves()
            && self
                .norms()
                .all(|norm| norm.weight.dtype == self.norm1.weight.dtype && aligned(&norm.weight))
            && matches!(self.norm1.weight.dtype, DType::BF16 | DType::F32)
            && [x, qkv.y, attention.out, up.y].iter().all(bf16)
            && attention.kv.dtype == DType::BF16
            && attention.single
            && attention.window.is_none()
            && attention.softcap.is_none()
            && attention.sinks.is_none()
            && attention.kv.page_size == 16
            && attention.kv.span.offset.is_multiple_of(16)
            && attention.rows == x.rows
    }

    fn norms(&self) -> impl Iterator<Item = Norm> {
        let all = [Some(self.norm1), Some(self.norm2), self.rope.q_norm, self.rope.k_norm];
        all.into_iter().flatten()
    }

    /// Everything that all layers must have in common.
    fn form(&self) -> Form {
        let (attention, kv) = (&self.attention, &self.attention.kv);
        let eps = |norm: Option<Norm>| norm.map_or(0.0, |norm| norm.eps);
        Form {
            rows: self.qkv.x.rows,
            hidden: self.qkv.x.cols,
            inner: self.up.y.cols,
            q_heads: attention.q_heads,
            kv_heads: kv.heads,
            dim: kv.head_dim,
            q_norm: self.rope.q_norm.is_some(),
            k_norm: self.rope.k_norm.is_some(),
            norms: self.norm1.weight.dtype,
            x: self.qkv.x,
            rope: self.rope.rope,
            numbers: [
                attention.scale,
                self.norm1.eps,
                self.norm2.eps,
                eps(self.rope.q_norm),
                eps(self.rope.k_norm),
            ],
        }
    }

    fn addresses(&self) -> [Span; 9] {
        // A model without head norms never reads their weights, so any address will do.
        let weight = |norm: Option<Norm>| norm.unwrap_or(self.norm1).weight.span;
        [
            self.qkv.w.span,
            self.o.w.span,
            self.up.w.span,
            self.down.w.span,
            self.norm1.weight.span,
            self.norm2.weight.span,
            weight(self.rope.q_norm),
            weight(self.rope.k_norm),
            self.attention.kv.span,
        ]
    }
}

#[derive(Clone, Copy, PartialEq)]
struct Form {
    rows: u32,
    hidden: u32,
    inner: u32,
    q_heads: u32,
    kv_heads: u32,
    dim: u32,
    q_norm: bool,
    k_norm: bool,
    norms: DType,
    x: Tensor,
    /// The table of rotations.
    rope: Tensor,
    numbers: [f32; 5],
}

impl Form {
    fn qkv(&self) -> u32 {
        (self.q_heads + 2 * self.kv_heads) * self.dim
    }

    /// (columns, inner dimension) of the four linears.
    fn products(&self) -> [(u32, u32); 4] {
        let attended = self.q_heads * self.dim;
        [
            (self.qkv(), self.hidden),
            (self.hidden, attended),
            (2 * self.inner, self.hidden),
            (self.hidden, self.inner),
        ]
    }

    /// The number of blocks with the fewest bytes for the busiest block; of these, the fewest blocks, because all of
    /// them poll. Every block has a tile of gate and up, which the order of the exchange relies on.
    fn blocks(&self, sms: u32) -> u32 {
        let most = sms.min(self.inner / 4);
        let busiest = |blocks: u32| self.products().map(|(n, k)| tiles(n, blocks) * k).iter().sum();
        let cost = |blocks: &u32| -> (u32, u32) { (busiest(*blocks), *blocks) };
        (sms * 3 / 4..=most).min_by_key(cost).unwrap_or(0)
    }

    /// Bytes of shared memory for the warps' partial results.
    fn partial(&self, blocks: u32) -> u32 {
        let wide = tiles(self.qkv(), blocks).max(tiles(2 * self.inner, blocks)) * 8;
        let group = self.q_heads / self.kv_heads;
        let sums = self.rows * (wide.next_multiple_of(16) + 4);
        WARPS * sums.max(group * (self.dim + 4)) * 4
    }

    /// Dynamic shared memory beside the ring: two buffers of partial results that take turns, x, and the ring's
    /// alignment.
    fn beside(&self, blocks: u32) -> u32 {
        2 * self.partial(blocks) + WARPS * self.rows * SLICE + 1024
    }

    /// An upper bound of the kernel's static arrays.
    fn fixed(&self, layers: u32) -> u32 {
        layers * LAYER + 8 * (self.dim + 8) * 2 + self.dim * 8 + 3072
    }

    /// Registers of a thread while it receives the input of the output linear or of down.
    fn registers(&self) -> u32 {
        let rows = self.rows;
        // For each chunk, two words of 64 bits of each row.
        let received = rows * 4;
        // Units of a row: their words and scales; the row's sums, maximum and weight; and the rows that are complete.
        let combined = if rows <= 2 { 4 } else { 2 } * 6 + 6 + 2 * rows;
        let chunks = |columns: u32| columns.div_ceil(CHUNK);
        let down = chunks(self.inner) * (received + CHUNK_REGISTERS);
        let attended = chunks(self.q_heads * self.dim);
        let output = attended * (received.max(combined) + CHUNK_REGISTERS);
        // Four values of the residual stream for each row, in halves if there are many rows.
        let residual = rows * if rows <= 4 { 4 } else { 2 };
        down.max(output) + residual + OTHER_REGISTERS
    }

    /// Refuses what the kernel's tiles, warps and registers cannot hold.
    fn check(&self) -> std::result::Result<(), String> {
        let Form { rows, hidden, inner, q_heads, kv_heads, dim, .. } = *self;
        fits((1..=MOST_ROWS).contains(&rows), || format!("{rows} rows, of at most {MOST_ROWS}"))?;
        let heads = dim.is_multiple_of(64) && (64..=MOST_DIM).contains(&dim);
        fits(heads, || format!("heads of {dim}, which is not 64 or {MOST_DIM}"))?;
        let whole = [hidden, inner, q_heads * dim].iter().all(|size| size.is_multiple_of(64));
        fits(whole, || "rows are not multiples of 64".into())?;
        fits(hidden <= CHUNK, || {
            format!("a hidden size of {hidden}, and the warps hold {CHUNK} columns")
        })?;
        let grouped = q_heads.is_multiple_of(kv_heads) && q_heads / kv_heads <= MOST_GROUP;
        fits(grouped, || {
            format!("{q_heads} query heads for {kv_heads} KV heads, of at most {MOST_GROUP} each")
        })?;
        let registers = self.registers();
        fits(registers <= REGISTERS, || {
            format!("a thread needs {registers} registers and has {REGISTERS}")
        })
    }

    /// Replicas of each broadcast buffer.
    fn copies(&self) -> u32 {
        if self.rows <= 4 { 4 } else { 2 }
    }
}

/// The reason why there is no kernel, unless `holds`.
fn fits(holds: bool, why: impl FnOnce() -> String) -> std::result::Result<(), String> {
    if holds { Ok(()) } else { Err(why()) }
}

/// Tiles of eight columns that the busiest block has.
fn tiles(n: u32, blocks: u32) -> u32 {
    (n / 8).div_ceil(blocks)
}

fn bf16(tensor: &Tensor) -> bool {
    tensor.dtype == DType::BF16 && aligned(tensor)
}

fn plain(tensor: &Tensor) -> bool {
    bf16(tensor) && tensor.stride == tensor.cols
}

/// The pages of all layers as one span that starts at the first layer's, in whole lines of a head.
fn pages(layers: &[Layer]) -> Option<Span> {
    let spans = || layers.iter().map(|layer| layer.attention.kv.span);
    let (first, end) = (spans().next()?, spans().map(|span| span.offset + span.len).max()?);
    let line = u64::from(layers[0].attention.kv.head_dim) * 2;
    let in_line = |span: Span| {
        (span.arena, span.region) == (first.arena, first.region)
            && span.offset >= first.offset
            && (span.offset - first.offset).is_multiple_of(line)
    };
    let len = (end - first.offset) / line * line;
    (spans().all(in_line) && len / line < 1 << 31).then_some(Span { len, ..first })
}

struct Plan {
    layers: Vec<Layer>,
    form: Form,
    blocks: u32,
    stages: u32,
    pages: Span,
}

impl Plan {
    fn new(layers: Vec<Layer>, target: &Target) -> std::result::Result<Plan, String> {
        let form = layers.first().ok_or("there are no layers")?.form();
        let (count, sms) = (layers.len(), target.sms);
        fits(count <= MOST_LAYERS, || {
            format!("{count} layers, and the argument table holds {MOST_LAYERS}")
        })?;
        fits(layers.iter().all(|layer| layer.chained() && layer.form() == form), || {
            "the layers are not alike, or not plain bf16".into()
        })?;
        form.check()?;
        // A block has one tile of the output linear and of down, and each row needs a slot for its attention.
        let (blocks, rows) = (form.blocks(sms), form.rows);
        fits(blocks >= form.hidden / 8 && blocks / form.kv_heads >= rows, || {
            format!("too few multiprocessors for {rows} rows of {}: {sms}", form.hidden)
        })?;
        let taken = form.beside(blocks) + form.fixed(count as u32);
        let stages = target.shared_per_block.saturating_sub(taken) / STAGE;
        // A round of attention takes one stage for each warp.
        fits(stages >= WARPS, || {
            let (room, needs) = (target.shared_per_block, taken + WARPS * STAGE);
            format!("a block needs {needs} bytes of shared memory and has {room}")
        })?;
        let pages = pages(&layers).ok_or("the layers' pages are not one span of whole lines")?;
        Ok(Plan { layers, form, blocks, stages, pages })
    }

    /// 64-bit words of the exchange.
    fn words(&self) -> u64 {
        let form = &self.form;
        let slots = self.blocks / form.kv_heads;
        let parts =
            slots * form.q_heads * form.dim / 2 + (slots * form.q_heads).next_multiple_of(16);
        let rows = form.rows * (form.inner + 2 * form.hidden) / 2;
        u64::from(32 + form.rows * form.qkv() / 2 + form.copies() * (parts + rows))
    }

    fn launch(&self, target: &Target, exchange: Span) -> Lowered {
        let form = &self.form;
        let first = &self.layers[0];
        let (state, rope) = (&first.attention.state, &first.rope.rope);
        let numbers = form.numbers.map(Arg::F32);
        let lines = self.pages.len / (u64::from(form.dim) * 2);
        let pages = TensorMap {
            span: self.pages,
            dtype: DType::BF16,
            dims: vec![form.dim.into(), lines],
            strides: vec![u64::from(form.dim) * 2],
            tile: vec![64, 16],
            swizzle: 128,
        };
        let kernel = Kernel::new(target, "persistent", "persistent")
            .defines(&[
                ("H", form.hidden),
                ("I", form.inner),
                ("D", form.dim),
                ("HQ", form.q_heads),
                ("HKV", form.kv_heads),
                ("LAYERS", self.layers.len() as u32),
                ("ROWS", form.rows),
                ("BLOCKS", self.blocks),
                ("STAGES", self.stages),
                ("COPIES", form.copies()),
                ("QN", u32::from(form.q_norm)),
                ("KN", u32::from(form.k_norm)),
                ("NT", if form.norms == DType::F32 { 0 } else { 2 }),
            ])
            .grid(self.blocks, 1, 1)
            .threads(THREADS)
            .shared(STAGE * self.stages + form.beside(self.blocks))
            .arg(Arg::Addresses(self.layers.iter().flat_map(Layer::addresses).collect()))
            .arg(Arg::TensorMap(pages))
            .tensors(&[&form.x])
            .spans(&[exchange])
            .tensors(&[&state.row_seat, &state.kv_len, &state.page_table, rope])
            .ints(&[(exchange.len / 8) as u32, state.limits.pages_per_seat, form.x.stride])
            .ints(&[rope.stride, rope.rows]);
        numbers.into_iter().fold(kernel, Kernel::arg).lowered()
    }
}
