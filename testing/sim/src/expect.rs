//! The expected answers, computed from the request alone.

use crate::client::{GRAMMAR_MAX, GRAMMAR_MIN, grammar_letters};
use crate::oracle::{EOS, HIDDEN, Prefix, VOCAB, cell};
use engine::exec::SeatParams;
use engine::request::{Embed, Finish, Pooling, Request, Thinking, Token, TokenLogprob};

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
    thinking: Option<Thinking>,
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
            sampled_logprobs: s.sampled_logprobs,
            logit_bias: Vec::new(),
            min_len: prompt + s.min_tokens,
            stop_tokens,
            seen: Vec::new(),
            adapter: 0,
        };
        Self {
            tokens: request.prompt.to_vec(),
            prompt,
            limit: prompt.saturating_add(s.max_tokens).min(longest),
            params,
            prefix,
            letters: s.grammar.is_some().then_some(0),
            eos_stops: !s.ignore_eos || s.grammar.is_some(),
            thinking: s.thinking.clone(),
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
        let thought = self.thought();
        let letters = self.letters.filter(|_| thought == Thought::Over);
        let mask = match thought {
            Thought::Forced(token) => Some(only(&[token])),
            Thought::Free if self.letters.is_some() => Some(self.no_stops()),
            Thought::Free => None,
            Thought::Over => letters.map(mask),
        };
        let token = self.prefix.next(len, &self.params, &seen, mask.as_deref());
        let stops = self.params.stop_tokens.contains(&token) && len >= self.params.min_len;
        if stops || (self.eos_stops && token == EOS && letters.is_some()) {
            return Next::End(Finish::Stop(Some(token)));
        }
        let logprob = self.params.logprobs.map(|top| {
            let (logprob, top) = self.prefix.logprob(token, top);
            TokenLogprob { token, logprob, top }
        });
        self.prefix.push(cell(token, len));
        self.tokens.push(token);
        self.letters = self.letters.map(|count| count + u32::from(letters.is_some()));
        Next::Token(token, logprob)
    }

    /// Where the thought stands, found anew in all tokens of the answer.
    fn thought(&self) -> Thought {
        let Some(Thinking { open, close, budget }) = &self.thinking else { return Thought::Over };
        let answer = &self.tokens[self.prompt as usize..];
        let last = answer.len().min(open.len() + LEAD);
        let from = match self.letters {
            _ if open.is_empty() => 0,
            Some(_) if answer.len() < open.len() => return Thought::Forced(open[answer.len()]),
            Some(_) => open.len(),
            None => match (1..=last).find(|&end| answer[..end].ends_with(open)) {
                Some(from) => from,
                None => return Thought::Free,
            },
        };
        let inside = &answer[from..];
        if (1..=inside.len()).any(|end| inside[..end].ends_with(close)) {
            return Thought::Over;
        }
        let Some(over) = inside.len().checked_sub(*budget as usize) else { return Thought::Free };
        let own = &inside[..*budget as usize];
        let written = (0..close.len()).rev().find(|&count| own.ends_with(&close[..count]));
        Thought::Forced(close[written.unwrap_or(0) + over])
    }

    /// What a thought before a grammar may have: anything but an end.
    fn no_stops(&self) -> Vec<u32> {
        let close = self.thinking.as_ref().map_or(&[][..], |thinking| &thinking.close);
        let ends = |token: &Token| self.params.stop_tokens.contains(token);
        let free: Vec<Token> = (0..VOCAB).filter(|t| !ends(t) || close.contains(t)).collect();
        only(&free)
    }
}

/// Tokens that the engine lets pass before an opening tag.
const LEAD: usize = 4;

/// What the thought before an answer means for the next token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Thought {
    /// It is this one.
    Forced(Token),
    /// The model decides.
    Free,
    /// The answer has begun.
    Over,
}

/// The mask that allows these tokens.
fn only(tokens: &[Token]) -> Vec<u32> {
    let mut mask = vec![0u32; VOCAB.div_ceil(32) as usize];
    tokens.iter().for_each(|token| mask[*token as usize / 32] |= 1 << (token % 32));
    mask
}

/// The mask of the grammar: letters up to the maximum, the end from the minimum on.
fn mask(letters: u32) -> Vec<u32> {
    let mut allowed = Vec::new();
    if letters < GRAMMAR_MAX {
        allowed.extend(grammar_letters());
    }
    if letters >= GRAMMAR_MIN {
        allowed.push(EOS);
    }
    only(&allowed)
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
        Pooling::Last | Pooling::Model => &states[states.len() - 1..],
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
