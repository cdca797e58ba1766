//! Which checkpoint tensors each weight of a program is made of, and the order of their rows.
//!
//! A program uses fewer, larger matrices than a checkpoint holds: q, k and v in one, gate and up
//! alternating row by row, all experts of a layer in one. These only rearrange rows, and a row is whole blocks, so
//! quantised weights are rearranged without conversion.

use device::DType;
use device::op::Pairs;
use device::target::WeightUse;
use std::ops::Range;

/// How the rows of the parts are arranged in the weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrange {
    /// All rows of the first part, then of the second, …
    Stacked,
    /// Groups of `parts` parts, one after the other, all parts with equally many rows: in a group, `rows` rows of its
    /// first part, as many of its second, …, then the next `rows` rows of its first.
    Turns {
        /// Parts of a group.
        parts: usize,
        /// Rows of a turn.
        rows: usize,
    },
}

impl Arrange {
    /// Gate and up: row 0 of the first, row 0 of the second, row 1 of the first, …
    pub(crate) const ALTERNATING: Arrange = Arrange::Turns { parts: 2, rows: 1 };
    /// Pairs of gate and up, in turns of eight rows: one pair for each expert.
    pub(crate) const PAIRS: Arrange = Arrange::Turns { parts: 2, rows: 8 };
    /// The same rows as [`Arrange::Stacked`], for many equal parts.
    pub(crate) const EQUAL: Arrange = Arrange::Turns { parts: 1, rows: 1 };
}

/// How a weight is divided between devices that compute one model together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Every device has all of it.
    Whole,
    /// Every device has some output features: an equal share of the rows of each part.
    Rows,
    /// Every device has some input features: an equal share of the columns. Their results are added.
    Cols,
}

/// One weight of a program.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightSpec {
    /// The program's name for it.
    pub name: String,
    /// The tensors it is made of; equally many rows of each if they take turns.
    pub parts: Vec<Part>,
    /// How they are put together.
    pub arrange: Arrange,
    /// Which columns of the tensors; vectors are one row.
    pub cols: Range<usize>,
    /// Columns of the tensors.
    pub tensor_cols: usize,
    /// What it is, which decides how it is stored.
    pub kind: WeightUse,
    /// How it is divided between devices.
    pub cut: Cut,
}

/// Rows of a checkpoint tensor as a part of a weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// The tensor's name in the checkpoint.
    pub tensor: String,
    /// Its rows (its elements, for a vector).
    pub rows: Range<usize>,
    /// All rows the tensor has.
    pub tensor_rows: usize,
    /// Matrices in the tensor, one after the other, if it has three dimensions: experts.
    pub stack: Option<usize>,
    /// For rows of heads that are rotated: the order they are wanted in.
    pub heads: Option<HeadRows>,
    /// Each run of so many stored rows has those of two matrices in turns, and `rows` counts those of the first matrix
    /// before those of the second: gate and up.
    pub woven: Option<usize>,
    /// The tensor has a column for each row: inputs before outputs.
    pub turned: bool,
    /// Added to every element of a vector: some checkpoints store a norm's weight less 1.
    pub add: f32,
    /// Multiplies every element of a vector then.
    pub factor: f32,
    /// The vector is stored as −exp of its elements: how fast a state decays.
    pub decay: bool,
}

/// The order of the rows of rotated heads: as stored, and as the program computes with.
///
/// Rotation turns pairs of elements. Most checkpoints pair element `i` of a head with `i + d/2`; some pair `2i` with
/// `2i + 1`, and some rotate only the first elements. Attention multiplies queries with keys element by element, so
/// their rows may be put into any order that is the same for both: the one in which the pairs of a full head are
/// `i` and `i + d/2`, with those that are not rotated behind the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadRows {
    /// Elements of a head.
    pub dim: usize,
    /// How many of them are rotated: the first ones.
    pub rotated: usize,
    /// How the checkpoint pairs them.
    pub stored: Pairs,
    /// How the program pairs them.
    pub wanted: Pairs,
}

