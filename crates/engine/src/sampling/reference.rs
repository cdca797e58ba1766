//! One row of logits to one token, in plain Rust: what every device's sampler is tested against.

use super::philox::uniform;
use crate::exec::SeatParams;
use crate::request::Token;
use std::collections::BTreeMap;

/// Tokens that count for penalties: those of the prompt once, those of the answer with how often.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    answers: BTreeMap<Token, u32>,
}

impl Seen {
    /// What a seat starts with: `true` marks tokens of the answer.
    pub fn new(seen: &[(Token, bool)]) -> Self {
        let mut new = Self::default();
        for &(token, answer) in seen {
            *new.answers.entry(token).or_insert(0) += u32::from(answer);
        }
        new
    }

    /// One more token of the answer.
    pub fn push(&mut self, token: Token) {
        *self.answers.entry(token).or_insert(0) += 1;
    }
}

/// What was chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The token.
    pub token: Token,
    /// When asked for: its log-probability, and the alternatives best first.
    pub logprob: Option<(f32, Vec<(Token, f32)>)>,
}

/// Chooses the token that follows `len` tokens. The order of the steps is the one the module says.
pub fn choose(
    logits: &[f32],
    params: &SeatParams,
    seen: &Seen,
    len: u32,
    mask: Option<&[u32]>,
) -> Choice {
    let logits = adjust(logits, params, seen, len, mask);
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    let token = match params.temperature {
        0.0 => order[0],
        _ => draw(&logits, &order, params, uniform(params.seed, len)),
    };
    let logprob = params.logprobs.map(|top| logprobs(&logits, &order, token, top as usize));
    Choice { token: token as Token, logprob }
}

/// Steps 1 and 2: penalties, biases, stop tokens that come too early, the mask.
pub fn adjust(
    logits: &[f32],
    params: &SeatParams,
    seen: &Seen,
    len: u32,
    mask: Option<&[u32]>,
) -> Vec<f32> {
    let mut logits = logits.to_vec();
    let SeatParams { repetition_penalty, frequency_penalty, presence_penalty, .. } = *params;
    if repetition_penalty != 1.0 || frequency_penalty != 0.0 || presence_penalty != 0.0 {
        for (&token, &count) in &seen.answers {
            let l = &mut logits[token as usize];
            *l = if *l > 0.0 { *l / repetition_penalty } else { *l * repetition_penalty };
            *l -= frequency_penalty * count as f32;
            *l -= if count > 0 { presence_penalty } else { 0.0 };
        }
    }
    for &(token, bias) in &params.logit_bias {
        logits[token as usize] += bias;
    }
    if len < params.min_len {
        for &token in &params.stop_tokens {
            logits[token as usize] = f32::NEG_INFINITY;
        }
    }
    if let Some(mask) = mask {
        for (token, l) in logits.iter_mut().enumerate() {
            if mask[token / 32] >> (token % 32) & 1 == 0 {
                *l = f32::NEG_INFINITY;
            }
        }
    }
    logits
}

/// Step 3: the filters, then one draw. `order` has the likeliest first, ties by index.
fn draw(logits: &[f32], order: &[usize], params: &SeatParams, u: f32) -> usize {
    let kept = filter(logits, order, params);
    let total: f64 = kept.iter().map(|&(_, weight)| weight).sum();
    let mut sum = 0.0;
    let chosen = kept.iter().find(|&&(_, weight)| {
        sum += weight;
        sum > f64::from(u) * total
    });
    // Rounding may leave the last sum a hair below the total.
    chosen.or(kept.last()).map_or(order[0], |&(token, _)| token)
}

