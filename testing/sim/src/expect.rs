//! The expected answers, computed from the request alone.

use crate::client::{GRAMMAR_MAX, GRAMMAR_MIN, grammar_letters};
use crate::oracle::{EOS, HIDDEN, Prefix, VOCAB, cell};
use engine::exec::SeatParams;
use engine::request::{Embed, Finish, Pooling, Request, Token, TokenLogprob};

/// The next expected event.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Next {
    /// One more token.
    Token(Token, Option<TokenLogprob>),
    /// The end of the answer.
    End(Finish),
}

/// The expected course of one choice.
pub(crate) struct Answer {
    tokens: Vec<Token>,
    prompt: u32,
    limit: u32,
    params: SeatParams,
    prefix: Prefix,
    letters: Option<u32>,
    eos_stops: bool,
}

impl Answer {
    /// Choice `choice` of a request, where a sequence has at most `longest` tokens.
    pub(crate) fn new(request: &Request, choice: u32, longest: u32) -> Self {
        let s = &request.sampling;
        let prompt = request.prompt.len() as u32;
        let mut prefix = Prefix::new();
        for (position, &token) in (0..).zip(request.prompt.iter()) {
            prefix.push(cell(token, position));
        }
        let mut stop_tokens = s.stop_tokens.clone();
        if !s.ignore_eos {
            stop_tokens.push(EOS);
        }
        let params = SeatParams {
            temperature: s.temperature,
            top_k: s.top_k,
            top_p: s.top_p,
            min_p: s.min_p,
            repetition_penalty: s.repetition_penalty,
            frequency_penalty: s.frequency_penalty,
            presence_penalty: s.presence_penalty,
            seed: s.seed + u64::from(choice),
            logprobs: s.logprobs,
            logit_bias: Vec::new(),
            min_len: prompt + s.min_tokens,
            stop_tokens,
            seen: Vec::new(),
        };
        Self {
            tokens: request.prompt.to_vec(),
            prompt,
            limit: prompt.saturating_add(s.max_tokens).min(longest),
            params,
            prefix,
            letters: s.grammar.is_some().then_some(0),
            eos_stops: !s.ignore_eos || s.grammar.is_some(),
        }
    }

    /// The next event that must be output.
    pub(crate) fn advance(&mut self) -> Next {
        let len = self.tokens.len() as u32;
        if self.letters == Some(GRAMMAR_MAX) {
            return Next::End(Finish::Stop(None));
        }
        if len >= self.limit {
            return Next::End(Finish::Length);
        }
        let seen: Vec<(Token, bool)> =
            (0..).zip(&self.tokens).map(|(at, &token)| (token, at >= self.prompt)).collect();
        let mask = self.letters.map(mask);
        let token = self.prefix.next(len, &self.params, &seen, mask.as_deref());
        let stops = self.params.stop_tokens.contains(&token) && len >= self.params.min_len;
        if stops || (self.eos_stops && token == EOS && self.letters.is_some()) {
            return Next::End(Finish::Stop(Some(token)));
        }
        let logprob = self.params.logprobs.map(|top| {
            let (logprob, top) = self.prefix.logprob(token, top);
            TokenLogprob { token, logprob, top }
        });
        self.prefix.push(cell(token, len));
        self.tokens.push(token);
        if let Some(letters) = &mut self.letters {
            *letters += 1;
        }
        Next::Token(token, logprob)
    }
}

/// The mask of the grammar: letters up to the maximum, the end from the minimum on.
fn mask(letters: u32) -> Vec<u32> {
    let mut mask = vec![0u32; VOCAB.div_ceil(32) as usize];
    let mut allow = |token: Token| mask[token as usize / 32] |= 1 << (token % 32);
    if letters < GRAMMAR_MAX {
        grammar_letters().for_each(&mut allow);
    }
    if letters >= GRAMMAR_MIN {
        allow(EOS);
    }
    mask
}

/// The expected embedding of a prompt.
pub(crate) fn vector(request: &Request, embed: Embed) -> Vec<f32> {
    let mut prefix = Prefix::new();
    let mut states = Vec::new();
    for (position, &token) in (0..).zip(request.prompt.iter()) {
        prefix.push(cell(token, position));
        states.push(prefix.hidden());
    }
    let counted = match embed.pooling {
        Pooling::Mean => &states[..],
        Pooling::Last => &states[states.len() - 1..],
    };
    let sum = |at: usize| counted.iter().map(|state| state[at]).sum::<f64>();
    let sums: Vec<f64> = (0..HIDDEN as usize).map(sum).collect();
    let length = sums.iter().map(|x| x * x).sum::<f64>().sqrt();
    let by = if embed.unit && length > 0.0 { length } else { counted.len() as f64 };
    sums.iter().map(|x| (x / by) as f32).collect()
}

/// The expected log-probabilities of a prompt.
pub(crate) fn prompt_logprobs(request: &Request) -> Vec<TokenLogprob> {
    let Some(top) = request.prompt_logprobs else { return Vec::new() };
    let mut prefix = Prefix::new();
    let mut scores = Vec::new();
    for (position, pair) in (0..).zip(request.prompt.windows(2)) {
        prefix.push(cell(pair[0], position));
        let (logprob, top) = prefix.logprob(pair[1], top);
        scores.push(TokenLogprob { token: pair[1], logprob, top });
    }
    scores
}
