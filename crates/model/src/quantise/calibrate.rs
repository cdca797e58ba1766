//! Quantises matrices by what reaches them: a model reads texts, all in one step, and each linear is quantised just before
//! it runs, so that the ones behind it see the inputs that they will see in the quantised model.
//!
//! The step runs once as it is, which seats the texts. Then its nodes run again, one by one. The last layer's linears run
//! for the last token of each text only; as for log-probabilities of prompts ([`crate::observe`]), all tokens take turns
//! there.

use super::factor::Products;
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

    /// Lets the model continue each of `starts`, drawing every token from its own distribution, to `length` tokens. `progress` gets
    /// the tokens so far, and returns whether to go on; `None` if it did not.
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
    let step = step(&executor, texts);
    let failed = |error: engine::exec::ExecError| QuantiseError::Step(error.to_string());
    executor.launch(&step).map_err(failed)?;
    executor.poll(true).map_err(failed)?;
    let runners = executor.runners();
    let bindings = runners.bindings();
    let matrices = weights.iter().filter(|spec| spec.kind == WeightUse::Matrix);
    let specs = matrices.map(|spec| (bindings.weights[&spec.name].span.offset, spec)).collect();
    let plan = executor.last_plan().ok_or_else(|| QuantiseError::Step("no plan".into()))?;
    let nodes: Vec<Node> = plan.own_nodes();
    let arena = runners.arena();
    let tokens = texts.tokens() as u32;
    let mut walk = Walk { output, device, arena, specs, tokens, done: HashSet::new() };
    walk.run(&nodes)?;
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

/// The way through a step.
struct Walk<'a> {
    output: Output<'a>,
    device: &'a Device,
    arena: &'a Arena,
    /// Matrices by where they begin.
    specs: HashMap<u64, &'a WeightSpec>,
    tokens: u32,
    /// Tensors that were written.
    done: HashSet<usize>,
}

impl Walk<'_> {
    fn run(&mut self, nodes: &[Node]) -> Result<(), QuantiseError> {
        let gather = |node: &Node| {
            let Op::Gather(gather) = &node.op else { return None };
            Some(gather.clone())
        };
        let gathers: Vec<Gather> = nodes.iter().filter_map(gather).collect();
        let behind = nodes.iter().rposition(|node| gather(node).is_some()).map_or(0, |at| at + 1);
        let (all, tail) = nodes.split_at(behind);
        for node in all.iter().filter(|node| !matches!(node.op, Op::Prologue(_))) {
            let node = seeing_all(node).unwrap_or_else(|| node.clone());
            for linear in linears(&node) {
                self.quantise(linear.w, |walk, products| {
                    walk.read(linear.x, walk.tokens, products)
                })?;
            }
            self.device.run(self.arena, &node)?;
        }
        let mut tail = tail.to_vec();
        tail.iter_mut().for_each(|node| node.op.detach());
        let Some(rows) = gathers.iter().map(|gather| gather.y.rows).min() else { return Ok(()) };
        for (at, node) in tail.iter().enumerate() {
            for linear in linears(node) {
                self.quantise(linear.w, |walk, products| {
                    for first in (0..walk.tokens).step_by(rows as usize) {
                        let count = rows.min(walk.tokens - first);
                        let copies = gathers.iter().map(|gather| gather_rows(gather, first, count));
                        for node in copies.collect::<Vec<_>>().iter().chain(&tail[..at]) {
                            walk.device.run(walk.arena, node)?;
                        }
                        walk.read(linear.x, count, products)?;
                    }
                    Ok(())
                })?;
            }
        }
        Ok(())
    }

    /// Adds the first `rows` inputs of a linear.
    fn read(&self, x: Tensor, rows: u32, products: &mut Products) -> Result<(), QuantiseError> {
        let (cols, stride) = (x.cols as usize, x.dtype.bytes(x.stride as usize) as u64);
        let row_bytes = x.dtype.bytes(cols) as u64;
        for from in (0..rows).step_by(READ as usize) {
            let count = READ.min(rows - from);
            let bytes = u64::from(count - 1) * stride + row_bytes;
            let raw = self.device.read(self.arena, x.span.part(u64::from(from) * stride, bytes))?;
            let mut inputs = Vec::with_capacity(count as usize * cols);
            for row in raw.chunks(stride as usize) {
                inputs.extend(x.dtype.decode(&row[..row_bytes as usize]));
            }
            products.add(&inputs);
        }
        Ok(())
    }

    /// Quantises the tensors of a weight by its inputs, writes them, and puts the new values in the weight's place.
    fn quantise(
        &mut self,
        w: Tensor,
        see: impl FnOnce(&Self, &mut Products) -> Result<(), QuantiseError>,
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
        let mut products = Products::new(spec.cols());
        see(self, &mut products)?;
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
            Ok(self.device.write(self.arena, to, &bytes)?)
        })
    }
}

/// The linears of a node.
fn linears(node: &Node) -> impl Iterator<Item = &Linear> {
    node.op.members().iter().filter_map(|op| {
        let Op::Linear(linear) = op else { return None };
        Some(linear)
    })
}
