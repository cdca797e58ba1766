//! Layout, exact sizes, zeroed memory, and copies in and out.

use crate::devices;
use device::{ALIGN, DeviceKind, Error, OpenArena, Region};
use proptest::prelude::*;

proptest! {
    #[test]
    fn spans_are_aligned_apart_and_counted(
        asks in proptest::collection::vec((0usize..5, 0u64..5000), 1..60)
    ) {
        let mut open = OpenArena::new();
        let spans: Vec<_> = asks
            .iter()
            .map(|(region, bytes)| open.alloc(Region::ALL[*region], &format!("{region}"), *bytes))
            .collect();
        for (index, span) in spans.iter().enumerate() {
            prop_assert_eq!(span.offset % ALIGN, 0);
            prop_assert_eq!(span.len, asks[index].1);
            prop_assert!(span.end() <= open.size(span.region));
            for other in &spans[..index] {
                prop_assert!(!span.overlaps(*other));
            }
        }
        let report = open.report();
        for region in Region::ALL {
            prop_assert_eq!(report.region(region), open.size(region));
        }
        let device: u64 = Region::ALL.iter().filter(|r| **r != Region::HostMapped).map(|r| open.size(*r)).sum();
        prop_assert_eq!(report.device_total(), device);
    }
}

#[test]
fn a_layout_of_seventy_gigabytes_takes_no_memory() {
    let mut open = OpenArena::new();
    let span = open.alloc(Region::Weights, "model", 70 << 30);
    assert_eq!(span.len, 70 << 30);
    assert_eq!(open.size(Region::Weights), 70 << 30);
}

#[test]
fn sealed_memory_is_zero_and_holds_what_is_written() {
    for device in devices::all() {
        let mut open = OpenArena::new();
        // Larger than the chunks that bytes are copied in, and not a multiple of them.
        let sizes = [(20 << 20) + 1234, 4096, 999, 70_000, 5000];
        let spans: Vec<_> = Region::ALL
            .iter()
            .zip(sizes)
            .map(|(region, bytes)| open.alloc(*region, "bytes", bytes))
            .collect();
        let arena = device.seal(open).expect("24 MiB");
        for span in &spans {
            assert!(device.read(&arena, *span).expect("idle").iter().all(|byte| *byte == 0));
        }
        for (index, span) in spans.iter().enumerate() {
            let bytes: Vec<u8> = (0..span.len)
                .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8 ^ index as u8)
                .collect();
            device.write(&arena, *span, &bytes).expect("idle");
            assert!(device.read(&arena, *span).expect("idle") == bytes, "{:?}", span.region);
            let part = span.part(span.len / 3, span.len / 2);
            let (from, to) = ((span.len / 3) as usize, (span.len / 3 + span.len / 2) as usize);
            assert!(device.read(&arena, part).expect("idle") == bytes[from..to]);
        }
        let report = arena.report().clone();
        assert_eq!(report.region(Region::Weights), arena.size(Region::Weights));
        let closed = arena.close();
        assert_eq!(closed.report, report);
    }
}

#[test]
fn many_spans_travel_together() {
    for device in devices::all() {
        let mut open = OpenArena::new();
        // Together larger than the chunks that bytes are copied in; spans and chunks end at different places.
        let mut spans: Vec<_> = (0..600)
            .map(|i| open.alloc(Region::ALL[i % 5], "bytes", (i as u64 * 7919) % 80_021 + 1))
            .collect();
        spans.extend((0..3).map(|_| open.alloc(Region::Kv, "long", (9 << 20) + 77)));
        spans.push(spans[3].part(0, 0));
        spans.reverse();
        let arena = device.seal(open).expect("60 MiB");
        let total: u64 = spans.iter().map(|span| span.len).sum();
        let bytes: Vec<u8> =
            (0..total).map(|i| (i.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
        device.write_all(&arena, &spans, &bytes).expect("idle");
        let mut rest = &bytes[..];
        for span in &spans {
            let (these, others) = rest.split_at(span.len as usize);
            assert!(device.read(&arena, *span).expect("idle") == these, "{span:?}");
            rest = others;
        }
        assert!(device.read_all(&arena, &spans).expect("idle") == bytes);
    }
}

#[test]
fn more_than_there_is_is_refused_with_the_numbers() {
    for device in devices::all() {
        let free = device.memory_free().expect("it knows");
        let mut open = OpenArena::new();
        open.alloc(Region::Kv, "pages", free + (64 << 30));
        match device.seal(open) {
            Err(Error::OutOfMemory { region: Region::Kv, needed, available }) => {
                assert!(needed > available, "{needed} {available}");
            }
            other => panic!("{}: {other:?}", device.describe()),
        }
        // The refused arena leaves nothing allocated. (Other programs change the CPU's figure.)
        let after = device.memory_free().expect("it knows");
        let other_programs = device.kind() == DeviceKind::Cpu;
        assert!(other_programs || after + (1 << 30) > free, "{after} of {free} left");
    }
}
