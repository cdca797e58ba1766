//! Which buckets are worth their bytes. Given how often each size occurs and what a graph costs, the
//! list that wastes the least on padding under a byte budget is found exactly, by dynamic programming
//! over "the largest bucket so far" and "bytes spent so far".

use crate::Phase;
use serde::Serialize;
use std::collections::BTreeMap;

/// Bytes are counted in this many steps of the budget, rounded up: fine enough that a list is at most a
/// thousandth below the best, and never over the budget.
const STEPS: u64 = 1024;
/// Candidates beyond this are thinned out evenly: sizes that close together pad next to nothing.
const MAX_CANDIDATES: usize = 160;

/// A list of buckets and what it is worth.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tuned {
    /// The phase.
    pub phase: Phase,
    /// Ascending.
    pub buckets: Vec<u32>,
    /// Bytes of their graphs.
    pub bytes: u64,
    /// Live units in the trace.
    pub live: u64,
    /// Pad units this list would have run.
    pub padded: u64,
    /// Pad units the list in use would have run.
    pub padded_before: u64,
    /// Steps of the trace that no bucket of this list covers.
    pub uncovered: u64,
}

/// The best list for a histogram of sizes. `bytes_of` is what a graph of a size costs.
pub fn tune(
    phase: Phase,
    sizes: &BTreeMap<u32, u64>,
    in_use: &[u32],
    bytes_of: &dyn Fn(u32) -> u64,
    budget: u64,
) -> Tuned {
    let candidates: Vec<(u32, u64)> =
        thin(sizes.keys().copied().filter(|&size| size > 0).collect(), sizes)
            .into_iter()
            .map(|size| (size, bytes_of(size)))
            .collect();
    let buckets = within_budget(&candidates, sizes, budget);
    let (padded, uncovered) = padding(&buckets, sizes);
    Tuned {
        phase,
        bytes: buckets.iter().map(|&size| bytes_of(size)).sum(),
        live: sizes.iter().map(|(&size, &count)| u64::from(size) * count).sum(),
        padded,
        padded_before: padding(in_use, sizes).0,
        uncovered,
        buckets,
    }
}

/// Which of the candidates (bucket, bytes) to keep so that their bytes stay within the budget and the
/// sizes that occur waste the least. Coverage comes first: the largest that fits is always kept, since
/// a step past the last bucket replays nothing. Without a histogram every size is as likely as any.
pub(crate) fn within_budget(
    candidates: &[(u32, u64)],
    sizes: &BTreeMap<u32, u64>,
    budget: u64,
) -> Vec<u32> {
    let mut candidates = candidates.to_vec();
    candidates.sort_unstable();
    let Some(&(largest, _)) = candidates.last() else { return Vec::new() };
    if candidates.iter().map(|(_, bytes)| bytes).sum::<u64>() <= budget && sizes.is_empty() {
        return candidates.into_iter().map(|(bucket, _)| bucket).collect();
    }
    let even: BTreeMap<u32, u64> = (1..=largest).map(|size| (size, 1)).collect();
    let sizes = if sizes.is_empty() { &even } else { sizes };
    let sums = Sums::new(sizes);
    let unit = budget.div_ceil(STEPS).max(1);
    // best[j][q]: least padding of sizes up to candidate j, when it is kept and q units are spent.
    let most = (budget / unit) as usize;
    let mut best: Vec<Vec<Option<(u64, usize)>>> = Vec::with_capacity(candidates.len());
    for (j, &(bucket, bytes)) in candidates.iter().enumerate() {
        let cost = bytes.div_ceil(unit) as usize;
        let mut row = vec![None; most + 1];
        for (q, cell) in row.iter_mut().enumerate().skip(cost) {
            let mut least = (sums.padding(0, bucket), usize::MAX);
            for (i, &(smaller, _)) in candidates[..j].iter().enumerate() {
                if let Some((so_far, _)) = best[i][q - cost] {
                    let total = so_far + sums.padding(smaller, bucket);
                    if total < least.0 {
                        least = (total, i);
                    }
                }
            }
            *cell = Some(least);
        }
        best.push(row);
    }
    let end = (0..candidates.len()).rfind(|&j| best[j][most].is_some());
    let Some(mut j) = end else { return Vec::new() };
    let (mut kept, mut q) = (Vec::new(), most);
    loop {
        kept.push(candidates[j].0);
        let (_, previous) = best[j][q].expect("every state on the best path was reached");
        q -= candidates[j].1.div_ceil(unit) as usize;
        if previous == usize::MAX {
            kept.reverse();
            return kept;
        }
        j = previous;
    }
}

