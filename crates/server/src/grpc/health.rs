//! gRPC's health check. It answers as `/health` does: not serving while loading, stalled or leaving.

use crate::app::App;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::mpsc;
use tonic::codegen::tokio_stream::Stream;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

/// How often a change is looked for.
const LOOK: Duration = Duration::from_millis(250);

/// The services that can be asked about; the empty name is the whole server.
const NAMES: [&str; 3] = ["", "vllm.Inference", "vllm.Control"];

pub(super) struct Health {
    app: Arc<App>,
}

impl Health {
    pub(super) fn new(app: Arc<App>) -> Self {
        Self { app }
    }
}

fn answer(app: &App) -> HealthCheckResponse {
    let leaving = app.leaving.load(Ordering::Relaxed);
    let status = match app.ready() {
        Ok(()) if !leaving => ServingStatus::Serving,
        _ => ServingStatus::NotServing,
    };
    HealthCheckResponse { status: status.into() }
}

#[tonic::async_trait]
impl tonic_health::pb::health_server::Health for Health {
    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        match NAMES.contains(&request.into_inner().service.as_str()) {
            true => Ok(Response::new(answer(&self.app))),
            false => Err(Status::not_found("no such service")),
        }
    }

    type WatchStream = Watched;

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Watched>, Status> {
        let known = NAMES.contains(&request.into_inner().service.as_str());
        let (tell, told) = mpsc::channel(1);
        let app = self.app.clone();
        tokio::spawn(async move {
            let unknown = HealthCheckResponse { status: ServingStatus::ServiceUnknown.into() };
            let mut last = None;
            // A stream that stays open would keep the server from ending.
            while !app.draining.load(Ordering::Relaxed) {
                let now = if known { answer(&app) } else { unknown };
                if last.replace(now) != Some(now) && tell.send(now).await.is_err() {
                    return;
                }
                tokio::select! {
                    () = tokio::time::sleep(LOOK) => {}
                    () = tell.closed() => return,
                }
            }
            let stopped = HealthCheckResponse { status: ServingStatus::NotServing.into() };
            if known && last != Some(stopped) {
                let _ = tell.send(stopped).await;
            }
        });
        Ok(Response::new(Watched(told)))
    }
}

/// The states of a service, each when it begins.
pub(super) struct Watched(mpsc::Receiver<HealthCheckResponse>);

impl Stream for Watched {
    type Item = Result<HealthCheckResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(cx).map(|state| state.map(Ok))
    }
}
