//! Times as Ollama writes them.

use std::time::{Duration, SystemTime};

/// A time since 1970 in UTC: `2026-11-17T06:09:08.123456Z`.
pub(super) fn rfc3339(since_1970: Duration) -> String {
    let seconds = since_1970.as_secs();
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let micros = since_1970.subsec_micros();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}

/// The time now.
pub(super) fn now() -> String {
    rfc3339(SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default())
}

/// The date of a number of days since 1970, in the Gregorian calendar. Years are counted from
/// March, so that the leap day is the last day of one.
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let date = day - (153 * month + 2) / 5 + 1;
    let (month, more) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    (era * 400 + year + more, month, date)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_date_says() {
        // From `date -u -d @N --rfc-3339=seconds`.
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000000Z"),
            (951_782_399, "2000-02-28T23:59:59.000000Z"),
            (951_868_799, "2000-02-29T23:59:59.000000Z"),
            (1_709_164_800, "2024-02-29T00:00:00.000000Z"),
            (4_102_444_800, "2100-01-01T00:00:00.000000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000000Z"),
        ] {
            assert_eq!(rfc3339(Duration::from_secs(seconds)), text);
        }
        assert!(rfc3339(Duration::from_micros(1_000_042)).ends_with("01.000042Z"));
    }
}
