//! Code that both samplers share: a row's parameters and adjusted logits, and the end of a step.

use crate::StepState;
use crate::cpu::memory::CpuMemory;
use crate::cpu::tables::Tables;
use crate::cpu::view::Words;
use crate::step::{self, MAX_BIASES, MAX_STOPS, MAX_TOP, PARAM_WORDS, count, mail, param, ring};

/// The end of a step: where its results are written.
pub(in crate::ops) struct StepEnd {
    tables: Tables,
    launch: u64,
    bank: Option<Words>,
    entry: usize,
    /// Rows of logits of each row.
    q_len: u32,
    /// Live rows.
    pub(in crate::ops) live: usize,
}

/// What was chosen for a row.
#[derive(Clone, Debug, Default, PartialEq)]
pub(in crate::ops) struct Choice {
    pub(super) token: u32,
    pub(super) logprob: f32,
    pub(super) top: [(u32, f32); MAX_TOP as usize],
}

/// A row that samples, with its parameters.
pub(super) struct SampledRow<'a> {
    end: &'a StepEnd,
    row: usize,
    seat: usize,
    /// Tokens in the sequence before the one to choose.
    len: u32,
    pub(super) temperature: f32,
    pub(super) top_k: u32,
    pub(super) top_p: f32,
    pub(super) min_p: f32,
    /// 0: none; n + 1: with n alternatives.
    pub(super) logprobs: u32,
    /// They are those of the distribution that the token is drawn from.
    pub(super) of_drawn: bool,
    /// The row's random number in (0, 1).
    pub(super) uniform: f32,
}

impl StepEnd {
    /// For the current launch and a bucket of `rows` with `q_len` rows of logits each.
    pub(in crate::ops) fn new(
        memory: &CpuMemory,
        state: &StepState,
        rows: u32,
        q_len: u32,
    ) -> StepEnd {
        let tables = Tables::new(memory, state);
        let launch = tables.launch();
        let words = state.limits.ring_entry_words() as usize;
        StepEnd {
            launch,
            bank: tables.mail_for(launch),
            entry: (launch % u64::from(ring::ENTRIES)) as usize * words,
            q_len,
            live: tables.counts.get(count::ROWS as usize).min(rows) as usize,
            tables,
        }
    }

    /// The number of the launch.
    pub(in crate::ops) fn launch(&self) -> u64 {
        self.launch
    }

    fn param(&self, seat: usize, word: u32) -> u32 {
        self.tables.params.get(seat * PARAM_WORDS as usize + word as usize)
    }

    /// Samples after the tokens of row `r` until a draft is not accepted, advances its seat, and writes its part of the ring entry.
    /// `choose` gets the index of a row of logits.
    pub(super) fn sample(
        &self,
        r: usize,
        mut choose: impl FnMut(&SampledRow<'_>, usize) -> Choice,
    ) {
        let tables = &self.tables;
        let drafts = if self.q_len > 1 { tables.drafts(r) } else { 0 };
        let first = r * self.q_len as usize;
        let forced = step::row::forced(tables.row_flags.get(r));
        let mut count = 0;
        loop {
            let Some(row) = self.row(r, count) else { return self.pass(r) };
            let choice = choose(&row, first + count as usize);
            let stopped = self.put(&row, count, drafts, &choice);
            count += 1;
            let agrees = |count: u32| tables.token.get(first + count as usize) == choice.token;
            let accepted = count <= drafts && !stopped && (agrees(count) || count <= forced);
            if !accepted {
                return self.advance(&row, count, choice.token);
            }
        }
    }

    /// Row `r` after `count` of its tokens were accepted, if tokens are sampled for it.
    fn row(&self, r: usize, count: u32) -> Option<SampledRow<'_>> {
        let tables = &self.tables;
        if tables.row_flags.get(r) & step::row::SAMPLE == 0 {
            return None;
        }
        let seat = tables.row_seat.get(r) as usize;
        let fed = if self.q_len > 1 { count + 1 } else { tables.row_q_len.get(r) };
        let len = tables.seat_len.get(seat).saturating_add(fed);
        let float = |word: u32| f32::from_bits(self.param(seat, word));
        let key = [self.param(seat, param::SEED_LO), self.param(seat, param::SEED_HI)];
        let random = philox([len, 0, 0, 0], key)[0];
        Some(SampledRow {
            end: self,
            row: r,
            seat,
            len,
            temperature: float(param::TEMPERATURE),
            top_k: self.param(seat, param::TOP_K),
            top_p: float(param::TOP_P),
            min_p: float(param::MIN_P),
            logprobs: self.param(seat, param::LOGPROBS),
            of_drawn: self.param(seat, param::SAMPLED_LOGPROBS) != 0,
            uniform: (random >> 8) as f32 / (1u32 << 24) as f32 + 1.0 / (1u32 << 25) as f32,
        })
    }

