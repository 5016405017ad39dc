//! Dates for `strftime_now`: seconds since 1970 to text, without time zones and locales.

use crate::budget::Buffer;
use crate::error::Fault;

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
const DAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];

/// A point in time, taken apart.
struct Moment {
    year: i64,
    month: usize,
    day: i64,
    weekday: usize,
    day_of_year: i64,
    hour: i64,
    minute: i64,
    second: i64,
}

impl Moment {
    /// Civil date of a count of days, by the usual shift to years that begin in March.
    fn new(seconds: i64) -> Self {
        let (days, rest) = (seconds.div_euclid(86400), seconds.rem_euclid(86400));
        let shifted = days + 719_468;
        let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
        let year_of_era =
            (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let from_march = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * from_march + 2) / 153;
        let day = from_march - (153 * month_from_march + 2) / 5 + 1;
        let month = (month_from_march + 2) % 12;
        let year = year_of_era + era * 400 + i64::from(month < 2);
        let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let day_of_year = if month < 2 {
            from_march - 306
        } else {
            from_march + 59 + i64::from(leap)
        } + 1;
        Self {
            year,
            month: month as usize,
            day,
            weekday: (days + 4).rem_euclid(7) as usize,
            day_of_year,
            hour: rest / 3600,
            minute: rest / 60 % 60,
            second: rest % 60,
        }
    }
}

/// Python's `strftime` in the C locale, appended to `out`.
pub(crate) fn format(out: &mut Buffer<'_>, format: &str, seconds: i64) -> Result<(), Fault> {
    let now = Moment::new(seconds);
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        out.budget().step()?;
        out.push_str(&rest[..at])?;
        let tail = &rest[at + 1..];
        let bare = tail.starts_with('-');
        let tail = tail.strip_prefix('-').unwrap_or(tail);
        let Some(code) = tail.chars().next() else {
            return out.push('%');
        };
        rest = &tail[code.len_utf8()..];
        field(out, &now, code, bare)?;
    }
    out.push_str(rest)
}

fn field(out: &mut Buffer<'_>, now: &Moment, code: char, bare: bool) -> Result<(), Fault> {
    let month = now.month + 1;
    let short_year = now.year.rem_euclid(100);
    match code {
        'd' => two(out, now.day, bare),
        'm' => two(out, month as i64, bare),
        'H' => two(out, now.hour, bare),
        'I' => two(out, (now.hour + 11) % 12 + 1, bare),
        'M' => two(out, now.minute, bare),
        'S' => two(out, now.second, bare),
        'y' => two(out, short_year, bare),
        'Y' => write!(out, "{}", now.year),
        'B' => out.push_str(MONTHS[now.month]),
        'b' | 'h' => out.push_str(&MONTHS[now.month][..3]),
        'A' => out.push_str(DAYS[now.weekday]),
        'a' => out.push_str(&DAYS[now.weekday][..3]),
        'p' => out.push_str(if now.hour < 12 { "AM" } else { "PM" }),
        'j' if bare => write!(out, "{}", now.day_of_year),
        'j' => write!(out, "{:03}", now.day_of_year),
        'e' => write!(out, "{:>2}", now.day),
        'f' => out.push_str("000000"),
        'w' => write!(out, "{}", now.weekday),
        'u' => write!(out, "{}", (now.weekday + 6) % 7 + 1),
        'F' => write!(out, "{:04}-{month:02}-{:02}", now.year, now.day),
        'T' | 'X' => write!(out, "{:02}:{:02}:{:02}", now.hour, now.minute, now.second),
        'R' => write!(out, "{:02}:{:02}", now.hour, now.minute),
        'D' | 'x' => write!(out, "{month:02}/{:02}/{short_year:02}", now.day),
        'Z' | 'z' => Ok(()),
        'n' => out.push('\n'),
        't' => out.push('\t'),
        '%' => out.push('%'),
        other => write!(out, "%{other}"),
    }
}

/// Two digits, or without a leading zero.
fn two(out: &mut Buffer<'_>, value: i64, bare: bool) -> Result<(), Fault> {
    if bare {
        write!(out, "{value}")
    } else {
        write!(out, "{value:02}")
    }
}
