//! What the processor offers, found once.

use super::Limit;
use std::fmt;

/// Instruction sets the fast paths choose by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Features {
    /// AVX2, FMA and F16C.
    pub(crate) avx2: bool,
    /// AVX-512 F, BW, DQ, VL.
    pub(crate) avx512: bool,
    /// AVX-512 VNNI.
    pub(crate) vnni: bool,
    /// AVX-512 BF16.
    pub(crate) bf16: bool,
    /// AMX tiles with int8, permitted by the system.
    pub(crate) amx_int8: bool,
    /// AMX tiles with bf16, permitted by the system.
    pub(crate) amx_bf16: bool,
}

impl Features {
    /// Of the processor this runs on.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn detect() -> Features {
        use std::is_x86_feature_detected as has;
        let avx512 = has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl");
        let tiles = amx_bits();
        let permitted = tiles != (false, false) && permit_tiles();
        Features {
            avx2: has!("avx2") && has!("fma") && has!("f16c"),
            avx512,
            vnni: avx512 && has!("avx512vnni"),
            bf16: avx512 && has!("avx512bf16"),
            amx_int8: avx512 && permitted && tiles.0,
            amx_bf16: avx512 && permitted && tiles.1,
        }
    }

    /// Without what a limit forbids.
    pub(crate) fn limited(self, limit: Limit) -> Features {
        let none = Features::default();
        match limit {
            Limit::None => self,
            Limit::Avx512 => Features { amx_int8: false, amx_bf16: false, ..self },
            Limit::Avx2 => Features { avx2: self.avx2, ..none },
            Limit::Portable => none,
        }
    }

    /// Of the processor this runs on.
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn detect() -> Features {
        Features::default()
    }
}

/// Whether the processor has int8 and bf16 tiles.
#[cfg(target_arch = "x86_64")]
fn amx_bits() -> (bool, bool) {
    use std::arch::x86_64::__cpuid_count;
    if __cpuid_count(0, 0).eax < 7 {
        return (false, false);
    }
    let edx = __cpuid_count(7, 0).edx;
    let tile = edx >> 24 & 1 == 1;
    (tile && edx >> 25 & 1 == 1, tile && edx >> 22 & 1 == 1)
}

/// Asks the system for the tile registers; once for the process, inherited by its threads.
#[cfg(target_arch = "x86_64")]
fn permit_tiles() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: a permission request; it changes nothing but what this process may use.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            (self.avx2, "avx2"),
            (self.avx512, "avx512"),
            (self.vnni, "vnni"),
            (self.bf16, "bf16"),
            (self.amx_int8, "amx-int8"),
            (self.amx_bf16, "amx-bf16"),
        ];
        let found: Vec<_> = names.iter().filter(|(has, _)| *has).map(|(_, name)| *name).collect();
        f.write_str(if found.is_empty() { "portable" } else { "" })?;
        f.write_str(&found.join(" "))
    }
}
