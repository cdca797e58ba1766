//! A small model on a device, with everything that tests inspect.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its own part")]

pub mod random;

use device::op::Noise;
use device::{Arena, Device, DeviceChoice, Node, Op, Region, Span, StepLimits};
use graph::backend::{BackendKind, Context};
use graph::bucket::{BucketSpec, Buckets};
use graph::layout::{Layout, rope_table};
use graph::program::Program;
use graph::runner::{RunnerConfig, Runners};
use graph::{Bindings, CompileTarget, Phase, Prep, ShapeKey};

/// For every seat, in up to three page tables.
pub const PAGES: u32 = 100;

pub fn limits(program: &Program) -> StepLimits {
    StepLimits {
        seats: 8,
        rows: 8,
        tokens: 40,
        pages_per_seat: 4,
        page_size: 4,
        vocab: program.shape.vocab,
        penalties: true,
        tokens_per_row: 1,
        tables: program.kept().tables().max(1),
    }
}

/// A device of this machine and what to compile for it.
pub struct Place {
    pub target: CompileTarget,
    device: Device,
}

impl Place {
    /// The CPU, by the ops' references.
    pub fn cpu() -> Place {
        let device = device::cpu::open(Some(1), false).unwrap();
        Place { target: CompileTarget::cpu(), device }
    }

    /// The CPU, and a GPU when there is one; prints a message when there is none. `DACAPO_TEST_DEVICE=cuda` leaves the
    /// CPU out.
    pub fn all() -> Vec<Place> {
        let only_gpu = std::env::var("DACAPO_TEST_DEVICE").is_ok_and(|only| only == "cuda");
        let mut places = if only_gpu { Vec::new() } else { vec![Self::cpu()] };
        match Device::open(DeviceChoice::Cuda(0)) {
            Ok((device, _)) => {
                let target = CompileTarget::new(device.target());
                places.push(Place { target, device });
            }
            Err(reason) if only_gpu => panic!("DACAPO_TEST_DEVICE asks for a GPU: {reason}"),
            Err(reason) => eprintln!("skipped: no GPU ({reason})"),
        }
        places
    }

    pub fn is_gpu(&self) -> bool {
        self.device.gpu().is_some()
    }

    pub fn world(&self, program: &Program) -> World {
        World::on(self.device.clone(), program, &self.target)
    }

    pub fn prepared(&self, program: &Program, prep: Prep) -> World {
        World::prepared(self.device.clone(), program, &self.target, prep)
    }

    /// With other limits and another number of pages.
    pub fn world_of(&self, program: &Program, limits: StepLimits, pages: u32) -> World {
        World::sized(self.device.clone(), program, &self.target, Prep::Device, limits, pages)
    }
}

pub struct World {
    pub device: Device,
    pub arena: Arena,
    pub program: Program,
    pub bindings: Bindings,
    pub limits: StepLimits,
}

impl World {
    /// On the CPU.
    pub fn new(program: &Program, target: &CompileTarget) -> World {
        Self::on(Place::cpu().device, program, target)
    }

    pub fn on(device: Device, program: &Program, target: &CompileTarget) -> World {
        Self::prepared(device, program, target, Prep::Device)
    }

    /// With what the host needs to prepare decode steps.
    pub fn prepared(
        device: Device,
        program: &Program,
        target: &CompileTarget,
        prep: Prep,
    ) -> World {
        Self::sized(device, program, target, prep, limits(program), PAGES)
    }

