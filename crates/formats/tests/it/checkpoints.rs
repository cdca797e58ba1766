//! Checkpoints of every kind give the bytes that were put into them.

use crate::make;
use formats::checkpoint::{Checkpoint, Format};
use make::GgufFile;
use proptest::prelude::*;
use safetensors::tensor::TensorView;
use std::collections::BTreeMap;
use std::path::Path;

/// Writes a safetensors file with the reference's own writer.
fn write(path: &Path, tensors: &BTreeMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)>) {
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    let bytes = safetensors::serialize(views, None).unwrap();
    std::fs::write(path, bytes).unwrap();
}

fn tensor() -> impl Strategy<Value = (safetensors::Dtype, Vec<usize>, Vec<u8>)> {
    let dtype = prop_oneof![
        Just((safetensors::Dtype::F32, 4)),
        Just((safetensors::Dtype::BF16, 2)),
        Just((safetensors::Dtype::I64, 8)),
        Just((safetensors::Dtype::BOOL, 1)),
    ];
    (dtype, prop::collection::vec(0usize..5, 0..4), any::<u8>()).prop_map(
        |((dtype, size), shape, fill)| {
            let bytes = shape.iter().product::<usize>() * size;
            (dtype, shape, (0..bytes).map(|i| (i as u8).wrapping_add(fill)).collect())
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_the_reference_writes_is_what_we_read(
        tensors in prop::collection::btree_map("[a-z.]{1,12}", tensor(), 0..8),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        write(&path, &tensors);
        for opened in [path.as_path(), folder.path()] {
            let checkpoint = Checkpoint::open(opened).unwrap();
            prop_assert_eq!(checkpoint.format(), Format::Safetensors);
            prop_assert_eq!(checkpoint.tensors().len(), tensors.len());
            for (name, (_, shape, bytes)) in &tensors {
                let info = checkpoint.get(name).unwrap();
                prop_assert_eq!(&info.shape, shape);
                let mut found = vec![0; info.bytes];
                checkpoint.read_into(name, &mut found).unwrap();
                prop_assert_eq!(&found, bytes);
            }
        }
    }
}

#[test]
fn shards_make_one_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let one = |fill: u8| (safetensors::Dtype::F32, vec![2], vec![fill; 8]);
    let shard = |n: u8| format!("model-0000{n}-of-00002.safetensors");
    write(
        &folder.path().join(shard(1)),
        &[("a".to_owned(), one(1)), ("b".to_owned(), one(2))].into(),
    );
    write(&folder.path().join(shard(2)), &[("c".to_owned(), one(3))].into());
    let index = serde_json::json!({"weight_map": {"a": shard(1), "b": shard(1), "c": shard(2)}});
    let index_path = folder.path().join("model.safetensors.index.json");
    std::fs::write(&index_path, index.to_string()).unwrap();
    for path in [folder.path(), index_path.as_path()] {
        let checkpoint = Checkpoint::open(path).unwrap();
        assert_eq!(checkpoint.total_bytes(), 24);
        let mut bytes = [0; 8];
        for (name, fill) in [("a", 1), ("b", 2), ("c", 3)] {
            checkpoint.read_into(name, &mut bytes).unwrap();
            assert_eq!(bytes, [fill; 8]);
        }
    }
    // Without an index the shards are taken as they are; the same tensor twice is refused.
    std::fs::remove_file(&index_path).unwrap();
    assert_eq!(Checkpoint::open(folder.path()).unwrap().tensors().len(), 3);
    write(&folder.path().join("z.safetensors"), &[("a".to_owned(), one(9))].into());
    assert!(Checkpoint::open(folder.path()).unwrap_err().to_string().contains("also in"));
}

#[test]
fn split_gguf_is_one_checkpoint_whichever_part_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let part = |n: u8| folder.path().join(format!("m-0000{n}-of-00002.gguf"));
    let embed =
        GgufFile::llama().u32("split.count", 2).tensor("token_embd.weight", &[32, 10], 8, 0);
    std::fs::write(part(1), embed.data(340).bytes()).unwrap();
    let rest = GgufFile::new().u32("split.count", 2).tensor("output_norm.weight", &[32], 0, 0);
    std::fs::write(part(2), rest.data(128).bytes()).unwrap();
    for path in [folder.path().to_owned(), part(1), part(2)] {
        let checkpoint = Checkpoint::open(&path).unwrap();
        assert_eq!(checkpoint.tensors().len(), 2);
    }
    std::fs::remove_file(part(2)).unwrap();
    assert!(Checkpoint::open(&part(1)).unwrap_err().to_string().contains("cannot open"));
}
