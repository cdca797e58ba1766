//! Recording, replaying, and every refusal: one list, the same on every device.

use crate::devices;
use device::error::Forbidden;
use device::op::{Copy, Fill};
use device::{
    Arena, Device, Error, Item, Node, Op, OpenArena, RecordOptions, Recording, Region, Result, Span,
};

struct Fixture {
    device: Device,
    arena: Arena,
    words: Span,
    foreign: Span,
}

impl Fixture {
    fn new(device: &Device) -> Fixture {
        let mut open = OpenArena::new();
        let words = open.alloc(Region::State, "words", 64 * 4);
        let arena = device.seal(open).expect("a few bytes");
        let mut other = OpenArena::new();
        let foreign = other.alloc(Region::State, "words", 64 * 4);
        Fixture { device: device.clone(), arena, words, foreign }
    }

    fn record(&self) -> Recording {
        self.device.record(&self.arena, "graph", RecordOptions::default()).expect("idle")
    }

    fn word(&self, index: u64) -> Span {
        self.words.part(index * 4, 4)
    }

    fn set(&self, words: &[u32]) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let span = self.words.part(0, bytes.len() as u64);
        self.device.write(&self.arena, span, &bytes).expect("idle");
    }

    fn get(&self, count: u64) -> Vec<u32> {
        let bytes = self.device.read(&self.arena, self.words.part(0, count * 4)).expect("idle");
        bytes.chunks_exact(4).map(|w| u32::from_ne_bytes([w[0], w[1], w[2], w[3]])).collect()
    }
}

fn fill(to: Span, word: u32) -> Item {
    Item::Node(Node { op: Op::Fill(Fill { to, word }), name: "fill".into(), layer: Some(3) })
}

fn copy(from: Span, to: Span) -> Item {
    Item::Node(Node { op: Op::Copy(Copy { from, to }), name: "copy".into(), layer: None })
}

fn node(item: Item) -> Node {
    match item {
        Item::Node(node) => node,
        _ => unreachable!("made as a node"),
    }
}

fn while_recording(what: Forbidden) -> impl Fn(&Error) -> bool {
    move |error| matches!(error, Error::WhileRecording { what: found, .. } if *found == what)
}

type Attempt = fn(&Fixture) -> Result<()>;
type Expected = Box<dyn Fn(&Error) -> bool>;

