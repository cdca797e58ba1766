//! KV events through real sockets: what a subscriber rebuilds is what the prefix tree has.

use crate::bed::{Bed, config, model, soon};
use crate::echo::Echo;
use engine::request::{Event, Micros, Output, Token};
use engine::{Engine, EngineConfig};
use serde_json::json;
use server::link::{Backend, Factory, Snapshot, once};
use server::{EventForm, KvEvents, Server, ServerConfig};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Where each cached page ends, and its tokens; sorted.
type Pages = Vec<(u32, Vec<Token>)>;

/// An engine over a device that answers at once. It shows its tree whenever it is idle.
struct Shown {
    engine: Engine<Echo>,
    tree: Arc<Mutex<Pages>>,
}

impl Backend for Shown {
    fn step(&mut self, now: Micros, events: Vec<Event>, _: bool) -> Vec<Output> {
        let outputs = self.engine.step(now, events);
        self.engine.executor_mut().steps.clear();
        outputs
    }

    fn is_idle(&self) -> bool {
        self.engine.is_idle()
    }

    fn take_cache_events(&mut self) -> Vec<engine::pages::CacheEvent> {
        self.engine.take_cache_events()
    }

    fn snapshot(&self) -> Snapshot {
        let pages = self.engine.cached_pages().into_iter().filter(|page| page.tenant == 0);
        let mut tree: Pages = pages
            .map(|page| (page.start + page.tokens.len() as u32, page.tokens.to_vec()))
            .collect();
        tree.sort();
        *self.tree.lock().unwrap() = tree;
        let stats = self.engine.stats();
        Snapshot { running: stats.running.into(), page_tokens: 4, ..Snapshot::default() }
    }
}

fn backend() -> (Factory, Arc<Mutex<Pages>>) {
    let tree = Arc::new(Mutex::new(Vec::new()));
    let config = EngineConfig { cache_events: true, ..EngineConfig::default() };
    let engine = Engine::new(Echo::new(8, 200), config);
    (once(Shown { engine, tree: tree.clone() }), tree)
}

/// One end of ZMTP 3, enough for a SUB and a REQ socket.
struct Peer(TcpStream);

impl Peer {
    async fn connect(address: SocketAddr, kind: &str) -> Peer {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let mut greeting = [0; 64];
        (greeting[0], greeting[9], greeting[10], greeting[11]) = (0xff, 0x7f, 3, 1);
        greeting[12..16].copy_from_slice(b"NULL");
        stream.write_all(&greeting).await.unwrap();
        stream.read_exact(&mut greeting).await.unwrap();
        let mut ready = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
        ready.push(kind.len() as u8);
        ready.extend(kind.as_bytes());
        stream.write_all(&[4, ready.len() as u8]).await.unwrap();
        stream.write_all(&ready).await.unwrap();
        let mut peer = Peer(stream);
        assert!(peer.message().await.unwrap()[0].starts_with(b"\x05READY"));
        peer
    }

    /// A subscriber of everything; pings to know that the subscription was read.
    async fn subscribe(address: SocketAddr) -> Peer {
        let mut peer = Peer::connect(address, "SUB").await;
        peer.0.write_all(&[0, 1, 1]).await.unwrap();
        peer.0.write_all(b"\x04\x08\x04PING\x00\x01x").await.unwrap();
        loop {
            let message = peer.message().await.unwrap();
            if message[0] == b"\x04PONGx" {
                return peer;
            }
        }
    }

    /// The frames of the next message; `None` when the connection ends.
    async fn message(&mut self) -> Option<Vec<Vec<u8>>> {
        let mut frames = Vec::new();
        loop {
            let flags = self.0.read_u8().await.ok()?;
            let len = match flags & 2 {
                0 => u64::from(self.0.read_u8().await.ok()?),
                _ => self.0.read_u64().await.ok()?,
            };
            let mut body = vec![0; len as usize];
            self.0.read_exact(&mut body).await.ok()?;
            frames.push(body);
            if flags & 1 == 0 {
                return Some(frames);
            }
        }
    }

    /// All messages from this number on, by their number.
    async fn replay(address: SocketAddr, from: u64) -> Vec<(u64, Vec<u8>)> {
        let mut peer = Peer::connect(address, "REQ").await;
        peer.0.write_all(&[1, 0, 0, 8]).await.unwrap();
        peer.0.write_all(&from.to_be_bytes()).await.unwrap();
        let mut messages = Vec::new();
        loop {
            let frames = peer.message().await.expect("an end");
            let [empty, number, body] = &frames[..] else { panic!("{} frames", frames.len()) };
            assert!(empty.is_empty());
            let number = u64::from_be_bytes(number.as_slice().try_into().unwrap());
            if number == u64::MAX {
                assert!(body.is_empty());
                return messages;
            }
            messages.push((number, body.clone()));
        }
    }
}

