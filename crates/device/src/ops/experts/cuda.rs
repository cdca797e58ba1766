//! Experts on a GPU. On Hopper, with weights in bf16, e4m3 or MXFP4: a plan of which tokens each expert has
//! (`kernels/experts_plan.cu`), both GEMMs in one launch (`experts.cu`), the sum (`experts_sum.cu`); large steps read a copy
//! of the tokens in the plan's order (`experts_gather.cu`). Elsewhere, and for experts without a gate, `experts_ref.cu`.

use super::shape::Shape;
use super::{Clamp, Experts};
use crate::cuda::launch::{Lowered, Target};
use crate::cuda::lower::{Kernel, SEMAPHORE_BYTES, aligned, code};
use crate::ops::Named;
use crate::ops::linear::hand::tiled;
use crate::variant::Pick;
use crate::{ALIGN, DType, Error, Result, Span, Tensor};

/// Where the plan of a step lies in the scratch of experts, which the router before them may have made.
#[derive(Clone, Copy)]
pub(crate) struct PlanRoom {
    counts: Span,
    offsets: Span,
    rows: Span,
    place: Span,
    gains: Span,
    tasks: Span,
    ready: Span,
    head: Span,
    most_tasks: u32,
    /// Of everything up to here, from the start of the scratch.
    pub(crate) bytes: u64,
}

impl PlanRoom {
    /// For so many assignments of tokens, in tasks of `tile`.
    pub(crate) fn new(scratch: Span, assignments: u32, experts: u32, tile: u32) -> PlanRoom {
        let most_tasks = assignments.min(assignments / tile + experts).max(16);
        let mut bytes = SEMAPHORE_BYTES;
        let mut words = |count: u32| take(scratch, &mut bytes, u64::from(count) * 4);
        let (counts, offsets) = (words(experts), words(experts + 1));
        let (rows, place, gains) = (words(assignments), words(assignments), words(assignments));
        let (tasks, ready, head) = (words(4 * most_tasks), words(most_tasks), words(1));
        PlanRoom { counts, offsets, rows, place, gains, tasks, ready, head, most_tasks, bytes }
    }

    /// The plan as arguments, and where the step is counted.
    pub(crate) fn arguments(&self, kernel: Kernel, load: Option<Span>) -> Kernel {
        kernel
            .spans(&[self.counts, self.offsets, self.rows, self.place, self.gains])
            .spans(&[self.tasks, self.ready, self.head])
            .ints(&[self.most_tasks])
            .optional(load)
    }
}

/// The next `len` bytes of the scratch.
fn take(scratch: Span, bytes: &mut u64, len: u64) -> Span {
    let span = Span { offset: scratch.offset + *bytes, len, ..scratch };
    *bytes += len.next_multiple_of(ALIGN);
    span
}

/// Everything that the launches share, in the op's scratch.
struct Room {
    plan: PlanRoom,
    /// What lies between the two GEMMs.
    act: Tensor,
    /// The weighed output of each assignment.
    parts: Tensor,
    /// Tokens in the order of the plan.
    near: Option<Tensor>,
    bytes: u64,
}

impl Experts {
    /// Tokens of a task, if the router can make the plan of this op: few tokens, and none of them split.
    pub(crate) fn plan_tile(&self, target: &Target) -> Option<u32> {
        let shape = self.shape(target)?;
        (self.x.rows <= shape.tile.min(16)).then_some(shape.tile)
    }

    fn room(&self, shape: Shape, scratch: Span) -> Room {
        let n = self.x.rows * self.top();
        let plan = PlanRoom::new(scratch, n, self.experts, shape.tile);
        let mut bytes = plan.bytes;
        // A tensor copy reads whole boxes, beyond the last assignment.
        let padded = n.next_multiple_of(64);
        let mut halves = |cols: u32| {
            let len = 2 * u64::from(padded) * u64::from(cols);
            Tensor::dense(take(scratch, &mut bytes, len), DType::BF16, padded, cols)
        };
        let (act, parts) = (halves(self.inner()), halves(self.x.cols));
        let near = shape.gathered.then(|| halves(self.x.cols));
        Room { plan, act, parts, near, bytes }
    }

    pub(super) fn cuda_scratch(&self, target: &Target) -> u64 {
        let none = Span { offset: 0, len: 0, ..self.x.span };
        match self.shape(target) {
            Some(shape) => self.room(shape, none).bytes,
            None => SEMAPHORE_BYTES + self.act_bytes(),
        }
    }

