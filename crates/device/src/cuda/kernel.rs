//! Loaded kernels, and the launch of one of them.

use super::api::DriverApi;
use super::cache::Cache;
use super::compile::{Compiled, Compiler};
use super::context::{Context, Stream, may_wait, report};
use super::launch::{Arg, KernelKey, Launch, TensorMap};
use crate::arena::ArenaInner;
use crate::{DType, Error, Result};
use cudarc::driver::sys;
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{Arc, Mutex};

/// A kernel in the GPU's memory.
#[derive(Debug)]
pub(crate) struct Kernel {
    context: Arc<Context>,
    module: sys::CUmodule,
    function: sys::CUfunction,
    waits: bool,
    /// Dynamic shared memory allowed so far.
    shared: Mutex<u32>,
}

// SAFETY: driver handles may be used from any thread once their context is current.
unsafe impl Send for Kernel {}
// SAFETY: loading is done; launching does not change the kernel.
unsafe impl Sync for Kernel {}

impl Kernel {
    fn load(context: &Arc<Context>, key: &KernelKey, compiled: &Compiled) -> Result<Kernel> {
        let api = context.bind()?;
        let mut kernel = Kernel {
            context: context.clone(),
            module: std::ptr::null_mut(),
            function: std::ptr::null_mut(),
            waits: compiled.waits,
            // Static shared memory counts, too: even less than 48 KiB may need permission.
            shared: Mutex::new(0),
        };
        let _turn = may_wait();
        // SAFETY: the cubin is whole (checksummed or just compiled) and for this architecture.
        unsafe { api.cuModuleLoadData(&mut kernel.module, compiled.cubin.as_ptr().cast()) }?;
        let name = CString::new(key.entry.as_str()).expect("names hold no NUL");
        // SAFETY: the module was loaded above.
        unsafe { api.cuModuleGetFunction(&mut kernel.function, kernel.module, name.as_ptr()) }?;
        let mut registers = 0;
        let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS;
        // Asking for an attribute makes a lazy driver load the code now, not during a recording.
        // SAFETY: writes one int.
        unsafe { api.cuFuncGetAttribute(&mut registers, which, kernel.function) }?;
        Ok(kernel)
    }

    /// Allows this much dynamic shared memory.
    fn allow_shared(&self, bytes: u32) -> Result<()> {
        let mut allowed = self.shared.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if bytes > *allowed {
            let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let api = self.context.bind()?;
            // SAFETY: the function is loaded.
            unsafe { api.cuFuncSetAttribute(self.function, which, bytes as i32) }?;
            *allowed = bytes;
        }
        Ok(())
    }

    /// Launches into a stream (or into the graph that the stream records). With `dependent`, the kernel may start
    /// before the previous one has ended.
    pub(crate) fn launch(
        &self,
        stream: &Stream,
        arena: &ArenaInner,
        launch: &Launch,
        dependent: bool,
    ) -> Result<()> {
        let api = self.context.bind()?;
        let mut values: Vec<Slot> =
            launch.args.iter().map(|arg| slot(api, arena, arg)).collect::<Result<_>>()?;
        let mut args: Vec<*mut c_void> =
            values.iter_mut().map(|slot| slot.0.as_mut_ptr().cast()).collect();
        let mut attributes = Vec::new();
        if launch.cluster != [1, 1, 1] {
            let [x, y, z] = launch.cluster;
            let dims = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z };
            attributes.push(attribute(
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                sys::CUlaunchAttributeValue { clusterDim: dims },
            ));
        }
        if dependent {
            attributes.push(attribute(
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
            ));
        }
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.block[0],
            blockDimY: launch.block[1],
            blockDimZ: launch.block[2],
            sharedMemBytes: launch.shared,
            hStream: stream.raw,
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        // SAFETY: arguments and attributes outlive the call, which copies them; lowering guarantees that their number
        // and sizes match this entry, which is tested for every op.
        unsafe {
            api.cuLaunchKernelEx(&config, self.function, args.as_mut_ptr(), std::ptr::null_mut())
        }
        .map_err(|problem| match problem {
            Error::Driver { code, .. } => Error::Driver {
                call: format!("launch of {}::{}", launch.kernel.source, launch.kernel.entry),
                code,
            },
            other => other,
        })
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        if self.module.is_null() {
            return;
        }
        report(self.context.bind().map(|_| ()));
        let _turn = may_wait();
        // SAFETY: loaded once, unloaded once.
        report(unsafe { self.context.api.cuModuleUnload(self.module) });
    }
}

fn attribute(
    id: sys::CUlaunchAttributeID,
    value: sys::CUlaunchAttributeValue,
) -> sys::CUlaunchAttribute {
    sys::CUlaunchAttribute { id, pad: [0; 4], value }
}

/// Eight words, aligned as a tensor map must be.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u64; 8]);

/// Room for an argument.
struct Slot(Vec<Line>);

impl Slot {
    fn of(words: &[u64]) -> Slot {
        let line = |part: &[u64]| {
            let mut line = Line([0; 8]);
            line.0[..part.len()].copy_from_slice(part);
            line
        };
        Slot(words.chunks(8).map(line).collect())
    }
}

