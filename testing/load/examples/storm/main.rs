//! Sends hostile requests to a running server while a few ordinary streams run. It passes if the
//! server does not crash, returns no server error, drops no connection without a response, delays
//! no stream by more than a second compared to a run without the storm, and its memory returns to
//! within a fifth.
//!
//!     dacapo serve --port 8000 & target/release/examples/storm http://127.0.0.1:8000 $!
//!
//! After the address and the process id come settings: `requests=10000`, `from=0` (the first
//! request), `width=16` (concurrent requests), `streams=3`, `seed=1`, `seconds=1800` (time limit),
//! `alone=30` (seconds of streams without the storm), `fill=120` (time limit for filling the KV
//! pages first), `tokens=48` (per answer of a stream), `show=N` (print request N of this seed and
//! exit). The same seed sends the same bytes. The address must be on this machine.

mod draw;
mod hostile;
mod schemas;
mod wire;

use hostile::{CHAT, Hostile};
use load::SseParser;
use load::client::{Connection, Target};
use serde_json::json;
use std::collections::BTreeMap;
use std::net::{SocketAddr, ToSocketAddrs};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};
use tokio::task::JoinSet;
use wire::{Ended, Outcome};

type Fault = Box<dyn std::error::Error + Send + Sync>;

/// How much longer a gap between tokens may be during the storm.
const GAP: Duration = Duration::from_secs(1);
/// The time limit of `/health/live`.
const HEALTH: Duration = Duration::from_secs(2);
/// The most memory afterwards, in percent of the memory before.
const MEMORY: u64 = 120;

struct Settings {
    target: Target,
    address: SocketAddr,
    pid: u32,
    numbers: BTreeMap<String, u64>,
}

impl Settings {
    fn read() -> Result<Self, Fault> {
        let mut words = std::env::args().skip(1);
        let (url, pid) = (words.next(), words.next());
        let (Some(url), Some(pid)) = (url, pid) else {
            return Err("usage: storm URL PID [NAME=NUMBER…]".into());
        };
        let target = Target::parse(&url, None)?;
        let all: Vec<SocketAddr> = target.host.to_socket_addrs()?.collect();
        let address = *all.first().ok_or("the host name has no address")?;
        if !all.iter().all(|address| address.ip().is_loopback()) {
            return Err(
                format!("{url} is not on this machine; only local servers are allowed").into()
            );
        }
        let target = Target { host: address.to_string(), ..target };
        let known = [
            ("requests", 10_000),
            ("from", 0),
            ("width", 16),
            ("streams", 3),
            ("seed", 1),
            ("seconds", 1800),
            ("alone", 30),
            ("fill", 120),
            ("tokens", 48),
            ("show", u64::MAX),
        ];
        let mut numbers: BTreeMap<_, _> = known.map(|(name, n)| (name.to_string(), n)).into();
        for word in words {
            let (name, value) =
                word.split_once('=').ok_or(format!("{word}: expected NAME=NUMBER"))?;
            let number = numbers.get_mut(name).ok_or(format!("unknown setting {name}"))?;
            *number = value.parse()?;
        }
        Ok(Self { target, address, pid: pid.parse()?, numbers })
    }

    fn get(&self, name: &str) -> u64 {
        self.numbers[name]
    }

    /// Memory in use, in KiB.
    fn memory(&self) -> Result<u64, Fault> {
        let text = std::fs::read_to_string(format!("/proc/{}/statm", self.pid))?;
        let pages: u64 = text.split_whitespace().nth(1).ok_or("statm")?.parse()?;
        Ok(pages * 4)
    }

    async fn get_text(&self, path: &str) -> Result<(u16, String), Fault> {
        let mut wire = Connection::open(&self.target).await?;
        let head = wire.request("GET", path, &[], b"").await?;
        Ok((head.status, String::from_utf8(wire.body().await?)?))
    }

    async fn metric(&self, name: &str) -> Result<f64, Fault> {
        let (_, text) = self.get_text("/metrics").await?;
        let line = text.lines().find(|line| line.starts_with(name)).ok_or(name)?;
        Ok(line.rsplit(' ').next().unwrap_or("").parse()?)
    }
}

