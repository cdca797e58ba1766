use super::*;

const PAGE: u64 = 1000;

fn shape() -> Shape {
    Shape { identity: [7; 32], page_bytes: PAGE, page_tokens: 2 }
}

fn open(folder: &Path, slots: u64) -> Disk {
    let bytes = HEAD as u64 + slots * (HEAD as u64 + PAGE);
    Disk::open(folder, bytes, shape()).unwrap()
}

/// The file, without its lock, which a clone of the handle would keep.
fn raw(folder: &Path) -> File {
    let path = folder.join("0707070707070707.kv");
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

fn note(n: u8, parent: Option<u8>) -> PageNote {
    let key = |n: u8| PageKey([n; 16]);
    let tokens = [u32::from(n), 5].into();
    PageNote { key: key(n), parent: parent.map(key), tokens, public: n.is_multiple_of(2) }
}

fn page(n: u8) -> Vec<u8> {
    (0..PAGE).map(|at| (at as u8).wrapping_mul(n)).collect()
}

/// Both halves of what the store does, one after the other.
impl Disk {
    /// Writes a page; returns what gave way to it.
    fn write(&mut self, note: &PageNote, page: &[u8]) -> io::Result<Option<PageNote>> {
        let (slot, evicted) = self.slots.insert(note.clone());
        self.file.write(slot, note, page).map(|()| evicted)
    }

    /// The bytes of a page; an error with what was lost if they are damaged.
    fn read(&mut self, key: PageKey) -> Result<Vec<u8>, Option<PageNote>> {
        let slot = self.slots.get(key).ok_or(None)?;
        self.file.read(slot, key).ok_or_else(|| self.slots.remove(key))
    }
}

fn keys(disk: &Disk) -> Vec<u8> {
    let mut keys: Vec<u8> = disk.notes().map(|note| note.key.0[0]).collect();
    keys.sort_unstable();
    keys
}

#[test]
fn pages_outlive_the_process() {
    let folder = tempfile::tempdir().unwrap();
    let mut disk = open(folder.path(), 4);
    for n in 1..=3 {
        let parent = (n > 1).then(|| n - 1);
        assert_eq!(disk.write(&note(n, parent), &page(n)).unwrap(), None);
    }
    assert!(
        matches!(Disk::open(folder.path(), 100_000, shape()), Err(DiskError::InUse(_))),
        "a second server"
    );
    drop(disk);
    let mut disk = open(folder.path(), 4);
    assert_eq!(keys(&disk), [1, 2, 3]);
    let first = disk.notes().next().unwrap();
    assert_eq!(first, &note(1, None), "what is before comes first");
    for n in 1..=3 {
        assert_eq!(disk.read(PageKey([n; 16])).unwrap(), page(n));
    }
    disk.write(&note(4, Some(3)), &page(4)).unwrap();
    assert_eq!(disk.write(&note(5, None), &page(5)).unwrap(), Some(note(1, None)));
    assert_eq!(disk.read(PageKey([1; 16])), Err(None));
    drop(disk);
    // Without the first, the pages after it can never be found.
    assert_eq!(keys(&open(folder.path(), 4)), [5]);
    // A smaller file keeps what still fits.
    assert_eq!(keys(&open(folder.path(), 1)), [5]);
}

#[test]
fn a_folder_that_others_can_write_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let open = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(folder.path(), open).unwrap();
    let refused = Disk::open(folder.path(), 100_000, shape());
    assert!(matches!(refused, Err(DiskError::NotPrivate(_))), "{refused:?}");
}

#[test]
fn another_model_has_another_file() {
    let folder = tempfile::tempdir().unwrap();
    open(folder.path(), 4).write(&note(1, None), &page(1)).unwrap();
    let other = Shape { identity: [8; 32], ..shape() };
    let disk = Disk::open(folder.path(), 100_000, other).unwrap();
    assert!(keys(&disk).is_empty());
    // The same name with other numbers: wiped.
    let other = Shape { page_tokens: 3, ..shape() };
    assert!(keys(&Disk::open(folder.path(), 100_000, other).unwrap()).is_empty());
    assert!(keys(&open(folder.path(), 4)).is_empty());
}

#[test]
fn a_damaged_page_is_never_used() {
    let folder = tempfile::tempdir().unwrap();
    let mut disk = open(folder.path(), 2);
    disk.write(&note(1, None), &page(1)).unwrap();
    disk.write(&note(2, None), &page(2)).unwrap();
    let file = raw(folder.path());
    // One bit of a page, then of a head, at every kind of place.
    for at in [0, 1, PAGE - 1] {
        let whole = page(1);
        let wrong = whole[at as usize] ^ 1;
        let place = disk.file.at(Slot(0)) + HEAD as u64 + at;
        file.write_all_at(&[wrong], place).unwrap();
        assert_eq!(disk.read(PageKey([1; 16])), Err(Some(note(1, None))));
        assert_eq!(disk.read(PageKey([1; 16])), Err(None), "and is forgotten");
        disk.write(&note(1, None), &whole).unwrap();
        assert_eq!(disk.read(PageKey([1; 16])).unwrap(), whole);
    }
    for at in [0, 9, 30, 45, 60, 85, HEAD as u64 - 1] {
        let place = disk.file.at(Slot(1)) + at;
        let mut byte = [0];
        file.read_exact_at(&mut byte, place).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], place).unwrap();
        drop(disk);
        disk = open(folder.path(), 2);
        assert_eq!(keys(&disk), [1], "byte {at} of the head");
        disk.write(&note(2, None), &page(2)).unwrap();
    }
}

/// A process that ends at any point of a write leaves a slot that is whole or empty.
#[test]
fn a_write_that_ends_early_leaves_no_page() {
    let folder = tempfile::tempdir().unwrap();
    let mut disk = open(folder.path(), 1);
    disk.write(&note(1, None), &page(1)).unwrap();
    let (file, at) = (raw(folder.path()), disk.file.at(Slot(0)));
    drop(disk);
    // The head erased; the page written in part; the page written and no head.
    file.write_all_at(&[0; FIXED], at).unwrap();
    assert!(keys(&open(folder.path(), 1)).is_empty());
    file.write_all_at(&page(2)[..500], at + HEAD as u64).unwrap();
    assert!(keys(&open(folder.path(), 1)).is_empty());
    // The machine crashed: the head reached the disk and the page did not.
    file.write_all_at(&head(&note(2, None), &page(2)), at).unwrap();
    let mut disk = open(folder.path(), 1);
    assert_eq!(keys(&disk), [2]);
    assert!(disk.read(PageKey([2; 16])).is_err());
    drop(disk);
    file.set_len(HEAD as u64 + 10).unwrap();
    assert!(keys(&open(folder.path(), 1)).is_empty());
}

#[test]
fn a_size_below_one_page_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let error = Disk::open(folder.path(), 5000, shape()).unwrap_err().to_string();
    assert_eq!(error, "a page takes 5096 bytes on disk, and 5000 were given");
}