impl HeadRows {
    /// The stored row that holds row `row` of the wanted order.
    pub(crate) fn stored_row(&self, row: usize) -> usize {
        let (head, within) = (row / self.dim, row % self.dim);
        let half = self.dim / 2;
        let (pair, second) = match self.wanted {
            Pairs::Halves => (within % half, within / half),
            Pairs::Neighbours => (within / 2, within % 2),
        };
        let turned = self.rotated / 2;
        let stored = match (pair < turned, self.stored) {
            (true, Pairs::Halves) => second * turned + pair,
            (true, Pairs::Neighbours) => 2 * pair + second,
            // Elements that are not rotated have no pairs; any fixed order will do.
            (false, _) => self.rotated + 2 * (pair - turned) + second,
        };
        head * self.dim + stored
    }
}

impl WeightSpec {
    /// Rows of the weight; 1 for vectors.
    pub fn rows(&self) -> usize {
        match self.kind {
            WeightUse::Vector => 1,
            _ => self.part_rows().sum(),
        }
    }

    /// Columns of the weight; a vector's elements.
    pub fn cols(&self) -> usize {
        match self.kind {
            WeightUse::Vector => self.part_rows().sum(),
            _ => self.cols.len(),
        }
    }

    fn part_rows(&self) -> impl Iterator<Item = usize> {
        self.parts.iter().map(|part| part.rows.len())
    }

    /// Where row `row` of the weight comes from: which part, and which stored row of its tensor. Takes the same time
    /// for any number of parts, except where parts of different lengths are stacked.
    pub fn source(&self, row: usize) -> (usize, usize) {
        let (index, within) = match self.arrange {
            Arrange::Turns { parts, rows } => {
                let group = parts * self.parts[0].rows.len();
                let (before, row) = (row / group * parts, row % group);
                let (round, row) = (row / (parts * rows), row % (parts * rows));
                (before + row / rows, round * rows + row % rows)
            }
            Arrange::Stacked => {
                let (mut within, mut index) = (row, 0);
                while within >= self.parts[index].rows.len() {
                    within -= self.parts[index].rows.len();
                    index += 1;
                }
                (index, within)
            }
        };
        (index, self.parts[index].stored_row(within))
    }

    /// The share of device `rank` of `ranks`; `None` if it cannot be divided so.
    pub fn shard(&self, rank: usize, ranks: usize, dtype: DType) -> Option<WeightSpec> {
        let share = |all: &Range<usize>, unit: usize| {
            let each = all.len() / ranks;
            let whole = each * ranks == all.len() && each.is_multiple_of(unit);
            whole.then(|| all.start + rank * each..all.start + (rank + 1) * each)
        };
        let turn = match self.arrange {
            Arrange::Turns { rows, .. } => rows,
            Arrange::Stacked => 1,
        };
        let mut shard = self.clone();
        match self.cut {
            Cut::Whole => {}
            Cut::Rows => {
                for part in &mut shard.parts {
                    // Whole heads: the rows of one are in another order. Whole turns, too.
                    let unit = part.heads.map_or(turn, |heads| heads.dim);
                    part.rows = share(&part.rows, unit)?;
                }
            }
            // Whole blocks: a row is stored in blocks.
            Cut::Cols => shard.cols = share(&self.cols, dtype.block_elems())?,
        }
        Some(shard)
    }
}

impl Part {
    /// The shape of its tensor, in a weight whose tensors have `cols` columns.
    pub(crate) fn tensor_shape(&self, kind: WeightUse, cols: usize) -> Vec<usize> {
        match (kind, self.stack) {
            (WeightUse::Vector, None) => vec![self.tensor_rows],
            (WeightUse::Vector, Some(stack)) => vec![stack, self.tensor_rows / stack],
            (_, Some(stack)) if self.turned => vec![stack, cols, self.tensor_rows / stack],
            (_, None) => vec![self.tensor_rows, cols],
            (_, Some(stack)) => vec![stack, self.tensor_rows / stack, cols],
        }
    }

