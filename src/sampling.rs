//! Sampling flags, combined with the model's defaults.

use crate::exit::{bad_file, bad_input};
use anyhow::Result;
use clap::Args;
use engine::request::Sampling;
use grammar::Grammar;
use model::ModelConfig;
use model::config::SamplingDefaults;
use std::path::PathBuf;

/// Sampling flags. Missing ones come from the model's `generation_config.json`; without that,
/// sampling is greedy.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Sampling (default: the model's settings, else greedy)")]
pub(crate) struct SamplingArgs {
    /// At most this many new tokens
    #[arg(long, short = 'n', value_name = "N", default_value_t = 512)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_tokens: u32,
    /// At least this many new tokens
    #[arg(long, value_name = "N", default_value_t = 0)]
    min_tokens: u32,
    /// 0 always picks the likeliest token; larger values are more random
    #[arg(long, short, value_name = "X")]
    temperature: Option<f32>,
    /// Sample from the K likeliest tokens; 0 is all
    #[arg(long, value_name = "K")]
    top_k: Option<u32>,
    /// Sample from the likeliest tokens that together have this probability
    #[arg(long, value_name = "P")]
    top_p: Option<f32>,
    /// Drop tokens less likely than this share of the likeliest
    #[arg(long, value_name = "P")]
    min_p: Option<f32>,
    /// Make tokens that already occurred less likely; 1 is off
    #[arg(long, value_name = "X")]
    repetition_penalty: Option<f32>,
    /// Make tokens less likely each time they occur in the answer; 0 is off
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// Make tokens less likely once they occur in the answer; 0 is off
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Seed; the same seed gives the same answer
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Stop before this string (may be repeated)
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
    /// Continue past the model's end-of-text tokens
    #[arg(long)]
    ignore_eos: bool,
    /// Restrict the answer to JSON of this schema
    #[arg(long, value_name = "FILE", group = "grammar_choice")]
    json_schema: Option<PathBuf>,
    /// Restrict the answer to this regular expression
    #[arg(long, value_name = "REGEX", group = "grammar_choice")]
    regex: Option<String>,
    /// Restrict the answer to this Lark grammar
    #[arg(long, value_name = "FILE", group = "grammar_choice")]
    grammar: Option<PathBuf>,
}

impl SamplingArgs {
    /// The sampling parameters for this model, without [`Self::grammar`].
    pub(crate) fn sampling(&self, config: &ModelConfig) -> Result<Sampling> {
        // If the model turns sampling off, its other settings are ignored.
        let suggested = match config.sampling.do_sample {
            Some(false) => SamplingDefaults::default(),
            _ => config.sampling,
        };
        let greedy = Sampling::default();
        let sampling = Sampling {
            temperature: self.temperature.or(suggested.temperature).unwrap_or(greedy.temperature),
            top_k: self.top_k.or(suggested.top_k).unwrap_or(greedy.top_k),
            top_p: self.top_p.or(suggested.top_p).unwrap_or(greedy.top_p),
            min_p: self.min_p.or(suggested.min_p).unwrap_or(greedy.min_p),
            repetition_penalty: self
                .repetition_penalty
                .or(suggested.repetition_penalty)
                .unwrap_or(greedy.repetition_penalty),
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            seed: self.seed,
            max_tokens: self.max_tokens,
            min_tokens: self.min_tokens,
            ignore_eos: self.ignore_eos,
            ..greedy
        };
        check_ranges(&sampling)?;
        Ok(sampling)
    }

    /// The grammar of the answer, not yet compiled.
    pub(crate) fn grammar(&self) -> Result<Option<Grammar>> {
        let read = |path: &PathBuf| std::fs::read_to_string(path).map_err(bad_file(path));
        Ok(match (&self.json_schema, &self.regex, &self.grammar) {
            (Some(path), _, _) => Some(Grammar::JsonSchema(read(path)?)),
            (_, Some(regex), _) => Some(Grammar::Regex(regex.clone())),
            (_, _, Some(path)) => Some(Grammar::Lark(read(path)?)),
            _ => None,
        })
    }
}

/// Refuses values out of range.
fn check_ranges(sampling: &Sampling) -> Result<()> {
    let within = |flag: &str, value: f32, low: f32, high: f32| match (low..=high).contains(&value) {
        true => Ok(()),
        false => Err(bad_input(format!("--{flag} {value}: must be between {low} and {high}"))),
    };
    within("temperature", sampling.temperature, 0.0, 100.0)?;
    within("top-p", sampling.top_p, 0.0, 1.0)?;
    within("min-p", sampling.min_p, 0.0, 1.0)?;
    within("repetition-penalty", sampling.repetition_penalty, 0.01, 100.0)?;
    within("frequency-penalty", sampling.frequency_penalty, -100.0, 100.0)?;
    within("presence-penalty", sampling.presence_penalty, -100.0, 100.0)?;
    match sampling.max_tokens {
        0 => Err(bad_input("--max-tokens 0: must be at least 1")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        sampling: SamplingArgs,
    }

    fn sampling(flags: &[&str], suggested: SamplingDefaults) -> Result<Sampling> {
        let flags = Flags::try_parse_from([&["x"], flags].concat())?;
        let mut config = ModelConfig::bundled("qwen3-0.6b")?;
        config.sampling = suggested;
        flags.sampling.sampling(&config)
    }

    #[test]
    fn flags_override_the_model_which_overrides_greedy() {
        let suggested =
            SamplingDefaults { temperature: Some(0.6), top_k: Some(20), ..Default::default() };
        let both = sampling(&["-t", "0.2"], suggested).unwrap();
        assert_eq!((both.temperature, both.top_k, both.top_p), (0.2, 20, 1.0));
        assert_eq!(sampling(&[], SamplingDefaults::default()).unwrap().temperature, 0.0);
        let off = SamplingDefaults { do_sample: Some(false), ..suggested };
        assert_eq!(sampling(&[], off).unwrap().temperature, 0.0);
    }

    #[test]
    fn values_out_of_range_are_refused() {
        for flags in [
            ["-t", "-1"],
            ["-t", "NaN"],
            ["--top-p", "1.5"],
            ["--min-p", "-0.1"],
            ["--repetition-penalty", "0"],
            ["-n", "0"],
        ] {
            assert!(sampling(&flags, SamplingDefaults::default()).is_err(), "{flags:?}");
        }
        let flags = Flags::try_parse_from(["x", "--json-schema", "missing.json"]).unwrap();
        assert!(flags.sampling.grammar().is_err());
        let negative = sampling(&["--presence-penalty", "-1"], SamplingDefaults::default());
        assert_eq!(negative.unwrap().presence_penalty, -1.0);
    }
}
