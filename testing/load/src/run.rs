//! Sends the load and measures the responses.

use crate::client::{ClientError, Connection, Target};
use crate::dist::{Dice, Dist};
use crate::prompts::Prompts;
use crate::report::{Latency, Report, Slo, Timeline};
use crate::sse::SseParser;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// When requests are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// This many at once: the next is sent when one ends.
    Fixed(usize),
    /// This many a second on average, independent of the responses, and at most this many at once.
    Poisson(f64, usize),
}

/// The route under load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}

/// The configuration of a load run.
#[derive(Clone, Debug)]
pub struct LoadSpec {
    /// The server.
    pub target: Target,
    /// The model to request; by default the first that the server lists.
    pub model: Option<String>,
    /// The route.
    pub endpoint: Endpoint,
    /// When requests are sent.
    pub arrivals: Arrivals,
    /// The number of measured requests.
    pub requests: u64,
    /// Requests sent before those, not measured.
    pub warmup: u64,
    /// The prompts.
    pub prompts: Prompts,
    /// The lengths of the answers.
    pub output: Dist,
    /// Ask the server to ignore the end-of-text token, so that answers have the requested length.
    pub ignore_eos: bool,
    /// Additional fields of every request.
    pub extra: Map<String, Value>,
    /// The latency goals.
    pub slo: Slo,
    /// A request that takes longer fails.
    pub timeout: Duration,
    /// The seed; the same seed gives the same load.
    pub seed: u64,
    /// A name for tables and legends.
    pub label: String,
}

/// The progress of a run, readable while it runs.
#[derive(Debug, Default)]
pub struct Progress {
    /// Requests ended, the warm-up included.
    pub done: AtomicU64,
    /// Requests in flight.
    pub active: AtomicU64,
    /// Tokens so far.
    pub tokens: AtomicU64,
    /// Errors so far.
    pub errors: AtomicU64,
}

/// One request's outcome.
struct Sample {
    error: Option<String>,
    began: Duration,
    ended: Duration,
    first: Option<Duration>,
    /// When each chunk with text after the first arrived; a chunk may carry several tokens.
    chunks: Vec<Duration>,
    tokens: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
}

struct Shared {
    spec: LoadSpec,
    model: String,
    origin: Instant,
    idle: Mutex<Vec<Connection>>,
    progress: Arc<Progress>,
}

/// Like [`run`], on its own runtime; blocks.
pub fn run_blocking(spec: LoadSpec, progress: Arc<Progress>) -> Result<Report, String> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    runtime.map_err(|e| e.to_string())?.block_on(run(spec, progress))
}

/// Runs the load; an error only if the model name could not be requested.
pub async fn run(spec: LoadSpec, progress: Arc<Progress>) -> Result<Report, String> {
    let model = match &spec.model {
        Some(model) => model.clone(),
        None => first_model(&spec.target).await?,
    };
    let base_url = format!("http://{}{}", spec.target.host, spec.target.prefix);
    let shared =
        Arc::new(Shared { model, origin: Instant::now(), idle: Mutex::default(), progress, spec });
    let mut dice = Dice::new(shared.spec.seed);
    let warmup = shared.spec.warmup;
    let width = match shared.spec.arrivals {
        Arrivals::Fixed(n) | Arrivals::Poisson(_, n) => n.max(1),
    };
    if warmup > 0 {
        let fixed = Arrivals::Fixed(width.min(warmup as usize));
        send_all(&shared, fixed, 0..warmup, &mut dice).await;
    }
    let begin = shared.origin.elapsed();
    let arrivals = shared.spec.arrivals;
    let samples = send_all(&shared, arrivals, warmup..warmup + shared.spec.requests, &mut dice);
    let samples = samples.await;
    Ok(sum_up(&shared, base_url, begin, samples))
}

async fn first_model(target: &Target) -> Result<String, String> {
    let ask = async {
        let mut connection = Connection::open(target).await?;
        let head = connection.request("GET", "/v1/models", &[], b"").await?;
        Ok::<_, ClientError>((head.status, connection.body().await?))
    };
    let (status, body) = ask.await.map_err(|e| format!("{}: {e}", target.host))?;
    let list: Value = serde_json::from_slice(&body).unwrap_or_default();
    match list["data"][0]["id"].as_str() {
        Some(name) => Ok(name.into()),
        None => Err(format!("{}/v1/models returned status {status} and no model", target.host)),
    }
}

