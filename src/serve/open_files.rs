//! The limit of open files, which bounds the number of connections.

use crate::output::note;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use server::Limits;

/// Files other than connections: the log, the model, the device, and connections being refused.
const OTHER_FILES: u64 = 128;

/// Raises the limit of open files to the hard limit, and lowers the limit of connections to fit,
/// with a warning.
pub(super) fn raise_limit(limits: &mut Limits) {
    let files = raise();
    let Some(fit) = files.and_then(|files| connections_that_fit(files, limits.connections)) else {
        return;
    };
    let (files, asked) = (files.unwrap_or_default(), limits.connections);
    limits.connections = fit;
    note!("warning: at most {files} open files (ulimit -n): connections={fit} instead of {asked}");
}

/// Raises the limit; returns the new one, `None` for unlimited.
fn raise() -> Option<u64> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return current;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => maximum,
        Err(_) => current,
    }
}

/// The number of connections that fit, if fewer than wanted.
fn connections_that_fit(files: u64, wanted: u64) -> Option<u64> {
    // With a very low limit, use half of it.
    let fit = files.saturating_sub(OTHER_FILES).max(files / 2).max(1);
    (fit < wanted).then_some(fit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_room_for_other_files() {
        assert_eq!(connections_that_fit(1 << 20, 4096), None);
        assert_eq!(connections_that_fit(4096 + 128, 4096), None);
        assert_eq!(connections_that_fit(4096 + 127, 4096), Some(4095));
        assert_eq!(connections_that_fit(1024, 4096), Some(896));
        assert_eq!(connections_that_fit(1024, 100), None);
        assert_eq!(connections_that_fit(64, 4096), Some(32));
        assert_eq!(connections_that_fit(0, 4096), Some(1));
    }

    #[test]
    fn the_limit_is_raised_to_the_hard_one() {
        let files = raise();
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        assert!(current == maximum && files == current, "{current:?} of {maximum:?}");
    }
}
