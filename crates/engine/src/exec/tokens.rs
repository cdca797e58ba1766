//! The tokens that a row of a step returned.

use crate::request::Token;
use std::ops::{Deref, DerefMut};

/// A log-probability, and those of the likeliest alternatives, best first.
pub type Scored = (f32, Vec<(Token, f32)>);

/// A token that a row returned.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: Token,
    /// Whether the device found it among the stop tokens.
    pub stopped: bool,
    /// When the seat asked for log-probabilities.
    pub logprob: Option<Box<Scored>>,
}

/// The tokens of a row, in order. Most rows return one, which is stored inline: a step of such rows allocates nothing
/// besides its list of rows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tokens(Inner);

#[derive(Clone, Debug, Default, PartialEq)]
enum Inner {
    #[default]
    None,
    One(Sampled),
    /// Two or more.
    More(Vec<Sampled>),
}

impl Tokens {
    /// One token about which nothing else is known.
    pub fn one(token: Token) -> Tokens {
        Sampled { token, ..Sampled::default() }.into()
    }

    /// Appends one.
    pub fn push(&mut self, next: Sampled) {
        self.0 = match std::mem::take(&mut self.0) {
            Inner::None => Inner::One(next),
            Inner::One(first) => Inner::More(vec![first, next]),
            Inner::More(mut list) => {
                list.push(next);
                Inner::More(list)
            }
        };
    }
}

impl From<Sampled> for Tokens {
    fn from(one: Sampled) -> Tokens {
        Tokens(Inner::One(one))
    }
}

impl FromIterator<Sampled> for Tokens {
    fn from_iter<I: IntoIterator<Item = Sampled>>(all: I) -> Tokens {
        let mut tokens = Tokens::default();
        all.into_iter().for_each(|next| tokens.push(next));
        tokens
    }
}

impl Deref for Tokens {
    type Target = [Sampled];

    fn deref(&self) -> &[Sampled] {
        match &self.0 {
            Inner::None => &[],
            Inner::One(one) => std::slice::from_ref(one),
            Inner::More(list) => list,
        }
    }
}

impl DerefMut for Tokens {
    fn deref_mut(&mut self) -> &mut [Sampled] {
        match &mut self.0 {
            Inner::None => &mut [],
            Inner::One(one) => std::slice::from_mut(one),
            Inner::More(list) => list,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_what_was_pushed_in_order() {
        for count in 0..6 {
            let mut list: Tokens =
                (0..count).map(|token| Sampled { token, ..Sampled::default() }).collect();
            let found: Vec<Token> = list.iter().map(|sampled| sampled.token).collect();
            assert_eq!(found, (0..count).collect::<Vec<_>>());
            list.iter_mut().for_each(|sampled| sampled.stopped = true);
            assert!(list.iter().all(|sampled| sampled.stopped));
        }
        assert_eq!(Tokens::one(7)[0].token, 7);
        // Three words: the size sets the cost of reading a step's rows.
        assert!(size_of::<Tokens>() <= 24);
    }
}
