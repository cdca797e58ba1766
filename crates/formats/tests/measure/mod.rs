//! The memory of this process.

/// Megabytes in the line that begins with `name` in the system's status of this process; `None`
/// where there is none.
fn megabytes(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with(name));
    let kilobytes = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kilobytes.unwrap_or(0) / 1024
}

/// The peak.
pub(crate) fn peak() -> u64 {
    megabytes("VmHWM:")
}

/// The current use.
pub(crate) fn now() -> u64 {
    megabytes("VmRSS:")
}
