//! The target of a plan: everything that compiling needs to know about a device, without opening one. Each kind of
//! device has one implementation; code above this crate never asks which kind it is.

use crate::cpu::pack::packed_parts;
use crate::cuda::launch::{self, Lowered};
use crate::cuda::{lower, tuned};
use crate::op::FusedKernel;
use crate::ops::linear::{adapters, blocks};
use crate::variant::{Pick, Variant};
use crate::{DType, Node, Op, Result, scaled};
use serde::Serialize;
use std::fmt;

/// A kernel as it will be launched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KernelUse {
    /// Its entry point, `cublaslt`, `memcpy` or `memset`.
    pub name: String,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads per block.
    pub block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub shared: u32,
    /// The constants it is compiled with.
    pub defines: Vec<(String, String)>,
}

/// The device that plans are made for.
pub trait Target: fmt::Debug + Send + Sync {
    /// A short name, for listings.
    fn name(&self) -> String;

    /// What an op is lowered to; an error if the target does not have the kernel that was picked. Empty for targets
    /// that do not launch ops one by one.
    fn kernels(&self, op: &Op) -> Result<Vec<KernelUse>>;

    /// Which variant an op runs as and why, if the target has a choice.
    fn choice(&self, op: &Op) -> Option<String>;

    /// Bytes of scratch an op needs.
    fn scratch_bytes(&self, op: &Op) -> u64;

    /// Bytes that the members of a fused op exchange if they run as one node; 0 if they cannot, or exchange nothing.
    fn exchange_bytes(&self, fused: &Op) -> u64;

    /// Whether such members were measured to be faster as one node.
    fn prefers_one_node(&self, fused: &Op) -> bool;

    /// Lets ops prepare their results for the norm of the next op, where both have kernels for it.
    fn hand_on(&self, nodes: &mut [Node]);

    /// The kernel that a rotation and the linear before it, or the attention after it, can share; `None` if there is none.
    fn rotation(&self, node: &Node, next: &Node) -> Option<FusedKernel>;

    /// Whether linears of this many rows may add what adapters do themselves.
    fn adapts_rows(&self, rows: u32) -> bool;

    /// Whether one kernel runs this linear with the adapters that are fused with it.
    fn adapts(&self, fused: &Op) -> bool;

    /// The compute capability, for a GPU; `None` for a CPU.
    fn compute_capability(&self) -> Option<(u32, u32)>;

    /// Whether fused kernels round as their members do, so that fixed kernels may be fused, too.
    fn fuses_exactly(&self) -> bool;

    /// Bytes a recorded node may take on the device.
    fn recorded_node_bytes(&self) -> u64;

    /// The type of activations.
    fn activations(&self) -> DType;

    /// The type of keys and values in pages.
    fn cache(&self) -> DType;

    /// How a weight of `rows` × `cols` made of parts of these types is stored.
    fn stored(&self, used: WeightUse, parts: &[DType], rows: usize, cols: usize) -> DType;

    /// What a weight stored as `dtype` is stored as where many rows are multiplied by it.
    fn for_many_rows(&self, dtype: DType) -> DType;

    /// Most tokens of a prefill step: a few tens of milliseconds, so that running answers stay smooth.
    fn prefill_tokens(&self) -> u32;
}

/// What a weight is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightUse {
    /// Rows are gathered by token id.
    Table,
    /// Multiplied.
    Matrix,
    /// The matrices of all experts of a layer.
    Experts,
    /// The matrices of all heads, each multiplied with a head of its own: never quantised.
    Heads,
    /// Decides the experts of a token: never quantised.
    Router,
    /// Multiplied to give logits; may be the table, too. Never quantised.
    Head,
    /// A norm's scale or a bias: one row.
    Vector,
}

/// This machine's processor.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuTarget;

impl Target for CpuTarget {
    fn name(&self) -> String {
        "cpu".into()
    }

    fn kernels(&self, _op: &Op) -> Result<Vec<KernelUse>> {
        Ok(Vec::new())
    }

    fn choice(&self, _op: &Op) -> Option<String> {
        None
    }

    fn scratch_bytes(&self, _op: &Op) -> u64 {
        0
    }

    fn exchange_bytes(&self, _fused: &Op) -> u64 {
        0
    }

    fn prefers_one_node(&self, _fused: &Op) -> bool {
        false
    }

    fn hand_on(&self, _nodes: &mut [Node]) {}

    fn rotation(&self, _node: &Node, _next: &Node) -> Option<FusedKernel> {
        None
    }

    fn adapts_rows(&self, _rows: u32) -> bool {
        false
    }

    fn adapts(&self, _fused: &Op) -> bool {
        false
    }

    fn compute_capability(&self) -> Option<(u32, u32)> {
        None
    }

    fn fuses_exactly(&self) -> bool {
        true
    }

    fn recorded_node_bytes(&self) -> u64 {
        0
    }

    fn activations(&self) -> DType {
        DType::F32
    }

    fn cache(&self) -> DType {
        DType::F16
    }

