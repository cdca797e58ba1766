//! The devices of this machine: the CPU always, a GPU when there is one.

use device::{Device, DeviceChoice};

/// Every device of this machine. Prints a line if there is no GPU.
pub(crate) fn all() -> Vec<Device> {
    let (cpu, _) = Device::open(DeviceChoice::Cpu).expect("the CPU is always there");
    let mut devices = vec![cpu];
    match Device::open(DeviceChoice::Cuda(0)) {
        Ok((gpu, _)) => devices.push(gpu),
        Err(reason) => eprintln!("skipped: no GPU ({reason})"),
    }
    devices
}
