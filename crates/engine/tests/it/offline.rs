use crate::echo::Echo;
use engine::Engine;
use engine::request::{Finish, Reject, Request, Sampling};

fn prompts(count: u32) -> Vec<Vec<u32>> {
    (0..count).map(|n| (0..3 + n % 5).map(|i| (n * 7 + i) % 100 + 1).collect()).collect()
}

#[test]
fn many_at_once_say_what_each_says_alone() {
    let sampling = Sampling { max_tokens: 20, ignore_eos: true, ..Sampling::default() };
    let prompts = prompts(40);
    let mut engine = Engine::builder(Echo::new(16, 400)).prefix_cache(false).build();
    let together = engine.generate(&prompts, &sampling);
    assert_eq!(together.len(), prompts.len());
    for (index, (prompt, answer)) in prompts.iter().zip(&together).enumerate() {
        let mut alone = Engine::builder(Echo::new(1, 70)).prefix_cache(false).build();
        let sampling = Sampling { seed: index as u64, ..sampling.clone() };
        let alone = alone.generate(std::slice::from_ref(prompt), &sampling);
        let tokens = |answer: &Result<engine::offline::Completion, Reject>| {
            answer.as_ref().unwrap().choices[0].tokens.clone()
        };
        assert_eq!(tokens(answer), tokens(&alone[0]), "prompt {index}");
        assert_eq!(answer.as_ref().unwrap().choices[0].finish, Some(Finish::Length));
    }
}

#[test]
fn a_refusal_keeps_its_place() {
    let sampling = Sampling { max_tokens: 2, ..Sampling::default() };
    let mut engine = Engine::builder(Echo::new(4, 100)).eos(vec![0]).build();
    let answers = engine.generate(&[vec![1, 2], vec![], vec![3]], &sampling);
    assert!(answers[0].is_ok() && answers[2].is_ok());
    assert_eq!(answers[1], Err(Reject::EmptyPrompt));
}

#[test]
fn stopping_early_leaves_nothing_behind() {
    let mut engine = Engine::builder(Echo::new(4, 100)).build();
    let requests = (0..50).map(|n| crate::echo::request(0, &[n + 1, 2, 3], 30));
    let mut heard = 0;
    engine.stream(requests, |_, _| {
        heard += 1;
        heard < 5
    });
    assert!(heard >= 5);
    assert!(engine.engine().is_idle());
    assert_eq!(engine.engine().pages().held, 0);
}

#[test]
fn enough_ends_a_choice_and_stops_computing_it() {
    let mut engine = Engine::builder(Echo::new(4, 100)).build();
    let two = Request { choices: 2, ..crate::echo::request(0, &[1, 2, 3], 100) };
    let one = crate::echo::request(0, &[9, 2, 3], 10);
    let (mut heard, mut answers) = (Vec::new(), Vec::new());
    engine.stream_until(
        [two, one],
        |index, choice, token| {
            heard.push((index, choice, token));
            let said = heard.iter().filter(|(i, c, _)| (*i, *c) == (index, choice)).count();
            index == 0 && said == 5 + 3 * choice as usize
        },
        |index, answer| {
            answers.push((index, answer.unwrap()));
            true
        },
    );
    answers.sort_by_key(|(index, _)| *index);
    let of = |index: usize, choice: usize| &answers[index].1.choices[choice];
    assert_eq!((of(0, 0).tokens.len(), of(0, 1).tokens.len()), (5, 8));
    assert!((0..2).all(|choice| of(0, choice).finish == Some(Finish::Stop(None))));
    assert_eq!((of(1, 0).tokens.len(), &of(1, 0).finish), (10, &Some(Finish::Length)));
    // No token is reported past the end, and far fewer steps ran than 100 tokens take.
    assert_eq!(heard.len(), 5 + 8 + 10);
    assert!(engine.stats().decode_steps < 20 && engine.engine().is_idle());
}
