//! The engine for programs in other languages: a model that is loaded once, on a thread of its own, and answers
//! calls from any number of threads. The Python package is made of this.
//!
//! Options are those of the command line, as its flags. Requests come as JSON (`ask`), because that is what
//! every language can write; replies are plain structs.

mod ask;
mod call;
mod graphs;
mod options;
mod said;
mod thread;
mod wake;

pub use call::{Call, Next, exiting};
pub use engine::request::TokenLogprob;
pub use thread::{End, Piece, Reply, Stop};
pub use wake::Wake;

use crate::exit::{self, one_line};
use crate::output;
use crate::programs::Programs;
use ask::Asked;
use clap::Parser;
use grammar::Compiler;
use graphs::LiveGraphs;
use model::config::SamplingDefaults;
use options::Options;
use serde_json::{Value, json};
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;
use text::{Chat, TextModel};
use thread::{Message, Ready};

/// Why something failed.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The input was invalid, as opposed to the engine or the machine having failed.
    pub invalid: bool,
    /// What happened, in one line.
    pub text: String,
}

impl Problem {
    fn invalid(text: impl Into<String>) -> Self {
        Self { invalid: true, text: text.into() }
    }

    fn stopped() -> Self {
        Self { invalid: false, text: "the engine has stopped".into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<anyhow::Error> for Problem {
    fn from(error: anyhow::Error) -> Self {
        Self { invalid: exit::code(&error) == exit::BAD_INPUT, text: one_line(&error) }
    }
}

/// Searches this folder with Python packages for the CUDA libraries, too, from the next model on that is loaded.
pub fn search_packages(folder: PathBuf) {
    device::cuda::library::search_packages(folder);
}

/// A model that is being loaded on its thread.
pub struct Loading {
    ready: Mutex<mpsc::Receiver<Result<Loaded, Problem>>>,
    start: Option<(mpsc::Sender<Message>, JoinHandle<()>)>,
}

/// What is known about a model once it is loaded.
struct Loaded {
    text: Arc<dyn TextModel>,
    context: u32,
    defaults: SamplingDefaults,
    about: Value,
    graphs: LiveGraphs,
    options: Options,
}

/// A loaded model. Dropping it ends its thread after the step under way.
pub struct Model {
    loaded: Loaded,
    compiler: OnceLock<Result<Compiler, String>>,
    messages: mpsc::Sender<Message>,
    next_id: AtomicU64,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// The process that loaded it: threads do not survive a fork.
    process: u32,
}

impl Loading {
    /// Reads the options, flags as on the command line with the model's name, and starts to load.
    pub fn start(line: &[String]) -> Result<Self, Problem> {
        device::notice::send_to(output::note_line);
        let words = ["LLM"].into_iter().chain(line.iter().map(String::as_str));
        let options = Options::try_parse_from(words).map_err(|error| usage(&error))?;
        let (messages, inbox) = mpsc::channel();
        let (done, ready) = mpsc::channel();
        let run = move || thread::run(options, inbox, &done);
        let thread = std::thread::Builder::new().name("engine".into()).spawn(run);
        let thread = thread.map_err(|error| Problem {
            invalid: false,
            text: format!("starting the engine's thread: {error}"),
        })?;
        Ok(Self { ready: Mutex::new(ready), start: Some((messages, thread)) })
    }

    /// Waits at most this long for the model; `None` while it is being loaded.
    pub fn wait(&mut self, time: Duration) -> Option<Result<Model, Problem>> {
        let ready = self.ready.get_mut().unwrap_or_else(|e| e.into_inner());
        let loaded = match ready.recv_timeout(time) {
            Ok(loaded) => loaded,
            Err(mpsc::RecvTimeoutError::Timeout) => return None,
            Err(mpsc::RecvTimeoutError::Disconnected) => Err(Problem::stopped()),
        };
        let (messages, thread) = self.start.take()?;
        Some(loaded.map(|loaded| Model {
            loaded,
            compiler: OnceLock::new(),
            messages,
            next_id: AtomicU64::new(1),
            thread: Mutex::new(Some(thread)),
            process: std::process::id(),
        }))
    }
}

/// A usage error in one line, without the usage of a program.
fn usage(error: &clap::Error) -> Problem {
    let text = error.to_string();
    let text = text.split("\n\n").next().unwrap_or_default();
    let words: Vec<&str> = text.split_whitespace().collect();
    Problem::invalid(words.join(" ").trim_start_matches("error: "))
}

impl Model {
    /// Facts about the model, the device and the memory, as JSON.
    pub fn about(&self) -> String {
        self.loaded.about.to_string()
    }

    /// Submits the requests of a JSON object as one call. With `stream` every token is a reply, else every
    /// request. `wake` is told of each reply.
    pub fn submit(
        &self,
        requests: &str,
        stream: bool,
        wake: Option<Arc<Wake>>,
    ) -> Result<Call, Problem> {
        let asked: Vec<Asked> = ask::read(requests, self)?;
        let count = asked.len() as u64;
        let first = self.next_id.fetch_add(count.max(1), Ordering::Relaxed);
        let (sender, receiver) = mpsc::channel();
        let prompts = asked.iter().map(|asked| (asked.prompt.clone(), asked.tokens())).collect();
        let ready: Vec<Ready> =
            asked.into_iter().zip(first..).map(|(asked, id)| asked.ready(id, first)).collect();
        let waking = wake.map(|wake| (wake, first));
        let message =
            Message::Submit { ready, stream, replies: thread::Replies { sender, waking } };
        self.messages.send(message).map_err(|_| Problem::stopped())?;
        Ok(Call::new(first, count, prompts, receiver, self.messages.clone()))
    }

    /// The tokens of a text; `special` adds those that the model expects at the start.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, Problem> {
        let encoded = self.loaded.text.encode(text, special, usize::MAX);
        encoded.map_err(|error| Problem::invalid(error.to_string()))
    }

    /// The text of tokens, without special ones.
    pub fn decode(&self, tokens: &[u32]) -> String {
        self.loaded.text.decode(tokens)
    }

    /// The text of a conversation, a JSON array of messages, as the model's template writes it.
    pub fn render(&self, messages: &str, generation_prompt: bool) -> Result<String, Problem> {
        let messages: Value = serde_json::from_str(messages)
            .map_err(|error| Problem::invalid(format!("messages: {error}")))?;
        let chat = Chat {
            messages,
            tools: Value::Null,
            generation_prompt,
            continue_final: false,
            extra: serde_json::Map::new(),
        };
        let rendered = self.loaded.text.render(&chat, usize::MAX);
        rendered.map(|rendered| rendered.text).map_err(|e| Problem::invalid(e.to_string()))
    }

    /// Counters and the last steps, as JSON.
    pub fn stats(&self) -> Result<String, Problem> {
        let (sender, receiver) = mpsc::channel();
        self.messages.send(Message::Stats(sender)).map_err(|_| Problem::stopped())?;
        receiver.recv().map_err(|_| Problem::stopped())
    }

    /// A graph such as `decode/8` explained, as JSON: `text`, `svg` and `data`.
    pub fn explain(&self, graph: &str) -> Result<String, Problem> {
        Ok(self.loaded.graphs.explain(graph, &self.loaded.options)?.to_string())
    }

    /// Two graphs compared, as JSON: `text` and `data`.
    pub fn diff(&self, a: &str, b: &str) -> Result<String, Problem> {
        Ok(self.loaded.graphs.diff(a, b, &self.loaded.options)?.to_string())
    }

    /// Every bucket and backend verified with these flags of `dacapo graph verify`, as JSON: `text` and `data`.
    pub fn verify(&self, flags: &[String]) -> Result<String, Problem> {
        let options = &self.loaded.options;
        let programs = Programs { global: &options.global };
        Ok(graphs::verify(options, flags, &programs)?.to_string())
    }

    /// Whether it was loaded in this process, not before a fork: then it cannot be used.
    pub fn is_own(&self) -> bool {
        std::process::id() == self.process
    }

    /// Ends the thread after the step under way; calls that are not answered fail. Later calls do nothing, and neither
    /// does one in a forked process, which has no such thread.
    pub fn close(&self) {
        if !self.is_own() {
            return;
        }
        // The thread may have ended by itself.
        let _ = self.messages.send(Message::Stop);
        let thread = self.thread.lock().unwrap_or_else(|e| e.into_inner()).take();
        if let Some(thread) = thread {
            // A panic was printed where it happened.
            let _ = thread.join();
        }
    }

    /// The compiler of grammars, made at the first one because that is slow.
    fn compiler(&self) -> Result<&Compiler, Problem> {
        let make = || server::grammars::compiler(&*self.loaded.text, grammar::Limits::default());
        self.compiler.get_or_init(make).as_ref().map_err(|why| Problem::invalid(why.clone()))
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        self.close();
    }
}

/// The sampling parameters that a model suggests, as JSON.
fn suggested(defaults: &SamplingDefaults) -> Value {
    json!({
        "temperature": defaults.temperature,
        "top_k": defaults.top_k,
        "top_p": defaults.top_p,
        "min_p": defaults.min_p,
        "repetition_penalty": defaults.repetition_penalty,
    })
}
