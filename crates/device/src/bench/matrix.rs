//! The rate of a large matrix product through the public ops: what prefill is compared with.

use super::median;
use crate::op::{Epilogue, Hand, Linear, Noise};
use crate::{DType, Device, DeviceKind, Node, Op, OpenArena, Region, Result, Tensor};
use std::time::Instant;

/// Multiply-adds × 2 per second of one product of random bf16 numbers, as large as the device does well,
/// the median of several under load.
pub(super) fn rate(device: &Device) -> Result<f64> {
    let (rows, side, times) = match device.kind() {
        DeviceKind::Cuda => (8192, 8192, 12),
        DeviceKind::Cpu => (256, 1024, 3),
    };
    let mut open = OpenArena::new();
    let mut tensor = |region, rows: u32, cols: u32| {
        let bytes = DType::BF16.bytes(rows as usize * cols as usize) as u64;
        Tensor::dense(open.alloc(region, "matrix", bytes), DType::BF16, rows, cols)
    };
    let w = tensor(Region::Weights, side, side);
    let (x, y) = (tensor(Region::Workspace, rows, side), tensor(Region::Workspace, rows, side));
    let mut product = Op::Linear(Linear {
        x,
        w,
        bias: None,
        norm: None,
        epilogue: Epilogue::Store,
        rope: None,
        y,
        live: None,
        hand: Hand::Nothing,
        scratch: None,
        variant: (device.kind() == DeviceKind::Cuda).then(|| "gemm".into()),
    });
    let need =
        device.target().map_or(0, |target| crate::cuda::lower::scratch_bytes(&product, &target));
    if let (Op::Linear(linear), true) = (&mut product, need > 0) {
        linear.scratch = Some(open.alloc(Region::State, "scratch", need));
    }
    let arena = device.seal(open)?;
    let node = |op: Op| Node { op, name: "matrix".into(), layer: None };
    for (seed, to) in [(1, x), (2, w)] {
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