/// What the filters leave, in index order, with weights that need not sum to one.
fn filter(logits: &[f32], order: &[usize], params: &SeatParams) -> Vec<(usize, f64)> {
    let scaled = |token: usize| logits[token] / params.temperature;
    let most = scaled(order[0]);
    let weigh = |&token: &usize| (token, f64::from(scaled(token) - most).exp());
    let mut kept: Vec<(usize, f64)> = order.iter().map(weigh).collect();
    if params.top_k > 0 {
        kept.truncate(params.top_k as usize);
    }
    if params.top_p < 1.0 {
        let total: f64 = kept.iter().map(|&(_, weight)| weight).sum();
        let mut sum = 0.0;
        let reached = kept.iter().position(|&(_, weight)| {
            sum += weight;
            sum >= f64::from(params.top_p) * total
        });
        kept.truncate(reached.map_or(kept.len(), |last| last + 1));
    }
    if params.min_p > 0.0 {
        kept.retain(|&(_, weight)| weight >= f64::from(params.min_p));
    }
    kept.sort_unstable_by_key(|&(token, _)| token);
    kept
}

/// Step 4: at temperature 1, of what steps 1 and 2 left.
fn logprobs(logits: &[f32], order: &[usize], token: usize, top: usize) -> (f32, Vec<(Token, f32)>) {
    let most = f64::from(logits[order[0]]);
    let total: f64 = logits.iter().map(|l| (f64::from(*l) - most).exp()).sum();
    let of = |token: usize| (f64::from(logits[token]) - most - total.ln()) as f32;
    (of(token), order.iter().take(top).map(|&token| (token as Token, of(token))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 8] = [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -4.0];

    fn params() -> SeatParams {
        SeatParams {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            seed: 99,
            logprobs: None,
            logit_bias: Vec::new(),
            min_len: 0,
            stop_tokens: Vec::new(),
            seen: Vec::new(),
        }
    }

    /// Draws many tokens and compares them with probabilities computed by hand in the test.
    fn chi_square(params: &SeatParams, mask: Option<&[u32]>, seen: &Seen, expected: &[f64]) {
        let draws = 40_000;
        let mut counts = vec![0f64; expected.len()];
        for len in 0..draws {
            let token = choose(&LOGITS, params, seen, 1000 + len, mask).token;
            counts[token as usize] += 1.0;
        }
        let total: f64 = expected.iter().sum();
        let mut chi = 0.0;
        for (token, (&weight, &count)) in expected.iter().zip(&counts).enumerate() {
            let want = weight / total * f64::from(draws);
            assert!(
                want > 0.0 || count == 0.0,
                "token {token} was filtered and drawn {count} times"
            );
            if want > 0.0 {
                chi += (count - want).powi(2) / want;
            }
        }
        // 7 degrees of freedom: beyond 36 once in a hundred thousand.
        assert!(chi < 36.0, "chi-square {chi}: {counts:?}");
    }

    fn weights(temperature: f64) -> Vec<f64> {
        LOGITS.iter().map(|&l| (f64::from(l) / temperature).exp()).collect()
    }

    fn only(mut weights: Vec<f64>, keep: impl Fn(usize) -> bool) -> Vec<f64> {
        for (token, weight) in weights.iter_mut().enumerate() {
            *weight = if keep(token) { *weight } else { 0.0 };
        }
        weights
    }

    #[test]
    fn temperature_alone() {
        for temperature in [0.5, 1.0, 2.0] {
            let params = SeatParams { temperature: temperature as f32, ..params() };
            chi_square(&params, None, &Seen::default(), &weights(temperature));
        }
    }

    #[test]
    fn top_k() {
        let params = SeatParams { top_k: 3, ..params() };
        chi_square(&params, None, &Seen::default(), &only(weights(1.0), |token| token < 3));
    }

    #[test]
    fn top_p_keeps_the_smallest_set_that_reaches_it() {
        let all = weights(1.0);
        let total: f64 = all.iter().sum();
        let mut sum = 0.0;
        let keep = all.iter().take_while(|weight| {
            let before = sum;
            sum += *weight / total;
            before < 0.7
        });
        let keep = keep.count();
        assert!((2..7).contains(&keep));
        let params = SeatParams { top_p: 0.7, ..params() };
        chi_square(&params, None, &Seen::default(), &only(all, |token| token < keep));
    }

    #[test]
    fn min_p_is_a_share_of_the_likeliest() {
        let params = SeatParams { min_p: 0.2, ..params() };
        let keep = |token: usize| f64::from(LOGITS[token] - LOGITS[0]).exp() >= 0.2;
        chi_square(&params, None, &Seen::default(), &only(weights(1.0), keep));
    }

    #[test]
    fn filters_apply_in_order_each_to_what_is_left() {
        // Of the top 4, top-p 0.7 keeps two; of all eight it would keep three.
        let params = SeatParams { top_k: 4, top_p: 0.7, min_p: 0.1, ..params() };
        let all = weights(1.0);
        let two = all[0] + all[1];
        assert!(two / all[..4].iter().sum::<f64>() >= 0.7 && two / all.iter().sum::<f64>() < 0.7);
        chi_square(&params, None, &Seen::default(), &only(all, |token| token < 2));
    }

    #[test]
    fn penalties_count_prompt_and_answer_as_documented() {
        let params = SeatParams {
            repetition_penalty: 2.0,
            frequency_penalty: 0.5,
            presence_penalty: 0.25,
            ..params()
        };
        let seen = Seen::new(&[(0, false), (6, false), (1, true), (1, true), (5, true)]);
        let mut logits: Vec<f64> = LOGITS.iter().map(|&l| f64::from(l)).collect();
        logits[0] = 1.0; // positive: halved; prompt only, so no more than that
        logits[6] = -2.0; // negative: doubled
        logits[1] = 0.75 - 2.0 * 0.5 - 0.25;
        logits[5] = -1.0 - 0.5 - 0.25;
        let expected: Vec<f64> = logits.iter().map(|l| l.exp()).collect();
        chi_square(&params, None, &seen, &expected);
        let mut grown = Seen::new(&[(0, false), (6, false), (1, true), (5, true)]);
        grown.push(1);
        assert_eq!(grown, seen);
    }

    #[test]
    fn bias_mask_and_early_stops() {
        let params = SeatParams {
            logit_bias: vec![(7, 5.0), (0, -1.0)],
            stop_tokens: vec![2],
            min_len: u32::MAX,
            ..params()
        };
        let mut expected = weights(1.0);
        expected[7] *= 5f64.exp();
        expected[0] *= (-1f64).exp();
        let expected = only(expected, |token| token != 2 && token != 4);
        chi_square(&params, Some(&[0b1110_1111]), &Seen::default(), &expected);
    }

    #[test]
    fn greedy_takes_the_first_of_equals() {
        let params = SeatParams { temperature: 0.0, ..params() };
        let logits = [0.0, 3.0, 3.0, 1.0];
        assert_eq!(choose(&logits, &params, &Seen::default(), 5, None).token, 1);
        assert_eq!(choose(&logits, &params, &Seen::default(), 5, Some(&[0b1101])).token, 2);
    }

    #[test]
    fn logprobs_are_of_the_adjusted_distribution_at_temperature_one() {
        let params = SeatParams { temperature: 3.0, logprobs: Some(3), ..params() };
        let choice = choose(&LOGITS, &params, &Seen::default(), 9, Some(&[0b1111_1110]));
        let total: f64 = weights(1.0)[1..].iter().sum();
        let of = |token: usize| (f64::from(LOGITS[token]) - total.ln()) as f32;
        let (logprob, top) = choice.logprob.unwrap();
        assert!((logprob - of(choice.token as usize)).abs() < 1e-6);
        assert_eq!(top.iter().map(|&(token, _)| token).collect::<Vec<_>>(), [1, 2, 3]);
        assert!(top.iter().all(|&(token, found)| (found - of(token as usize)).abs() < 1e-6));
    }

    #[test]
    fn a_draw_depends_on_seed_and_position_alone() {
        let first = choose(&LOGITS, &params(), &Seen::default(), 77, None);
        assert_eq!(choose(&LOGITS, &params(), &Seen::default(), 77, None), first);
        let others = (0..50).map(|seed| SeatParams { seed, ..params() });
        let tokens: std::collections::BTreeSet<Token> = others
            .map(|params| choose(&LOGITS, &params, &Seen::default(), 77, None).token)
            .collect();
        assert!(tokens.len() > 2);
    }
}
