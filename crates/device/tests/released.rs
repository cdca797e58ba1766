//! Memory that is given back and brought back at the same addresses: what is refused meanwhile, what is kept, and that
//! graphs recorded before still run.

mod devices;

use device::graph::Node;
use device::op::{Copy, Op};
use device::{
    Arena, Device, DeviceKind, Error, Graph, Item, OpenArena, RecordOptions, Region, Span,
};

const BYTES: u64 = 4096;

/// A span in each region of device memory, with other bytes in each.
fn filled(device: &Device) -> (Arena, Vec<Span>) {
    let mut open = OpenArena::new();
    let regions = [Region::Weights, Region::State, Region::Workspace, Region::Kv];
    let spans: Vec<Span> = regions.map(|region| open.alloc(region, "bytes", BYTES)).to_vec();
    let arena = device.seal(open).expect("a few pages");
    for (index, span) in spans.iter().enumerate() {
        device.write(&arena, *span, &pattern(index)).expect("idle");
    }
    (arena, spans)
}

fn pattern(index: usize) -> Vec<u8> {
    (0..BYTES as usize).map(|at| (at * 7 + index * 31 + 1) as u8).collect()
}

/// Copies one span to another.
fn copies(device: &Device, arena: &Arena, from: Span, to: Span) -> Graph {
    let mut recording = device.record(arena, "copies", RecordOptions::default()).expect("idle");
    let node = Node { op: Op::Copy(Copy { from, to }), name: "copy".into(), layer: None };
    recording.push(Item::Node(node)).expect("a copy");
    recording.finish().expect("recorded").pop().expect("one segment")
}

#[test]
fn regions_are_kept_or_forgotten_and_graphs_stay() {
    for device in devices::all() {
        let (arena, spans) = filled(&device);
        let [weights, state, work, kv] = spans[..] else { unreachable!() };
        let graph = copies(&device, &arena, weights, state);
        for round in 0..100 {
            device.release(&arena, Region::Weights, true).expect("idle");
            device.release(&arena, Region::Kv, false).expect("idle");
            device.release(&arena, Region::Kv, false).expect("again, which changes nothing");
            let refused = |what: &str| Error::Released { what: what.into(), region: Region::Kv };
            assert_eq!(device.read(&arena, kv), Err(refused("read")));
            assert_eq!(device.write(&arena, kv, &pattern(0)), Err(refused("write")));
            assert_eq!(device.copy(&arena, kv, work), Err(refused("copy")));
            assert_eq!(device.read_apart(&arena, &[kv]), Err(refused("read")));
            let asleep = Error::Released { what: "copies#0".into(), region: Region::Weights };
            assert_eq!(graph.replay(), Err(asleep));
            assert!(arena.is_released(Region::Kv) && !arena.is_released(Region::State));
            assert!(device.read(&arena, state).is_ok(), "the other regions can be used");
            device.restore(&arena, Region::Kv).expect("a page");
            device.restore(&arena, Region::Weights).expect("a page");
            assert!(device.read(&arena, kv).expect("it is back").iter().all(|byte| *byte == 0));
            assert_eq!(device.read(&arena, weights).expect("it is back"), pattern(0), "kept");
            device.write(&arena, state, &pattern(5 + round)).expect("idle");
            device.write(&arena, kv, &pattern(3)).expect("idle");
            graph.replay().expect("recorded before");
            assert_eq!(device.read(&arena, state).expect("idle"), pattern(0), "round {round}");
        }
        // What was kept once is not found when it is forgotten the next time.
        device.release(&arena, Region::Weights, false).expect("idle");
        device.restore(&arena, Region::Weights).expect("a page");
        assert!(device.read(&arena, weights).expect("there").iter().all(|byte| *byte == 0));
    }
}

/// Bytes of this process that are in memory.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages: u64 = statm.split(' ').nth(1).and_then(|n| n.parse().ok()).expect("two numbers");
    pages * 4096
}

#[test]
fn the_system_gets_the_memory_back() {
    const LARGE: u64 = 256 << 20;
    for device in devices::all() {
        let mut open = OpenArena::new();
        let span = open.alloc(Region::Kv, "pages", LARGE);
        let arena = device.seal(open).expect("256 MiB");
        let on_host = device.kind() == DeviceKind::Cpu;
        let used = || match on_host {
            true => resident(),
            false => u64::MAX / 2 - device.memory_free().expect("it knows"),
        };
        let bytes = vec![1; LARGE as usize];
        let mut after_first = None;
        for _ in 0..20 {
            device.write(&arena, span, &bytes).expect("idle");
            let before = used();
            device.release(&arena, Region::Kv, false).expect("idle");
            let after = used();
            assert!(before > after + LARGE / 10 * 9, "{before} before, {after} after");
            let first = *after_first.get_or_insert(after);
            assert!(after < first + LARGE / 10, "{first} after the first time, {after} now");
            device.restore(&arena, Region::Kv).expect("it was there before");
        }
    }
}

#[test]
#[should_panic(expected = "host-mapped memory at any time")]
fn host_mapped_memory_stays() {
    let device = &devices::all()[0];
    let (arena, _) = filled(device);
    drop(device.release(&arena, Region::HostMapped, false));
}

#[test]
fn nothing_is_released_while_recording() {
    for device in devices::all() {
        let (arena, _) = filled(&device);
        let recording = device.record(&arena, "open", RecordOptions::default()).expect("idle");
        let refused = device.release(&arena, Region::Kv, false);
        assert!(matches!(refused, Err(Error::WhileRecording { .. })), "{refused:?}");
        drop(recording);
        device.release(&arena, Region::Kv, false).expect("idle");
    }
}
