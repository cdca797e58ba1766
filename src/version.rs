//! The version, with the commit and what was built in (see `build.rs`).

/// The version and the commit; `dacapo -V`.
pub(crate) const SHORT: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("DACAPO_COMMIT"), ")");

/// The same with the platform, the profile and the devices that are built in; `dacapo --version`.
pub(crate) const LONG: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (",
    env!("DACAPO_COMMIT"),
    ")\n",
    env!("DACAPO_TARGET"),
    ", ",
    env!("DACAPO_PROFILE"),
    " build\n",
    "features: cpu (AVX2, AVX-512 and AMX where the processor has them), cuda (driver, NVRTC and cuBLASLt are loaded \
     at run time)"
);
