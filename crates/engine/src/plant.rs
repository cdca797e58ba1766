//! Bugs that can be planted to prove that the simulator's checkers see them.
//!
//! The feature `plant` is enabled by the simulator alone. Without it `planted` is the constant
//! `false` and the compiler removes every planted branch.

macro_rules! plants {
    ($($name:ident => $text:literal,)*) => {
        /// One planted bug; the text describes it.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Plant {
            $(#[doc = $text] $name,)*
        }

        impl Plant {
            /// Every plant, in order.
            pub const ALL: &'static [Plant] = &[$(Plant::$name,)*];

            /// Its name on the command line.
            pub fn name(self) -> &'static str {
                match self { $(Plant::$name => stringify!($name),)* }
            }

            /// What goes wrong.
            pub fn what(self) -> &'static str {
                match self { $(Plant::$name => $text.trim_ascii_start(),)* }
            }
        }
    };
}

plants! {
    LeakOnCancel => "a cancelled sequence keeps its last page",
    DoubleRelease => "a finished sequence gives its last page back twice",
    FreeInFlight => "pages are freed while a step in flight still writes them",
    PublishUnconfirmed => "pages are published before the step that wrote them is confirmed",
    PublishPartial => "a page is published one token before it is full",
    PublishDiscarded => "the extra step of a finished row is published",
    ShareTail => "a shared page is written without a copy",
    LoseCopy => "a page is replaced by a copy that is never made",
    MatchWholePrompt => "a fully cached prompt leaves no token to feed",
    FreeWhileSaving => "a page may change while it is being saved",
    TrustUnfilled => "a page or state that could not be filled from the store is published",
    SilentEviction => "an eviction is not told to those who follow the cache",
    IgnoreTenant => "tenants share cached pages",
    EvictReferenced => "eviction takes a page that a sequence still reads",
    FreeTooEarly => "a page is given back while the window still reaches into it",
    ReadPast => "a cached prefix is used although the pages of the window before its end are gone",
    StaleSeat => "a seat's new owner does not initialise it",
    LosePageEntry => "a page-table entry is not sent to the device",
    LoseRequeued => "a preempted sequence is not queued again",
    ForgetAnswer => "a preempted sequence comes back without its last token",
    ForgetSeen => "a preempted sequence's answer no longer counts for its penalties",
    FinishTwice => "a sequence announces its end twice",
    TokenAfterEnd => "the extra step of a finished row emits its token",
    NoPatience => "a request may be overtaken without bound",
    OverBudget => "a prefill step exceeds what the graphs cover",
    IgnoreCancel => "a cancel during prefill is ignored",
    IgnoreDeadline => "deadlines are ignored",
    OneTooMany => "an answer gets one token more than asked for",
    KeepTree => "cached pages survive the loss of the device's state",
    KeepSeats => "seats survive the loss of the device's state",
    DropUnlaunched => "a step that was not launched is forgotten instead of repeated",
    SameSeed => "every choice of a request draws the same numbers",
    KeepHidden => "a preempted prompt counts twice in its vector",
    ReuseForMean => "a vector over all tokens leaves out those found in the tree",
    MixVectors => "a step makes vectors beside rows that want something else",
    TrustResult => "a malformed result is accepted",
    StarvePrefill => "prefill waits until no row decodes",
    RunPastStop => "a launch of several steps goes on after a stop",
    NeverLeave => "a launch of several steps is not ended early when a request arrives",
    BlindSteps => "rows with a grammar run several steps without their masks",
    LastStepOnly => "of a launch of several steps only the last result counts",
    LaunchWhenGone => "a device that is gone is asked to run later requests",
    KeepAfterStop => "tokens after a stop in the same result are kept",
    MissAhead => "a row may return a token more than there are pages for",
    BlindList => "a row with a grammar may return several tokens under one mask",
    KeepShortfall => "a row that returned fewer tokens than it might counts as if it had returned all",
    AcceptOneMore => "a draft is accepted that is not what was chosen",
    KeepDraft => "a draft that was not accepted is returned instead of what was chosen",
    ReadRejected => "a seat advances over drafts that were not accepted",
    KeepRejected => "what a seat carries holds drafts that were not accepted",
    BlindStop => "a stop token inside an accepted draft is not marked",
    ForgetHistory => "a sequence that joins does not tell its tokens",
    ThinkOn => "a thought goes on when its budget is used up",
    ForgetState => "a sequence that goes on after a cached prefix does not get the state behind it",
    ReplaceWhileSaving => "a state is replaced while it is being saved to the store",
    SaveOtherPage => "a saved state counts as that behind another page",
    HoldAfterCancel => "a cancelled sequence keeps its pages until the engine is idle",
}

#[cfg(feature = "plant")]
mod active {
    use super::Plant;
    use std::cell::Cell;

    thread_local! {
        static ACTIVE: Cell<Option<Plant>> = const { Cell::new(None) };
    }

    /// Plants one bug, or none, for engines that run on this thread.
    pub fn plant(which: Option<Plant>) {
        ACTIVE.set(which);
    }

    /// Whether this bug is planted on this thread.
    pub fn planted(which: Plant) -> bool {
        ACTIVE.get() == Some(which)
    }
}

#[cfg(feature = "plant")]
pub use active::{plant, planted};

#[cfg(not(feature = "plant"))]
pub(crate) const fn planted(_: Plant) -> bool {
    false
}
