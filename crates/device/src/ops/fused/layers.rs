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
/// Bytes of a stage: 8 rows of 1,024 weights with room between them, or two pages of a KV head.
const STAGE: u32 = 17 << 10;
/// Bytes of a row of a warp's slice of x.
const SLICE: u32 = 256 + 64;
/// The limit of the argument table: 4 KiB of parameters, nine addresses per layer.
const MOST_LAYERS: usize = 48;

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
    pub(crate) fn unfit(&self, target: &Target) -> Option<&'static str> {
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

    fn plan(&self, target: &Target) -> std::result::Result<Plan, &'static str> {
        if target.capability.0 != 9 {
            return Err("the kernel is for compute capability 9");
        }
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
            && products.iter().all(|linear| linear.bias.is_none() && plain(&linear.w))
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
        layers * 72 + 8 * (self.dim + 8) * 2 + self.dim * 8 + 3072
    }

    /// Replicas of each broadcast buffer.
    fn copies(&self) -> u32 {
        if self.rows <= 4 { 4 } else { 2 }
    }
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
    fn new(layers: Vec<Layer>, target: &Target) -> std::result::Result<Plan, &'static str> {
        let form = layers.first().ok_or("there are no layers")?.form();
        if layers.len() > MOST_LAYERS {
            return Err("more layers than the argument table holds");
        }
        if !layers.iter().all(|layer| layer.chained() && layer.form() == form) {
            return Err("the layers are not alike, or not plain bf16");
        }
        if !(1..=8).contains(&form.rows) {
            return Err("more than 8 rows");
        }
        let whole = [form.hidden, form.inner, form.q_heads * form.dim];
        if !matches!(form.dim, 64 | 128) || !whole.iter().all(|size| size.is_multiple_of(64)) {
            return Err("heads are not of 64 or 128, or rows not multiples of 64");
        }
        if form.hidden > 1024 || form.inner > 3072 || form.q_heads * form.dim > 2048 {
            return Err("the layers are too large");
        }
        if !form.q_heads.is_multiple_of(form.kv_heads) || form.q_heads / form.kv_heads > 6 {
            return Err("more than 6 query heads per KV head");
        }
        let blocks = form.blocks(target.sms);
        if blocks < form.hidden / 8 || blocks / form.kv_heads < form.rows {
            return Err("too few multiprocessors, or too many rows for them");
        }
        let taken = form.beside(blocks) + form.fixed(layers.len() as u32);
        let stages = target.shared_per_block.saturating_sub(taken) / STAGE;
        // A round of attention takes one stage for each warp.
        if stages < WARPS {
            return Err("too little shared memory for a ring");
        }
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
            .threads(WARPS * 32 + 32)
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
