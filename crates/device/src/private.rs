//! Private folders, whose content is trusted: owned by this user (or root) and not writable by others. A compiled
//! kernel that is loaded again by name must not come from another user.

use std::ffi::OsString;
use std::fs::{DirBuilder, File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Write access for anyone but the owner.
const OTHERS_WRITE: u32 = 0o022;

/// Why a folder or a file is not trusted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotPrivate {
    /// No variable says where this user keeps caches. A shared temporary folder is not an alternative: other users
    /// could create the files first.
    #[error("neither DACAPO_CACHE nor XDG_CACHE_HOME nor HOME says where to keep files")]
    Nowhere,
    /// It cannot be examined, created or read.
    #[error("{path}: {problem}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's error message.
        problem: String,
    },
    /// It belongs to another user.
    #[error("{path} belongs to user {owner}, not to user {user} who runs this")]
    Owner {
        /// The file or folder.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// This process's user.
        user: u32,
    },
    /// Others may write to it.
    #[error(
        "{path} can be written by others (mode {mode:o}): remove it, or `chmod -R go-w` it if all in it is yours"
    )]
    Writable {
        /// The file or folder.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
}

/// Where this user's caches are: `$DACAPO_CACHE`, else `$XDG_CACHE_HOME/dacapo`, else
/// `$HOME/.cache/dacapo`.
pub(crate) fn cache_root() -> Result<PathBuf, NotPrivate> {
    cache_root_in(&|name| std::env::var_os(name))
}

/// The same for any environment. Empty values count as not set, and so do relative paths in variables that are not
/// ours: they would depend on the folder the program was started in.
pub fn cache_root_in(var: &dyn Fn(&str) -> Option<OsString>) -> Result<PathBuf, NotPrivate> {
    let path = |name: &str| var(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let whole = |name: &str| path(name).filter(|path| path.is_absolute());
    let caches = || whole("XDG_CACHE_HOME").or_else(|| Some(whole("HOME")?.join(".cache")));
    path("DACAPO_CACHE").or_else(|| Some(caches()?.join("dacapo"))).ok_or(NotPrivate::Nowhere)
}

/// Creates a folder, and its parents, for this user only; an existing one must already be private.
pub fn make(folder: &Path) -> Result<(), NotPrivate> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|problem| of_io(folder, problem))?;
    check(folder)
}

/// Whether a folder is private; a missing one is.
pub fn check(folder: &Path) -> Result<(), NotPrivate> {
    // Both the link, if it is one, and its target: others could have created either.
    for found in [folder.symlink_metadata(), folder.metadata()] {
        match found {
            Err(problem) if problem.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(problem) => return Err(of_io(folder, problem)),
            Ok(found) => check_found(folder, &found)?,
        }
    }
    Ok(())
}

/// The content of a private file of a private folder.
pub fn read(path: &Path) -> Result<Vec<u8>, NotPrivate> {
    if let Some(folder) = path.parent() {
        check(folder)?;
    }
    let failed = |problem| of_io(path, problem);
    // Check the opened file, not its name, which may refer to another file by now.
    let mut file = File::open(path).map_err(failed)?;
    check_file(path, &file)?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

/// Whether an opened file is private.
pub(crate) fn check_file(path: &Path, file: &File) -> Result<(), NotPrivate> {
    check_found(path, &file.metadata().map_err(|problem| of_io(path, problem))?)
}

fn check_found(path: &Path, found: &Metadata) -> Result<(), NotPrivate> {
    let user = rustix::process::geteuid().as_raw();
    let (path, owner, mode) = (path.to_owned(), found.uid(), found.mode() & 0o7777);
    if owner != user && owner != 0 {
        return Err(NotPrivate::Owner { path, owner, user });
    }
    // Permissions of a link have no effect.
    if mode & OTHERS_WRITE != 0 && !found.is_symlink() {
        return Err(NotPrivate::Writable { path, mode });
    }
    Ok(())
}

fn of_io(path: &Path, problem: io::Error) -> NotPrivate {
    NotPrivate::Io { path: path.to_owned(), problem: problem.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn root(vars: &[(&str, &str)]) -> Result<PathBuf, NotPrivate> {
        cache_root_in(&|name| {
            vars.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into())
        })
    }

    #[test]
    fn caches_lie_where_the_user_says_and_nowhere_else() {
        assert_eq!(root(&[("HOME", "/h")]).unwrap(), Path::new("/h/.cache/dacapo"));
        let both = root(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]);
        assert_eq!(both.unwrap(), Path::new("/x/dacapo"));
        assert_eq!(root(&[("HOME", "/h"), ("DACAPO_CACHE", "/d")]).unwrap(), Path::new("/d"));
        for nothing in [&[][..], &[("HOME", "")], &[("HOME", "h"), ("XDG_CACHE_HOME", ".")]] {
            assert_eq!(root(nothing), Err(NotPrivate::Nowhere), "{nothing:?}");
        }
    }

    #[test]
    fn a_new_folder_is_for_its_user_only() {
        let all = tempfile::tempdir().unwrap();
        let folder = all.path().join("a/b");
        assert_eq!(check(&folder), Ok(()), "nothing is there");
        make(&folder).unwrap();
        let mode = |path: &Path| path.metadata().unwrap().mode() & 0o777;
        assert_eq!((mode(&folder), mode(folder.parent().unwrap())), (0o700, 0o700));
        make(&folder).unwrap();
        fs::write(folder.join("file"), "text").unwrap();
        fs::set_permissions(folder.join("file"), Permissions::from_mode(0o644)).unwrap();
        assert_eq!(read(&folder.join("file")).unwrap(), b"text");
    }

    #[test]
    fn what_others_can_write_is_not_believed() {
        let all = tempfile::tempdir().unwrap();
        let (folder, link) = (all.path().join("folder"), all.path().join("link"));
        make(&folder).unwrap();
        symlink(&folder, &link).unwrap();
        assert_eq!(check(&link), Ok(()), "this user's link to this user's folder");
        let file = folder.join("file");
        fs::write(&file, "text").unwrap();
        for (mode, file_mode) in [(0o777, 0o600), (0o1777, 0o600), (0o770, 0o600), (0o700, 0o666)] {
            fs::set_permissions(&folder, Permissions::from_mode(mode)).unwrap();
            fs::set_permissions(&file, Permissions::from_mode(file_mode)).unwrap();
            let refused =
                |result: Result<_, NotPrivate>| matches!(result, Err(NotPrivate::Writable { .. }));
            assert!(refused(read(&file).map(drop)), "{mode:o} {file_mode:o}");
            if mode != 0o700 {
                assert!(refused(check(&folder)) && refused(check(&link)) && refused(make(&folder)));
            }
        }
    }

    #[test]
    fn what_is_somebody_elses_is_not_believed() {
        let all = tempfile::tempdir().unwrap();
        let folder = all.path().join("folder");
        make(&folder).unwrap();
        let file = folder.join("file");
        fs::write(&file, "text").unwrap();
        // Only root can change a file's owner.
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&file, Some(12345), None).unwrap();
            assert!(matches!(read(&file), Err(NotPrivate::Owner { owner: 12345, user: 0, .. })));
            std::os::unix::fs::chown(&folder, Some(12345), None).unwrap();
            assert!(matches!(check(&folder), Err(NotPrivate::Owner { owner: 12345, .. })));
        } else {
            assert_eq!(check(Path::new("/")), Ok(()), "root's folders are as good");
        }
    }
}
