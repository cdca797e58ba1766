//! The oracle that replaces a model: the next token is a hash of everything before it.
//!
//! The fake device computes it from the cells that it reads through its page tables, the checker
//! from the request alone. A wrong page, a stale seat or mixed-up requests change the hash, and so
//! the token.

use crate::rng::mix;
use engine::exec::SeatParams;
use engine::request::Token;

/// Vocabulary: single bytes from the space up, so that grammars have text to match, after the
/// end-of-text token 0.
pub(crate) const VOCAB: u32 = 96;
/// Width of its hidden states.
pub(crate) const HIDDEN: u32 = 3;
/// The model's own stop token.
pub(crate) const EOS: Token = 0;

/// Hash of a prefix, grown one position at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Prefix(u64);

impl Prefix {
    /// The empty prefix.
    pub(crate) fn new() -> Self {
        Self(0x5EED)
    }

    /// Adds a cell: a token at its position.
    pub(crate) fn push(&mut self, cell: u64) {
        self.0 = mix(self.0 ^ cell).wrapping_add(cell);
    }

    /// The token after `len` tokens. `seen` are the tokens that count for penalties; used only if
    /// one is set.
    pub(crate) fn next(
        &self,
        len: u32,
        params: &SeatParams,
        seen: &[(Token, bool)],
        mask: Option<&[u32]>,
    ) -> Token {
        let mut hash = self.0;
        if params.temperature > 0.0 {
            hash = mix(hash ^ mix(params.seed ^ u64::from(len)));
        }
        if penalised(params) {
            for &(token, answer) in seen {
                hash = mix(hash ^ u64::from(token) ^ (u64::from(answer) << 40));
            }
        }
        let first = (hash % u64::from(VOCAB)) as u32;
        let allowed = |&token: &Token| {
            let stop = params.stop_tokens.contains(&token) && len < params.min_len;
            let masked =
                mask.is_some_and(|mask| mask[token as usize / 32] >> (token % 32) & 1 == 0);
            !stop && !masked
        };
        (0..VOCAB).map(|step| (first + step) % VOCAB).find(allowed).unwrap_or(EOS)
    }

    /// An invented hidden state of integers, so that sums do not depend on their order.
    pub(crate) fn hidden(&self) -> [f64; HIDDEN as usize] {
        std::array::from_fn(|at| (mix(self.0 ^ mix(at as u64 + 77)) % 4096) as f64 - 2048.0)
    }

    /// An invented log-probability with alternatives, different for every prefix and target.
    pub(crate) fn logprob(&self, target: Token, top: u32) -> (f32, Vec<(Token, f32)>) {
        let score = |token: Token| {
            let hash = mix(self.0 ^ mix(u64::from(token)));
            -((hash % 4096) as f32) / 256.0
        };
        let first = (self.0 % u64::from(VOCAB)) as u32;
        let alternatives = (0..top).map(|step| (first + step) % VOCAB);
        (score(target), alternatives.map(|token| (token, score(token))).collect())
    }
}

impl Default for Prefix {
    fn default() -> Self {
        Self::new()
    }
}

/// The content of a page for one token: the token and its position.
pub(crate) fn cell(token: Token, position: u32) -> u64 {
    u64::from(token) | u64::from(position) << 32
}

/// Whether a penalty is set, so that `seen` matters.
pub(crate) fn penalised(params: &SeatParams) -> bool {
    params.repetition_penalty != 1.0
        || params.frequency_penalty != 0.0
        || params.presence_penalty != 0.0
}
