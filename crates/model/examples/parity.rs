//! Writes what a model computes from a seed, so that another program can be compared with it:
//!
//!     parity MODEL FOLDER [quick]
//!
//! writes the weights (`model.safetensors`, `config.json`, as a checkpoint of the model's family), the
//! logits of ragged batches fed in chunks and decoded through the recorded graphs (`batch-*`), the
//! residual stream after every layer of a prefill and of a decode step (`layers-*`), and the experts that every router
//! chose there (`choices-*`). MODEL is a bundled shape or the path of a `config.json`.
//! `tools/gpu/compare_transformers.py FOLDER` compares all of it with `transformers`.

use device::target::WeightUse;
use device::{Arena, DType, Device, DeviceChoice, Op, Region, Tensor};
use engine::exec::{Executor, Join, Page, Row, Seat, SeatParams, Step};
use fixtures::Rng;
use graph::mail::{self, JoinInput, Mailbox, PageInput, StepInput};
use graph::program::Program;
use graph::{CompileTarget, Plan, ShapeKey};
use model::weights::WeightSpec;
use model::{GraphExecutor, LoadOptions, LoadedExecutor, ModelConfig, ModelSource, load_executor};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Decode steps after the prompts of a batch.
const STEPS: usize = 3;
/// Rows of a batch whose logits are written.
const ROWS: usize = 24;

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (name, folder, quick) = match args.as_slice() {
        [name, folder] => (name, PathBuf::from(folder), false),
        [name, folder, word] if word == "quick" => (name, PathBuf::from(folder), true),
        _ => return Err("usage: parity MODEL FOLDER [quick]".into()),
    };
    std::fs::create_dir_all(&folder)?;
    let (config, json) = if name.ends_with(".json") {
        let json = std::fs::read_to_string(name)?;
        (ModelConfig::from_hf(Path::new(name), json.as_bytes(), None)?, json)
    } else {
        (ModelConfig::bundled(name)?, ModelConfig::bundled_json(name)?.to_owned())
    };
    std::fs::write(folder.join("config.json"), json)?;
    let (device, chosen) = Device::open(DeviceChoice::Auto)?;
    eprintln!("{name} on {chosen}");
    let source = ModelSource::Dummy { config: Box::new(config.clone()), seed: 0 };
    let (longest, max_batch) = if quick { (96, 3) } else { (8192, 256) };
    let options = LoadOptions {
        max_batch,
        max_context: longest + 64,
        memory_share: 0.6,
        ..LoadOptions::default()
    };
    let mut loaded = load_executor(&source, &device, &options, &|_| {})?;
    write_weights(&folder, &loaded)?;
    let mut launches = 0;
    // Every bucket, and one that is not full.
    let buckets = &loaded.executor.runners().decode.config().buckets;
    let batches = if quick { vec![1, 3] } else { [&buckets.sizes[..], &[13]].concat() };
    for rows in batches {
        let batch = Batch::new(rows, longest, config.vocab as u32);
        batch.run(&mut loaded.executor, &mut launches, &folder)?;
    }
    drop(loaded);
    let loaded = load_executor(&source, &device, &options, &|_| {})?;
    let rows = if quick { 3 } else { 8 };
    write_layers(&folder, &config, &loaded.executor, &loaded.program, rows)
}

