//! Checks that a recorded graph computes what its plan says. A step is run twice from the same state, op
//! by op and by replay, and every byte that either wrote is compared. If one differs, bisection finds the
//! first op that made it differ. Both runs start with a workspace full of NaN, so that reads of unwritten
//! bytes show.

use crate::backend::{Backend, Context};
use crate::compile::Bindings;
use crate::plan::Plan;
use crate::runner::RunError;
use crate::slot::{BadPadding, Extent, Length, SLOTS};
use device::op::KvLayer;
use device::step::count;
use device::{Node, Op, Region, Result, Span};
use std::collections::BTreeSet;

/// A NaN in f32, f16 and bf16.
pub const POISON: u32 = 0x7FFF_7FFF;

/// What a verification found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    /// Replay and eager differ.
    #[error("{key}: node {node} `{name}` ({op}) differs between replay and eager: {}+{byte} is {replayed:#04x}, not {eager:#04x}", region.name())]
    Differs {
        /// The graph's key.
        key: String,
        /// The first node that differs.
        node: usize,
        /// Its layer and name.
        name: String,
        /// Its op.
        op: &'static str,
        /// Where the first differing byte lies.
        region: Region,
        /// At which byte of the region.
        byte: u64,
        /// What the replay left there.
        replayed: u8,
        /// What the eager run left there.
        eager: u8,
    },
    /// The graph differs from its plan, but a new recording of the plan does not: what was recorded is
    /// not this plan.
    #[error("{key}: the recorded graph is not its plan ({}+{byte} differs; a new recording agrees)", region.name())]
    Stale {
        /// The graph's key.
        key: String,
        /// Where the first differing byte lies.
        region: Region,
        /// At which byte of the region.
        byte: u64,
    },
    /// A pad entry holds what its slot does not allow.
    #[error("{key}: {problem}")]
    Padding {
        /// The graph's key.
        key: String,
        /// What is wrong.
        problem: BadPadding,
    },
}

/// A byte that differs: region, offset, now, then.
type Difference = (Region, u64, u8, u8);

/// Bytes of spans at one moment, one behind the other.
struct Snapshot {
    spans: Vec<Span>,
    bytes: Vec<u8>,
}

impl Snapshot {
    /// Reads the spans.
    fn take(cx: &Context<'_>, spans: impl IntoIterator<Item = Span>) -> Result<Snapshot> {
        let spans: Vec<Span> = spans.into_iter().collect();
        let bytes = cx.device.read_all(cx.arena, &spans)?;
        Ok(Snapshot { spans, bytes })
    }

    /// Writes them back.
    fn restore(&self, cx: &Context<'_>) -> Result<()> {
        cx.device.write_all(cx.arena, &self.spans, &self.bytes)
    }

    /// The first byte of the first `count` spans that is another now.
    fn first_difference(&self, cx: &Context<'_>, count: usize) -> Result<Option<Difference>> {
        let mut first: Option<(usize, u8)> = None;
        cx.device.look_at(cx.arena, &self.spans[..count], &mut |from, now| {
            let then = &self.bytes[from..from + now.len()];
            if now != then && first.is_none_or(|(at, _)| from < at) {
                let at = now.iter().zip(then).position(|(a, b)| a != b).expect("they differ");
                first = Some((from + at, now[at]));
            }
        })?;
        let Some((at, now)) = first else { return Ok(None) };
        let mut before = at as u64;
        for span in &self.spans {
            if before < span.len {
                return Ok(Some((span.region, span.offset + before, now, self.bytes[at])));
            }
            before -= span.len;
        }
        unreachable!("a byte of a span")
    }
}

/// Fills a span with [`POISON`].
pub fn poison(cx: &Context<'_>, span: Span) -> Result<()> {
    if span.len == 0 {
        return Ok(());
    }
    let to = span.part(0, span.len / 4 * 4);
    let op = Op::Fill(device::op::Fill { to, word: POISON });
    cx.device.run(cx.arena, &Node { op, name: "poison".into(), layer: None })
}

