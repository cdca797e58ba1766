//! `strftime_now`: today's date, as templates write it into system prompts. UTC, C locale.

use super::fault::{Fault, Outcome};
use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] =
    ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// Formats `time` by the directives of Python's `strftime` that templates use.
pub(super) fn strftime(format: &str, time: SystemTime) -> Outcome<String> {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (days, clock) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (clock / 3_600, clock / 60 % 60, clock % 60);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[(days % 7) as usize]);
    let day_of_year = days - days_before(year) + 1;

    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        // `%-d` is `%d` without the leading zero.
        let mut directive = chars.next();
        let padded = directive != Some('-');
        if !padded {
            directive = chars.next();
        }
        let mut two = |n: u64| {
            let _ = if padded { write!(out, "{n:02}") } else { write!(out, "{n}") };
        };
        match directive {
            Some('d') => two(day),
            Some('m') => two(month),
            Some('y') => two(year % 100),
            Some('H') => two(hour),
            Some('I') => two((hour + 11) % 12 + 1),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('Y') => two(year),
            Some('j') if padded => out.push_str(&format!("{day_of_year:03}")),
            Some('j') => two(day_of_year),
            Some('B') => out.push_str(month_name),
            Some('b' | 'h') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(day_name),
            Some('a') => out.push_str(&day_name[..3]),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('Z') => out.push_str("UTC"),
            Some('z') => out.push_str("+0000"),
            Some('F') => out.push_str(&format!("{year}-{month:02}-{day:02}")),
            Some('T') => out.push_str(&format!("{hour:02}:{minute:02}:{second:02}")),
            Some('%') => out.push('%'),
            other => {
                let found = other.map_or("nothing".to_owned(), |c| c.to_string());
                let message = format!("strftime_now: % followed by {found} is not supported");
                return Err(Fault::new(message));
            }
        }
    }
    Ok(out)
}

/// Year, month and day of a day counted from 1970-01-01.
fn civil(days: u64) -> (u64, u64, u64) {
    let mut year = 1970 + days / 366;
    while days_before(year + 1) <= days {
        year += 1;
    }
    let mut left = days - days_before(year);
    let leap = days_before(year + 1) - days_before(year) == 366;
    let lengths = [31, if leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    for (month, length) in (1..).zip(lengths) {
        if left < length {
            return (year, month, left + 1);
        }
        left -= length;
    }
    (year, 12, 31)
}

/// Days from 1970-01-01 to the first of `year`.
fn days_before(year: u64) -> u64 {
    let leaps = |y: u64| y / 4 - y / 100 + y / 400;
    (year - 1970) * 365 + leaps(year - 1) - leaps(1969)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let full = "%Y-%m-%d %H:%M:%S %j %a %b %-d %I %p";
        assert_eq!(strftime(full, at(0)).unwrap(), "1970-01-01 00:00:00 001 Thu Jan 1 12 AM");
        assert_eq!(
            strftime(full, at(1_709_210_096)).unwrap(),
            "2024-02-29 12:34:56 060 Thu Feb 29 12 PM"
        );
        assert_eq!(strftime("%d %B %Y", at(1_735_689_599)).unwrap(), "31 December 2024");
        assert!(strftime("%Q", at(0)).is_err());
        assert!(strftime("%", at(0)).is_err());
    }
}