fn slot(api: &DriverApi, arena: &ArenaInner, arg: &Arg) -> Result<Slot> {
    let word = |value: u64| Slot::of(&[value]);
    let address = |span: &crate::Span| {
        arena.check("argument", *span)?;
        Ok(arena.address(*span))
    };
    // Little endian: a 32-bit argument is the lower half of the word.
    Ok(match arg {
        Arg::Address(span) => word(address(span)?),
        Arg::Addresses(spans) => {
            Slot::of(&spans.iter().map(address).collect::<Result<Vec<u64>>>()?)
        }
        Arg::Null => word(0),
        Arg::U32(value) => word((*value).into()),
        Arg::U64(value) => word(*value),
        Arg::F32(value) => word(value.to_bits().into()),
        Arg::TensorMap(map) => encode(api, arena, map)?,
    })
}

fn encode(api: &DriverApi, arena: &ArenaInner, map: &TensorMap) -> Result<Slot> {
    use sys::CUtensorMapDataType as Type;
    use sys::CUtensorMapSwizzle as Swizzle;
    let refuse =
        |problem: &str| Error::Contract { op: "tensor map".into(), problem: problem.into() };
    arena.check("tensor map", map.span)?;
    let rank = map.dims.len();
    if !(1..=5).contains(&rank) || map.strides.len() + 1 != rank || map.tile.len() != rank {
        return Err(refuse("1 to 5 dimensions, as many tiles and one stride fewer are needed"));
    }
    let dtype = match map.dtype {
        DType::F32 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        DType::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        DType::BF16 => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        DType::U8 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        // Eight bytes of a piece.
        DType::I4 | DType::I4G64 | DType::I4G32 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT64,
        _ => return Err(refuse("f32, f16, bf16, bytes or 4-bit weights are needed")),
    };
    let swizzle = match map.swizzle {
        0 => Swizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        32 => Swizzle::CU_TENSOR_MAP_SWIZZLE_32B,
        64 => Swizzle::CU_TENSOR_MAP_SWIZZLE_64B,
        128 => Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        _ => return Err(refuse("a swizzle is 0, 32, 64 or 128 bytes")),
    };
    let mut slot = Slot::of(&[0; 16]);
    let steps = [1u32; 5];
    // SAFETY: the slot is a tensor map's size and alignment; the arrays have `rank` entries.
    unsafe {
        api.cuTensorMapEncodeTiled(
            slot.0.as_mut_ptr().cast(),
            dtype,
            rank as u32,
            arena.address(map.span) as *mut c_void,
            map.dims.as_ptr(),
            map.strides.as_ptr(),
            map.tile.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }?;
    Ok(slot)
}

/// The kernels a device has loaded. They stay loaded: a graph may use one at any time.
#[derive(Debug)]
pub(crate) struct Kernels {
    context: Arc<Context>,
    compiler: Compiler,
    cache: Cache,
    loaded: Mutex<HashMap<KernelKey, Arc<Kernel>>>,
}

impl Kernels {
    pub(crate) fn new(context: &Arc<Context>, compiler: Compiler, cache: Cache) -> Kernels {
        Kernels { context: context.clone(), compiler, cache, loaded: Mutex::default() }
    }

    /// Prepares every launch: compiles and loads its kernel, allows its shared memory and checks that the kernel
    /// waits.
    pub(crate) fn prepare<'a>(&self, launches: impl Iterator<Item = &'a Launch>) -> Result<()> {
        let launches: Vec<&Launch> = launches.collect();
        let mut loaded = self.loaded.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut missing: Vec<KernelKey> = launches
            .iter()
            .filter(|launch| !loaded.contains_key(&launch.kernel))
            .map(|launch| launch.kernel.clone())
            .collect();
        missing.sort();
        missing.dedup();
        let arch = self.context.gpu.target.arch();
        let compiled = self.cache.get_all(&self.compiler, &missing, &arch)?;
        for (key, (compiled, _)) in missing.into_iter().zip(compiled) {
            let kernel = Kernel::load(&self.context, &key, &compiled)?;
            loaded.insert(key, Arc::new(kernel));
        }
        for launch in launches {
            let kernel = &loaded[&launch.kernel];
            check_edge(launch, kernel.waits)?;
            kernel.allow_shared(launch.shared)?;
        }
        Ok(())
    }

    /// A kernel that was prepared.
    pub(crate) fn get(&self, key: &KernelKey) -> Result<Arc<Kernel>> {
        let loaded = self.loaded.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        loaded.get(key).cloned().ok_or_else(|| Error::Contract {
            op: format!("{}::{}", key.source, key.entry),
            problem: "launched before it was prepared".into(),
        })
    }
}

/// Refuses a launch with `waits` whose kernel does not wait for its predecessor.
pub(crate) fn check_edge(launch: &Launch, waits: bool) -> Result<()> {
    if launch.waits && !waits {
        let kernel = format!("{}::{}", launch.kernel.source, launch.kernel.entry);
        return Err(Error::EdgeWithoutWait { kernel });
    }
    Ok(())
}