/// Runs the posted step op by op, then by replay `times` over from the same state, and compares each
/// replay with the eager run. The device ends up as after one run.
pub fn step(
    cx: &Context<'_>,
    backend: &dyn Backend,
    plan: &Plan,
    bindings: &Bindings,
    times: u32,
) -> Result<(), RunError> {
    cx.device.sync()?;
    let mut trial = Trial::begin(cx, plan, bindings)?;
    trial.start_over(true)?;
    for node in &plan.nodes {
        cx.device.run(cx.arena, node)?;
    }
    // Only the prologue writes the tables: they must still hold its values at the end of the step.
    check_padding(cx, plan, bindings)?;
    let eager = trial.look()?;
    for at in 0..times {
        // Other seats are restored before the first replay only and compared after the last one, so
        // that a wrong write by any replay shows.
        trial.start_over(at == 0)?;
        backend.replay(cx, plan)?;
        if let Some(found) = trial.compare(&eager, at + 1 == times)? {
            return Err(Box::new(trial.find(backend, found)?).into());
        }
    }
    Ok(())
}

/// A step that is run several times from the same state.
struct Trial<'a> {
    cx: &'a Context<'a>,
    plan: &'a Plan,
    workspace: Span,
    /// The state that the step is meant to change, as it was before.
    own: Snapshot,
    /// The seen tokens and recurrent states of other seats, which the step must not change: as large as all seats times
    /// the vocabulary.
    others: Snapshot,
}

impl<'a> Trial<'a> {
    /// Remembers everything the step may change. There are many KV pages and seats, but the step
    /// changes few: the prologue's tables name them.
    fn begin(
        cx: &'a Context<'a>,
        plan: &'a Plan,
        bindings: &Bindings,
    ) -> Result<Trial<'a>, RunError> {
        let state = &bindings.state;
        let tables = SLOTS.iter().filter_map(|slot| (slot.table)(state)).map(|table| table.span);
        let seen = state.seen.map(|seen| seen.span);
        let mut own: Vec<Span> = tables.filter(|&span| Some(span) != seen).collect();
        own.push(state.ring);
        own.extend(state.vectors.into_iter().flatten());
        if let Some(features) = &state.features {
            own.extend([features.last.span, features.last_len.span, features.drafted.span]);
        }
        let before = Snapshot::take(cx, own.iter().copied().chain(seen))?;
        cx.device.run(cx.arena, &plan.nodes[0])?;
        let mut others = Vec::new();
        let seats = words(cx, state.row_seat.span)?;
        let seats: BTreeSet<u32> = seats.into_iter().take(plan.key.rows as usize).collect();
        for table in state.seen.iter().chain(&bindings.carries) {
            let bytes = table.span.len / u64::from(table.rows);
            let rows: Vec<u32> = (0..table.rows).collect();
            // Neighbours are read at once.
            for run in rows.chunk_by(|a, b| seats.contains(a) == seats.contains(b)) {
                let span = table.span.part(u64::from(run[0]) * bytes, run.len() as u64 * bytes);
                if seats.contains(&run[0]) { own.push(span) } else { others.push(span) }
            }
        }
        own.extend(written_pages(cx, plan, bindings)?);
        before.restore(cx)?;
        let (own, others) = (Snapshot::take(cx, own)?, Snapshot::take(cx, others)?);
        let workspace = bindings.workspace.part(0, plan.workspace);
        Ok(Trial { cx, plan, workspace, own, others })
    }

    /// The state before the step; that of other seats if `whole`.
    fn start_over(&mut self, whole: bool) -> Result<(), RunError> {
        self.own.restore(self.cx)?;
        if whole {
            self.others.restore(self.cx)?;
        }
        Ok(poison(self.cx, self.workspace)?)
    }

    /// What the step left; that of other seats comes last.
    fn look(&self) -> Result<Snapshot, RunError> {
        let (own, others) = (&self.own.spans, &self.others.spans);
        Ok(Snapshot::take(self.cx, own.iter().chain([&self.workspace]).chain(others).copied())?)
    }

    /// Where the results of two runs differ; compares other seats too if `whole`.
    fn compare(&self, left: &Snapshot, whole: bool) -> Result<Option<Difference>, RunError> {
        let others = if whole { self.others.spans.len() } else { 0 };
        Ok(left.first_difference(self.cx, self.own.spans.len() + 1 + others)?)
    }

    /// Whether the first `nodes` nodes, recorded again, differ from the same nodes run op by op.
    fn differs(
        &mut self,
        backend: &dyn Backend,
        nodes: usize,
    ) -> Result<Option<Difference>, RunError> {
        let prefix = self.plan.prefix(nodes);
        let mut fresh = backend.fresh();
        fresh.record(self.cx, &prefix)?;
        self.start_over(true)?;
        for node in &prefix.nodes {
            self.cx.device.run(self.cx.arena, node)?;
        }
        let eager = self.look()?;
        self.start_over(true)?;
        fresh.replay(self.cx, &prefix)?;
        self.compare(&eager, true)
    }

    fn find(&mut self, backend: &dyn Backend, found: Difference) -> Result<Mismatch, RunError> {
        let key = self.plan.key.to_string();
        let (mut good, mut bad) = (0, self.plan.nodes.len());
        let Some(mut seen) = self.differs(backend, bad)? else {
            return Ok(Mismatch::Stale { key, region: found.0, byte: found.1 });
        };
        while bad - good > 1 {
            let middle = good + (bad - good) / 2;
            match self.differs(backend, middle)? {
                Some(difference) => (bad, seen) = (middle, difference),
                None => good = middle,
            }
        }
        let node = bad - 1;
        let (region, byte, replayed, eager) = seen;
        Ok(Mismatch::Differs {
            key,
            node,
            name: self.plan.node_name(node),
            op: self.plan.nodes[node].op.name(),
            region,
            byte,
            replayed,
            eager,
        })
    }
}

