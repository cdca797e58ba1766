//! How much memory this process has.

/// Megabytes of the line that begins with `name` in what the system tells about this process;
/// nothing where it does not.
fn megabytes(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with(name));
    let kilobytes = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kilobytes.unwrap_or(0) / 1024
}

/// What it has had at most.
pub(crate) fn peak() -> u64 {
    megabytes("VmHWM:")
}

/// What it has now.
pub(crate) fn now() -> u64 {
    megabytes("VmRSS:")
}
