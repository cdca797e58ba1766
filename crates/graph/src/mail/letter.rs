//! A step's input as mail.

use super::{MailError, StepInput};
use device::StepLimits;
use device::mail::{Letter, MailRow, Words};
use device::step::{MAX_BIASES, MAX_STOPS};

/// Writes a step's input into a letter: the row list only if `rows`, page entries only if `pages`.
pub(crate) fn write_letter<W: Words>(
    letter: &mut Letter<'_, W>,
    input: &StepInput,
    rows: bool,
    pages: bool,
) -> Result<(), MailError> {
    if rows {
        letter.rows(&input.rows)?;
    }
    if !input.tokens.is_empty() {
        letter.tokens(&input.tokens)?;
    }
    for (row, mask) in &input.masks {
        letter.mask(*row, mask)?;
    }
    for join in &input.joins {
        letter.join(join.seat, join.len, join.last_token, &join.params.words())?;
        letter.history(&join.history)?;
        for (&(token, bias), index) in join.params.biases.iter().zip(0..) {
            letter.bias(join.seat, index, token, bias)?;
        }
        for &(token, in_answer) in join.seen.iter().filter(|_| join.params.penalised()) {
            letter.seen(join.seat, token, in_answer)?;
        }
    }
    for page in input.pages.iter().filter(|_| pages) {
        letter.page(page.seat, page.index, page.page)?;
    }
    Ok(())
}

/// Refuses what a bank or a seat cannot hold, before anything is written.
pub fn check(input: &StepInput, limits: &StepLimits) -> Result<(), MailError> {
    let layout = limits.mail_layout();
    within("rows", input.rows.len(), limits.rows)?;
    within("tokens", input.shape().tokens as usize, limits.tokens)?;
    within("joins", input.joins.len(), limits.rows)?;
    within("page entries", input.pages.len(), layout.pages_cap)?;
    let biases = input.joins.iter().map(|join| join.params.biases.len()).sum();
    within("biases", biases, layout.biases_cap)?;
    let penalised = input.joins.iter().filter(|join| join.params.penalised());
    within("seen tokens", penalised.map(|join| join.seen.len()).sum(), layout.seen_cap)?;
    within(
        "tokens of histories",
        input.joins.iter().map(|join| join.history.len()).sum(),
        layout.history_cap,
    )?;
    let uneven = |row: &&MailRow| input.q_len > 1 && row.q_len != input.q_len;
    if let Some(row) = input.rows.iter().find(uneven) {
        let (found, q_len) = (row.q_len, input.q_len);
        return Err(MailError::Uneven { found, q_len });
    }
    for row in &input.rows {
        exists("seat", row.seat, limits.seats)?;
    }
    for (row, mask) in &input.masks {
        exists("row", *row, input.rows.len() as u32)?;
        within("mask words", mask.len(), layout.mask_words)?;
    }
    for join in &input.joins {
        exists("seat", join.seat, limits.seats)?;
        within("stop tokens", join.params.stop_tokens.len(), MAX_STOPS)?;
        within("biases of a seat", join.params.biases.len(), MAX_BIASES)?;
    }
    for page in &input.pages {
        exists("seat", page.seat, limits.seats)?;
        let entries = limits.pages_per_seat.saturating_mul(limits.tables);
        exists("page-table entry", page.index, entries)?;
    }
    Ok(())
}

/// Refuses rows that share a seat. Separate from [`check`], because an unchanged row list need not be checked again.
pub(super) fn check_seats(rows: &[MailRow], limits: &StepLimits) -> Result<(), MailError> {
    let mut taken = vec![false; limits.seats as usize];
    for &MailRow { seat, .. } in rows {
        exists("seat", seat, limits.seats)?;
        if std::mem::replace(&mut taken[seat as usize], true) {
            return Err(MailError::SeatTwice { seat });
        }
    }
    Ok(())
}

fn within(what: &'static str, given: usize, cap: u32) -> Result<(), MailError> {
    if given as u64 > u64::from(cap) {
        return Err(MailError::TooMany { what, given, cap });
    }
    Ok(())
}

fn exists(what: &'static str, index: u32, limit: u32) -> Result<(), MailError> {
    if index >= limit {
        return Err(MailError::Outside { what, index, limit });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> StepLimits {
        StepLimits {
            seats: 4,
            rows: 4,
            tokens: 32,
            pages_per_seat: 4,
            page_size: 16,
            vocab: 64,
            penalties: true,
            tokens_per_row: 1,
            tables: 1,
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let error = check(&StepInput::decode(0..5), &limits()).unwrap_err();
        assert_eq!(error, MailError::TooMany { what: "rows", given: 5, cap: 4 });
        let error = check(&StepInput::decode([4]), &limits()).unwrap_err();
        assert_eq!(error, MailError::Outside { what: "seat", index: 4, limit: 4 });
        // 32 prompt tokens and a decode row are 33.
        let mut full = StepInput::decode([0]);
        full.add(1, &[1; 32], true);
        let error = check(&full, &limits()).unwrap_err();
        assert_eq!(error, MailError::TooMany { what: "tokens", given: 33, cap: 32 });
        let mut masked = StepInput::decode([0]);
        masked.mask(0, vec![1; 3]);
        let error = check(&masked, &limits()).unwrap_err();
        assert_eq!(error, MailError::TooMany { what: "mask words", given: 3, cap: 2 });
    }

    #[test]
    fn two_rows_of_a_seat_are_refused() {
        assert_eq!(check_seats(&StepInput::decode(0..4).rows, &limits()), Ok(()));
        let twice = check_seats(&StepInput::decode([2, 0, 2]).rows, &limits());
        assert_eq!(twice, Err(MailError::SeatTwice { seat: 2 }));
    }

    #[test]
    fn a_step_is_quiet_only_when_it_says_nothing_but_rows() {
        let quiet = StepInput::decode([0]);
        assert!(quiet.is_quiet());
        let mut prompted = quiet.clone();
        prompted.add(1, &[7], true);
        assert!(!prompted.is_quiet());
        let mut masked = quiet;
        masked.mask(0, vec![1]);
        assert!(!masked.is_quiet());
    }
}