/// The weights under the names a checkpoint has them by.
fn write_weights(folder: &Path, loaded: &LoadedExecutor) -> Outcome<()> {
    let runners = loaded.executor.runners();
    let weights = &runners.bindings().weights;
    let specs: &[WeightSpec] = &loaded.weights;
    let mut header = Map::new();
    let mut at = 0;
    for spec in specs {
        let dtype = weights[&spec.name].dtype;
        for part in &spec.parts {
            let (shape, count) = match spec.kind {
                WeightUse::Vector => (vec![part.tensor_rows], part.tensor_rows),
                _ => {
                    (vec![part.tensor_rows, spec.tensor_cols], part.tensor_rows * spec.tensor_cols)
                }
            };
            let end = at + dtype.bytes(count);
            let entry = json!({
                "dtype": safetensors_name(dtype)?, "shape": shape, "data_offsets": [at, end],
            });
            header.insert(part.tensor.clone(), entry);
            at = end;
        }
    }
    let mut file = BufWriter::new(File::create(folder.join("model.safetensors"))?);
    let header = serde_json::to_string(&header)?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    for spec in specs {
        let tensor = &weights[&spec.name];
        let bytes = runners.device().read(runners.arena(), tensor.span)?;
        let row = tensor.dtype.bytes(spec.cols());
        if spec.kind == WeightUse::Vector {
            file.write_all(&bytes[..row])?;
            continue;
        }
        let stride = tensor.dtype.bytes(tensor.stride as usize);
        let mut parts = vec![Vec::new(); spec.parts.len()];
        for index in 0..spec.rows() {
            let (part, _) = spec.source(index);
            parts[part].extend_from_slice(&bytes[index * stride..][..row]);
        }
        parts.iter().try_for_each(|part| file.write_all(part))?;
    }
    Ok(file.flush()?)
}

fn safetensors_name(dtype: DType) -> Outcome<&'static str> {
    match dtype {
        DType::F32 => Ok("F32"),
        DType::BF16 => Ok("BF16"),
        other => Err(format!("weights of {other:?} cannot be written").into()),
    }
}

/// Sequences of ragged lengths.
struct Batch {
    tokens: Vec<Vec<u32>>,
    rng: Rng,
}

impl Batch {
    fn new(rows: u32, longest: u32, vocab: u32) -> Batch {
        let mut rng = Rng::new(u64::from(rows));
        let usual = longest.min(600);
        let mut tokens = Vec::new();
        for row in 0..rows {
            // One as long as can be, one of a single token, the others as they come.
            let length = match row {
                0 => longest,
                1 => 1,
                _ => 1 + rng.below(usual),
            };
            tokens.push((0..length).map(|_| rng.below(vocab)).collect());
        }
        Batch { tokens, rng }
    }

    /// Feeds the prompts in chunks of any size, then decodes all rows together.
    fn run(
        mut self,
        executor: &mut GraphExecutor,
        launches: &mut u64,
        folder: &Path,
    ) -> Outcome<()> {
        let page_size = executor.geometry().page_size as usize;
        let most = executor.coverage().prefill_tokens;
        let mut next_page = 1;
        for row in 0..self.tokens.len() {
            let seat = Seat(row as u32);
            let prompt = self.tokens[row].clone();
            let pages = (prompt.len() + STEPS).div_ceil(page_size) as u32;
            let mut start = 0;
            while start < prompt.len() {
                let chunk = 1 + self.rng.below(most) as usize;
                let end = (start + chunk).min(prompt.len());
                let tokens = prompt[start..end].to_vec();
                let sample = end == prompt.len();
                let row = Row { sample, ..Row::feed(seat, start as u32, tokens) };
                let mut step = Step { rows: vec![row], ..Step::default() };
                if start == 0 {
                    let params = SeatParams::greedy();
                    step.joins =
                        vec![Join { seat, len: 0, last_token: 0, params, history: vec![] }];
                    let kept = executor.geometry().kept;
                    let first = |index| Page(next_page + index * kept.width());
                    let entries = |index| kept.entries(seat, index, first(index));
                    step.pages = (0..pages).flat_map(entries).collect();
                }
                let said = launch(executor, launches, step)?;
                if sample {
                    self.tokens[seat.0 as usize].push(said[0]);
                }
                start = end;
            }
            next_page += pages * executor.geometry().kept.width();
        }
        let count = self.tokens.len();
        let watched: Vec<usize> =
            (0..count.min(ROWS)).map(|i| i * count / count.min(ROWS)).collect();
        let mut logits = Vec::new();
        for _ in 0..STEPS {
            let row = |(row, tokens): (usize, &Vec<u32>)| {
                Row::decode(Seat(row as u32), tokens.len() as u32 - 1)
            };
            let rows = self.tokens.iter().enumerate().map(row).collect();
            let said = launch(executor, launches, Step { rows, ..Step::default() })?;
            for &row in &watched {
                logits.extend(executor.read_logits(row as u32)?);
            }
            for (tokens, token) in self.tokens.iter_mut().zip(said) {
                tokens.push(token);
            }
        }
        let ran = executor.last_ran().expect("steps were launched");
        let tokens: Vec<&Vec<u32>> = watched.iter().map(|&row| &self.tokens[row]).collect();
        let about = json!({
            "rows": count, "steps": STEPS, "tokens": tokens,
            "bucket": ran.key.to_string(), "replayed": ran.eager.is_none(),
        });
        write(folder, &format!("batch-{count}"), &about, &logits)
    }
}

