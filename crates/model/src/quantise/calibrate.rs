//! Quantises matrices by what reaches them: a model reads texts, all in one step, and each linear is quantised just before
//! it runs, so that the ones behind it see the inputs that they will see in the quantised model.
//!
//! The step runs once as it is, which seats the texts. Then its nodes run again, one by one. The last layer's linears run
//! for the last token of each text only; as for log-probabilities of prompts ([`crate::observe`]), all tokens take turns
//! there. The model as it was runs beside it, so that a linear can make up for what those before it have changed.

use super::factor::Products;
use super::residual::{Residual, inverses};
use super::{QuantiseError, Quantiser};
use crate::executor::GraphExecutor;
use crate::load::{LoadOptions, configure, load_executor};
use crate::observe::{gather_rows, seeing_all};
use crate::open::{ModelSource, OpenModel};
use crate::precision::Precision;
use crate::weights::WeightSpec;
use crate::{LoadError, Task};
use device::op::{Gather, Linear};
use device::target::WeightUse;
use device::{Arena, DType, Device, Node, Op, Tensor};
use engine::Engine;
use engine::exec::{Executor, Join, Page, Row, Seat, SeatParams, Step};
use engine::request::{Request, RequestId, Sampling, Token};
use formats::write::NewCheckpoint;
use graph::compile::fuse::Fusion;
use graph::config::Given;
use graph::layout::Layout;
use graph::runner::Runners;
use rayon::prelude::*;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

/// Tokens whose inputs are read at once.
const READ: u32 = 512;
/// Rows of a weight that are written to the device at once.
const ROWS: usize = 256;
/// Tokens of a page.
const PAGE: u32 = 16;
/// Texts that are written at once.
const TOGETHER: u32 = 16;

/// What a model reads to be quantised: equally many tokens each, at least two.
#[derive(Clone, Debug)]
pub struct Texts(Vec<Vec<Token>>);

impl Texts {
    /// Cuts a text into `count` texts of `length` tokens, each beginning with `begin`; fewer if there are not enough tokens.
    /// `None` if there is not even one.
    pub fn cut(tokens: &[Token], begin: &[Token], length: usize, count: usize) -> Option<Texts> {
        let own = length.checked_sub(begin.len()).filter(|own| *own > 1)?;
        let texts = tokens.chunks_exact(own).take(count);
        let texts: Vec<Vec<Token>> = texts.map(|text| [begin, text].concat()).collect();
        (!texts.is_empty()).then_some(Texts(texts))
    }

    /// Lets the model continue each of `starts`, drawing every token from its own distribution, to `length` tokens. Likelier
    /// tokens alone would make texts more alike, and what is calibrated by them worse. `progress` gets the tokens so far, and
    /// returns whether to go on; `None` if it did not.
    pub fn written_by(
        model: &Path,
        device: &Device,
        starts: &[Vec<Token>],
        length: usize,
        progress: &dyn Fn(u64) -> bool,
    ) -> Result<Option<Texts>, QuantiseError> {
        let options = LoadOptions {
            max_batch: (starts.len() as u32).min(TOGETHER),
            max_context: length as u32,
            penalties: false,
            ..LoadOptions::default()
        };
        let source = ModelSource::Checkpoint(model.to_owned());
        let loaded = load_executor(&source, device, &options, &|_| {})?;
        if loaded.config.task != Task::Generate {
            return Err(QuantiseError::NoText(model.to_owned()));
        }
        let length = length.min(loaded.config.max_position);
        let sampling = Sampling { temperature: 1.0, ignore_eos: true, ..Sampling::default() };
        let mut engine = Engine::builder(loaded.executor).prefix_cache(false).build();
        let mut texts = vec![Vec::new(); starts.len()];
        let (mut done, mut go_on) = (0, true);
        let requests = (0..).zip(starts).map(|(seed, start)| {
            let max_tokens = length.saturating_sub(start.len()) as u32;
            let sampling = Sampling { seed, max_tokens, ..sampling.clone() };
            Request::new(RequestId(0), start.as_slice(), sampling)
        });
        engine.stream_until(
            requests,
            |_, _, _| {
                done += 1;
                go_on = progress(done);
                !go_on
            },
            |index, answer| {
                let answer = answer.ok().and_then(|answer| answer.choices.into_iter().next());
                let tokens = answer.map(|answer| answer.tokens).unwrap_or_default();
                texts[index as usize] = [&starts[index as usize][..], &tokens].concat();
                true
            },
        );
        if !go_on {
            return Ok(None);
        }
        texts.retain(|text| text.len() == length && length > 1);
        match texts.is_empty() {
            true => Err(QuantiseError::NoText(model.to_owned())),
            false => Ok(Some(Texts(texts))),
        }
    }

    /// Tokens of all texts.
    pub fn tokens(&self) -> usize {
        self.0.len() * self.0[0].len()
    }
}

