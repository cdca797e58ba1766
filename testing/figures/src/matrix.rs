//! The rate of a large GEMM through the public ops: what prefill is compared with.

use super::median;
use device::op::{Linear, Noise};
use device::variant::{LinearVariant, Pick};
use device::{DType, Device, DeviceKind, Node, Op, OpenArena, Region, Result, Tensor};
use std::time::Instant;

/// Multiply-adds × 2 per second of one GEMM of a size and format that suit the device: random bf16 numbers on a GPU,
/// whose clocks depend on the values multiplied; packed 8-bit weights on the CPU. The median of several under load.
pub(super) fn rate(device: &Device) -> Result<f64> {
    let cuda = device.kind() == DeviceKind::Cuda;
    let (rows, side, times) = if cuda { (8192, 8192, 12) } else { (256, 1024, 3) };
    let (values, weights) = if cuda { (DType::BF16, DType::BF16) } else { (DType::F32, DType::P8) };
    let mut open = OpenArena::new();
    let mut tensor = |region, dtype: DType, rows: u32| {
        let bytes = dtype.bytes(rows as usize * side as usize) as u64;
        Tensor::dense(open.alloc(region, "matrix", bytes), dtype, rows, side)
    };
    let w = tensor(Region::Weights, weights, side);
    let (x, y) = (tensor(Region::Workspace, values, rows), tensor(Region::Workspace, values, rows));
    let pick = if cuda { Pick::Named(LinearVariant::Gemm) } else { Pick::Best };
    let mut product = Op::Linear(Linear { pick, ..Linear::new(x, w, y) });
    let need = device.target().scratch_bytes(&product);
    if let (Op::Linear(linear), true) = (&mut product, need > 0) {
        linear.scratch = Some(open.alloc(Region::State, "scratch", need));
    }
    let arena = device.seal(open)?;
    let node = |op: Op| Node { op, name: "matrix".into(), layer: None };
    let random = [(1, x), (2, w)].into_iter().filter(|(_, to)| to.dtype.is_plain());
    for (seed, to) in random {
        device.run(&arena, &node(Op::Noise(Noise { to, seed, mean: 0.0, scale: 1.0 })))?;
    }
    let product = node(product);
    let flops = 2.0 * f64::from(rows) * f64::from(side) * f64::from(side);
    median(5, || {
        device.run(&arena, &product)?;
        device.sync()?;
        let start = Instant::now();
        for _ in 0..times {
            device.run(&arena, &product)?;
        }
        device.sync()?;
        Ok(flops * f64::from(times) / start.elapsed().as_secs_f64())
    })
}
