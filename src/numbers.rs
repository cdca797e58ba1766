//! The ranges of numbers on the command line. A number out of range is a usage error; the upper
//! bounds are beyond every machine, and keep sums and products from overflowing.

use std::ops::RangeInclusive;

/// Sequences that run at once.
pub(crate) const SEQUENCES: RangeInclusive<i64> = 1..=4096;
/// Tokens of a prompt, an answer, a context or a step.
pub(crate) const TOKENS: RangeInclusive<i64> = 1..=MOST_TOKENS;
/// Tokens before a step, which may be none.
pub(crate) const TOKENS_BEFORE: RangeInclusive<i64> = 0..=MOST_TOKENS;
/// Tokens of a KV page.
pub(crate) const PAGE: RangeInclusive<i64> = 1..=65_536;
/// How often something is measured.
pub(crate) const TIMES: RangeInclusive<i64> = 1..=1_000_000;

const MOST_TOKENS: i64 = 1 << 24;

/// A number above 0.
pub(crate) fn positive(text: &str) -> Result<f64, String> {
    within(text, |number| number > 0.0 && number < f64::INFINITY, "must be more than 0")
}

/// A fraction from 0 to 1.
pub(crate) fn fraction(text: &str) -> Result<f64, String> {
    within(text, |number| (0.0..=1.0).contains(&number), "must be between 0 and 1")
}

/// A fraction of something that is not empty.
pub(crate) fn share(text: &str) -> Result<f64, String> {
    within(text, |number| number > 0.0 && number <= 1.0, "must be above 0 and at most 1")
}

fn within(text: &str, holds: impl Fn(f64) -> bool, wrong: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|_| "not a number")?;
    holds(number).then_some(number).ok_or_else(|| wrong.into())
}

#[cfg(test)]
mod tests {
    use crate::cli::Cli;
    use clap::error::ErrorKind;
    use clap::{Arg, Command, CommandFactory};
    use std::any::TypeId;
    use std::collections::BTreeSet;

    /// Flags for which 0 has a meaning.
    const ZERO: [&str; 15] = [
        "context",
        "frequency-penalty",
        "min-p",
        "min-tokens",
        "pause",
        "port",
        "presence-penalty",
        "prompt-logprobs",
        "repetition-penalty",
        "seed",
        "shared-prefix",
        "temperature",
        "top-k",
        "top-p",
        "warmup",
    ];
    /// Flags for which every number of their type has a meaning, or that are checked together with
    /// the model's settings.
    const LARGE: [&str; 13] = [
        "frequency-penalty",
        "kv-cache",
        "kv-host-memory",
        "kv-states",
        "max-tokens",
        "min-p",
        "min-tokens",
        "presence-penalty",
        "repetition-penalty",
        "seed",
        "temperature",
        "top-k",
        "top-p",
    ];

    /// Values that are too large for a flag of this type; `None` if its type is not a number.
    fn too_large(arg: &Arg) -> Option<&'static [&'static str]> {
        let of = arg.get_value_parser().type_id();
        let is = |types: &[TypeId]| types.iter().any(|one| of == *one);
        if is(&[TypeId::of::<u16>(), TypeId::of::<u32>()])
            || is(&[TypeId::of::<u64>(), TypeId::of::<usize>()])
        {
            return Some(&["4294967295", "9223372036854775807", "18446744073709551615"]);
        }
        is(&[TypeId::of::<f32>(), TypeId::of::<f64>()]).then_some(&["1e400", "inf", "NaN"])
    }

    /// Whether a value of a flag is refused as such, wherever it is given.
    fn refused(path: &[String], flag: &str, value: &str) -> bool {
        let line = path.iter().cloned().chain([format!("--{flag}={value}")]);
        let kind = Cli::command().try_get_matches_from(line).err().map(|error| error.kind());
        matches!(kind, Some(ErrorKind::ValueValidation | ErrorKind::InvalidValue))
    }

    fn check(command: &Command, path: &[String], seen: &mut BTreeSet<String>) {
        for arg in command.get_arguments() {
            let (Some(flag), Some(large)) = (arg.get_long(), too_large(arg)) else { continue };
            seen.insert(flag.to_owned());
            let at = path.join(" ");
            if !ZERO.contains(&flag) {
                assert!(refused(path, flag, "0"), "{at} --{flag} 0");
            }
            if !LARGE.contains(&flag) {
                for value in large {
                    assert!(refused(path, flag, value), "{at} --{flag} {value}");
                }
            }
            for value in ["", "x", "-1x", "1,x"] {
                assert!(refused(path, flag, value), "{at} --{flag} {value}");
            }
            for value in arg.get_default_values() {
                let value = value.to_str().unwrap_or_default();
                assert!(!refused(path, flag, value), "{at} --{flag} {value}");
            }
        }
        for inner in command.get_subcommands() {
            check(inner, &[path, &[inner.get_name().to_owned()]].concat(), seen);
        }
    }

    #[test]
    fn numbers_out_of_range_are_usage_errors_in_every_command() {
        let mut seen = BTreeSet::new();
        check(&Cli::command(), &["dacapo".to_owned()], &mut seen);
        for flag in ["batch", "page-size", "rate", "steps", "threads", "timeout"] {
            assert!(seen.contains(flag), "{flag} is not among {seen:?}");
        }
        let listed: BTreeSet<String> = ZERO.iter().chain(&LARGE).map(|&f| f.to_owned()).collect();
        assert!(listed.is_subset(&seen), "no such flags: {:?}", listed.difference(&seen));
    }
}
