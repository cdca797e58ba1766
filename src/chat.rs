//! `dacapo chat`: a conversation on a terminal.

use crate::cli::Global;
use crate::exit::{self, Interrupted};
use crate::generate::{Ask, Ending, Speaker};
use crate::interrupt::Interrupt;
use crate::loading::{self, LoadArgs};
use crate::models::HubEnv;
use crate::output::{note, say};
use crate::prompt::Conversation;
use crate::sampling::SamplingArgs;
use crate::show::Screen;
use crate::steps;
use anyhow::Result;
use clap::Args;
use engine::exec::Executor;
use engine::request::Sampling;
use rustyline::error::ReadlineError;
use std::path::PathBuf;

/// Chat with a model
///
/// Arrow keys edit the line and browse the history. Ctrl-C stops an answer; twice at the prompt, it
/// exits. /help lists the commands.
#[derive(Args, Debug)]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    load: LoadArgs,
    /// System message
    #[arg(long, short, value_name = "TEXT")]
    system: Option<String>,
    #[command(flatten)]
    sampling: SamplingArgs,
}

const HELP: &str = "\
/reset          clear the conversation, but keep the system message
/system TEXT    set the system message and clear the conversation; without TEXT: show it
/help           show this list
/exit           exit (also Ctrl-D, or Ctrl-C twice)";

/// A parsed line.
#[derive(Debug, PartialEq, Eq)]
enum Line<'a> {
    Nothing,
    Say(&'a str),
    Reset,
    System(&'a str),
    Help,
    Exit,
    Unknown(&'a str),
}

fn parse(line: &str) -> Line<'_> {
    let line = line.trim();
    let Some(command) = line.strip_prefix('/') else {
        return if line.is_empty() { Line::Nothing } else { Line::Say(line) };
    };
    let (word, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
    match word {
        "reset" => Line::Reset,
        "system" => Line::System(rest.trim()),
        "help" => Line::Help,
        "exit" | "quit" => Line::Exit,
        _ => Line::Unknown(line),
    }
}

pub(crate) fn run(args: &ChatArgs, global: &Global) -> Result<()> {
    let interrupt = Interrupt::install()?;
    let loaded = loading::load(&args.load, global, 1)?;
    let sampling = loaded.sampling(&args.sampling)?;
    let (name, device) = (loaded.name.clone(), loaded.device.clone());
    let talk = loaded.talk()?;
    let mut chat = Chat {
        conversation: Conversation::new(talk.tokenizer.clone(), talk.template, args.system.clone()),
        speaker: Speaker::new(talk.engine, talk.tokenizer),
        sampling,
        stop: args.sampling.stop.clone(),
        interrupt,
    };
    if !chat.conversation.has_template() {
        note!("note: this model has no chat template; it will continue your text");
    }
    note!("Chat with {name} on {device}. /help lists the commands; Ctrl-D or /exit ends it.");
    let outcome = chat.run();
    steps::warn(chat.speaker.executor());
    outcome
}

struct Chat<X: Executor> {
    conversation: Conversation,
    speaker: Speaker<X>,
    sampling: Sampling,
    stop: Vec<String>,
    interrupt: Interrupt,
}

impl<X: Executor> Chat<X> {
    fn run(&mut self) -> Result<()> {
        let mut editor = rustyline::DefaultEditor::new()?;
        let history = history_path();
        if let Some(path) = &history {
            // At the first start there is no history file.
            let _ = editor.load_history(path);
        }
        let outcome = self.talk(&mut editor);
        if let Some(path) = &history {
            save_history(&mut editor, path);
        }
        outcome
    }

    fn talk(&mut self, editor: &mut rustyline::DefaultEditor) -> Result<()> {
        let mut leaving = false;
        loop {
            let line = match editor.readline("> ") {
                Ok(line) => line,
                Err(ReadlineError::Eof) => return Ok(()),
                Err(ReadlineError::Interrupted) if leaving => return Err(Interrupted.into()),
                Err(ReadlineError::Interrupted) => {
                    leaving = true;
                    note!("(press Ctrl-C again to exit, or type /exit)");
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            leaving = false;
            // A failure to store the line does not matter.
            let _ = editor.add_history_entry(line.trim());
            match parse(&line) {
                Line::Nothing => {}
                Line::Say(text) => self.say(text)?,
                Line::Reset => self.conversation.reset(),
                Line::System("") => {
                    say!("{}", self.conversation.system().unwrap_or("(no system message)"))?;
                }
                Line::System(text) => {
                    self.conversation.set_system(Some(text.to_owned()));
                    self.conversation.reset();
                }
                Line::Help => say!("{HELP}")?,
                Line::Exit => return Ok(()),
                Line::Unknown(command) => note!("{command}: no such command; /help lists them"),
            }
        }
    }

    /// One turn of the user and of the model. An error in a turn does not end the conversation.
    fn say(&mut self, text: &str) -> Result<()> {
        let prompt = match self.conversation.ask(text) {
            Ok(prompt) => prompt,
            Err(error) => {
                note!("error: {error:#}");
                return Ok(());
            }
        };
        let sampling = self.sampling.clone();
        let setup = prompt.setup(self.speaker.tokenizer(), &sampling, self.stop.clone());
        let ask = Ask { prompt: prompt.tokens, sampling, setup, prompt_logprobs: None };
        let mut screen = Screen::new();
        let answer = self.speaker.answer(ask, &self.interrupt, &mut |piece| screen.show(piece));
        screen.end_line()?;
        match answer {
            Ok(answer) => {
                note!("[{}]", answer.summary());
                // An empty turn of the model would mislead it later.
                match answer.ending != Ending::Stop && answer.text.is_empty() {
                    true => {
                        if answer.ending == Ending::Length {
                            note!(
                                "note: there is no answer, so the question is not kept; --max-tokens is the limit"
                            );
                        }
                        self.conversation.take_back();
                    }
                    false => self.conversation.answered(&answer.text),
                }
            }
            Err(error) if exit::code(&error) == exit::OUTPUT_CLOSED => return Err(error),
            Err(error) => {
                self.conversation.take_back();
                note!("error: {error:#}");
            }
        }
        Ok(())
    }
}

/// The history file.
fn history_path() -> Option<PathBuf> {
    Some(HubEnv::read().own_cache().ok()?.join("chat_history.txt"))
}

/// Saves the history, readable only by its owner; errors are ignored.
fn save_history(editor: &mut rustyline::DefaultEditor, path: &PathBuf) {
    let private = path.parent().is_some_and(|folder| device::private::make(folder).is_ok());
    if private && editor.save_history(path).is_ok() {
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let _ = std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_commands_or_messages() {
        assert_eq!(parse("  "), Line::Nothing);
        assert_eq!(parse(" hello /exit "), Line::Say("hello /exit"));
        assert_eq!(parse("/reset"), Line::Reset);
        assert_eq!(parse("/system  You are a poet. "), Line::System("You are a poet."));
        assert_eq!(parse("/system"), Line::System(""));
        assert_eq!(parse("/quit"), Line::Exit);
        assert_eq!(parse("/nothing of it"), Line::Unknown("/nothing of it"));
    }
}