    /// The element of a vector whose stored number is this.
    pub(crate) fn element(&self, stored: f32) -> f32 {
        let stored = if self.decay { (-stored).ln() } else { stored };
        (stored + self.add) * self.factor
    }

    /// Whether the elements of a vector are not those that are stored.
    pub(crate) fn changes(&self) -> bool {
        self.decay || (self.add, self.factor) != (0.0, 1.0)
    }

    /// The stored row that holds row `row` of the part.
    pub(crate) fn stored_row(&self, row: usize) -> usize {
        let row = self.rows.start + self.heads.map_or(row, |heads| heads.stored_row(row));
        let Some(all) = self.woven else { return row };
        let (before, within) = (row / all * all, row % all);
        before + within % (all / 2) * 2 + within / (all / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(tensor: &str, rows: usize) -> Part {
        Part {
            tensor: tensor.into(),
            rows: 0..rows,
            tensor_rows: rows,
            stack: None,
            heads: None,
            woven: None,
            turned: false,
            add: 0.0,
            factor: 1.0,
            decay: false,
        }
    }

    fn spec(parts: Vec<Part>, arrange: Arrange, cut: Cut) -> WeightSpec {
        let (name, kind) = ("w".to_owned(), WeightUse::Matrix);
        WeightSpec { name, parts, arrange, cols: 0..64, tensor_cols: 64, kind, cut }
    }

    #[test]
    fn rows_come_from_the_parts_in_the_stated_order() {
        let heads =
            HeadRows { dim: 8, rotated: 8, stored: Pairs::Neighbours, wanted: Pairs::Halves };
        let q = Part { heads: Some(heads), ..part("q", 16) };
        let qkv = spec(vec![q, part("k", 8), part("v", 8)], Arrange::Stacked, Cut::Rows);
        assert_eq!(qkv.rows(), 32);
        assert_eq!([qkv.source(0), qkv.source(1), qkv.source(4)], [(0, 0), (0, 2), (0, 1)]);
        assert_eq!([qkv.source(16), qkv.source(29)], [(1, 0), (2, 5)]);
        let gate_up = spec(vec![part("g", 4), part("u", 4)], Arrange::ALTERNATING, Cut::Rows);
        assert_eq!([0, 1, 2].map(|row| gate_up.source(row)), [(0, 0), (1, 0), (0, 1)]);
        // Two parts of one tensor, as joined projections are stored.
        let up = Part { rows: 4..8, tensor_rows: 8, ..part("gu", 0) };
        let joined =
            spec(vec![Part { rows: 0..4, ..up.clone() }, up], Arrange::ALTERNATING, Cut::Rows);
        assert_eq!([0, 1, 2].map(|row| joined.source(row)), [(0, 0), (1, 4), (0, 1)]);
    }

    /// Gate and up of experts, as own tensors and as parts of one, against the order written out.
    #[test]
    fn pairs_of_experts_take_turns_of_eight() {
        let (experts, inner) = (5, 24);
        let own =
            (0..experts).flat_map(|e| ["g", "u"].map(|which| part(&format!("{which}{e}"), inner)));
        let own = spec(own.collect(), Arrange::PAIRS, Cut::Rows);
        let rows = |which: usize, expert: usize| {
            let all = experts * 2 * inner;
            let from = (2 * expert + which) * inner;
            let stack = Some(experts);
            Part { rows: from..from + inner, tensor_rows: all, stack, ..part("both", 0) }
        };
        let joined = (0..experts).flat_map(|e| [rows(0, e), rows(1, e)]).collect();
        let joined = spec(joined, Arrange::PAIRS, Cut::Rows);
        let mut expected = Vec::new();
        for expert in 0..experts {
            for turn in 0..inner / 8 {
                for which in 0..2 {
                    expected.extend((0..8).map(|row| (2 * expert + which, 8 * turn + row)));
                }
            }
        }
        assert!((0..own.rows()).map(|row| own.source(row)).eq(expected.iter().copied()));
        let stored = expected.iter().map(|&(part, row)| (part, part * inner + row));
        assert!((0..joined.rows()).map(|row| joined.source(row)).eq(stored));
        assert_eq!(joined.parts[3].tensor_shape(WeightUse::Matrix, 64), [5, 48, 64]);
        let down: Vec<Part> = (0..experts).map(|e| part(&format!("d{e}"), 16)).collect();
        let equal = spec(down.clone(), Arrange::EQUAL, Cut::Cols);
        let stacked = spec(down, Arrange::Stacked, Cut::Cols);
        assert!((0..80).all(|row| equal.source(row) == stacked.source(row)));
        let second = own.shard(1, 3, DType::F32).unwrap();
        let turns = [second.source(0), second.source(8), second.source(16)];
        assert_eq!((second.rows(), turns), (80, [(0, 8), (1, 8), (2, 8)]));
        assert_eq!(own.shard(0, 2, DType::F32), None, "half a turn");
    }

    /// What a model computes: pair i of the stored head is turned by angle i, the rest not at all. In the wanted order
    /// the same pairs are i and i + d/2, and everything else is behind them.
    #[test]
    fn heads_keep_their_pairs_in_every_order() {
        for stored in [Pairs::Halves, Pairs::Neighbours] {
            for wanted in [Pairs::Halves, Pairs::Neighbours] {
                for (dim, rotated) in [(8, 8), (8, 4), (16, 12), (6, 2)] {
                    let heads = HeadRows { dim, rotated, stored, wanted };
                    let mut rows: Vec<usize> =
                        (0..3 * dim).map(|row| heads.stored_row(row)).collect();
                    for pair in 0..rotated / 2 {
                        let (a, b) = wanted.pair(pair, dim);
                        assert_eq!(
                            (rows[dim + a] - dim, rows[dim + b] - dim),
                            stored.pair(pair, rotated)
                        );
                    }
                    rows.sort_unstable();
                    assert!(rows.into_iter().eq(0..3 * dim), "a permutation");
                }
            }
        }
    }

    /// Rows of gate and up that a tensor of all experts has in turns, in its own order or turned.
    #[test]
    fn woven_rows_are_taken_apart() {
        let (experts, inner) = (3, 8);
        let rows = |which: usize, expert: usize| {
            let from = (2 * expert + which) * inner;
            let (woven, turned) = (Some(2 * inner), true);
            let all = 2 * experts * inner;
            let stack = Some(experts);
            let part = Part { rows: from..from + inner, tensor_rows: all, ..part("both", 0) };
            Part { stack, woven, turned, ..part }
        };
        let parts = (0..experts).flat_map(|e| [rows(0, e), rows(1, e)]).collect();
        let spec = spec(parts, Arrange::PAIRS, Cut::Rows);
        for row in 0..spec.rows() {
            let (expert, within) = (row / (2 * inner), row % (2 * inner));
            let stored = expert * 2 * inner + 2 * (within % inner) + within / inner;
            assert_eq!(spec.source(row), (2 * expert + within / inner, stored));
        }
        assert_eq!(spec.parts[0].tensor_shape(WeightUse::Experts, 64), [3, 64, 16]);
        let bias = spec.parts[0].tensor_shape(WeightUse::Vector, 48);
        assert_eq!(bias, [3, 16]);
    }

    #[test]
    fn shards_are_equal_shares() {
        let qkv = spec(vec![part("q", 16), part("k", 8)], Arrange::Stacked, Cut::Rows);
        let second = qkv.shard(1, 2, DType::F32).unwrap();
        assert_eq!((second.rows(), second.source(0), second.source(8)), (12, (0, 8), (1, 4)));
        assert_eq!(qkv.shard(0, 3, DType::F32), None, "16 rows are not three equal shares");
        let down = spec(vec![part("d", 16)], Arrange::Stacked, Cut::Cols);
        assert_eq!(down.shard(1, 2, DType::Q8_0).unwrap().cols, 32..64);
        assert_eq!(down.shard(1, 4, DType::Q8_0), None, "half a block");
        let norm = spec(vec![part("n", 16)], Arrange::Stacked, Cut::Whole);
        assert_eq!(norm.shard(1, 2, DType::F32).unwrap(), norm);
    }
}