/// msgpack, as far as events use it.
#[derive(Clone, Debug, PartialEq)]
enum Value {
    Nil,
    Uint(u64),
    Float(f64),
    Text(String),
    List(Vec<Value>),
    Map(Vec<(String, Value)>),
}

impl Value {
    fn read(bytes: &mut &[u8]) -> Value {
        fn take<const N: usize>(bytes: &mut &[u8]) -> [u8; N] {
            let (taken, rest) = bytes.split_first_chunk().unwrap();
            *bytes = rest;
            *taken
        }
        let list = |bytes: &mut &[u8], len: usize| {
            Value::List((0..len).map(|_| Value::read(bytes)).collect())
        };
        let [first] = take(bytes);
        match first {
            0..=0x7f => Value::Uint(first.into()),
            0x80..=0x8f => {
                let pair = |bytes: &mut &[u8]| match Value::read(bytes) {
                    Value::Text(name) => (name, Value::read(bytes)),
                    other => panic!("{other:?} is a name"),
                };
                Value::Map((0..first & 15).map(|_| pair(bytes)).collect())
            }
            0x90..=0x9f => list(bytes, usize::from(first & 15)),
            0xa0..=0xbf => {
                let (text, rest) = bytes.split_at(usize::from(first & 31));
                *bytes = rest;
                Value::Text(String::from_utf8(text.into()).unwrap())
            }
            0xc0 => Value::Nil,
            0xcb => Value::Float(f64::from_be_bytes(take(bytes))),
            0xcd => Value::Uint(u16::from_be_bytes(take(bytes)).into()),
            0xce => Value::Uint(u32::from_be_bytes(take(bytes)).into()),
            0xcf => Value::Uint(u64::from_be_bytes(take(bytes))),
            0xdc => {
                let len = u16::from_be_bytes(take(bytes));
                list(bytes, len.into())
            }
            other => panic!("unknown byte {other:x}"),
        }
    }

    fn get(&self, name: &str) -> &Value {
        let Value::Map(fields) = self else { panic!("{self:?} is no map") };
        &fields.iter().find(|(field, _)| field == name).unwrap_or_else(|| panic!("no {name}")).1
    }

    fn list(&self) -> &[Value] {
        let Value::List(list) = self else { panic!("{self:?} is no list") };
        list
    }

    fn uint(&self) -> u64 {
        let Value::Uint(value) = self else { panic!("{self:?} is no number") };
        *value
    }
}

/// What a subscriber has rebuilt: where each block ends, and its tokens.
#[derive(Default)]
struct Rebuilt {
    blocks: BTreeMap<u64, (u32, Vec<Token>)>,
    /// The number of the next message.
    next: u64,
}

impl Rebuilt {
    /// Takes a message; false, with nothing changed, if some before it are missing.
    fn take(&mut self, number: u64, mut body: &[u8]) -> bool {
        if number != self.next {
            return number < self.next;
        }
        self.next += 1;
        let batch = Value::read(&mut body);
        assert!(body.is_empty());
        let [Value::Float(time), events, Value::Uint(0)] = batch.list() else {
            panic!("{batch:?}")
        };
        assert!(*time > 1.7e9);
        events.list().iter().for_each(|event| self.apply(event));
        true
    }

    fn apply(&mut self, event: &Value) {
        let Value::Text(kind) = event.get("type") else { panic!("{event:?}") };
        let hashes = || event.get("block_hashes").list().iter().map(Value::uint);
        match kind.as_str() {
            "AllBlocksCleared" => self.blocks.clear(),
            "BlockRemoved" => {
                for block in hashes() {
                    assert!(self.blocks.remove(&block).is_some(), "removed and never stored");
                }
            }
            "BlockStored" => {
                let size = event.get("block_size").uint() as usize;
                let tokens = event.get("token_ids").list().iter().map(|token| token.uint() as u32);
                let tokens: Vec<Token> = tokens.collect();
                assert_eq!(event.get("medium"), &Value::Text("GPU".into()));
                let mut end = match event.get("parent_block_hash") {
                    Value::Nil => 0,
                    parent => self.blocks[&parent.uint()].0,
                };
                assert_eq!(hashes().count() * size, tokens.len());
                for (block, tokens) in hashes().zip(tokens.chunks(size)) {
                    end += size as u32;
                    let before = self.blocks.insert(block, (end, tokens.to_vec()));
                    assert!(before.is_none(), "stored twice");
                }
            }
            other => panic!("{other}"),
        }
    }

