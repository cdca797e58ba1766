//! How a token is chosen: the parameters of a request and those of a seat. The device samples
//! (`device/ops/sample`).
//!
//! From a row of logits, for the token that follows `len` others:
//! 1. penalties over the tokens seen: repetition divides positive logits and multiplies negative
//!    ones; frequency is subtracted per occurrence in the answer, presence once;
//! 2. biases are added; while `len < min_len` stop tokens are forbidden; tokens outside the mask
//!    are forbidden;
//! 3. at temperature 0 the largest logit wins, the lowest index among equals. Otherwise logits are
//!    divided by the temperature, then top-k, top-p and min-p filter in this order, each what the
//!    one before left; then one draw in index order: the first token whose running sum exceeds
//!    `u · total`, with `u` from Philox4x32-10 of the seed and `len`;
//! 4. log-probabilities are of the distribution after step 2 at temperature 1.

mod params;

pub use params::validate;
pub(crate) use params::{MAX_LOGPROBS, penalised, seat_params, stops};
