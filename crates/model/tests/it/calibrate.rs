//! Checkpoints that are quantised by what reaches their matrices.

use crate::models;
use formats::checkpoint::Checkpoint;
use model::{ModelConfig, Quantise, QuantiseError, QuantiseOptions, Quantiser, Task, Texts};
use std::ops::ControlFlow;
use std::path::Path;

const LENGTH: usize = 24;

fn options(format: Quantise) -> QuantiseOptions {
    QuantiseOptions { format, group: 32, threads: Some(2), shard_bytes: None }
}

/// Texts of tokens that follow each other in no order.
fn texts(vocab: usize, count: usize) -> Texts {
    let token = |at: usize| ((at * 7919 + at * at * 31) % vocab) as u32;
    let tokens: Vec<u32> = (0..count * LENGTH).map(token).collect();
    Texts::cut(&tokens, &[], LENGTH, count).unwrap()
}

fn vocab(model: &Path) -> Option<usize> {
    let config = ModelConfig::of(&Checkpoint::open(model).unwrap()).unwrap();
    (config.task == Task::Generate).then_some(config.vocab)
}

/// Calibrated and rounded matrices.
fn quantise(
    from: &Path,
    to: &Path,
    format: Quantise,
    texts: &Texts,
) -> Result<[usize; 2], QuantiseError> {
    let quantiser = Quantiser::open(from, options(format))?;
    quantiser.write(to, Some((&models::cpu(), texts)), &|_| ControlFlow::Continue(()))
}

fn bytes(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let read = |info: &formats::checkpoint::TensorInfo| {
        let mut bytes = vec![0; info.bytes];
        checkpoint.read_into(&info.name, &mut bytes).unwrap();
        (info.name.clone(), bytes)
    };
    checkpoint.tensors().map(read).collect()
}

/// Every family that generates text: all matrices of linears are calibrated, the others are what they are without.
#[test]
fn every_family_is_calibrated() {
    let mut done = 0;
    for case in models::cases() {
        let model = models::folder().join(&case);
        let json = std::fs::read_to_string(model.join("config.json")).unwrap();
        let Some(vocab) = vocab(&model) else { continue };
        if json.contains("quantization_config") {
            continue;
        }
        for format in [Quantise::Int4, Quantise::Fp8] {
            let [plain, fitted] = [(); 2].map(|()| tempfile::tempdir().unwrap());
            let quantiser = Quantiser::open(&model, options(format)).unwrap();
            let [none, all] =
                quantiser.write(plain.path(), None, &|_| ControlFlow::Continue(())).unwrap();
            let [calibrated, rounded] =
                quantise(&model, fitted.path(), format, &texts(vocab, 5)).unwrap();
            assert_eq!((none, calibrated + rounded), (0, all), "{case}");
            assert!(calibrated > 0, "{case}: {rounded} rounded");
            let experts = json.contains("experts");
            assert!(experts || rounded == 0, "{case}: {rounded} of {all} are not calibrated");
            let (plain, fitted) = (bytes(plain.path()), bytes(fitted.path()));
            let names =
                |all: &[(String, Vec<u8>)]| all.iter().map(|t| t.0.clone()).collect::<Vec<_>>();
            assert_eq!(names(&plain), names(&fitted), "{case}");
            let differ = plain.iter().zip(&fitted).filter(|(a, b)| a.1 != b.1).count();
            assert!(differ >= calibrated / 2, "{case}: {differ} tensors differ");
            done += 1;
        }
    }
    assert!(done > 30, "{done}");
}

#[test]
fn the_same_texts_give_the_same_bytes() {
    let model = models::folder().join("qwen3");
    let texts = texts(vocab(&model).unwrap(), 5);
    let made = |threads| {
        let folder = tempfile::tempdir().unwrap();
        let options = QuantiseOptions { threads: Some(threads), ..options(Quantise::Int4) };
        let quantiser = Quantiser::open(&model, options).unwrap();
        let device = device::cpu::open(Some(threads), false).unwrap();
        let go_on = &|_| ControlFlow::Continue(());
        quantiser.write(folder.path(), Some((&device, &texts)), go_on).unwrap();
        bytes(folder.path())
    };
    assert!(made(1) == made(3));
}

#[test]
fn a_model_writes_its_own_texts() {
    let model = models::folder().join("qwen3");
    let device = models::cpu();
    let starts: Vec<Vec<u32>> = (1..6).map(|id| vec![id]).collect();
    let write = || Texts::written_by(&model, &device, &starts, LENGTH, &|_| true).unwrap().unwrap();
    assert_eq!(write().tokens(), 5 * LENGTH);
    assert_eq!(format!("{:?}", write()), format!("{:?}", write()), "the same every time");
    let stopped = Texts::written_by(&model, &device, &starts, LENGTH, &|done| done < 3).unwrap();
    assert!(stopped.is_none());
}

#[test]
fn texts_are_cut_to_one_length() {
    let texts = Texts::cut(&[1, 2, 3, 4, 5, 6, 7], &[9], 4, 5).unwrap();
    assert_eq!(format!("{texts:?}"), "Texts([[9, 1, 2, 3], [9, 4, 5, 6]])");
    assert_eq!(texts.tokens(), 8);
    assert!(Texts::cut(&[1, 2], &[9], 4, 5).is_none(), "not one");
    assert!(Texts::cut(&[1, 2, 3], &[9, 9], 3, 5).is_none(), "nothing but the beginning");
}

#[test]
fn models_without_text_are_refused_and_the_caller_can_stop() {
    let folder = tempfile::tempdir().unwrap();
    let mut folders = models::cases().into_iter().map(|case| models::folder().join(case));
    let vectors = folders.find(|model| vocab(model).is_none());
    if let Some(model) = vectors {
        let refused = quantise(&model, folder.path(), Quantise::Fp8, &texts(50, 5)).unwrap_err();
        assert!(refused.to_string().ends_with("needs a model that generates text"), "{refused}");
    }
    let model = models::folder().join("qwen3");
    let folder = tempfile::tempdir().unwrap();
    let quantiser = Quantiser::open(&model, options(Quantise::Int4)).unwrap();
    let texts = texts(vocab(&model).unwrap(), 5);
    let stop = &|_| ControlFlow::Break(());
    let stopped = quantiser.write(folder.path(), Some((&models::cpu(), &texts)), stop);
    assert!(matches!(stopped, Err(QuantiseError::Stopped)));
}
