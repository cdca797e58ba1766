//! Programs whose layers have different KV caches.

use crate::world;
use device::{ALIGN, DType};
use fixtures::Sample;
use graph::backend::BackendKind;
use graph::layout::{Layout, pages_that_fit};
use graph::mail::{JoinInput, PageInput, SeatParams, StepInput};
use graph::program::{Cache, ModelShape, Pairs, Program, ProgramBuilder, ProgramError, WeightRef};
use graph::runner::Runners;
use world::{Place, limits};

fn shape() -> ModelShape {
    ModelShape { layers: 3, ..Sample::tiny().shape }
}

/// Three layers: four KV heads, one in bf16, and the shape's two.
fn caches() -> [Cache; 3] {
    let head_dim = shape().head_dim;
    let paged = |heads, dtype| Cache::Paged { heads, head_dim, dtype, window: None };
    [paged(4, DType::F32), paged(1, DType::BF16), shape().cache()]
}

fn mixed() -> Program {
    let s = shape();
    let matrix = |name: String, rows, cols| WeightRef::matrix(name, DType::F32, rows, cols);
    let norm = |name: String| WeightRef::vector(name, s.act_dtype, s.hidden);
    let mut b = ProgramBuilder::new("mixed", s);
    let rope = b.rope_table();
    let table = matrix("embed".into(), s.vocab, s.hidden);
    let given = b.input("patches", 4, s.hidden);
    let mut x = b.embed_or("embed", table, Some(given));
    for (l, cache) in (0..).zip(caches()) {
        x = b.layer(l, |b| {
            if cache != s.cache() {
                b.cache(cache);
            }
            let Cache::Paged { heads, head_dim, .. } = cache else { unreachable!() };
            let h = b.rms_norm("norm", x, norm(format!("{l}.norm")), 1e-6);
            let cols = (s.q_heads + 2 * heads) * head_dim;
            let qkv = b.linear("qkv", h, matrix(format!("{l}.qkv"), cols, s.hidden), None);
            let qkv = b.rope_kv("rope", qkv, None, None, rope, Pairs::Halves);
            let a = b.attention("attn", qkv, 0.35, None);
            let o = b.linear("o", a, matrix(format!("{l}.o"), s.hidden, s.q_cols()), None);
            b.add("out", x, o)
        });
    }
    let last = b.gather_last("last", x);
    let h = b.rms_norm("norm", last, norm("norm".into()), 1e-6);
    let logits = b.logits("head", h, matrix("head".into(), s.vocab, s.hidden));
    b.sample("sample", logits);
    b.finish().unwrap()
}

#[test]
fn each_cache_is_laid_out_by_its_own_bytes() {
    let program = mixed();
    assert_eq!(program.caches, caches());
    assert_eq!(Program::from_json(&program.to_json()).unwrap(), program);
    // Keys and values of 8 elements: 4 heads of f32, 1 of bf16, 2 of f32.
    let bytes: Vec<u64> = program.caches.iter().map(Cache::token_bytes).collect();
    assert_eq!(bytes, [256, 32, 128]);

    let limits = limits(&program);
    let place = Place::cpu();
    let mut layout = Layout::new(&program, &place.target, limits, &[]).unwrap();
    layout.add_pages(&program, 10);
    for (kv, bytes) in layout.bindings.kv.iter().zip(&bytes) {
        assert_eq!((kv.pages, kv.page_bytes()), (10, bytes * u64::from(limits.page_size)));
        assert_eq!(kv.span.len, 10 * kv.page_bytes());
    }
    for pages in [1, 2, 3, 10, 1000, 12_345] {
        let aligned = |bytes: &u64| (bytes * 4 * u64::from(pages)).next_multiple_of(ALIGN);
        let all: u64 = bytes.iter().map(aligned).sum();
        assert_eq!(pages_that_fit(&program, 4, all), pages);
        assert!(pages_that_fit(&program, 4, all - 1) < pages);
    }
}

