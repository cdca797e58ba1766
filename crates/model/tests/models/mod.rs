//! The tiny checkpoints of `tests/goldens`, and the devices they run on.

use device::{Device, DeviceChoice};
use std::path::{Path, PathBuf};

/// This machine's processor, with products of floats in f32.
#[allow(dead_code, reason = "some test binaries open devices of their own")]
pub(crate) fn cpu() -> Device {
    rounding(device::cpu::Numerics::Exact)
}

/// The processor with these numerics.
#[allow(dead_code, reason = "some test binaries open devices of their own")]
pub(crate) fn rounding(numerics: device::cpu::Numerics) -> Device {
    device::cpu::open_rounding(None, numerics, device::cpu::Limit::None).unwrap()
}

/// The processor, and a GPU if there is one.
#[allow(dead_code, reason = "some test binaries open devices of their own")]
pub(crate) fn devices() -> Vec<Device> {
    let mut devices = vec![cpu()];
    match Device::open(DeviceChoice::Cuda(0)) {
        Ok((gpu, _)) => devices.push(gpu),
        Err(reason) => eprintln!("skipped: no GPU ({reason})"),
    }
    devices
}

/// Where they are: beside this crate, or, for a test binary that was carried to another machine, under the
/// folder it is run from.
pub(crate) fn folder() -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
    if built.is_dir() { built } else { "crates/model/tests/goldens".into() }
}

/// The names of all of them, sorted.
#[allow(dead_code, reason = "some test binaries use one of them only")]
pub(crate) fn cases() -> Vec<String> {
    let entries = std::fs::read_dir(folder()).unwrap();
    let mut cases: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    cases.sort();
    cases
}