    /// Bytes between the reference's two launches.
    fn act_bytes(&self) -> u64 {
        let n = u64::from(self.x.rows) * u64::from(self.top());
        n * self.x.dtype.bytes(self.inner() as usize) as u64
    }

    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let needed = self.cuda_scratch(target);
        let scratch =
            self.scratch.filter(|span| span.len >= needed).ok_or_else(|| Error::Contract {
                op: Self::NAME.into(),
                problem: format!("{needed} bytes of scratch are needed"),
            })?;
        match self.shape(target) {
            None if matches!(self.pick, Pick::Named(named) if !named.reference) => {
                let problem = format!("no kernel of the variant {} fits", self.pick);
                Err(Error::Contract { op: Self::NAME.into(), problem })
            }
            Some(shape) => self.planned(target, shape, &self.room(shape, scratch)),
            None => self.reference_launches(target, scratch),
        }
    }

    fn planned(&self, target: &Target, shape: Shape, room: &Room) -> Result<Vec<Lowered>> {
        let (rows, wide, top) = (self.x.rows, self.x.cols, self.top());
        let mut launches = Vec::new();
        if !self.planned {
            launches.push(self.plan_launch(target, shape, room));
        }
        if let Some(near) = &room.near {
            let gather = Kernel::new(target, "experts_gather", "experts_gather")
                .defines(&[("H", wide), ("TOP", top)])
                .grid(rows, 1, 1)
                .threads(wide / 8)
                .tensors(&[&self.x])
                .spans(&[room.plan.place])
                .tensors(&[near])
                .optional(self.live)
                .ints(&[rows, self.x.stride]);
            launches.push(gather.lowered());
        }
        launches.push(self.gemms(target, shape, room)?);
        let sum = Kernel::new(target, "experts_sum", "experts_sum")
            .defines(&[("H", wide), ("TOP", top)])
            .define("RESIDUAL", u32::from(self.residual.is_some()))
            .grid((rows * (wide / 8)).div_ceil(256), 1, 1)
            .tensors(&[&room.parts])
            .optional(self.residual.map(|residual| residual.span))
            .tensors(&[&self.y])
            .optional(self.live)
            .ints(&[rows]);
        launches.push(sum.lowered());
        Ok(launches)
    }

    fn plan_launch(&self, target: &Target, shape: Shape, room: &Room) -> Lowered {
        let (rows, experts, top) = (self.x.rows, self.experts, self.top());
        let shares = match rows {
            0..=128 => 1,
            129..=256 => 2,
            257..=512 => 4,
            _ => 8,
        };
        // The bits of a chunk of tokens are in shared memory at once; half as many fit more experts.
        let most = if experts > 128 { 512 } else { 2048 };
        let chunk = if rows <= 256 * shares { 256 } else { most };
        let kernel = Kernel::new(target, "experts_plan", "experts_plan")
            .defines(&[("E", experts), ("SPREAD", experts.next_power_of_two().max(32))])
            .defines(&[("TOP", top), ("TILE", shape.tile), ("SHARES", shares), ("CHUNK", chunk)])
            .grid(shares, 1, 1)
            .cluster(shares)
            .threads(1024)
            .shared(experts * (chunk / 32 + 1) * 6)
            .tensors(&[&self.choice])
            .optional(self.live)
            .ints(&[rows]);
        room.plan.arguments(kernel, self.load).lowered()
    }

    fn gemms(&self, target: &Target, shape: Shape, room: &Room) -> Result<Lowered> {
        let cluster = if shape.gathered { 2 } else { 1 };
        let flag = |set: bool| u32::from(set);
        let boxes = shape.tile.min(64);
        let kernel = Kernel::new(target, "experts", "experts")
            .defines(&[("H", self.x.cols), ("I", self.inner()), ("TOP", self.top())])
            .defines(&[("ACT", self.act.code()), ("UP_WIDE", shape.up), ("DOWN_WIDE", shape.down)])
            .defines(&[("TILE", shape.tile), ("STAGES", shape.stages()), ("DEPTH", shape.depth)])
            .defines(&[("PHASES", 3), ("PASS", flag(!shape.gathered)), ("COPIERS", shape.copiers)])
            .defines(&[("GATHERED", flag(shape.gathered)), ("CLUSTER", cluster)])
            // Blocks wait for each other: all must be resident at once.
            .grid(target.sms / cluster * cluster, 1, 1)
            .cluster(cluster)
            .threads(shape.wide() * 2 + 128)
            .shared(shape.stages() * shape.stage_bytes() + 1024)
            .arg(shape.weights(&self.gate_up, shape.up))
            .arg(shape.weights(&self.down, shape.down))
            .arg(tiled(room.near.as_ref().unwrap_or(&room.parts), boxes))
            .arg(tiled(&room.act, boxes))
            .tensors(&[&self.x])
            .spans(&[room.plan.tasks, room.plan.head, room.plan.rows])
            .spans(&[room.plan.gains, room.plan.ready])
            .tensors(&[&room.act, &room.parts])
            .ints(&[self.x.stride]);
        let kernel = self.gating(shape.format(kernel, self));
        let kernel = kernel.bias("UP_BIAS", &self.gate_up_bias)?;
        Ok(kernel.bias("DOWN_BIAS", &self.down_bias)?.lowered())
    }

    /// The limits of gates as constants; without any the macros stay undefined.
    fn gating(&self, kernel: Kernel) -> Kernel {
        let Some(Clamp { alpha, limit }) = self.clamp else { return kernel };
        kernel.define("ALPHA", format!("{alpha:?}f")).define("LIMIT", format!("{limit:?}f"))
    }

    fn reference_launches(&self, target: &Target, scratch: Span) -> Result<Vec<Lowered>> {
        let (rows, wide, inner, top) = (self.x.rows, self.x.cols, self.inner(), self.top());
        let act = scratch.part(SEMAPHORE_BYTES, self.act_bytes());
        let weights = [&self.gate_up, &self.down];
        let even = weights.iter().all(|w| !w.dtype.is_plain() || aligned(w));
        let residual = self.residual.map_or(self.x.dtype, |residual| residual.dtype);
        let kernel = |entry: &str| {
            Ok::<_, Error>(
                Kernel::new(target, "experts_ref", entry)
                    .defines(&[
                        ("XT", code(self.x.dtype, Self::NAME)?),
                        ("UT", code(self.gate_up.dtype, Self::NAME)?),
                    ])
                    .defines(&[
                        ("DT", code(self.down.dtype, Self::NAME)?),
                        ("RT", code(residual, Self::NAME)?),
                    ])
                    .defines(&[
                        ("YT", code(self.y.dtype, Self::NAME)?),
                        ("H", wide),
                        ("I", inner),
                        ("TOP", top),
                        ("EXPERTS", self.experts),
                    ])
                    .defines(&[
                        ("ACT", if self.is_gated() { self.act.code() } else { 2 }),
                        ("GATED", u32::from(self.is_gated())),
                        ("RESIDUAL", u32::from(self.residual.is_some())),
                    ])
                    .define(
                        "ALIGNED",
                        u32::from(aligned(&self.x) && even && inner.is_multiple_of(8)),
                    ),
            )
        };
        let [up_bias, down_bias] = [&self.gate_up_bias, &self.down_bias];
        let up = kernel("experts_up")?
            .grid(rows * top, inner.div_ceil(8), 1)
            .tensors(&[&self.x, &self.choice, &self.gate_up])
            .spans(&[act])
            .optional(self.live)
            .ints(&[rows, self.x.stride]);
        let up = self.gating(up).bias("UP_BIAS", up_bias)?;
        let down = kernel("experts_down")?
            .grid(rows, wide.div_ceil(8), 1)
            .spans(&[act])
            .tensors(&[&self.choice, &self.down])
            .optional(self.residual.map(|residual| residual.span))
            .tensors(&[&self.y])
            .optional(self.live)
            .ints(&[rows, self.residual.map_or(0, |residual| residual.stride), self.y.stride])
            .bias("DOWN_BIAS", down_bias)?;
        let mut launches = vec![up.lowered(), down.lowered()];
        if let Some(load) = self.load {
            let count = Kernel::new(target, "experts_count", "experts_count")
                .defines(&[("E", self.experts), ("TOP", top)])
                .tensors(&[&self.choice])
                .optional(self.live)
                .ints(&[rows])
                .spans(&[load]);
            launches.push(count.lowered());
        }
        Ok(launches)
    }
}

impl Kernel {
    /// A bias as the next argument, and its type as a macro; without one the kernel has neither.
    fn bias(self, name: &str, bias: &Option<Tensor>) -> Result<Kernel> {
        let Some(bias) = bias else { return Ok(self) };
        Ok(self.define(name, code(bias.dtype, <Experts as Named>::NAME)?).spans(&[bias.span]))
    }
}
