//! Lays a model out in an open arena: weights, tables, workspace, pages. The result is plain data; it
//! becomes memory only when a device seals the arena, so planning a 70 GB model needs none.

use crate::compile::fuse::Fusion;
use crate::compile::{
    Bindings, CompileError, CompileTarget, exchange_bytes, merge, scratch_bytes, workspace_bytes,
};
use crate::program::{Cache, Carry, Input, Program, RopeTable};
use crate::{Phase, Prep, ShapeKey};
use device::op::KvLayer;
use device::step::HostInputs;
use device::{ALIGN, DType, OpenArena, Region, Span, StepLimits, StepState, Tensor};

/// A model laid out up to the KV region, which takes what is left.
#[derive(Debug)]
pub struct Layout {
    /// Not sealed yet.
    pub arena: OpenArena,
    /// Complete but for `kv`.
    pub bindings: Bindings,
}

impl Layout {
    /// Takes space for weights, rope table, step state and a workspace that serves every key of
    /// `keys` and the largest steps the limits allow, graph or no graph (the largest one's bytes:
    /// buckets share it).
    pub fn new(
        program: &Program,
        target: &CompileTarget,
        limits: StepLimits,
        keys: &[ShapeKey],
    ) -> Result<Layout, CompileError> {
        Self::with_others(program, &[], target, limits, keys)
    }

    /// As [`Layout::new`], with room for the largest steps of `others`: programs over the same weights that publish
    /// vectors. Their other steps need no more than those of `program`, which has the same layers.
    pub fn with_others(
        program: &Program,
        others: &[Program],
        target: &CompileTarget,
        limits: StepLimits,
        keys: &[ShapeKey],
    ) -> Result<Layout, CompileError> {
        let (mut workspace, mut scratch) = (0, 0);
        let rows = limits.rows.min(limits.tokens);
        let fixed = keys.first().is_some_and(|key| key.fixed);
        let largest = [ShapeKey::decode(rows), ShapeKey::prefill(limits.tokens, rows)]
            .map(|key| key.with_fixed(fixed));
        for other in others {
            let largest = largest.iter().filter(|key| other.phases.contains(&key.phase));
            for key in largest {
                workspace = workspace.max(workspace_bytes(other, target, &limits, key)?);
                scratch = scratch.max(scratch_bytes(other, target, &limits, key)?);
            }
        }
        let largest = largest.iter().filter(|key| program.phases.contains(&key.phase));
        let adapted = program.has_adapters();
        for key in largest.clone().chain(keys) {
            for key in [*key, key.with_adapters(adapted)] {
                workspace = workspace.max(workspace_bytes(program, target, &limits, &key)?);
                scratch = scratch.max(scratch_bytes(program, target, &limits, &key)?);
            }
        }
        if adapted {
            // Steps of fewer tokens than the largest may have adapters in their linears, which takes more scratch, or
            // beside them, which takes more workspace.
            let beside = Some(Fusion { adapters: false, ..Fusion::ALL });
            let beside = CompileTarget { fusion: target.fusion.or(beside), ..target.clone() };
            let inside = (1..=limits.tokens).rev().find(|&some| target.device.adapts_rows(some));
            for key in largest.clone().map(|key| key.with_adapters(true)) {
                workspace = workspace.max(workspace_bytes(program, &beside, &limits, &key)?);
                let Some(tokens) = inside.filter(|tokens| *tokens < key.tokens) else { continue };
                let key = ShapeKey { tokens, rows: tokens.min(key.rows), ..key };
                workspace = workspace.max(workspace_bytes(program, target, &limits, &key)?);
                scratch = scratch.max(scratch_bytes(program, target, &limits, &key)?);
            }
        }
        let mut layout = Self::with_sizes(program, limits, workspace, scratch)?;
        if let Some(width) = others.iter().filter_map(Program::publishes).max() {
            let (state, arena) = (layout.bindings.state, &mut layout.arena);
            let mut alloc = |region, name: &'static str, bytes| arena.alloc(region, name, bytes);
            layout.bindings.state = state.with_vectors(width, &mut alloc);
        }
        // For every number of rows that can merge, bucket or no bucket.
        let mut exchange = 0;
        let most =
            if program.phases.contains(&Phase::Decode) { rows.min(merge::MOST_ROWS) } else { 0 };
        for key in (1..=most).map(ShapeKey::decode) {
            exchange = exchange.max(exchange_bytes(program, target, &limits, &key)?);
        }
        layout.bindings.exchange =
            (exchange > 0).then(|| layout.arena.alloc(Region::State, "exchange", exchange));
        Ok(layout)
    }

