//! The kernel sources, embedded in the binary.

use crate::{Error, Result};

/// Name and text of every `.cu` and `.cuh` file under `kernels/`.
pub static SOURCES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// The text of a file of [`SOURCES`].
pub fn text(name: &str) -> Option<&'static str> {
    SOURCES.iter().find(|(file, _)| *file == name).map(|(_, text)| *text)
}

/// A kernel file and every header it includes, directly or not, the file first.
pub fn closure(stem: &str) -> Result<Vec<(&'static str, &'static str)>> {
    let file = format!("{stem}.cu");
    let mut files = vec![find(&file, stem)?];
    let mut next = 0;
    while next < files.len() {
        let includes = files[next].1.lines().filter_map(|line| {
            let name = line.trim().strip_prefix("#include")?.trim().strip_prefix('"')?;
            name.split('"').next()
        });
        for name in includes {
            if !files.iter().any(|(file, _)| *file == name) {
                files.push(find(name, stem)?);
            }
        }
        next += 1;
    }
    Ok(files)
}

fn find(name: &str, kernel: &str) -> Result<(&'static str, &'static str)> {
    SOURCES.iter().find(|(file, _)| *file == name).copied().ok_or_else(|| Error::Compile {
        kernel: kernel.into(),
        log: format!("{name} is not among the embedded sources"),
    })
}
