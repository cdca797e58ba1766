//! The order of service. Calls take turns; the requests of one call go in their order.
//!
//! Start-time fair queueing over continuations: a request's turn is the number of continuations that its
//! call asked for before it, counted from the turn that was being served when the call came. A call of
//! one request is served in order of arrival. A call of many spreads over as many turns, and requests
//! that arrive meanwhile are served between them.

use std::collections::BTreeMap;

#[derive(Debug, Default)]
pub(crate) struct Turns {
    /// The latest turn that was served.
    now: u64,
    calls: BTreeMap<u64, Call>,
}

#[derive(Debug)]
struct Call {
    /// The turn of its next request.
    next: u64,
    /// Requests that have not ended.
    live: u32,
}

impl Turns {
    /// The turn of a new request with this many continuations.
    pub(crate) fn enter(&mut self, call: u64, continuations: u32) -> u64 {
        let entry = self.calls.entry(call).or_insert(Call { next: self.now, live: 0 });
        let turn = entry.next.max(self.now);
        entry.next = turn + u64::from(continuations);
        entry.live += 1;
        turn
    }

    /// A turn after all others of its call, for a continuation that was preempted for another call.
    pub(crate) fn back(&mut self, call: u64) -> u64 {
        let Some(entry) = self.calls.get_mut(&call) else { return self.now + 1 };
        entry.next = entry.next.max(self.now) + 1;
        entry.next
    }

    /// This turn was served.
    pub(crate) fn serve(&mut self, turn: u64) {
        self.now = self.now.max(turn);
    }

    /// A request of this call ended.
    pub(crate) fn leave(&mut self, call: u64) {
        if let Some(entry) = self.calls.get_mut(&call) {
            entry.live -= 1;
            if entry.live == 0 {
                self.calls.remove(&call);
            }
        }
    }

    /// Whether no call is live.
    pub(crate) fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_requests_go_in_order_of_arrival() {
        let mut turns = Turns::default();
        let order: Vec<u64> = (0..5).map(|call| turns.enter(call, 1)).collect();
        assert!(order.windows(2).all(|pair| pair[0] == pair[1]), "arrival decides: {order:?}");
    }

    #[test]
    fn a_newcomer_goes_before_the_rest_of_a_long_call() {
        let mut turns = Turns::default();
        let long: Vec<u64> = (0..4).map(|_| turns.enter(1, 32)).collect();
        assert_eq!(long, [0, 32, 64, 96]);
        turns.serve(long[1]);
        let (small, other) = (turns.enter(2, 1), turns.enter(3, 1));
        assert!(small <= long[1] && small < long[2] && other < long[2]);
        // Two long calls alternate.
        let second: Vec<u64> = (0..3).map(|_| turns.enter(4, 32)).collect();
        assert_eq!(second, [32, 64, 96]);
        assert!(turns.back(1) > long[3]);
        for call in [1, 1, 1, 1, 2, 3, 4, 4, 4] {
            turns.leave(call);
        }
        assert!(turns.is_empty());
    }
}
