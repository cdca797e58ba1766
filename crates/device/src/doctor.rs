//! What this machine has, what will be used, and how to fix what is missing.

use crate::cuda::{Gpu, cache::Cache, compile::Compiler, gpus, library};
use crate::{Device, DeviceChoice, Error};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// A library that was looked for.
#[derive(Clone, Debug, Serialize)]
pub struct Library {
    /// What it is for.
    pub name: &'static str,
    /// Where it is and which version, if it was found.
    pub found: Option<library::Found>,
    /// Why not, if it was not.
    pub problem: Option<String>,
}

/// A GPU that was found.
#[derive(Clone, Debug, Serialize)]
pub struct GpuLine {
    /// Its number, as in `cuda:N`.
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// The architecture kernels are compiled for.
    pub arch: String,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of its memory.
    pub memory: u64,
}

/// Everything the doctor found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The processor's features that ops use.
    pub cpu: String,
    /// Threads this process may use.
    pub threads: usize,
    /// Bytes of memory that are available.
    pub memory: u64,
    /// The GPUs.
    pub gpus: Vec<GpuLine>,
    /// Driver, NVRTC and cuBLASLt.
    pub libraries: Vec<Library>,
    /// The kernel cache's folder, if there is one.
    pub cache: Option<PathBuf>,
    /// Why there is none.
    pub cache_problem: Option<String>,
    /// Its entries.
    pub cache_entries: usize,
    /// Their bytes.
    pub cache_bytes: u64,
    /// What `--device auto` takes, and why.
    pub uses: String,
    /// What to do about what is missing; empty when nothing is.
    pub fixes: Vec<String>,
}

/// Examines the machine. Opens the device it would use, so that the report is about a device that was tried.
pub fn report() -> Report {
    let mut fixes = Vec::new();
    let libraries = vec![
        line("NVIDIA driver", library::driver().map(|found| &found.found), &mut fixes),
        line("NVRTC", Compiler::find().map(|compiler| compiler.found()), &mut fixes),
        line("cuBLASLt", library::cublas_lt().map(|found| &found.found), &mut fixes),
    ];
    // Without a driver no GPU can be used, so the other libraries are not needed.
    if libraries[0].found.is_none() {
        fixes.truncate(1);
    }
    let cache = Cache::of_user();
    let (cache_entries, cache_bytes) = cache.size();
    let uses = match Device::open(DeviceChoice::Auto) {
        Ok((_, line)) => line,
        Err(problem) => {
            fixes.push(problem.to_string());
            "nothing".into()
        }
    };
    Report {
        cpu: crate::cpu::describe_features(),
        threads: std::thread::available_parallelism().map_or(1, |n| n.get()),
        memory: crate::cpu::memory::available(),
        gpus: gpus().unwrap_or_default().into_iter().map(GpuLine::from).collect(),
        libraries,
        cache: cache.folder().ok().map(Path::to_owned),
        cache_problem: cache.folder().err().map(|problem| problem.to_string()),
        cache_entries,
        cache_bytes,
        uses,
        fixes,
    }
}

impl From<Gpu> for GpuLine {
    fn from(gpu: Gpu) -> GpuLine {
        let Gpu { ordinal, name, memory, target } = gpu;
        GpuLine { ordinal, name, arch: target.arch(), multiprocessors: target.sms, memory }
    }
}

fn line(
    name: &'static str,
    found: Result<&'static library::Found, Error>,
    fixes: &mut Vec<String>,
) -> Library {
    match found {
        Ok(found) => Library { name, found: Some(found.clone()), problem: None },
        Err(problem) => {
            fixes.push(match &problem {
                Error::MissingLibrary { library, fix, .. } => format!("{library}: {fix}"),
                other => other.to_string(),
            });
            Library { name, found: None, problem: Some(problem.to_string()) }
        }
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let gib = |bytes: u64| bytes as f64 / f64::from(1u32 << 30);
        writeln!(f, "CPU       {} thread(s), {}", self.threads, self.cpu)?;
        writeln!(f, "memory    {:.1} GiB available", gib(self.memory))?;
        for gpu in &self.gpus {
            let GpuLine { ordinal, name, arch, multiprocessors, memory } = gpu;
            let gib = gib(*memory);
            writeln!(f, "GPU {ordinal}     {name}, {arch}, {multiprocessors} SMs, {gib:.1} GiB")?;
        }
        if self.gpus.is_empty() {
            writeln!(f, "GPU       none")?;
        }
        for Library { name, found, problem } in &self.libraries {
            match (found, problem) {
                (Some(library::Found { path, version: (major, minor), .. }), _) => {
                    writeln!(f, "{name:<14} {major}.{minor} at {}", path.display())?;
                }
                (None, Some(problem)) => writeln!(f, "{name:<14} {problem}")?,
                (None, None) => writeln!(f, "{name:<14} not looked for")?,
            }
        }
        let megabytes = self.cache_bytes as f64 / 1e6;
        let entries = self.cache_entries;
        match (&self.cache, &self.cache_problem) {
            (Some(folder), _) => {
                let folder = folder.display();
                writeln!(f, "kernel cache   {entries} kernels, {megabytes:.1} MB in {folder}")?;
            }
            (None, problem) => {
                writeln!(f, "kernel cache   none: {}", problem.as_deref().unwrap_or_default())?;
            }
        }
        writeln!(f, "uses      {}", self.uses)?;
        for fix in &self.fixes {
            writeln!(f, "to use a GPU   {fix}")?;
        }
        Ok(())
    }
}
