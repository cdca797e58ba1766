//! Tests of the CUDA layers alone: order of dependent launches, the edge check, cuBLASLt GEMMs against sums on the
//! host, and the memory of a graph. Skipped without a GPU.

use super::driver::Cuda;
use super::kernel::check_edge;
use super::launch::{Arg, Gemm, KernelKey, Launch, Lowered};
use super::record::{CudaGraph, Step};
use crate::graph::{RecordOptions, Recorded};
use crate::{Arena, DType, Device, DeviceChoice, Error, OpenArena, Region, Result, Span, Tensor};
use half::bf16;

fn gpu() -> Option<Device> {
    match Device::open(DeviceChoice::Cuda(0)) {
        Ok((device, _)) => Some(device),
        Err(reason) => {
            eprintln!("skipped: no GPU ({reason})");
            None
        }
    }
}

fn cuda(device: &Device) -> &Cuda {
    device.driver.as_cuda().expect("opened as one")
}

fn record(cuda: &Cuda, arena: &Arena, steps: &[Step], dependent: bool) -> Result<CudaGraph> {
    cuda.executor().prepare(steps)?;
    let options = RecordOptions { dependent_launch: dependent };
    CudaGraph::new(cuda.executor(), arena, steps, options)
}

fn link(entry: &str, waits: bool, words: Span) -> Launch {
    Launch {
        kernel: KernelKey {
            source: "bench_chain".into(),
            entry: entry.into(),
            // Words side by side.
            defines: vec![("LINE".into(), "4".into())],
        },
        grid: [128, 1, 1],
        block: [64, 1, 1],
        cluster: [1, 1, 1],
        shared: 0,
        args: vec![Arg::Address(words)],
        waits,
    }
}

fn words() -> (OpenArena, Span) {
    let mut open = OpenArena::new();
    let words = open.alloc(Region::State, "words", 128 * 4);
    (open, words)
}

#[test]
fn an_edge_without_the_device_half_is_refused() {
    let (_, span) = words();
    let refused = Error::EdgeWithoutWait { kernel: "bench_chain::chain_plain".into() };
    assert_eq!(check_edge(&link("chain_plain", true, span), false), Err(refused.clone()));
    assert_eq!(check_edge(&link("chain_plain", false, span), false), Ok(()));
    let Some(device) = gpu() else { return };
    let (open, span) = words();
    let arena = device.seal(open).expect("a few bytes");
    let steps = [Step::Work(vec![Lowered::Launch(link("chain_plain", true, span))])];
    let outcome = record(cuda(&device), &arena, &steps, true);
    assert_eq!(outcome.map(drop), Err(refused));
}

#[test]
fn dependent_launches_lose_no_step() {
    let Some(device) = gpu() else { return };
    let (open, span) = words();
    let arena = device.seal(open).expect("a few bytes");
    let link = Lowered::Launch(link("chain_dependent", true, span));
    // Copies and fills between kernels are full barriers, and conditional nodes have separate bodies.
    let elsewhere = span.part(127 * 4, 4);
    let mut chain = vec![link.clone(); 200];
    chain.insert(100, Lowered::Fill { to: elsewhere, word: 0 });
    let steps = [
        Step::Work(chain),
        Step::Conditional {
            cond: span.part(0, 4),
            repeat: false,
            body: vec![Step::Work(vec![link; 100])],
        },
    ];
    let graph = record(cuda(&device), &arena, &steps, true).expect("it records");
    assert_eq!(graph.device_nodes(), 200 + 1 + 2 + 100);
    let replays = 200;
    for _ in 0..replays {
        graph.replay().expect("it replays");
    }
    let bytes = device.read(&arena, span).expect("idle");
    let found: Vec<u32> =
        bytes.chunks_exact(4).map(|w| u32::from_ne_bytes(w.try_into().expect("4"))).collect();
    assert_eq!(found[..127], [replays * 300; 127]);
    assert_eq!(found[127], 200, "filled with 0 in the middle of each replay");
}

