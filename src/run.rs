//! `dacapo run`: answers one prompt, or a file of prompts.

mod batch;
pub(crate) mod failures;

use crate::cli::Global;
use crate::exit::Interrupted;
use crate::generate::{Ask, Ending, Speaker};
use crate::interrupt::Interrupt;
use crate::loading::{self, LoadArgs};
use crate::numbers::SEQUENCES;
use crate::output::{note, say};
use crate::prompt::{self, Conversation};
use crate::sampling::SamplingArgs;
use crate::show::Screen;
use crate::steps::{self, StepCounts};
use anyhow::Result;
use clap::Args;
use std::path::PathBuf;

/// Answer one prompt, or a file of prompts
///
/// The answer is streamed to standard output, everything else goes to standard error. Without -p
/// the prompt is read from standard input.
#[derive(Args, Debug)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    load: LoadArgs,
    /// The prompt
    #[arg(long, short, value_name = "TEXT")]
    prompt: Option<String>,
    /// System message
    #[arg(long, short, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// Use the prompt as it is, without the model's chat template
    #[arg(long)]
    raw: bool,
    /// Print one JSON object instead of the text
    #[arg(long, group = "objects")]
    json: bool,
    /// With --json or --batch: return the log-probability of every prompt token after the first,
    /// with N alternatives
    #[arg(long, value_name = "N", requires = "objects")]
    #[arg(value_parser = clap::value_parser!(u32).range(0..=20))]
    prompt_logprobs: Option<u32>,
    /// Answer every line of a file: JSON objects with `prompt` or `messages`, or JSON strings; run
    /// again to resume after an interruption
    #[arg(
        long,
        value_name = "FILE",
        group = "objects",
        requires = "output",
        conflicts_with = "prompt"
    )]
    batch: Option<PathBuf>,
    /// Output file of --batch, one JSON object per line
    #[arg(long, short, value_name = "FILE", requires = "batch")]
    output: Option<PathBuf>,
    /// Most lines of --batch answered at once
    #[arg(long, value_name = "N", default_value_t = 32, requires = "batch")]
    #[arg(value_parser = clap::value_parser!(u32).range(SEQUENCES))]
    max_batch: u32,
    #[command(flatten)]
    sampling: SamplingArgs,
}

pub(crate) fn run(args: &RunArgs, global: &Global) -> Result<()> {
    if let (Some(input), Some(output)) = (&args.batch, &args.output) {
        return batch::run(args, global, input, output);
    }
    // Checked first: a prompt that was taken as the model leaves the prompt empty.
    args.load.check_name()?;
    let text = prompt::from_flag_or_stdin(args.prompt.as_deref())?;
    let interrupt = Interrupt::install()?;
    let loaded = loading::load(&args.load, global, 1)?;
    let sampling = loaded.sampling(&args.sampling)?;
    let (model, device) = (loaded.name.clone(), loaded.device.clone());
    let memory = loaded.memory();
    let talk = loaded.talk()?;
    let prompt = match args.raw {
        true => prompt::raw(&talk.tokenizer, &text)?,
        false => {
            let tokenizer = talk.tokenizer.clone();
            let mut chat = Conversation::new(tokenizer, talk.template, args.system.clone());
            if !chat.has_template() {
                note!("note: this model has no chat template; the prompt is used as it is");
            }
            chat.ask(&text)?
        }
    };
    if !args.json {
        note!("[memory: {memory}]");
    }
    let setup = prompt.setup(&talk.tokenizer, &sampling, args.sampling.stop.clone());
    let prompt_logprobs = args.prompt_logprobs;
    let ask = Ask { prompt: prompt.tokens, sampling, setup, prompt_logprobs };
    let mut speaker = Speaker::new(talk.engine, talk.tokenizer.clone());
    let mut screen = Screen::new();
    let answer = speaker.answer(ask, &interrupt, &mut |piece| match args.json {
        true => Ok(()),
        false => screen.show(piece),
    })?;
    if args.json {
        let mut report = answer.to_json(&talk.tokenizer);
        report["model"] = model.into();
        report["device"] = device.into();
        report["memory"] = serde_json::to_value(memory)?;
        report["steps"] = StepCounts::of(speaker.executor()).to_json();
        say!("{report}")?;
    } else {
        screen.end_line()?;
        note!("[{}]", answer.summary());
    }
    steps::warn(speaker.executor());
    match answer.ending {
        Ending::Interrupted => Err(Interrupted.into()),
        Ending::Stop | Ending::Length => Ok(()),
    }
}
