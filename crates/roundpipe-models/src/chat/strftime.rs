//! Dates for `strftime_now`: seconds since 1970 to text, without time zones and locales.

use std::fmt::Write as _;

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
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

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
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let from_march = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * from_march + 2) / 153;
        let day = from_march - (153 * month_from_march + 2) / 5 + 1;
        let month = (month_from_march + 2) % 12;
        let year = year_of_era + era * 400 + i64::from(month < 2);
        let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let day_of_year = if month < 2 { from_march - 306 } else { from_march + 59 + i64::from(leap) } + 1;
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

/// Python's `strftime` in the C locale.
pub(super) fn format(format: &str, seconds: i64) -> String {
    let now = Moment::new(seconds);
    let mut out = String::new();
    let mut chars = format.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let bare = chars.next_if_eq(&'-').is_some();
        let Some(code) = chars.next() else {
            out.push('%');
            break;
        };
        field(&mut out, &now, code, bare);
    }
    out
}

fn field(out: &mut String, now: &Moment, code: char, bare: bool) {
    let mut two = |value: i64| _ = if bare { write!(out, "{value}") } else { write!(out, "{value:02}") };
    let twelve = (now.hour + 11) % 12 + 1;
    match code {
        'd' => two(now.day),
        'm' => two(now.month as i64 + 1),
        'H' => two(now.hour),
        'I' => two(twelve),
        'M' => two(now.minute),
        'S' => two(now.second),
        'y' => two(now.year.rem_euclid(100)),
        'Y' => _ = write!(out, "{}", now.year),
        'B' => out.push_str(MONTHS[now.month]),
        'b' | 'h' => out.push_str(&MONTHS[now.month][..3]),
        'A' => out.push_str(DAYS[now.weekday]),
        'a' => out.push_str(&DAYS[now.weekday][..3]),
        'p' => out.push_str(if now.hour < 12 { "AM" } else { "PM" }),
        'j' if bare => _ = write!(out, "{}", now.day_of_year),
        'j' => _ = write!(out, "{:03}", now.day_of_year),
        'e' => _ = write!(out, "{:>2}", now.day),
        'f' => out.push_str("000000"),
        'w' => _ = write!(out, "{}", now.weekday),
        'u' => _ = write!(out, "{}", (now.weekday + 6) % 7 + 1),
        'F' => _ = write!(out, "{:04}-{:02}-{:02}", now.year, now.month + 1, now.day),
        'T' => _ = write!(out, "{:02}:{:02}:{:02}", now.hour, now.minute, now.second),
        'R' => _ = write!(out, "{:02}:{:02}", now.hour, now.minute),
        'D' | 'x' => _ = write!(out, "{:02}/{:02}/{:02}", now.month + 1, now.day, now.year.rem_euclid(100)),
        'X' => field(out, now, 'T', bare),
        'Z' | 'z' => {}
        'n' => out.push('\n'),
        't' => out.push('\t'),
        '%' => out.push('%'),
        other => out.extend(['%', other]),
    }
}