#[test]
fn a_second_graph_of_the_same_shape_costs_what_it_says() {
    let Some(device) = gpu() else { return };
    let (open, span) = words();
    let arena = device.seal(open).expect("a few bytes");
    let steps = [Step::Work(vec![Lowered::Launch(link("chain_dependent", true, span)); 500])];
    let graphs: Vec<CudaGraph> =
        (0..8).map(|_| record(cuda(&device), &arena, &steps, true).expect("it records")).collect();
    let free = device.memory_free().expect("it knows");
    let counted: u64 = graphs.iter().map(|graph| graph.bytes()).sum();
    drop(graphs);
    let returned = device.memory_free().expect("it knows").saturating_sub(free);
    assert!(counted < 256 << 20, "8 graphs of 500 nodes count {counted} bytes");
    eprintln!("8 graphs of 500 nodes: {counted} bytes counted, {returned} given back");
}

#[test]
fn library_products_equal_sums_by_hand() {
    let Some(device) = gpu() else { return };
    // Strides wider than the rows, sizes that are no powers of two, with and without a residual.
    for (rows, n, k, residual) in
        [(5u32, 96u32, 128u32, false), (64, 264, 520, true), (1, 1024, 256, true)]
    {
        let mut open = OpenArena::new();
        let mut tensor = |rows: u32, cols: u32, wider: u32| {
            let stride = cols + wider;
            let span = open.alloc(Region::Workspace, "t", u64::from(rows * stride) * 2);
            Tensor { span, dtype: DType::BF16, rows, cols, stride }
        };
        let (x, w, y) = (tensor(rows, k, 8), tensor(n, k, 0), tensor(rows, n, 16));
        let workspace = Some(open.alloc(Region::Workspace, "lt", 32 << 20));
        let arena = device.seal(open).expect("33 MiB");
        let mut seed = 1u32;
        let mut fill = |tensor: &Tensor| -> Vec<f32> {
            let values: Vec<f32> = (0..tensor.rows * tensor.stride)
                .map(|_| {
                    seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    bf16::from_f32((seed >> 8) as f32 / (1 << 24) as f32 - 0.5).to_f32()
                })
                .collect();
            let bytes: Vec<u8> =
                values.iter().flat_map(|v| bf16::from_f32(*v).to_ne_bytes()).collect();
            let mut whole = vec![0; tensor.span.len as usize];
            whole[..bytes.len()].copy_from_slice(&bytes);
            device.write(&arena, tensor.span, &whole).expect("idle");
            values
        };
        let (xs, ws, ys) = (fill(&x), fill(&w), fill(&y));
        let gemm = Gemm { x, w, bias: None, residual: residual.then_some(y), y, workspace };
        let steps = [Step::Work(vec![Lowered::Gemm(gemm)])];
        let graph = record(cuda(&device), &arena, &steps, true).expect("it records");
        graph.replay().expect("it replays");
        let bytes = device.read(&arena, y.span).expect("idle");
        let found: Vec<f32> =
            bytes.chunks_exact(2).map(|v| bf16::from_ne_bytes([v[0], v[1]]).to_f32()).collect();
        for row in 0..rows {
            for col in 0..y.stride {
                let at = (row * y.stride + col) as usize;
                let mut expected = ys[at];
                if col < n {
                    let product: f64 = (0..k)
                        .map(|i| {
                            f64::from(xs[(row * x.stride + i) as usize])
                                * f64::from(ws[(col * k + i) as usize])
                        })
                        .sum();
                    expected = product as f32 + if residual { expected } else { 0.0 };
                }
                let error = (found[at] - expected).abs();
                assert!(
                    error <= 0.01 + expected.abs() / 128.0,
                    "{row},{col}: {} for {expected}",
                    found[at]
                );
            }
        }
    }
}
