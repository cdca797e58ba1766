//! Compiles grammars from clients within limits on size, stack and time.

use crate::bounds::{Limits, TooLarge};
use crate::matcher::{Compiled, Weight, plain, reason};
use crate::rewrite::rewrite;
use crate::schema;
use crate::source::Grammar;
use crate::vocabulary::Vocabulary;
use llguidance::JsonCompileOptions;
use llguidance::api::TopLevelGrammar;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use toktrie::SimpleVob;

/// The stack size of a compiling thread. llguidance recurses a few kilobytes per nesting level; the
/// most schemas that [`Limits`] allows, all nested, use a fraction of it. Untouched pages cost
/// nothing.
const STACK: usize = 256 << 20;
/// Added to the nice value of a compiling thread: about a tenth of the CPU time of an engine
/// thread.
const NICE: i32 = 10;

/// Why a grammar was not compiled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// It is invalid or uses an unsupported feature.
    #[error("{0}")]
    Invalid(String),
    /// It exceeds a limit.
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    /// Compilation exceeded the time limit.
    #[error("the grammar takes longer than {} ms to compile; simplify it", .0.as_millis())]
    TooSlow(Duration),
    /// All compiling threads were busy for the whole time limit.
    #[error("too many grammars are being compiled; retry later")]
    Busy,
    /// The grammars of running answers use up `live_bytes`.
    #[error("too many different grammars are in use; retry later")]
    Full,
}

/// Compiles grammars for one vocabulary and caches the most recently used. Cheap to clone; usable
/// from any thread.
#[derive(Clone)]
pub struct Compiler {
    shared: Arc<Shared>,
}

struct Shared {
    vocabulary: Vocabulary,
    limits: Limits,
    state: Mutex<State>,
    freed: Condvar,
    /// Bytes of the texts of all compiled grammars in memory.
    live: Arc<AtomicU64>,
}

#[derive(Default)]
struct State {
    /// Compiling threads, including those whose caller timed out.
    running: usize,
    /// The cache, most recently used last.
    kept: VecDeque<(Grammar, Result<Compiled, CompileError>)>,
    compilations: u64,
}

/// Counts a compiling thread; dropping it frees the slot, also after a panic.
struct Slot(Arc<Shared>);

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.lock().running -= 1;
        self.0.freed.notify_one();
    }
}

impl Compiler {
    /// A compiler with an empty cache.
    pub fn new(vocabulary: Vocabulary, limits: Limits) -> Self {
        let (state, freed, live) = (Mutex::default(), Condvar::new(), Arc::default());
        Self { shared: Arc::new(Shared { vocabulary, limits, state, freed, live }) }
    }

    /// Compiles a grammar or returns it from the cache. Blocks for at most the time limit, or twice
    /// that if all threads are busy, so it must not run on an async thread.
    pub fn compile(&self, grammar: &Grammar) -> Result<Compiled, CompileError> {
        let shared = &self.shared;
        if let Some(kept) = shared.lock().find(grammar) {
            return kept;
        }
        shared.limits.check(grammar)?;
        let weight = shared.weigh(grammar)?;
        let slot = shared.slot()?;
        let (sender, receiver) = sync_channel(1);
        let (task, source) = (Arc::clone(shared), grammar.clone());
        let work = move || {
            // Steps on the same cores take precedence. Failure to lower the priority is harmless.
            let _ = rustix::process::nice(NICE);
            // Another thread may have compiled the same grammar in the meantime.
            let kept = task.lock().find(&source);
            let result = kept.unwrap_or_else(|| {
                let result = compile(&task.vocabulary, &task.limits, source.clone(), weight);
                task.lock().keep(source, result.clone(), task.limits.kept);
                result
            });
            drop(slot);
            let _ = sender.send(result);
        };
        let builder = std::thread::Builder::new().name("grammar".into()).stack_size(STACK);
        if builder.spawn(work).is_err() {
            return Err(CompileError::Busy);
        }
        match receiver.recv_timeout(shared.limits.time) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => Err(CompileError::TooSlow(shared.limits.time)),
            Err(RecvTimeoutError::Disconnected) => {
                Err(CompileError::Invalid("the grammar cannot be compiled".into()))
            }
        }
    }

    /// The number of compilations, not counting cache hits.
    pub fn compilations(&self) -> u64 {
        self.shared.lock().compilations
    }

    /// Bytes of the texts of all compiled grammars that are cached or in use.
    pub fn live_bytes(&self) -> u64 {
        self.shared.live.load(Ordering::Relaxed)
    }

    /// The size of the vocabulary.
    pub fn tokens(&self) -> usize {
        self.shared.vocabulary.tokens()
    }
}

