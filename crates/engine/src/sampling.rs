//! How a token is chosen: what a caller may ask for, what a seat is told, and the reference that
//! every device is tested against.

mod params;

pub use params::{MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKENS, validate};
pub(crate) use params::{seat_params, stops};
