//! `dacapo embed MODEL -i FILE -o FILE`: vectors of a file of texts. It may be killed and started again at any time; lines
//! that have a vector are skipped.

use crate::cli::Global;
use crate::exit::bad_input;
use crate::loading::{self, LoadArgs, Loaded, ModelText};
use crate::output::note;
use crate::progress;
use crate::run::failures;
use anyhow::{Context, Result, bail};
use clap::Args;
use engine::Engine;
use engine::batch::{Batch, Item};
use engine::request::{Embed, Pooling, Request, RequestId, Sampling};
use model::Task;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::cell::Cell;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Make vectors of a file of texts
///
/// Every line of the input is a text: JSON (a string, or an object with `text` and perhaps `id`) in a .jsonl file, the
/// line itself in any other. The output is a line of JSON for each, or one array if its name ends in .npy. The same
/// command goes on where it was stopped.
#[derive(Args, Debug)]
pub(crate) struct EmbedArgs {
    #[command(flatten)]
    load: LoadArgs,
    /// The texts, one in each line
    #[arg(short, long, value_name = "FILE")]
    input: PathBuf,
    /// Where vectors are written: a .jsonl or .npy file
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Cut texts that are too long instead of refusing them
    #[arg(long)]
    truncate: bool,
    /// Keep only the first numbers of each vector, for models trained for it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    dimensions: Option<u32>,
    /// Put before every text, such as an instruction that the model expects
    #[arg(long, value_name = "TEXT", default_value = "")]
    prefix: String,
}

/// A line of JSON.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    /// Repeated in the output.
    id: Option<Value>,
    text: String,
}

pub(crate) fn run(args: &EmbedArgs, global: &Global) -> Result<()> {
    let array = has_extension(&args.output, "npy");
    // An array is written when all vectors are there.
    let lines = match array {
        true => args.output.with_extension("npy.part.jsonl"),
        false => args.output.clone(),
    };
    if array && args.output.exists() {
        let file = args.output.display();
        return Err(bad_input(format!("{file} exists: remove it, or choose another name")));
    }
    let retried = failures::remove(&lines)?;
    if retried > 0 {
        note!("[{retried} lines failed before and are tried again]");
    }
    // Opened first, so that an invalid file fails before the model is loaded.
    let batch = Batch::open(&args.input, &lines).map_err(|error| bad_input(error.to_string()))?;
    let total = batch.total();
    if batch.done() < total {
        embed(args, global, batch)?;
    }
    let (made, failed) = failures::count(&lines)?;
    note!("[{made} of {total} vectors]");
    if failed > 0 {
        let file = lines.display();
        bail!(
            "{failed} of {total} lines failed; {file} has the reasons, and the same command tries them again"
        );
    }
    if array {
        write_array(&lines, &args.output)?;
        std::fs::remove_file(&lines).with_context(|| lines.display().to_string())?;
    }
    Ok(())
}

/// Makes all vectors that are missing.
fn embed(args: &EmbedArgs, global: &Global, batch: Batch) -> Result<()> {
    let loaded = loading::load(&args.load, global, SEQUENCES)?;
    note!("[memory: {}]", loaded.memory());
    let pooling = match loaded.config.task {
        Task::Generate => (Pooling::Mean, true),
        Task::Embed(_) => (Pooling::Model, false),
        Task::Classify(_) | Task::Compare { .. } => {
            return Err(bad_input("this model scores texts; it makes no vectors of them"));
        }
    };
    let config = loaded.engine_config();
    let Loaded { executor, text, .. } = loaded;
    let text = text.ok_or_else(|| bad_input("dummy weights have no tokenizer"))?;
    let geometry = engine::exec::Executor::geometry(&executor);
    let pages = geometry.pages_per_seat * geometry.page_size - 1;
    let most = engine::exec::Executor::whole_prompts(&executor).unwrap_or(pages) as usize;
    let mut engine = Engine::builder(executor).config(config).build();
    let bar = progress::count(batch.total(), "vectors");
    let (start, tokens) = (Instant::now(), Cell::new(0_u64));
    batch.run(
        &mut engine,
        |item| {
            let request = request(item, args, &text, pooling, most);
            request.map_err(|error| format!("{error:#}"))
        },
        |_, _| false,
        |item, completion| {
            tokens.set(tokens.get() + u64::from(completion.prompt_tokens));
            let mut fields = Map::new();
            if let Some(id) = parse(item, &args.input).ok().and_then(|line| line.id) {
                fields.insert("id".into(), id);
            }
            match completion.embedding.is_empty() {
                false => {
                    let vector = shorten(&completion.embedding, args.dimensions);
                    fields.insert("vector".into(), json!(vector));
                    fields.insert("tokens".into(), json!(completion.prompt_tokens));
                }
                true => {
                    fields.insert("error".into(), "the request failed on the device".into());
                }
            }
            fields
        },
        |done, _| bar.set_position(done),
    )?;
    bar.finish_and_clear();
    crate::steps::warn(engine.executor());
    let (tokens, seconds) = (tokens.get(), start.elapsed().as_secs_f64());
    let rate = tokens as f64 / seconds.max(1e-9);
    note!("[{tokens} tokens in {seconds:.2} s, {rate:.0} tok/s]");
    Ok(())
}

/// Texts that run at once, at least.
const SEQUENCES: u32 = 32;

fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|found| found.eq_ignore_ascii_case(extension))
}