/// What must be refused, how it is tried, and the expected error.
fn refusals() -> Vec<(&'static str, Attempt, Expected)> {
    vec![
        (
            "an allocation while recording",
            |f| {
                let _open = f.record();
                f.device.seal(OpenArena::new()).map(drop)
            },
            Box::new(while_recording(Forbidden::Allocation)),
        ),
        (
            "an allocation between segments",
            |f| {
                let mut recording = f.record();
                recording.pause()?;
                f.device.seal(OpenArena::new()).map(drop)
            },
            Box::new(while_recording(Forbidden::Allocation)),
        ),
        (
            "a host read while recording",
            |f| {
                let _open = f.record();
                f.device.read(&f.arena, f.words).map(drop)
            },
            Box::new(while_recording(Forbidden::HostRead)),
        ),
        (
            "a host write while recording",
            |f| {
                let _open = f.record();
                f.device.write(&f.arena, f.word(0), &[0; 4])
            },
            Box::new(while_recording(Forbidden::HostWrite)),
        ),
        (
            "a host sync while recording",
            |f| {
                let _open = f.record();
                f.device.sync()
            },
            Box::new(while_recording(Forbidden::HostSync)),
        ),
        (
            "an eager run while recording",
            |f| {
                let _open = f.record();
                f.device.run(&f.arena, &node(fill(f.word(0), 1)))
            },
            Box::new(while_recording(Forbidden::EagerRun)),
        ),
        (
            "a replay while recording",
            |f| {
                let mut recording = f.record();
                recording.push(fill(f.word(0), 1))?;
                let graph = recording.finish()?.remove(0);
                let _open = f.record();
                graph.replay()
            },
            Box::new(while_recording(Forbidden::Replay)),
        ),
        (
            "a recording inside a recording",
            |f| {
                let _open = f.record();
                f.device.record(&f.arena, "inner", RecordOptions::default()).map(drop)
            },
            Box::new(while_recording(Forbidden::NestedRecording)),
        ),
        (
            "a recording between the segments of another",
            |f| {
                let mut recording = f.record();
                recording.pause()?;
                f.device.record(&f.arena, "inner", RecordOptions::default()).map(drop)
            },
            Box::new(while_recording(Forbidden::NestedRecording)),
        ),
        (
            "an item between segments",
            |f| {
                let mut recording = f.record();
                recording.pause()?;
                recording.push(fill(f.word(0), 1))
            },
            Box::new(|error| matches!(error, Error::RecordingState { .. })),
        ),
        (
            "a break within a break",
            |f| {
                let mut recording = f.record();
                recording.pause()?;
                recording.pause()
            },
            Box::new(|error| matches!(error, Error::RecordingState { .. })),
        ),
        (
            "a resume without a break",
            |f| f.record().resume(),
            Box::new(|error| matches!(error, Error::RecordingState { .. })),
        ),
        (
            "a span past the end of its region",
            |f| {
                let outside = Span { offset: 1 << 20, ..f.word(0) };
                f.record().push(fill(outside, 1))
            },
            Box::new(|error| matches!(error, Error::OutsideArena { region: Region::State, .. })),
        ),
        (
            "a span whose end overflows",
            |f| {
                let outside = Span { offset: u64::MAX - 3, ..f.word(0) };
                f.record().push(fill(outside, 1))
            },
            Box::new(|error| matches!(error, Error::OutsideArena { .. })),
        ),
        (
            "a span of a region that is empty",
            |f| {
                let outside = Span { region: Region::Kv, ..f.word(0) };
                f.device.run(&f.arena, &node(fill(outside, 1)))
            },
            Box::new(|error| {
                matches!(error, Error::OutsideArena { region: Region::Kv, size: 0, .. })
            }),
        ),
        (
            "another arena's span in a recording",
            |f| f.record().push(fill(f.foreign, 1)),
            Box::new(|error| matches!(error, Error::ForeignSpan { .. })),
        ),
        (
            "another arena's span as a condition",
            |f| f.record().push(Item::If { cond: f.foreign, body: Vec::new() }),
            Box::new(|error| matches!(error, Error::ForeignSpan { .. })),
        ),
        (
            "another arena's span inside a body",
            |f| f.record().push(Item::While { cond: f.word(0), body: vec![fill(f.foreign, 1)] }),
            Box::new(|error| matches!(error, Error::ForeignSpan { .. })),
        ),
        (
            "another arena's span run eagerly",
            |f| f.device.run(&f.arena, &node(fill(f.foreign, 1))),
            Box::new(|error| matches!(error, Error::ForeignSpan { .. })),
        ),
        (
            "an op that breaks its contract",
            |f| f.record().push(copy(f.word(0), f.word(0))),
            Box::new(|error| matches!(error, Error::Contract { .. })),
        ),
        (
            "a graph whose arena is closed",
            |f| {
                let mut recording = f.record();
                recording.push(fill(f.word(0), 1))?;
                let graph = recording.finish()?.remove(0);
                f.arena.clone().close();
                graph.replay()
            },
            Box::new(|error| matches!(error, Error::Closed { .. })),
        ),
        (
            "a recording over a closed arena",
            |f| {
                f.arena.clone().close();
                f.device.record(&f.arena, "late", RecordOptions::default()).map(drop)
            },
            Box::new(|error| matches!(error, Error::Closed { .. })),
        ),
        (
            "an arena that another device sealed",
            |f| {
                let (second, _) = Device::open(device::DeviceChoice::Cpu)?;
                second.record(&f.arena, "stolen", RecordOptions::default()).map(drop)
            },
            Box::new(|error| matches!(error, Error::ForeignArena { .. })),
        ),
    ]
}

#[test]
fn the_same_mistakes_are_refused_on_every_device() {
    for device in devices::all() {
        for (what, attempt, expected) in refusals() {
            let fixture = Fixture::new(&device);
            let error = attempt(&fixture).expect_err(what);
            assert!(expected(&error), "{what} on {}: {error}", device.describe());
            // A refusal does not change the device: it can record again.
            assert!(fixture.device.sync().is_ok(), "{what} left a recording open");
        }
    }
}

