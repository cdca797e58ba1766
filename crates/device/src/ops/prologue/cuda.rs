//! `kernels/prologue.cu`: one block, with every record's layout as macros.

use crate::Result;
use crate::cuda::launch::{Lowered, Target};
use crate::cuda::lower::Kernel;
use crate::op::Prologue;
use crate::step::{
    InputLayout, JOIN_WORDS, MAX_BIASES, MAX_STOPS, MAX_TOP, PARAM_WORDS, StepLimits, count, input,
    mail, param, repeat, ring, row,
};

/// The layout of the step's records, for the kernels that read them.
pub(crate) fn layout(limits: &StepLimits) -> Vec<(&'static str, u32)> {
    let areas = limits.mail_layout();
    let mut words = vec![
        ("SEATS", limits.seats),
        ("ROWS_LIMIT", limits.rows),
        ("TOKENS_LIMIT", limits.tokens),
        ("PAGES_PER_SEAT", limits.pages_per_seat),
        ("TABLES", limits.tables),
        ("TABLE_WORDS", if limits.tables == 1 { 0 } else { limits.table_words() }),
        ("SLOT_WORDS", if limits.tables == 1 { 0 } else { limits.slot_words() }),
        ("PAGE", limits.page_size),
        ("VOCAB", limits.vocab),
        ("JOIN_WORDS", JOIN_WORDS),
        ("MAX_BIASES", MAX_BIASES),
        ("MAX_STOPS", MAX_STOPS),
        ("MAX_TOP", MAX_TOP),
        ("PARAM_WORDS", PARAM_WORDS),
        ("PARAM_TEMPERATURE", param::TEMPERATURE),
        ("PARAM_TOP_K", param::TOP_K),
        ("PARAM_TOP_P", param::TOP_P),
        ("PARAM_MIN_P", param::MIN_P),
        ("PARAM_REPETITION", param::REPETITION),
        ("PARAM_FREQUENCY", param::FREQUENCY),
        ("PARAM_PRESENCE", param::PRESENCE),
        ("PARAM_LOGPROBS", param::LOGPROBS),
        ("PARAM_SAMPLED_LOGPROBS", param::SAMPLED_LOGPROBS),
        ("PARAM_SEED_LO", param::SEED_LO),
        ("PARAM_SEED_HI", param::SEED_HI),
        ("PARAM_MIN_LEN", param::MIN_LEN),
        ("PARAM_STOPS", param::STOPS),
        ("PARAM_STOP", param::STOP),
        ("PARAM_BIASES", param::BIASES),
        ("PARAM_PENALISED", param::PENALISED),
        ("MAIL_ROWS", mail::ROWS),
        ("MAIL_ROWS_CHANGED", mail::ROWS_CHANGED),
        ("MAIL_JOINS", mail::JOINS),
        ("MAIL_PAGES", mail::PAGES),
        ("MAIL_BIASES", mail::BIASES),
        ("MAIL_SEEN", mail::SEEN),
        ("MAIL_STEPS", mail::STEPS),
        ("ROW_SAMPLE", row::SAMPLE),
        ("ROW_PROMPT", row::PROMPT),
        ("ROW_MASKED", row::MASKED),
        ("COUNT_LAUNCH_LO", count::LAUNCH_LO),
        ("COUNT_LAUNCH_HI", count::LAUNCH_HI),
        ("COUNT_ROWS", count::ROWS),
        ("COUNT_TOKENS", count::TOKENS),
        ("COUNT_MAX_KV", count::MAX_KV),
        ("COUNT_SPLIT", count::SPLIT),
        ("COUNT_LEFT", count::LEFT),
        ("COUNT_STEPS", count::STEPS),
        ("COUNT_AGAIN", count::AGAIN),
        ("COUNT_BASE", count::BASE),
        ("REPEAT_DONE", repeat::DONE),
        ("REPEAT_NEXT", repeat::NEXT),
        ("REPEAT_FIRST", repeat::FIRST),
        ("AREA_ROWS", areas.rows),
        ("AREA_TOKENS", areas.tokens),
        ("AREA_JOINS", areas.joins),
        ("AREA_PAGES", areas.pages),
        ("PAGES_CAP", areas.pages_cap),
        ("AREA_BIASES", areas.biases),
        ("BIASES_CAP", areas.biases_cap),
        ("AREA_SEEN", areas.seen),
        ("SEEN_CAP", areas.seen_cap),
        ("AREA_MASKS", areas.masks),
        ("MASK_WORDS", areas.mask_words),
        ("RING_ENTRIES", ring::ENTRIES),
        ("RING_ENTRY_WORDS", limits.ring_entry_words()),
        ("RING_HEADER_WORDS", ring::HEADER_WORDS),
        ("RING_ROW_WORDS", limits.ring_row_words()),
        ("RING_ROWS", ring::ROWS),
        ("RING_AGAIN", ring::AGAIN),
        ("RING_SAMPLED", ring::SAMPLED),
        ("RING_STOPPED", ring::STOPPED),
        ("RING_LOGPROBS", ring::LOGPROBS),
    ];
    if limits.tokens_per_row > 1 {
        words.extend([
            ("HISTORY", 1),
            ("AREA_HISTORY", areas.history),
            ("HISTORY_CAP", areas.history_cap),
            ("MOST_DRAFTS", limits.drafts()),
            ("ROW_DRAFTS", row::DRAFTS),
            ("ROW_FORCED", row::FORCED),
            ("RING_PLACE_WORDS", ring::PLACE_WORDS),
        ]);
    }
    words
}

