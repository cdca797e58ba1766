//! GEMMs through cuBLASLt. The algorithm for a shape is chosen once and kept, so that the same shape runs the same
//! code in every graph. The workspace belongs to the plan, so that nothing is allocated.

use super::api::LtApi;
use super::context::{Context, Stream, may_wait, report};
use super::launch::Gemm;
use super::library;
use crate::arena::ArenaInner;
use crate::{DType, Error, Result, Tensor};
use cudarc::cublaslt::sys as lt;
use cudarc::cublaslt::sys::cublasLtMatmulDescAttributes_t as Attribute;
use std::collections::{HashMap, hash_map::Entry};
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

/// Everything an algorithm choice depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Shape {
    /// rows, n, k and the four strides.
    sizes: [u32; 7],
    dtypes: [DType; 4],
    bias: bool,
    residual: bool,
    workspace: u64,
}

/// cuBLASLt, opened for one context.
#[derive(Debug)]
pub(crate) struct Gemms {
    context: Arc<Context>,
    api: &'static LtApi,
    handle: lt::cublasLtHandle_t,
    chosen: Mutex<HashMap<Shape, lt::cublasLtMatmulAlgo_t>>,
}

// SAFETY: a cuBLASLt handle may be used from several threads.
unsafe impl Send for Gemms {}
// SAFETY: as above.
unsafe impl Sync for Gemms {}

impl Gemms {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Gemms> {
        let api = &library::cublas_lt()?.api;
        context.bind()?;
        let _turn = may_wait();
        let mut handle = std::ptr::null_mut();
        // SAFETY: a context is current.
        unsafe { api.cublasLtCreate(&mut handle) }?;
        Ok(Gemms { context: context.clone(), api, handle, chosen: Mutex::default() })
    }

    /// Chooses the algorithm before the launch.
    pub(crate) fn prepare(&self, gemm: &Gemm) -> Result<()> {
        self.context.bind()?;
        let shape = shape(gemm);
        let mut chosen = self.chosen.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Entry::Vacant(entry) = chosen.entry(shape) {
            let _turn = may_wait();
            entry.insert(self.choose(&Layouts::new(self.api, gemm)?, gemm)?);
        }
        Ok(())
    }

    fn choose(&self, layouts: &Layouts, gemm: &Gemm) -> Result<lt::cublasLtMatmulAlgo_t> {
        let workspace = workspace(gemm) as usize;
        let preference = Owned::new(
            LtApi::cublasLtMatmulPreferenceDestroy,
            self.api,
            // SAFETY: writes one handle.
            |handle| unsafe { self.api.cublasLtMatmulPreferenceCreate(handle) },
        )?;
        let which =
            lt::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let value = std::ptr::from_ref(&workspace).cast();
        // SAFETY: the attribute is a size_t.
        unsafe {
            self.api.cublasLtMatmulPreferenceSetAttribute(
                preference.raw,
                which,
                value,
                size_of::<usize>(),
            )
        }?;
        // SAFETY: plain data for the library to fill; all zeroes is a valid value of each field.
        let mut result: lt::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        let mut given = 0;
        // SAFETY: all handles live; room for the one result asked for.
        unsafe {
            self.api.cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                layouts.desc.raw,
                layouts.w.raw,
                layouts.x.raw,
                layouts.c.raw,
                layouts.y.raw,
                preference.raw,
                1,
                &mut result,
                &mut given,
            )
        }?;
        if given == 0 {
            let problem = format!("cuBLASLt has no algorithm for {:?}", shape(gemm));
            return Err(Error::Contract { op: "gemm".into(), problem });
        }
        Ok(result.algo)
    }

    /// Runs or records a GEMM that was prepared.
    pub(crate) fn launch(&self, stream: &Stream, arena: &ArenaInner, gemm: &Gemm) -> Result<()> {
        self.context.bind()?;
        let algo = {
            let chosen = self.chosen.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            chosen.get(&shape(gemm)).copied()
        };
        let algo = algo.ok_or_else(|| Error::Contract {
            op: "gemm".into(),
            problem: "launched before it was prepared".into(),
        })?;
        let layouts = Layouts::new(self.api, gemm)?;
        let address = |tensor: &Tensor| -> Result<*mut c_void> {
            arena.check("gemm", tensor.span)?;
            Ok(arena.address(tensor.span) as *mut c_void)
        };
        if let Some(bias) = &gemm.bias {
            layouts.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, address(bias)?)?;
        }
        let (x, w, y) = (address(&gemm.x)?, address(&gemm.w)?, address(&gemm.y)?);
        let c = gemm.residual.as_ref().map_or(Ok(y), address)?;
        let scratch = match gemm.workspace {
            Some(span) => {
                arena.check("gemm workspace", span)?;
                arena.address(span) as *mut c_void
            }
            None => std::ptr::null_mut(),
        };
        let (alpha, beta) = (1.0f32, if gemm.residual.is_some() { 1.0f32 } else { 0.0 });
        // SAFETY: layouts describe the tensors, which were checked against the arena; the algorithm was
        // chosen for this shape and workspace.
        unsafe {
            self.api.cublasLtMatmul(
                self.handle,
                layouts.desc.raw,
                std::ptr::from_ref(&alpha).cast(),
                w,
                layouts.w.raw,
                x,
                layouts.x.raw,
                std::ptr::from_ref(&beta).cast(),
                c,
                layouts.c.raw,
                y,
                layouts.y.raw,
                &algo,
                scratch,
                workspace(gemm) as usize,
                stream.raw,
            )
        }
    }
}

