//! The metrics of `/metrics`, in OpenMetrics format.

use crate::link::{Link, Phase, Run, Snapshot, StepRecord};
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::encoding::{EncodeLabelSet, LabelSetEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A set of labels: names and values.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Labels(Vec<(&'static str, String)>);

impl EncodeLabelSet for Labels {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> Result<(), fmt::Error> {
        self.0.encode(encoder)
    }
}

macro_rules! metrics {
    ($($(#[doc = $doc:literal])+ $name:ident : $ty:ty = $make:expr, $text:literal;)*) => {
        /// All metrics. Counters only grow; gauges are set when they are read.
        pub struct Metrics {
            registry: Registry,
            log_lines: Arc<AtomicU64>,
            $($(#[doc = $doc])+ pub $name: $ty,)*
        }

        impl Metrics {
            /// Metrics at zero; `log_lines` is the counter of dropped log lines, which the log
            /// writer increments.
            pub fn new(log_lines: Arc<AtomicU64>) -> Self {
                let mut registry = Registry::with_prefix("dacapo");
                $(
                    let $name: $ty = $make;
                    // The encoder adds the suffix of counters and the unit.
                    let shown = $text;
                    let help = concat!($($doc),+).trim().trim_end_matches('.');
                    match shown.strip_suffix("_seconds") {
                        Some(base) => {
                            registry.register_with_unit(base, help, Unit::Seconds, $name.clone());
                        }
                        None => registry.register(shown, help, $name.clone()),
                    }
                )*
                Self { registry, log_lines, $($name,)* }
            }
        }
    };
}

fn times(buckets: &[f64]) -> Histogram {
    Histogram::new(buckets.iter().copied())
}

const FIRST: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];
const BETWEEN: [f64; 13] =
    [0.0005, 0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0];
const WHOLE: [f64; 12] = [0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

metrics! {
    /// HTTP requests, by route and status; 499 if the client left before the response began.
    http_requests: Family<Labels, Counter> = Family::default(), "http_requests";
    /// Fields of requests that were not known and therefore ignored, by route.
    fields_ignored: Family<Labels, Counter> = Family::default(), "fields_ignored";
    /// Choices finished, by reason.
    choices_finished: Family<Labels, Counter> = Family::default(), "choices_finished";
    /// HTTP requests refused because the limit of engine requests in flight was reached.
    requests_refused: Counter = Counter::default(), "http_requests_refused";
    /// Streams closed because the client fell too far behind.
    slow_readers: Counter = Counter::default(), "slow_readers";
    /// Prompt tokens processed.
    prompt_tokens: Counter = Counter::default(), "prompt_tokens";
    /// Prompt tokens found in the prefix tree.
    cached_tokens: Counter = Counter::default(), "prompt_tokens_cached";
    /// Tokens generated.
    generated_tokens: Counter = Counter::default(), "generated_tokens";
    /// Requests that an adapter answers, by adapter.
    adapter_requests: Family<Labels, Counter> = Family::default(), "adapter_requests";
    /// Prompt tokens of these requests, by adapter.
    adapter_prompt_tokens: Family<Labels, Counter> = Family::default(), "adapter_prompt_tokens";
    /// Tokens generated for them, by adapter.
    adapter_tokens: Family<Labels, Counter> = Family::default(), "adapter_generated_tokens";
    /// From submission to the first token.
    first_token_seconds: Histogram = times(&FIRST), "time_to_first_token_seconds";
    /// From one token of an answer to the next.
    inter_token_seconds: Histogram = times(&BETWEEN), "inter_token_seconds";
    /// From submission to the end of the answer.
    request_seconds: Histogram = times(&WHOLE), "request_seconds";
    /// Log lines that could not be written.
    log_lines_dropped: Counter = Counter::default(), "log_lines_dropped";
    /// Step records that could not be written to the trace file.
    trace_records_dropped: Counter = Counter::default(), "trace_records_dropped";
    /// Batches of KV events that were dropped because too many waited.
    kv_event_batches_dropped: Counter = Counter::default(), "kv_event_batches_dropped";
    /// Times the engine failed and was restarted.
    engine_restarts: Counter = Counter::default(), "engine_restarts";
    /// Whether the server accepts requests.
    ready: Gauge = Gauge::default(), "ready";
    /// Whether memory of the model was given back.
    asleep: Gauge = Gauge::default(), "asleep";
    /// Requests accepted and not yet finished.
    inflight: Gauge = Gauge::default(), "requests_in_flight";
    /// Requests waiting to be admitted.
    queue: Gauge = Gauge::default(), "requests_waiting";
    /// Sequences that have a seat.
    running: Gauge = Gauge::default(), "sequences_running";
    /// Seats in total.
    seats: Gauge = Gauge::default(), "seats";
    /// KV pages, by state.
    pages: Family<Labels, Gauge> = Family::default(), "kv_pages";
    /// Prompt tokens looked up in the prefix tree.
    prefix_looked_up: Gauge = Gauge::default(), "prefix_tokens_looked_up";
    /// Prompt tokens found in the prefix tree, as the engine counts them.
    prefix_found: Gauge = Gauge::default(), "prefix_tokens_found";
    /// Copies of recurrent state that were saved behind prefixes.
    states_saved: Gauge = Gauge::default(), "prefix_states_saved";
    /// Sequences that began with such a copy.
    states_restored: Gauge = Gauge::default(), "prefix_states_restored";
    /// Sequences that were preempted: their pages went to others.
    preemptions: Gauge = Gauge::default(), "preemptions";
    /// Pages in memory for evicted pages, by tier.
    tier_pages: Family<Labels, Gauge> = Family::default(), "kv_tier_pages";
    /// Pages that it has room for, by tier.
    tier_room: Family<Labels, Gauge> = Family::default(), "kv_tier_room";
    /// Pages saved, loaded, evicted from there, or lost, by tier.
    tier_moves: Family<Labels, Counter> = Family::default(), "kv_tier_moves";
    /// Drafts that were verified, by outcome.
    drafts: Family<Labels, Counter> = Family::default(), "drafts";
    /// Decode steps where drafts are chosen, by drafts of each row.
    draft_steps: Family<Labels, Counter> = Family::default(), "draft_steps";
    /// 1, with the number of drafts that the last decode step had and the reason as a label.
    draft_choice: Family<Labels, Gauge> = Family::default(), "draft_choice";
    /// Steps that ran a layer of experts, by layer.
    expert_steps: Family<Labels, Counter> = Family::default(), "expert_steps";
    /// Experts that had tokens, added up over the steps, by layer.
    experts_chosen: Family<Labels, Counter> = Family::default(), "experts_chosen";
    /// Tokens that went to experts, by layer.
    expert_tokens: Family<Labels, Counter> = Family::default(), "expert_tokens";
    /// Tokens that went to the expert that had most of them, by layer.
    expert_tokens_busiest: Family<Labels, Gauge> = Family::default(), "expert_tokens_busiest";
    /// Experts that have had no token, by layer.
    experts_idle: Family<Labels, Gauge> = Family::default(), "experts_idle";
    /// Steps that replayed a device graph, by phase and bucket.
    steps_replayed: Family<Labels, Counter> = Family::default(), "graph_steps_replayed";
    /// Steps that ran op by op, by phase and reason.
    steps_eager: Family<Labels, Counter> = Family::default(), "graph_steps_eager";
    /// Rows of live sequences, by phase.
    rows_live: Family<Labels, Counter> = Family::default(), "graph_rows_live";
    /// Padding rows, by phase.
    rows_padded: Family<Labels, Counter> = Family::default(), "graph_rows_padded";
    /// Host time of steps in microseconds, by phase.
    host_us: Family<Labels, Counter> = Family::default(), "step_host_microseconds";
    /// Device time of steps in microseconds, by phase; its rate is the device utilization.
    device_us: Family<Labels, Counter> = Family::default(), "step_device_microseconds";
}

/// The counters of one adapter.
pub(crate) struct AdapterCounters {
    pub(crate) requests: Counter,
    pub(crate) prompt_tokens: Counter,
    pub(crate) tokens: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new(Arc::default())
    }
}

impl Metrics {
    /// Counts a finished choice.
    pub fn finished(&self, how: &str) {
        self.choices_finished.get_or_create(&Labels(vec![("finish", how.into())])).inc();
    }

    /// The counters of an adapter's requests.
    pub(crate) fn adapter(&self, label: &str) -> AdapterCounters {
        let labels = Labels(vec![("adapter", label.into())]);
        AdapterCounters {
            requests: self.adapter_requests.get_or_create(&labels).clone(),
            prompt_tokens: self.adapter_prompt_tokens.get_or_create(&labels).clone(),
            tokens: self.adapter_tokens.get_or_create(&labels).clone(),
        }
    }

    /// Forgets an adapter that was unloaded.
    pub(crate) fn forget_adapter(&self, label: &str) {
        let labels = Labels(vec![("adapter", label.into())]);
        for family in [&self.adapter_requests, &self.adapter_prompt_tokens, &self.adapter_tokens] {
            family.remove(&labels);
        }
    }

    /// Counts an HTTP response.
    pub fn answered(&self, route: &str, status: u16) {
        let labels = Labels(vec![("route", route.into()), ("status", status.to_string())]);
        self.http_requests.get_or_create(&labels).inc();
    }

    /// Counts the ignored fields of a request.
    pub(crate) fn ignored(&self, route: &str, count: usize) {
        let labels = Labels(vec![("route", route.into())]);
        self.fields_ignored.get_or_create(&labels).inc_by(count as u64);
    }

    /// Counts one step.
    pub fn step(&self, record: &StepRecord) {
        let phase = ("phase", record.phase.as_str().to_string());
        match &record.run {
            Run::Replayed => {
                let bucket = match record.phase {
                    Phase::Decode => record.bucket_rows.to_string(),
                    Phase::Prefill => record.bucket_tokens.to_string(),
                };
                let labels = Labels(vec![phase.clone(), ("bucket", bucket)]);
                self.steps_replayed.get_or_create(&labels).inc();
            }
            Run::Eager(reason) => {
                let labels = Labels(vec![phase.clone(), ("reason", reason.clone())]);
                self.steps_eager.get_or_create(&labels).inc();
            }
        }
        let phase = Labels(vec![phase]);
        self.rows_live.get_or_create(&phase).inc_by(u64::from(record.live_rows));
        self.rows_padded.get_or_create(&phase).inc_by(u64::from(record.padded_rows));
        self.host_us.get_or_create(&phase).inc_by(u64::from(record.host_us));
        self.device_us.get_or_create(&phase).inc_by(u64::from(record.device_us));
    }

    /// The text of `/metrics`, gauges read from `link`.
    pub fn text(&self, link: &Link, ready: bool) -> Result<String, fmt::Error> {
        let snapshot = link.snapshot();
        let dropped = self.log_lines.load(Ordering::Relaxed);
        self.log_lines_dropped.inner().store(dropped, Ordering::Relaxed);
        self.ready.set(i64::from(ready));
        self.asleep.set(i64::from(link.is_asleep()));
        self.inflight.set(link.inflight() as i64);
        self.queue.set(snapshot.queue as i64);
        self.running.set(snapshot.running as i64);
        self.seats.set(snapshot.seats as i64);
        for (state, count) in [
            ("used", snapshot.pages.used),
            ("cached", snapshot.pages.cached),
            ("free", snapshot.pages.free),
        ] {
            let labels = Labels(vec![("state", state.into())]);
            self.pages.get_or_create(&labels).set(count as i64);
        }
        self.prefix_looked_up.set(snapshot.prefix.looked_up as i64);
        self.prefix_found.set(snapshot.prefix.found as i64);
        self.states_saved.set(snapshot.prefix.states_saved as i64);
        self.states_restored.set(snapshot.prefix.states_restored as i64);
        self.preemptions.set(snapshot.preemptions as i64);
        for tier in &snapshot.tiers {
            let labels = Labels(vec![("tier", tier.tier.into())]);
            self.tier_pages.get_or_create(&labels).set(tier.pages as i64);
            self.tier_room.get_or_create(&labels).set(tier.room as i64);
            let moves = [
                ("saved", tier.saved),
                ("loaded", tier.loaded),
                ("evicted", tier.evicted),
                ("failed", tier.failed),
            ];
            for (how, count) in moves {
                let labels = Labels(vec![("tier", tier.tier.into()), ("move", how.into())]);
                // The store counts.
                self.tier_moves.get_or_create(&labels).inner().store(count, Ordering::Relaxed);
            }
        }
        if let Some(drafts) = &snapshot.drafts {
            let rejected = drafts.drafted.saturating_sub(drafts.accepted);
            for (outcome, count) in [("accepted", drafts.accepted), ("rejected", rejected)] {
                let labels = Labels(vec![("outcome", outcome.into())]);
                // The executor counts.
                self.drafts.get_or_create(&labels).inner().store(count, Ordering::Relaxed);
            }
            for (each, count) in &drafts.steps {
                let labels = Labels(vec![("drafts", each.to_string())]);
                self.draft_steps.get_or_create(&labels).inner().store(*count, Ordering::Relaxed);
            }
            self.draft_choice.clear();
            let labels = Labels(vec![("choice", drafts.choice.clone())]);
            self.draft_choice.get_or_create(&labels).set(1);
        }
        for layer in &snapshot.experts {
            let labels = Labels(vec![("layer", layer.layer.to_string())]);
            let counters = [
                (&self.expert_steps, layer.steps),
                (&self.experts_chosen, layer.chosen),
                (&self.expert_tokens, layer.tokens),
            ];
            for (counter, value) in counters {
                // The device counts.
                counter.get_or_create(&labels).inner().store(value, Ordering::Relaxed);
            }
            self.expert_tokens_busiest.get_or_create(&labels).set(layer.busiest as i64);
            self.experts_idle.get_or_create(&labels).set(layer.idle.into());
        }
        let mut text = String::new();
        encode_registry(&mut text, &self.registry)?;
        encode_registry(&mut text, &vllm(&snapshot))?;
        encode_eof(&mut text)?;
        Ok(text)
    }
}

/// The gauges that routers read, under vLLM's names.
fn vllm(snapshot: &Snapshot) -> Registry {
    let mut registry = Registry::default();
    let number = |value: u64| {
        let gauge = Gauge::<i64>::default();
        gauge.set(value as i64);
        gauge
    };
    let usage = Gauge::<f64, AtomicU64>::default();
    usage.set(snapshot.pages.used as f64 / snapshot.pages.total().max(1) as f64);
    let config = Family::<Labels, Gauge>::default();
    let labels = [
        ("block_size", snapshot.page_tokens.to_string()),
        ("num_gpu_blocks", snapshot.pages.total().to_string()),
    ];
    config.get_or_create(&Labels(labels.to_vec())).set(1);
    let waiting = number(snapshot.queue);
    registry.register("vllm:num_requests_waiting", "Requests waiting to be admitted", waiting);
    let running = number(snapshot.running);
    registry.register("vllm:num_requests_running", "Sequences that have a seat", running);
    let what = "Pages held by sequences, of all";
    registry.register("vllm:kv_cache_usage_perc", what, usage);
    registry.register("vllm:cache_config_info", "Size of the KV cache", config);
    registry
}
