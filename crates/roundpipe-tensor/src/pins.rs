//! How much host memory a device's driver has pinned, and what becomes of the rest.
//!
//! Drivers pin less than there is: WSL2 and some containers allow about a GiB. A buffer asked for with [`Pin::Try`]
//! that the driver has no more for is pageable, and so is every such buffer after it on that device: asking again
//! costs time and gives crumbs. What was refused is kept in [`Pins`], so that a program can say it. A pin that was
//! asked for by name ([`Pin::Alloc`], [`Pin::Register`]) and cannot be had is an error. So is a buffer that the system
//! has no room for either: pageable memory is given out before it is there, and whoever fills it would be killed.
//!
//! # Copies of pageable memory
//! A driver stages them: an upload may read its source when it is queued, before what its lane waits for. So the host
//! must have seen the end of whatever wrote the source ([`Port::receive`]). The other way round nothing changes: a
//! download is staged behind the lane's earlier work, and whether the call returns before or after the bytes are there,
//! the event recorded next tells when they are.
//!
//! # Invariants
//! - Bytes are counted as long as their buffer lives, in one of the two sums.
//!
//! [`Port::receive`]: crate::transfer::Port::receive

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::bytes::Bytes;
use crate::error::{Error, Result};
use crate::host::{HostBuf, Pin};

/// Host memory that a device gave and that is still held.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Pins {
    /// Page-locked.
    pub pinned: Bytes,
    /// Not page-locked: refused, or not asked for.
    pub pageable: Bytes,
    /// What the driver said when it first had no more.
    pub refused: Option<String>,
}

impl Pins {
    /// A line for people, when less is pinned than was wanted.
    pub fn note(&self) -> Option<String> {
        let Self { pinned, pageable, refused } = self;
        let why = refused.as_ref()?;
        Some(format!(
            "{pinned} of host memory are pinned and {pageable} are not, whose copies are slower: {why}"
        ))
    }
}

/// Why memory is not pinned.
pub(crate) struct Refusal {
    pub(crate) error: Error,
    /// Whether there is no more to be had, rather than something broken.
    pub(crate) scarce: bool,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self { error, scarce: false }
    }
}

/// The sums of one device, shared by its workers and by the buffers it gave.
#[derive(Clone, Default)]
pub(crate) struct Ledger(Arc<Mutex<Pins>>);

impl Ledger {
    fn lock(&self) -> MutexGuard<'_, Pins> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn pins(&self) -> Pins {
        self.lock().clone()
    }

    /// A buffer as `pin` wants it; `lock` asks the driver for a pinned one.
    pub(crate) fn buffer(
        &self,
        name: &str,
        bytes: usize,
        pin: Pin,
        lock: impl FnOnce() -> std::result::Result<HostBuf, Refusal>,
    ) -> Result<HostBuf> {
        if bytes == 0 {
            return HostBuf::zeroed(name, 0);
        }
        let pageable = || Ok(self.count(HostBuf::zeroed(name, bytes)?, false));
        if pin == Pin::Off {
            return pageable();
        }
        let refused = self.lock().refused.clone();
        if let (Pin::Try, Some(why)) = (pin, refused) {
            has_room(bytes as u64, &why, available())?;
            return pageable();
        }
        match lock() {
            Ok(buf) => Ok(self.count(buf, true)),
            Err(Refusal { error, scarce: true }) if pin == Pin::Try => {
                let why = error.to_string();
                has_room(bytes as u64, &why, available())?;
                self.lock().refused.get_or_insert(why);
                pageable()
            }
            Err(Refusal { error: Error::Device { device, what }, scarce: true }) => {
                let what = format!("{what}; with Pin::Try (--pin try) it is pageable then");
                Err(Error::Device { device, what })
            }
            Err(Refusal { error, .. }) => Err(error),
        }
    }

    fn count(&self, buf: HostBuf, pinned: bool) -> HostBuf {
        let counted = Counted { ledger: self.clone(), bytes: buf.len() as u64, pinned };
        counted.sum(&mut self.lock()).0 += counted.bytes;
        buf.owned_by(pinned, Box::new(counted))
    }
}

