//! A model that sleeps and wakes up a hundred times takes no more memory. Alone in its process, whose memory is measured.

#![allow(dead_code, reason = "modules that other tests share")]

mod answers;
mod models;

use answers::{checkpoint, engine_of, options, request};
use device::{DeviceKind, Region};
use model::{LoadOptions, Parts};

/// Bytes of this process that are in memory.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// The system gets the memory, and 100 cycles take nothing more.
#[test]
fn a_hundred_cycles_leak_nothing() {
    for device in models::devices() {
        let options = LoadOptions { pages: Some(4097), ..options("full") };
        let mut engine = engine_of(&checkpoint("llama"), &device, &options);
        let before = answers::answers(&mut engine, (0..4).map(request).collect());
        let arena = engine.executor().runners().arena().clone();
        let kv = arena.size(Region::Kv);
        let page = engine.executor().runners().bindings().kv[0].span;
        let used = || match device.kind() {
            DeviceKind::Cpu => resident(),
            DeviceKind::Cuda => u64::MAX / 2 - device.memory_free().unwrap(),
        };
        let mut first = None;
        for cycle in 0..100 {
            // All pages are used.
            let all = page.part(0, page.len);
            device.write(&arena, all, &vec![1; all.len as usize]).unwrap();
            let awake = used();
            assert_eq!(engine.vacate(), []);
            engine.executor_mut().sleep(Parts::ALL, cycle % 2 == 0).unwrap();
            let asleep = used();
            assert!(awake > asleep + all.len / 2, "cycle {cycle}: {awake} awake, {asleep} asleep");
            let first = *first.get_or_insert(asleep);
            assert!(
                asleep < first + kv / 4 + (8 << 20),
                "cycle {cycle}: {first} at first, {asleep} now"
            );
            engine.executor_mut().wake(Parts::ALL, true).unwrap();
        }
        assert_eq!(answers::answers(&mut engine, (0..4).map(request).collect()), before);
    }
}
