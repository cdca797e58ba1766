//! Converts texts and pairs to engine requests, and vectors to scores.

use crate::app::{Model, Scorer};
use crate::config::Limits;
use crate::error::ApiError;
use crate::http::auth::Caller;
use crate::openai::truncate::Truncation;
use engine::request::{Embed, Pooling, Request, RequestId, Sampling, Token};

/// The instruction of a reranker that gets none.
const INSTRUCTION: &str =
    "Given a web search query, retrieve relevant passages that answer the query";

/// What a reranker is told before a pair, and after it.
const BEFORE: &str = "<|im_start|>system\nJudge whether the Document meets the requirements based \
                      on the Query and the Instruct provided. Note that the answer can only be \
                      \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n";
const AFTER: &str = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";

/// Pairs of texts.
pub(crate) struct Pairs<'a> {
    pub(crate) first: Vec<&'a str>,
    pub(crate) second: Vec<&'a str>,
    pub(crate) instruction: Option<&'a str>,
    /// The names of the fields they came in.
    pub(crate) names: [&'static str; 2],
}

/// The requests of a call: a request for each pair, or, where vectors of single texts are compared, one for each text,
/// those of the second texts behind those of the first.
pub(crate) fn pairs(
    model: &Model,
    caller: Caller,
    pairs: &Pairs<'_>,
) -> Result<Vec<Request>, ApiError> {
    let most = model.most_prompt();
    let scorer = model.scorer.as_ref().ok_or_else(no_scores)?;
    let [one, two] = pairs.names;
    if let Scorer::Cosine = scorer {
        let firsts = pairs.first.iter().map(|text| (one, text));
        let texts = firsts.chain(pairs.second.iter().map(|text| (two, text)));
        return texts.map(|(name, text)| single(model, caller, name, text, None, None)).collect();
    }
    let pair = |(index, second): (usize, &&str)| {
        let first = pairs.first[if pairs.first.len() == 1 { 0 } else { index }];
        let tokens = match scorer {
            Scorer::Compare => compared(model, pairs.instruction, first, second, most),
            Scorer::Cosine | Scorer::Classes { .. } => {
                let made = model.text.encode_pair(first, second, most);
                made.map_err(|error| ApiError::text(error, two))
            }
        }?;
        request(model, caller, two, tokens)
    };
    pairs.second.iter().enumerate().map(pair).collect()
}

/// A pair as a reranker with an instruction reads it. A document that is too long loses its end.
fn compared(
    model: &Model,
    instruction: Option<&str>,
    query: &str,
    document: &str,
    most: usize,
) -> Result<Vec<Token>, ApiError> {
    let encode = |text: &str| {
        model.text.encode(text, false, usize::MAX).map_err(|e| ApiError::text(e, "documents"))
    };
    let instruction = instruction.unwrap_or(INSTRUCTION);
    let body = format!("<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}");
    let (mut tokens, mut body, after) = (encode(BEFORE)?, encode(&body)?, encode(AFTER)?);
    body.truncate(most.saturating_sub(tokens.len() + after.len()));
    tokens.extend(body);
    tokens.extend(after);
    Ok(tokens)
}

/// The request of one text.
pub(crate) fn single(
    model: &Model,
    caller: Caller,
    name: &str,
    text: &str,
    truncate: Option<i64>,
    limits: Option<&Limits>,
) -> Result<Request, ApiError> {
    let truncation = Truncation(truncate);
    let most = limits.map_or(model.most_prompt(), |limits| truncation.most_prompt(model, limits));
    let mut tokens =
        model.text.encode(text, true, most).map_err(|error| ApiError::text(error, name))?;
    truncation.apply(model, &mut tokens);
    request(model, caller, name, tokens)
}

fn request(
    model: &Model,
    caller: Caller,
    name: &str,
    tokens: Vec<Token>,
) -> Result<Request, ApiError> {
    model.room(name, tokens.len())?;
    let (pooling, unit) =
        if model.generates { (Pooling::Mean, true) } else { (Pooling::Model, false) };
    let embed = Some(Embed { pooling, unit });
    let sampling = Sampling { max_tokens: 1, ..Sampling::default() };
    let tenant = caller.tenant(None);
    Ok(Request { embed, tenant, ..Request::new(RequestId(0), tokens, sampling) })
}

/// The scores of pairs, from the vectors of their requests.
pub(crate) fn scores(
    model: &Model,
    vectors: &[Vec<f32>],
    pairs: usize,
) -> Result<Vec<f32>, ApiError> {
    match model.scorer.as_ref().ok_or_else(no_scores)? {
        Scorer::Cosine => {
            let (first, second) = vectors.split_at(vectors.len() - pairs);
            let one = |(index, second): (usize, &Vec<f32>)| {
                let first = &first[if first.len() == 1 { 0 } else { index }];
                cosine(first, second)
            };
            Ok(second.iter().enumerate().map(one).collect())
        }
        scorer => Ok(vectors.iter().map(|logits| scorer.score(logits)).collect()),
    }
}

fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let dot = |a: &[f32], b: &[f32]| {
        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>()
    };
    let lengths = (dot(a, a) * dot(b, b)).sqrt();
    if lengths > 0.0 { (dot(a, b) / lengths) as f32 } else { 0.0 }
}

fn no_scores() -> ApiError {
    ApiError::invalid("model", "the loaded model scores no texts")
}

impl Scorer {
    /// Probabilities of labels, from their logits.
    pub(crate) fn probabilities(&self, logits: &[f32]) -> Vec<f32> {
        if let Scorer::Classes { apart: true, .. } = self {
            return logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect();
        }
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f64> = logits.iter().map(|l| f64::from(l - most).exp()).collect();
        let total: f64 = weights.iter().sum();
        weights.iter().map(|weight| (weight / total) as f32).collect()
    }

    /// One score of a pair: the probability of the last label, which is that of a match.
    fn score(&self, logits: &[f32]) -> f32 {
        self.probabilities(logits).last().copied().unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_are_probabilities() {
        let labels = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let one = Scorer::Classes { labels: labels(&["match"]), apart: true };
        assert!((one.score(&[0.0]) - 0.5).abs() < 1e-7);
        assert!((one.score(&[2.0]) - 0.880_797).abs() < 1e-6);
        let three = Scorer::Classes { labels: labels(&["a", "b", "c"]), apart: false };
        let probabilities = three.probabilities(&[1.0, 1000.0, 1.0]);
        assert_eq!(probabilities, [0.0, 1.0, 0.0]);
        assert!((Scorer::Compare.score(&[1.0, 1.0]) - 0.5).abs() < 1e-7);
        assert!((cosine(&[1.0, 0.0], &[1.0, 1.0]) - 0.5f32.sqrt()).abs() < 1e-6);
        assert_eq!(cosine(&[0.0], &[1.0]), 0.0);
    }
}