/// Whether the system has so much memory left, where it tells; `why` the driver pins none is said with the error.
fn has_room(bytes: u64, why: &str, available: Option<u64>) -> Result<()> {
    let Some(left) = available.filter(|left| *left < bytes) else { return Ok(()) };
    let what = format!("{} are left; {why}", Bytes(left));
    let source = std::io::Error::new(std::io::ErrorKind::OutOfMemory, what);
    Err(Error::HostMemory { what: "a buffer", need: Bytes(bytes), source })
}

/// Memory that the system can give without taking it from other programs.
fn available() -> Option<u64> {
    parse_available(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn parse_available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

/// One buffer in the sums.
struct Counted {
    ledger: Ledger,
    bytes: u64,
    pinned: bool,
}

impl Counted {
    fn sum<'a>(&self, pins: &'a mut Pins) -> &'a mut Bytes {
        if self.pinned { &mut pins.pinned } else { &mut pins.pageable }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.sum(&mut self.ledger.lock()).0 -= self.bytes;
    }
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ledger({:?})", self.pins())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::{Ledger, Pins, Refusal, has_room, parse_available};
    use crate::bytes::Bytes;
    use crate::error::Error;
    use crate::host::{HostBuf, Pin};

    /// What a driver would say, with no more to give or broken.
    fn refuse(scarce: bool) -> Refusal {
        Refusal { error: Error::invalid("pin", "no more"), scarce }
    }

    fn ask(ledger: &Ledger, pin: Pin, answer: Option<bool>) -> Result<(HostBuf, bool), Error> {
        let asked = Cell::new(false);
        let buf = ledger.buffer("b", 4096, pin, || {
            asked.set(true);
            answer.map_or_else(|| Ok(HostBuf::zeroed("b", 4096)?), |scarce| Err(refuse(scarce)))
        });
        Ok((buf?, asked.get()))
    }

    /// The driver is asked until it has no more, then not again, unless by name.
    #[test]
    fn what_cannot_be_pinned_is_pageable_and_counted() {
        let ledger = Ledger::default();
        let (first, asked) = ask(&ledger, Pin::Try, None).unwrap();
        assert!(asked && first.is_pinned());
        assert!(ledger.pins().note().is_none());
        let (second, asked) = ask(&ledger, Pin::Try, Some(true)).unwrap();
        assert!(asked && !second.is_pinned());
        let (third, asked) = ask(&ledger, Pin::Try, None).unwrap();
        assert!(!asked && !third.is_pinned());
        let refused = Some("pin: no more".to_owned());
        assert_eq!(ledger.pins(), Pins { pinned: Bytes(4096), pageable: Bytes(8192), refused });
        assert!(ledger.pins().note().unwrap().contains("no more"));
        let (fourth, asked) = ask(&ledger, Pin::Alloc, None).unwrap();
        assert!(asked && fourth.is_pinned() && fourth.slice(0..8).unwrap().is_pinned());
        drop((first, second, third, fourth));
        let pins = ledger.pins();
        assert_eq!((pins.pinned, pins.pageable), (Bytes(0), Bytes(0)));
    }

    /// A driver that pins nothing because the machine is full leaves nothing pageable either.
    #[test]
    fn a_full_machine_is_an_error() {
        assert_eq!(parse_available("MemTotal: 9 kB\nMemAvailable:      20 kB\n"), Some(20 << 10));
        assert_eq!(parse_available("MemTotal: 9 kB\n"), None);
        assert!(has_room(4096, "no pins", None).is_ok() && has_room(4096, "no pins", Some(4096)).is_ok());
        let error = has_room(8192, "no pins", Some(4096)).unwrap_err();
        let text = format!("{error}: {}", std::error::Error::source(&error).unwrap());
        assert!(
            text.contains("4.0 KiB are left") && text.contains("no pins") && !text.contains('\n'),
            "{text}"
        );
    }

    /// Only scarcity is got over, and only where nobody insisted.
    #[test]
    fn other_refusals_are_errors() {
        for (pin, scarce) in [(Pin::Alloc, true), (Pin::Register, true), (Pin::Try, false)] {
            let ledger = Ledger::default();
            assert!(ask(&ledger, pin, Some(scarce)).is_err(), "{pin:?}");
            assert_eq!(ledger.pins(), Pins::default(), "{pin:?}");
        }
        let (buf, asked) = ask(&Ledger::default(), Pin::Off, None).unwrap();
        assert!(!asked && !buf.is_pinned());
    }
}
