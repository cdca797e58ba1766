//! The live view of the engine for the page.

use crate::app::App;
use crate::error::ApiError;
use crate::link::{ConfigRow, GraphInfo, StepRecord};
use axum::Json;
use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use engine::request::Sampling;
use http_body::Frame;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep};

const EVERY: Duration = Duration::from_millis(250);

#[derive(Serialize)]
struct View<'a> {
    ready: Result<(), &'static str>,
    now_us: u64,
    inflight: u64,
    tokens: u64,
    prompt_tokens: u64,
    #[serde(flatten)]
    snapshot: &'a crate::link::Snapshot,
    steps: &'a [StepRecord],
}

/// `/live`: the state, four times a second, with the steps that are new.
pub(crate) async fn stream(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let permit = app.watchers.clone().try_acquire_owned().map_err(|_| {
        let most = app.limits.watchers;
        ApiError::unavailable(format!("{most} live views are open, which is the limit"))
    })?;
    let next = Box::pin(tokio::time::sleep(Duration::ZERO));
    let body = LiveBody { app, last: None, next, _permit: permit };
    let mut response = Response::new(Body::new(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    Ok(response)
}

struct LiveBody {
    app: Arc<App>,
    /// The last step that was sent.
    last: Option<u64>,
    next: Pin<Box<Sleep>>,
    _permit: OwnedSemaphorePermit,
}

impl LiveBody {
    fn event(&mut self) -> Bytes {
        let app = &self.app;
        let snapshot = app.link.snapshot();
        let newest = snapshot.steps.last().map_or(0, |record| record.step);
        // A lower number than before means that the engine restarted and counts from 1 again.
        let last = self.last.filter(|last| *last <= newest).unwrap_or(0);
        let from = snapshot.steps.partition_point(|record| record.step <= last);
        self.last = Some(newest);
        let view = View {
            ready: app.ready(),
            now_us: app.link.now(),
            inflight: app.link.inflight(),
            tokens: app.metrics.generated_tokens.get(),
            prompt_tokens: app.metrics.prompt_tokens.get(),
            snapshot: &snapshot,
            steps: &snapshot.steps[from..],
        };
        let mut out = b"data: ".to_vec();
        // Writing to a Vec cannot fail.
        let _ = serde_json::to_writer(&mut out, &view);
        out.extend_from_slice(b"\n\n");
        out.into()
    }
}

impl http_body::Body for LiveBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.app.draining.load(std::sync::atomic::Ordering::Relaxed) {
            // A live view must not delay the shutdown.
            return Poll::Ready(None);
        }
        match self.next.as_mut().poll(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => {
                self.next.as_mut().reset(Instant::now() + EVERY);
                let event = self.event();
                Poll::Ready(Some(Ok(Frame::data(event))))
            }
        }
    }
}

/// `/live/graph`: constant data: the model, the resolved graph configuration, the limits in force,
/// the buckets.
pub(crate) async fn graph(State(app): State<Arc<App>>) -> Json<Value> {
    let snapshot = app.link.snapshot();
    let GraphInfo { about, config, plans } = &*snapshot.graph;
    let buckets: Vec<_> = plans.iter().map(|plan| plan.bucket.as_str()).collect();
    let Sampling { temperature, top_p, min_p, top_k, .. } = app.model.defaults;
    // Without defaults of the model the page uses its own: OpenAI's temperature of 1 is too high
    // for small models.
    let suggests = (temperature, top_p, min_p, top_k) != (1.0, 1.0, 0.0, 0);
    let defaults = match suggests {
        true => json!({"temperature": temperature, "top_p": top_p, "min_p": min_p, "top_k": top_k}),
        false => json!({}),
    };
    let limits = app.limits.in_force().map(|(row, value)| ConfigRow {
        key: row.name.into(),
        value: value.to_string(),
        reason: match value == row.default {
            true => row.doc.into(),
            false => {
                format!("{} (default {})", row.doc.trim_end_matches('.'), row.default)
            }
        },
    });
    Json(json!({
        "model": app.model.name,
        "context": app.model.context,
        "thinks": app.model.reasoning.is_some(),
        "defaults": defaults,
        "about": about,
        "config": config,
        "limits": limits.collect::<Vec<_>>(),
        "buckets": buckets,
    }))
}

/// The query of `/live/plan`.
#[derive(Deserialize)]
pub(crate) struct Bucket {
    bucket: String,
}

/// `/live/plan?bucket=NAME`: the Plan of a bucket as SVG.
pub(crate) async fn plan(
    State(app): State<Arc<App>>,
    query: Result<Query<Bucket>, QueryRejection>,
) -> Result<Response, ApiError> {
    let Ok(Query(Bucket { bucket })) = query else {
        return Err(ApiError::invalid("bucket", "name a bucket: /live/plan?bucket=NAME"));
    };
    let snapshot = app.link.snapshot();
    let plan = snapshot.graph.plans.iter().find(|plan| plan.bucket == bucket);
    let Some(plan) = plan else {
        return Err(ApiError::no_route(&format!("/live/plan?bucket={bucket}")));
    };
    // The SVG must not run scripts.
    let policy = "default-src 'none'; style-src 'unsafe-inline'";
    let headers =
        [(header::CONTENT_TYPE, "image/svg+xml"), (header::CONTENT_SECURITY_POLICY, policy)];
    Ok((headers, plan.svg.clone()).into_response())
}