/// The time between two tokens of a stream.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Gap {
    /// The duration without stolen time.
    own: Duration,
    /// CPU steal time in the gap: time that the hypervisor gave to other machines.
    stolen: Duration,
    ended: SystemTime,
}

/// CPU steal time of this machine so far, over all cores.
fn stolen() -> Duration {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks = text.lines().next().and_then(|line| line.split_whitespace().nth(8)?.parse().ok());
    Duration::from_millis(10 * ticks.unwrap_or(0))
}

/// The results of the ordinary streams.
#[derive(Default)]
struct Seen {
    gaps: u64,
    /// The longest gap.
    longest: Option<Gap>,
    first: Duration,
    answers: u64,
    refused: u64,
    failures: Vec<String>,
}

/// Streams read to their ends, one after another on each of several connections, until stopped;
/// running ones are finished.
struct Streams {
    stop: Arc<AtomicBool>,
    seen: Arc<Mutex<Seen>>,
    tasks: JoinSet<()>,
}

impl Streams {
    fn start(settings: &Arc<Settings>) -> Self {
        let (stop, seen) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let mut tasks = JoinSet::new();
        for i in 0..settings.get("streams") {
            let (settings, stop, seen) = (settings.clone(), stop.clone(), Arc::clone(&seen));
            tasks.spawn(async move {
                let mut round = 0;
                while !stop.load(Ordering::Relaxed) {
                    round += 1;
                    let failed = one_stream(&settings, i * 1000 + round, &seen).await.err();
                    if let Some(why) = failed {
                        let mut seen: std::sync::MutexGuard<'_, Seen> = seen.lock().unwrap();
                        seen.failures.push(format!("stream {i}, answer {round}: {why}"));
                    }
                }
            });
        }
        Self { stop, seen, tasks }
    }

    async fn end(mut self) -> Seen {
        self.stop.store(true, Ordering::Relaxed);
        while self.tasks.join_next().await.is_some() {}
        std::mem::take(&mut *self.seen.lock().unwrap())
    }
}

async fn one_stream(settings: &Settings, number: u64, seen: &Mutex<Seen>) -> Result<(), Fault> {
    let ask = json!({
        "messages": [{"role": "user", "content": format!("Tell me story number {number}.")}],
        "max_tokens": settings.get("tokens"), "ignore_eos": true, "stream": true,
    });
    let mut wire = Connection::open(&settings.target).await?;
    let began = Instant::now();
    let head = wire.request("POST", CHAT, &[], ask.to_string().as_bytes()).await?;
    if matches!(head.status, 429 | 503) {
        seen.lock().unwrap().refused += 1;
        tokio::time::sleep(Duration::from_millis(500)).await;
        return Ok(());
    }
    if head.status != 200 {
        return Err(format!("status {}", head.status).into());
    }
    let (mut last, mut gaps, mut first) =
        (None::<(Instant, Duration)>, Vec::<Gap>::new(), Duration::ZERO);
    let (mut done, mut error) = (false, None);
    let mut parser = SseParser::default();
    let mut take = |data: &str| {
        let now = Instant::now();
        done |= data == "[DONE]";
        if data.contains("\"error\"") {
            error = Some(data.chars().take(200).collect::<String>());
        }
        if data.contains("\"content\":\"") && !data.contains("\"content\":\"\"") {
            let so_far = stolen();
            match last {
                Some((last, before)) => {
                    let stolen = so_far.saturating_sub(before);
                    let own = (now - last).saturating_sub(stolen);
                    gaps.push(Gap { own, stolen, ended: SystemTime::now() });
                }
                None => first = now - began,
            }
            last = Some((now, so_far));
        }
    };
    while wire
        .read(&mut |bytes| {
            parser.push(bytes, &mut take);
        })
        .await?
    {}
    if let Some(error) = error {
        return Err(error.into());
    }
    if !done {
        return Err("the stream ended without [DONE]".into());
    }
    let mut seen = seen.lock().unwrap();
    seen.longest = seen.longest.max(gaps.iter().max().copied());
    seen.gaps += gaps.len() as u64;
    seen.first = seen.first.max(first);
    seen.answers += 1;
    Ok(())
}