    fn is_stop(&self, seat: usize, token: u32) -> bool {
        let stops = self.param(seat, param::STOPS).min(MAX_STOPS);
        (0..stops).any(|i| self.param(seat, param::STOP + i) == token)
    }

    /// Where place `index` of a row starts in the ring.
    fn place(&self, r: usize, index: u32) -> usize {
        let row = r * self.tables.limits.ring_row_words() as usize;
        self.entry + (ring::HEADER_WORDS + index * ring::PLACE_WORDS) as usize + row
    }

    /// Advances the seat of a row that samples nothing.
    pub(in crate::ops) fn pass(&self, r: usize) {
        let tables = &self.tables;
        let seat = tables.row_seat.get(r) as usize;
        let len = tables.seat_len.get(seat).saturating_add(tables.row_q_len.get(r));
        tables.seat_len.set(seat, len);
        let at = self.place(r, 0);
        (0..4).for_each(|word| tables.ring.set(at + word, 0));
    }

    /// Writes a token that was chosen to its place; returns whether it stops the row.
    fn put(&self, row: &SampledRow<'_>, index: u32, drafts: u32, choice: &Choice) -> bool {
        let (tables, seat, at) = (&self.tables, row.seat, self.place(row.row, index));
        tables.remember(seat, row.len as usize, choice.token);
        if self.param(seat, param::PENALISED) != 0 {
            tables.mark_seen(seat, choice.token, true);
        }
        let stopped = self.is_stop(seat, choice.token);
        let mut flags = ring::SAMPLED;
        if stopped {
            flags |= ring::STOPPED;
        }
        if row.logprobs > 0 {
            flags |= ring::LOGPROBS;
        }
        let verified = if index == 0 { drafts } else { 0 };
        let head = [choice.token, flags, choice.logprob.to_bits(), verified];
        head.iter().enumerate().for_each(|(i, word)| tables.ring.set(at + i, *word));
        for (i, (token, logprob)) in choice.top.iter().take(row.alternatives()).enumerate() {
            tables.ring.set(at + 4 + 2 * i, *token);
            tables.ring.set(at + 5 + 2 * i, logprob.to_bits());
        }
        stopped
    }

    /// Advances the seat of a row by the tokens that it returned, and ends its list.
    fn advance(&self, row: &SampledRow<'_>, count: u32, last: u32) {
        let tables = &self.tables;
        tables.seat_len.set(row.seat, row.len);
        tables.seat_token.set(row.seat, last);
        if count < tables.limits.tokens_per_row {
            tables.ring.set(self.place(row.row, count) + 1, 0);
        }
    }

    /// Whether a token of row `r` stops it.
    fn stops(&self, r: usize) -> bool {
        let flags = (0..self.q_len).map(|index| self.tables.ring.get(self.place(r, index) + 1));
        let mut given = flags.take_while(|flags| flags & ring::SAMPLED != 0);
        given.any(|flags| flags & ring::STOPPED != 0)
    }