/// Where calibrated tensors go.
pub(super) struct Output<'a> {
    pub(super) quantiser: &'a Quantiser,
    pub(super) new: &'a NewCheckpoint,
    /// Gets bytes of the model that are done, and may end the work.
    pub(super) report: &'a (dyn Fn(u64) -> Result<(), QuantiseError> + Sync),
}

/// Quantises and writes every matrix of the model that is multiplied by a linear; returns which tensors these are, by
/// their index in the checkpoint.
pub(super) fn run(
    output: Output<'_>,
    device: &Device,
    texts: &Texts,
) -> Result<HashSet<usize>, QuantiseError> {
    let source = ModelSource::Checkpoint(output.quantiser.checkpoint.path().to_owned());
    let model = OpenModel::open(&source)?;
    if model.config.task != Task::Generate {
        return Err(QuantiseError::NoText(output.quantiser.checkpoint.path().to_owned()));
    }
    let (mut executor, weights) = load(&source, &model, device, texts)?;
    let (mut before, _) = load(&source, &model, device, texts)?;
    let step = step(&executor, texts);
    let failed = |error: engine::exec::ExecError| QuantiseError::Step(error.to_string());
    for executor in [&mut executor, &mut before] {
        executor.launch(&step).map_err(failed)?;
        executor.poll(true).map_err(failed)?;
    }
    let runners = executor.runners();
    let bindings = runners.bindings();
    let matrices = weights.iter().filter(|spec| spec.kind == WeightUse::Matrix);
    let specs = matrices.map(|spec| (bindings.weights[&spec.name].span.offset, spec)).collect();
    let way = |executor: &GraphExecutor| {
        let plan = executor.last_plan().ok_or_else(|| QuantiseError::Step("no plan".into()))?;
        Ok::<Way, QuantiseError>(Way::of(&plan.own_nodes()))
    };
    let ways = [way(&executor)?, way(&before)?];
    let arenas = [runners.arena(), before.runners().arena()];
    let tokens = texts.tokens() as u32;
    let mut walk = Walk { output, device, arenas, specs, tokens, done: HashSet::new() };
    walk.run(&ways)?;
    Ok(walk.done)
}

/// The model in numbers that hardly round, for one step of all texts, and what its weights are made of.
fn load(
    source: &ModelSource,
    model: &OpenModel,
    device: &Device,
    texts: &Texts,
) -> Result<(GraphExecutor, Vec<WeightSpec>), LoadError> {
    let (rows, length) = (texts.0.len() as u32, texts.0[0].len() as u32);
    let off = ["graph-backend-decode", "graph-backend-prefill"];
    let mut flags: Vec<(String, String)> =
        off.iter().map(|flag| ((*flag).to_owned(), "disabled".to_owned())).collect();
    flags.push(("graph-buckets-prefill".into(), (rows * length).to_string()));
    let options = LoadOptions {
        max_batch: rows,
        max_context: length + 1,
        prefill_tokens: Some(rows * length),
        page_size: PAGE,
        penalties: false,
        keep_windows: true,
        graphs: Given { config: None, flags: flags.into_iter().collect() },
        precision: Some(Precision { act: DType::F32, ..Precision::BF16 }),
        ..LoadOptions::default()
    };
    let mut configured = configure(source, model, device.target(), device.numerics(), &options)?;
    // A linear's input has to have a place in memory.
    configured.target.fusion = Some(Fusion::NONE);
    configured.others.clear();
    let mut layout = configured.layout()?;
    let program = configured.program().clone();
    let seats = configured.limits.seats;
    layout.add_carry_copies(&program, 0);
    let pages = configured.limits.pages_per_seat * crate::executor::kept(&program).width();
    layout.add_pages(&program, 1 + seats * pages);
    let Layout { arena, bindings } = layout;
    let arena = device.seal(arena)?;
    configured.fill(model, device, &arena, &bindings, &|_| {})?;
    let weights = configured.weights().to_vec();
    let (target, decode, prefill) = (configured.target, configured.decode, configured.prefill);
    let runners = Runners::new(device, &arena, program, target, bindings, decode, prefill)?;
    Ok((GraphExecutor::new(runners), weights))
}

/// All texts as prompts.
fn step(executor: &GraphExecutor, texts: &Texts) -> Step {
    let kept = executor.geometry().kept;
    let each = texts.0[0].len().div_ceil(PAGE as usize) as u32;
    let seats = || (0..).map(Seat).zip(&texts.0);
    let join = |(seat, _)| Join {
        seat,
        len: 0,
        last_token: 0,
        params: SeatParams::greedy(),
        history: Vec::new(),
    };
    let pages = |(seat, _): (Seat, _)| {
        (0..each).flat_map(move |index| {
            // Page 0 is for padding.
            let first = 1 + (seat.0 * each + index) * kept.width();
            kept.entries(seat, index, Page(first))
        })
    };
    Step {
        number: 1,
        rows: seats().map(|(seat, text)| Row::feed(seat, 0, text.clone())).collect(),
        joins: seats().map(join).collect(),
        pages: seats().flat_map(pages).collect(),
        ..Step::default()
    }
}

