//! What a render may use, and the only containers that can grow while it runs.
//!
//! A template is a stranger's program, so nothing that it asks for is done before it is paid
//! for. [`Budget`] counts steps (work) and bytes (memory) and refuses what goes beyond, with a
//! [`Fault`]. Text grows in a [`Buffer`], sequences in a [`Vector`], and what values share lies in
//! a [`Shared`]. The three pay before they allocate and give back when they are dropped. All values
//! are built from them alone, so a filter cannot make a large one without paying; a test of
//! `lib.rs` looks for anything else in the interpreter's source.
//!
//! # Invariants
//! - The bytes counted as live are those that the allocator was asked for, old and new room
//!   together while contents move.
//! - Once the steps are used up, every further payment fails, so that no loop goes on.

use std::cell::Cell;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::rc::Rc;

use crate::error::Fault;

/// Small change: an expression or a statement costs a step, a look at an entry or a name some
/// ticks.
const TICKS_PER_STEP: u64 = 16;
/// Bytes that one tick copies, compares or skips.
const BYTES_PER_TICK: usize = 4;
/// Ticks of a byte that is looked at as a character, or searched.
const TICKS_PER_CHAR: usize = 2;
/// Ticks of a value that is looked at or copied.
const TICKS_PER_VALUE: usize = 4;
/// Ticks of an allocation.
const ALLOCATION: usize = 4;

/// What a render used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Steps of work.
    pub steps: u64,
    /// Bytes of all values and texts when they were most.
    pub peak_bytes: usize,
}

/// What one render may still use.
#[derive(Debug)]
pub(crate) struct Budget {
    ticks_given: Cell<u64>,
    ticks_left: Cell<u64>,
    most_bytes: Cell<usize>,
    live_bytes: Cell<usize>,
    peak_bytes: Cell<usize>,
}

impl Budget {
    /// For values that the caller gives, which are not the template's doing.
    pub(crate) fn unlimited() -> Self {
        Self {
            ticks_given: Cell::new(u64::MAX),
            ticks_left: Cell::new(u64::MAX),
            most_bytes: Cell::new(usize::MAX),
            live_bytes: Cell::new(0),
            peak_bytes: Cell::new(0),
        }
    }

    /// From now on at most `steps` may be done, and at most `bytes` live, those that live already
    /// included.
    pub(crate) fn limit(&self, steps: u64, bytes: usize) {
        let ticks = steps.saturating_mul(TICKS_PER_STEP);
        self.ticks_given.set(ticks);
        self.ticks_left.set(ticks);
        self.most_bytes.set(bytes);
    }

    pub(crate) fn live_bytes(&self) -> usize {
        self.live_bytes.get()
    }

    pub(crate) fn usage(&self) -> Usage {
        let ticks = self.ticks_given.get() - self.ticks_left.get();
        Usage {
            steps: ticks.div_ceil(TICKS_PER_STEP),
            peak_bytes: self.peak_bytes.get(),
        }
    }

    /// Pays for an expression, a statement, or as much work.
    pub(crate) fn step(&self) -> Result<(), Fault> {
        self.ticks(TICKS_PER_STEP as usize)
    }

    /// Pays for `count` looks at an entry, or as much work.
    pub(crate) fn ticks(&self, count: usize) -> Result<(), Fault> {
        match self.ticks_left.get().checked_sub(count as u64) {
            Some(left) => {
                self.ticks_left.set(left);
                Ok(())
            }
            None => {
                self.ticks_left.set(0);
                Err(Fault::new(
                    "runs too long (a loop that does not end?); simplify the template",
                ))
            }
        }
    }

    /// Pays for a pass over `bytes` at the speed of a copy or a comparison.
    pub(crate) fn pass(&self, bytes: usize) -> Result<(), Fault> {
        self.ticks(1 + bytes / BYTES_PER_TICK)
    }

    /// Pays for a pass over `bytes` of text that looks at every character, or for a search.
    pub(crate) fn char_pass(&self, bytes: usize) -> Result<(), Fault> {
        self.ticks(bytes.saturating_mul(TICKS_PER_CHAR).saturating_add(1))
    }

    /// Pays for a pass over `count` values.
    pub(crate) fn value_pass(&self, count: usize) -> Result<(), Fault> {
        self.ticks(count.saturating_mul(TICKS_PER_VALUE).saturating_add(1))
    }

    /// Whether two texts are equal. Texts of different length cost nothing.
    pub(crate) fn same(&self, a: &str, b: &str) -> Result<bool, Fault> {
        if a.len() != b.len() {
            return Ok(false);
        }
        self.pass(a.len())?;
        Ok(a == b)
    }

