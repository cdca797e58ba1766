//! KV events: which prefixes this server has cached, for routers that send a request to where its prefix is.
//!
//! The form is vLLM's: a ZMQ PUB socket with messages of three frames (topic, sequence number, msgpack), and a ROUTER
//! socket that repeats messages from a sequence number on. [`zmtp`] has as much of ZMQ's protocol as that needs,
//! [`pack`] the messages.
//!
//! The engine's thread hands over what changed after a step and never waits: a batch that finds the queue full is
//! dropped, a subscriber that reads too slowly skips batches. Either shows as a gap in the sequence numbers. Memory is
//! bounded by [`QUEUED`], [`KEPT`], [`KEPT_BYTES`] and [`CONNECTIONS`].

mod pack;
mod zmtp;

use crate::serve::ServeError;
use bytes::Bytes;
use engine::pages::CacheEvent;
use prometheus_client::metrics::counter::Counter;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, broadcast, mpsc};
use tokio::time::timeout;
use zmtp::{Frame, Wire};

/// Batches that wait to be encoded.
pub(crate) const QUEUED: usize = 4096;
/// Batches that a subscriber may be behind; one further behind skips some.
pub(crate) const BEHIND: usize = 1024;
/// Batches kept for replay, and their most bytes together.
pub(crate) const KEPT: usize = 10_000;
const KEPT_BYTES: usize = 64 << 20;
/// Connections of subscribers and replays together.
const CONNECTIONS: usize = 64;
/// A peer that does not introduce itself within this time is disconnected.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// The sequence number that ends a replay.
const END: u64 = u64::MAX;

/// How messages are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventForm {
    /// Events are maps with the names of fields, as vLLM from 0.24 on.
    #[default]
    Map,
    /// Events are arrays in a fixed order, as vLLM before, and as llm-d reads.
    Array,
}

/// Where and how events are published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEvents {
    /// The address of the PUB socket.
    pub listen: SocketAddr,
    /// The address of the socket that replays.
    pub replay: Option<SocketAddr>,
    /// The first frame of every message.
    pub topic: String,
    /// How messages are written.
    pub form: EventForm,
}

/// What the engine's thread publishes through.
pub(crate) struct EventSink {
    next: u64,
    batches: mpsc::Sender<Batch>,
    dropped: Counter,
}

struct Batch {
    number: u64,
    time: f64,
    events: Vec<CacheEvent>,
}

impl EventSink {
    /// Publishes what changed in a step. Never waits.
    pub(crate) fn publish(&mut self, events: Vec<CacheEvent>) {
        if events.is_empty() {
            return;
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let batch = Batch { number: self.next, time: since.as_secs_f64(), events };
        self.next += 1;
        if self.batches.try_send(batch).is_err() {
            self.dropped.inc();
        }
    }
}

/// The sockets of a publisher, bound and not yet served.
pub(crate) struct Publisher {
    config: KvEvents,
    events: TcpListener,
    replay: Option<TcpListener>,
}

impl Publisher {
    /// Binds the addresses.
    pub(crate) fn bind(config: &KvEvents) -> Result<Publisher, ServeError> {
        let listen = |address: SocketAddr| {
            let bound = std::net::TcpListener::bind(address).and_then(|listener| {
                listener.set_nonblocking(true)?;
                TcpListener::from_std(listener)
            });
            bound.map_err(|error| ServeError::Listen(address, error))
        };
        let replay = config.replay.map(listen).transpose()?;
        Ok(Publisher { events: listen(config.listen)?, replay, config: config.clone() })
    }

    /// The bound addresses: events, replay.
    pub(crate) fn addresses(&self) -> io::Result<(SocketAddr, Option<SocketAddr>)> {
        let replay = self.replay.as_ref().map(TcpListener::local_addr).transpose()?;
        Ok((self.events.local_addr()?, replay))
    }

    /// Starts serving, until the sink is dropped. Must run inside a tokio runtime.
    pub(crate) fn start(self, dropped: Counter) -> EventSink {
        let (batches, inbox) = mpsc::channel(QUEUED);
        let (sender, _) = broadcast::channel(BEHIND);
        let shared = Arc::new(Shared {
            topic: self.config.topic.clone().into(),
            form: self.config.form,
            kept: Mutex::default(),
            sender,
            connections: Arc::new(Semaphore::new(CONNECTIONS)),
        });
        let events = tokio::spawn(accept(self.events, shared.clone(), subscriber));
        let replay = self.replay.map(|on| tokio::spawn(accept(on, shared.clone(), replayer)));
        tokio::spawn(async move {
            shared.encode_all(inbox).await;
            events.abort();
            if let Some(replay) = replay {
                replay.abort();
            }
        });
        EventSink { next: 0, batches, dropped }
    }
}

struct Shared {
    topic: Bytes,
    form: EventForm,
    kept: Mutex<Kept>,
    sender: broadcast::Sender<Message>,
    connections: Arc<Semaphore>,
}

/// An encoded batch.
#[derive(Clone)]
struct Message {
    number: u64,
    body: Bytes,
}

/// The latest batches, oldest first.
#[derive(Default)]
struct Kept {
    messages: VecDeque<Message>,
    bytes: usize,
}

impl Kept {
    fn push(&mut self, message: Message) {
        self.bytes += message.body.len();
        self.messages.push_back(message);
        while self.messages.len() > KEPT || self.bytes > KEPT_BYTES {
            let Some(oldest) = self.messages.pop_front() else { return };
            self.bytes -= oldest.body.len();
        }
    }

