//! The progress of loading.

use crate::output::note;
use crate::progress;
use model::Progress;
use std::time::Instant;

/// One bar at a time: weights, then graphs.
#[derive(Default)]
pub(super) struct Bar {
    bar: Option<indicatif::ProgressBar>,
    graphs: bool,
    /// When weights began to be read, and how many bytes there are.
    weights: Option<(Instant, u64)>,
}

/// Reading fewer bytes is too short to be worth a line.
const WORTH_A_LINE: u64 = 1_000_000_000;

impl Bar {
    pub(super) fn update(&mut self, progress: Progress) {
        let (graphs, done, total) = match progress {
            Progress::Weights(done, total) => (false, done, total),
            Progress::Graphs(done, total) => (true, done, total),
        };
        if self.bar.is_none() || graphs != self.graphs {
            self.finish();
            self.graphs = graphs;
            self.weights = (!graphs).then(|| (Instant::now(), total));
            self.bar = Some(match graphs {
                false => progress::bytes(total, "weights"),
                true => progress::count(total, "recording graphs"),
            });
        }
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        }
    }

    pub(super) fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        if let Some((began, bytes)) =
            self.weights.take().filter(|(_, total)| *total >= WORTH_A_LINE)
        {
            let (seconds, gigabytes) = (began.elapsed().as_secs_f64(), bytes as f64 * 1e-9);
            let rate = gigabytes / seconds;
            note!("weights: {gigabytes:.1} GB in {seconds:.1} s, {rate:.1} GB/s");
        }
    }
}