/// Pad units a list would have run, and steps it would not have covered.
pub fn padding(buckets: &[u32], sizes: &BTreeMap<u32, u64>) -> (u64, u64) {
    let (mut padded, mut uncovered) = (0, 0);
    for (&size, &count) in sizes {
        match buckets.iter().filter(|&&bucket| bucket >= size).min() {
            Some(&bucket) => padded += u64::from(bucket - size) * count,
            None => uncovered += count,
        }
    }
    (padded, uncovered)
}

/// Running sums of the histogram, so that the padding of a gap is a subtraction.
struct Sums {
    /// Ascending: size, steps up to it, units up to it.
    rows: Vec<(u32, u64, u64)>,
}

impl Sums {
    fn new(sizes: &BTreeMap<u32, u64>) -> Sums {
        let (mut steps, mut units) = (0, 0);
        let row = |(&size, &count): (&u32, &u64)| {
            steps += count;
            units += u64::from(size) * count;
            (size, steps, units)
        };
        Sums { rows: sizes.iter().map(row).collect() }
    }

    fn up_to(&self, size: u32) -> (u64, u64) {
        let index = self.rows.partition_point(|row| row.0 <= size);
        index.checked_sub(1).map_or((0, 0), |i| (self.rows[i].1, self.rows[i].2))
    }

    /// Pad units of the sizes in `from + 1 ..= to`, all run in bucket `to`.
    fn padding(&self, from: u32, to: u32) -> u64 {
        let ((steps_a, units_a), (steps_b, units_b)) = (self.up_to(from), self.up_to(to));
        (steps_b - steps_a) * u64::from(to) - (units_b - units_a)
    }
}

/// At most [`MAX_CANDIDATES`] of the sizes, the largest and the most frequent among them.
fn thin(all: Vec<u32>, sizes: &BTreeMap<u32, u64>) -> Vec<u32> {
    if all.len() <= MAX_CANDIDATES {
        return all;
    }
    let mut by_count = all.clone();
    by_count.sort_by_key(|size| (std::cmp::Reverse(sizes[size]), *size));
    let mut kept: Vec<u32> = by_count[..MAX_CANDIDATES / 2].to_vec();
    let every = all.len().div_ceil(MAX_CANDIDATES / 2);
    kept.extend(all.iter().rev().step_by(every));
    kept.sort_unstable();
    kept.dedup();
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn brute(candidates: &[(u32, u64)], sizes: &BTreeMap<u32, u64>, budget: u64) -> u64 {
        let largest = candidates.iter().filter(|c| c.1 <= budget).map(|c| c.0).max();
        let cost = |set: usize| {
            let kept = candidates.iter().enumerate().filter(|(i, _)| set >> i & 1 == 1);
            let (buckets, bytes): (Vec<u32>, Vec<u64>) = kept.map(|(_, &pair)| pair).unzip();
            let fits =
                bytes.iter().sum::<u64>() <= budget && buckets.iter().max().copied() == largest;
            fits.then(|| padding(&buckets, sizes).0)
        };
        (1..1usize << candidates.len()).filter_map(cost).min().unwrap_or(0)
    }

    proptest! {
        #[test]
        fn no_other_list_is_better(
            sizes in proptest::collection::btree_map(1u32..40, 1u64..100, 1..8),
            bytes in proptest::collection::vec(1u64..20, 8),
            budget in 20u64..100,
        ) {
            let candidates: Vec<_> = sizes.keys().copied().zip(bytes).collect();
            let kept = within_budget(&candidates, &sizes, budget);
            let spent: u64 = candidates.iter().filter(|c| kept.contains(&c.0)).map(|c| c.1).sum();
            prop_assert!(spent <= budget);
            prop_assert_eq!(padding(&kept, &sizes).0, brute(&candidates, &sizes, budget));
        }
    }

    #[test]
    fn tuning_to_traffic_saves_padding() {
        // Mostly 3 and 9 sequences, sometimes 17.
        let sizes: BTreeMap<u32, u64> = [(3, 1000), (9, 500), (17, 20)].into();
        let tuned = tune(Phase::Decode, &sizes, &[1, 2, 4, 8, 16, 24], &|_| 10, 30);
        assert_eq!((tuned.buckets, tuned.padded, tuned.uncovered), (vec![3, 9, 17], 0, 0));
        assert_eq!(tuned.padded_before, 1000 + 500 * 7 + 20 * 7);
        let two = tune(Phase::Decode, &sizes, &[], &|_| 10, 20);
        assert_eq!(two.buckets, [3, 17]);
        assert_eq!(tune(Phase::Decode, &sizes, &[], &|_| 10, 5).buckets, Vec::<u32>::new());
    }
}
