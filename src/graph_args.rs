//! `--graph-config` and the `--graph-*` flags, generated from the graph crate's table of options.

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use graph::config::{self, Given};
use std::collections::BTreeMap;

/// The flags about device graphs.
#[derive(Clone, Debug, Default)]
pub(crate) struct GraphArgs {
    /// The flags as input for the graph crate.
    pub(crate) given: Given,
}

const CONFIG: &str = "graph-config";
const HEADING: &str = "Device graphs";
/// A short flag, and the option it sets.
const DETERMINISTIC: &str = "deterministic";
const KERNELS: (&str, &str) = ("graph-kernels", "fixed");

impl Args for GraphArgs {
    fn augment_args(command: Command) -> Command {
        let config = Arg::new(CONFIG)
            .long(CONFIG)
            .value_name("JSON|@FILE")
            .help("All graph options as one JSON object; overrides the flags below")
            .help_heading(HEADING);
        let deterministic = Arg::new(DETERMINISTIC)
            .long(DETERMINISTIC)
            .action(clap::ArgAction::SetTrue)
            .conflicts_with(KERNELS.0)
            .help("The same request gives the same tokens, independent of other requests; slower")
            .help_heading(HEADING);
        config::flags().fold(command.arg(config).arg(deterministic), |command, setting| {
            let flag = setting.flag.expect("flags() returns only options with a flag");
            command.arg(
                Arg::new(flag)
                    .long(flag)
                    .value_name("VALUE")
                    .help(config::help(setting))
                    .help_heading(HEADING),
            )
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for GraphArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let text = |name: &str| matches.get_one::<String>(name).cloned();
        let flags = config::flags().filter_map(|setting| setting.flag);
        let mut flags: BTreeMap<String, String> =
            flags.filter_map(|flag| Some((flag.to_owned(), text(flag)?))).collect();
        if matches.get_flag(DETERMINISTIC) {
            flags.insert(KERNELS.0.to_owned(), KERNELS.1.to_owned());
        }
        Ok(Self { given: Given { config: text(CONFIG), flags } })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        graph: GraphArgs,
    }

    #[test]
    fn every_option_is_a_flag() {
        let line = ["x", "--graph-config", "{}", "--graph-backend-decode", "full"];
        let given = Flags::parse_from(line).graph.given;
        assert_eq!(given.config.as_deref(), Some("{}"));
        assert_eq!(given.flags.get("graph-backend-decode").map(String::as_str), Some("full"));
        assert_eq!(given.flags.len(), 1);
        assert!(Flags::try_parse_from(["x", "--graph-nonsense", "1"]).is_err());
        let fixed = Flags::parse_from(["x", "--deterministic"]).graph.given;
        assert_eq!(fixed.flags.get("graph-kernels").map(String::as_str), Some("fixed"));
        let both = ["x", "--deterministic", "--graph-kernels", "auto"];
        assert!(Flags::try_parse_from(both).is_err());
    }
}
