//! Lines of a batch's output that say why an item failed. They are removed when the batch runs
//! again, so that their items are tried again.

use anyhow::{Context, Result};
use serde_json::Value;
use std::fs;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::Path;

/// Whether a line of the output is a failure.
fn is_failure(line: &[u8]) -> bool {
    let value: Option<Value> = serde_json::from_slice(line).ok();
    value.is_some_and(|value| value.get("error").is_some())
}

/// Calls `each` with every line, with its end.
fn lines(path: &Path, mut each: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
    let mut reader = BufReader::new(fs::File::open(path)?);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line)? > 0 {
        each(&line)?;
        line.clear();
    }
    Ok(())
}

/// The number of answers and of failures in an output.
pub(crate) fn count(path: &Path) -> Result<(u64, u64)> {
    let (mut all, mut failures) = (0, 0);
    let read = lines(path, |line| {
        all += 1;
        failures += u64::from(is_failure(line));
        Ok(())
    });
    read.with_context(|| path.display().to_string())?;
    Ok((all - failures, failures))
}

/// Removes the failures of an output, if it exists; returns their number. The file is replaced at
/// once, so that a kill loses nothing.
pub(crate) fn remove(path: &Path) -> Result<u64> {
    if !path.is_file() {
        return Ok(0);
    }
    let (_, failures) = count(path)?;
    if failures == 0 {
        return Ok(0);
    }
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".retry");
    let kept = path.with_file_name(name);
    let write = || -> io::Result<()> {
        let mut out = BufWriter::new(fs::File::create(&kept)?);
        lines(path, |line| if is_failure(line) { Ok(()) } else { out.write_all(line) })?;
        out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        fs::rename(&kept, path)
    };
    write().with_context(|| kept.display().to_string())?;
    Ok(failures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_removed_and_answers_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.jsonl");
        assert_eq!(remove(&path).unwrap(), 0);
        let good = "{\"line\": 1, \"text\": \"error\"}\n";
        let torn = "{\"line\": 3, \"err";
        fs::write(&path, format!("{good}{{\"line\": 2, \"error\": \"x\"}}\n{torn}")).unwrap();
        assert_eq!((count(&path).unwrap(), remove(&path).unwrap()), ((2, 1), 1));
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{good}{torn}"));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
