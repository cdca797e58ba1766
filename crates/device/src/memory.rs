//! The host's memory, as the system sees it.

/// Returns freed memory to the system. The allocator keeps freed memory in a pool for each thread; after a burst of
/// large buffers that is most of the process's memory.
pub fn return_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: takes no pointer, locks what it changes, and frees nothing that is in use.
    unsafe {
        libc::malloc_trim(0);
    }
}
