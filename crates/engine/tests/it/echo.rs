//! A device in a few lines: it remembers what each seat was fed and answers with a hash of it.

use engine::exec::{
    Coverage, ExecError, Executor, Geometry, Kept, RowResult, Sampled, Seat, SeatParams, Step,
    StepResult,
};
use engine::request::{Request, RequestId, Sampling, Token};
use std::collections::{BTreeMap, VecDeque};

/// Tokens of its vocabulary; 0 is the end of text.
pub(crate) const VOCAB: u32 = 128;

pub(crate) struct Echo {
    geometry: Geometry,
    prefill: (u32, u32),
    tokens: u32,
    seats: BTreeMap<Seat, (Vec<Token>, Token, SeatParams)>,
    results: VecDeque<StepResult>,
    /// Every step launched.
    pub(crate) steps: Vec<Step>,
    /// Prefixes that seats with cached pages start from are not in the rows: tests give them here.
    pub(crate) known: Vec<Vec<Token>>,
}

impl Echo {
    pub(crate) fn new(seats: u32, pages: u32) -> Self {
        let geometry = Geometry {
            seats,
            pages,
            page_size: 4,
            pages_per_seat: 64,
            vocab: VOCAB,
            kept: Kept::ALL,
        };
        Self {
            geometry,
            prefill: (64, 8),
            tokens: 1,
            seats: BTreeMap::new(),
            results: VecDeque::new(),
            steps: Vec::new(),
            known: Vec::new(),
        }
    }

    /// With room for prompts beside all seats.
    pub(crate) fn wide(self) -> Self {
        Self { prefill: (1024, self.geometry.seats), ..self }
    }

    /// With decode rows that return up to so many tokens, and sometimes none.
    pub(crate) fn several(self, tokens: u32) -> Self {
        Self { tokens, ..self }
    }

    /// The token after these, the largest hash that is allowed.
    pub(crate) fn next(tokens: &[Token], params: &SeatParams, mask: Option<&[u32]>) -> Token {
        let hash = tokens.iter().fold(params.seed.wrapping_mul(31), |hash, &token| {
            (hash ^ u64::from(token)).wrapping_mul(0x0100_0000_01b3).rotate_left(17)
        });
        let first = (hash % u64::from(VOCAB)) as u32;
        let allowed = |&token: &Token| {
            let early =
                params.stop_tokens.contains(&token) && (tokens.len() as u32) < params.min_len;
            !early && mask.is_none_or(|mask| mask[token as usize / 32] >> (token % 32) & 1 == 1)
        };
        (0..VOCAB).map(|step| (first + step) % VOCAB).find(allowed).unwrap_or(0)
    }
}

impl Executor for Echo {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn coverage(&self) -> Coverage {
        let (prefill_tokens, prefill_rows) = self.prefill;
        Coverage { decode_rows: self.geometry.seats, prefill_tokens, prefill_rows }
    }

    fn tokens_per_row(&self) -> u32 {
        self.tokens
    }

    fn launch(&mut self, step: &Step) -> Result<(), ExecError> {
        for join in &step.joins {
            let len = join.len as usize;
            let known = self.known.iter().find(|known| known.len() >= len);
            let tokens = known.map_or_else(|| vec![0; len], |known| known[..len].to_vec());
            self.seats.insert(join.seat, (tokens, join.last_token, join.params.clone()));
        }
        let mut rows = Vec::new();
        for (index, row) in step.rows.iter().enumerate() {
            let (tokens, last, params) = self.seats.get_mut(&row.seat).expect("it joined");
            let decode = row.tokens().is_empty();
            let mask = step.masks.iter().find(|(at, _)| *at as usize == index);
            let joins = step.joins.iter().any(|join| join.seat == row.seat);
            let turn = step.number as u32 + row.seat.0;
            let count = match self.tokens {
                1 => 1,
                _ if joins || !decode => 1,
                _ => turn % (row.most + 1),
            };
            let mut result = RowResult::default();
            if !row.sample {
                tokens.extend(row.tokens());
            }
            for _ in 0..if row.sample { count } else { 0 } {
                match decode {
                    true => tokens.push(*last),
                    false => tokens.extend(row.tokens()),
                }
                *last = Self::next(tokens, params, mask.map(|(_, mask)| &mask[..]));
                let stopped = params.stop_tokens.contains(last);
                result.tokens.push(Sampled { token: *last, stopped, logprob: None });
            }
            rows.push(result);
        }
        self.steps.push(step.clone());
        self.results.push_back(StepResult {
            number: step.number,
            more_follow: false,
            rows,
            took: None,
        });
        Ok(())
    }

    fn poll(&mut self, _: bool) -> Result<Option<StepResult>, ExecError> {
        Ok(self.results.pop_front())
    }
}

pub(crate) fn request(id: u64, prompt: &[Token], max_tokens: u32) -> Request {
    let sampling = Sampling { max_tokens, ignore_eos: true, ..Sampling::default() };
    Request::new(RequestId(id), prompt, sampling)
}