/// Checks the step's tables against their slots' padding policies.
pub(crate) fn check_padding(
    cx: &Context<'_>,
    plan: &Plan,
    bindings: &Bindings,
) -> Result<(), RunError> {
    let state = &bindings.state;
    let counts = words(cx, state.counts.span)?;
    let extent = Extent {
        rows: counts[count::ROWS as usize],
        tokens: counts[count::TOKENS as usize],
        bucket_rows: plan.key.rows,
        bucket_tokens: plan.key.tokens,
    };
    for slot in SLOTS {
        let tables = match slot.length {
            Length::Rows(_) | Length::Tokens => 1,
            Length::TableTokens => state.limits.tables,
            _ => 0,
        };
        for table in (0..tables).filter_map(|table| (slot.table)(&state.of_table(table))) {
            let words = words(cx, table.span)?;
            slot.check_padding(&words, &extent, &state.limits).map_err(|problem| {
                Box::new(Mismatch::Padding { key: plan.key.to_string(), problem })
            })?;
        }
    }
    Ok(())
}

/// The pages the step writes, in every layer.
fn written_pages(
    cx: &Context<'_>,
    plan: &Plan,
    bindings: &Bindings,
) -> Result<Vec<Span>, RunError> {
    let page_size = bindings.state.limits.page_size;
    let mut pages = BTreeSet::new();
    for table in 0..bindings.state.limits.tables {
        let slots = words(cx, bindings.state.of_table(table).kv_slot.span)?;
        pages.extend(slots.iter().take(plan.key.tokens as usize).map(|slot| slot / page_size));
    }
    if !plan.passes.is_empty() {
        pages.extend(pages_before(cx, plan, bindings)?);
    }
    // Pad tokens share the slots of the scratch page, page 0. Which of them writes last changes from run
    // to run on a GPU and does not matter: no live row reads that page.
    let pages: Vec<u32> = pages.into_iter().filter(|&page| page != 0).collect();
    let mut spans = Vec::new();
    let kv = &bindings.kv;
    let first = |(index, own): &(usize, &KvLayer)| kv[..*index].iter().all(|o| o.span != own.span);
    for (_, kv) in kv.iter().enumerate().filter(first) {
        let there = pages.partition_point(|&page| page < kv.pages);
        // Neighbours are read at once.
        for run in pages[..there].chunk_by(|a, b| a + 1 == *b) {
            let bytes = kv.page_bytes();
            spans.push(kv.span.part(u64::from(run[0]) * bytes, run.len() as u64 * bytes));
        }
    }
    Ok(spans)
}

/// The pages of the token before those of each row: a model that drafts is fed it again.
fn pages_before(cx: &Context<'_>, plan: &Plan, bindings: &Bindings) -> Result<Vec<u32>, RunError> {
    let state = &bindings.state;
    let per_seat = state.limits.pages_per_seat as usize;
    let (seats, lens) = (words(cx, state.row_seat.span)?, words(cx, state.seat_len.span)?);
    let table = words(cx, state.page_table.span)?;
    let page = |seat: u32| {
        let before = lens[seat as usize].saturating_sub(1) / state.limits.page_size;
        table[seat as usize * per_seat + (before as usize).min(per_seat - 1)]
    };
    Ok(seats.into_iter().take(plan.key.rows as usize).map(page).collect())
}

fn words(cx: &Context<'_>, span: Span) -> Result<Vec<u32>> {
    let bytes = cx.device.read(cx.arena, span)?;
    let word = |chunk: &[u8]| u32::from_le_bytes(chunk.try_into().expect("4 bytes"));
    Ok(bytes.chunks_exact(4).map(word).collect())
}