    /// Pays for memory that the standard library needs for a while.
    pub(crate) fn hold(&self, bytes: usize) -> Result<Hold<'_>, Fault> {
        self.take(bytes)?;
        Ok(Hold {
            budget: self,
            bytes,
        })
    }

    /// Puts a value where several can refer to it.
    pub(crate) fn share<T>(&self, value: T) -> Result<Shared<'_, T>, Fault> {
        self.ticks(ALLOCATION)?;
        self.take(boxed::<Paid<'_, T>>())?;
        Ok(Rc::new(Paid {
            value,
            budget: self,
        }))
    }

    fn fits(&self, bytes: usize) -> bool {
        self.live_bytes
            .get()
            .checked_add(bytes)
            .is_some_and(|live| live <= self.most_bytes.get())
    }

    fn take(&self, bytes: usize) -> Result<(), Fault> {
        if !self.fits(bytes) {
            return Err(too_large());
        }
        let live = self.live_bytes.get() + bytes;
        self.live_bytes.set(live);
        self.peak_bytes.set(self.peak_bytes.get().max(live));
        Ok(())
    }

    fn give_back(&self, bytes: usize) {
        self.live_bytes
            .set(self.live_bytes.get().saturating_sub(bytes));
    }

    /// Pays for room of at least `need` items of `size` bytes where there is room for `have`, and
    /// for moving them; says how many there will be room for. The old room is still paid for.
    fn grow(&self, have: usize, need: usize, size: usize) -> Result<usize, Fault> {
        let least = if size == 1 { 16 } else { 4 };
        let doubled = need.max(have.saturating_mul(2)).max(least);
        let fits = |count: &usize| {
            count
                .checked_mul(size)
                .is_some_and(|bytes| self.fits(bytes))
        };
        // Near the limit by less, and in the end only as far as needed.
        let count = [doubled, need.saturating_add(need / 8)]
            .into_iter()
            .find(fits)
            .unwrap_or(need);
        let bytes = count.checked_mul(size).ok_or_else(too_large)?;
        self.ticks(ALLOCATION)?;
        self.pass(bytes)?;
        self.take(bytes)?;
        Ok(count)
    }
}

fn too_large() -> Fault {
    Fault::new("needs more memory than a render may use; the template repeats or collects too much")
}

/// What an `Rc` of a `T` allocates.
fn boxed<T>() -> usize {
    size_of::<T>() + 2 * size_of::<usize>()
}

/// Memory paid for until it is dropped.
#[derive(Debug)]
pub(crate) struct Hold<'r> {
    budget: &'r Budget,
    bytes: usize,
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.budget.give_back(self.bytes);
    }
}

/// A value that several others refer to, paid for until the last of them is gone.
pub(crate) type Shared<'r, T> = Rc<Paid<'r, T>>;

/// What lies in a [`Shared`].
#[derive(Debug)]
pub(crate) struct Paid<'r, T> {
    value: T,
    budget: &'r Budget,
}

impl<'r, T> Paid<'r, T> {
    pub(crate) fn budget(&self) -> &'r Budget {
        self.budget
    }
}

impl<T> Deref for Paid<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Drop for Paid<'_, T> {
    fn drop(&mut self) {
        self.budget.give_back(boxed::<Self>());
    }
}

/// A sequence that grows.
#[derive(Debug)]
pub(crate) struct Vector<'r, T> {
    items: Vec<T>,
    budget: &'r Budget,
}

impl<'r, T> Vector<'r, T> {
    pub(crate) fn new(budget: &'r Budget) -> Self {
        Self {
            items: Vec::new(),
            budget,
        }
    }

    pub(crate) fn with_capacity(budget: &'r Budget, count: usize) -> Result<Self, Fault> {
        let mut vector = Self::new(budget);
        vector.reserve(count)?;
        Ok(vector)
    }

    pub(crate) fn of<const N: usize>(budget: &'r Budget, items: [T; N]) -> Result<Self, Fault> {
        let mut vector = Self::with_capacity(budget, N)?;
        vector.items.extend(items);
        Ok(vector)
    }

    pub(crate) fn budget(&self) -> &'r Budget {
        self.budget
    }

    pub(crate) fn push(&mut self, item: T) -> Result<(), Fault> {
        self.reserve(1)?;
        self.items.push(item);
        Ok(())
    }

    pub(crate) fn pop(&mut self) -> Option<T> {
        self.items.pop()
    }

    pub(crate) fn extend_from_slice(&mut self, items: &[T]) -> Result<(), Fault>
    where
        T: Clone,
    {
        self.reserve(items.len())?;
        self.items.extend_from_slice(items);
        Ok(())
    }

    /// The items as a plain vector, no longer paid for.
    pub(crate) fn into_vec(mut self) -> Vec<T> {
        self.budget.give_back(self.room());
        std::mem::take(&mut self.items)
    }

    fn room(&self) -> usize {
        self.items.capacity() * size_of::<T>()
    }

    fn reserve(&mut self, more: usize) -> Result<(), Fault> {
        let need = self.items.len().checked_add(more).ok_or_else(too_large)?;
        if need <= self.items.capacity() {
            return Ok(());
        }
        let old = self.room();
        let count = self
            .budget
            .grow(self.items.capacity(), need, size_of::<T>())?;
        let grown = self.items.try_reserve_exact(count - self.items.len());
        // What was paid is the new room, or nothing.
        self.budget.give_back(if grown.is_ok() {
            old
        } else {
            count * size_of::<T>()
        });
        grown.map_err(|_| too_large())
    }
}

impl<T> Drop for Vector<'_, T> {
    fn drop(&mut self) {
        self.budget.give_back(self.room());
    }
}

