//! The functions of the driver, of NVRTC and of cuBLASLt that are used, loaded by name. A missing library or symbol
//! is an error here, never a panic. Types are cudarc's; error codes stay numbers, so that a code newer than the
//! bindings is still valid.

use crate::{Error, Result};
use cudarc::cublaslt::sys as lt;
use cudarc::driver::sys;
use libloading::os::unix::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

macro_rules! api {
    ($(#[$doc:meta])* $name:ident, $failed:path; $(fn $f:ident($($arg:ident: $ty:ty),* $(,)?);)*) => {
        $(#[$doc])*
        #[allow(non_snake_case)]
        pub(crate) struct $name {
            $($f: unsafe extern "C" fn($($ty),*) -> c_uint,)*
        }

        #[allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments, dead_code)]
        impl $name {
            /// Every symbol, or the name of the first that is missing.
            pub(crate) fn load(library: &Library) -> std::result::Result<Self, &'static str> {
                $(
                    // SAFETY: the symbol's type is the one its vendor documents under this name.
                    let $f = unsafe { library.get(concat!(stringify!($f), "\0").as_bytes()) }
                        .map(|symbol| *symbol)
                        .map_err(|_| stringify!($f))?;
                )*
                Ok($name { $($f),* })
            }

            $(
                /// The call of this name; its error code becomes a result.
                pub(crate) unsafe fn $f(&self, $($arg: $ty),*) -> Result<()> {
                    // SAFETY: the caller keeps the vendor's contract for this call.
                    match unsafe { (self.$f)($($arg),*) } {
                        0 => Ok(()),
                        code => Err($failed(self, stringify!($f), code)),
                    }
                }
            )*
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(stringify!($name))
            }
        }
    };
}

