//! A file of prompts to a file of answers, across any number of kills.
//!
//! Every line of the input is one item; every line of the output answers one, names it by its line
//! number, and carries a fingerprint of the item's text. An answer is appended with one write that
//! ends in a newline, so a kill leaves at most one torn line at the end: it is cut off when the
//! batch is opened again, and its item is answered again. Nothing is lost and nothing is repeated.

use crate::exec::Executor;
use crate::offline::{Completion, Offline};
use crate::request::{Reject, Request, Token};
use serde_json::{Map, Value, json};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// The longest line read, in bytes.
pub(crate) const MAX_LINE: u64 = 64 << 20;

/// Why a batch cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// A file could not be read or written.
    #[error("{path}: {error}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// A line of the output that is no answer; only the last may be torn.
    #[error("{path}, line {line}: {problem}")]
    NotAnAnswer {
        /// The output.
        path: PathBuf,
        /// Counted from 1.
        line: u64,
        /// What is wrong with it.
        problem: String,
    },
    /// The output answers another input.
    #[error("{path}, line {line} answers something else than line {item} of the input")]
    OtherInput {
        /// The output.
        path: PathBuf,
        /// Counted from 1.
        line: u64,
        /// The input line it names, counted from 1.
        item: u64,
    },
}

/// One line of the input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Its line, counted from 1.
    pub line: u64,
    /// Its text.
    pub text: String,
}

/// An input and the answers it has so far.
#[derive(Debug)]
pub struct Batch {
    input: BufReader<File>,
    input_path: PathBuf,
    output: File,
    output_path: PathBuf,
    line: u64,
    /// Fingerprints of the items answered before this batch was opened, by line.
    answered: BTreeMap<u64, u64>,
    /// Fingerprints of the items taken and not yet answered.
    open: BTreeMap<u64, u64>,
    total: u64,
    done: u64,
}

impl Batch {
    /// Opens an input and its output, which is made when it is not there. Cuts a torn last line off
    /// the output, and refuses an output that answers another input.
    pub fn open(input: &Path, output: &Path) -> Result<Batch, BatchError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |error| BatchError::Io { path: path.clone(), error }
        };
        let mut items = BufReader::new(File::open(input).map_err(failed(input))?);
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false);
        let mut out = options.open(output).map_err(failed(output))?;
        let answered = answers(&mut out, output)?;
        let (mut total, mut line) = (0, 0);
        let mut missing = answered.clone();
        while let Some(text) = read_line(&mut items).map_err(failed(input))? {
            line += 1;
            total += u64::from(!text.trim().is_empty());
            if let Some((at, print)) = missing.remove(&line)
                && print != fingerprint(&text)
            {
                return Err(BatchError::OtherInput {
                    path: output.to_owned(),
                    line: at,
                    item: line,
                });
            }
        }
        if let Some((&item, &(at, _))) = missing.first_key_value() {
            return Err(BatchError::OtherInput { path: output.to_owned(), line: at, item });
        }
        items.rewind().map_err(failed(input))?;
        Ok(Batch {
            input: items,
            input_path: input.to_owned(),
            output: out,
            output_path: output.to_owned(),
            line: 0,
            done: answered.len() as u64,
            answered: answered.into_iter().map(|(item, (_, print))| (item, print)).collect(),
            open: BTreeMap::new(),
            total,
        })
    }

    /// Items in the input.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Items answered, before and since it was opened.
    pub fn done(&self) -> u64 {
        self.done
    }

    /// The next item without an answer.
    pub fn take(&mut self) -> Result<Option<Item>, BatchError> {
        loop {
            let read = read_line(&mut self.input);
            let read =
                read.map_err(|error| BatchError::Io { path: self.input_path.clone(), error });
            let Some(text) = read? else { return Ok(None) };
            self.line += 1;
            if text.trim().is_empty() || self.answered.contains_key(&self.line) {
                continue;
            }
            self.open.insert(self.line, fingerprint(&text));
            return Ok(Some(Item { line: self.line, text }));
        }
    }

    /// Appends the answer of an item that was taken. `answer` becomes part of the output line.
    pub fn record(&mut self, line: u64, answer: Map<String, Value>) -> Result<(), BatchError> {
        let print = self.open.remove(&line).unwrap_or_default();
        let mut object = Map::new();
        object.insert("line".into(), line.into());
        object.insert("input".into(), format!("{print:016x}").into());
        object.extend(answer);
        let mut bytes = Value::Object(object).to_string().into_bytes();
        bytes.push(b'\n');
        let written = self.output.write_all(&bytes);
        written.map_err(|error| BatchError::Io { path: self.output_path.clone(), error })?;
        self.done += 1;
        Ok(())
    }

    /// Answers everything that has no answer. `request` makes a request of an item, `enough` is called
    /// with every token and its item's line and may end the answer there, `answer` makes the fields of an
    /// output line; an item that is no request, or is refused, is answered by an `error` field.
    /// `progress` is called with the number of items done and in all.
    pub fn run<X: Executor>(
        self,
        engine: &mut Offline<X>,
        mut request: impl FnMut(&Item) -> Result<Request, String>,
        mut enough: impl FnMut(u64, Token) -> bool,
        mut answer: impl FnMut(&Item, &Completion) -> Map<String, Value>,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<(), BatchError> {
        progress(self.done, self.total);
        // Shared by the iterator that feeds the engine and the closures that receive its tokens.
        let shared = RefCell::new((self, Vec::<Option<Item>>::new(), Ok(())));
        let requests = std::iter::from_fn(|| {
            let (batch, taken, result) = &mut *shared.borrow_mut();
            while result.is_ok() {
                let item = match batch.take() {
                    Ok(item) => item?,
                    Err(error) => {
                        *result = Err(error);
                        return None;
                    }
                };
                match request(&item) {
                    Ok(request) => {
                        taken.push(Some(item));
                        return Some(request);
                    }
                    Err(problem) => *result = batch.record(item.line, refusal(problem)),
                }
            }
            None
        });
        let enough = |index: u64, _: u32, token: Token| {
            let (_, taken, _) = &*shared.borrow();
            let item = taken.get(index as usize).and_then(Option::as_ref);
            item.is_some_and(|item| enough(item.line, token))
        };
        engine.stream_until(requests, enough, |index, completion| {
            let (batch, taken, result) = &mut *shared.borrow_mut();
            let Some(item) = taken.get_mut(index as usize).and_then(Option::take) else {
                return true;
            };
            if result.is_ok() {
                let fields = match &completion {
                    Ok(completion) => answer(&item, completion),
                    Err(reason) => refusal(Reject::to_string(reason)),
                };
                *result = batch.record(item.line, fields);
                progress(batch.done, batch.total);
            }
            result.is_ok()
        });
        let (batch, _, result) = shared.into_inner();
        result?;
        let synced = batch.output.sync_data();
        synced.map_err(|error| BatchError::Io { path: batch.output_path, error })
    }
}