/// The nodes of a step.
struct Way {
    /// Those that run for all tokens.
    all: Vec<Node>,
    /// What the others see of them.
    gathers: Vec<Gather>,
    /// Those that run for a few tokens at a time.
    tail: Vec<Node>,
}

impl Way {
    fn of(nodes: &[Node]) -> Way {
        let gather = |node: &Node| {
            let Op::Gather(gather) = &node.op else { return None };
            Some(gather.clone())
        };
        let gathers: Vec<Gather> = nodes.iter().filter_map(gather).collect();
        let behind = nodes.iter().rposition(|node| gather(node).is_some()).map_or(0, |at| at + 1);
        let (all, tail) = nodes.split_at(behind);
        let all = all.iter().filter(|node| !matches!(node.op, Op::Prologue(_)));
        let all = all.map(|node| seeing_all(node).unwrap_or_else(|| node.clone())).collect();
        let mut tail = tail.to_vec();
        tail.iter_mut().for_each(|node| node.op.detach());
        Way { all, gathers, tail }
    }

    /// What runs before a node of the tail, for `count` tokens.
    fn up_to(&self, at: usize, first: u32, count: u32) -> Vec<Node> {
        let gathers = self.gathers.iter().map(|gather| gather_rows(gather, first, count));
        gathers.chain(self.tail[..at].iter().cloned()).collect()
    }
}

/// The walk through a step.
struct Walk<'a> {
    output: Output<'a>,
    device: &'a Device,
    /// Of the model that is quantised, and of the model as it was.
    arenas: [&'a Arena; 2],
    /// Matrices by where they begin.
    specs: HashMap<u64, &'a WeightSpec>,
    tokens: u32,
    /// Tensors that were written.
    done: HashSet<usize>,
}