api! {
    /// The driver's calls; all exist since CUDA 12.3.
    DriverApi, driver_failed;
    fn cuInit(flags: c_uint);
    fn cuDriverGetVersion(version: *mut c_int);
    fn cuGetErrorName(error: c_uint, name: *mut *const c_char);
    fn cuGetErrorString(error: c_uint, text: *mut *const c_char);
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGet(device: *mut sys::CUdevice, ordinal: c_int);
    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: sys::CUdevice);
    fn cuDeviceGetAttribute(value: *mut c_int, which: sys::CUdevice_attribute, device: sys::CUdevice);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: sys::CUdevice);
    fn cuDevicePrimaryCtxRetain(context: *mut sys::CUcontext, device: sys::CUdevice);
    fn cuDevicePrimaryCtxRelease_v2(device: sys::CUdevice);
    fn cuCtxSetCurrent(context: sys::CUcontext);
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    fn cuMemAlloc_v2(address: *mut sys::CUdeviceptr, bytes: usize);
    fn cuMemFree_v2(address: sys::CUdeviceptr);
    fn cuMemGetAllocationGranularity(
        granularity: *mut usize,
        prop: *const sys::CUmemAllocationProp,
        option: sys::CUmemAllocationGranularity_flags,
    );
    fn cuMemAddressReserve(
        address: *mut sys::CUdeviceptr,
        bytes: usize,
        alignment: usize,
        wish: sys::CUdeviceptr,
        flags: c_ulonglong,
    );
    fn cuMemAddressFree(address: sys::CUdeviceptr, bytes: usize);
    fn cuMemCreate(
        handle: *mut sys::CUmemGenericAllocationHandle,
        bytes: usize,
        prop: *const sys::CUmemAllocationProp,
        flags: c_ulonglong,
    );
    fn cuMemRelease(handle: sys::CUmemGenericAllocationHandle);
    fn cuMemMap(
        address: sys::CUdeviceptr,
        bytes: usize,
        offset: usize,
        handle: sys::CUmemGenericAllocationHandle,
        flags: c_ulonglong,
    );
    fn cuMemUnmap(address: sys::CUdeviceptr, bytes: usize);
    fn cuMemSetAccess(
        address: sys::CUdeviceptr,
        bytes: usize,
        access: *const sys::CUmemAccessDesc,
        count: usize,
    );
    fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint);
    fn cuMemFreeHost(address: *mut c_void);
    fn cuMemHostGetDevicePointer_v2(address: *mut sys::CUdeviceptr, host: *mut c_void, flags: c_uint);
    fn cuMemcpyAsync(to: sys::CUdeviceptr, from: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream);
    fn cuMemcpyHtoDAsync_v2(to: sys::CUdeviceptr, from: *const c_void, bytes: usize, stream: sys::CUstream);
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: sys::CUdeviceptr, bytes: usize, stream: sys::CUstream);
    fn cuMemcpy2DAsync_v2(copy: *const sys::CUDA_MEMCPY2D_st, stream: sys::CUstream);
    fn cuIpcOpenMemHandle_v2(address: *mut sys::CUdeviceptr, handle: sys::CUipcMemHandle_st, flags: c_uint);
    fn cuIpcCloseMemHandle(address: sys::CUdeviceptr);
    fn cuMemGetAddressRange_v2(base: *mut sys::CUdeviceptr, bytes: *mut usize, address: sys::CUdeviceptr);
    fn cuMemsetD32Async(to: sys::CUdeviceptr, word: c_uint, words: usize, stream: sys::CUstream);
    fn cuMemsetD8Async(to: sys::CUdeviceptr, byte: u8, bytes: usize, stream: sys::CUstream);
    fn cuStreamCreate(stream: *mut sys::CUstream, flags: c_uint);
    fn cuStreamDestroy_v2(stream: sys::CUstream);
    fn cuStreamSynchronize(stream: sys::CUstream);
    fn cuStreamQuery(stream: sys::CUstream);
    fn cuCtxSynchronize();
    fn cuStreamBeginCaptureToGraph(
        stream: sys::CUstream,
        graph: sys::CUgraph,
        after: *const sys::CUgraphNode,
        edges: *const sys::CUgraphEdgeData,
        count: usize,
        mode: sys::CUstreamCaptureMode,
    );
    fn cuStreamEndCapture(stream: sys::CUstream, graph: *mut sys::CUgraph);
    fn cuStreamGetCaptureInfo_v3(
        stream: sys::CUstream,
        status: *mut c_uint,
        id: *mut u64,
        graph: *mut sys::CUgraph,
        after: *mut *const sys::CUgraphNode,
        edges: *mut *const sys::CUgraphEdgeData,
        count: *mut usize,
    );
    fn cuStreamUpdateCaptureDependencies_v2(
        stream: sys::CUstream,
        after: *mut sys::CUgraphNode,
        edges: *const sys::CUgraphEdgeData,
        count: usize,
        flags: c_uint,
    );
    fn cuGraphCreate(graph: *mut sys::CUgraph, flags: c_uint);
    fn cuGraphDestroy(graph: sys::CUgraph);
    fn cuGraphGetNodes(graph: sys::CUgraph, nodes: *mut sys::CUgraphNode, count: *mut usize);
    fn cuGraphConditionalHandleCreate(
        handle: *mut sys::CUgraphConditionalHandle,
        graph: sys::CUgraph,
        context: sys::CUcontext,
        value: c_uint,
        flags: c_uint,
    );
    fn cuGraphAddNode_v2(
        node: *mut sys::CUgraphNode,
        graph: sys::CUgraph,
        after: *const sys::CUgraphNode,
        edges: *const sys::CUgraphEdgeData,
        count: usize,
        params: *mut sys::CUgraphNodeParams,
    );
    fn cuGraphInstantiateWithFlags(exec: *mut sys::CUgraphExec, graph: sys::CUgraph, flags: c_ulonglong);
    fn cuGraphExecDestroy(exec: sys::CUgraphExec);
    fn cuGraphUpload(exec: sys::CUgraphExec, stream: sys::CUstream);
    fn cuGraphLaunch(exec: sys::CUgraphExec, stream: sys::CUstream);
    fn cuModuleLoadData(module: *mut sys::CUmodule, image: *const c_void);
    fn cuModuleUnload(module: sys::CUmodule);
    fn cuModuleGetFunction(function: *mut sys::CUfunction, module: sys::CUmodule, name: *const c_char);
    fn cuFuncSetAttribute(function: sys::CUfunction, which: sys::CUfunction_attribute, value: c_int);
    fn cuFuncGetAttribute(value: *mut c_int, which: sys::CUfunction_attribute, function: sys::CUfunction);
    fn cuLaunchKernelEx(
        config: *const sys::CUlaunchConfig,
        function: sys::CUfunction,
        args: *mut *mut c_void,
        extra: *mut *mut c_void,
    );
    fn cuEventCreate(event: *mut sys::CUevent, flags: c_uint);
    fn cuEventDestroy_v2(event: sys::CUevent);
    fn cuEventRecord(event: sys::CUevent, stream: sys::CUstream);
    fn cuEventSynchronize(event: sys::CUevent);
    fn cuStreamWaitEvent(stream: sys::CUstream, event: sys::CUevent, flags: c_uint);
    fn cuEventElapsedTime(ms: *mut f32, from: sys::CUevent, to: sys::CUevent);
    fn cuTensorMapEncodeTiled(
        map: *mut sys::CUtensorMap,
        dtype: sys::CUtensorMapDataType,
        rank: u32,
        address: *mut c_void,
        dims: *const u64,
        strides: *const u64,
        tile: *const u32,
        steps: *const u32,
        interleave: sys::CUtensorMapInterleave,
        swizzle: sys::CUtensorMapSwizzle,
        promotion: sys::CUtensorMapL2promotion,
        fill: sys::CUtensorMapFloatOOBfill,
    );
}

