//! Starts a server, runs it and shuts it down.

use crate::app::{App, Model};
use crate::config::ServerConfig;
use crate::http::conn::{self, Exit};
use crate::http::router;
use crate::kv_events::Publisher;
use crate::link::{self, Factory, Health, Link};
use crate::metrics::Metrics;
use crate::trace::TraceWriter;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::thread::JoinHandle;
use tokio::net::{TcpListener, TcpSocket};

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
    socket: TcpSocket,
    address: SocketAddr,
}

impl Reserved {
    /// Reserves the address of a configuration.
    pub fn new(config: &ServerConfig) -> Result<Self, ServeError> {
        let address = config.listen;
        let socket = bind(address).map_err(|e| ServeError::Listen(address, e))?;
        Ok(Self { socket, address })
    }

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
        let listener = reserved.listen(config.limits.connections)?;
        let (link, engine) = link::spawn(backend, &config.limits, metrics.clone(), trace, sink);
        let app = App::new(model, link, config, metrics).map_err(ServeError::Threads)?;
        Ok(Self { listener, app: Arc::new(app), engine, kv_events })
    }

    /// The bound address, with the actual port if the configured one is 0.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
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
        let Self { listener, app, engine, .. } = self;
        let exit = conn::serve(listener, app.clone(), router(app.clone()), stop).await;
        app.link.stop();
        // A hanging backend must not keep the process alive, so the wait is bounded.
        let ended = tokio::task::spawn_blocking(move || engine.join());
        let _ = tokio::time::timeout(std::time::Duration::from_secs(2), ended).await;
        exit
    }
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
