//! What AddressSanitizer is told about memory that this crate cuts up itself. Only in programs built by
//! `testing/sanitize`; nothing in all others.

#[cfg(dacapo_asan)]
mod runtime {
    use std::ffi::c_void;

    unsafe extern "C" {
        pub(super) fn __asan_poison_memory_region(at: *const c_void, bytes: usize);
        pub(super) fn __asan_unpoison_memory_region(at: *const c_void, bytes: usize);
    }
}

/// From now on nobody may touch these bytes.
///
/// # Safety
/// They are mapped and belong to no span.
pub(crate) unsafe fn fence(at: *mut u8, bytes: usize) {
    #[cfg(dacapo_asan)]
    // SAFETY: the caller's promise.
    unsafe {
        runtime::__asan_poison_memory_region(at.cast(), bytes);
    }
    let _ = (at, bytes);
}

/// From now on these bytes may be touched again.
///
/// # Safety
/// They are mapped.
pub(crate) unsafe fn open(at: *mut u8, bytes: usize) {
    #[cfg(dacapo_asan)]
    // SAFETY: the caller's promise.
    unsafe {
        runtime::__asan_unpoison_memory_region(at.cast(), bytes);
    }
    let _ = (at, bytes);
}