/// The code of `cuStreamQuery` for a stream that still has work.
const NOT_READY: c_uint = 600;

impl DriverApi {
    /// Whether all work of a stream is done; an error if some of it failed. Never waits.
    ///
    /// # Safety
    /// The stream belongs to the current context and exists.
    pub(crate) unsafe fn stream_is_done(&self, stream: sys::CUstream) -> Result<bool> {
        // SAFETY: the caller keeps the contract of the call.
        match unsafe { (self.cuStreamQuery)(stream) } {
            0 => Ok(true),
            NOT_READY => Ok(false),
            code => Err(driver_failed(self, "cuStreamQuery", code)),
        }
    }
}

api! {
    /// Calls that only newer drivers have, since CUDA 13.0.
    NewerApi, newer_failed;
    fn cuMemcpyBatchAsync_v2(
        to: *mut sys::CUdeviceptr,
        from: *mut sys::CUdeviceptr,
        bytes: *mut usize,
        count: usize,
        attributes: *mut CopyAttributes,
        first_of: *mut usize,
        kinds: usize,
        stream: sys::CUstream,
    );
}

/// How copies of a batch are done (`CUmemcpyAttributes`).
#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct CopyAttributes {
    source_order: c_int,
    /// Hints for managed memory: type and number.
    source: [c_int; 2],
    target: [c_int; 2],
    flags: c_uint,
}

impl CopyAttributes {
    /// Sources are read in the order of the stream.
    pub(crate) fn in_order() -> CopyAttributes {
        CopyAttributes { source_order: 1, ..CopyAttributes::default() }
    }
}

fn newer_failed(_: &NewerApi, call: &'static str, code: c_uint) -> Error {
    Error::Driver { call: call.into(), code: code.to_string() }
}

fn driver_failed(api: &DriverApi, call: &'static str, code: c_uint) -> Error {
    let text = |get: unsafe extern "C" fn(c_uint, *mut *const c_char) -> c_uint| {
        let mut text = std::ptr::null();
        // SAFETY: the driver sets `text` to a static string or leaves it null.
        let known = unsafe { get(code, &mut text) } == 0 && !text.is_null();
        // SAFETY: `text` was set above and is static.
        known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    };
    let name = text(api.cuGetErrorName).unwrap_or_else(|| "unknown code".into());
    let words = text(api.cuGetErrorString).unwrap_or_default();
    Error::Driver { call: call.into(), code: format!("{code} {name}: {words}") }
}

/// An NVRTC program.
pub(crate) type Program = *mut c_void;

api! {
    /// The run-time compiler's calls.
    NvrtcApi, nvrtc_failed;
    fn nvrtcVersion(major: *mut c_int, minor: *mut c_int);
    fn nvrtcCreateProgram(
        program: *mut Program,
        source: *const c_char,
        name: *const c_char,
        headers: c_int,
        header_texts: *const *const c_char,
        header_names: *const *const c_char,
    );
    fn nvrtcDestroyProgram(program: *mut Program);
    fn nvrtcCompileProgram(program: Program, count: c_int, options: *const *const c_char);
    fn nvrtcGetProgramLogSize(program: Program, size: *mut usize);
    fn nvrtcGetProgramLog(program: Program, log: *mut c_char);
    fn nvrtcGetPTXSize(program: Program, size: *mut usize);
    fn nvrtcGetPTX(program: Program, ptx: *mut c_char);
    fn nvrtcGetCUBINSize(program: Program, size: *mut usize);
    fn nvrtcGetCUBIN(program: Program, cubin: *mut c_char);
}

