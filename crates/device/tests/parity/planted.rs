//! Bugs of a layer of experts, planted between the router and its experts; the comparison that the tests of experts make
//! must find each of them, on every device, for any token and any of its experts.

use crate::support::*;
use device::op::{Activation, Experts, Fill, Route, Routing};
use device::variant::Pick;
use device::{DType, Op, Span, Tensor};

const EXPERTS: usize = 16;
const TOP: usize = 4;
const WIDE: usize = 256;
const INNER: usize = 64;

/// What goes wrong, for assignment `place` of token `row` where it is one assignment.
#[derive(Clone, Copy, Debug)]
enum Plant {
    /// The token goes to an expert that was not chosen.
    WrongExpert { row: usize, place: usize },
    /// The assignment is not computed.
    Dropped { row: usize, place: usize },
    /// The weight is applied before the sum and in it.
    WeightTwice { row: usize, place: usize },
    /// Experts run by the list of the step before.
    StaleList,
}

/// A step and the step before it, which has other tokens.
struct Steps {
    rows: usize,
    live: usize,
    act: DType,
}

impl Steps {
    /// The ops, then the spans of the result and of the router's choice. A planted bug that changes a choice is given the
    /// choice as it should be.
    fn build(&self, layout: &mut Layout, plant: Option<(Plant, &[u32])>) -> (Vec<Op>, Vec<Span>) {
        let (rng, act, rows) = (&mut Rng::new(700), self.act, self.rows);
        let mut matrix = |layout: &mut Layout, n: usize, k: usize, scale: f32| {
            layout.floats(act, n, k, 0, &rng.floats(n * k, scale / (k as f32).sqrt()))
        };
        // A token's weights are between about 0.1 and 0.6.
        let w = matrix(layout, EXPERTS, WIDE, 4.0);
        let gate_up = matrix(layout, EXPERTS * 2 * INNER, WIDE, 2.0);
        let down = matrix(layout, EXPERTS * WIDE, INNER, 2.0);
        let live = Some(layout.words(&[self.live as u32]).span);
        let routing = Routing { renormalise: true, ..Routing::softmax(TOP as u32) };
        let (mut ops, mut made, mut lists) = (Vec::new(), Vec::new(), Vec::new());
        for step in 0..2 {
            let x = matrix(layout, rows, WIDE, 16.0);
            let choice = layout.poison(DType::F32, rows, 2 * TOP, 0);
            let choice = Tensor { dtype: DType::U32, ..choice };
            let y = layout.poison(act, rows, WIDE, 0);
            lists.push(choice);
            let (bias, plans, scratch, pick) = (None, None, None, Pick::Best);
            let route =
                Route { x, w, bias, routing, y: choice, live, plans, load: None, scratch, pick };
            ops.push(Op::Route(route));
            let mut read = choice;
            if let (1, Some((plant, right))) = (step, plant) {
                match plant.fill(&choice, right) {
                    Some(fill) => ops.push(Op::Fill(fill)),
                    None => read = lists[0],
                }
            }
            ops.push(Op::Experts(Experts {
                x,
                choice: read,
                experts: EXPERTS as u32,
                gate_up,
                down,
                gate_up_bias: None,
                down_bias: None,
                act: Activation::Silu,
                clamp: None,
                residual: None,
                y,
                live,
                load: None,
                scratch,
                planned: false,
                pick: Pick::Best,
            }));
            made = vec![y.span, choice.span];
        }
        (ops, made)
    }
}

impl Plant {
    /// The word of a choice that is overwritten after the router.
    fn fill(self, choice: &Tensor, right: &[u32]) -> Option<Fill> {
        let (row, place, of_weight) = match self {
            Plant::WrongExpert { row, place } => (row, place, false),
            Plant::Dropped { row, place } | Plant::WeightTwice { row, place } => (row, place, true),
            Plant::StaleList => return None,
        };
        let ids = &right[row * 2 * TOP..][..TOP];
        let weight = f32::from_bits(right[row * 2 * TOP + TOP + place]);
        let word = match self {
            Plant::WrongExpert { .. } => {
                (0..EXPERTS as u32).find(|id| !ids.contains(id)).expect("more experts than chosen")
            }
            Plant::WeightTwice { .. } => (weight * weight).to_bits(),
            Plant::Dropped { .. } | Plant::StaleList => 0,
        };
        let at = row * 2 * TOP + place + if of_weight { TOP } else { 0 };
        Some(Fill { to: choice.span.part(4 * at as u64, 4), word })
    }
}

#[test]
fn planted_bugs_of_experts_are_found() {
    let reference = device::cpu::open(None, true).unwrap();
    for (rows, act) in [(1, DType::F32), (9, DType::F32), (9, DType::BF16), (40, DType::BF16)] {
        let live = rows - usize::from(rows > 1);
        let steps = Steps { rows, live, act };
        let want = run(&reference, &|layout| steps.build(layout, None));
        let right = bytes_to_words(&want[1]);
        let places = [(0, 0), (0, TOP - 1), (live - 1, 1), (live / 2, TOP - 1)];
        let mut plants = vec![Plant::StaleList];
        for (row, place) in places {
            plants.push(Plant::WrongExpert { row, place });
            plants.push(Plant::Dropped { row, place });
            plants.push(Plant::WeightTwice { row, place });
        }
        let len = act.bytes(live * WIDE);
        for (name, device) in devices() {
            let compare = |plant| {
                let got = run(&device, &|layout| steps.build(layout, plant));
                // As in the tests of experts.
                row_difference(act, TOP as f32, WIDE, &want[0][..len], &got[0][..len])
            };
            assert_eq!(compare(None), None, "{name}, {rows} rows");
            for &plant in &plants {
                let found = compare(Some((plant, &right)));
                assert!(found.is_some(), "{name}, {rows} rows: {plant:?} was not found");
            }
        }
    }
}
