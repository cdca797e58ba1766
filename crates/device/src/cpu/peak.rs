//! The processor's highest rate of 8-bit multiply-adds, to compare linears of packed weights with.

use super::Limit;
use super::features::Features;
use super::pool::Pool;
use std::time::{Duration, Instant};

/// How long each attempt runs.
const ATTEMPT: Duration = Duration::from_millis(40);

/// Multiply-adds per second of `threads` threads that do nothing else, best of a few attempts, and the
/// instruction that does them. `None` where no such instruction is used.
pub fn multiply_adds(threads: Option<usize>, limit: Limit) -> Option<(f64, &'static str)> {
    let features = Features::detect().limited(limit);
    let (round, per_round, name) = kernel(&features)?;
    let pool = Pool::new(threads);
    let attempt = || {
        let _awake = pool.awake();
        let rounds = std::sync::atomic::AtomicU64::new(0);
        let start = Instant::now();
        pool.run(pool.threads(), &|_, _| {
            let mut mine = 0;
            while start.elapsed() < ATTEMPT {
                // SAFETY: the kernel was chosen by what the processor has.
                unsafe { round() };
                mine += 1;
            }
            rounds.fetch_add(mine, std::sync::atomic::Ordering::Relaxed);
        });
        rounds.into_inner() as f64 * per_round / start.elapsed().as_secs_f64()
    };
    let best = (0..5).map(|_| attempt()).fold(0.0, f64::max);
    Some((best, name))
}

type Round = unsafe fn();

#[cfg(target_arch = "x86_64")]
fn kernel(features: &Features) -> Option<(Round, f64, &'static str)> {
    const TILES: f64 = 256.0 * 4.0 * (16 * 16 * 64) as f64;
    const LINES: f64 = 256.0 * 16.0 * 64.0;
    match features {
        Features { amx_int8: true, .. } => Some((tiles, TILES, "tdpbsud")),
        Features { vnni: true, .. } => Some((lines, LINES, "vpdpbusd")),
        _ => None,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn kernel(_features: &Features) -> Option<(Round, f64, &'static str)> {
    None
}

/// 256 rounds of four multiplications of whole tiles.
#[cfg(target_arch = "x86_64")]
unsafe fn tiles() {
    #[repr(align(64))]
    struct Config([u8; 64]);
    static FULL: Config = {
        let mut config = [0u8; 64];
        config[0] = 1;
        let mut tile = 0;
        while tile < 8 {
            config[16 + 2 * tile] = 64;
            config[48 + tile] = 16;
            tile += 1;
        }
        Config(config)
    };
    // SAFETY: the processor has tiles; they are configured first and released last.
    unsafe {
        std::arch::asm!(
            "ldtilecfg [{config}]",
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
            "tilezero tmm4", "tilezero tmm5", "tilezero tmm6", "tilezero tmm7",
            "2:",
            "tdpbsud tmm0, tmm4, tmm6",
            "tdpbsud tmm1, tmm4, tmm7",
            "tdpbsud tmm2, tmm5, tmm6",
            "tdpbsud tmm3, tmm5, tmm7",
            "dec {rounds:e}",
            "jnz 2b",
            "tilerelease",
            config = in(reg) FULL.0.as_ptr(),
            rounds = inout(reg) 256u32 => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, readonly),
        );
    }
}

/// 256 rounds of 16 independent dot products of 64 bytes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn lines() {
    use std::arch::x86_64::*;
    let one = _mm512_set1_epi8(1);
    let mut acc = [_mm512_setzero_si512(); 16];
    for _ in 0..256 {
        for acc in &mut acc {
            *acc = _mm512_dpbusd_epi32(*acc, one, one);
        }
        std::hint::black_box(&mut acc);
    }
}