    fn pages(&self) -> Pages {
        let mut pages: Pages = self.blocks.values().cloned().collect();
        pages.sort();
        pages
    }
}

/// Sends requests with prompts over few tokens, so that many share a beginning; some with a salt.
async fn ask(bed: &Bed, seed: &mut u64, requests: usize) {
    let mut random = |below: u64| {
        *seed =
            seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*seed >> 33) % below
    };
    for _ in 0..requests / 50 {
        let prompt = |random: &mut dyn FnMut(u64) -> u64| -> Vec<u64> {
            let family = 1 + random(24);
            let len = 1 + random(60);
            (0..len).map(|at| if at < 30 { family } else { 1 + random(3) }).collect()
        };
        let prompts: Vec<_> = (0..50).map(|_| prompt(&mut random)).collect();
        let mut body = json!({"prompt": prompts, "max_tokens": 1 + random(12), "ignore_eos": true});
        if random(5) == 0 {
            body["cache_salt"] = "private".into();
        }
        bed.ok("/v1/completions", &body).await;
    }
}

async fn serve(form: EventForm) -> (Bed, (SocketAddr, SocketAddr), Arc<Mutex<Pages>>) {
    let local = || ([127, 0, 0, 1], 0).into();
    let topic = "kv@pod@mock".into();
    let kv_events = KvEvents { listen: local(), replay: Some(local()), topic, form };
    let config = ServerConfig { kv_events: Some(kv_events), ..config() };
    let (backend, tree) = backend();
    let server = Server::bind(&config, backend, model()).await.unwrap();
    let (events, replay) = server.kv_events().unwrap();
    let bed = Bed::serve(server, &config).await;
    (bed, (events, replay.unwrap()), tree)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subscriber_rebuilds_the_tree() {
    let (bed, (events, replay), tree) = serve(EventForm::Map).await;
    // One that never reads must not disturb the others or the engine.
    let _idle = Peer::subscribe(events).await;
    let mut rebuilt = Rebuilt::default();
    let (mut seed, mut gaps) = (1, 0);
    for part in 0..4 {
        let mut subscriber = match part {
            // Messages of this part are missed.
            1 => None,
            _ => Some(Peer::subscribe(events).await),
        };
        ask(&bed, &mut seed, 2500).await;
        let last = soon("a replay", Peer::replay(replay, 0)).await.last().unwrap().0;
        let Some(subscriber) = &mut subscriber else { continue };
        let mut seen = 0;
        while seen < last {
            let frames = soon("a message", subscriber.message()).await.unwrap();
            let [topic, number, body] = &frames[..] else { panic!("{} frames", frames.len()) };
            assert_eq!(topic, b"kv@pod@mock");
            let number = u64::from_be_bytes(number.as_slice().try_into().unwrap());
            seen = number;
            if !rebuilt.take(number, body) {
                gaps += 1;
                for (number, body) in soon("a replay", Peer::replay(replay, rebuilt.next)).await {
                    assert!(rebuilt.take(number, &body), "a replay has no gaps");
                }
            }
        }
    }
    assert!(gaps >= 1, "messages were missed on purpose");
    let expected = soon("the last snapshot", async {
        loop {
            let found = tree.lock().unwrap().clone();
            if found == rebuilt.pages() {
                return found;
            }
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    })
    .await;
    assert!(expected.len() > 100, "{} pages", expected.len());
}

#[tokio::test]
async fn peers_that_are_not_understood_are_disconnected() {
    let (bed, (events, replay), _) = serve(EventForm::Array).await;
    // HTTP, nothing at all, and a socket of the wrong type.
    let mut wrong = TcpStream::connect(events).await.unwrap();
    wrong.write_all(&[b'G'; 64]).await.unwrap();
    let mut rest = Vec::new();
    soon("the end", wrong.read_to_end(&mut rest)).await.ok();
    assert_eq!(rest.len(), 64, "the greeting and no more");
    drop(TcpStream::connect(replay).await.unwrap());
    let mut wrong = Peer::connect(events, "PUSH").await;
    assert!(soon("the end", wrong.message()).await.is_none());
    let mut wrong = Peer::connect(replay, "DEALER").await;
    wrong.0.write_all(&[0, 3, 1, 2, 3]).await.unwrap();
    assert!(soon("the end", wrong.message()).await.is_none(), "three bytes are no number");
    ask(&bed, &mut 1, 50).await;
    let messages = soon("a replay", Peer::replay(replay, 0)).await;
    let mut first = messages[0].1.as_slice();
    let batch = Value::read(&mut first);
    let cleared = Value::List(vec![Value::Text("AllBlocksCleared".into())]);
    assert_eq!(batch.list()[1].list(), [cleared]);
}