fn launch(executor: &mut GraphExecutor, launches: &mut u64, step: Step) -> Outcome<Vec<u32>> {
    *launches += 1;
    executor.launch(&Step { number: *launches, ..step })?;
    let result = executor.poll(true)?.ok_or("no result")?;
    Ok(result.rows.iter().map(|row| row.tokens.first().map_or(0, |found| found.token)).collect())
}

/// A description and the numbers it describes.
fn write(folder: &Path, name: &str, about: &Value, numbers: &[f32]) -> Outcome<()> {
    std::fs::write(folder.join(format!("{name}.json")), about.to_string())?;
    let bytes: Vec<u8> = numbers.iter().flat_map(|value| value.to_le_bytes()).collect();
    Ok(std::fs::write(folder.join(format!("{name}.f32")), bytes)?)
}

/// The residual stream of ragged prompts and of the token after each, layer by layer.
fn write_layers(
    folder: &Path,
    config: &ModelConfig,
    executor: &GraphExecutor,
    program: &Program,
    rows: u32,
) -> Outcome<()> {
    let runners = executor.runners();
    let (device, arena, bindings) = (runners.device(), runners.arena(), runners.bindings());
    let target = CompileTarget::new(device.target());
    let mut mailbox = Mailbox::new(arena, &bindings.state)?;
    let mut rng = Rng::new(7);
    let mut prompts: Vec<Vec<u32>> = Vec::new();
    for row in 0..rows {
        let length = 1 + row * 7 + rng.below(20);
        prompts.push((0..length).map(|_| rng.below(config.vocab as u32)).collect());
    }
    let lengths: Vec<u32> = prompts.iter().map(|prompt| prompt.len() as u32).collect();
    let (total, longest) = (lengths.iter().sum(), *lengths.iter().max().expect("rows"));
    let each = longest.div_ceil(bindings.state.limits.page_size) + 1;
    let page = |seat: u32, index: u32| PageInput { seat, index, page: 1 + seat * each + index };
    let join = |seat| JoinInput {
        seat,
        len: 0,
        last_token: 0,
        params: mail::SeatParams::greedy(),
        seen: Vec::new(),
        history: Vec::new(),
    };
    let mut prefill = StepInput {
        joins: (0..rows).map(join).collect(),
        pages: (0..rows).flat_map(|seat| (0..each).map(move |i| page(seat, i))).collect(),
        ..StepInput::default()
    };
    for (seat, prompt) in (0..).zip(&prompts) {
        prefill.add(seat, prompt, true);
    }
    let decode = StepInput::decode(0..rows);
    let mut first: Vec<u32> = Vec::new();
    for (input, key, live) in
        [(&prefill, ShapeKey::prefill(total, rows), total), (&decode, ShapeKey::decode(rows), rows)]
    {
        let plan = graph::compile(program, &target, &key, bindings)?;
        mailbox.post(input, &key)?;
        let (numbers, choices) = layers(device, arena, &plan, live, &lengths)?;
        if numbers.len() != config.layers + 1 {
            return Err(format!("{} results of {} layers", numbers.len(), config.layers).into());
        }
        mailbox.sent();
        device.sync()?;
        let output = mailbox.take()?.ok_or("no result")?;
        if first.is_empty() {
            first = output.rows().map(|row| row.first().map_or(0, |found| found.token)).collect();
        }
        let about = json!({
            "prompts": prompts, "first": first, "layers": numbers.len(), "hidden": config.hidden,
        });
        write(folder, &format!("layers-{}", key.phase.name()), &about, &numbers.concat())?;
        // Layers with experts, and for each of them the experts of all tokens, best first.
        let about = json!({
            "layers": choices.iter().map(|(layer, _)| layer).collect::<Vec<_>>(), "tokens": live,
        });
        let ids: Vec<f32> = choices.into_iter().flat_map(|(_, ids)| ids).collect();
        write(folder, &format!("choices-{}", key.phase.name()), &about, &ids)?;
    }
    Ok(())
}

