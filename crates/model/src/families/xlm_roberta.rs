//! XLM-RoBERTa: RoBERTa under another name, with a vocabulary of a hundred languages.

use super::{Family, bert, roberta};

pub(super) const FAMILY: Family = Family {
    name: "xlm-roberta",
    gguf: "",
    encodes: true,
    read: |f| bert::read_as(f, "roberta.", roberta::FIRST, bert::Head::Own),
};
