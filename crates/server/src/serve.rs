//! Starts a server, runs it and shuts it down.

use crate::app::{App, Model};
use crate::config::{Limits, ServerConfig};
use crate::http::conn::{self, Exit};
use crate::http::router;
#[cfg(feature = "grpc")]
use crate::kv_events::KvEvents;
use crate::kv_events::Publisher;
use crate::link::{self, Factory, Health, Link};
use crate::metrics::Metrics;
use crate::trace::TraceWriter;
use axum::Router;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::thread::JoinHandle;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::watch;

/// Why the server did not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address is not available.
    #[error("cannot listen on {0}: {1}")]
    Listen(SocketAddr, io::Error),
    /// The trace file could not be created.
    #[error("cannot create the trace file: {0}")]
    Trace(io::Error),
    /// The configuration is invalid.
    #[error("{0}")]
    Config(String),
    /// A thread could not be started.
    #[error("cannot start the server's threads: {0}")]
    Threads(io::Error),
}

/// An address that is reserved: no other process can listen on it, and connections are refused until
/// the server listens.
pub struct Reserved {
    http: Socket,
    grpc: Option<Socket>,
}

struct Socket {
    socket: TcpSocket,
    address: SocketAddr,
}

impl Reserved {
    /// Reserves the addresses of a configuration.
    pub fn new(config: &ServerConfig) -> Result<Self, ServeError> {
        if config.grpc.is_some() && !crate::HAS_GRPC {
            let text = "this build cannot serve gRPC: build it with --features grpc";
            return Err(ServeError::Config(text.into()));
        }
        let reserve = |address| {
            let socket = bind(address).map_err(|e| ServeError::Listen(address, e))?;
            Ok(Socket { socket, address })
        };
        let grpc = config.grpc.as_ref().map(|grpc| reserve(grpc.listen)).transpose()?;
        Ok(Self { http: reserve(config.listen)?, grpc })
    }
}

impl Socket {
    /// Listens, with a backlog of the connection limit (at most 4096). When the backlog is full, a
    /// client retries only after a second.
    fn listen(self, connections: u64) -> Result<TcpListener, ServeError> {
        let backlog = u32::try_from(connections).unwrap_or(u32::MAX).min(4096);
        self.socket.listen(backlog).map_err(|e| ServeError::Listen(self.address, e))
    }
}

fn bind(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // Without it, the address stays unavailable for a while after a server stops.
    #[cfg(unix)]
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

/// A server that listens but does not accept connections yet.
pub struct Server {
    listener: TcpListener,
    grpc: Option<(TcpListener, Router)>,
    app: Arc<App>,
    engine: JoinHandle<()>,
    kv_events: Option<(SocketAddr, Option<SocketAddr>)>,
}

impl Server {
    /// Binds the address and starts the engine's thread. Must run inside a tokio runtime.
    pub async fn bind(
        config: &ServerConfig,
        backend: Factory,
        model: Model,
    ) -> Result<Self, ServeError> {
        Self::start(config, Reserved::new(config)?, backend, model)
    }

    fn start(
        config: &ServerConfig,
        reserved: Reserved,
        backend: Factory,
        model: Model,
    ) -> Result<Self, ServeError> {
        config.limits.check().map_err(ServeError::Config)?;
        if config.api_keys.iter().any(String::is_empty) {
            return Err(ServeError::Config("an API key is empty; set a value or remove it".into()));
        }
        let metrics = Arc::new(Metrics::new(config.log_lines_dropped.clone()));
        let create = |path| TraceWriter::create(path, metrics.trace_records_dropped.clone());
        let trace = config.trace.as_deref().map(create).transpose().map_err(ServeError::Trace)?;
        let publisher = config.kv_events.as_ref().map(Publisher::bind).transpose()?;
        let kv_events = publisher.as_ref().map(Publisher::addresses).transpose();
        let kv_events = kv_events.map_err(ServeError::Threads)?;
        let dropped = &metrics.kv_event_batches_dropped;
        let sink = publisher.map(|publisher| publisher.start(dropped.clone()));
        let listener = reserved.http.listen(config.limits.connections)?;
        let grpc = reserved.grpc.map(|socket| socket.listen(config.limits.connections));
        let grpc = grpc.transpose()?;
        let (limits, doze) = (&config.limits, config.sleep_after);
        let (counters, adapters) = (metrics.clone(), model.adapters.clone());
        let (link, engine) = link::spawn(backend, limits, doze, counters, adapters, trace, sink);
        let app = App::new(model, link, config, metrics).map_err(ServeError::Threads)?;
        let app = Arc::new(app);
        let grpc = grpc.map(|listener| (listener, services(&app, config, kv_events)));
        Ok(Self { listener, grpc, app, engine, kv_events })
    }

    /// The bound address, with the actual port if the configured one is 0.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// The bound address of the gRPC services, if they are served.
    pub fn grpc_address(&self) -> Option<SocketAddr> {
        self.grpc.as_ref().and_then(|(listener, _)| listener.local_addr().ok())
    }

    /// The bound addresses of KV events and of their replay, if they are published.
    pub fn kv_events(&self) -> Option<(SocketAddr, Option<SocketAddr>)> {
        self.kv_events
    }

    /// A handle to the engine's thread.
    pub fn link(&self) -> Link {
        self.app.link.clone()
    }

    /// Serves until `stop` resolves, then drains and ends the engine's thread.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Exit {
        let Self { listener, grpc, app, engine, .. } = self;
        let (tell, mut told) = watch::channel(false);
        let stop = async move {
            stop.await;
            let _ = tell.send(true);
        };
        let limits = app.limits.clone();
        let http = conn::serve(listener, app.clone(), router(app.clone()), limits.clone(), stop);
        let grpc = async {
            let Some((listener, services)) = grpc else { return Exit::Drained };
            // A router sends all its requests over few connections.
            let limits = Limits { streams: limits.streams.max(limits.inflight), ..limits.clone() };
            let stopped = async move {
                // An error means that the other has ended.
                let _ = told.wait_for(|stopped| *stopped).await;
            };
            conn::serve(listener, app.clone(), services, limits, stopped).await
        };
        let exit = match tokio::join!(http, grpc) {
            (Exit::Drained, Exit::Drained) => Exit::Drained,
            _ => Exit::Cut,
        };
        app.link.stop();
        // A hanging backend must not keep the process alive, so the wait is bounded.
        let ended = tokio::task::spawn_blocking(move || engine.join());
        let _ = tokio::time::timeout(std::time::Duration::from_secs(2), ended).await;
        exit
    }
}

