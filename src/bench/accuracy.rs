//! `dacapo bench accuracy`: a model reads a text and answers questions under every way of running its graphs; all must
//! agree.

mod questions;

use super::record;
use crate::cli::Global;
use crate::exit::bad_input;
use crate::loading::{self, LoadArgs};
use crate::numbers::TOKENS;
use crate::output::say;
use crate::prompt;
use anyhow::{Result, bail};
use clap::Args;
use engine::Engine;
use engine::offline::Completion;
use engine::request::{Request, RequestId, Sampling, Token};
use questions::{Question, questions};
use serde::Serialize;
use std::path::PathBuf;

/// The project's own prose, so that the command needs no file.
const PROSE: &str = include_str!("../../testing/texts/prose.txt");
/// Sequences that run at once.
const ROWS: u32 = 16;
/// Tokens of the text that are read without what is before them.
const WINDOW: usize = 128;
/// Tokens of an answer.
const ANSWER: u32 = 6;
/// By how much the perplexity may differ where kernels are chosen for each bucket: some round activations to 8 bits.
const ROUNDING: f64 = 0.01;

/// Check that backends, buckets, launches and preparation modes give the same perplexity and answers
///
/// The model reads a text and answers 200 questions, arithmetic and choices, once for each setting of its graphs. With kernels that are
/// the same for every bucket (`--deterministic`) all settings must agree to the last bit; with the fastest kernels
/// of each bucket the perplexity must agree within 1 %. Exits with 1 if one differs.
#[derive(Args, Debug)]
pub(crate) struct AccuracyArgs {
    #[command(flatten)]
    load: LoadArgs,
    /// Tokens of the text at most
    #[arg(long, value_name = "N", default_value_t = 1024)]
    #[arg(value_parser = clap::value_parser!(u32).range(TOKENS))]
    tokens: u32,
    /// Questions at most
    #[arg(long, value_name = "N", default_value_t = 200)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=200))]
    questions: u32,
    /// Write the results, with machine and command, to this file (- is standard output)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A setting of graphs: its name, and its flags.
type Setting = (&'static str, &'static [(&'static str, &'static str)]);

/// The first is what the others are compared with. All but the last use the same kernels for every bucket.
const SETTINGS: &[Setting] = &[
    ("op by op", &[("graph-backend-decode", "disabled"), ("graph-backend-prefill", "disabled")]),
    ("full", &[]),
    ("breakable", &[("graph-backend-decode", "breakable"), ("graph-backend-prefill", "breakable")]),
    ("piecewise", &[("graph-backend-decode", "piecewise"), ("graph-backend-prefill", "piecewise")]),
    ("one bucket", &[("graph-buckets-decode", "16"), ("graph-buckets-prefill", "256")]),
    ("4 steps a launch", &[("graph-steps", "4")]),
    ("inputs copied", &[("graph-prep", "copy")]),
    ("inputs in the graph", &[("graph-prep", "fused")]),
    ("inputs beside steps", &[("graph-prep", "async")]),
    ("fastest kernels", &[("graph-kernels", "auto")]),
];

/// What one setting gave.
#[derive(Clone, Debug, Serialize)]
struct Figure {
    setting: &'static str,
    perplexity: f64,
    /// Questions answered rightly.
    right: usize,
    questions: usize,
    /// Answers that are the reference's to the last token.
    same: usize,
    agrees: bool,
}

/// What a model said under one setting.
struct Said {
    /// The log-probability of each token of the text.
    read: Vec<f32>,
    answers: Vec<Vec<Token>>,
    right: usize,
}

impl Said {
    fn perplexity(&self) -> f64 {
        let sum: f64 = self.read.iter().map(|logprob| f64::from(*logprob)).sum();
        (-sum / self.read.len() as f64).exp()
    }
}

pub(crate) fn run(args: &AccuracyArgs, global: &Global) -> Result<()> {
    let questions: Vec<Question> = questions().take(args.questions as usize).collect();
    let mut figures: Vec<Figure> = Vec::new();
    let mut reference: Option<Said> = None;
    let mut device = String::new();
    let to_stdout = args.json.as_deref() == Some("-".as_ref());
    for &(setting, flags) in SETTINGS {
        let (said, line) = say_all(args, global, flags, &questions)?;
        if figures.is_empty() && !to_stdout {
            say!("{line}")?;
            say!("setting               perplexity   right  same answers")?;
        }
        device = line;
        let reference = reference.get_or_insert_with(|| Said {
            read: said.read.clone(),
            answers: said.answers.clone(),
            right: said.right,
        });
        let figure = compare(setting, flags, &said, reference);
        if !to_stdout {
            let Figure { perplexity, right, questions, same, .. } = &figure;
            let verdict = if figure.agrees { "" } else { "  differs" };
            say!("{setting:<21} {perplexity:>10.5} {right:>7}  {same} of {questions}{verdict}")?;
        }
        figures.push(figure);
    }
    if let Some(path) = &args.json {
        record::write(path, &record::record(&device, &figures)?)?;
    }
    let differ: Vec<_> = figures.iter().filter(|figure| !figure.agrees).collect();
    if !differ.is_empty() {
        let names: Vec<_> = differ.iter().map(|figure| figure.setting).collect();
        bail!("these differ from op by op: {}", names.join(", "));
    }
    Ok(())
}

fn compare(setting: &'static str, flags: &[(&str, &str)], said: &Said, reference: &Said) -> Figure {
    let same = said.answers.iter().zip(&reference.answers).filter(|(a, b)| a == b).count();
    let (perplexity, questions) = (said.perplexity(), said.answers.len());
    let agrees = match flags.contains(&("graph-kernels", "auto")) {
        true => (perplexity / reference.perplexity() - 1.0).abs() <= ROUNDING,
        false => same == questions && said.read == reference.read,
    };
    Figure { setting, perplexity, right: said.right, questions, same, agrees }
}

/// Loads the model with these flags, and lets it read and answer; returns a description of the device, too.
fn say_all(
    args: &AccuracyArgs,
    global: &Global,
    flags: &[(&str, &str)],
    questions: &[Question],
) -> Result<(Said, String)> {
    let mut load = args.load.with_graph_flag("graph-kernels", "fixed");
    for (flag, value) in flags {
        load = load.with_graph_flag(flag, value);
    }
    let loaded = loading::load_sized(&load, global, ROWS, Some(256))?;
    let device = loaded.device.clone();
    let text = loaded.text.ok_or_else(|| bad_input("dummy weights have no tokenizer"))?;
    let mut engine = Engine::builder(loaded.executor).build();
    let mut tokens = text.tokenizer.encode_text(PROSE, false)?;
    tokens.truncate(args.tokens as usize);
    let windows = tokens.chunks(WINDOW).filter(|window| window.len() > 1);
    let greedy = |max_tokens| Sampling { max_tokens, ..Sampling::default() };
    let read = windows.map(|window| Request {
        prompt_logprobs: Some(0),
        ..Request::new(RequestId(0), window, greedy(1))
    });
    let read = all(engine.answer(read))?;
    let read = read.iter().flat_map(|answer| answer.prompt_logprobs.iter().map(|one| one.logprob));
    let read: Vec<f32> = read.collect();
    if read.is_empty() {
        return Err(bad_input("the text has no token to predict: take more --tokens"));
    }
    let ask = |question: &Question| prompt::raw(&text.tokenizer, &question.text);
    let asked = questions.iter().map(ask).collect::<Result<Vec<_>>>()?;
    let requests =
        asked.iter().map(|prompt| Request::new(RequestId(0), &prompt.tokens[..], greedy(ANSWER)));
    let answers: Vec<Vec<Token>> = all(engine.answer(requests))?
        .into_iter()
        .map(|mut answer| answer.choices.pop().map(|choice| choice.tokens).unwrap_or_default())
        .collect();
    let right = |(question, answer): (&Question, &Vec<Token>)| {
        let (mut decoder, mut said) = (::text::detokenizer(&text.tokenizer), String::new());
        answer.iter().for_each(|&token| decoder.push(token, &mut said));
        question.is_answered_by(&said)
    };
    let right = questions.iter().zip(&answers).filter(|&pair| right(pair)).count();
    Ok((Said { read, answers, right }, device))
}

fn all<E: std::error::Error + Send + Sync + 'static>(
    answers: Vec<Result<Completion, E>>,
) -> Result<Vec<Completion>> {
    Ok(answers.into_iter().collect::<Result<Vec<_>, _>>()?)
}
