//! Converts an embedding request to engine requests, and vectors to JSON.

use super::types::{EmbeddingRequest, Vector};
use crate::app::Model;
use crate::config::Limits;
use crate::error::ApiError;
use crate::http::auth::Caller;
use crate::openai::completions::convert::tokenize;
use crate::openai::truncate::Truncation;
use engine::request::{Embed, Pooling, Request, RequestId, Sampling};

/// One engine request per input, each within the context. Vectors of a model that generates are normalized, like those
/// of OpenAI's models; pooling is the mean over the tokens by default. Other models have their own rules.
pub(crate) fn convert(
    model: &Model,
    limits: &Limits,
    request: &EmbeddingRequest,
    caller: Caller,
) -> Result<Vec<Request>, ApiError> {
    let (pooling, unit) = match request.pooling.as_deref() {
        _ if !model.generates => (Pooling::Model, false),
        Some("last") => (Pooling::Last, true),
        _ => (Pooling::Mean, true),
    };
    let truncation = Truncation(request.truncate_prompt_tokens);
    let most = truncation.most_prompt(model, limits);
    let inputs = tokenize(model, "input", request.input.clone(), most)?;
    let one = |mut input: Vec<u32>| {
        truncation.apply(model, &mut input);
        model.room("input", input.len())?;
        let sampling = Sampling { max_tokens: 1, ..Sampling::default() };
        let embed = Some(Embed { pooling, unit });
        let tenant = caller.tenant(None);
        Ok(Request { embed, tenant, ..Request::new(RequestId(0), input, sampling) })
    };
    inputs.into_iter().map(one).collect()
}

/// The first numbers of a vector, with the length 1: what models trained for it give instead of the whole.
pub(crate) fn shorten(vector: &mut Vec<f32>, dimensions: Option<u32>) {
    let Some(keep) = dimensions.map(|n| n as usize).filter(|&n| n < vector.len()) else { return };
    vector.truncate(keep);
    let length = vector.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt() as f32;
    if length > 0.0 {
        vector.iter_mut().for_each(|x| *x /= length);
    }
}

/// A vector in the requested encoding.
pub(crate) fn vector(as_base64: bool, vector: Vec<f32>) -> Vector {
    match as_base64 {
        true => {
            let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            Vector::Base64(base64(&bytes))
        }
        false => Vector::Float(vector),
    }
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let at = |i: usize| u32::from(three.get(i).copied().unwrap_or(0));
        let bits = at(0) << 16 | at(1) << 8 | at(2);
        for i in 0..4 {
            if i <= three.len() {
                let six = (bits >> (18 - 6 * i)) & 63;
                out.push(char::from(LETTERS[six as usize]));
            } else {
                out.push('=');
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    #[test]
    fn base64_matches_the_standard() {
        for (plain, text) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v")] {
            assert_eq!(super::base64(plain.as_bytes()), text);
        }
    }
}