fn refusal(problem: String) -> Map<String, Value> {
    let mut fields = Map::new();
    fields.insert("error".into(), json!(problem));
    fields
}

/// Reads the answers of an output, by the item they answer: (line of the output, fingerprint).
/// Leaves the file cut after the last whole line, positioned at its end.
fn answers(file: &mut File, path: &Path) -> Result<BTreeMap<u64, (u64, u64)>, BatchError> {
    let io = |error| BatchError::Io { path: path.to_owned(), error };
    let mut reader = BufReader::new(&mut *file);
    let mut answers = BTreeMap::new();
    let (mut whole, mut line) = (0u64, 0);
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        let read = (&mut reader).take(MAX_LINE).read_until(b'\n', &mut bytes).map_err(io)?;
        if bytes.pop() != Some(b'\n') {
            break;
        }
        whole += read as u64;
        line += 1;
        let bad =
            |problem: String| BatchError::NotAnAnswer { path: path.to_owned(), line, problem };
        let value: Value =
            serde_json::from_slice(&bytes).map_err(|error| bad(error.to_string()))?;
        let item = value["line"].as_u64();
        let print = value["input"].as_str().and_then(|text| u64::from_str_radix(text, 16).ok());
        let (Some(item), Some(print)) = (item, print) else {
            return Err(bad("no `line` and `input`".into()));
        };
        if answers.insert(item, (line, print)).is_some() {
            return Err(bad(format!("line {item} of the input has an answer already")));
        }
    }
    drop(reader);
    file.set_len(whole).map_err(io)?;
    file.seek(SeekFrom::End(0)).map_err(io)?;
    Ok(answers)
}

/// The next line without its end, or nothing at the end of the file.
fn read_line(reader: &mut BufReader<File>) -> io::Result<Option<String>> {
    let mut text = String::new();
    if reader.take(MAX_LINE).read_line(&mut text)? == 0 {
        return Ok(None);
    }
    let kept = text.trim_end_matches(['\n', '\r']).len();
    text.truncate(kept);
    Ok(Some(text))
}

/// FNV-1a: it detects that a file was changed; it does not protect against a deliberate collision.
fn fingerprint(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
