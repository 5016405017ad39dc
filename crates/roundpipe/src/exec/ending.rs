//! How a call ends: exactly once, either committed or failed.
//!
//! # Rules
//! 1. A call has pending parts: its jobs, copies under way, a caller that reads its results. Each is
//!    added before it starts and ends once.
//! 2. The thread that ends the last part of a call that has not failed gets the right to commit. It
//!    commits outside the lock (writes buffers, looks at reports of bad data) while the part still
//!    counts as pending, so no waiter takes the call for finished too early.
//! 3. A failure before the commit wins: nothing is committed. A failure during or after it comes too
//!    late and changes nothing. The commit itself may fail.
//! 4. A failure reaches the other calls that fail with this one before this one ends: a caller
//!    that sees its end may recover and submit new calls, which must not fail.
//! 5. A held call (its backward may follow) does not end until it is let go or fails.
//!
//! This is a value without a lock; [`Call`](super::call::Call) keeps it in its own. `tests/loom.rs`
//! checks the rules in every order that threads can run.

/// What the thread that ended a part has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum PartEnd {
    /// Nothing: other parts are pending, or the call has failed.
    Nothing,
    /// Commit, then call [`Ending::end_commit`].
    Commit,
}

/// Where a call stands on its way to the end.
#[derive(Debug, Default)]
pub struct Ending {
    pending: usize,
    held: bool,
    committing: bool,
    failed: bool,
    ended: bool,
}

impl Ending {
    /// One more part must end before the call does.
    pub fn add_part(&mut self) {
        self.pending += 1;
    }

    /// A part has ended.
    ///
    /// # Panics
    /// When no part is pending: a part ended twice.
    pub fn end_part(&mut self) -> PartEnd {
        assert!(self.pending > 0, "a part of a call ended twice");
        if self.pending == 1 && !self.failed {
            // The part stays pending until `end_commit`, so no waiter sees the end before the
            // commit.
            self.committing = true;
            return PartEnd::Commit;
        }
        self.pending -= 1;
        self.end_if_done();
        PartEnd::Nothing
    }

    /// The commit has failed. The call does not end before [`Ending::end_commit`], so that its
    /// failure can reach other calls first.
    pub fn fail_commit(&mut self) {
        self.failed = true;
    }

    /// The commit is over.
    pub fn end_commit(&mut self) {
        self.committing = false;
        self.pending -= 1;
        self.end_if_done();
    }

    /// The call fails, unless it is too late; whether it does. Passing the failure on to other
    /// calls is a part of this one, which the caller ends by [`Ending::end_part`].
    #[must_use]
    pub fn fail(&mut self) -> bool {
        if self.failed || self.ended || self.committing {
            return false;
        }
        self.failed = true;
        self.pending += 1;
        true
    }

    /// The call does not end before [`Ending::let_go`].
    pub fn hold(&mut self) {
        self.held = true;
    }

    /// The call may end.
    pub fn let_go(&mut self) {
        self.held = false;
        self.end_if_done();
    }

    /// Whether the call has failed.
    pub fn has_failed(&self) -> bool {
        self.failed
    }

    /// Whether the call has ended, failed or not.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Whether a thread is committing the call.
    pub fn is_committing(&self) -> bool {
        self.committing
    }

    /// Whether no part is pending, though a backward may still follow.
    pub fn is_quiet(&self) -> bool {
        self.pending == 0
    }

    fn end_if_done(&mut self) {
        // A failed call is never continued, so holding it has no meaning.
        let held = self.held && !self.failed;
        if self.pending == 0 && !held {
            self.ended = true;
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_last_part_commits() {
        let mut ending = Ending::default();
        ending.add_part();
        ending.add_part();
        assert_eq!(ending.end_part(), PartEnd::Nothing);
        assert_eq!(ending.end_part(), PartEnd::Commit);
        assert!(!ending.is_quiet() && !ending.has_ended());
        ending.end_commit();
        assert!(ending.has_ended() && !ending.has_failed());
    }

    #[test]
    fn a_failure_during_the_commit_comes_too_late() {
        let mut ending = Ending::default();
        ending.add_part();
        assert_eq!(ending.end_part(), PartEnd::Commit);
        assert!(!ending.fail());
        ending.end_commit();
        assert!(!ending.fail());
        assert!(ending.has_ended() && !ending.has_failed());
    }

    #[test]
    fn a_failed_call_ends_without_a_commit_and_without_being_let_go() {
        let mut ending = Ending::default();
        ending.hold();
        ending.add_part();
        assert!(ending.fail());
        assert!(!ending.fail(), "only the first failure counts");
        assert_eq!(ending.end_part(), PartEnd::Nothing);
        assert!(!ending.has_ended(), "the failure has not been passed on");
        assert_eq!(ending.end_part(), PartEnd::Nothing);
        assert!(ending.has_ended());
    }

    #[test]
    fn a_held_call_goes_on_with_its_backward() {
        let mut ending = Ending::default();
        ending.hold();
        ending.add_part();
        assert_eq!(ending.end_part(), PartEnd::Commit);
        ending.end_commit();
        assert!(ending.is_quiet() && !ending.has_ended());
        ending.add_part();
        ending.let_go();
        assert_eq!(ending.end_part(), PartEnd::Commit);
        ending.fail_commit();
        assert!(ending.has_failed() && !ending.has_ended());
        ending.end_commit();
        assert!(ending.has_ended() && ending.has_failed());
    }
}
