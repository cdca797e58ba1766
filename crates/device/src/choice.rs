//! Which device to use: what the user asks for, and the device that is opened, with the reason.

use crate::cuda::{compile::Compiler, driver::Cuda, library};
use crate::device::Device;
use crate::{Error, Result};
use std::sync::Arc;

/// The values of `--device`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// A GPU if everything it needs is there, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// GPU `N`, or an error that says what is missing.
    Cuda(u32),
}

impl std::str::FromStr for DeviceChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(DeviceChoice::Auto),
            "cpu" => Ok(DeviceChoice::Cpu),
            "cuda" => Ok(DeviceChoice::Cuda(0)),
            _ => text
                .strip_prefix("cuda:")
                .filter(|ordinal| ordinal.bytes().all(|b| b.is_ascii_digit()))
                .and_then(|ordinal| ordinal.parse().ok())
                .map(DeviceChoice::Cuda)
                .ok_or_else(|| Error::NoDevice {
                    asked: text.into(),
                    reason: "a device is auto, cpu, cuda or cuda:N".into(),
                }),
        }
    }
}

impl std::fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DeviceChoice::Auto => f.write_str("auto"),
            DeviceChoice::Cpu => f.write_str("cpu"),
            DeviceChoice::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl Device {
    /// Opens the device asked for, and says in one line which it is and why.
    pub fn open(choice: DeviceChoice) -> Result<(Device, String)> {
        let (device, why) = match choice {
            DeviceChoice::Cpu => (cpu()?, "asked for".to_owned()),
            DeviceChoice::Cuda(ordinal) => (cuda(ordinal)?, "asked for".to_owned()),
            DeviceChoice::Auto => match cuda(0) {
                Ok(device) => (device, "driver, NVRTC and cuBLASLt are there".to_owned()),
                Err(Error::MissingLibrary { library, .. }) => {
                    (cpu()?, format!("no GPU: {library} not found"))
                }
                Err(problem) => (cpu()?, format!("no GPU: {problem}")),
            },
        };
        let line = format!("{} ({why})", device.describe());
        Ok((device, line))
    }
}

fn cpu() -> Result<Device> {
    crate::cpu::open(None, false)
}

fn cuda(ordinal: u32) -> Result<Device> {
    // Look for each library before anything is opened, so that the error names the first one that is missing.
    library::driver()?;
    Compiler::find()?;
    library::cublas_lt()?;
    Ok(Device { driver: Arc::new(Cuda::open(ordinal)?) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_read_and_written_alike() {
        for (text, choice) in [
            ("auto", DeviceChoice::Auto),
            ("cpu", DeviceChoice::Cpu),
            ("cuda:0", DeviceChoice::Cuda(0)),
            ("cuda:7", DeviceChoice::Cuda(7)),
        ] {
            assert_eq!(text.parse(), Ok(choice));
            assert_eq!(choice.to_string(), text);
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        for wrong in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:+1", "CPU"] {
            assert!(wrong.parse::<DeviceChoice>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_gpu_that_cannot_be_is_refused_with_what_is_missing_and_where_it_was_sought() {
        match Device::open(DeviceChoice::Cuda(4095)) {
            Err(Error::MissingLibrary { library, looked, fix }) => {
                assert!(!library.is_empty() && !fix.is_empty());
                assert!(looked.contains("the loader's search path"), "{looked}");
            }
            Err(Error::NoDevice { asked, .. }) => assert_eq!(asked, "cuda:4095"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_doctor_says_what_auto_takes() {
        let report = crate::doctor::report();
        let (_, line) = Device::open(DeviceChoice::Auto).expect("the CPU is always there");
        assert_eq!(report.uses, line);
        assert_eq!(report.libraries.len(), 3);
        let missing = report.libraries.iter().any(|library| library.found.is_none());
        assert_eq!(missing, !report.fixes.is_empty());
        assert!(report.to_string().contains(&line));
    }
}