    fn stored(&self, used: WeightUse, parts: &[DType], rows: usize, cols: usize) -> DType {
        let same = parts.windows(2).all(|pair| pair[0] == pair[1]);
        match used {
            WeightUse::Vector => DType::F32,
            WeightUse::Table => parts[0],
            WeightUse::Heads => match parts[0] {
                dtype @ (DType::F16 | DType::BF16) if same => dtype,
                _ => DType::F32,
            },
            // A type without a packing is multiplied as it is stored. Several types without a common packing become
            // f32.
            WeightUse::Matrix | WeightUse::Experts | WeightUse::Router | WeightUse::Head => {
                let fits = !scaled::is_scaled(parts[0]) || scaled::fits(parts[0], rows, cols);
                let unpacked = if same && fits { parts[0] } else { DType::F32 };
                packed_parts(parts, rows, cols).unwrap_or(unpacked)
            }
        }
    }

    fn for_many_rows(&self, dtype: DType) -> DType {
        dtype
    }

    fn prefill_tokens(&self) -> u32 {
        512
    }
}

/// Bytes a driver is expected to use for a recorded node; an H200 used less in every graph measured.
const RECORDED_NODE: u64 = 16 << 10;

impl Target for launch::Target {
    fn name(&self) -> String {
        format!("{}x{}", self.arch(), self.sms)
    }

    fn kernels(&self, op: &Op) -> Result<Vec<KernelUse>> {
        Ok(lower::lower(op, self)?.iter().map(KernelUse::of).collect())
    }

    fn choice(&self, op: &Op) -> Option<String> {
        tuned::shape(op)?;
        Some(match (op.pick(), self.tuned.choice(op)) {
            (None | Some(Pick::Best), Some(choice)) => choice.to_string(),
            (None | Some(Pick::Best), None) => "default".into(),
            (Some(pick), _) => format!("{pick}, asked for"),
        })
    }

    fn scratch_bytes(&self, op: &Op) -> u64 {
        lower::scratch_bytes(op, self)
    }

    fn exchange_bytes(&self, layers: &Op) -> u64 {
        lower::exchange_bytes(layers, self)
    }

    fn prefers_one_node(&self, fused: &Op) -> bool {
        let chosen = self.tuned.choice(fused);
        chosen.is_some_and(|choice| choice.variant == Some(Variant::OneNode))
            || matches!(fused, Op::Fused(fused) if fused.is_faster())
    }

    fn hand_on(&self, nodes: &mut [Node]) {
        lower::hand_on(nodes, self);
    }

    fn rotation(&self, node: &Node, next: &Node) -> Option<FusedKernel> {
        lower::rotation(node, next, self)
    }

    fn adapts_rows(&self, rows: u32) -> bool {
        adapters::adapts_rows(rows)
    }

    fn adapts(&self, fused: &Op) -> bool {
        lower::adapts(fused, self)
    }

    fn compute_capability(&self) -> Option<(u32, u32)> {
        Some(self.capability)
    }

    fn fuses_exactly(&self) -> bool {
        false
    }

    fn recorded_node_bytes(&self) -> u64 {
        RECORDED_NODE
    }

    fn activations(&self) -> DType {
        DType::BF16
    }

    fn cache(&self) -> DType {
        DType::BF16
    }

    /// A norm's bf16 weights stay bf16: kernels that keep them in registers need them small. Others are not rounded:
    /// there are few of them, and they affect every value.
    fn stored(&self, used: WeightUse, parts: &[DType], rows: usize, cols: usize) -> DType {
        let halves = parts.iter().all(|part| *part == DType::BF16);
        let same = parts.iter().all(|part| *part == parts[0]);
        let with_scales = same && scaled::is_scaled(parts[0]) && scaled::fits(parts[0], rows, cols);
        match used {
            WeightUse::Vector if !halves => DType::F32,
            WeightUse::Matrix if with_scales && parts[0] != DType::Mxfp4 => parts[0],
            WeightUse::Experts if with_scales && parts[0] == DType::Mxfp4 => parts[0],
            WeightUse::Matrix | WeightUse::Head | WeightUse::Table
                if same && blocks::keeps(parts[0]) =>
            {
                let whole = cols.is_multiple_of(parts[0].block_elems());
                if whole { parts[0] } else { DType::BF16 }
            }
            // Each expert has whole blocks; see `keeps_blocks` of the loader.
            WeightUse::Experts if with_scales && parts[0] == DType::F8Block => {
                if cols.is_multiple_of(scaled::BLOCK) { parts[0] } else { DType::BF16 }
            }
            _ => DType::BF16,
        }
    }

    fn for_many_rows(&self, dtype: DType) -> DType {
        if blocks::keeps(dtype) { DType::BF16 } else { dtype }
    }

    fn prefill_tokens(&self) -> u32 {
        2048
    }
}

impl KernelUse {
    fn of(lowered: &Lowered) -> KernelUse {
        let plain = |name: &str| KernelUse {
            name: name.into(),
            grid: [0; 3],
            block: [0; 3],
            shared: 0,
            defines: Vec::new(),
        };
        match lowered {
            Lowered::Launch(launch) => KernelUse {
                name: launch.kernel.entry.clone(),
                grid: launch.grid,
                block: launch.block,
                shared: launch.shared,
                defines: launch.kernel.defines.clone(),
            },
            Lowered::Gemm(_) => plain("cublaslt"),
            Lowered::Copy { .. } => plain("memcpy"),
            Lowered::Fill { .. } => plain("memset"),
        }
    }
}