/// The text of a line.
fn parse(item: &Item, input: &Path) -> Result<Line> {
    if !has_extension(input, "jsonl") {
        return Ok(Line { id: None, text: item.text.clone() });
    }
    let value: Value = serde_json::from_str(&item.text)
        .map_err(|error| bad_input(format!("not JSON: {error}")))?;
    match value {
        Value::String(text) => Ok(Line { id: None, text }),
        value => Line::deserialize(value).map_err(|error| bad_input(error.to_string())),
    }
}

fn request(
    item: &Item,
    args: &EmbedArgs,
    text: &ModelText,
    (pooling, unit): (Pooling, bool),
    most: usize,
) -> Result<Request> {
    let words = format!("{}{}", args.prefix, parse(item, &args.input)?.text);
    let mut tokens = text.tokenizer.encode(&words, true)?;
    if tokens.len() > most {
        if !args.truncate {
            let found = tokens.len();
            return Err(bad_input(format!(
                "the text has {found} tokens; at most {most} fit: --truncate cuts it"
            )));
        }
        // The special tokens behind a text stay.
        let end = tokens.len() - text.tokenizer.closing();
        tokens.drain(end - (tokens.len() - most)..end);
    }
    let embed = Some(Embed { pooling, unit });
    let sampling = Sampling { max_tokens: 1, ..Sampling::default() };
    Ok(Request { embed, ..Request::new(RequestId(0), tokens, sampling) })
}

/// The first numbers of a vector, with the length 1.
fn shorten(vector: &[f32], dimensions: Option<u32>) -> Vec<f32> {
    let Some(keep) = dimensions.map(|n| n as usize).filter(|&n| n < vector.len()) else {
        return vector.to_vec();
    };
    let kept = &vector[..keep];
    let length = kept.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt() as f32;
    kept.iter().map(|x| if length > 0.0 { x / length } else { *x }).collect()
}

/// Writes the vectors of a file of lines as an array of NumPy, in the order of the input.
fn write_array(lines: &Path, output: &Path) -> Result<()> {
    let mut vectors: Vec<(u64, Vec<f32>)> = Vec::new();
    for line in BufReader::new(File::open(lines)?).lines() {
        let value: Value = serde_json::from_str(&line?)?;
        let vector = Vec::<f32>::deserialize(&value["vector"])?;
        vectors.push((value["line"].as_u64().unwrap_or(0), vector));
    }
    vectors.sort_by_key(|(line, _)| *line);
    let width = vectors.first().map_or(0, |(_, vector)| vector.len());
    // Written under another name first: a file under its own name is whole.
    let part = output.with_extension("npy.part");
    let mut file = BufWriter::new(File::create(&part)?);
    let shape = format!("({}, {width})", vectors.len());
    let mut header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}");
    // The header ends in a newline, and data at a multiple of 64 bytes.
    header.push_str(&" ".repeat((64 - (10 + header.len() + 1) % 64) % 64));
    header.push('\n');
    file.write_all(b"\x93NUMPY\x01\x00")?;
    file.write_all(&(header.len() as u16).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    for (_, vector) in &vectors {
        if vector.len() != width {
            bail!("vectors of {width} and of {} numbers", vector.len());
        }
        for number in vector {
            file.write_all(&number.to_le_bytes())?;
        }
    }
    file.into_inner().map_err(|error| error.into_error())?.sync_all()?;
    std::fs::rename(&part, output)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_text_or_json() {
        let line = |text: &str| Item { line: 1, text: text.into() };
        let (plain, json) = (Path::new("a.txt"), Path::new("a.jsonl"));
        assert_eq!(parse(&line("{x"), plain).unwrap().text, "{x");
        assert_eq!(parse(&line("\"x\""), json).unwrap().text, "x");
        let object = parse(&line(r#"{"text": "x", "id": 3}"#), json).unwrap();
        assert_eq!((object.text.as_str(), object.id), ("x", Some(serde_json::json!(3))));
        assert!(parse(&line("{x"), json).is_err());
        assert!(parse(&line(r#"{"txt": "x"}"#), json).is_err());
    }

    #[test]
    fn an_array_has_a_header_of_whole_lines() {
        let folder = tempfile::tempdir().unwrap();
        let (lines, array) = (folder.path().join("a.jsonl"), folder.path().join("a.npy"));
        let text = "{\"line\": 2, \"vector\": [3, 4]}\n{\"line\": 1, \"vector\": [1, 2]}\n";
        std::fs::write(&lines, text).unwrap();
        write_array(&lines, &array).unwrap();
        let bytes = std::fs::read(&array).unwrap();
        assert!(bytes.starts_with(b"\x93NUMPY\x01\x00"));
        let header = u16::from_le_bytes([bytes[8], bytes[9]]) as usize;
        assert!((10 + header).is_multiple_of(64) && bytes[9 + header] == b'\n');
        let numbers = bytes[10 + header..].chunks(4);
        let numbers: Vec<f32> =
            numbers.map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        assert_eq!(numbers, [1.0, 2.0, 3.0, 4.0], "in the order of the input");
    }

    #[test]
    fn short_vectors_have_the_length_1() {
        assert_eq!(shorten(&[3.0, 4.0, 9.0], Some(2)), [0.6, 0.8]);
        assert_eq!(shorten(&[3.0, 4.0], Some(2)), [3.0, 4.0]);
        assert_eq!(shorten(&[3.0, 4.0], None), [3.0, 4.0]);
    }
}
