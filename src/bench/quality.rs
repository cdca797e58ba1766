//! `dacapo bench quality`: what rounding weights or activations costs, measured on a text.

mod needle;

use super::record;
use crate::cli::{Global, KvType};
use crate::exit::{bad_file, bad_input};
use crate::loading::{self, LoadArgs, Loaded};
use crate::numbers::TOKENS;
use crate::output::say;
use crate::progress;
use anyhow::Result;
use clap::Args;
use engine::request::Token;
use formats::tokenizer::Tokenizer;
use model::quality::{Compared, Quality, compare};
use model::{Precision, Reading};
use serde::Serialize;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The project's own prose, so that the command needs no file.
const PROSE: &str = include_str!("../../testing/texts/prose.txt");
/// Tokens of a window by default.
const WINDOW: u32 = 512;
/// Tokens of a needle test by default.
const HAYSTACK: u32 = 32_768;
/// Tokens whose logits are compared at once: with a vocabulary of 262,144, 32 MiB of each model.
const PIECE: u32 = 32;
/// Tokens of a text that are compared.
const ALL: u32 = 1 << 20;

/// Measure what quantising costs: perplexity, divergence and agreement against the same model unquantised
///
/// Reads a text with two models and compares their distributions after every token. `--quantize`, `--kv-dtype` and `--numerics` apply
/// to the measured model, not to the reference. `--numerics exact --quantize fp8 --against exact` measures the rounding of
/// weights alone.
#[derive(Args, Debug)]
pub(crate) struct QualityArgs {
    #[command(flatten)]
    load: LoadArgs,
    /// The reference: bf16 or exact (float32), the same model in these numbers; or another model with the same vocabulary
    #[arg(long, value_name = "bf16|exact|MODEL", default_value = "bf16")]
    against: Against,
    /// The text to read [default: 4,300 words of English prose]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Tokens of the text at most [default: all]
    #[arg(long, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u32).range(TOKENS))]
    tokens: Option<u32>,
    /// Tokens of a window, which is read without what is before it [default: 512; 32768 with --needle]
    #[arg(long, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u32).range(16..=*TOKENS.end()))]
    context: Option<u32>,
    /// Instead, hide key sentences in the text, repeated to fill the window, and ask for each
    #[arg(long)]
    needle: bool,
    /// Keys to hide
    #[arg(long, value_name = "N", default_value_t = 20, requires = "needle")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=needle::MOST))]
    keys: u32,
    /// Write the results, with machine and command, to this file (- is standard output)
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What a model is compared with.
#[derive(Clone, Debug)]
enum Against {
    Exact,
    Bf16,
    Model(String),
}

impl FromStr for Against {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "exact" => Against::Exact,
            "bf16" => Against::Bf16,
            model => Against::Model(model.to_owned()),
        })
    }
}

/// A model, and how it was loaded.
#[derive(Clone, Debug, Serialize)]
struct Side {
    name: String,
    /// Activations.
    activations: String,
    /// Bytes of all weights.
    weights: u64,
}

impl Side {
    fn of(loaded: &Loaded, how: &str) -> Side {
        Side {
            name: format!("{} {how}", loaded.name),
            activations: format!("{:?}", loaded.program.shape.act_dtype).to_lowercase(),
            weights: loaded.program.weight_bytes(),
        }
    }
}

/// The measured model and its reference.
struct Pair {
    measured: Loaded,
    reference: Loaded,
    sides: [Side; 2],
}

/// The results over a text.
#[derive(Clone, Debug, Serialize)]
struct Figure {
    measured: Side,
    reference: Side,
    tokens: usize,
    windows: usize,
    window: u32,
    perplexity: f64,
    reference_perplexity: f64,
    /// The increase of the perplexity, and its standard error.
    worse: f64,
    worse_error: f64,
    /// From the reference's distribution, in nats.
    divergence: f64,
    divergence_p99: f64,
    top1_agreement: f64,
}