impl Walk<'_> {
    /// Goes the same way in both models.
    fn run(&mut self, ways: &[Way; 2]) -> Result<(), QuantiseError> {
        let [arena, old_arena] = self.arenas;
        let [now, old] = ways;
        for (at, (node, old_node)) in now.all.iter().zip(&old.all).enumerate() {
            let nodes = [&now.all[at..], &old.all[at..]];
            for linears in pairs(node, old_node) {
                let residual = Residual::of(nodes, linears);
                self.quantise(linears[0].w, residual, |walk, residual, products| {
                    walk.prepare(residual, old_node)?;
                    walk.read(linears.map(|linear| linear.x), residual, walk.tokens, products)
                })?;
            }
            self.device.run(arena, node)?;
            self.device.run(old_arena, old_node)?;
        }
        let Some(rows) = now.gathers.iter().map(|gather| gather.y.rows).min() else {
            return Ok(());
        };
        for (at, (node, old_node)) in now.tail.iter().zip(&old.tail).enumerate() {
            let nodes = [&now.tail[at..], &old.tail[at..]];
            for linears in pairs(node, old_node) {
                let residual = Residual::of(nodes, linears);
                self.quantise(linears[0].w, residual, |walk, residual, products| {
                    for first in (0..walk.tokens).step_by(rows as usize) {
                        let count = rows.min(walk.tokens - first);
                        for (way, arena) in ways.iter().zip(walk.arenas) {
                            let nodes = way.up_to(at, first, count);
                            nodes.iter().try_for_each(|node| walk.device.run(arena, node))?;
                        }
                        walk.prepare(residual, old_node)?;
                        let inputs = linears.map(|linear| linear.x);
                        walk.read(inputs, residual, count, products)?;
                    }
                    Ok(())
                })?;
            }
        }
        Ok(())
    }

    /// Runs a linear in the model as it was if its outputs have to be read there.
    fn prepare(&self, residual: Option<&Residual>, old: &Node) -> Result<(), QuantiseError> {
        if residual.is_some_and(|residual| residual.norm.is_some()) {
            self.device.run(self.arenas[1], old)?;
        }
        Ok(())
    }

    /// Adds the first `rows` inputs of a linear.
    fn read(
        &self,
        inputs: [Tensor; 2],
        residual: Option<&Residual>,
        rows: u32,
        products: &mut Products,
    ) -> Result<(), QuantiseError> {
        for from in (0..rows).step_by(READ as usize) {
            let rows = from..rows.min(from + READ);
            let read = |[now, old]: [Tensor; 2]| -> Result<[Vec<f32>; 2], QuantiseError> {
                let [arena, old_arena] = self.arenas;
                Ok([self.rows(arena, now, rows.clone())?, self.rows(old_arena, old, rows.clone())?])
            };
            let [inputs, before] = read(inputs)?;
            products.add(&inputs, &before);
            if let Some(residual) = residual {
                products.add_missing(&residual.missing(read)?, &inputs);
            }
        }
        Ok(())
    }

    /// Rows of a tensor.
    fn rows(
        &self,
        arena: &Arena,
        tensor: Tensor,
        rows: Range<u32>,
    ) -> Result<Vec<f32>, QuantiseError> {
        let (cols, dtype) = (tensor.cols as usize, tensor.dtype);
        let stride = dtype.bytes(tensor.stride as usize) as u64;
        let row_bytes = dtype.bytes(cols) as u64;
        let bytes = u64::from(rows.end - rows.start - 1) * stride + row_bytes;
        let span = tensor.span.part(u64::from(rows.start) * stride, bytes);
        let raw = self.device.read(arena, span)?;
        let mut floats = Vec::with_capacity(rows.len() * cols);
        for row in raw.chunks(stride as usize) {
            floats.extend(dtype.decode(&row[..row_bytes as usize]));
        }
        Ok(floats)
    }

    /// Quantises the tensors of a weight by its inputs, writes them, and puts the new values in the weight's place.
    fn quantise(
        &mut self,
        w: Tensor,
        residual: Option<Residual>,
        see: impl FnOnce(&Self, Option<&Residual>, &mut Products) -> Result<(), QuantiseError>,
    ) -> Result<(), QuantiseError> {
        let Some(spec) = self.specs.get(&w.span.offset).copied() else { return Ok(()) };
        let tensors: HashSet<&str> = spec.parts.iter().map(|part| part.tensor.as_str()).collect();
        let quantiser = self.output.quantiser;
        let wanted = |(index, name): (usize, &str)| {
            let wanted = quantiser.schemes[index].is_some() && tensors.contains(name);
            wanted.then_some((index, name.to_owned()))
        };
        let names = quantiser.checkpoint.tensors().map(|info| info.name.as_str());
        let wanted: Vec<(usize, String)> = names.enumerate().filter_map(wanted).collect();
        let again = wanted.iter().any(|(index, _)| self.done.contains(index));
        if wanted.len() < tensors.len() || again || spec.cols.len() != spec.tensor_cols {
            return Ok(());
        }
        // Of a tensor that is the weight.
        let whole = |_: &Residual| (0..spec.rows()).all(|row| spec.source(row) == (0, row));
        let residual = residual.filter(whole);
        let missing = if residual.is_some() { spec.rows() } else { 0 };
        let mut products = Products::new(spec.cols(), missing);
        see(self, residual.as_ref(), &mut products)?;
        if let Some(norm) = residual.as_ref().and_then(|residual| residual.norm.as_ref()) {
            let weight = self.rows(self.arenas[0], norm.weight, 0..1)?;
            products.scale_missing(&inverses(&weight));
        }
        let Some(factor) = products.factor() else { return Ok(()) };
        let mut values: HashMap<String, Vec<f32>> = HashMap::new();
        for (index, name) in wanted {
            let (new, report) = (self.output.new, self.output.report);
            let floats = quantiser.write_calibrated(new, index, &factor.inputs())?;
            values.insert(name, floats);
            self.done.insert(index);
            report(quantiser.bytes_of(index))?;
        }
        self.put(spec, w, &values)
    }

    /// Writes rows of a weight.
    fn put(
        &self,
        spec: &WeightSpec,
        w: Tensor,
        values: &HashMap<String, Vec<f32>>,
    ) -> Result<(), QuantiseError> {
        let cols = spec.cols();
        let row_bytes = w.dtype.bytes(cols) as u64;
        let starts: Vec<usize> = (0..spec.rows()).step_by(ROWS).collect();
        starts.into_par_iter().try_for_each(|from| {
            let rows = from..spec.rows().min(from + ROWS);
            let mut bytes = Vec::new();
            for row in rows.clone() {
                let (part, stored) = spec.source(row);
                let floats = &values[&spec.parts[part].tensor][stored * cols..][..cols];
                w.dtype.encode(floats, &mut bytes);
            }
            let to = w.span.part(from as u64 * row_bytes, rows.len() as u64 * row_bytes);
            Ok(self.device.write(self.arenas[0], to, &bytes)?)
        })
    }
}

/// The linears of a node, and those of the same node of another model.
fn pairs<'a>(node: &'a Node, old: &'a Node) -> impl Iterator<Item = [&'a Linear; 2]> {
    linears(node).zip(linears(old)).map(|(linear, old)| [linear, old])
}

/// The linears of a node.
fn linears(node: &Node) -> impl Iterator<Item = &Linear> {
    node.op.members().iter().filter_map(|op| {
        let Op::Linear(linear) = op else { return None };
        Some(linear)
    })
}