    /// A layout with one page per cache that never becomes memory; it only serves to ask kernels for their needs.
    pub(crate) fn imagined(
        program: &Program,
        limits: StepLimits,
        workspace: u64,
    ) -> Result<Layout, CompileError> {
        let mut layout = Self::with_sizes(program, limits, workspace, 0)?;
        layout.add_pages(program, 1);
        Ok(layout)
    }

    fn with_sizes(
        program: &Program,
        limits: StepLimits,
        workspace: u64,
        scratch: u64,
    ) -> Result<Layout, CompileError> {
        let mut arena = OpenArena::new();
        let mut weights = std::collections::BTreeMap::new();
        for weight in program.all_weights() {
            let span = arena.alloc(Region::Weights, "weights", weight.bytes());
            let tensor = Tensor::dense(span, weight.dtype, weight.rows, weight.cols);
            weights.insert(weight.name.clone(), tensor);
        }
        let positions = program.shape.max_positions;
        let table = |table: &RopeTable| {
            let bytes = u64::from(positions) * u64::from(table.dim) * 4;
            let span = arena.alloc(Region::Weights, "rope", bytes);
            Tensor::dense(span, DType::F32, positions, table.dim)
        };
        let ropes = program.ropes.iter().map(table).collect();
        let mut alloc = |region, name: &'static str, bytes| arena.alloc(region, name, bytes);
        let limits = StepLimits { tables: program.kept().tables().max(1), ..limits };
        let mut state = StepState::lay_out(limits, &mut alloc)?;
        if let Some(width) = program.publishes() {
            state = state.with_vectors(width, &mut alloc);
        }
        if program.drafter.is_some() {
            state = state.with_drafting(&mut alloc);
        }
        if let Some(shape) = program.drafter.as_ref().and_then(|drafter| drafter.features) {
            state = state.with_features(shape, &mut alloc);
        }
        let workspace = arena.alloc(Region::Workspace, "workspace", workspace);
        let scratch = (scratch > 0).then(|| arena.alloc(Region::State, "scratch", scratch));
        let given = |input: &Input| {
            let bytes = input.dtype.bytes(input.rows as usize * input.cols as usize) as u64;
            let span = arena.alloc(Region::State, "given", bytes);
            Tensor::dense(span, input.dtype, input.rows, input.cols)
        };
        let given = program.inputs.iter().map(given).collect();
        let carried = |carry: &Carry| {
            let cols = carry.seat_cols(&limits);
            let bytes = u64::from(limits.seats) * carry.bytes(cols);
            let span = arena.alloc(Region::Kv, "recurrent states", bytes);
            Tensor::dense(span, carry.dtype, limits.seats, cols)
        };
        let carries = program.carries.iter().map(carried).collect();
        let loads = program.experts().map(|experts| {
            let bytes = device::op::Experts::load_bytes(experts.count);
            (experts.gate_up.name.clone(), arena.alloc(Region::State, "expert load", bytes))
        });
        let loads = loads.collect();
        let bindings = Bindings {
            weights,
            ropes,
            state,
            kv: Vec::new(),
            tables: Vec::new(),
            carries,
            carry_copies: Vec::new(),
            given,
            workspace,
            scratch,
            loads,
            exchange: None,
            inputs: None,
        };
        Ok(Layout { arena, bindings })
    }

    /// Adds what `prep` needs to get the host's inputs to the device.
    pub fn add_inputs(&mut self, prep: Prep) -> Result<(), CompileError> {
        if prep != Prep::Device {
            let (limits, arena) = (self.bindings.state.limits, &mut self.arena);
            let alloc = |region, name: &'static str, bytes| arena.alloc(region, name, bytes);
            self.bindings.inputs = Some(HostInputs::lay_out(&limits, alloc)?);
        }
        Ok(())
    }

    /// Adds room for copies of what a seat carries.
    pub fn add_carry_copies(&mut self, program: &Program, slots: u32) {
        if slots == 0 {
            return;
        }
        for carry in &program.carries {
            let cols = carry.copied_cols(&self.bindings.state.limits);
            let bytes = u64::from(slots) * carry.bytes(cols);
            let span = self.arena.alloc(Region::Kv, "recurrent states of prefixes", bytes);
            let copies = Tensor::dense(span, carry.dtype, slots, cols);
            self.bindings.carry_copies.push(copies);
        }
    }