impl<T> Deref for Vector<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.items
    }
}

impl<T> DerefMut for Vector<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.items
    }
}

/// A text that grows. Its methods pay by length; `write!` works on it too.
#[derive(Debug)]
pub(crate) struct Buffer<'r> {
    text: String,
    budget: &'r Budget,
}

impl<'r> Buffer<'r> {
    pub(crate) fn new(budget: &'r Budget) -> Self {
        Self {
            text: String::new(),
            budget,
        }
    }

    pub(crate) fn with_capacity(budget: &'r Budget, bytes: usize) -> Result<Self, Fault> {
        let mut buffer = Self::new(budget);
        buffer.reserve(bytes)?;
        Ok(buffer)
    }

    pub(crate) fn of(budget: &'r Budget, text: &str) -> Result<Self, Fault> {
        let mut buffer = Self::new(budget);
        buffer.push_str(text)?;
        Ok(buffer)
    }

    pub(crate) fn budget(&self) -> &'r Budget {
        self.budget
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.text
    }

    pub(crate) fn len(&self) -> usize {
        self.text.len()
    }

    pub(crate) fn push(&mut self, c: char) -> Result<(), Fault> {
        self.reserve(c.len_utf8())?;
        self.text.push(c);
        Ok(())
    }

    pub(crate) fn push_str(&mut self, text: &str) -> Result<(), Fault> {
        self.reserve(text.len())?;
        self.text.push_str(text);
        Ok(())
    }

    /// Appends `text` `times` times.
    pub(crate) fn repeat(&mut self, text: &str, times: usize) -> Result<(), Fault> {
        let total = text.len().checked_mul(times).ok_or_else(too_large)?;
        if total == 0 {
            return Ok(());
        }
        self.reserve(total)?;
        let start = self.text.len();
        self.text.push_str(text);
        // Doubles what is there, always by whole copies of `text`.
        while self.text.len() - start < total {
            let more = (self.text.len() - start).min(total + start - self.text.len());
            self.text.extend_from_within(start..start + more);
        }
        Ok(())
    }

    pub(crate) fn push_upper(&mut self, text: &str) -> Result<(), Fault> {
        if text.is_ascii() {
            return self.push_ascii(text, str::make_ascii_uppercase);
        }
        self.budget.char_pass(text.len())?;
        for c in text.chars() {
            self.push_mapped(c.to_uppercase())?;
        }
        Ok(())
    }

    pub(crate) fn push_lower(&mut self, text: &str) -> Result<(), Fault> {
        if text.is_ascii() {
            return self.push_ascii(text, str::make_ascii_lowercase);
        }
        self.budget.char_pass(text.len())?;
        if text.contains('Σ') {
            // A sigma at the end of a word is written differently; only the standard library knows
            // words. It grows its result by doubling, from as long as the text to at most four
            // times that.
            let _held = self.budget.hold(text.len().saturating_mul(6))?;
            let lower = text.to_lowercase();
            return self.push_str(&lower);
        }
        for c in text.chars() {
            self.push_mapped(c.to_lowercase())?;
        }
        Ok(())
    }

    fn push_ascii(&mut self, text: &str, map: fn(&mut str)) -> Result<(), Fault> {
        self.budget.pass(text.len())?;
        let start = self.text.len();
        self.push_str(text)?;
        map(&mut self.text[start..]);
        Ok(())
    }

    /// Appends what a character is mapped to.
    pub(crate) fn push_mapped(&mut self, chars: impl Iterator<Item = char>) -> Result<(), Fault> {
        for c in chars {
            self.push(c)?;
        }
        Ok(())
    }

    /// What `write!` calls.
    pub(crate) fn write_fmt(&mut self, args: fmt::Arguments<'_>) -> Result<(), Fault> {
        let mut printer = Printer {
            buffer: self,
            fault: None,
        };
        match fmt::write(&mut printer, args) {
            Ok(()) => Ok(()),
            Err(_) => Err(printer.fault.unwrap_or_else(too_large)),
        }
    }

    /// The text as a plain string, no longer paid for.
    pub(crate) fn into_string(mut self) -> String {
        self.budget.give_back(self.text.capacity());
        std::mem::take(&mut self.text)
    }

    fn reserve(&mut self, more: usize) -> Result<(), Fault> {
        let need = self.text.len().checked_add(more).ok_or_else(too_large)?;
        let old = self.text.capacity();
        if need <= old {
            return Ok(());
        }
        let count = self.budget.grow(old, need, 1)?;
        let grown = self.text.try_reserve_exact(count - self.text.len());
        // What was paid is the new room, or nothing.
        self.budget
            .give_back(if grown.is_ok() { old } else { count });
        grown.map_err(|_| too_large())
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        self.budget.give_back(self.text.capacity());
    }
}

/// Carries a fault through `fmt`, whose errors say nothing.
struct Printer<'b, 'r> {
    buffer: &'b mut Buffer<'r>,
    fault: Option<Fault>,
}

impl fmt::Write for Printer<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.buffer.push_str(text).map_err(|fault| {
            self.fault = Some(fault);
            fmt::Error
        })
    }
}
