//! A step's input as mail.

use super::{MailError, StepInput};
use device::StepLimits;
use device::mail::{Letter, MailRow, Words};
use device::step::{MAX_BIASES, MAX_STOPS};

/// Writes everything the step says into a letter; `rows` is the row list if it must be given, `pages`
/// whether page entries must be.
pub fn write_letter<W: Words>(
    letter: &mut Letter<'_, W>,
    input: &StepInput,
    rows: Option<&[MailRow]>,
    pages: bool,
) -> Result<(), MailError> {
    if let Some(rows) = rows {
        letter.rows(rows)?;
    }
    for (row, index) in input.rows.iter().zip(0..) {
        letter.tokens(&row.tokens)?;
        if let Some(mask) = &row.mask {
            letter.mask(index, mask)?;
        }
    }
    for join in &input.joins {
        letter.join(join.seat, join.len, join.last_token, &join.params.words())?;
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
    for row in &input.rows {
        exists("seat", row.seat, limits.seats)?;
        within("mask words", row.mask.as_ref().map_or(0, Vec::len), layout.mask_words)?;
    }
    for join in &input.joins {
        exists("seat", join.seat, limits.seats)?;
        within("stop tokens", join.params.stop_tokens.len(), MAX_STOPS)?;
        within("biases of a seat", join.params.biases.len(), MAX_BIASES)?;
    }
    for page in &input.pages {
        exists("seat", page.seat, limits.seats)?;
        exists("page-table entry", page.index, limits.pages_per_seat)?;
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
    use super::super::{RowInput, StepInput};
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
        }
    }

    fn step(rows: Vec<RowInput>) -> StepInput {
        StepInput { rows, ..StepInput::default() }
    }

    fn row(seat: u32, tokens: usize) -> RowInput {
        RowInput { seat, tokens: vec![1; tokens], sample: true, mask: None }
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let five = step((0..5).map(|seat| row(seat, 0)).collect());
        let error = check(&five, &limits()).unwrap_err();
        assert_eq!(error, MailError::TooMany { what: "rows", given: 5, cap: 4 });
        let error = check(&step(vec![row(4, 0)]), &limits()).unwrap_err();
        assert_eq!(error, MailError::Outside { what: "seat", index: 4, limit: 4 });
        // 32 prompt tokens and a decode row are 33.
        let error = check(&step(vec![row(0, 0), row(1, 32)]), &limits()).unwrap_err();
        assert_eq!(error, MailError::TooMany { what: "tokens", given: 33, cap: 32 });
    }

    #[test]
    fn a_step_is_quiet_only_when_it_says_nothing_but_rows() {
        assert!(step(vec![row(0, 0)]).is_quiet());
        assert!(!step(vec![row(0, 1)]).is_quiet());
        let masked = RowInput { mask: Some(vec![1]), ..row(0, 0) };
        assert!(!step(vec![masked]).is_quiet());
    }
}
