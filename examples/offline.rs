//! Many prompts, many answers, no server: the library without the binary.
//!
//!     cargo run --release --example offline -- $(cargo run --release -- pull smollm2)

use anyhow::{Context, Result};
use device::{Device, DeviceChoice};
use engine::Engine;
use engine::request::Sampling;
use formats::checkpoint::Checkpoint;
use formats::tokenizer::Tokenizer;
use model::{LoadOptions, ModelSource, load_executor};
use std::path::PathBuf;

fn main() -> Result<()> {
    let path = std::env::args_os().nth(1).map(PathBuf::from);
    let path = path.context("usage: offline MODEL (a folder, or a .gguf or .safetensors file)")?;
    let tokenizer = Tokenizer::of(&Checkpoint::open(&path)?)?;

    // The best device there is, with room for eight answers at a time.
    let (device, what) = Device::open(DeviceChoice::Auto)?;
    let options = LoadOptions { max_batch: 8, max_context: 512, ..LoadOptions::default() };
    let loaded = load_executor(&ModelSource::Checkpoint(path), &device, &options, &|_| {})?;
    eprintln!("{what}");

    let mut engine = Engine::builder(loaded.executor).eos(loaded.config.eos).build();
    let starts = ["The capital of France is", "Two plus two is", "Once upon a time"];
    let prompts: Vec<Vec<u32>> =
        starts.iter().map(|text| tokenizer.encode(text, true)).collect::<Result<_, _>>()?;
    let sampling = Sampling { max_tokens: 16, ..Sampling::default() };
    for (start, answer) in starts.iter().zip(engine.generate(&prompts, &sampling)) {
        let answer = answer?;
        println!("{start}|{}", tokenizer.decode(&answer.choices[0].tokens));
    }
    let stats = engine.stats();
    eprintln!("{} tokens in {} steps", stats.tokens, stats.prefill_steps + stats.decode_steps);
    Ok(())
}