pub(crate) fn run(args: &QualityArgs, global: &Global) -> Result<()> {
    let read = |path: &PathBuf| std::fs::read_to_string(path).map_err(bad_file(path));
    let text = args.text.as_ref().map(read).transpose()?;
    let text = text.as_deref().unwrap_or(PROSE);
    if args.needle {
        let window = args.context.unwrap_or(HAYSTACK);
        let mut pair = Pair::load(args, global, window)?;
        let figure = needle::measure(&mut pair, text, window, args.keys)?;
        return finish(args.json.as_deref(), &pair.measured.device, &figure, || figure.print());
    }
    let window = args.context.unwrap_or(WINDOW);
    let mut pair = Pair::load(args, global, window)?;
    let figure = measure(&mut pair, text, window, args.tokens.unwrap_or(ALL))?;
    finish(args.json.as_deref(), &pair.measured.device, &figure, || figure.print())
}

fn finish<F: Serialize>(
    json: Option<&Path>,
    device: &str,
    figure: &F,
    print: impl FnOnce() -> Result<()>,
) -> Result<()> {
    if let Some(path) = json {
        record::write(path, &record::record(device, figure)?)?;
    }
    if json == Some("-".as_ref()) {
        return Ok(());
    }
    say!("{device}")?;
    print()
}

impl Pair {
    fn load(args: &QualityArgs, global: &Global, window: u32) -> Result<Pair> {
        // One more for the token that begins every text.
        let load = args.load.for_context(window.saturating_add(1));
        // Rows are what the head computes logits of at once.
        let measured = loading::load(&load.one_of(2), global, PIECE)?;
        let plain = Global { quantize: None, kv_dtype: KvType::Auto, ..global.clone() };
        let (reference, how) = match &args.against {
            Against::Exact => {
                (loading::load_precise(&load, &plain, PIECE, Some(Precision::EXACT))?, "exact")
            }
            Against::Bf16 => {
                (loading::load_precise(&load, &plain, PIECE, Some(Precision::BF16))?, "bf16")
            }
            Against::Model(model) => (loading::load(&load.of_model(model), &plain, PIECE)?, ""),
        };
        let limit = measured.config.max_position.min(reference.config.max_position);
        if window as usize > limit {
            return Err(bad_input(format!(
                "--context {window}: the model's limit is {limit} tokens"
            )));
        }
        let numerics = clap::ValueEnum::to_possible_value(&global.numerics);
        let numerics = numerics.map_or_else(String::new, |value| value.get_name().to_owned());
        let quantised = global.quantize.as_ref().and_then(clap::ValueEnum::to_possible_value);
        let quantised =
            quantised.map_or_else(String::new, |value| format!(" {}", value.get_name()));
        let pages = if global.kv_dtype == KvType::Fp8 { " kv fp8" } else { "" };
        let measures = format!("{numerics}{quantised}{pages}");
        let sides = [Side::of(&measured, &measures), Side::of(&reference, how)];
        let pair = Pair { measured, reference, sides };
        pair.check_vocabulary()?;
        Ok(pair)
    }

    fn tokenizer(&self) -> Result<&Tokenizer> {
        let text = self.measured.text.as_ref();
        let text =
            text.ok_or_else(|| bad_input("dummy weights have no tokenizer to read a text with"))?;
        Ok(&text.tokenizer)
    }

    /// Refuses a reference whose tokens mean something else.
    fn check_vocabulary(&self) -> Result<()> {
        let [ours, theirs] = [&self.measured, &self.reference].map(|side| side.config.vocab);
        let name = |at: usize| &self.sides[at].name;
        if ours != theirs {
            return Err(bad_input(format!(
                "{} has {ours} tokens and {} has {theirs}: their distributions cannot be compared",
                name(0),
                name(1)
            )));
        }
        let (Some(a), Some(b)) = (&self.measured.text, &self.reference.text) else { return Ok(()) };
        let differs = |id: &u32| a.tokenizer.token_bytes(*id) != b.tokenizer.token_bytes(*id);
        match (0..ours as u32).find(differs) {
            None => Ok(()),
            Some(id) => Err(bad_input(format!(
                "token {id} of {} is another one in {}: their distributions cannot be compared",
                name(0),
                name(1)
            ))),
        }
    }
}