async fn send_all(
    shared: &Arc<Shared>,
    arrivals: Arrivals,
    numbers: std::ops::Range<u64>,
    dice: &mut Dice,
) -> Vec<Sample> {
    let (width, rate) = match arrivals {
        Arrivals::Fixed(n) => (n.max(1), None),
        Arrivals::Poisson(rate, most) => (most.max(1), Some(rate)),
    };
    let permits = Arc::new(Semaphore::new(width));
    let mut tasks = JoinSet::new();
    let mut samples = Vec::with_capacity((numbers.end - numbers.start) as usize);
    let mut next = tokio::time::Instant::now();
    for number in numbers {
        if let Some(rate) = rate {
            next += Duration::from_secs_f64(dice.exponential(1.0 / rate.max(1e-6)));
            tokio::time::sleep_until(next).await;
        }
        let permit = permits.clone().acquire_owned().await;
        let body = body(shared, number, dice);
        let shared = shared.clone();
        tasks.spawn(async move {
            shared.progress.active.fetch_add(1, Ordering::Relaxed);
            let sample = one(&shared, body).await;
            shared.progress.active.fetch_sub(1, Ordering::Relaxed);
            shared.progress.done.fetch_add(1, Ordering::Relaxed);
            if sample.error.is_some() {
                shared.progress.errors.fetch_add(1, Ordering::Relaxed);
            }
            drop(permit);
            sample
        });
        while let Some(ended) = tasks.try_join_next() {
            samples.extend(ended);
        }
    }
    while let Some(ended) = tasks.join_next().await {
        samples.extend(ended);
    }
    samples
}

fn body(shared: &Shared, number: u64, dice: &mut Dice) -> Vec<u8> {
    let spec = &shared.spec;
    let most = spec.output.draw(dice);
    let (prompt, limit) = spec.prompts.draw(number, spec.seed, dice);
    let mut body = match spec.endpoint {
        Endpoint::Chat => json!({"messages": [{"role": "user", "content": prompt}]}),
        Endpoint::Completions => json!({"prompt": prompt}),
    };
    body["model"] = shared.model.as_str().into();
    body["max_tokens"] = limit.unwrap_or(most).into();
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    if spec.ignore_eos {
        body["ignore_eos"] = true.into();
    }
    if let Some(fields) = body.as_object_mut() {
        fields.extend(spec.extra.clone());
    }
    body.to_string().into_bytes()
}

async fn one(shared: &Shared, body: Vec<u8>) -> Sample {
    let mut sample = Sample {
        error: None,
        began: shared.origin.elapsed(),
        ended: Duration::ZERO,
        first: None,
        chunks: Vec::new(),
        tokens: 0,
        prompt_tokens: 0,
        cached_tokens: 0,
    };
    let done =
        tokio::time::timeout(shared.spec.timeout, exchange(shared, &body, &mut sample)).await;
    sample.ended = shared.origin.elapsed();
    sample.error = match done {
        Ok(Ok(())) => None,
        Ok(Err(kind)) => Some(kind),
        Err(_) => Some("timeout".into()),
    };
    sample
}

async fn connection(shared: &Shared) -> Result<Connection, ClientError> {
    let idle = shared.idle.lock().unwrap_or_else(|e| e.into_inner()).pop();
    match idle {
        Some(connection) => Ok(connection),
        None => Connection::open(&shared.spec.target).await,
    }
}

