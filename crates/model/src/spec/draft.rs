//! A smaller model drafts: its own layers and caches, k passes in every step with drafts, one over the tokens of any other step.
//! Its pages have the numbers of those of the model that verifies, so what happens to a sequence's pages happens to both.

use super::{Ask, Beside, Drafting};
use crate::LoadError;
use crate::builder::Written;
use crate::config::Task;
use crate::open::OpenModel;
use graph::program::Drafter;

pub(super) struct Draft;

impl Drafting for Draft {
    fn name(&self) -> &'static str {
        "draft"
    }

    fn attach(&self, verifier: &mut Written, ask: &Ask<'_>) -> Result<Option<Beside>, LoadError> {
        let wrong = |problem| LoadError::SpecModel { method: self.name(), problem };
        let source = ask.source.ok_or(wrong("needs a smaller model: add --spec-model"))?;
        let model = OpenModel::open(source)?;
        if model.config.task != Task::Generate || model.config.token_types != 1 {
            return Err(wrong("needs a model that generates text"));
        }
        let (own, wanted) = (model.config.vocab, ask.verifier.vocab);
        if own != wanted {
            return Err(LoadError::Vocabulary { own, wanted });
        }
        let Ask { target, numerics, precision, context, most_rows, .. } = *ask;
        let written =
            model.write_drafter(&verifier.program, target, numerics, precision, context)?;
        if written.program.carry_bytes() > 0 {
            return Err(wrong("needs a model without recurrent layers"));
        }
        let drafter = Drafter::new(written.program.clone(), most_rows);
        verifier.program = verifier.program.clone().with_drafter(drafter)?;
        Ok(Some(Beside { model, written, ids: None }))
    }
}
