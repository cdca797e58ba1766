//! Turns a request's sampling parameters into a seat's.

use crate::exec::SeatParams;
use crate::plant::{Plant, planted};
use crate::request::{Reject, Sampling, Thinking, Token};
use crate::sequence::Sequence;

/// Most alternatives a log-probability reports.
pub(crate) const MAX_LOGPROBS: u32 = 20;
/// Most stop tokens of a request, the model's own included.
pub(crate) const MAX_STOP_TOKENS: usize = 16;
/// Most single tokens whose logits a request shifts.
pub(crate) const MAX_LOGIT_BIAS: usize = 320;

/// A temperature below this is greedy: logits divided by it overflow, and the likeliest token would win
/// anyway.
pub(crate) const MIN_TEMPERATURE: f32 = 1e-5;

/// Checks every field; the error names the first one out of range. `eos` are the model's own stop
/// tokens.
pub fn validate(sampling: &Sampling, vocab: u32, eos: &[Token]) -> Result<(), Reject> {
    let s = sampling;
    let bad = |field: &'static str, problem: String| Err(Reject::BadParameter { field, problem });
    let range = |field, value: f32, low: f32, high: f32| {
        if value.is_finite() && (low..=high).contains(&value) {
            Ok(())
        } else {
            bad(field, format!("{value} is not between {low} and {high}"))
        }
    };
    range("temperature", s.temperature, 0.0, 100.0)?;
    range("top_p", s.top_p, 0.0, 1.0)?;
    range("min_p", s.min_p, 0.0, 1.0)?;
    range("frequency_penalty", s.frequency_penalty, -2.0, 2.0)?;
    range("presence_penalty", s.presence_penalty, -2.0, 2.0)?;
    range("repetition_penalty", s.repetition_penalty, 0.01, 100.0)?;
    if s.top_p == 0.0 {
        return bad("top_p", "0 leaves nothing to choose from".into());
    }
    if s.logit_bias.len() > MAX_LOGIT_BIAS {
        return bad("logit_bias", format!("at most {MAX_LOGIT_BIAS} tokens"));
    }
    for &(token, bias) in &s.logit_bias {
        range("logit_bias", bias, -100.0, 100.0)?;
        if token >= vocab {
            return Err(Reject::UnknownToken(token));
        }
    }
    if s.logprobs.is_some_and(|count| count > MAX_LOGPROBS) {
        return bad("logprobs", format!("at most {MAX_LOGPROBS}"));
    }
    if stops(s, eos).len() > MAX_STOP_TOKENS {
        return bad("stop_tokens", format!("at most {MAX_STOP_TOKENS}"));
    }
    if let Some(&token) = s.stop_tokens.iter().find(|&&token| token >= vocab) {
        return Err(Reject::UnknownToken(token));
    }
    if s.min_tokens > s.max_tokens {
        return bad("min_tokens", format!("more than max_tokens, which is {}", s.max_tokens));
    }
    if s.min_tokens > 0 && s.grammar.is_some() {
        return bad("min_tokens", "a grammar decides by itself where an answer ends".into());
    }
    s.thinking.as_ref().map_or(Ok(()), |thinking| check_thinking(thinking, s, vocab, eos))
}

fn check_thinking(
    thinking: &Thinking,
    s: &Sampling,
    vocab: u32,
    eos: &[Token],
) -> Result<(), Reject> {
    let tags = || thinking.open.iter().chain(thinking.close.iter());
    let bad = |field, problem: &str| Err(Reject::BadParameter { field, problem: problem.into() });
    if thinking.close.is_empty() {
        return bad("thinking", "the closing tag is empty");
    }
    if let Some(&token) = tags().find(|&&token| token >= vocab) {
        return Err(Reject::UnknownToken(token));
    }
    // The device forbids stop tokens before that, and a forced one would leave nothing to choose from.
    if s.min_tokens > 0 && tags().any(|token| stops(s, eos).contains(token)) {
        return bad("min_tokens", "a tag around the thinking is a stop token");
    }
    Ok(())
}

/// The tokens that end an answer, sorted.
pub(crate) fn stops(sampling: &Sampling, eos: &[Token]) -> Vec<Token> {
    let own = if sampling.ignore_eos { &[][..] } else { eos };
    let mut stops = [&sampling.stop_tokens[..], own].concat();
    stops.sort_unstable();
    stops.dedup();
    stops
}

/// Whether tokens seen before count.
pub(crate) fn penalised(s: &Sampling) -> bool {
    s.repetition_penalty != 1.0 || s.frequency_penalty != 0.0 || s.presence_penalty != 0.0
}

/// What the device keeps for a sequence that takes a seat now. Choice `c` of seed `s` draws what
/// seed `s + c` would draw alone.
pub(crate) fn seat_params(sequence: &Sequence) -> SeatParams {
    let spec = &sequence.cold.spec;
    let s = &spec.sampling;
    let prompt = sequence.prompt_len as usize;
    let counted = match penalised(s) {
        false => 0,
        true if planted(Plant::ForgetSeen) => prompt,
        true => sequence.tokens.len(),
    };
    let choice = if planted(Plant::SameSeed) { 0 } else { sequence.choice };
    let counted = sequence.tokens[..counted].iter().enumerate();
    SeatParams {
        temperature: if s.temperature < MIN_TEMPERATURE { 0.0 } else { s.temperature },
        top_k: s.top_k,
        top_p: s.top_p,
        min_p: s.min_p,
        repetition_penalty: s.repetition_penalty,
        frequency_penalty: s.frequency_penalty,
        presence_penalty: s.presence_penalty,
        seed: s.seed.wrapping_add(u64::from(choice)),
        logprobs: s.logprobs,
        sampled_logprobs: s.sampled_logprobs,
        logit_bias: s.logit_bias.clone(),
        min_len: sequence.prompt_len.saturating_add(s.min_tokens),
        stop_tokens: spec.stops.clone(),
        seen: counted.map(|(index, &token)| (token, index >= prompt)).collect(),
        // The scheduler knows the slot.
        adapter: 0,
    }
}