async fn exchange(shared: &Shared, body: &[u8], sample: &mut Sample) -> Result<(), String> {
    let path = match shared.spec.endpoint {
        Endpoint::Chat => "/v1/chat/completions",
        Endpoint::Completions => "/v1/completions",
    };
    let kind = |e: ClientError| match e {
        ClientError::Io(e) => format!("connection: {}", e.kind()),
        ClientError::Closed => "closed before the end of the response".into(),
        ClientError::Protocol(what) => format!("invalid HTTP response: {what}"),
    };
    let mut wire = connection(shared).await.map_err(kind)?;
    let head = match wire.request("POST", path, &[], body).await {
        Ok(head) => head,
        // The server may have closed a kept connection in the meantime; retry on a new one.
        Err(ClientError::Closed | ClientError::Io(_)) => {
            wire = Connection::open(&shared.spec.target).await.map_err(kind)?;
            wire.request("POST", path, &[], body).await.map_err(kind)?
        }
        Err(e) => return Err(kind(e)),
    };
    if head.status != 200 {
        // The body is read so that the connection can be used again.
        let _ = wire.body().await;
        keep(shared, wire);
        return Err(format!("status {}", head.status));
    }
    let mut reader = Reader { parser: SseParser::default(), done: false, error: None };
    loop {
        let more =
            wire.read(&mut |bytes| reader.take(bytes, shared, sample)).await.map_err(kind)?;
        if let Some(error) = reader.error.take() {
            return Err(error);
        }
        if !more {
            break;
        }
    }
    if !reader.done {
        return Err("the stream ended without [DONE]".into());
    }
    keep(shared, wire);
    Ok(())
}

fn keep(shared: &Shared, wire: Connection) {
    if wire.is_reusable() {
        shared.idle.lock().unwrap_or_else(|e| e.into_inner()).push(wire);
    }
}

struct Reader {
    parser: SseParser,
    done: bool,
    error: Option<String>,
}

impl Reader {
    fn take(&mut self, bytes: &[u8], shared: &Shared, sample: &mut Sample) {
        let Self { parser, done, error } = self;
        let now = shared.origin.elapsed();
        let fine = parser.push(bytes, |data| {
            if data == "[DONE]" {
                *done = true;
                return;
            }
            if carries_text(data) {
                shared.progress.tokens.fetch_add(1, Ordering::Relaxed);
                sample.tokens += 1;
                match sample.first {
                    None => sample.first = Some(now),
                    Some(_) => sample.chunks.push(now),
                }
                return;
            }
            // Only the few chunks without text are parsed.
            let Ok(chunk) = serde_json::from_str::<Value>(data) else {
                *error = Some("a chunk is not JSON".into());
                return;
            };
            if let Some(problem) = chunk.get("error") {
                let name = problem["code"].as_str().unwrap_or("no code");
                *error = Some(format!("error in the stream: {name}"));
            }
            if let Some(tokens) = chunk["usage"]["completion_tokens"].as_u64() {
                sample.tokens = tokens;
                sample.prompt_tokens = chunk["usage"]["prompt_tokens"].as_u64().unwrap_or(0);
                let details = &chunk["usage"]["prompt_tokens_details"];
                sample.cached_tokens = details["cached_tokens"].as_u64().unwrap_or(0);
            }
        });
        if !fine {
            *error = Some("an event is too long".into());
        }
    }
}

/// Whether a chunk has a text field that is not empty, found without parsing it.
fn carries_text(data: &str) -> bool {
    let field = |name: &str| {
        data.find(name).is_some_and(|at| {
            let rest = data[at + name.len()..].trim_start();
            let rest = rest.strip_prefix(':').unwrap_or("").trim_start();
            rest.starts_with('"') && !rest.starts_with("\"\"")
        })
    };
    field("\"content\"")
        || field("\"text\"")
        || field("\"reasoning_content\"")
        || field("\"reasoning\"")
        || field("\"arguments\"")
}