fn nvrtc_failed(_: &NvrtcApi, call: &'static str, code: c_uint) -> Error {
    let name = match code {
        1 => "out of memory",
        3 => "invalid input",
        5 => "invalid option",
        6 => "compilation",
        7 => "builtin operation failure (libnvrtc-builtins missing?)",
        11 => "internal error",
        _ => "error",
    };
    Error::Driver { call: call.into(), code: format!("{code} {name}") }
}

api! {
    /// cuBLASLt's calls.
    LtApi, lt_failed;
    fn cublasLtCreate(handle: *mut lt::cublasLtHandle_t);
    fn cublasLtDestroy(handle: lt::cublasLtHandle_t);
    fn cublasLtMatmul(
        handle: lt::cublasLtHandle_t,
        desc: lt::cublasLtMatmulDesc_t,
        alpha: *const c_void,
        a: *const c_void,
        a_layout: lt::cublasLtMatrixLayout_t,
        b: *const c_void,
        b_layout: lt::cublasLtMatrixLayout_t,
        beta: *const c_void,
        c: *const c_void,
        c_layout: lt::cublasLtMatrixLayout_t,
        d: *mut c_void,
        d_layout: lt::cublasLtMatrixLayout_t,
        algo: *const lt::cublasLtMatmulAlgo_t,
        workspace: *mut c_void,
        workspace_bytes: usize,
        stream: sys::CUstream,
    );
    fn cublasLtMatmulAlgoGetHeuristic(
        handle: lt::cublasLtHandle_t,
        desc: lt::cublasLtMatmulDesc_t,
        a: lt::cublasLtMatrixLayout_t,
        b: lt::cublasLtMatrixLayout_t,
        c: lt::cublasLtMatrixLayout_t,
        d: lt::cublasLtMatrixLayout_t,
        preference: lt::cublasLtMatmulPreference_t,
        asked: c_int,
        results: *mut lt::cublasLtMatmulHeuristicResult_t,
        given: *mut c_int,
    );
    fn cublasLtMatmulDescCreate(
        desc: *mut lt::cublasLtMatmulDesc_t,
        compute: lt::cublasComputeType_t,
        scale: lt::cudaDataType_t,
    );
    fn cublasLtMatmulDescDestroy(desc: lt::cublasLtMatmulDesc_t);
    fn cublasLtMatmulDescSetAttribute(
        desc: lt::cublasLtMatmulDesc_t,
        which: lt::cublasLtMatmulDescAttributes_t,
        value: *const c_void,
        bytes: usize,
    );
    fn cublasLtMatmulPreferenceCreate(preference: *mut lt::cublasLtMatmulPreference_t);
    fn cublasLtMatmulPreferenceDestroy(preference: lt::cublasLtMatmulPreference_t);
    fn cublasLtMatmulPreferenceSetAttribute(
        preference: lt::cublasLtMatmulPreference_t,
        which: lt::cublasLtMatmulPreferenceAttributes_t,
        value: *const c_void,
        bytes: usize,
    );
    fn cublasLtMatrixLayoutCreate(
        layout: *mut lt::cublasLtMatrixLayout_t,
        dtype: lt::cudaDataType,
        rows: u64,
        cols: u64,
        stride: i64,
    );
    fn cublasLtMatrixLayoutDestroy(layout: lt::cublasLtMatrixLayout_t);
}

fn lt_failed(_: &LtApi, call: &'static str, code: c_uint) -> Error {
    let name = match code {
        1 => "not initialised",
        3 => "allocation failed",
        7 => "invalid value",
        8 => "architecture mismatch",
        13 => "execution failed",
        14 => "internal error",
        15 => "not supported",
        _ => "error",
    };
    Error::Driver { call: call.into(), code: format!("{code} {name}") }
}