impl Drop for Gemms {
    fn drop(&mut self) {
        report(self.context.bind().map(|_| ()));
        let _turn = may_wait();
        // SAFETY: created once, destroyed once.
        report(unsafe { self.api.cublasLtDestroy(self.handle) });
    }
}

fn workspace(gemm: &Gemm) -> u64 {
    gemm.workspace.map_or(0, |span| span.len)
}

fn shape(gemm: &Gemm) -> Shape {
    let Gemm { x, w, residual, y, .. } = gemm;
    let c = residual.as_ref().unwrap_or(y);
    Shape {
        sizes: [x.rows, w.rows, x.cols, x.stride, w.stride, c.stride, y.stride],
        dtypes: [x.dtype, w.dtype, c.dtype, y.dtype],
        bias: gemm.bias.is_some(),
        residual: residual.is_some(),
        workspace: workspace(gemm),
    }
}

/// A library object that is destroyed with its owner.
struct Owned<'a, T: Copy> {
    api: &'a LtApi,
    raw: *mut T,
    destroy: unsafe fn(&LtApi, *mut T) -> Result<()>,
}

impl<'a, T: Copy> Owned<'a, T> {
    fn new(
        destroy: unsafe fn(&LtApi, *mut T) -> Result<()>,
        api: &'a LtApi,
        create: impl FnOnce(*mut *mut T) -> Result<()>,
    ) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        create(&mut raw)?;
        Ok(Owned { api, raw, destroy })
    }
}

impl<T: Copy> Drop for Owned<'_, T> {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        report(unsafe { (self.destroy)(self.api, self.raw) });
    }
}

/// The GEMM as cuBLASLt sees it. It is column-major, so row-major `y = x·wᵀ` is its `yᵀ = w·xᵀ`: `w` transposed is
/// its first operand, and rows are its columns.
struct Layouts<'a> {
    desc: Owned<'a, lt::cublasLtMatmulDescOpaque_t>,
    w: Owned<'a, lt::cublasLtMatrixLayoutOpaque_t>,
    x: Owned<'a, lt::cublasLtMatrixLayoutOpaque_t>,
    c: Owned<'a, lt::cublasLtMatrixLayoutOpaque_t>,
    y: Owned<'a, lt::cublasLtMatrixLayoutOpaque_t>,
}

impl<'a> Layouts<'a> {
    fn new(api: &'a LtApi, gemm: &Gemm) -> Result<Layouts<'a>> {
        let compute = lt::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let scale = lt::cudaDataType_t::CUDA_R_32F;
        let desc = Owned::new(LtApi::cublasLtMatmulDescDestroy, api, |handle| {
            // SAFETY: writes one handle.
            unsafe { api.cublasLtMatmulDescCreate(handle, compute, scale) }
        })?;
        let layout = |tensor: &Tensor| {
            let dtype = dtype(tensor.dtype)?;
            let (rows, cols) = (tensor.cols.into(), tensor.rows.into());
            Owned::new(LtApi::cublasLtMatrixLayoutDestroy, api, |handle| {
                // SAFETY: writes one handle.
                unsafe {
                    api.cublasLtMatrixLayoutCreate(handle, dtype, rows, cols, tensor.stride.into())
                }
            })
        };
        let c = layout(gemm.residual.as_ref().unwrap_or(&gemm.y))?;
        let (w, x, y) = (layout(&gemm.w)?, layout(&gemm.x)?, layout(&gemm.y)?);
        let layouts = Layouts { desc, w, x, c, y };
        // CUBLAS_OP_T, which the bindings lack.
        layouts.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, 1_u32)?;
        if gemm.bias.is_some() {
            let adds = lt::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            layouts.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, adds)?;
        }
        Ok(layouts)
    }

    /// Sets an attribute of the GEMM whose type is `T`.
    fn set<T>(&self, which: Attribute, value: T) -> Result<()> {
        let (desc, value) = (&self.desc, std::ptr::from_ref(&value).cast());
        // SAFETY: the value lives, and callers pass what the attribute is: a 32-bit enum or an address.
        unsafe { desc.api.cublasLtMatmulDescSetAttribute(desc.raw, which, value, size_of::<T>()) }
    }
}

fn dtype(dtype: DType) -> Result<lt::cudaDataType> {
    match dtype {
        DType::F32 => Ok(lt::cudaDataType::CUDA_R_32F),
        DType::F16 => Ok(lt::cudaDataType::CUDA_R_16F),
        DType::BF16 => Ok(lt::cudaDataType::CUDA_R_16BF),
        other => {
            let problem = format!("{other:?} operands; f32, f16 or bf16 are needed");
            Err(Error::Contract { op: "gemm".into(), problem })
        }
    }
}
