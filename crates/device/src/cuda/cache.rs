//! Cubins on disk, under a hash of everything that decides them: sources, options, compiler and architecture. An
//! entry has a checksum and is written to a temporary file that is then renamed, so processes may share the folder.
//! An entry that is incomplete is compiled again; so is one that another user could have written, because kernels are
//! code.

use super::compile::{Compiled, Compiler};
use super::launch::KernelKey;
use super::source;
use crate::private::{self, NotPrivate};
use crate::{Error, Result, notice};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

const MAGIC: &[u8; 8] = b"dacapok1";
/// Magic, checksum of everything after it, flags.
const HEAD: usize = 8 + 32 + 1;

/// A folder of compiled kernels.
#[derive(Clone, Debug)]
pub struct Cache {
    /// Or why there is no folder.
    folder: Result<PathBuf, NotPrivate>,
}

/// Where a kernel came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The folder had it.
    Disk,
    /// It was compiled now.
    Compiled,
}

impl Cache {
    /// A cache in this folder, which is created with the first entry.
    pub fn new(folder: impl Into<PathBuf>) -> Cache {
        Cache { folder: Ok(folder.into()) }
    }

    /// The user's cache, `kernels` in `private::cache_root`. If there is no such folder, or others could have written
    /// to it, every kernel is compiled.
    pub fn of_user() -> Cache {
        let folder = private::cache_root().and_then(|root| {
            private::check(&root)?;
            let folder = root.join("kernels");
            private::check(&folder)?;
            Ok(folder)
        });
        Cache { folder }
    }

    /// The folder, or why there is none.
    pub fn folder(&self) -> Result<&Path> {
        self.folder.as_deref().map_err(|problem| Error::NotPrivate(problem.clone()))
    }

    /// Entries and their bytes.
    pub fn size(&self) -> (usize, u64) {
        let entries = self.folder.iter().flat_map(std::fs::read_dir).flatten().flatten();
        entries
            .filter(|entry| entry.path().extension().is_some_and(|e| e == "cubin"))
            .filter_map(|entry| entry.metadata().ok())
            .fold((0, 0), |(count, bytes), meta| (count + 1, bytes + meta.len()))
    }

    /// The file of a key.
    pub fn path(&self, compiler: &Compiler, key: &KernelKey, arch: &str) -> Result<PathBuf> {
        Ok(self.folder()?.join(Self::name(compiler, key, arch)?))
    }

    fn name(compiler: &Compiler, key: &KernelKey, arch: &str) -> Result<String> {
        let mut hash = blake3::Hasher::new();
        let mut part = |bytes: &[u8]| {
            hash.update(&(bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        let (major, minor) = compiler.found().version;
        part(format!("nvrtc {major}.{minor}").as_bytes());
        part(key.entry.as_bytes());
        for option in Compiler::options(key, arch) {
            part(option.as_bytes());
        }
        for (name, text) in source::closure(&key.source)? {
            part(name.as_bytes());
            part(text.as_bytes());
        }
        Ok(format!("{}-{}.cubin", key.source, hash.finalize().to_hex()))
    }

    /// A kernel from disk, or compiled and stored. A cache that cannot be written is not an error: only the next
    /// start has to compile again.
    pub fn get(
        &self,
        compiler: &Compiler,
        key: &KernelKey,
        arch: &str,
    ) -> Result<(Compiled, Origin)> {
        let name = Self::name(compiler, key, arch)?;
        let path = self.folder().map(|folder| folder.join(name));
        if let Some(compiled) = path.as_ref().ok().and_then(|path| read(path)) {
            return Ok((compiled, Origin::Disk));
        }
        let compiled = compiler.compile(key, arch)?;
        if let Err(problem) = path.and_then(|path| self.write(&path, &compiled)) {
            static SAID: AtomicU64 = AtomicU64::new(0);
            if SAID.fetch_add(1, Ordering::Relaxed) == 0 {
                notice::say(format_args!("kernel cache not written: {problem}"));
            }
        }
        Ok((compiled, Origin::Compiled))
    }

    /// Many kernels, as many at a time as there are processors, with a progress bar on a terminal.
    pub fn get_all(
        &self,
        compiler: &Compiler,
        keys: &[KernelKey],
        arch: &str,
    ) -> Result<Vec<(Compiled, Origin)>> {
        let bar = ProgressBar::new(keys.len() as u64).with_message("kernels");
        // Reading a warm cache takes milliseconds; a progress bar would only flicker.
        if keys.len() < 2 || !std::io::stderr().is_terminal() {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        if let Ok(style) = ProgressStyle::with_template("{msg} {bar:32} {pos}/{len} {elapsed}") {
            bar.set_style(style);
        }
        let next = AtomicUsize::new(0);
        let results = Mutex::new(vec![None; keys.len()]);
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(keys.len());
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    loop {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        let Some(key) = keys.get(index) else { break };
                        let result = self.get(compiler, key, arch);
                        results.lock().expect("no holder panics")[index] = Some(result);
                        bar.inc(1);
                    }
                });
            }
        });
        bar.finish_and_clear();
        let results = results.into_inner().expect("no holder panics");
        results.into_iter().map(|result| result.expect("every index was taken")).collect()
    }

    fn write(&self, path: &Path, compiled: &Compiled) -> Result<()> {
        let failed = |path: &Path| {
            let path = path.display().to_string();
            move |problem: std::io::Error| Error::Io { path, problem: problem.to_string() }
        };
        private::make(self.folder()?).map_err(Error::NotPrivate)?;
        static UNIQUE: AtomicU64 = AtomicU64::new(0);
        let unique = UNIQUE.fetch_add(1, Ordering::Relaxed);
        let aside = path.with_extension(format!("{}-{unique}.part", std::process::id()));
        let written = (|| {
            let mut file = std::fs::File::create(&aside)?;
            file.write_all(&encode(compiled))?;
            file.sync_all()?;
            std::fs::rename(&aside, path)
        })();
        written.map_err(|problem| {
            // A half-written file is useless; its removal may fail for the same reason.
            let _ = std::fs::remove_file(&aside);
            failed(path)(problem)
        })
    }
}

fn encode(compiled: &Compiled) -> Vec<u8> {
    let mut body = vec![u8::from(compiled.waits)];
    body.extend_from_slice(&compiled.cubin);
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(blake3::hash(&body).as_bytes());
    bytes.extend_from_slice(&body);
    bytes
}

/// A complete entry that no other user could have written, or nothing.
fn read(path: &Path) -> Option<Compiled> {
    let bytes = private::read(path).ok()?;
    let (head, cubin) = bytes.split_at_checked(HEAD)?;
    let whole = head[..8] == *MAGIC && blake3::hash(&bytes[40..]).as_bytes() == &head[8..40];
    whole.then(|| Compiled { cubin: cubin.to_vec(), waits: head[40] != 0 })
}
