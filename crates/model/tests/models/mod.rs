//! The tiny checkpoints of `tests/goldens`.

use std::path::{Path, PathBuf};

/// Where they are: beside this crate, or, for a test binary that was carried to another machine, under the
/// folder it is run from.
pub(crate) fn folder() -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    if built.is_dir() { built } else { "crates/model/tests/goldens".into() }
}