fn sum_up(shared: &Shared, base_url: String, begin: Duration, samples: Vec<Sample>) -> Report {
    let spec = &shared.spec;
    let (mut ttft, mut itl, mut e2e) = (Vec::new(), Vec::new(), Vec::new());
    let mut errors = BTreeMap::<String, u64>::new();
    let mut timeline = Timeline::default();
    let (mut good, mut output_tokens, mut prompt_tokens, mut cached_tokens) = (0u64, 0, 0, 0);
    let end = samples.iter().map(|s| s.ended).max().unwrap_or(begin);
    let second = |at: Duration| at.saturating_sub(begin).as_secs() as usize;
    let length = second(end) + 1;
    for list in [&mut timeline.tokens, &mut timeline.finished, &mut timeline.failed] {
        *list = vec![0; length];
    }
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    for sample in &samples {
        if let Some(kind) = &sample.error {
            *errors.entry(kind.clone()).or_default() += 1;
            timeline.failed[second(sample.ended)] += 1;
            continue;
        }
        timeline.finished[second(sample.ended)] += 1;
        output_tokens += sample.tokens;
        prompt_tokens += sample.prompt_tokens;
        cached_tokens += sample.cached_tokens;
        let whole = ms(sample.ended - sample.began);
        let first = sample.first.unwrap_or(sample.ended);
        let mut last = first;
        timeline.tokens[second(first)] += 1;
        for at in &sample.chunks {
            itl.push(ms(*at - last));
            timeline.tokens[second(*at)] += 1;
            last = *at;
        }
        let mean = ms(last - first) / (sample.chunks.len().max(1)) as f64;
        good += u64::from(spec.slo.is_met(ms(first - sample.began), mean, whole));
        ttft.push(ms(first - sample.began));
        e2e.push(whole);
    }
    let seconds = (end - begin).as_secs_f64().max(1e-9);
    let sent = samples.iter().map(|s| s.began).max().unwrap_or(begin);
    let steady = full_rate(&samples, begin, sent);
    let succeeded = e2e.len() as u64;
    Report {
        label: spec.label.clone(),
        base_url,
        model: shared.model.clone(),
        load: describe(spec),
        seconds,
        requests: samples.len() as u64,
        succeeded,
        errors,
        prompt_tokens,
        cached_tokens,
        output_tokens,
        request_rate: succeeded as f64 / seconds,
        output_rate: output_tokens as f64 / seconds,
        steady_rate: steady.unwrap_or(output_tokens as f64 / seconds),
        ttft: Latency::of(ttft),
        itl: Latency::of(itl),
        e2e: Latency::of(e2e),
        slo: spec.slo,
        within: good as f64 / samples.len().max(1) as f64,
        goodput: good as f64 / seconds,
        timeline,
    }
}

/// Tokens a second from `begin` until the last request was sent, or `None` if that took less than a
/// second. The tokens of an answer are divided equally among its events, because an event may carry
/// several.
fn full_rate(samples: &[Sample], begin: Duration, sent: Duration) -> Option<f64> {
    let seconds = sent.saturating_sub(begin).as_secs_f64();
    let tokens = |sample: &Sample| {
        let events = || sample.first.iter().chain(&sample.chunks);
        let early = events().filter(|at| **at <= sent).count() as f64;
        sample.tokens as f64 * early / events().count().max(1) as f64
    };
    let answered = samples.iter().filter(|sample| sample.error.is_none());
    (seconds >= 1.0).then(|| answered.map(tokens).sum::<f64>() / seconds)
}

fn describe(spec: &LoadSpec) -> String {
    let when = match spec.arrivals {
        Arrivals::Fixed(n) => format!("{n} at once"),
        Arrivals::Poisson(rate, _) => format!("Poisson, {rate}/s"),
    };
    format!("{when}, {}, {} tokens out", spec.prompts, spec.output)
}

#[cfg(test)]
mod tests {
    use super::{Sample, carries_text, full_rate};
    use std::time::Duration;

    #[test]
    fn full_load_ends_with_the_last_request() {
        let at = Duration::from_secs;
        let sample = |began: u64, tokens: u64| Sample {
            error: None,
            began: at(began),
            ended: at(began + 5),
            first: Some(at(began + 1)),
            chunks: (2..=4).map(|n| at(began + n)).collect(),
            tokens,
            prompt_tokens: 1,
            cached_tokens: 0,
        };
        let samples = [sample(0, 4), sample(0, 8), sample(2, 4)];
        // Until second 2: two events of four of the first two answers.
        assert_eq!(full_rate(&samples, at(0), at(2)), Some(3.0));
        assert_eq!(full_rate(&samples, at(2), at(2)), None);
        let lost = Sample { error: Some("lost".into()), ..sample(0, 4) };
        assert_eq!(full_rate(&[lost], at(0), at(2)), Some(0.0));
    }

    #[test]
    fn chunks_with_text() {
        assert!(carries_text(r#"{"choices":[{"delta":{"content":"a"}}]}"#));
        assert!(carries_text(r#"{"choices":[{"text": "\n"}]}"#));
        assert!(!carries_text(r#"{"choices":[{"delta":{"content":""}}]}"#));
        assert!(!carries_text(r#"{"choices":[{"delta":{"content":null}}]}"#));
        assert!(!carries_text(r#"{"choices":[],"usage":{}}"#));
    }
}
