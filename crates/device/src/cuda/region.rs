//! A region of device memory: addresses that are reserved once, and physical memory behind them that can be given back
//! and replaced. Recorded graphs hold the addresses, so they outlive any number of such changes.

use super::api::DriverApi;
use super::context::{Context, may_wait, report};
use crate::{Error, Result};
use cudarc::driver::sys;
use std::sync::{Arc, Mutex, MutexGuard};
use sys::CUdevice_attribute as Attribute;

/// Addresses of device memory.
#[derive(Debug)]
pub(super) struct DeviceRegion {
    context: Arc<Context>,
    base: u64,
    /// Bytes of the addresses: whole granules where memory is mapped to them.
    bytes: usize,
    behind: Mutex<Behind>,
}

/// What is behind the addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Behind {
    /// One plain allocation, on a device that cannot map memory: it stays until the end.
    Plain,
    /// Memory that was mapped.
    Mapped(sys::CUmemGenericAllocationHandle),
    Nothing,
}

fn properties(context: &Context) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: location(context),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

fn location(context: &Context) -> sys::CUmemLocation {
    let id = context.gpu.ordinal as i32;
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id }
}

/// The size of pieces that memory is mapped in; `None` on a device that cannot map memory.
fn granule(context: &Context, api: &DriverApi) -> Result<Option<usize>> {
    let (mut device, mut can) = (0, 0);
    // SAFETY: writes one handle; the ordinal is that of an open GPU.
    unsafe { api.cuDeviceGet(&mut device, context.gpu.ordinal as i32) }?;
    let which = Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED;
    // SAFETY: writes one int.
    unsafe { api.cuDeviceGetAttribute(&mut can, which, device) }?;
    if can == 0 {
        return Ok(None);
    }
    let mut bytes = 0;
    let option = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    // SAFETY: the properties live until the call returns.
    unsafe { api.cuMemGetAllocationGranularity(&mut bytes, &properties(context), option) }?;
    Ok(Some(bytes))
}

impl DeviceRegion {
    /// `bytes` bytes of memory, more than none, not initialised.
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<DeviceRegion> {
        let api = context.bind()?;
        let granule = granule(context, api)?;
        let context = context.clone();
        let mut base = 0;
        let Some(granule) = granule else {
            let _turn = may_wait();
            // SAFETY: the context is current; the region frees it.
            unsafe { api.cuMemAlloc_v2(&mut base, bytes) }?;
            return Ok(DeviceRegion { context, base, bytes, behind: Mutex::new(Behind::Plain) });
        };
        let whole =
            bytes.checked_next_multiple_of(granule).unwrap_or(usize::MAX / granule * granule);
        // SAFETY: the context is current; the region frees the addresses.
        unsafe { api.cuMemAddressReserve(&mut base, whole, granule, 0, 0) }?;
        let behind = Mutex::new(Behind::Nothing);
        let region = DeviceRegion { context, base, bytes: whole, behind };
        // A failure drops the region, and with it the addresses.
        region.map()?;
        Ok(region)
    }

    /// The first address.
    pub(super) fn base(&self) -> u64 {
        self.base
    }

    fn behind(&self) -> MutexGuard<'_, Behind> {
        self.behind.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Puts memory behind the addresses, not initialised.
    pub(super) fn map(&self) -> Result<()> {
        let mut behind = self.behind();
        if *behind != Behind::Nothing {
            return Ok(());
        }
        let api = self.context.bind()?;
        let _turn = may_wait();
        let mut handle = 0;
        // SAFETY: the properties live until the call returns; the handle is released below or by `unmap`.
        unsafe { api.cuMemCreate(&mut handle, self.bytes, &properties(&self.context), 0) }?;
        // SAFETY: all of the reserved addresses, which have nothing behind them, and all of the new memory.
        let mapped = unsafe { api.cuMemMap(self.base, self.bytes, 0, handle, 0) };
        let access = mapped.and_then(|()| {
            let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            let access = sys::CUmemAccessDesc { location: location(&self.context), flags };
            // SAFETY: the addresses were mapped above.
            let outcome = unsafe { api.cuMemSetAccess(self.base, self.bytes, &access, 1) };
            if outcome.is_err() {
                // SAFETY: mapped above, and nothing was launched that uses it.
                report(unsafe { api.cuMemUnmap(self.base, self.bytes) });
            }
            outcome
        });
        if let Err(problem) = access {
            // SAFETY: created above and not mapped.
            report(unsafe { api.cuMemRelease(handle) });
            return Err(problem);
        }
        *behind = Behind::Mapped(handle);
        Ok(())
    }

    /// Gives the memory back; the addresses stay. Waits for all work of the device.
    pub(super) fn unmap(&self) -> Result<()> {
        let mut behind = self.behind();
        let handle = match *behind {
            Behind::Mapped(handle) => handle,
            Behind::Nothing => return Ok(()),
            Behind::Plain => {
                return Err(Error::Driver {
                    call: "releasing memory".into(),
                    code: "this GPU has no virtual memory management".into(),
                });
            }
        };
        let api = self.context.bind()?;
        let _turn = may_wait();
        self.context.sync_all()?;
        // SAFETY: mapped by `map`, whole; all work that may use it is done.
        unsafe { api.cuMemUnmap(self.base, self.bytes) }?;
        *behind = Behind::Nothing;
        // SAFETY: created by `map` and no longer mapped.
        unsafe { api.cuMemRelease(handle) }
    }
}

impl Drop for DeviceRegion {
    fn drop(&mut self) {
        let plain = *self.behind() == Behind::Plain;
        if !plain {
            report(self.unmap());
        }
        let _turn = may_wait();
        report(self.context.bind().and_then(|api| match plain {
            // SAFETY: allocated once by `new`, freed once.
            true => unsafe { api.cuMemFree_v2(self.base) },
            // SAFETY: reserved once by `new`, with these bytes, freed once; nothing is mapped there.
            false => unsafe { api.cuMemAddressFree(self.base, self.bytes) },
        }));
    }
}
