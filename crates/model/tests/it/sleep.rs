//! A model that sleeps gives its memory back, and when it wakes up its graphs give the tokens they gave before.

use crate::answers;
use crate::models;
use answers::{
    Answers, BACKENDS, checkpoint, collect, copy_folder, engine_of, finish, options, recorded,
    request,
};
use engine::Engine;
use engine::exec::Executor;
use engine::request::{Event, Finish, Output};
use model::{GraphExecutor, KeepOptions, LoadOptions, ModelConfig, ModelSource, Parts, SleepError};

fn ask(engine: &mut Engine<GraphExecutor>) -> Answers {
    answers::answers(engine, (0..4).map(request).collect())
}

fn sleep(engine: &mut Engine<GraphExecutor>, keep: bool) {
    assert_eq!(engine.vacate(), []);
    engine.executor_mut().sleep(Parts::ALL, keep).unwrap();
    assert_eq!(engine.executor().asleep(), Parts::ALL);
}

fn wake(engine: &mut Engine<GraphExecutor>) {
    engine.executor_mut().wake(Parts::ALL, true).unwrap();
    assert_eq!(engine.executor().asleep(), Parts::NONE);
}

#[test]
fn answers_are_the_same_and_no_graph_is_recorded_again() {
    for device in models::devices() {
        for backend in BACKENDS {
            let mut engine = engine_of(&checkpoint("llama"), &device, &options(backend));
            let before = ask(&mut engine);
            let graphs = recorded(&engine);
            assert_eq!(graphs > 0, backend != "disabled");
            for keep in [true, false, true] {
                sleep(&mut engine, keep);
                assert_eq!(engine.executor().lacks_weights(), !keep);
                wake(&mut engine);
                assert_eq!(ask(&mut engine), before, "{backend}, weights kept: {keep}");
            }
            assert_eq!(recorded(&engine), graphs, "{backend}");
        }
    }
}

/// Weights from a seed, scales of pages, experts and several programs over the same weights.
#[test]
fn every_kind_of_weights_comes_back() {
    let dummy = ModelSource::Dummy {
        config: Box::new({
            let mut config = ModelConfig::bundled("qwen3-0.6b").unwrap();
            config.layers = 2;
            (config.hidden, config.intermediate, config.vocab) = (64, 128, 512);
            (config.q_heads, config.kv_heads, config.head_dim) = (2, 1, 32);
            config
        }),
        seed: 7,
    };
    let cases = ["gemma3", "qwen3-int4", "qwen3-moe", "phi3-long"].map(checkpoint);
    for source in cases.into_iter().chain([dummy]) {
        let mut engine = engine_of(&source, &models::cpu(), &options("full"));
        let before = ask(&mut engine);
        sleep(&mut engine, false);
        wake(&mut engine);
        assert_eq!(ask(&mut engine), before, "{source:?}");
    }
}

/// Requests that run when it falls asleep go on with the tokens they have.
#[test]
fn running_requests_go_on_after_the_sleep() {
    for device in models::devices() {
        for keep in [true, false] {
            let mut engine = engine_of(&checkpoint("llama"), &device, &options("full"));
            let expected = ask(&mut engine);
            let mut answers = Answers::new();
            let submit = |number| Event::Submit(Box::new(request(number)));
            let events = (0..4).map(submit).collect();
            let outputs = engine.step_wait(0, events);
            collect(outputs, &mut answers);
            assert!(engine.stats().running > 0);
            let outputs = engine.vacate();
            collect(outputs, &mut answers);
            assert!(answers.values().any(|tokens| (1..8).contains(&tokens.len())), "{answers:?}");
            engine.executor_mut().sleep(Parts::ALL, keep).unwrap();
            wake(&mut engine);
            finish(&mut engine, &mut answers);
            assert_eq!(answers, expected, "weights kept: {keep}");
        }
    }
}

/// What is refused while it sleeps: launches, and sleeping while a step runs.
#[test]
fn asleep_it_refuses_steps_and_busy_it_refuses_to_sleep() {
    let mut engine = engine_of(&checkpoint("llama"), &models::cpu(), &options("full"));
    sleep(&mut engine, true);
    let outputs = engine.step_wait(0, vec![Event::Submit(Box::new(request(1)))]);
    let mut ends = outputs;
    for _ in 0..100 {
        ends.extend(engine.step_wait(0, Vec::new()));
    }
    let refused = |output: &Output| matches!(output, Output::Finished { finish: Finish::Failed(why), .. } if why.contains("asleep"));
    assert!(ends.iter().any(refused), "{ends:?}");
    wake(&mut engine);
    engine.executor_mut().wake(Parts::ALL, true).unwrap();
    assert_eq!(ask(&mut engine).len(), 4);

    let step = engine::exec::Step {
        number: 1,
        rows: vec![engine::exec::Row::decode(engine::exec::Seat(0), 0)],
        ..Default::default()
    };
    engine.executor_mut().launch(&step).unwrap();
    let busy = engine.executor_mut().sleep(Parts::ALL, true);
    assert!(matches!(busy, Err(SleepError::Busy)), "{busy:?}");
}

/// Without reading them again, forgotten weights are missed; with the files gone, waking up is one error.
#[test]
fn forgotten_weights_are_missed_until_they_are_read() {
    let folder = tempfile::tempdir().unwrap();
    copy_folder(&models::folder().join("llama"), folder.path());
    let source = ModelSource::Checkpoint(folder.path().into());
    let mut engine = engine_of(&source, &models::cpu(), &options("full"));
    let before = ask(&mut engine);
    sleep(&mut engine, false);
    engine.executor_mut().wake(Parts::ALL, false).unwrap();
    assert!(engine.executor().lacks_weights());
    let refused = engine.executor_mut().launch(&engine::exec::Step::default()).unwrap_err();
    assert!(refused.to_string().contains("forgotten"), "{refused}");
    // A file that became shorter is found while it is read.
    let file = folder.path().join("model.safetensors");
    let whole = std::fs::read(&file).unwrap();
    std::fs::write(&file, &whole[..whole.len() / 2]).unwrap();
    let error = engine.executor_mut().wake(Parts::ALL, true).unwrap_err();
    assert!(error.to_string().starts_with("the weights cannot be read again"), "{error}");
    assert!(engine.executor().lacks_weights());
    std::fs::write(&file, &whole).unwrap();
    wake(&mut engine);
    assert_eq!(ask(&mut engine), before);
}

/// Pages in host memory are found after a sleep.
#[test]
fn kept_pages_outlive_the_sleep() {
    let keep = KeepOptions { host_bytes: Some(4 << 20), ..KeepOptions::default() };
    let options = LoadOptions { keep, ..options("full") };
    let mut engine = engine_of(&checkpoint("llama"), &models::cpu(), &options);
    let before = ask(&mut engine);
    sleep(&mut engine, true);
    assert!(engine.executor().store_uses()[0].saved > 0);
    assert_eq!(engine.pages().unread, 0, "nothing is cached on the device");
    wake(&mut engine);
    assert_eq!(ask(&mut engine), before);
    assert!(engine.stats().fetched_pages > 0);
}
