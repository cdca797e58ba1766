//! The extension module of the Python package `dacapo`: a thin layer over [`dacapo::library`]. What Python
//! programs see is written in Python (`python/dacapo`).
//!
//! Nothing here computes while it holds the GIL: loading, tokenizing and waiting release it, and the engine's thread
//! never takes it.

use dacapo::library::{Call, End, Loading, Model, Next, Piece, Problem, Reply, Stop, Wake};
use pyo3::create_exception;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

create_exception!(
    _dacapo,
    InvalidInput,
    PyValueError,
    "The input is invalid: an option, a name, a file, a prompt."
);
create_exception!(
    _dacapo,
    EngineError,
    PyRuntimeError,
    "The input was valid, but the engine or the machine failed."
);

/// How long signals such as Ctrl-C may wait.
const SIGNALS: Duration = Duration::from_millis(50);

fn raise(problem: Problem) -> PyErr {
    match problem.invalid {
        true => InvalidInput::new_err(problem.text),
        false => EngineError::new_err(problem.text),
    }
}

/// A token, its log-probability, and the likeliest tokens with theirs.
type Scored = (u32, f32, Vec<(u32, f32)>);
/// The answer's number, new text, new tokens, their log-probabilities, why it ended, and what it stopped at.
type PieceTuple =
    (u32, String, Vec<u32>, Vec<Scored>, Option<&'static str>, Option<String>, Option<u32>);
/// Cached tokens, log-probabilities of the prompt, its vector, and an error with whether the input was invalid.
type EndTuple = (u32, Vec<Scored>, Vec<f32>, Option<(String, bool)>);
/// The request's number, its pieces, and its end.
type ReplyTuple = (usize, Vec<PieceTuple>, Option<EndTuple>);

/// A loaded model.
#[pyclass(frozen, module = "dacapo._dacapo")]
struct Engine {
    model: Model,
}

impl Engine {
    fn model(&self) -> PyResult<&Model> {
        match self.model.is_own() {
            true => Ok(&self.model),
            false => Err(EngineError::new_err(
                "this model was loaded before a fork and cannot be used after it: load it in this process, or use the \
                 start method `spawn`",
            )),
        }
    }
}

#[pymethods]
impl Engine {
    /// Loads a model; the flags are those of the command line.
    #[new]
    fn new(py: Python<'_>, line: Vec<String>) -> PyResult<Self> {
        let mut loading = Loading::start(&line).map_err(raise)?;
        loop {
            let done = py.detach(|| loading.wait(SIGNALS));
            // After an interrupt the thread ends by itself once the model is loaded.
            py.check_signals()?;
            if let Some(model) = done {
                return Ok(Self { model: model.map_err(raise)? });
            }
        }
    }

    /// Facts about the model, as JSON.
    fn about(&self) -> PyResult<String> {
        Ok(self.model()?.about())
    }

    /// Submits requests, a JSON object, as one call.
    #[pyo3(signature = (requests, stream = false, waker = None))]
    fn submit(
        &self,
        py: Python<'_>,
        requests: String,
        stream: bool,
        waker: Option<&Waker>,
    ) -> PyResult<Submitted> {
        let model = self.model()?;
        let wake = waker.map(|waker| waker.wake.clone());
        let call = py.detach(|| model.submit(&requests, stream, wake)).map_err(raise)?;
        Ok(Submitted { call })
    }

    /// The tokens of a text.
    fn encode(&self, py: Python<'_>, text: String, special: bool) -> PyResult<Vec<u32>> {
        let model = self.model()?;
        py.detach(|| model.encode(&text, special)).map_err(raise)
    }

    /// The text of tokens.
    fn decode(&self, py: Python<'_>, tokens: Vec<u32>) -> PyResult<String> {
        let model = self.model()?;
        Ok(py.detach(|| model.decode(&tokens)))
    }

    /// The text of a conversation, a JSON array of messages.
    fn render(
        &self,
        py: Python<'_>,
        messages: String,
        generation_prompt: bool,
    ) -> PyResult<String> {
        let model = self.model()?;
        py.detach(|| model.render(&messages, generation_prompt)).map_err(raise)
    }

    /// Counters and the last steps, as JSON.
    fn stats(&self, py: Python<'_>) -> PyResult<String> {
        let model = self.model()?;
        py.detach(|| model.stats()).map_err(raise)
    }

    /// A graph explained, as JSON.
    fn explain(&self, py: Python<'_>, graph: String) -> PyResult<String> {
        let model = self.model()?;
        py.detach(|| model.explain(&graph)).map_err(raise)
    }

    /// Two graphs compared, as JSON.
    fn diff(&self, py: Python<'_>, a: String, b: String) -> PyResult<String> {
        let model = self.model()?;
        py.detach(|| model.diff(&a, &b)).map_err(raise)
    }

    /// Every bucket and backend verified, as JSON.
    fn verify(&self, py: Python<'_>, flags: Vec<String>) -> PyResult<String> {
        let model = self.model()?;
        py.detach(|| model.verify(&flags)).map_err(raise)
    }

    /// Ends the engine's thread. Does nothing in a forked process.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.model.close());
    }
}