/// The answer to a prompt that is fed in chunks; before the last one the pages move to others.
fn answer(runners: &mut Runners, chunks: &[&[u32]], moved: bool) -> Vec<u32> {
    let mut tokens = Vec::new();
    for (index, chunk) in chunks.iter().enumerate() {
        let mut input = StepInput::default();
        input.add(0, chunk, true);
        if index == 0 {
            let params = SeatParams::greedy();
            let (seat, len, last_token, seen) = (0, 0, 0, Vec::new());
            input.joins.push(JoinInput {
                seat,
                len,
                last_token,
                params,
                seen,
                history: Vec::new(),
            });
            input.pages.extend((0..4).map(|index| PageInput { seat, index, page: 3 + index }));
        } else if moved {
            input.copies = (0..4).map(|index| (3 + index, 20 + index)).collect();
            let page = |index| PageInput { seat: 0, index, page: 20 + index };
            input.pages.extend((0..4).map(page));
        }
        runners.launch(&input).unwrap();
        tokens = vec![runners.wait().unwrap().unwrap().row(0)[0].token];
    }
    for _ in 0..6 {
        runners.launch(&StepInput::decode([0])).unwrap();
        tokens.push(runners.wait().unwrap().unwrap().row(0)[0].token);
    }
    tokens
}

#[test]
fn layers_with_different_caches_run_together() {
    for place in Place::all() {
        let world = place.world(&mixed());
        let mut runners = world.runners(&place.target, BackendKind::Full, ("1,4", "16"));
        let prompt = [5, 60, 2, 33, 33, 8, 1, 19, 40];
        let whole = answer(&mut runners, &[&prompt], false);
        let (first, rest) = prompt.split_at(4);
        assert_eq!(answer(&mut runners, &[first, rest], false), whole);
        // A page has one number in all caches: copying it copies each cache's bytes.
        assert_eq!(answer(&mut runners, &[first, rest], true), whole);
        assert!(
            whole.iter().any(|token| *token != whole[0]),
            "the answer shows nothing: {whole:?}"
        );
    }
}

#[test]
fn what_is_wrong_with_caches_is_said() {
    let mut b = ProgramBuilder::new("twice", shape());
    b.layer(1, |b| {
        b.cache(shape().cache());
        b.cache(shape().cache());
    });
    assert_eq!(b.finish(), Err(ProgramError::CacheTwice { layer: 1 }));
    let mut missing = mixed();
    missing.caches.pop();
    let error = missing.check().unwrap_err().to_string();
    assert_eq!(error, "step `2.rope`: there is no cache 2");
}

/// Layers that keep everything and layers with a window share memory at the same places, in tables of their own.
#[test]
fn windows_have_tables_of_their_own() {
    let mut program = mixed();
    let paged = |heads, window| Cache::Paged { heads, head_dim: 8, dtype: DType::F32, window };
    let kept = |program: &Program| {
        let kept = program.kept();
        let tables: Vec<u32> = (0..3).map(|cache| kept.table(cache)).collect();
        (kept.full, kept.windowed, kept.window, kept.places, tables)
    };
    assert_eq!(kept(&program), (1, 0, 0, 3, vec![0, 0, 0]));
    program.caches = [Some(5), None, Some(7)].map(|window| paged(2, window)).to_vec();
    assert_eq!(kept(&program), (1, 2, 7, 1, vec![1, 0, 2]));
    let bytes = program.caches[0].token_bytes() * 4;
    assert_eq!(pages_that_fit(&program, 4, bytes.next_multiple_of(ALIGN)), 1);
    program.caches = [None, None, Some(7)].map(|window| paged(2, window)).to_vec();
    assert_eq!(kept(&program), (2, 1, 7, 1, vec![0, 1, 2]));
    // Windows alone need one table, whatever they are; caches of different sizes cannot take turns.
    program.caches = vec![paged(2, Some(5)), paged(1, Some(6)), paged(2, Some(5))];
    assert_eq!(kept(&program), (0, 1, 6, 3, vec![0, 0, 0]));
    program.caches[1] = paged(1, None);
    assert_eq!(kept(&program), (1, 0, 0, 3, vec![0, 0, 0]));
    program.keep_all();
    assert!(program.caches.iter().all(|cache| cache.window().is_none()));
}
