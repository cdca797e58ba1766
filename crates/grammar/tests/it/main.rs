//! Grammars from outside.

mod hostile;
mod texts;
