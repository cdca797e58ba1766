//! The steps from text to ids: split off added tokens, normalise, cut into words, merge.

use super::added::{Added, AddedToken, Segment};
use super::effort::Effort;
use super::ids::Ids;
use super::model::{Model, Room};
use super::normalise::Normaliser;
use super::split::{ALPHABET, PreTokenizer};
use super::template::Template;
use crate::{Error, Result, limits};
use std::borrow::Cow;
use std::path::Path;

/// Everything needed to encode.
pub(super) struct Pipeline {
    model: Model,
    added: Added,
    normaliser: Normaliser,
    pre_tokenizer: PreTokenizer,
    /// What is put around whole texts.
    template: Template,
}

impl std::fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pipeline").field("tokens", &self.model.len()).finish_non_exhaustive()
    }
}

impl Pipeline {
    /// Puts the parts together. Every added token must end up with the id the file gave it.
    pub(super) fn new(
        file: &Path,
        model: Model,
        added: Vec<AddedToken>,
        normaliser: Normaliser,
        pre_tokenizer: PreTokenizer,
    ) -> Result<Self> {
        for (field, steps) in
            [("normalizer", normaliser.0.len()), ("pre_tokenizer", pre_tokenizer.0.len())]
        {
            if steps > limits::PIPELINE_STEPS {
                let allowed = format!("at most {}", limits::PIPELINE_STEPS);
                return Err(Error::invalid(file, 0, field, format!("{steps} steps"), allowed));
            }
        }
        let added = Added::new(file, added, &model, &normaliser)?;
        let template = Template::default();
        Ok(Self { model, added, normaliser, pre_tokenizer, template })
    }

    /// Sets what is put around whole texts.
    pub(super) fn around(self, template: Template) -> Self {
        Self { template, ..self }
    }

    /// What is put around whole texts.
    pub(super) fn template(&self) -> &Template {
        &self.template
    }

    /// Ids of `text`, at most `max`. A `marker` is taken out after added tokens have been
    /// recognised and before words are cut.
    pub(super) fn encode(
        &self,
        text: &str,
        marker: Option<char>,
        add_special: bool,
        max: usize,
    ) -> Result<Vec<u32>> {
        let mut ids = Ids::new(max);
        let mut effort = Effort::for_text(text.len());
        let mut room = Room::default();
        let marker = marker.filter(|&marker| text.contains(marker));
        if add_special {
            ids.extend(&self.template.prefix)?;
        }
        let mut first = true;
        self.added.split_plain(text, |segment| {
            let at_start = std::mem::take(&mut first);
            let text = match segment {
                Segment::Token(id) => return ids.push(id),
                Segment::Text(text) => self.normaliser.apply(text, &mut effort)?,
            };
            let mut first = at_start;
            self.added.split_normalised(&text, |segment| {
                let at_start = std::mem::take(&mut first);
                let text = match segment {
                    Segment::Token(id) => return ids.push(id),
                    Segment::Text(text) => match marker {
                        Some(marker) if text.contains(marker) => {
                            Cow::Owned(text.replace(marker, ""))
                        }
                        _ => Cow::Borrowed(text),
                    },
                };
                self.pre_tokenizer.words(&text, at_start, &mut effort, &mut |_, word| {
                    self.model.encode(word, &mut room, &mut ids)
                })
            })
        })?;
        if add_special {
            ids.extend(&self.template.suffix)?;
        }
        Ok(ids.into_inner())
    }

    pub(super) fn id_of(&self, text: &str) -> Option<u32> {
        self.added.id_of(text).or_else(|| self.model.id_of(text))
    }

    /// Texts of the control tokens.
    pub(super) fn control_texts(&self) -> impl Iterator<Item = &str> {
        self.added.controls()
    }

    /// How many bytes of text one byte of a token may stand for; `None` where some step may drop
    /// any amount of text.
    pub(super) fn shrinks(&self) -> Option<usize> {
        let alphabet = self.pre_tokenizer.is_byte_level().then(|| &*ALPHABET);
        let keeps_all = self.added.keeps_all()
            && self.pre_tokenizer.keeps_all()
            && self.model.keeps_all(alphabet);
        self.normaliser.shrinks().filter(|_| keeps_all)
    }
}
