//! Device memory of another process, opened by its handle.

use super::context::{Context, report};
use crate::Result;
use crate::shared::Pieces;
use cudarc::driver::sys;
use std::sync::Arc;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY_PEERS: u32 = 1;

/// An allocation of another process.
#[derive(Debug)]
pub(crate) struct IpcMemory {
    context: Arc<Context>,
    base: u64,
    bytes: u64,
}

impl IpcMemory {
    pub(crate) fn open(context: &Arc<Context>, handle: &[u8; 64]) -> Result<IpcMemory> {
        let api = context.bind()?;
        let handle = sys::CUipcMemHandle_st { reserved: handle.map(|byte| byte as _) };
        let mut memory = IpcMemory { context: context.clone(), base: 0, bytes: 0 };
        // SAFETY: any 64 bytes may be asked for; what is opened is closed once, by `memory`.
        unsafe { api.cuIpcOpenMemHandle_v2(&mut memory.base, handle, LAZY_PEERS) }?;
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: the address was just opened.
        unsafe { api.cuMemGetAddressRange_v2(&mut base, &mut bytes, memory.base) }?;
        memory.bytes = bytes as u64 - (memory.base - base);
        Ok(memory)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Copies pieces to addresses and waits for it.
    ///
    /// # Safety
    /// Pieces lie inside, and addresses are of device memory as long as they are.
    pub(crate) unsafe fn copy<'a>(
        &self,
        all: impl Iterator<Item = (&'a Pieces, u64)>,
    ) -> Result<()> {
        let (api, stream) = (self.context.bind()?, self.context.stream.raw);
        let issue = |(pieces, to): (&Pieces, u64)| {
            let (from, len) = (self.base + pieces.from, pieces.to.len as usize);
            if pieces.from_step == pieces.to.len && pieces.to_step == pieces.to.len {
                let bytes = len * pieces.count as usize;
                // SAFETY: the caller's promise.
                return unsafe { api.cuMemcpyAsync(to, from, bytes, stream) };
            }
            let copy = sys::CUDA_MEMCPY2D_st {
                srcXInBytes: 0,
                srcY: 0,
                srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
                srcHost: std::ptr::null(),
                srcDevice: from,
                srcArray: std::ptr::null_mut(),
                srcPitch: pieces.from_step as usize,
                dstXInBytes: 0,
                dstY: 0,
                dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
                dstHost: std::ptr::null_mut(),
                dstDevice: to,
                dstArray: std::ptr::null_mut(),
                dstPitch: pieces.to_step as usize,
                WidthInBytes: len,
                Height: pieces.count as usize,
            };
            // SAFETY: the caller's promise.
            unsafe { api.cuMemcpy2DAsync_v2(&copy, stream) }
        };
        let mut all = all;
        let issued = all.try_for_each(issue);
        // Waited for even if one could not be issued.
        issued.and(self.context.sync())
    }

    /// Reads from `at` on.
    pub(crate) fn read(&self, at: u64, to: &mut [u8]) -> Result<()> {
        let (api, stream) = (self.context.bind()?, self.context.stream.raw);
        let from = self.base + at;
        // SAFETY: the caller checked the range; `to` stays until the copy is done below.
        unsafe { api.cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), stream) }?;
        self.context.sync()
    }
}

impl Drop for IpcMemory {
    fn drop(&mut self) {
        if self.base != 0 {
            // SAFETY: opened once, closed once; copies from it were waited for.
            report(
                self.context.bind().and_then(|api| unsafe { api.cuIpcCloseMemHandle(self.base) }),
            );
        }
    }
}
