//! A GPU whose kernel failed writes no result and runs nothing again: a waiting request soon gets the reason.
//! The GPU fails for the whole process, so the test runs in a process of its own.

use crate::models;
use device::{Device, DeviceChoice};
use engine::request::{Event, Finish, Output, Request, RequestId, Sampling};
use engine::{Engine, EngineConfig};
use model::{LoadOptions, ModelSource, load_executor};
use std::process::Command;

/// Set in the process that loses its GPU.
const CHILD: &str = "DACAPO_TEST_LOSES_ITS_GPU";

#[test]
fn a_gpu_that_failed_is_noticed() {
    if std::env::var_os(CHILD).is_some() {
        return lose_the_gpu();
    }
    if let Err(reason) = Device::open(DeviceChoice::Cuda(0)) {
        eprintln!("skipped: no GPU ({reason})");
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "gone::a_gpu_that_failed_is_noticed", "--nocapture"]).env(CHILD, "1");
    let output = child.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn lose_the_gpu() {
    let (gpu, _) = Device::open(DeviceChoice::Cuda(0)).unwrap();
    let source = ModelSource::Checkpoint(models::folder().join("qwen3"));
    let options = LoadOptions { max_batch: 4, max_context: 128, ..LoadOptions::default() };
    let executor = load_executor(&source, &gpu, &options, &|_| ()).unwrap().executor;
    let mut engine = Engine::new(executor, EngineConfig::default());
    let sampling = Sampling { max_tokens: 60, ..Sampling::default() };
    let submit = |id| {
        let request = Request::new(RequestId(id), [1, 2, 3], sampling.clone());
        Event::Submit(Box::new(request))
    };
    let mut ends = Vec::new();
    let mut events = vec![submit(1), submit(2)];
    for now in 1.. {
        if now == 8 {
            // Every page lies far outside of the GPU's memory.
            let runners = engine.executor().runners();
            let table = runners.bindings().state.page_table.span;
            let wrong = vec![0x7f; table.len as usize];
            runners.device().write(runners.arena(), table, &wrong).unwrap();
        }
        let outputs = engine.step_wait(now, std::mem::take(&mut events));
        ends.extend(outputs.into_iter().filter_map(|output| match output {
            Output::Finished { finish, .. } => Some(finish),
            _ => None,
        }));
        if engine.is_idle() {
            break;
        }
    }
    // Later requests fail at once.
    assert!(engine.gone().is_some_and(|why| why.contains("CUDA_ERROR")), "{:?}", engine.gone());
    for output in engine.step_wait(1_000_000, vec![submit(3)]) {
        let Output::Finished { finish, .. } = output else { panic!("{output:?}") };
        ends.push(finish);
    }
    assert_eq!(ends.len(), 3, "{ends:?}");
    for end in ends {
        assert!(matches!(&end, Finish::Failed(why) if why.contains("CUDA_ERROR")), "{end:?}");
    }
}
