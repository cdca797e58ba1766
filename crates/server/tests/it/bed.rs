//! The test bed: a server on a free port and a client for it.

use load::SseParser;
use load::client::{ClientError, Connection, Head, Target};
use mock::{Mock, MockConfig, Oracle};
use serde_json::Value;
use server::answer::{Reasoning, ToolFormat};
use server::link::{Factory, Link};
use server::{Exit, Model, Server, ServerConfig};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use text::bytes::ByteText;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// A running server; it ends with the runtime, or with [`Bed::stop`].
pub(crate) struct Bed {
    pub(crate) target: Target,
    pub(crate) link: Link,
    /// The address of the gRPC services.
    #[cfg_attr(not(feature = "grpc"), expect(dead_code))]
    pub(crate) grpc: Option<SocketAddr>,
    stop: Option<oneshot::Sender<()>>,
    ended: JoinHandle<Exit>,
}

pub(crate) fn model() -> Model {
    let mut model = Model::new("mock", 8192, Arc::new(ByteText));
    model.aliases = vec!["other-name".into()];
    model.tools = ToolFormat::Hermes;
    model.reasoning = Reasoning::detect("</think>");
    model
}

pub(crate) fn config() -> ServerConfig {
    ServerConfig { listen: ([127, 0, 0, 1], 0).into(), ..ServerConfig::default() }
}

/// Awaits `happens`; panics after a minute, which no correct run takes even on a slow machine.
pub(crate) async fn soon<T>(what: &str, happens: impl Future<Output = T>) -> T {
    let happened = tokio::time::timeout(Duration::from_secs(60), happens).await;
    happened.unwrap_or_else(|_| panic!("not within a minute: {what}"))
}

/// Repeats the text of the prompt, without its special tokens.
pub(crate) fn repeats() -> Oracle {
    Arc::new(|request, _| request.prompt.iter().copied().filter(|token| *token < 256).collect())
}

/// A factory that makes a new mock after each panic.
pub(crate) fn restarting(mock: MockConfig) -> Factory {
    Box::new(move || Ok(Box::new(Mock::new(mock.clone()))))
}

impl Bed {
    pub(crate) async fn new(mock: MockConfig) -> Self {
        let mut model = model();
        model.embedding = (mock.embedding > 0).then_some(mock.embedding as u32);
        Self::with(config(), mock, model).await
    }

    pub(crate) async fn with(config: ServerConfig, mock: MockConfig, model: Model) -> Self {
        Self::over(config, restarting(mock), model).await
    }

    pub(crate) async fn over(config: ServerConfig, backend: Factory, model: Model) -> Self {
        let server = Server::bind(&config, backend, model).await.unwrap();
        Self::serve(server, &config).await
    }

    pub(crate) async fn serve(server: Server, config: &ServerConfig) -> Self {
        let url = format!("http://{}", server.address().unwrap());
        let target = Target::parse(&url, config.api_keys.first().cloned()).unwrap();
        let (link, grpc) = (server.link(), server.grpc_address());
        let (stop, stopped) = oneshot::channel::<()>();
        let ended = tokio::spawn(server.run(async {
            let _ = stopped.await;
        }));
        let bed = Self { target, link, grpc, stop: Some(stop), ended };
        bed.until("the engine has started", || {
            bed.link.health().as_str() != "the engine is starting"
        })
        .await;
        bed
    }

    pub(crate) async fn connect(&self) -> Connection {
        Connection::open(&self.target).await.unwrap()
    }

    pub(crate) async fn get(&self, path: &str) -> (Head, Vec<u8>) {
        let mut wire = self.connect().await;
        let head = wire.request("GET", path, &[], b"").await.unwrap();
        let body = wire.body().await.unwrap();
        (head, body)
    }

    pub(crate) async fn try_post(
        &self,
        path: &str,
        body: &[u8],
    ) -> Result<(Head, Vec<u8>), ClientError> {
        let mut wire = Connection::open(&self.target).await?;
        let head = wire.request("POST", path, &[], body).await?;
        let body = wire.body().await?;
        Ok((head, body))
    }

    /// Posts JSON; returns the status and the JSON of the response.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        self.post_text(path, &body.to_string()).await
    }

    pub(crate) async fn post_text(&self, path: &str, body: &str) -> (u16, Value) {
        let (head, body) = self.try_post(path, body.as_bytes()).await.unwrap();
        let value = serde_json::from_slice(&body)
            .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&body)));
        (head.status, value)
    }

    /// Posts JSON and expects a success.
    pub(crate) async fn ok(&self, path: &str, body: &Value) -> Value {
        let (status, value) = self.post(path, body).await;
        assert_eq!(status, 200, "{value}");
        value
    }

    /// Posts JSON and expects an error; returns the error object.
    pub(crate) async fn error(&self, path: &str, body: &Value, status: u16) -> Value {
        let (found, value) = self.post(path, body).await;
        assert_eq!(found, status, "{body} → {value}");
        let error = value["error"].clone();
        assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()), "{value}");
        assert!(error["type"].is_string(), "{value}");
        error
    }

    /// Posts JSON and reads the response as events; returns the data of each.
    pub(crate) async fn stream(&self, path: &str, body: &Value) -> Vec<String> {
        let mut wire = self.connect().await;
        let head = wire.request("POST", path, &[], body.to_string().as_bytes()).await.unwrap();
        assert_eq!(head.status, 200);
        assert_eq!(head.header("content-type"), Some("text/event-stream"));
        read_events(&mut wire).await
    }

    /// Waits until `is` returns true.
    pub(crate) async fn until(&self, what: &str, mut is: impl FnMut() -> bool) {
        soon(what, async {
            while !is() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
    }

    /// Stops the server and waits for its end.
    pub(crate) async fn stop(mut self) -> Exit {
        drop(self.stop.take());
        self.ended.await.unwrap()
    }

    /// Tells the server to stop, without waiting.
    pub(crate) fn begin_stop(&mut self) {
        drop(self.stop.take());
    }

    pub(crate) async fn ended(self) -> Exit {
        self.ended.await.unwrap()
    }
}

pub(crate) async fn read_events(wire: &mut Connection) -> Vec<String> {
    let (mut parser, mut events) = (SseParser::default(), Vec::new());
    loop {
        let more = wire
            .read(&mut |bytes| {
                assert!(std::str::from_utf8(bytes).is_ok(), "a frame splits a character");
                parser.push(bytes, |data| events.push(data.to_string()));
            })
            .await
            .unwrap();
        if !more {
            return events;
        }
    }
}
