//! Named ranges for profilers that take NVTX's: Nsight Systems and Nsight Compute show them above the kernels that were launched
//! within. NVTX 3 is no library but a convention: the tool names an injection library in `NVTX_INJECTION64_PATH`, the program
//! loads it, calls its `InitializeInjectionNvtx2` with a function that gives tables of slots, and the tool puts its functions into
//! those it is interested in. Here is the program's side of it, as far as ranges need it. Without the variable a range costs one
//! load and one branch, and its name is never made.

use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_uint, c_void};
use std::marker::PhantomData;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Where a tool says which library it brings.
const VARIABLE: &str = "NVTX_INJECTION64_PATH";
/// What that library is entered by.
const ENTRY: &CStr = c"InitializeInjectionNvtx2";
/// The version of the interface.
const VERSION: u32 = 3;

/// One function of the interface; null unless the tool wants its calls.
type Slot = AtomicPtr<c_void>;

/// Functions of each module, with the unused number 0: core, CUDA, OpenCL, CUDA runtime, core 2 (domains), synchronisation.
/// Modules count from 1.
const SIZES: [usize; 6] = [16, 9, 15, 7, 16, 7];
const CORE: usize = 0;
/// `nvtxRangePushA` and `nvtxRangePop` among the core functions.
const PUSH: usize = 9;
const POP: usize = 11;

static SLOTS: [[Slot; 16]; 6] = [const { [const { AtomicPtr::new(ptr::null_mut()) }; 16] }; 6];
/// Where the slots of each module are. The one behind the last is null, as is number 0.
static TABLES: [[AtomicPtr<Slot>; 17]; 6] =
    [const { [const { AtomicPtr::new(ptr::null_mut()) }; 17] }; 6];

/// `NvtxExportTableCallbacks`.
#[repr(C)]
struct Callbacks {
    size: usize,
    table: extern "C" fn(c_uint, *mut *const AtomicPtr<Slot>, *mut c_uint) -> c_int,
}

/// `NvtxExportTableVersionInfo`.
#[repr(C)]
struct VersionInfo {
    size: usize,
    version: u32,
    reserved: u32,
    set_tools_version: extern "C" fn(u32),
}

static CALLBACKS: Callbacks = Callbacks { size: size_of::<Callbacks>(), table: module_table };
static VERSION_INFO: VersionInfo = VersionInfo {
    size: size_of::<VersionInfo>(),
    version: VERSION,
    reserved: 0,
    set_tools_version,
};

/// `nvtxGetExportTable`.
extern "C" fn export_table(id: u32) -> *const c_void {
    match id {
        1 => ptr::from_ref(&CALLBACKS).cast(),
        3 => ptr::from_ref(&VERSION_INFO).cast(),
        _ => ptr::null(),
    }
}

/// `GetModuleFunctionTable`: 1 with a module's slots, 0 for a module that does not exist.
extern "C" fn module_table(
    module: c_uint,
    table: *mut *const AtomicPtr<Slot>,
    size: *mut c_uint,
) -> c_int {
    let Some(index) = (module as usize).checked_sub(1).filter(|&index| index < SIZES.len()) else {
        return 0;
    };
    if !table.is_null() {
        // SAFETY: the tool gives the address of a pointer, or none.
        unsafe { table.write(TABLES[index].as_ptr()) };
    }
    if !size.is_null() {
        // SAFETY: the tool gives the address of a number, or none.
        unsafe { size.write(SIZES[index] as c_uint) };
    }
    1
}

/// What version a tool has changes nothing here.
extern "C" fn set_tools_version(_: u32) {}

/// What a tool does at the ends of a range.
#[derive(Clone, Copy)]
struct Tool {
    push: extern "C" fn(*const c_char) -> c_int,
    pop: extern "C" fn() -> c_int,
}

/// The tool of this process, which is looked for once.
fn tool() -> Option<Tool> {
    static TOOL: OnceLock<Option<Tool>> = OnceLock::new();
    *TOOL.get_or_init(|| {
        let path = std::env::var_os(VARIABLE).filter(|path| !path.is_empty())?;
        attach(&path).unwrap_or_else(|why| {
            let path = path.display();
            crate::notice::say(format_args!("{VARIABLE}={path}: {why} (no NVTX ranges)"));
            None
        })
    })
}

