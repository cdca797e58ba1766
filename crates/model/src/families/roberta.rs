//! RoBERTa: BERT's block; the first position is row 2 of the table, behind that of padding.

use super::{Family, bert};

pub(super) const FAMILY: Family = Family {
    name: "roberta",
    gguf: "",
    encodes: true,
    read: |f| bert::read_as(f, "roberta.", FIRST, bert::Head::Own),
};

/// The row of the first position: one more than the number of the padding token.
pub(super) const FIRST: usize = 2;