/// Numbers of experts, by layer that has a router.
type Choices = Vec<(u32, Vec<f32>)>;

/// Runs the plan op by op; the embedding, then what each layer leaves, and what routers chose. The last layer may have
/// been computed for the last token of each row only: the others are then not numbers. Neither are choices that a fused
/// kernel keeps to itself.
fn layers(
    device: &Device,
    arena: &Arena,
    plan: &Plan,
    live: u32,
    lengths: &[u32],
) -> Outcome<(Vec<Vec<f32>>, Choices)> {
    let spread = |rows: Vec<f32>, cols: usize| {
        if rows.len() >= live as usize * cols {
            return rows;
        }
        let mut all = vec![f32::NAN; live as usize * cols];
        let mut end = 0;
        for (last, length) in rows.chunks_exact(cols).zip(lengths) {
            end += *length as usize * cols;
            all[end - cols..end].copy_from_slice(last);
        }
        all
    };
    let computed = |tensor: &Tensor| match tensor.rows >= live {
        true => live,
        false => lengths.len() as u32,
    };
    let whole = |tensor: &Tensor| -> Outcome<Vec<f32>> {
        let rows = numbers(device, arena, tensor, computed(tensor))?;
        Ok(spread(rows, tensor.cols as usize))
    };
    let (mut found, mut choices) = (Vec::new(), Choices::new());
    for (index, node) in plan.nodes.iter().enumerate() {
        device.run(arena, node)?;
        for op in node.op.members() {
            let Op::Route(route) = op else { continue };
            let (top, layer) = (route.routing.top as usize, node.layer.ok_or("a router's layer")?);
            let rows = match route.y.span.region {
                Region::Inside => vec![f32::NAN; live as usize * top],
                _ => experts(device, arena, &route.y, computed(&route.y), top)?,
            };
            choices.push((layer, spread(rows, top)));
        }
        let ends = plan.nodes.get(index + 1).is_none_or(|next| next.layer != node.layer);
        if let Op::Embed(op) = &node.op {
            found.push(numbers(device, arena, &op.out, live)?);
        } else if node.layer.is_some() && ends {
            let made = node.op.made().ok_or("a layer ends without a result")?;
            found.push(whole(&made)?);
        }
    }
    Ok((found, choices))
}

/// The experts of the first rows of a router's result, each as a float.
fn experts(
    device: &Device,
    arena: &Arena,
    choice: &Tensor,
    rows: u32,
    top: usize,
) -> Outcome<Vec<f32>> {
    let bytes = device.read(arena, choice.span)?;
    let words = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let words: Vec<f32> = words.map(|word| word as f32).collect();
    let rows = words.chunks_exact(2 * top).take(rows as usize);
    Ok(rows.flat_map(|row| row[..top].to_vec()).collect())
}

/// The first rows of a tensor.
fn numbers(device: &Device, arena: &Arena, tensor: &Tensor, rows: u32) -> Outcome<Vec<f32>> {
    let bytes = device.read(arena, tensor.span)?;
    let mut found = Vec::new();
    for row in 0..rows as usize {
        let at = tensor.dtype.bytes(row * tensor.stride as usize);
        let bytes = &bytes[at..][..tensor.dtype.bytes(tensor.cols as usize)];
        found.extend(tensor.dtype.decode(bytes));
    }
    Ok(found)
}
