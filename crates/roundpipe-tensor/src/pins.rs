//! How much host memory a device's driver has pinned, and what becomes of the rest.
//!
//! Drivers pin less than there is: WSL2 and some containers allow about a GiB. A buffer asked for
//! with [`Pin::Try`] that the driver has no more for is pageable, and so is every such buffer after
//! it on that device: asking again costs time and gives crumbs. What was refused is kept in
//! [`Pins`], so that a program can say it. A pin that was asked for by name ([`Pin::Alloc`],
//! [`Pin::Register`]) and cannot be had is an error.
//!
//! # Room
//! Systems give pageable memory out before it is there, and kill who fills it when it is not. So a
//! buffer that could not be pinned is refused when it is larger than what is left, and its pages
//! are taken at once, so that the next question sees them. What is left is what Linux calls
//! available, or less where a control group of this process allows less ([`host_memory`]); other
//! systems tell nothing, and nothing is refused there. This covers the buffers given here,
//! not what is taken meanwhile by others: moments and masters of an optimizer, other programs.
//!
//! # Copies of pageable memory
//! A driver stages them: an upload may read its source when it is queued, before what its lane
//! waits for. So the host must have seen the end of whatever wrote the source ([`Port::receive`]).
//! The other way round nothing changes: a download is staged behind the lane's earlier work, and
//! whether the call returns before or after the bytes are there, the event recorded next tells when
//! they are.
//!
//! # Invariants
//! - Bytes are counted as long as their buffer lives, in one of the two sums.
//!
//! [`Port::receive`]: crate::transfer::Port::receive

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::bytes::Bytes;
use crate::error::{Error, Result};
use crate::host::{HostBuf, Pin};
use crate::host_memory;
use crate::pages::PAGE;
use crate::sync::lock;

/// Held from the question whether there is room until the pages are taken: two buffers must not
/// count on the same room.
static TAKING: Mutex<()> = Mutex::new(());

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
        let Self {
            pinned,
            pageable,
            refused,
        } = self;
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
        Self {
            error,
            scarce: false,
        }
    }
}

/// The sums of one device, shared by its workers and by the buffers it gave.
#[derive(Clone, Default)]
pub(crate) struct Ledger(Arc<Mutex<Pins>>);

impl Ledger {
    fn lock(&self) -> MutexGuard<'_, Pins> {
        lock(&self.0)
    }

    pub(crate) fn pins(&self) -> Pins {
        self.lock().clone()
    }

    /// A buffer as `pin` wants it; `make_pinned` asks the driver for a pinned one.
    pub(crate) fn buffer(
        &self,
        name: &str,
        bytes: usize,
        pin: Pin,
        make_pinned: impl FnOnce() -> std::result::Result<HostBuf, Refusal>,
    ) -> Result<HostBuf> {
        if bytes == 0 {
            return HostBuf::zeroed(name, 0);
        }
        if pin == Pin::Off {
            return Ok(self.count(HostBuf::zeroed(name, bytes)?, false));
        }
        let refused = self.lock().refused.clone();
        if let (Pin::Try, Some(why)) = (pin, refused) {
            return self.pageable(name, bytes, &why);
        }
        match make_pinned() {
            Ok(buf) => Ok(self.count(buf, true)),
            Err(Refusal {
                error,
                scarce: true,
            }) if pin == Pin::Try => {
                let why = error.to_string();
                self.lock().refused.get_or_insert_with(|| why.clone());
                self.pageable(name, bytes, &why)
            }
            Err(Refusal {
                error: Error::Device { device, what },
                scarce: true,
            }) => {
                let what = format!("{what}; with Pin::Try (--pin try) it is pageable then");
                Err(Error::Device { device, what })
            }
            Err(Refusal { error, .. }) => Err(error),
        }
    }

    /// A buffer whose pages are there, since `why` it cannot be pinned.
    fn pageable(&self, name: &str, bytes: usize, why: &str) -> Result<HostBuf> {
        let _taking = lock(&TAKING);
        let left = host_memory::available().map(|left| left.0);
        has_room(name, bytes as u64, why, left)?;
        let buf = HostBuf::zeroed(name, bytes)?;
        buf.write(0..bytes)?
            .bytes()
            .iter_mut()
            .step_by(PAGE)
            .for_each(|byte| *byte = 0);
        Ok(self.count(buf, false))
    }

    fn count(&self, buf: HostBuf, pinned: bool) -> HostBuf {
        let counted = Counted {
            ledger: self.clone(),
            bytes: buf.len() as u64,
            pinned,
        };
        counted.sum(&mut self.lock()).0 += counted.bytes;
        buf.owned_by(pinned, Box::new(counted))
    }
}

