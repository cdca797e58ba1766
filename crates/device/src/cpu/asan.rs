//! Tells AddressSanitizer about memory that this crate divides itself. Only in programs built by `testing/sanitize`;
//! does nothing in all others.

#[cfg(dacapo_asan)]
mod runtime {
    use std::ffi::c_void;

    unsafe extern "C" {
        pub(super) fn __asan_poison_memory_region(at: *const c_void, bytes: usize);
        pub(super) fn __asan_unpoison_memory_region(at: *const c_void, bytes: usize);
    }
}

/// Poisons these bytes: from now on an access to them is an error.
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

/// Unpoisons these bytes: from now on they may be accessed again.
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
