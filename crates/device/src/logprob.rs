//! Log-probabilities from logits. The sampler's and those of prompts come from here, so equal logits give equal bits. Sums are
//! in f64: a GPU, which adds in another order, differs by less than the rounding to f32.

/// The distribution of some logits.
#[derive(Clone, Copy, Debug)]
pub struct Distribution {
    temperature: f32,
    max: f64,
    log_total: f64,
}

impl Distribution {
    /// Of all logits.
    pub fn of(logits: &[f32]) -> Distribution {
        Distribution::at(1.0, logits.iter().copied())
    }

    /// Of the given ones, each divided by the temperature.
    pub(crate) fn at(temperature: f32, logits: impl Iterator<Item = f32> + Clone) -> Distribution {
        let scaled = logits.map(|logit| f64::from(logit / temperature));
        let max = scaled.clone().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scaled.map(|logit| (logit - max).exp()).sum();
        Distribution { temperature, max, log_total: total.ln() }
    }

    /// The log-probability of a token that has this logit.
    pub fn logprob(&self, logit: f32) -> f32 {
        (f64::from(logit / self.temperature) - self.max - self.log_total) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::Distribution;

    #[test]
    fn probabilities_add_up_to_one() {
        let logits = [0.0, 3.0, 1.0, -2.0, f32::NEG_INFINITY];
        for temperature in [1.0, 0.5, 2.0] {
            let all = Distribution::at(temperature, logits.iter().copied());
            let sum: f32 = logits.iter().map(|&logit| all.logprob(logit).exp()).sum();
            assert!((sum - 1.0).abs() < 1e-6);
            let ratio = all.logprob(3.0) - all.logprob(1.0);
            assert!((ratio - 2.0 / temperature).abs() < 1e-6);
        }
    }
}
