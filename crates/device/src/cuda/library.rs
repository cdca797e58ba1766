//! Finds the CUDA libraries. Nothing is linked: the driver, NVRTC and cuBLASLt are searched for at run time, and each
//! is loaded once and stays loaded. The error for a missing one lists every place searched.

use super::api::{DriverApi, LtApi, NewerApi, NvrtcApi};
use crate::{Error, Result};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use serde::Serialize;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

/// A library that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Found {
    /// What it is: `driver`, `nvrtc` or `cublasLt`.
    pub library: &'static str,
    /// The file.
    pub path: PathBuf,
    /// Its version, `major.minor`.
    pub version: (u32, u32),
}

/// A library's calls and where they come from.
#[derive(Debug)]
pub(crate) struct Loaded<A> {
    pub(crate) api: A,
    pub(crate) found: Found,
}

/// Oldest driver that has every call used here.
const OLDEST_DRIVER: (u32, u32) = (12, 3);

/// The driver, loaded and initialised.
pub(crate) fn driver() -> Result<&'static Loaded<DriverApi>> {
    static ONCE: OnceLock<Result<Loaded<DriverApi>>> = OnceLock::new();
    ONCE.get_or_init(load_driver).as_ref().map_err(Clone::clone)
}

/// The driver's calls that older ones do not have; `None` if this is one.
pub(crate) fn newer_driver() -> Option<&'static NewerApi> {
    NEWER.get()?.as_ref()
}

static NEWER: OnceLock<Option<NewerApi>> = OnceLock::new();

/// The run-time compiler.
pub(crate) fn nvrtc() -> Result<&'static Loaded<NvrtcApi>> {
    static ONCE: OnceLock<Result<Loaded<NvrtcApi>>> = OnceLock::new();
    ONCE.get_or_init(|| nvrtc_in(&toolkit_places())).as_ref().map_err(Clone::clone)
}

/// cuBLASLt.
pub(crate) fn cublas_lt() -> Result<&'static Loaded<LtApi>> {
    static ONCE: OnceLock<Result<Loaded<LtApi>>> = OnceLock::new();
    ONCE.get_or_init(load_lt).as_ref().map_err(Clone::clone)
}

/// The driver's version as `major.minor`.
fn two(version: u32) -> (u32, u32) {
    (version / 1000, version % 1000 / 10)
}

fn load_driver() -> Result<Loaded<DriverApi>> {
    let names = ["libcuda.so.1".to_owned()];
    let places = system_places();
    let fix = "Install the NVIDIA driver (545 or newer), or use --device cpu.";
    let (path, library) = search("the NVIDIA driver (libcuda)", &names, &places, fix)?;
    let api = DriverApi::load(&library).map_err(|symbol| Error::MissingLibrary {
        library: "the NVIDIA driver (libcuda)".into(),
        looked: path.display().to_string(),
        fix: format!("It lacks {symbol}: update the driver to 545 or newer."),
    })?;
    NEWER.get_or_init(|| NewerApi::load(&library).ok());
    std::mem::forget(library);
    // SAFETY: the first call of the driver, as it requires.
    unsafe { api.cuInit(0) }?;
    let mut version = 0;
    // SAFETY: writes one int.
    unsafe { api.cuDriverGetVersion(&mut version) }?;
    let version = two(version as u32);
    if version < OLDEST_DRIVER {
        return Err(Error::MissingLibrary {
            library: "a recent NVIDIA driver".into(),
            looked: format!("{} (CUDA {}.{})", path.display(), version.0, version.1),
            fix: "Update the driver to 545 (CUDA 12.3) or newer.".into(),
        });
    }
    Ok(Loaded { api, found: Found { library: "driver", path, version } })
}

/// CUDA majors whose libraries this machine's driver can use, newest first. Without a driver (cross
/// compilation in tests) any major will do.
fn majors() -> Vec<u32> {
    let newest = driver().map_or(13, |driver| driver.found.version.0);
    (12..=newest).rev().collect()
}

/// The run-time compiler, searched for in the given folders only (and by the loader).
pub(crate) fn nvrtc_in(places: &[PathBuf]) -> Result<Loaded<NvrtcApi>> {
    let names: Vec<String> = majors().iter().map(|m| format!("libnvrtc.so.{m}")).collect();
    let fix = "Install it with `pip install nvidia-cuda-nvrtc`, install the CUDA toolkit, or set CUDA_HOME.";
    let what = "NVRTC (libnvrtc)";
    let (path, library) = search(what, &names, places, fix)?;
    let api = symbols(what, &path, fix, NvrtcApi::load(&library))?;
    std::mem::forget(library);
    let (mut major, mut minor) = (0, 0);
    // SAFETY: writes two ints.
    unsafe { api.nvrtcVersion(&mut major, &mut minor) }?;
    let version = (major as u32, minor as u32);
    Ok(Loaded { api, found: Found { library: "nvrtc", path, version } })
}

