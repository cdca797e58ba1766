//! Any bytes as a config.json and, after a zero byte, a safetensors file: every weight is read or refused.
#![no_main]

use formats::checkpoint::Checkpoint;
use formats::scaled::Quantisation;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut parts = bytes.splitn(2, |&byte| byte == 0);
    let (Some(config), Some(tensors)) = (parts.next(), parts.next()) else { return };
    let folder = std::env::temp_dir().join(format!("dacapo-fuzz-scaled-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("the temporary folder can be written");
    std::fs::write(folder.join("config.json"), config).expect("the folder can be written");
    std::fs::write(folder.join("model.safetensors"), tensors).expect("the folder can be written");
    let Ok(checkpoint) = Checkpoint::open(&folder) else { return };
    let Ok(Some(quantisation)) = Quantisation::of(&checkpoint) else { return };
    for tensor in checkpoint.tensors() {
        let module = tensor.name.rsplit_once('.').map_or("", |(module, _)| module);
        let weight = match tensor.name.strip_suffix("_blocks") {
            Some(experts) => quantisation.weight(&checkpoint, experts),
            None => quantisation.weight(&checkpoint, &format!("{module}.weight")),
        };
        let Ok(Some(weight)) = weight else { continue };
        let (rows, cols) = (weight.rows(), weight.cols());
        assert!(weight.tensors().iter().all(|name| checkpoint.get(name).is_some()));
        let whole = weight.read(&checkpoint, 0..rows).expect("a checked weight can be read");
        let mut floats = vec![0.0; rows * cols];
        whole.dequantise(cols, &mut floats);
        let last = weight.read(&checkpoint, rows - 1..rows).expect("a row of it can be read");
        let mut row = vec![0.0; cols];
        last.dequantise(cols, &mut row);
        let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        assert!(row.iter().zip(&floats[(rows - 1) * cols..]).all(same));
    }
});