/// Loads a tool's library and lets it fill the slots. `None` if it does not want to, or wants no ranges.
fn attach(path: &OsStr) -> Result<Option<Tool>, String> {
    for (index, slots) in SLOTS.iter().enumerate() {
        for number in 1..SIZES[index] {
            TABLES[index][number]
                .store(ptr::from_ref(&slots[number]).cast_mut(), Ordering::Relaxed);
        }
    }
    type Entry = unsafe extern "C" fn(extern "C" fn(u32) -> *const c_void) -> c_int;
    // SAFETY: loading runs the library's initialisers. Whoever sets the variable asks for them, as with LD_PRELOAD.
    let library = unsafe { Library::open(Some(path), RTLD_LAZY | RTLD_LOCAL) };
    let library = library.map_err(|error| error.to_string())?;
    // SAFETY: this is the type of the entry that NVTX 3 defines under this name.
    let entry = unsafe { library.get::<Entry>(ENTRY.to_bytes_with_nul()) };
    let entry = entry.map_err(|error| error.to_string())?;
    // SAFETY: called once, with the function it expects. What that gives are statics.
    if unsafe { entry(export_table) } == 0 {
        return Ok(None);
    }
    // Its functions are called until the process ends.
    std::mem::forget(library);
    let slot = |number: usize| {
        let function = SLOTS[CORE][number].load(Ordering::Acquire);
        (!function.is_null()).then_some(function)
    };
    let (Some(push), Some(pop)) = (slot(PUSH), slot(POP)) else { return Ok(None) };
    // SAFETY: under these numbers the tool put functions of these types, which NVTX 3 defines.
    let tool = unsafe {
        Tool {
            push: std::mem::transmute::<*mut c_void, extern "C" fn(*const c_char) -> c_int>(push),
            pop: std::mem::transmute::<*mut c_void, extern "C" fn() -> c_int>(pop),
        }
    };
    Ok(Some(tool))
}

/// A range of time, from its making to its end of life, on one thread.
#[must_use = "the range ends when this is dropped"]
pub struct Range {
    tool: Option<Tool>,
    /// The thread that began it ends it.
    own: PhantomData<*const ()>,
}

impl std::fmt::Debug for Range {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Range").field("seen", &self.tool.is_some()).finish()
    }
}

/// Begins a range. Its name is made only for a tool.
pub fn range<N: Into<Vec<u8>>>(name: impl FnOnce() -> N) -> Range {
    let tool = tool();
    if let Some(tool) = tool {
        // A name has no zero byte: it is made of keys and numbers.
        let name = CString::new(name()).unwrap_or_default();
        // How deep ranges are nested is the tool's business: Nsight Systems says −1.
        let _ = (tool.push)(name.as_ptr());
    }
    Range { tool, own: PhantomData }
}

impl Drop for Range {
    fn drop(&mut self) {
        if let Some(tool) = self.tool {
            let _ = (tool.pop)();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The layout that a tool compiled against NVTX's headers expects.
    #[test]
    fn tables_are_laid_out_as_tools_expect() {
        assert_eq!((size_of::<Callbacks>(), size_of::<VersionInfo>()), (16, 24));
        assert_eq!(std::mem::offset_of!(VersionInfo, version), 8);
        assert_eq!(std::mem::offset_of!(VersionInfo, set_tools_version), 16);
        for id in [0, 2, 4] {
            assert!(export_table(id).is_null());
        }
        assert_eq!(export_table(1), ptr::from_ref(&CALLBACKS).cast());
        assert_eq!(export_table(3), ptr::from_ref(&VERSION_INFO).cast());
        for (module, expected) in [(0, None), (1, Some(16)), (4, Some(7)), (6, Some(7)), (7, None)]
        {
            let (mut table, mut size) = (ptr::null(), 0);
            let found = module_table(module, &mut table, &mut size) == 1;
            assert_eq!(found.then_some(size), expected, "{module}");
            assert_eq!(found, !table.is_null());
            assert_eq!(module_table(module, ptr::null_mut(), ptr::null_mut()) == 1, found);
        }
    }
}