fn load_lt() -> Result<Loaded<LtApi>> {
    let names: Vec<String> = majors().iter().map(|m| format!("libcublasLt.so.{m}")).collect();
    let fix =
        "Install it with `pip install nvidia-cublas`, install the CUDA toolkit, or set CUDA_HOME.";
    let what = "cuBLASLt (libcublasLt)";
    let (path, library) = search(what, &names, &toolkit_places(), fix)?;
    let api = symbols(what, &path, fix, LtApi::load(&library))?;
    // SAFETY: documented to take nothing and return the version.
    let version = unsafe {
        library.get::<unsafe extern "C" fn() -> usize>(b"cublasLtGetVersion\0").map(|f| f())
    };
    std::mem::forget(library);
    // Versions 12.x and later are major · 10 000 + minor · 100.
    let version = version.map_or((0, 0), |v| ((v / 10_000) as u32, (v % 10_000 / 100) as u32));
    Ok(Loaded { api, found: Found { library: "cublasLt", path, version } })
}

fn symbols<A>(
    what: &str,
    path: &Path,
    fix: &str,
    api: std::result::Result<A, &'static str>,
) -> Result<A> {
    api.map_err(|symbol| Error::MissingLibrary {
        library: what.into(),
        looked: format!("{} (it lacks {symbol})", path.display()),
        fix: fix.into(),
    })
}

/// Tries every name in every place, then the loader's own search; newest name first.
fn search(
    what: &str,
    names: &[String],
    places: &[PathBuf],
    fix: &str,
) -> Result<(PathBuf, Library)> {
    let mut refused = Vec::new();
    // A relative place would depend on the folder the program was started in.
    let places: Vec<&PathBuf> = places.iter().filter(|place| place.is_absolute()).collect();
    for name in names {
        for place in &places {
            let path = place.join(name);
            if !path.exists() {
                continue;
            }
            load_builtins(place);
            match open(path.as_os_str()) {
                Ok(library) => return Ok((path, library)),
                Err(problem) => refused.push(problem),
            }
        }
        if let Ok(library) = open(name.as_ref()) {
            let path = loaded_path(name).unwrap_or_else(|| PathBuf::from(name));
            return Ok((path, library));
        }
    }
    let mut looked = vec!["the loader's search path".to_owned()];
    looked.extend(places.iter().map(|place| place.display().to_string()));
    looked.extend(refused);
    Err(Error::MissingLibrary { library: what.into(), looked: looked.join(", "), fix: fix.into() })
}

fn open(name: &std::ffi::OsStr) -> std::result::Result<Library, String> {
    // SAFETY: loading runs the library's initialisers; these are the vendor's own libraries, loaded
    // once and never unloaded.
    unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) }
        .map_err(|problem| format!("{} ({problem})", Path::new(name).display()))
}

/// NVRTC opens its builtins library by name only. That works for folders the loader knows, or if the library is
/// already loaded.
fn load_builtins(place: &Path) {
    let Ok(entries) = std::fs::read_dir(place) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        if name.to_string_lossy().starts_with("libnvrtc-builtins.so.")
            && let Ok(library) = open(entry.path().as_os_str())
        {
            std::mem::forget(library);
        }
    }
}

/// The file of a library that the loader found itself.
fn loaded_path(name: &str) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let stem = format!("{}.so", name.split(".so").next().unwrap_or(name));
    maps.lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .find(|path| path.rsplit('/').next().is_some_and(|file| file.starts_with(&stem)))
        .map(PathBuf::from)
}

/// Folders a driver may lie in that the loader may not know.
fn system_places() -> Vec<PathBuf> {
    ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/nvidia/lib64", "/usr/lib/wsl/lib"]
        .map(PathBuf::from)
        .to_vec()
}

/// Folders with Python packages that the program named.
static PACKAGES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Searches this folder with Python packages, too. Takes effect if no library was searched for yet.
pub fn search_packages(folder: PathBuf) {
    PACKAGES.lock().unwrap_or_else(|e| e.into_inner()).push(folder);
}

