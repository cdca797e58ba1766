//! What steps that make vectors may hold.

use super::FakeDevice;
use engine::exec::{Row, Step};

impl FakeDevice {
    /// A step that makes vectors makes nothing else.
    pub(super) fn check_vectors(&mut self, step: &Step) {
        let Some(pooling) = step.pooling() else { return };
        let fits = |row: &Row| {
            let wants = row.hidden().is_none_or(|wanted| wanted == pooling);
            row.prompt.is_some() && !row.sample && row.score().is_none() && wants
        };
        if !step.rows.iter().all(fits) {
            self.wrong(format!("step {} makes vectors beside other rows", step.number));
        }
    }
}
