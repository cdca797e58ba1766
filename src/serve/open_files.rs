//! How many files the process may have open: as many as the system lets it, and what that means for
//! connections, each of which is one.

use crate::output::note;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use server::Limits;

/// Files besides connections: the log, the model, the device's, and callers that are turned away.
const BESIDES: u64 = 128;

/// Raises the limit on open files to what the system allows, and lowers the limit on connections to
/// what that has room for. Says so where it does.
pub(super) fn make_room(limits: &mut Limits) {
    let files = raise();
    let Some(fit) = files.and_then(|files| connections_that_fit(files, limits.connections)) else {
        return;
    };
    let (files, asked) = (files.unwrap_or_default(), limits.connections);
    limits.connections = fit;
    note!("warning: at most {files} open files (ulimit -n): connections={fit} instead of {asked}");
}

/// The limit in force afterwards; `None` is none.
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

/// How many connections there is room for, if that is fewer than wanted.
fn connections_that_fit(files: u64, wanted: u64) -> Option<u64> {
    // Where there is hardly room for anything, half of it.
    let fit = files.saturating_sub(BESIDES).max(files / 2).max(1);
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