#[test]
fn a_graph_replays_any_number_of_times_and_keeps_what_it_points_to() {
    for device in devices::all() {
        let f = Fixture::new(&device);
        let mut recording = f.record();
        for index in (0..8).rev() {
            recording.push(copy(f.word(index), f.word(index + 1))).expect("a good item");
        }
        let graph = recording.finish().expect("it records").remove(0);
        assert_eq!(graph.items().len(), 8);
        assert!(graph.device_nodes() >= 8, "{}", graph.device_nodes());
        assert_eq!(graph.name(), "graph#0");
        f.set(&[7, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        for rounds in 1..=8 {
            graph.replay().expect("it replays");
            let expected: Vec<u32> = (0..10).map(|i| if i <= rounds { 7 } else { 0 }).collect();
            assert_eq!(f.get(10), expected);
        }
        // The arena handle is dropped; the graph still holds the memory.
        let Fixture { device, arena, .. } = f;
        drop(arena);
        graph.replay().expect("the graph holds its arena");
        device.sync().expect("idle");
    }
}

#[test]
fn conditions_are_read_when_they_are_reached() {
    for device in devices::all() {
        let f = Fixture::new(&device);
        let mut recording = f.record();
        // Word 0 is the condition; the body of the first sets the condition of the second.
        recording
            .push(Item::If { cond: f.word(0), body: vec![fill(f.word(2), 5), fill(f.word(1), 1)] })
            .expect("a good item");
        recording
            .push(Item::If { cond: f.word(1), body: vec![fill(f.word(3), 6)] })
            .expect("a good item");
        recording.push(fill(f.word(4), 9)).expect("a good item");
        let graph = recording.finish().expect("it records").remove(0);
        f.set(&[0, 0, 0, 0, 0]);
        graph.replay().expect("it replays");
        assert_eq!(f.get(5), [0, 0, 0, 0, 9], "{}", device.describe());
        f.set(&[3, 0, 0, 0, 0]);
        graph.replay().expect("it replays");
        assert_eq!(f.get(5), [3, 1, 5, 6, 9], "{}", device.describe());
    }
}

#[test]
fn a_loop_runs_while_its_word_is_set() {
    for device in devices::all() {
        let f = Fixture::new(&device);
        // Words 0..8 hold the rounds to come in unary; words 8..16 count the rounds done in unary.
        let mut body: Vec<Item> = (0..7).map(|i| copy(f.word(i + 1), f.word(i))).collect();
        body.extend((8..15).rev().map(|i| copy(f.word(i), f.word(i + 1))));
        body.push(Item::If { cond: f.word(0), body: vec![fill(f.word(20), 4)] });
        let mut recording = f.record();
        recording.push(Item::While { cond: f.word(0), body }).expect("a good item");
        let graph = recording.finish().expect("it records").remove(0);
        for rounds in [0usize, 1, 2, 6] {
            let mut words = vec![0; 24];
            words[..rounds].fill(1);
            words[8] = 1;
            f.set(&words);
            graph.replay().expect("it replays");
            let after = f.get(24);
            let done = after[9..16].iter().filter(|word| **word == 1).count();
            assert_eq!(done, rounds, "{}", device.describe());
            assert_eq!(after[0], 0);
            assert_eq!(after[20], if rounds > 1 { 4 } else { 0 });
        }
    }
}

#[test]
fn segments_run_in_order_with_eager_work_between() {
    for device in devices::all() {
        let f = Fixture::new(&device);
        f.set(&[1, 0, 0, 0]);
        let mut recording = f.record();
        recording.push(copy(f.word(0), f.word(1))).expect("a good item");
        recording.pause().expect("recording");
        f.device.run(&f.arena, &node(fill(f.word(3), 8))).expect("a break runs eagerly");
        assert_eq!(f.get(4), [1, 0, 0, 8], "recording runs nothing");
        recording.resume().expect("broken");
        recording.push(copy(f.word(1), f.word(2))).expect("a good item");
        let graphs = recording.finish().expect("it records");
        assert_eq!(graphs.len(), 2);
        assert_eq!(graphs[1].name(), "graph#1");
        graphs[0].replay().expect("it replays");
        f.device.run(&f.arena, &node(fill(f.word(0), 4))).expect("idle");
        graphs[1].replay().expect("it replays");
        assert_eq!(f.get(4), [4, 1, 1, 8], "{}", device.describe());
    }
}

#[test]
fn a_dropped_recording_leaves_the_device_idle() {
    for device in devices::all() {
        let f = Fixture::new(&device);
        let mut recording = f.record();
        recording.push(fill(f.word(0), 1)).expect("a good item");
        drop(recording);
        f.device.sync().expect("idle again");
        assert_eq!(f.get(1), [0]);
        assert!(f.record().finish().expect("an empty recording").is_empty());
    }
}
