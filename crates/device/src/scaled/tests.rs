use super::*;

fn random(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed | 1;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next() * next()).collect()
}

/// A matrix from chunks of `step` rows.
fn matrix(
    dtype: DType,
    shape: (usize, usize),
    step: usize,
    mut fill: impl FnMut(&mut Chunk, Range<usize>),
) -> Vec<u8> {
    let mut all = vec![0xa5; dtype.matrix_bytes(shape.0, shape.1)];
    for from in (0..shape.0).step_by(step) {
        let rows = from..(from + step).min(shape.0);
        let mut chunk = Chunk::new(dtype, shape, rows.clone());
        fill(&mut chunk, rows);
        for (at, bytes) in chunk.parts() {
            all[at as usize..][..bytes.len()].copy_from_slice(&bytes);
        }
    }
    all
}

const TYPES: [DType; 7] = [
    DType::F8Row,
    DType::F8Block,
    DType::F8Pairs,
    DType::F8Turns,
    DType::I4,
    DType::I4G64,
    DType::I4G32,
];

/// Values and scales that were set are read back, whatever the chunks: the rows of each scale are those of the format.
#[test]
fn what_is_set_is_read() {
    for dtype in TYPES {
        let (rows, cols): (usize, usize) =
            if group(dtype).is_some() { (48, 384) } else { (640, 304) };
        let each = group(dtype).map_or(scale_cols(dtype, cols), |group| cols / group);
        let wide = group(dtype).unwrap_or(if each == 1 { cols } else { BLOCK });
        let which = |row: usize| match dtype {
            DType::F8Pairs => (row / 2 / 128, row % 2),
            DType::F8Turns => (row / 16 * 8 / 128, row / 8 % 2),
            DType::F8Block => (row / 128, 0),
            _ => (row, 0),
        };
        // Exact in f16.
        let scale = |row: usize, at: usize| {
            ((which(row).0 * 7 + which(row).1 * 3 + at) % 61 + 1) as f32 / 64.0
        };
        let byte = |row: usize, col: usize| ((row * 31 + col * 7) % 0x7e) as u8;
        for step in [unit(dtype), 2 * unit(dtype), rows.next_multiple_of(unit(dtype))] {
            let all = matrix(dtype, (rows, cols), step, |chunk, rows| {
                for row in rows {
                    let bytes: Vec<u8> = (0..cols).map(|col| byte(row, col)).collect();
                    let scales: Vec<f32> = (0..each).map(|at| scale(row, at)).collect();
                    match group(dtype) {
                        None => chunk.set_fp8(row, &bytes, &scales),
                        Some(_) => {
                            let zeros: Vec<u8> =
                                (0..each).map(|at| ((row + at) % 16) as u8).collect();
                            let bytes: Vec<u8> = bytes.iter().map(|byte| byte % 16).collect();
                            chunk.set_int4(row, &bytes, &scales, &zeros);
                        }
                    }
                }
            });
            let mut out = vec![0.0; cols];
            for row in 0..rows {
                read_row(dtype, &all, (rows, cols), row, &mut out);
                for (col, found) in out.iter().enumerate() {
                    let (byte, at) = (byte(row, col), col / wide);
                    let value = match group(dtype) {
                        None => e4m3::decode(byte),
                        Some(_) => (i32::from(byte % 16) - ((row + at) % 16) as i32) as f32,
                    };
                    assert_eq!(*found, value * scale(row, at), "{dtype:?} row {row} column {col}");
                }
            }
        }
    }
}

/// Pieces of 128 columns are what the kernels' harness writes: word by word from the rule of `weights.cuh`.
#[test]
fn pieces_have_the_order_of_the_kernels() {
    let (rows, cols) = (16, 128);
    let value = |row: usize, col: usize| ((row * 5 + col * 3) % 16) as u8;
    let all = matrix(DType::I4, (rows, cols), 16, |chunk, rows| {
        for row in rows {
            let values: Vec<u8> = (0..cols).map(|col| value(row, col)).collect();
            chunk.set_int4(row, &values, &[1.0], &[8]);
        }
    });
    for half in 0..2 {
        for (lane, word) in (0..32).flat_map(|lane| (0..4).map(move |word| (lane, word))) {
            let (g, j, from) = (lane / 4, lane % 4, half * 64 + word * 16);
            let at = half * 512 + lane * 16 + word * 4;
            let found = u32::from_le_bytes(all[at..at + 4].try_into().unwrap());
            let mut expected = 0u32;
            for i in 0..4 {
                let (row, col) = (g + 8 * (i % 2), from + 2 * j + 8 * (i / 2));
                expected |= u32::from(value(row, col)) << (4 * i);
                expected |= u32::from(value(row, col + 1)) << (4 * (i + 4));
            }
            assert_eq!(found, expected, "half {half} lane {lane} word {word}");
        }
    }
}

/// The error of quantising is that of the format, and the search for 4 bits does not lose against the whole range.
#[test]
fn quantising_is_near() {
    for dtype in TYPES {
        // Blocks at the ends are not whole.
        let (rows, cols) = if is_fp8(dtype) { (960, 576) } else { (256, 256) };
        let floats = random(rows * cols, 7);
        let all = matrix(dtype, (rows, cols), rows, |chunk, _| chunk.quantise(&floats));
        let (mut out, mut error, mut size, mut worst) = (vec![0.0; cols], 0.0f64, 0.0f64, 0.0f32);
        for row in 0..rows {
            read_row(dtype, &all, (rows, cols), row, &mut out);
            for (found, x) in out.iter().zip(&floats[row * cols..]) {
                error += f64::from(found - x).powi(2);
                size += f64::from(*x).powi(2);
                worst = worst.max((found - x).abs());
            }
        }
        let relative = (error / size).sqrt();
        let bound = if is_fp8(dtype) { 0.03 } else { 0.16 };
        assert!(relative < bound, "{dtype:?}: {relative}");
        assert!(worst < if is_fp8(dtype) { 0.04 } else { 0.4 }, "{dtype:?}: {worst}");
    }
    let mut values = [0; 128];
    for zeros in [Zeros::Searched, Zeros::Middle] {
        let found = search::int4(&[0.0; 128], &mut values, zeros);
        assert!(values.iter().all(|value| *value == found.zero), "zeros stay zeros");
    }
    // Without a search for zeros the error is larger, by little where values are about symmetric.
    let floats = random(64 * 128, 11);
    let error = |zeros| {
        let found = quantise::int4_rows(&floats, 128, zeros);
        assert!(zeros == Zeros::Searched || found.zeros.iter().all(|zero| *zero == 8));
        let value = |at: usize| {
            f32::from(i16::from(found.values[at]) - i16::from(found.zeros[at / 128]))
                * found.scales[at / 128]
        };
        floats.iter().enumerate().map(|(at, x)| (value(at) - x).powi(2)).sum::<f32>()
    };
    let (searched, middle) = (error(Zeros::Searched), error(Zeros::Middle));
    assert!(searched < middle && middle < 1.3 * searched, "{searched} {middle}");
}
