//! Progress bars on standard error, drawn only on a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;

/// A bar that counts bytes, with rate and time left; silent when standard error is not a terminal.
pub(crate) fn bytes(total: u64, what: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), target());
    let shape = "{msg:<32!} {bar:28} {bytes:>10}/{total_bytes:<10} {bytes_per_sec:>12} {eta:>4}";
    bar.set_style(ProgressStyle::with_template(shape).expect("a fixed template"));
    bar.set_message(what.to_owned());
    bar
}

/// A bar that counts things.
pub(crate) fn count(total: u64, what: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), target());
    let shape = "{msg:<32!} {bar:28} {pos}/{len}";
    bar.set_style(ProgressStyle::with_template(shape).expect("a fixed template"));
    bar.set_message(what.to_owned());
    bar
}

/// A spinner for work of unknown length.
pub(crate) fn spinner(what: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, target());
    bar.set_style(ProgressStyle::with_template("{spinner} {msg}").expect("a fixed template"));
    bar.set_message(what.to_owned());
    bar.enable_steady_tick(std::time::Duration::from_millis(120));
    bar
}

fn target() -> ProgressDrawTarget {
    match std::io::stderr().is_terminal() {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    }
}