    /// Writes the entry's header, its launch number last.
    pub(in crate::ops) fn publish(&self) {
        let goes_on = self.tables.counts.get(count::LEFT as usize) > 0
            && !(0..self.live).any(|r| self.stops(r));
        let again = if goes_on { step::repeat::NEXT } else { step::repeat::DONE };
        self.tables.counts.set(count::AGAIN as usize, again);
        self.tables.ring.set(self.entry + ring::ROWS as usize, self.live as u32);
        self.tables.ring.set(self.entry + ring::AGAIN as usize, again);
        self.tables.ring.publish_u64(self.entry + ring::LAUNCH_LO as usize, self.launch);
    }
}

impl SampledRow<'_> {
    /// Alternatives to report.
    pub(super) fn alternatives(&self) -> usize {
        self.logprobs.saturating_sub(1).min(MAX_TOP) as usize
    }

    /// The row's mask, if it has one.
    fn mask(&self) -> Option<(Words, usize)> {
        let (end, tables) = (self.end, &self.end.tables);
        let bank = end.bank.filter(|bank| bank.get(mail::MASKS as usize) != 0)?;
        let masked = tables.row_flags.get(self.row) & step::row::MASKED != 0;
        let layout = tables.limits.mail_layout();
        masked.then(|| (bank, layout.masks as usize + self.row * layout.mask_words as usize))
    }

    /// Steps 1 and 2: penalties, biases, stop tokens, mask.
    pub(super) fn adjust(&self, logits: &mut [f32]) {
        let (end, tables) = (self.end, &self.end.tables);
        let float = |word: u32| f32::from_bits(end.param(self.seat, word));
        if let Some(seen) = &tables.seen
            && end.param(self.seat, param::PENALISED) != 0
        {
            let repetition = float(param::REPETITION);
            let (frequency, presence) = (float(param::FREQUENCY), float(param::PRESENCE));
            for (token, l) in logits.iter_mut().enumerate() {
                let word = seen.get(self.seat * tables.limits.vocab as usize + token);
                if word != 0 {
                    let count = word & 0xffff;
                    *l = if *l > 0.0 { *l / repetition } else { *l * repetition };
                    *l -= frequency * count as f32;
                    *l -= if count > 0 { presence } else { 0.0 };
                }
            }
        }
        for i in 0..end.param(self.seat, param::BIASES).min(MAX_BIASES) {
            let at = 2 * (self.seat * MAX_BIASES as usize + i as usize);
            if let Some(l) = logits.get_mut(tables.biases.get(at) as usize) {
                *l += tables.biases.float(at + 1);
            }
        }
        if self.len < end.param(self.seat, param::MIN_LEN) {
            for i in 0..end.param(self.seat, param::STOPS).min(MAX_STOPS) {
                let stop = end.param(self.seat, param::STOP + i) as usize;
                if let Some(l) = logits.get_mut(stop) {
                    *l = f32::NEG_INFINITY;
                }
            }
        }
        if let Some((bank, at)) = self.mask() {
            for (token, l) in logits.iter_mut().enumerate() {
                if bank.get(at + token / 32) >> (token % 32) & 1 == 0 {
                    *l = f32::NEG_INFINITY;
                }
            }
        }
    }
}

/// Philox4x32-10: a counter and a key in, four random words out.
pub(super) fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..10 {
        if round > 0 {
            key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
        }
        let [c0, c1, c2, c3] = counter;
        let (a, b) = (u64::from(c0) * 0xD251_1F53, u64::from(c2) * 0xCD9E_8D57);
        counter =
            [(b >> 32) as u32 ^ c1 ^ key[0], b as u32, (a >> 32) as u32 ^ c3 ^ key[1], a as u32];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::philox;

    /// The known-answer vectors of the Random123 paper's distribution.
    #[test]
    fn philox_known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]
        );
        assert_eq!(
            philox([0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344], [0xa4093822, 0x299f31d0]),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
    }
}