impl std::fmt::Debug for Compiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shared = &self.shared;
        f.debug_struct("Compiler")
            .field("vocabulary", &shared.vocabulary)
            .field("limits", &shared.limits)
            .finish_non_exhaustive()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Adds a grammar to `live`; evicts cached grammars if the limit is exceeded.
    fn weigh(&self, grammar: &Grammar) -> Result<Weight, CompileError> {
        /// The least bytes counted, because a short text may need large tables too.
        const LEAST: u64 = 4096;
        let weight = Weight::new(&self.live, (grammar.text().len() as u64).max(LEAST));
        while self.live.load(Ordering::Relaxed) > self.limits.live_bytes {
            let oldest = self.lock().kept.pop_front();
            if oldest.is_none() {
                return Err(CompileError::Full);
            }
        }
        Ok(weight)
    }

    /// Waits for a free compiling thread.
    fn slot(self: &Arc<Self>) -> Result<Slot, CompileError> {
        let until = Instant::now() + self.limits.time;
        let mut state = self.lock();
        while state.running >= self.limits.threads {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(CompileError::Busy);
            }
            let waited = self.freed.wait_timeout(state, left);
            state = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        state.running += 1;
        Ok(Slot(Arc::clone(self)))
    }
}

impl State {
    fn find(&mut self, grammar: &Grammar) -> Option<Result<Compiled, CompileError>> {
        let at = self.kept.iter().position(|(kept, _)| kept == grammar)?;
        let entry = self.kept.remove(at)?;
        let result = entry.1.clone();
        self.kept.push_back(entry);
        Some(result)
    }

    fn keep(&mut self, grammar: Grammar, result: Result<Compiled, CompileError>, most: usize) {
        /// Errors of longer texts are not cached, because they do not count against `live_bytes`.
        const LONG: usize = 16 * 1024;
        self.compilations += 1;
        if result.is_err() && grammar.text().len() > LONG {
            return;
        }
        self.kept.push_back((grammar, result));
        while self.kept.len() > most {
            self.kept.pop_front();
        }
    }
}

/// Compiles on this thread and computes the first mask, which fails for some invalid grammars.
fn compile(
    vocabulary: &Vocabulary,
    limits: &Limits,
    source: Grammar,
    weight: Weight,
) -> Result<Compiled, CompileError> {
    let made = catch_unwind(AssertUnwindSafe(|| {
        let top = top_level(&source, limits)?;
        let invalid = |error: String| CompileError::Invalid(reason(&error));
        let mut matcher = llguidance::Matcher::new(vocabulary.factory.create_parser(top));
        if let Some(error) = matcher.get_error() {
            return Err(invalid(error));
        }
        let first = matcher.compute_mask_or_eos().map_err(|error| invalid(error.to_string()))?;
        try_first_tokens(matcher.deep_clone(), first, &vocabulary.eos).map_err(invalid)?;
        Ok(matcher)
    }));
    let matcher = made
        .unwrap_or_else(|_| Err(CompileError::Invalid("the grammar cannot be compiled".into())))?;
    let eos = Arc::clone(&vocabulary.eos);
    Ok(Compiled::new(source, weight, matcher, eos, vocabulary.tokens()))
}

/// Advances a few tokens, because many grammars become too complex only after the first token, and
/// the client should get that error before generation starts.
fn try_first_tokens(
    mut matcher: llguidance::Matcher,
    first: SimpleVob,
    eos: &[u32],
) -> Result<(), String> {
    let mut mask = first;
    for _ in 0..4 {
        let Some(token) = mask.iter().find(|token| !eos.contains(token)) else { break };
        matcher.consume_token(token).map_err(|error| error.to_string())?;
        if matcher.is_stopped() {
            break;
        }
        mask = matcher.compute_mask_or_eos().map_err(|error| error.to_string())?;
    }
    Ok(())
}

fn top_level(source: &Grammar, limits: &Limits) -> Result<TopLevelGrammar, CompileError> {
    Ok(match source {
        Grammar::JsonObject => json_grammar(json!({"type": "object"})),
        Grammar::JsonSchema(text) => {
            let parsed = serde_json::from_str(text);
            let parsed = parsed.map_err(|error| CompileError::Invalid(plain(&error)))?;
            let made = rewrite(parsed).map_err(|error| CompileError::Invalid(plain(&error)))?;
            // The rewriting may have added values.
            schema::check(&made, limits)?;
            json_grammar(made)
        }
        Grammar::Regex(regex) => TopLevelGrammar::from_regex(regex),
        Grammar::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
    })
}

/// White space allowed in generated JSON: one space or tab, or a line break with indentation. It is
/// bounded because a small model may otherwise write white space without end.
const SPACE: &str = r"[\x20\x09]|\x0D?\x0A[\x20\x09]{0,32}";

/// JSON that satisfies a schema, laid out on one line or on indented ones.
fn json_grammar(mut schema: Value) -> TopLevelGrammar {
    if schema.is_object() {
        let space = Some(SPACE.to_owned());
        // This replaces options that the client may have put there.
        JsonCompileOptions { whitespace_pattern: space, ..JsonCompileOptions::default() }
            .apply_to(&mut schema);
    }
    TopLevelGrammar::from_json_schema(schema)
}