/// Fills the KV pages, so that memory first touched by the storm's requests does not count as
/// growth.
async fn fill(settings: &Settings) -> Result<String, Fault> {
    let until = Instant::now() + Duration::from_secs(settings.get("fill"));
    let mut prompts = 0u64;
    while Instant::now() < until {
        if settings.metric("dacapo_kv_pages{state=\"free\"}").await? < 8.0 {
            return Ok(format!("pages full after {prompts} prompts"));
        }
        let text: String = (0..600).map(|word| format!("{} ", prompts * 7919 + word)).collect();
        let ask = json!({"prompt": text, "max_tokens": 1}).to_string();
        let mut wire = Connection::open(&settings.target).await?;
        wire.request("POST", "/v1/completions", &[], ask.as_bytes()).await?;
        wire.body().await?;
        prompts += 1;
    }
    Ok(format!("{prompts} prompts, pages not full"))
}

/// The results of the storm.
#[derive(Default)]
struct Tally {
    by_kind: BTreeMap<(&'static str, Ended), u64>,
    slowest: (Duration, u64, &'static str),
    failures: Vec<String>,
}

impl Tally {
    fn note(&mut self, number: u64, request: &Hostile, outcome: Outcome) {
        let Outcome { ended, took, body } = outcome;
        let bad = match &ended {
            Ended::Status(501) => !body.contains("not support embeddings"),
            Ended::Status(503) => false,
            Ended::Status(500..) => true,
            Ended::Status(status) => request.ordinary && !matches!(status, 200 | 429),
            Ended::Silence => request.due,
            Ended::Left => false,
            Ended::Never | Ended::Broken => true,
        };
        if bad {
            let line = format!("request {number} ({}): {ended:?}: {body}", request.kind);
            self.failures.push(line);
        }
        if took > self.slowest.0 {
            self.slowest = (took, number, request.kind);
        }
        *self.by_kind.entry((request.kind, ended)).or_default() += 1;
    }
}

async fn storm(settings: &Arc<Settings>) -> (Tally, u64) {
    let tally = Arc::new(Mutex::new(Tally::default()));
    let from = settings.get("from");
    let next = Arc::new(AtomicU64::new(from));
    let until = Instant::now() + Duration::from_secs(settings.get("seconds"));
    let mut workers = JoinSet::new();
    for _ in 0..settings.get("width") {
        let (settings, tally, next) = (settings.clone(), tally.clone(), next.clone());
        workers.spawn(async move {
            while Instant::now() < until {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number - from >= settings.get("requests") {
                    return;
                }
                let seed = settings.get("seed");
                // Generating a body can be slow and must not delay the timing of the streams.
                let made = tokio::task::spawn_blocking(move || {
                    // A remote client would not use CPU time of the server's machine for it.
                    let _ = rustix::process::nice(19);
                    hostile::request(seed, number)
                });
                let Ok(request) = made.await else { return };
                let outcome = wire::send(settings.address, &request).await;
                tally.lock().unwrap().note(number, &request, outcome);
            }
        });
    }
    while workers.join_next().await.is_some() {}
    let sent = (next.load(Ordering::Relaxed) - from).min(settings.get("requests"));
    (std::mem::take(&mut *tally.lock().unwrap()), sent)
}

/// Polls memory and `/health/live` until stopped; returns the maximum of each.
async fn watch(settings: Arc<Settings>, stop: Arc<AtomicBool>) -> (u64, Duration) {
    let (mut memory, mut slowest) = (0, Duration::ZERO);
    while !stop.load(Ordering::Relaxed) {
        memory = memory.max(settings.memory().unwrap_or(0));
        let began = Instant::now();
        let live = tokio::time::timeout(HEALTH * 2, settings.get_text("/health/live")).await;
        let fine = matches!(live, Ok(Ok((200, _))));
        slowest = slowest.max(if fine { began.elapsed() } else { HEALTH * 2 });
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    (memory, slowest)
}

/// Memory once nothing is in flight and freed memory has been returned to the system.
async fn settled(settings: &Settings) -> Result<u64, Fault> {
    for _ in 0..600 {
        if settings.metric("dacapo_requests_in_flight").await? == 0.0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let mut least = u64::MAX;
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        least = least.min(settings.memory()?);
    }
    Ok(least)
}

fn longest(seen: &Seen) -> Duration {
    seen.longest.map_or(Duration::ZERO, |gap| gap.own)
}

fn describe(name: &str, seen: &Seen) {
    println!(
        "{name}: {} answers, {} refused, {} gaps, longest {:.3} s, slowest first token {:.2} s",
        seen.answers,
        seen.refused,
        seen.gaps,
        longest(seen).as_secs_f64(),
        seen.first.as_secs_f64()
    );
    if let Some(Gap { stolen, ended, .. }) = seen.longest {
        let ended = ended.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        println!(
            "  the longest gap ended at Unix time {:.3}; {stolen:.2?} of CPU steal time are not \
             counted in it",
            ended.as_secs_f64()
        );
    }
}

async fn run(settings: Arc<Settings>) -> Result<Vec<String>, Fault> {
    let (status, _) = settings.get_text("/health/ready").await?;
    if status != 200 {
        return Err(format!("the server is not ready (status {status})").into());
    }
    println!("fill: {}", fill(&settings).await?);
    let streams = Streams::start(&settings);
    tokio::time::sleep(Duration::from_secs(settings.get("alone"))).await;
    let alone = streams.end().await;
    describe("streams without the storm", &alone);
    let before = settled(&settings).await?;
    let stop = Arc::new(AtomicBool::new(false));
    let watching = tokio::spawn(watch(settings.clone(), stop.clone()));
    let streams = Streams::start(&settings);
    let began = Instant::now();
    let (tally, sent) = storm(&settings).await;
    let took = began.elapsed();
    let beside = streams.end().await;
    stop.store(true, Ordering::Relaxed);
    let (peak, health) = watching.await?;
    describe("streams during the storm", &beside);
    let mut by_kind: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for ((kind, ended), count) in &tally.by_kind {
        by_kind.entry(kind).or_default().push(format!("{ended:?} {count}"));
    }
    for (kind, list) in by_kind {
        println!("  {kind}: {}", list.join(", "));
    }
    let (slow, number, kind) = tally.slowest;
    println!(
        "storm: {sent} requests of seed {} in {:.0} s, the slowest answer in {:.1} s (request \
         {number}, {kind}); /health/live in {:.3} s at most",
        settings.get("seed"),
        took.as_secs_f64(),
        slow.as_secs_f64(),
        health.as_secs_f64()
    );
    let mut failed = tally.failures;
    let alive = settings.get_text("/health/ready").await.is_ok_and(|(status, _)| status == 200);
    if !alive {
        failed.push("the server has stopped or is not ready".into());
        return Ok(failed);
    }
    let after = settled(&settings).await?;
    println!("memory: {before} KiB before, {peak} KiB at most, {after} KiB after");
    if after * 100 > before * MEMORY {
        failed.push(format!("memory grew from {before} to {after} KiB"));
    }
    let (without, with) = (longest(&alone), longest(&beside));
    if with > without + GAP {
        failed.push(format!(
            "a stream had a gap of {with:.2?}; without the storm the longest was {without:.2?}"
        ));
    }
    if health > HEALTH {
        failed.push(format!("/health/live took {health:.2?}"));
    }
    if sent < settings.get("requests") {
        failed.push(format!("only {sent} requests were sent in time"));
    }
    if alone.answers == 0 || beside.answers == 0 {
        failed.push("no stream was answered".into());
    }
    failed.extend(alone.failures);
    failed.extend(beside.failures);
    Ok(failed)
}

fn main() -> ExitCode {
    let settings = match Settings::read() {
        Ok(settings) => Arc::new(settings),
        Err(why) => {
            eprintln!("error: {why}");
            return ExitCode::from(2);
        }
    };
    if settings.get("show") != u64::MAX {
        let request = hostile::request(settings.get("seed"), settings.get("show"));
        println!("{}: {}", request.kind, String::from_utf8_lossy(&request.bytes));
        return ExitCode::SUCCESS;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let ended = match runtime {
        Ok(runtime) => runtime.block_on(run(settings)),
        Err(why) => Err(why.into()),
    };
    match ended {
        Ok(failed) if failed.is_empty() => {
            println!("PASS");
            ExitCode::SUCCESS
        }
        Ok(failed) => {
            for line in failed.iter().take(40) {
                println!("  {line}");
            }
            println!("FAIL: {} reasons", failed.len());
            ExitCode::FAILURE
        }
        Err(why) => {
            println!("FAIL: {why}");
            ExitCode::FAILURE
        }
    }
}
