//! Granite 3 with experts, and one that every token goes through.

use super::{Family, granitemoe};

pub(super) const FAMILY: Family =
    Family { name: "granitemoeshared", gguf: "", encodes: false, read: granitemoe::read };