    fn from(&self, number: u64) -> Vec<Message> {
        self.messages.iter().filter(|message| message.number >= number).cloned().collect()
    }
}

impl Shared {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(|error| error.into_inner())
    }

    async fn encode_all(&self, mut inbox: mpsc::Receiver<Batch>) {
        while let Some(Batch { number, time, events }) = inbox.recv().await {
            let body = Bytes::from(pack::batch(self.form, time, &events));
            let message = Message { number, body };
            self.kept().push(message.clone());
            // An error means that there is no subscriber.
            let _ = self.sender.send(message);
        }
    }
}

async fn accept<F>(
    listener: TcpListener,
    shared: Arc<Shared>,
    serve: fn(TcpStream, Arc<Shared>) -> F,
) where
    F: Future<Output = io::Result<()>> + Send + 'static,
{
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let Ok(permit) = shared.connections.clone().try_acquire_owned() else {
            tracing::warn!("a connection for KV events was refused: {CONNECTIONS} are open");
            continue;
        };
        let _ = stream.set_nodelay(true);
        let served = serve(stream, shared.clone());
        tokio::spawn(async move {
            if let Err(error) = served.await {
                tracing::debug!(%error, "a connection for KV events ended");
            }
            drop(permit);
        });
    }
}

async fn handshake(stream: TcpStream, own: &str, peers: &[&str]) -> io::Result<Wire<TcpStream>> {
    let introduced = timeout(HANDSHAKE, Wire::introduce(stream, own, peers)).await;
    introduced.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

/// Sends a subscriber every message whose topic it subscribed to.
async fn subscriber(stream: TcpStream, shared: Arc<Shared>) -> io::Result<()> {
    let mut messages = shared.sender.subscribe();
    let (mut reader, mut writer) = handshake(stream, "PUB", &["SUB", "XSUB"]).await?.split();
    let mut wanted: Vec<Vec<u8>> = Vec::new();
    let mut frame = zmtp::Partial::default();
    loop {
        let message = tokio::select! {
            read = reader.frame(&mut frame) => {
                let read = read?;
                if let Some(context) = read.ping() {
                    writer.pong(context).await?;
                } else if let Some((subscribe, topic)) = read.subscription() {
                    wanted.retain(|known| known != topic);
                    if subscribe && wanted.len() < CONNECTIONS {
                        wanted.push(topic.to_vec());
                    }
                }
                continue;
            }
            message = messages.recv() => message,
        };
        match message {
            Ok(Message { number, body }) => {
                if wanted.iter().any(|topic| shared.topic.starts_with(topic)) {
                    writer.send(&[&shared.topic, &number.to_be_bytes(), &body]).await?;
                }
            }
            // It sees the gap in the sequence numbers.
            Err(broadcast::error::RecvError::Lagged(_)) => {}
            Err(broadcast::error::RecvError::Closed) => return Ok(()),
        }
    }
}

/// Answers each request, a sequence number, with all messages from there on that are kept, and an end.
async fn replayer(stream: TcpStream, shared: Arc<Shared>) -> io::Result<()> {
    let (mut reader, mut writer) =
        handshake(stream, "ROUTER", &["REQ", "DEALER", "ROUTER"]).await?.split();
    loop {
        let mut request: Vec<Frame> = Vec::new();
        loop {
            let frame = reader.frame(&mut zmtp::Partial::default()).await?;
            if let Some(context) = frame.ping() {
                writer.pong(context).await?;
                continue;
            }
            let more = frame.more;
            request.push(frame);
            if !more {
                break;
            }
            if request.len() > 2 {
                return Err(zmtp::refuse("a replay request has too many frames"));
            }
        }
        let start = request.last().and_then(|frame| frame.body.as_slice().try_into().ok());
        let Some(start) = start.map(u64::from_be_bytes) else {
            return Err(zmtp::refuse("a replay request is a sequence number of 8 bytes"));
        };
        // A REQ socket sends and expects an empty frame first.
        let delimited = request.len() > 1;
        let messages = shared.kept().from(start);
        let end = Message { number: END, body: Bytes::new() };
        for Message { number, body } in messages.iter().chain([&end]) {
            let number = number.to_be_bytes();
            let frames: [&[u8]; 3] = [b"", &number, body];
            writer.send(&frames[usize::from(!delimited)..]).await?;
        }
    }
}