/// Compares both models over a text, window by window.
fn measure(pair: &mut Pair, text: &str, window: u32, most: u32) -> Result<Figure> {
    let tokenizer = pair.tokenizer()?;
    // What the model expects before a text, if anything.
    let begin = tokenizer.encode_text("", true)?;
    let mut tokens = tokenizer.encode_text(text, false)?;
    tokens.truncate(most as usize);
    let windows: Vec<Vec<Token>> = tokens
        .chunks(window as usize)
        .map(|part| begin.iter().chain(part).copied().collect())
        .collect();
    let bar = progress::count(tokens.len() as u64, "tokens");
    let [measured, reference] = [&mut pair.measured, &mut pair.reference];
    let (mut measured, mut reference) =
        (Reading::new(&mut measured.executor), Reading::new(&mut reference.executor));
    let mut compared: Vec<Compared> = Vec::with_capacity(tokens.len());
    for window in &windows {
        measured.rewind(0);
        reference.rewind(0);
        let most = measured.most().min(reference.most()) as usize;
        // The last token is only predicted.
        let fed = &window[..window.len() - 1];
        for (index, step) in fed.chunks(most).enumerate() {
            let targets = &window[index * most + 1..];
            compare_step(&mut measured, &mut reference, step, targets, &mut compared)?;
            bar.set_position(compared.len() as u64);
        }
    }
    bar.finish_and_clear();
    let quality = Quality::of(&compared)
        .ok_or_else(|| bad_input("the text has no token to predict: give a longer one"))?;
    let [measured, reference] = pair.sides.clone();
    Ok(Figure {
        measured,
        reference,
        tokens: quality.tokens,
        windows: windows.len(),
        window,
        perplexity: quality.measured,
        reference_perplexity: quality.reference,
        worse: quality.worse,
        worse_error: quality.worse_error,
        divergence: quality.divergence,
        divergence_p99: quality.divergence_p99,
        top1_agreement: quality.agreement,
    })
}

/// Feeds the same tokens to both and compares a few rows of logits at a time, so that memory stays small.
fn compare_step(
    measured: &mut Reading<'_>,
    reference: &mut Reading<'_>,
    step: &[Token],
    targets: &[Token],
    compared: &mut Vec<Compared>,
) -> Result<()> {
    measured.feed(step)?;
    reference.feed(step)?;
    let (measured, reference) = (measured.logits()?, reference.logits()?);
    let count = step.len() as u32;
    for first in (0..count).step_by(PIECE as usize) {
        let some = PIECE.min(count - first);
        let targets = &targets[first as usize..][..some as usize];
        let (theirs, ours) = (reference.read(first, some)?, measured.read(first, some)?);
        compared.extend(compare(&theirs, &ours, targets));
    }
    Ok(())
}

impl Figure {
    fn print(&self) -> Result<()> {
        let Figure { tokens, windows, window, .. } = self;
        say!("{tokens} tokens in {windows} windows of up to {window}")?;
        say!("model                                activations   weights MB  perplexity")?;
        let sides =
            [(&self.measured, self.perplexity), (&self.reference, self.reference_perplexity)];
        for (side, perplexity) in sides {
            let Side { name, activations, weights } = side;
            let megabytes = *weights as f64 * 1e-6;
            say!("{name:<36} {activations:>11} {megabytes:>12.1} {perplexity:>11.4}")?;
        }
        let [worse, error] = [self.worse, self.worse_error].map(|share| share * 100.0);
        say!("perplexity {worse:+.2} % (standard error {error:.2})")?;
        let agreement = self.top1_agreement * 100.0;
        say!(
            "divergence {:.5} nats in the mean, 99th percentile {:.4}; same likeliest token {agreement:.1} %",
            self.divergence,
            self.divergence_p99
        )?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prose_is_long_enough() {
        assert!(PROSE.split_whitespace().count() >= 3000);
        assert!(PROSE.is_ascii(), "one byte for each character");
    }

    #[test]
    fn a_reference_is_a_precision_or_a_model() {
        let parse = |text: &str| text.parse::<Against>().unwrap();
        assert!(matches!(parse("exact"), Against::Exact));
        assert!(matches!(parse("bf16"), Against::Bf16));
        assert!(matches!(parse("org/name"), Against::Model(name) if name == "org/name"));
    }
}