/// Into how many blocks attention divides the pages of one of eight KV heads. Up to four rows: as many as are
/// resident at once, two per multiprocessor, so that one block runs while the other ends. Up to 16 rows: one per
/// multiprocessor, with half as many pieces to merge. More rows fill the GPU by themselves: rows of one length are then
/// not split. A row much longer than the mean is, because the step would wait for its blocks when all others are done.
pub(crate) fn ways(rows: u32, target: &Target) -> u32 {
    let resident = 2 * target.sms / 8;
    match rows {
        0..=4 => resident,
        5..=16 => resident / 2,
        17..=64 => (resident / 4).max(rows * 3 / 4),
        _ => resident / 4,
    }
    .max(1)
}

impl Prologue {
    /// The word offsets in an input block; all 0 without one.
    fn input_layout(&self) -> Vec<(&'static str, u32)> {
        let at = self.given.map(|_| self.state.limits.input_layout(self.rows));
        let area = |area: fn(&InputLayout) -> u32| at.as_ref().map_or(0, area);
        vec![
            ("GIVEN", u32::from(at.is_some())),
            ("INPUT_ROWS", input::ROWS),
            ("INPUT_WIDTH", input::WIDTH),
            ("INPUT_ROW_WORDS", input::ROW_WORDS),
            ("INPUT_TOKENS_AT", area(|at| at.tokens)),
            ("INPUT_POSITIONS_AT", area(|at| at.positions)),
            ("INPUT_LENGTHS_AT", area(|at| at.lengths)),
            ("INPUT_ROWS_AT", area(|at| at.rows)),
            ("INPUT_PARAMS_AT", area(|at| at.params)),
            ("INPUT_PAGES_AT", area(|at| at.pages)),
        ]
    }

    pub(crate) fn lower(&self, target: &Target) -> Result<Vec<Lowered>> {
        let s = &self.state;
        let tables = [&s.seat_len, &s.seat_token, &s.page_table, &s.params, &s.biases];
        let kernel = Kernel::new(target, "prologue", "prologue")
            .defines(&layout(&s.limits))
            .defines(&self.input_layout())
            .define("REPEATS", u32::from(s.repeats))
            .threads(1024)
            .tensors(&tables)
            .optional(s.seen.map(|seen| seen.span))
            .tensors(&[&s.counts, &s.row_seat, &s.row_flags, &s.row_q_len, &s.q_start, &s.kv_len])
            .tensors(&[&s.last_index, &s.token, &s.position, &s.kv_slot, &s.token_row])
            .spans(&s.mail)
            .spans(&[s.leave])
            .optional(self.given.map(|given| given.blocks[0]))
            .optional(self.given.map(|given| given.blocks[1]))
            .ints(&[self.rows, self.tokens, ways(self.rows, target), self.pages])
            .tensors(s.history.as_ref().as_slice())
            .tensors(s.settled.as_ref().as_slice())
            .tensors(s.row_replay.as_ref().as_slice());
        Ok(vec![kernel.lowered()])
    }
}