/// Refuses a buffer that is larger than what is left, where that is known; `why` it is not pinned
/// is said as well.
fn has_room(name: &str, bytes: u64, why: &str, left: Option<u64>) -> Result<()> {
    let Some(left) = left.filter(|left| *left < bytes) else {
        return Ok(());
    };
    let (need, left) = (Bytes(bytes), Bytes(left));
    Err(Error::HostRoom {
        name: name.to_owned(),
        need,
        left,
        why: why.to_owned(),
    })
}

/// One buffer in the sums.
struct Counted {
    ledger: Ledger,
    bytes: u64,
    pinned: bool,
}

impl Counted {
    fn sum<'a>(&self, pins: &'a mut Pins) -> &'a mut Bytes {
        if self.pinned {
            &mut pins.pinned
        } else {
            &mut pins.pageable
        }
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

    use super::{Ledger, PAGE, Pins, Refusal, has_room};
    use crate::bytes::Bytes;
    use crate::error::Error;
    use crate::host::{HostBuf, Pin};

    /// What a driver would say, with no more to give or broken.
    fn refuse(scarce: bool) -> Refusal {
        Refusal {
            error: Error::invalid("pin", "no more"),
            scarce,
        }
    }

    fn ask(ledger: &Ledger, pin: Pin, answer: Option<bool>) -> Result<(HostBuf, bool), Error> {
        let asked = Cell::new(false);
        let buf = ledger.buffer("b", 4096, pin, || {
            asked.set(true);
            answer.map_or_else(
                || Ok(HostBuf::zeroed("b", 4096)?),
                |scarce| Err(refuse(scarce)),
            )
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
        assert_eq!(
            ledger.pins(),
            Pins {
                pinned: Bytes(4096),
                pageable: Bytes(8192),
                refused
            }
        );
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
        let room = |bytes, left| has_room("layer 3 gradients", bytes, "no pins", left);
        assert!(room(4096, None).is_ok() && room(4096, Some(4096)).is_ok());
        let text = room(8192, Some(4096)).unwrap_err().to_string();
        for part in [
            "layer 3 gradients needs 8.0 KiB",
            "4.0 KiB are left",
            "no pins",
            "lag 0",
        ] {
            assert!(
                text.contains(part) && !text.contains('\n'),
                "{part}: {text}"
            );
        }
    }

    /// Pages of `buf` that the system has given, where it tells.
    fn pages_there(buf: &HostBuf) -> Option<usize> {
        use std::io::{Read, Seek, SeekFrom};
        let mut map = std::fs::File::open("/proc/self/pagemap").ok()?;
        map.seek(SeekFrom::Start(buf.addr() / PAGE as u64 * 8))
            .ok()?;
        let mut entries = vec![0; buf.len().div_ceil(PAGE) * 8];
        map.read_exact(&mut entries).ok()?;
        // In memory, or swapped out.
        let there = |entry: &&[u8]| entry[7] & 0xC0 != 0;
        Some(entries.chunks_exact(8).filter(there).count())
    }

    /// A buffer that has not been written yet must be missing from what is left when the next one
    /// is asked for.
    #[test]
    #[cfg_attr(miri, ignore = "the system counts no pages of Miri's memory")]
    fn pages_that_could_not_be_pinned_are_taken_at_once() {
        let (ledger, bytes) = (Ledger::default(), (9 << 20) + 1);
        let ask = |pin| {
            ledger
                .buffer("b", bytes, pin, || Err(refuse(true)))
                .unwrap()
        };
        let Some(untouched) = pages_there(&ask(Pin::Off)) else {
            return;
        };
        if untouched == bytes.div_ceil(PAGE) {
            return; // A system whose pages are larger than these, or that tells nothing of use.
        }
        for which in ["refused now", "refused before"] {
            assert_eq!(
                pages_there(&ask(Pin::Try)),
                Some(bytes.div_ceil(PAGE)),
                "{which}"
            );
        }
    }

    /// Only scarcity falls back to pageable memory, and only where `pin` does not insist.
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