/// Folders a toolkit may be in, in this order: what the user set, the pip packages beside this program, the installed
/// toolkits, the pip packages of the pythons on the PATH.
pub(crate) fn toolkit_places() -> Vec<PathBuf> {
    let mut places = Vec::new();
    for home in ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(std::env::var_os) {
        let home = PathBuf::from(home);
        places.extend(["lib64", "lib", "targets/x86_64-linux/lib"].map(|lib| home.join(lib)));
    }
    places.extend(own_places());
    places.extend(children("/usr/local", "cuda").into_iter().rev().map(|cuda| cuda.join("lib64")));
    places.extend(system_places());
    places.extend(pip_places());
    let mut seen = HashSet::new();
    places.retain(|place| seen.insert(place.clone()));
    places
}

/// `nvidia/*/lib` of every site-packages folder of the pythons on the PATH.
fn pip_places() -> Vec<PathBuf> {
    let mut roots = Vec::new();
    roots.extend(std::env::var_os("VIRTUAL_ENV").map(PathBuf::from));
    let path = std::env::var_os("PATH").unwrap_or_default();
    // An empty or relative entry means the folder the program was started in.
    for folder in std::env::split_paths(&path).filter(|folder| folder.is_absolute()) {
        let python = folder.join("python3");
        if python.exists() {
            roots.extend(folder.parent().map(Path::to_owned));
            if let Ok(real) = python.canonicalize() {
                roots.extend(real.parent().and_then(Path::parent).map(Path::to_owned));
            }
        }
    }
    roots.extend(std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local")));
    roots.iter().flat_map(|root| packages_under(root)).flat_map(|found| nvidia(&found)).collect()
}

/// Those of the environment that this program was installed in: packages it named, and those beside its `bin` folder.
fn own_places() -> Vec<PathBuf> {
    let mut packages = PACKAGES.lock().unwrap_or_else(|e| e.into_inner()).clone();
    if let Ok(program) = std::env::current_exe()
        && let Some(root) = program.parent().and_then(Path::parent)
    {
        packages.extend(packages_under(root));
    }
    packages.iter().flat_map(|found| nvidia(found)).collect()
}

/// The folders with packages of an environment.
fn packages_under(root: &Path) -> Vec<PathBuf> {
    let pythons = ["lib", "lib64"].into_iter().flat_map(|lib| children(root.join(lib), "python3"));
    pythons
        .flat_map(|python| ["site-packages", "dist-packages"].map(|name| python.join(name)))
        .collect()
}

/// The libraries of NVIDIA's packages in a folder with packages: `nvidia/*/lib`.
fn nvidia(packages: &Path) -> Vec<PathBuf> {
    let places =
        children(packages.join("nvidia"), "").into_iter().map(|package| package.join("lib"));
    places.filter(|place| place.is_dir()).collect()
}

/// The entries of a folder that start with `prefix`, in order of name.
fn children(folder: impl AsRef<Path>, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path())
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_of_the_program_come_before_installed_toolkits() {
        let folder = tempfile::tempdir().unwrap();
        let [nvrtc, cublas] =
            ["cuda_nvrtc", "cu13"].map(|name| folder.path().join("nvidia").join(name).join("lib"));
        std::fs::create_dir_all(&nvrtc).unwrap();
        std::fs::create_dir_all(&cublas).unwrap();
        search_packages(folder.path().to_owned());
        let places = toolkit_places();
        let at = |place: &Path| places.iter().position(|found| found == place).unwrap();
        let system = at(Path::new("/usr/lib64"));
        assert!(at(&nvrtc) < system && at(&cublas) < system);
        assert_eq!(places.iter().filter(|found| **found == nvrtc).count(), 1);
    }

    #[test]
    fn no_library_of_the_folder_it_is_started_in_is_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let name = "libdacapo-test-none.so.1";
        std::fs::write(folder.path().join(name), "not a library").unwrap();
        let looked = |place: PathBuf| {
            let names = [name.to_owned()];
            match search("nothing", &names, &[place], "") {
                Err(Error::MissingLibrary { looked, .. }) => looked,
                other => panic!("{other:?}"),
            }
        };
        // The file was opened, and is not a library.
        assert!(looked(folder.path().to_owned()).contains(name));
        // The same folder, relative to the working directory.
        let up = "../".repeat(std::env::current_dir().unwrap().components().count());
        let relative = PathBuf::from(up + &folder.path().display().to_string()[1..]);
        assert!(relative.join(name).exists() && relative.is_relative());
        assert!(!looked(relative).contains(name));
    }
}
