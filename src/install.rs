//! `dacapo completions` and `dacapo man`: files that packages install beside the program.

use crate::cli::Cli;
use crate::output::Output;
use anyhow::{Context, Result};
use clap::{Args, CommandFactory};
use clap_complete::Shell;
use std::io::Write;
use std::path::PathBuf;

/// Print the completions of a shell
///
/// For bash: dacapo completions bash > ~/.local/share/bash-completion/completions/dacapo
#[derive(Args, Debug)]
pub(crate) struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

/// Write the manual pages, one per command, to a folder
#[derive(Args, Debug)]
pub(crate) struct ManArgs {
    /// The folder; it is created
    folder: PathBuf,
}

pub(crate) fn completions(args: &CompletionsArgs) -> Result<()> {
    // Written in one go: the generator panics where it cannot write.
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "dacapo", &mut text);
    Ok(Output::new().write_all(&text)?)
}

pub(crate) fn man(args: &ManArgs) -> Result<()> {
    let folder = &args.folder;
    let context = || format!("writing manual pages to {}", folder.display());
    std::fs::create_dir_all(folder).with_context(context)?;
    clap_mangen::generate_to(Cli::command(), folder).with_context(context)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_manual_page_and_every_shell_completions() {
        let folder = tempfile::tempdir().unwrap();
        man(&ManArgs { folder: folder.path().to_owned() }).unwrap();
        for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let page = folder.path().join(format!("dacapo-{}.1", command.get_name()));
            let text = std::fs::read_to_string(&page).unwrap();
            assert!(text.contains(".TH") && text.contains("OPTIONS"), "{}", page.display());
        }
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "dacapo", &mut text);
            let text = String::from_utf8(text).unwrap();
            assert!(text.contains("quantize") && text.contains("memory-share"), "{shell}");
        }
    }
}
