//! Dequantisation against blocks that the `gguf` package dequantised (`tools/quant_goldens.py`): the
//! same bits.

use crate::support::*;
use device::op::{Embed, Lookup};
use device::{DType, Op, Region, Tensor};

#[test]
fn every_gguf_type_bit_for_bit() {
    let mut golden: &[u8] = include_bytes!("../goldens/quant.bin");
    let mut take = |bytes: usize| {
        let (front, rest) = golden.split_at(bytes);
        golden = rest;
        front
    };
    let types = [
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q8_0,
        DType::Q2K,
        DType::Q3K,
        DType::Q4K,
        DType::Q5K,
        DType::Q6K,
    ];
    let reference = device::cpu::open(None, true).expect("a CPU");
    let devices = devices();
    for dtype in types {
        let sizes = bytes_to_words(take(8));
        let (blocks, values) = (take(sizes[0] as usize), take(4 * sizes[1] as usize));
        let build = |layout: &mut Layout| {
            let table = layout.bytes(Region::Weights, "table", blocks.to_vec());
            let table = Tensor::dense(table, dtype, 1, sizes[1]);
            let ids = layout.words(&[0]);
            let out = layout.poison(DType::F32, 1, sizes[1] as usize, 0);
            (
                vec![Op::Embed(Embed { by: Lookup::Token, ids, table, given: None, out })],
                vec![out.span],
            )
        };
        assert_eq!(run(&reference, &build)[0], values, "{dtype:?} in the reference");
        for (name, device) in &devices {
            assert_eq!(run(device, &build)[0], values, "{dtype:?} on {name}");
        }
    }
}
