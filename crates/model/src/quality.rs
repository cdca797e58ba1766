//! How far a model is from another one on the same text: the distributions after each token, compared.

use engine::request::Token;
use rayon::prelude::*;

/// The two models' distributions after a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Compared {
    /// The negative log-probability of the token that follows, by the reference.
    pub reference: f64,
    /// The same by the measured model.
    pub measured: f64,
    /// The Kullback-Leibler divergence of the measured distribution from the reference, in nats.
    pub divergence: f64,
    /// Whether both find the same token likeliest.
    pub agree: bool,
}

/// Compares rows of logits; `targets[i]` is the token that follows row `i`.
///
/// # Panics
/// If there are not as many rows as targets.
pub fn compare(reference: &[f32], measured: &[f32], targets: &[Token]) -> Vec<Compared> {
    let vocab = reference.len() / targets.len().max(1);
    assert!(reference.len() == measured.len() && reference.len() == vocab * targets.len());
    let rows =
        reference.par_chunks_exact(vocab.max(1)).zip(measured.par_chunks_exact(vocab.max(1)));
    rows.zip(targets)
        .map(|((reference, measured), &target)| row(reference, measured, target))
        .collect()
}

fn row(reference: &[f32], measured: &[f32], target: Token) -> Compared {
    let (p, q) = (Distribution::of(reference), Distribution::of(measured));
    let divergence: f64 = reference
        .iter()
        .zip(measured)
        .map(|(&a, &b)| {
            let share = f64::from((a - p.most).exp());
            // A token that the reference excludes contributes nothing.
            if share > 0.0 { share * (p.log(a) - q.log(b)) } else { 0.0 }
        })
        .sum();
    Compared {
        reference: -p.log(reference[target as usize]),
        measured: -q.log(measured[target as usize]),
        // Rounding can make a divergence of 0 slightly negative.
        divergence: (divergence / p.total).max(0.0),
        agree: p.best == q.best,
    }
}

/// The likeliest token of a row of logits, the first among equals.
pub fn likeliest(logits: &[f32]) -> Token {
    Distribution::of(logits).best
}

struct Distribution {
    best: Token,
    most: f32,
    /// The sum of the exponentials, relative to the largest.
    total: f64,
}

impl Distribution {
    fn of(logits: &[f32]) -> Distribution {
        let (best, most) = logits
            .iter()
            .zip(0..)
            .fold((0, f32::NEG_INFINITY), |best, (&x, at)| if x > best.1 { (at, x) } else { best });
        let total = logits.iter().map(|&x| f64::from((x - most).exp())).sum();
        Distribution { best, most, total }
    }

    fn log(&self, logit: f32) -> f64 {
        f64::from(logit) - f64::from(self.most) - self.total.ln()
    }
}

/// What was found over a whole text.
#[derive(Clone, Debug, PartialEq)]
pub struct Quality {
    /// Tokens that were predicted.
    pub tokens: usize,
    /// The reference's perplexity.
    pub reference: f64,
    /// The measured model's perplexity.
    pub measured: f64,
    /// The measured perplexity over the reference's, less 1.
    pub worse: f64,
    /// The standard error of `worse`: how much another text of this length might change it.
    pub worse_error: f64,
    /// The mean divergence.
    pub divergence: f64,
    /// The divergence that one token in a hundred exceeds.
    pub divergence_p99: f64,
    /// The share of tokens after which both find the same token likeliest.
    pub agreement: f64,
}

impl Quality {
    /// Of all tokens of a text; `None` if there are none.
    pub fn of(tokens: &[Compared]) -> Option<Quality> {
        let count = tokens.len() as f64;
        let mean = |of: &dyn Fn(&Compared) -> f64| tokens.iter().map(of).sum::<f64>() / count;
        let more = |token: &Compared| token.measured - token.reference;
        let ratio = mean(&more);
        let variance = mean(&|token| (more(token) - ratio).powi(2));
        let mut divergences: Vec<f64> = tokens.iter().map(|token| token.divergence).collect();
        divergences.sort_by(f64::total_cmp);
        let p99 = (tokens.len() * 99).div_ceil(100).checked_sub(1)?;
        Some(Quality {
            tokens: tokens.len(),
            reference: mean(&|token| token.reference).exp(),
            measured: mean(&|token| token.measured).exp(),
            worse: ratio.exp_m1(),
            worse_error: (variance / count).sqrt() * ratio.exp(),
            divergence: mean(&|token| token.divergence),
            divergence_p99: divergences[p99],
            agreement: mean(&|token| f64::from(u8::from(token.agree))),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits(shares: &[f32]) -> Vec<f32> {
        // Any constant may be added to logits.
        shares.iter().map(|share| share.ln() + 3.0).collect()
    }

    #[test]
    fn divergence_is_the_sum_over_the_whole_distribution() {
        let (p, q) = ([0.5f32, 0.25, 0.125, 0.125], [0.25f32, 0.5, 0.125, 0.125]);
        let found = compare(&logits(&p), &logits(&q), &[1])[0];
        let expected: f32 = p.iter().zip(q).map(|(p, q)| p * (p / q).ln()).sum();
        assert!((found.divergence - f64::from(expected)).abs() < 1e-6, "{found:?}");
        assert!((found.reference - 4f64.ln()).abs() < 1e-6);
        assert!((found.measured - 2f64.ln()).abs() < 1e-6);
        assert!(!found.agree);
        let same = compare(&logits(&p), &logits(&p), &[0])[0];
        assert!(same.divergence < 1e-12 && same.agree && same.reference == same.measured);
        let excluded = compare(&[0.0, f32::NEG_INFINITY], &[0.0, 0.0], &[0])[0];
        assert!((excluded.divergence - 2f64.ln()).abs() < 1e-6, "{excluded:?}");
    }

    #[test]
    fn perplexity_is_of_the_mean_and_the_rest_of_single_tokens() {
        let token = |reference: f64, measured: f64, divergence: f64, agree: bool| Compared {
            reference,
            measured,
            divergence,
            agree,
        };
        assert_eq!(Quality::of(&[]), None);
        let mut tokens = vec![token(1.0, 1.1, 0.0, true); 198];
        tokens.push(token(1.0, 1.1, 2.0, false));
        tokens.push(token(1.0, 1.1, 5.0, false));
        let found = Quality::of(&tokens).unwrap();
        assert_eq!(found.tokens, 200);
        assert!((found.reference - 1f64.exp()).abs() < 1e-9);
        assert!((found.worse - 0.1f64.exp_m1()).abs() < 1e-9 && found.worse_error < 1e-9);
        assert!((found.divergence - 0.035).abs() < 1e-9);
        assert_eq!(found.divergence_p99, 0.0);
        assert_eq!(found.agreement, 0.99);
        assert_eq!(likeliest(&[1.0, 3.0, 3.0]), 1);
    }
}
