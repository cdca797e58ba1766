//! The host's memory, as the system sees it.

/// Gives memory that was freed back to the system. The allocator keeps what it may need again, in a pool
/// for each thread: after a burst of large buffers that is most of what the process has.
pub fn return_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it takes no pointer, locks what it changes, and frees nothing that is in use.
    unsafe {
        libc::malloc_trim(0);
    }
}
