//! The kernel cache: hits, damage, and two processes at once.

use crate::compiler;
use device::cuda::cache::{Cache, Origin};
use device::cuda::launch::KernelKey;
use std::process::Command;

fn key(value: u32) -> KernelKey {
    KernelKey {
        source: "mail_test".into(),
        entry: "mail_test".into(),
        defines: ["MAIL_ROWS", "RING_ENTRIES", "ENTRY_WORDS"]
            .map(|name| (name.to_owned(), value.to_string()))
            .to_vec(),
    }
}

#[test]
fn a_kernel_is_compiled_once_and_named_by_all_that_decides_it() {
    let Some(compiler) = compiler::find() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let cache = Cache::new(folder.path().join("made/when/needed"));
    let (first, origin) = cache.get(&compiler, &key(16), "sm_90a").expect("it compiles");
    assert_eq!(origin, Origin::Compiled);
    let (second, origin) = cache.get(&compiler, &key(16), "sm_90a").expect("it is there");
    assert_eq!(origin, Origin::Disk);
    assert_eq!(first, second);
    assert_eq!(cache.size().0, 1);
    let path = |key: &KernelKey, arch| cache.path(&compiler, key, arch).expect("a known source");
    let mut entry = key(16);
    entry.entry = "other".into();
    let names = [
        path(&key(16), "sm_90a"),
        path(&key(17), "sm_90a"),
        path(&key(16), "sm_80"),
        path(&entry, "sm_90a"),
    ];
    for (index, name) in names.iter().enumerate() {
        assert!(!names[..index].contains(name), "{name:?}");
    }
}

#[test]
fn a_damaged_entry_is_compiled_again() {
    let Some(compiler) = compiler::find() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let cache = Cache::new(folder.path());
    let (good, _) = cache.get(&compiler, &key(16), "sm_80").expect("it compiles");
    let path = cache.path(&compiler, &key(16), "sm_80").expect("a known source");
    let whole = std::fs::read(&path).expect("it was written");
    let flipped = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        bytes
    };
    let cases = [
        ("empty", Vec::new()),
        ("cut inside the header", whole[..20].to_vec()),
        ("cut inside the cubin", whole[..whole.len() - 1].to_vec()),
        ("longer than it was", [&whole[..], b"x"].concat()),
        ("another magic", flipped(0)),
        ("another checksum", flipped(9)),
        ("another flag", flipped(40)),
        ("another first byte", flipped(41)),
        ("another last byte", flipped(whole.len() - 1)),
        ("text", b"not a cubin at all, but long enough to hold a header of one".to_vec()),
    ];
    for (what, bytes) in cases {
        std::fs::write(&path, bytes).expect("writable");
        let (found, origin) = cache.get(&compiler, &key(16), "sm_80").expect("it compiles");
        assert_eq!(origin, Origin::Compiled, "{what}");
        assert_eq!(found, good, "{what}");
        assert_eq!(std::fs::read(&path).expect("it was written"), whole, "{what} was not replaced");
    }
}

#[test]
fn an_entry_that_others_could_have_written_is_compiled_again() {
    use std::os::unix::fs::PermissionsExt;
    let Some(compiler) = compiler::find() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let cache = Cache::new(folder.path());
    let origin = || cache.get(&compiler, &key(16), "sm_80").expect("it compiles").1;
    let allow = |path: &std::path::Path, mode| {
        let mode = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(path, mode).expect("it is this user's");
    };
    assert_eq!([origin(), origin()], [Origin::Compiled, Origin::Disk]);
    let path = cache.path(&compiler, &key(16), "sm_80").expect("a known source");
    allow(&path, 0o666);
    assert_eq!([origin(), origin()], [Origin::Compiled, Origin::Disk], "written anew");
    allow(folder.path(), 0o777);
    assert_eq!([origin(), origin()], [Origin::Compiled, Origin::Compiled]);
}

#[test]
fn a_cache_that_cannot_be_written_still_compiles() {
    let Some(compiler) = compiler::find() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("a file, not a folder");
    std::fs::write(&file, b"").expect("writable");
    let cache = Cache::new(file.join("cache"));
    assert!(cache.get(&compiler, &key(16), "sm_80").is_ok());
}

const SHARED: &str = "DACAPO_TEST_SHARED_CACHE";

/// The work of each of the two processes of the next test; does nothing when run alone.
#[test]
fn one_of_two_processes() {
    let (Some(folder), Some(compiler)) = (std::env::var_os(SHARED), compiler::find()) else {
        return;
    };
    let cache = Cache::new(folder);
    let keys: Vec<KernelKey> = (1..=6).map(key).collect();
    for _ in 0..3 {
        let compiled = cache.get_all(&compiler, &keys, "sm_90a").expect("they compile");
        for (key, (found, _)) in keys.iter().zip(&compiled) {
            assert_eq!(*found, compiler.compile(key, "sm_90a").expect("it compiles"));
        }
        // Damage a file that the other process may be reading.
        let path = cache.path(&compiler, &keys[0], "sm_90a").expect("a known source");
        if let Ok(bytes) = std::fs::read(&path) {
            std::fs::write(&path, &bytes[..bytes.len() / 2]).expect("writable");
        }
    }
}

#[test]
fn two_processes_may_share_a_cache() {
    if compiler::find().is_none() {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let start = || {
        Command::new(std::env::current_exe().expect("a test knows its file"))
            .args(["--exact", "cache::one_of_two_processes", "--nocapture"])
            .env(SHARED, folder.path())
            .spawn()
            .expect("it starts")
    };
    let (mut first, mut second) = (start(), start());
    assert!(first.wait().expect("it ends").success());
    assert!(second.wait().expect("it ends").success());
    let left = std::fs::read_dir(folder.path()).expect("it is there").flatten();
    let stray: Vec<_> =
        left.map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "part")).collect();
    assert!(stray.is_empty(), "{stray:?}");
}