    fn sized(
        device: Device,
        program: &Program,
        target: &CompileTarget,
        prep: Prep,
        limits: StepLimits,
        pages: u32,
    ) -> World {
        let mut keys = Vec::new();
        for (phase, max) in [(Phase::Decode, limits.rows), (Phase::Prefill, limits.tokens)] {
            keys.extend(buckets("auto", phase, max).keys(&limits));
        }
        // Of a step with several tokens in every row, as far as there is room for them.
        let rows = (limits.tokens / limits.tokens_per_row).min(limits.rows);
        keys.push(ShapeKey::verify(rows, limits.tokens_per_row));
        let mut layout = Layout::new(program, target, limits, &keys).unwrap();
        layout.add_inputs(prep).unwrap();
        layout.add_pages(program, pages);
        let Layout { arena, bindings } = layout;
        let arena = device.seal(arena).unwrap();
        let world = World { device, arena, program: program.clone(), bindings, limits };
        world.fill_weights();
        world
    }

    fn fill_weights(&self) {
        for (seed, (name, tensor)) in self.bindings.weights.iter().enumerate() {
            let norm = name.contains("norm");
            let (mean, scale) = if norm { (1.0, 0.2) } else { (0.0, 0.3) };
            let op = Op::Noise(Noise { to: *tensor, seed: seed as u64 + 1, mean, scale });
            self.device.run(&self.arena, &Node { op, name: name.clone(), layer: None }).unwrap();
        }
        let shape = &self.program.shape;
        let half = shape.head_dim / 2;
        for (table, base) in self.bindings.ropes.iter().zip([10_000f32, 100.0]) {
            let frequency = |i: u32| base.powf(-(i as f32) / half as f32);
            let frequencies: Vec<f32> = (0..half).map(frequency).collect();
            let numbers = rope_table(shape.max_positions, &frequencies);
            let bytes: Vec<u8> = numbers.iter().flat_map(|value| value.to_le_bytes()).collect();
            self.device.write(&self.arena, table.span, &bytes).unwrap();
        }
    }

    pub fn context(&self) -> Context<'_> {
        let options = device::RecordOptions::default();
        Context::new(&self.device, &self.arena, options)
    }

    pub fn runners(
        &self,
        target: &CompileTarget,
        backend: BackendKind,
        lists: (&str, &str),
    ) -> Runners {
        self.runners_with(target, lists, &|buckets| RunnerConfig::new(backend, buckets))
    }

    pub fn runners_with(
        &self,
        target: &CompileTarget,
        lists: (&str, &str),
        config: &dyn Fn(Buckets) -> RunnerConfig,
    ) -> Runners {
        let decode = config(buckets(lists.0, Phase::Decode, self.limits.rows));
        let prefill = config(buckets(lists.1, Phase::Prefill, self.limits.tokens));
        let (program, bindings) = (self.program.clone(), self.bindings.clone());
        let (device, arena) = (&self.device, &self.arena);
        let mut runners =
            Runners::new(device, arena, program, target.clone(), bindings, decode, prefill)
                .unwrap();
        runners.record_all(&mut |_, _| {}).unwrap();
        runners
    }

    pub fn read(&self, span: Span) -> Vec<u8> {
        self.device.read(&self.arena, span).unwrap()
    }

    pub fn region(&self, region: Region) -> Span {
        Span { arena: self.arena.id(), region, offset: 0, len: self.arena.size(region) }
    }

    /// All state that outlives a step and must be reproducible. Left out: kernels' own scratch, and the
    /// scratch page, which pad rows write in no fixed order.
    pub fn memory(&self) -> [Vec<u8>; 2] {
        let mut state = self.read(self.region(Region::State));
        let mut kv = self.read(self.region(Region::Kv));
        if let Some(scratch) = self.bindings.scratch {
            blank(&mut state, scratch);
        }
        for layer in &self.bindings.kv {
            blank(&mut kv, layer.span.part(0, layer.page_bytes()));
        }
        [state, kv]
    }
}

fn blank(bytes: &mut [u8], span: Span) {
    bytes[span.offset as usize..][..span.len as usize].fill(0);
}

pub fn buckets(list: &str, phase: Phase, max: u32) -> Buckets {
    let spec: BucketSpec = list.parse().unwrap();
    Buckets::generate(&spec, phase, max, None).unwrap()
}