/// The gRPC services. `kv_events` are the bound addresses.
#[cfg(feature = "grpc")]
fn services(
    app: &Arc<App>,
    config: &ServerConfig,
    kv_events: Option<(SocketAddr, Option<SocketAddr>)>,
) -> Router {
    let events = config.kv_events.clone().zip(kv_events);
    let events = events.map(|(events, (listen, replay))| KvEvents { listen, replay, ..events });
    let model_id = config.grpc.as_ref().map_or_else(String::new, |grpc| grpc.model_id.clone());
    crate::grpc::router(app.clone(), crate::grpc::Described { model_id, kv_events: events })
}

/// Nothing: [`Reserved::new`] refuses the address.
#[cfg(not(feature = "grpc"))]
fn services(_: &Arc<App>, _: &ServerConfig, _: Option<(SocketAddr, Option<SocketAddr>)>) -> Router {
    Router::new()
}

/// Runs a server on its own runtime until SIGTERM or Ctrl-C, then drains. A second signal while
/// draining ends the process at once. `ready` is called with the address once the engine takes
/// requests.
pub fn serve(
    config: ServerConfig,
    reserved: Reserved,
    backend: Factory,
    model: Model,
    ready: impl FnOnce(SocketAddr),
) -> Result<Exit, ServeError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(config.threads)
        .enable_all()
        .thread_name("http")
        .build()
        .map_err(ServeError::Threads)?;
    let exit = runtime.block_on(async {
        let name = model.name.clone();
        let signals = Signals::new().map_err(ServeError::Threads)?;
        let server = Server::start(&config, reserved, backend, model)?;
        let address = server.address();
        if let Ok(address) = &address {
            tracing::info!(%address, model = name, keys = config.api_keys.len(), "listening");
            if config.api_keys.is_empty() && !address.ip().is_loopback() {
                tracing::warn!(
                    "no API key is set: anyone who can reach this address can use the server"
                );
            }
        }
        let link = server.link();
        let mut run = pin!(server.run(stop_signal(signals)));
        let health = tokio::select! {
            exit = &mut run => return Ok(exit),
            health = link.started() => health,
        };
        if let (Health::Ready, Ok(address)) = (health, address) {
            ready(address);
        }
        Ok(run.await)
    });
    // Does not wait for threads stuck in a backend; the process is about to end.
    runtime.shutdown_background();
    exit
}

/// Resolves at the first SIGTERM or Ctrl-C; a second one ends the process.
async fn stop_signal(mut signals: Signals) {
    signals.next().await;
    tokio::spawn(async move {
        signals.next().await;
        tracing::warn!("second signal: exiting without draining");
        std::process::exit(130);
    });
}

/// The signals that stop a server. One value waits for both of them: a new one would miss a signal
/// that comes before it exists.
#[cfg(unix)]
struct Signals([tokio::signal::unix::Signal; 2]);

#[cfg(unix)]
impl Signals {
    fn new() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self([signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?]))
    }

    async fn next(&mut self) {
        let Self([term, interrupt]) = self;
        tokio::select! {
            _ = term.recv() => {}
            _ = interrupt.recv() => {}
        }
    }
}

#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self)
    }

    async fn next(&mut self) {
        let _ = tokio::signal::ctrl_c().await;
    }
}
