//! How a plan becomes something replayable. Four ways, one file each, over one trait; all run the same
//! plan and give the same numbers.

mod breakable;
mod disabled;
mod full;
mod piecewise;
mod segmented;

pub use disabled::Disabled;
pub use segmented::Recorded;

use breakable::Breaks;
use full::Whole;
use piecewise::Splits;
use segmented::Segmented;

use crate::{Plan, ShapeKey};
use device::{Arena, Device, Item, Node, RecordOptions, Recording, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

/// A hook called at a break, with the index of the node that is about to run and the node.
pub type BreakHook<'a> = &'a dyn Fn(usize, &Node) -> Result<()>;

/// What a backend works with.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The device.
    pub device: &'a Device,
    /// The memory plans point into.
    pub arena: &'a Arena,
    /// How to record.
    pub options: RecordOptions,
    /// Called before each node that runs between recorded parts; the host may look at the device
    /// there, or do work that only the host can do.
    pub at_break: Option<BreakHook<'a>>,
}

impl<'a> Context<'a> {
    /// Without a hook at breaks.
    pub fn new(device: &'a Device, arena: &'a Arena, options: RecordOptions) -> Context<'a> {
        Context { device, arena, options, at_break: None }
    }
}

impl fmt::Debug for Context<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("options", &self.options).finish_non_exhaustive()
    }
}

/// Records plans and replays them.
pub trait Backend: fmt::Debug + Send {
    /// Which.
    fn kind(&self) -> BackendKind;

    /// Compiles what the plan's nodes need, so that neither recording nor running stalls.
    fn prepare(&self, cx: &Context<'_>, plan: &Plan) -> Result<()> {
        prepare_nodes(cx, &plan.nodes)
    }

    /// Records the plan. What is recorded under its key stays unless it is used again, so [`Backend::keep`] must follow.
    fn make(&mut self, cx: &Context<'_>, plan: &Plan) -> Result<Recorded>;

    /// Makes a plan that a backend of this kind recorded replayable, in the place of what was recorded under its key.
    fn keep(&mut self, key: &ShapeKey, recorded: Recorded);

    /// Makes the plan replayable, replacing what was recorded under its key; returns how many graphs it recorded.
    fn record(&mut self, cx: &Context<'_>, plan: &Plan) -> Result<usize> {
        let recorded = self.make(cx, plan)?;
        let graphs = recorded.graphs();
        self.keep(&plan.key, recorded);
        Ok(graphs)
    }

    /// Whether the key can be replayed.
    fn has(&self, key: &ShapeKey) -> bool;

    /// Runs the plan's step by what was recorded under its key.
    ///
    /// # Panics
    /// If nothing was: the runner asks [`Backend::has`] first.
    fn replay(&self, cx: &Context<'_>, plan: &Plan) -> Result<()>;

    /// Bytes the device spends on a key's recording; 0 if there is none.
    fn bytes(&self, key: &ShapeKey) -> u64;

    /// An empty backend of the same kind; verification records its trials with it.
    fn fresh(&self) -> Box<dyn Backend> {
        self.kind().create()
    }

    /// Gives one recording up; dropped, its memory is given back, which waits for the device.
    fn forget(&mut self, key: &ShapeKey) -> Option<Recorded>;

    /// Gives everything back.
    fn clear(&mut self);
}

/// The backends there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BackendKind {
    /// The whole plan is one graph.
    Full,
    /// One recording, interrupted at breaks that run eagerly and may touch the host.
    Breakable,
    /// The pieces between splits are compiled and recorded on their own.
    Piecewise,
    /// Every node runs on its own.
    Disabled,
}

impl BackendKind {
    /// All, in listing order.
    pub const ALL: [BackendKind; 4] =
        [BackendKind::Full, BackendKind::Breakable, BackendKind::Piecewise, BackendKind::Disabled];

    /// The name in flags, metrics and documents.
    pub const fn name(self) -> &'static str {
        match self {
            BackendKind::Full => "full",
            BackendKind::Breakable => "breakable",
            BackendKind::Piecewise => "piecewise",
            BackendKind::Disabled => "disabled",
        }
    }

    /// Whether nodes between its graphs run on their own.
    pub const fn cuts(self) -> bool {
        matches!(self, BackendKind::Breakable | BackendKind::Piecewise)
    }

    /// The one of that name.
    pub fn named(name: &str) -> Option<BackendKind> {
        BackendKind::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Which nodes become a graph and which run alone, in order. This is all that differs between
    /// backends, and it needs no device.
    pub fn pieces(self, plan: &Plan) -> Vec<Piece> {
        let everywhere: Vec<usize>;
        let cuts = match self {
            BackendKind::Full => &[][..],
            BackendKind::Breakable => &plan.breaks,
            BackendKind::Piecewise => &plan.splits,
            BackendKind::Disabled => {
                everywhere = (0..plan.nodes.len()).collect();
                &everywhere
            }
        };
        let mut pieces = Vec::new();
        let mut start = 0;
        for &cut in cuts {
            if start < cut {
                pieces.push(Piece::Graph(start..cut));
            }
            pieces.push(Piece::Alone(cut));
            start = cut + 1;
        }
        if start < plan.nodes.len() {
            pieces.push(Piece::Graph(start..plan.nodes.len()));
        }
        pieces
    }

    /// An empty backend of this kind.
    pub fn create(self) -> Box<dyn Backend> {
        match self {
            BackendKind::Full => Box::new(Segmented::<Whole>::default()),
            BackendKind::Breakable => Box::new(Segmented::<Breaks>::default()),
            BackendKind::Piecewise => Box::new(Segmented::<Splits>::default()),
            BackendKind::Disabled => Box::new(Disabled),
        }
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A part of a plan, as a backend cuts it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// These nodes are one graph.
    Graph(Range<usize>),
    /// This node runs on its own, between graphs.
    Alone(usize),
}

/// Runs every node on its own; used by `disabled`, fallbacks and debugging.
pub fn run_eagerly(cx: &Context<'_>, plan: &Plan) -> Result<()> {
    plan.nodes.iter().try_for_each(|node| cx.device.run(cx.arena, node))
}

fn prepare_nodes(cx: &Context<'_>, nodes: &[Node]) -> Result<()> {
    let items: Vec<Item> = nodes.iter().cloned().map(Item::Node).collect();
    cx.device.prepare(&items, cx.options)
}

fn push_nodes(recording: &mut Recording, nodes: &[Node]) -> Result<()> {
    nodes.iter().try_for_each(|node| recording.push(Item::Node(node.clone())))
}
