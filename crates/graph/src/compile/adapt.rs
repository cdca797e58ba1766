//! Steps without adapters have none of their nodes: their plans are those of a program that knows no adapters.

use crate::ShapeKey;
use crate::program::{Program, ProgramOp};
use std::borrow::Cow;

/// The program for a key: without what adapters add, unless the key asks for it.
pub(crate) fn adapt<'a>(program: &'a Program, key: &ShapeKey) -> Cow<'a, Program> {
    if key.adapters || !program.has_adapters() {
        return Cow::Borrowed(program);
    }
    let mut plain = program.clone();
    let mut index = 0;
    while index < plain.steps.len() {
        let ProgramOp::Lora(lora) = &plain.steps[index].op else {
            index += 1;
            continue;
        };
        let (base, y) = (lora.base, lora.y);
        plain.steps.remove(index);
        plain.steps.iter_mut().for_each(|step| step.op.redirect(y, base));
    }
    Cow::Owned(plain)
}
