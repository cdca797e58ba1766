//! `dacapo trace FILE`: converts step records (`serve --trace FILE.jsonl`) to a self-contained HTML
//! file with a zoomable strip, totals by bucket, and every eager step with its reason.

use crate::exit::{bad_file, bad_input};
use crate::output::say;
use anyhow::{Context, Result};
use clap::Args;
use serde_json::{Value, json};
use server::link::{Phase, Run, StepRecord};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

/// Convert a trace of steps to an HTML page
#[derive(Args, Debug)]
pub(crate) struct TraceArgs {
    /// Step records, one JSON object per line
    file: PathBuf,
    /// The HTML file to write [default: the trace's name with .html]
    #[arg(long, short)]
    out: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn run(args: &TraceArgs) -> Result<()> {
    let records = read(&args.file)?;
    let out = args.out.clone().unwrap_or_else(|| args.file.with_extension("html"));
    let name = args.file.file_name().unwrap_or_default().to_string_lossy();
    std::fs::write(&out, page(&name, &records)).with_context(|| out.display().to_string())?;
    say!("{} steps: {}", records.len(), out.display())?;
    Ok(())
}

/// The records of a file.
pub(crate) fn read(path: &Path) -> Result<Vec<StepRecord>> {
    let file = std::fs::File::open(path).map_err(bad_file(path))?;
    let mut records = Vec::new();
    let mut broken = None;
    for (line, number) in BufReader::new(file).lines().zip(1..) {
        let line = line.with_context(|| path.display().to_string())?;
        if line.trim().is_empty() {
            continue;
        }
        // Only the last line may be incomplete, if the trace was cut off.
        if let Some((number, e)) = broken {
            return Err(bad_input(format!("{}:{number}: {e}", path.display())));
        }
        match serde_json::from_str(&line) {
            Ok(record) => records.push(record),
            Err(e) => broken = Some((number, e)),
        }
    }
    if records.is_empty() {
        return Err(bad_input(format!("{}: no step records", path.display())));
    }
    Ok(records)
}

/// Records as compact rows, so that a page with a million of them still opens.
fn rows(records: &[StepRecord]) -> (Vec<Value>, Vec<String>) {
    let mut reasons: Vec<String> = Vec::new();
    let rows = records.iter().map(|r| {
        let reason = match &r.run {
            Run::Replayed => -1,
            Run::Eager(why) => match reasons.iter().position(|known| known == why) {
                Some(at) => at as i64,
                None => {
                    reasons.push(why.clone());
                    reasons.len() as i64 - 1
                }
            },
        };
        json!([
            r.step,
            r.at,
            u8::from(r.phase == Phase::Prefill),
            r.bucket_rows,
            r.bucket_tokens,
            r.live_rows,
            r.padded_rows,
            reason,
            r.host_us,
            r.device_us
        ])
    });
    let rows = rows.collect();
    (rows, reasons)
}

fn page(name: &str, records: &[StepRecord]) -> String {
    let (rows, reasons) = rows(records);
    let data = json!({"name": name, "rows": rows, "reasons": reasons}).to_string();
    // Inside a script element, "</" could end it early.
    let data = data.replace("</", "<\\/");
    include_str!("trace/viewer.html").replacen("\"TRACE\"", &data, 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: u64, run: Run) -> StepRecord {
        StepRecord {
            step,
            at: step * 1000,
            phase: Phase::Decode,
            bucket_rows: 8,
            bucket_tokens: 8,
            live_rows: 5,
            live_tokens: 5,
            share: None,
            drafts: None,
            padded_rows: 3,
            run,
            host_us: 7,
            device_us: 900,
        }
    }

    #[test]
    fn a_page_has_every_step_and_is_self_contained() {
        let records = [
            record(1, Run::Replayed),
            record(2, Run::Eager("</script> is no reason".into())),
            record(3, Run::Eager("</script> is no reason".into())),
        ];
        let (rows, reasons) = rows(&records);
        assert_eq!((rows.len(), reasons.len()), (3, 1));
        let page = page("t.jsonl", &records);
        assert!(page.contains("[3,3000,0,8,8,5,3,0,7,900]"));
        assert_eq!(page.matches("</script>").count(), 1);
        assert!(!page.contains("https://") && !page.contains("\"TRACE\""));
    }

    #[test]
    fn only_the_last_line_may_be_incomplete() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.jsonl");
        let line = serde_json::to_string(&record(1, Run::Replayed)).unwrap();
        std::fs::write(&path, format!("{line}\n{}", &line[..20])).unwrap();
        assert_eq!(read(&path).unwrap().len(), 1);
        std::fs::write(&path, format!("{}\n{line}\n", &line[..20])).unwrap();
        assert!(read(&path).is_err());
        std::fs::write(&path, "").unwrap();
        assert!(read(&path).is_err());
    }
}