/// Requests that were submitted together; they are cancelled when it is dropped.
#[pyclass(frozen, module = "dacapo._dacapo")]
struct Submitted {
    call: Call,
}

#[pymethods]
impl Submitted {
    /// The call's number.
    #[getter]
    fn id(&self) -> u64 {
        self.call.id()
    }

    /// For each prompt its text, if it was not given as text, and its tokens.
    fn prompts(&self) -> Vec<(Option<String>, Vec<u32>)> {
        self.call.prompts().iter().map(|(text, tokens)| (text.clone(), tokens.to_vec())).collect()
    }

    /// The next reply; waits for it. `None` once every request has ended.
    fn next(&self, py: Python<'_>) -> PyResult<Option<ReplyTuple>> {
        loop {
            match py.detach(|| self.call.next(SIGNALS)).map_err(raise)? {
                Next::Reply(reply) => return Ok(Some(tuple(*reply))),
                Next::Ended => return Ok(None),
                Next::Nothing => py.check_signals()?,
            }
        }
    }

    /// The replies that are there, without waiting, and whether every request has ended.
    fn take(&self, py: Python<'_>) -> PyResult<(Vec<ReplyTuple>, bool)> {
        let mut replies = Vec::new();
        loop {
            match py.detach(|| self.call.next(Duration::ZERO)).map_err(raise)? {
                Next::Reply(reply) => replies.push(tuple(*reply)),
                Next::Ended => return Ok((replies, true)),
                Next::Nothing => return Ok((replies, false)),
            }
        }
    }

    /// Cancels what is not answered.
    fn cancel(&self) {
        self.call.cancel();
    }
}

fn tuple(reply: Reply) -> ReplyTuple {
    let scored = |list: Vec<_>| -> Vec<Scored> { list.into_iter().map(score).collect() };
    let piece = |piece: Piece| -> PieceTuple {
        let Piece { choice, text, tokens, logprobs, finish, stop } = piece;
        let (word, token) = match stop {
            Some(Stop::Text(word)) => (Some(word), None),
            Some(Stop::Token(token)) => (None, Some(token)),
            None => (None, None),
        };
        (choice, text, tokens, scored(logprobs), finish, word, token)
    };
    let end = |end: End| -> EndTuple {
        let problem = end.problem.map(|problem| (problem.text, problem.invalid));
        (end.cached_tokens, scored(end.prompt_logprobs), end.embedding, problem)
    };
    (reply.index, reply.pieces.into_iter().map(piece).collect(), reply.end.map(end))
}

fn score(score: dacapo::library::TokenLogprob) -> Scored {
    (score.token, score.logprob, score.top)
}

/// Tells an event loop which calls have replies.
#[pyclass(frozen, module = "dacapo._dacapo")]
struct Waker {
    wake: Arc<Wake>,
}

#[pymethods]
impl Waker {
    #[new]
    fn new() -> PyResult<Self> {
        let wake = Wake::new().map_err(|error| PyOSError::new_err(error.to_string()))?;
        Ok(Self { wake: Arc::new(wake) })
    }

    /// The file descriptor that becomes readable.
    fn fileno(&self) -> i32 {
        self.wake.fd()
    }

    /// The calls that have had replies since the last time.
    fn ready(&self) -> Vec<u64> {
        self.wake.ready()
    }
}

/// Runs the command line, the program's name first; returns the exit code.
#[pyfunction]
fn main(py: Python<'_>, line: Vec<OsString>) -> u8 {
    py.detach(|| dacapo::run(line))
}

/// Searches this folder with Python packages for the CUDA libraries, too.
#[pyfunction]
fn search_packages(folder: std::path::PathBuf) {
    dacapo::library::search_packages(folder);
}

/// Says that the interpreter ends: other threads that wait for replies wait until it has.
#[pyfunction]
fn exiting() {
    dacapo::library::exiting();
}

#[pymodule]
fn _dacapo(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Engine>()?;
    module.add_class::<Submitted>()?;
    module.add_class::<Waker>()?;
    module.add_function(wrap_pyfunction!(main, module)?)?;
    module.add_function(wrap_pyfunction!(search_packages, module)?)?;
    module.add_function(wrap_pyfunction!(exiting, module)?)?;
    module.add("InvalidInput", module.py().get_type::<InvalidInput>())?;
    module.add("EngineError", module.py().get_type::<EngineError>())?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}