    /// Adds `pages` pages to every place of a page, the scratch page included. Caches at the same place have the same
    /// memory.
    pub fn add_pages(&mut self, program: &Program, pages: u32) {
        let kept = program.kept();
        let mut places = vec![None; kept.places as usize];
        for (index, cache) in program.caches.iter().enumerate() {
            let template = pages_of(cache, self.bindings.state.limits.page_size, pages);
            let bytes = template.page_bytes().saturating_mul(u64::from(pages));
            let place = &mut places[kept.place(index) as usize];
            let span = *place.get_or_insert_with(|| self.arena.alloc(Region::Kv, "pages", bytes));
            self.bindings.tables.push(kept.table(index));
            let scales = template.scale_bytes();
            let scales =
                (scales > 0).then(|| self.arena.alloc(Region::Weights, "page scales", scales));
            self.bindings.kv.push(KvLayer { span, scales, ..template });
        }
    }
}

/// Device bytes to reserve for recording graphs of the program, beside the KV pages. An upper
/// bound of what was measured; 0 where graphs live in host memory.
pub fn recording_room(program: &Program, target: &CompileTarget, keys: &[ShapeKey]) -> u64 {
    let nodes = |key: &ShapeKey| program.longest(key.q_len);
    keys.iter().map(nodes).sum::<u64>() * target.device.recorded_node_bytes()
}

/// Bytes of a page: of a page of tokens in every cache that it has room for.
pub fn page_bytes(program: &Program, page_size: u32) -> u64 {
    places(program).map(|cache| cache.token_bytes() * u64::from(page_size)).sum()
}

/// A cache of each place.
fn places(program: &Program) -> impl Iterator<Item = &Cache> {
    // Where caches share places, all have the same size.
    program.caches.iter().take(program.kept().places as usize)
}

/// How many pages fit `bytes`, the scratch page included: a page takes its bytes in every place. Exact: alignment of
/// each place counted.
pub fn pages_that_fit(program: &Program, page_size: u32, bytes: u64) -> u32 {
    let page = |cache: &Cache| cache.token_bytes() * u64::from(page_size);
    let taken = |pages: u64| {
        let each = |cache| page(cache).saturating_mul(pages).div_ceil(ALIGN).saturating_mul(ALIGN);
        places(program).map(each).fold(0u64, u64::saturating_add)
    };
    let all = page_bytes(program, page_size);
    let (mut fits, mut too_many) = (0, bytes.checked_div(all).unwrap_or(0) + 1);
    while fits + 1 < too_many {
        let middle = fits.midpoint(too_many);
        *(if taken(middle) <= bytes { &mut fits } else { &mut too_many }) = middle;
    }
    u32::try_from(fits).unwrap_or(u32::MAX)
}

pub(crate) fn pages_of(cache: &Cache, page_size: u32, pages: u32) -> KvLayer {
    let (heads, head_dim, dtype, latent) = match *cache {
        Cache::Paged { heads, head_dim, dtype, .. } => (heads, head_dim, dtype, None),
        Cache::Latent { latent, rotated, dtype } => (1, latent + rotated, dtype, Some(latent)),
    };
    let nowhere = Span { arena: device::ArenaId(0), region: Region::Kv, offset: 0, len: 0 };
    KvLayer { span: nowhere, dtype, scales: None, pages, page_size, heads, head_dim, latent }
}

/// The rope table's contents: for each position the cosines of `head_dim / 2` frequencies, then their
/// sines. `inv_freq` comes from the model, so scaled variants need no code here. The angle is a product of
/// two f32, as the reference implementations compute it: at position 40,000 a more exact one differs from
/// theirs by 0.002 rad.
pub fn rope_table(max_positions: u32, inv_freq: &[f32]) -> Vec<f32> {
    let mut table = Vec::with_capacity(max_positions as usize * inv_freq.len() * 2);
    for position in 0..max_positions {
        let angle = |freq: &f32| f64::from(position as f32 * freq);
        table.extend(inv_freq.iter().map(|freq| angle(freq).cos() as f32));
        table.extend(inv_freq.iter().map(|freq| angle(freq).sin() as f32));
    }
    table
}
