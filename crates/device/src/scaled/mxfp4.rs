//! MXFP4: four bits for each element (a sign, two bits of exponent, one of mantissa), a byte for 32 columns of a row that
//! is an exponent alone.
//!
//! In memory: pieces of 16 rows × 64 columns. A piece has 32 lanes × 4 words, then 32 exponents. Word `s` of lane `4·g + j`
//! is what that lane needs for columns `16s` to `16s + 15` as the left operand of an MMA: in its lower half the columns
//! `2j` and `2j + 8` of rows `g` and `g + 8`, in its upper half the columns behind them ([`place`]). Bits of three of the four elements
//! in half a word lie where one shift and one mask make them the sign, exponent and mantissa of a bf16; the fourth shares
//! what is left with that of the word beside it (`kernels/fp4.cuh`, [`apart`]). Exponent `4g + 2h + u` is that
//! of row `g + 8u` and the columns `32h` and on.
//!
//! A checkpoint has two elements to a byte: element `k` of a row is the lower half of byte `k / 2` where k is even.

use crate::cpu::simd::levels;

/// Columns with one exponent.
pub(crate) const GROUP: usize = 32;
/// Columns of a piece.
pub(crate) const COLS: usize = 64;
/// Bytes of the elements of a piece.
const CODES: usize = super::PIECE_ROWS * COLS / 2;
/// Bytes of a piece.
pub(crate) const PIECE: usize = CODES + super::PIECE_ROWS * (COLS / GROUP);
/// The largest exponent that kernels take: 2 to the power of 33.
pub(crate) const LARGEST: u8 = 160;
/// Twice the magnitude of an element by its lower three bits.
const DOUBLED: [u8; 8] = [0, 1, 2, 3, 4, 6, 8, 12];
/// The exponent of 2 that a byte of 0 stands for.
const LOWEST: i32 = -127;
/// The exponent of the largest element, 6.
const MOST_EXPONENT: i32 = 2;

/// The element of half a word whose bits are in two words.
const SHARED: usize = 3;

/// The four bits of one of the other elements in half a word.
#[inline(always)]
fn code(half: u32, which: usize) -> u32 {
    half >> (12 - 3 * which) & 8 | half >> (6 - 3 * which) & 7
}

/// Half a word with the four bits of an element, and zeros.
fn placed(code: u32, which: usize) -> u32 {
    (code & 8) << (12 - 3 * which) | (code & 7) << (6 - 3 * which)
}

/// What halves of an even word and of the next one have of a shared element, which belongs to the second or to the first of them.
fn apart(code: u32, second: bool) -> [u32; 2] {
    let down = if second { 3 } else { 0 };
    [((code & 8) << 11 | (code & 1) << 13) >> down, (code & 6) << 12 >> down]
}

/// The shared elements of halves of two words, as the first and second element of a half.
#[inline(always)]
fn together(first: u32, second: u32) -> u32 {
    first << 1 & 0x9000 | second >> 6 & 0x01b0 | first >> 7 & 0x0048
}

/// Where an element of a piece lies: the byte of its half word, and which of the four elements there it is.
fn place(row: usize, col: usize) -> (usize, usize) {
    let (upper, g) = (row / 8, row % 8);
    let (step, within) = (col / 16, col % 16);
    let lane = 4 * g + within % 8 / 2;
    (16 * lane + 4 * step + 2 * (within % 2), 2 * (within / 8) + upper)
}

/// An element's bits in the half words that have them.
fn bits_at(row: usize, col: usize, code: u32) -> [(usize, u32); 2] {
    let (at, which) = place(row, col);
    if which != SHARED {
        return [(at, placed(code, which)), (at, 0)];
    }
    let second = at / 4 % 2 == 1;
    let first = at - if second { 4 } else { 0 };
    let [a, b] = apart(code, second);
    [(first, a), (first + 4, b)]
}

/// Where the exponent of a row and a group of a piece lies.
const fn exponent_at(row: usize, group: usize) -> usize {
    CODES + 4 * (row % 8) + 2 * group + row / 8
}

/// 2 to the power that a byte stands for; 255 is no number.
pub(crate) fn power(byte: u8) -> f32 {
    match byte {
        255 => f32::NAN,
        // Below the smallest normal f32.
        0 => f32::from_bits(1 << 22),
        exponent => f32::from_bits(u32::from(exponent) << 23),
    }
}

/// Half of it, exactly: with elements doubled to whole numbers.
#[inline(always)]
fn half_power(byte: u8) -> f32 {
    match byte {
        255 => f32::NAN,
        0 => f32::from_bits(1 << 21),
        1 => f32::from_bits(1 << 22),
        exponent => f32::from_bits((u32::from(exponent) - 1) << 23),
    }
}

#[inline(always)]
fn read_body<const FMA: bool>(pieces: &[u8], row: usize, out: &mut [f32]) {
    let (upper, g) = (row / 8, row % 8);
    for (piece, out) in pieces.chunks_exact(PIECE).zip(out.chunks_exact_mut(COLS)) {
        let lanes: &[u8; 64] = piece[64 * g..][..64].try_into().expect("four lanes");
        // Of columns 2j and 2j + 1 of eight, in the order of these columns.
        let halves = |step: usize| -> [u32; 8] {
            std::array::from_fn(|i| {
                let at = 16 * (i / 2) + 4 * step + 2 * (i % 2);
                u32::from(u16::from_le_bytes([lanes[at], lanes[at + 1]]))
            })
        };
        for (step, out) in out.chunks_exact_mut(16).enumerate() {
            let half = half_power(piece[exponent_at(row, step / 2)]);
            for (eight, out) in out.chunks_exact_mut(8).enumerate() {
                let out: &mut [f32; 8] = out.try_into().expect("eight columns");
                let which = 2 * eight + upper;
                let (words, which) = if which == SHARED {
                    let (first, second) = (halves(step / 2 * 2), halves(step / 2 * 2 + 1));
                    (std::array::from_fn(|i| together(first[i], second[i])), step % 2)
                } else {
                    (halves(step), which)
                };
                for (out, half_word) in out.iter_mut().zip(words) {
                    let code = code(half_word, which) as i32;
                    let (exponent, mantissa) = (code >> 1 & 3, code & 1);
                    let normal = i32::from(exponent > 0);
                    // An exponent of 0 is that of 1, without the leading bit.
                    let doubled = (2 * normal + mantissa) << (exponent - normal);
                    // A sign stays where the element is 0.
                    let sign = (code as u32 & 8) << 28;
                    *out = f32::from_bits((doubled as f32).to_bits() | sign) * half;
                }
            }
        }
    }
}

levels! {
    /// A row of a strip of pieces as floats, with the level's instructions. `row` counts from the first of the sixteen.
    pub(crate) fn read_with(pieces: &[u8], row: usize, out: &mut [f32]) = read_body;
}

/// A row of a strip of pieces as floats. `row` counts from the first of the sixteen.
pub(crate) fn read(pieces: &[u8], row: usize, out: &mut [f32]) {
    read_body::<false>(pieces, row, out);
}

/// The pieces of a matrix of `cols` columns that have this row, and which of their rows it is.
pub(crate) fn strip(bytes: &[u8], cols: usize, row: usize) -> (&[u8], usize) {
    let each = cols / COLS * PIECE;
    (&bytes[row / super::PIECE_ROWS * each..][..each], row % super::PIECE_ROWS)
}

/// Writes a row of a strip of pieces, which was zeros, from bytes and exponents as a checkpoint has them.
pub(crate) fn write(pieces: &mut [u8], row: usize, bytes: &[u8], exponents: &[u8]) {
    let rows = bytes.chunks_exact(COLS / 2).zip(exponents.chunks_exact(COLS / GROUP));
    for (piece, (bytes, exponents)) in pieces.chunks_exact_mut(PIECE).zip(rows) {
        for (at, byte) in bytes.iter().enumerate() {
            for (col, code) in [(2 * at, byte & 15), (2 * at + 1, byte >> 4)] {
                for (at, bits) in bits_at(row, col, u32::from(code)) {
                    let bits = bits.to_le_bytes();
                    piece[at] |= bits[0];
                    piece[at + 1] |= bits[1];
                }
            }
        }
        for (group, exponent) in exponents.iter().enumerate() {
            piece[exponent_at(row, group)] = *exponent;
        }
    }
}

/// A group of floats as elements and their exponent: that of the largest float, so that it becomes 4 to 6; rounded to the
/// nearest, ties to even, and what is larger than 6 becomes 6.
pub(crate) fn quantise(floats: &[f32], bytes: &mut [u8]) -> u8 {
    let most = floats.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let exponent = if most > 0.0 { most.log2().floor() as i32 - MOST_EXPONENT } else { 0 };
    let byte = (exponent - LOWEST).clamp(0, i32::from(LARGEST)) as u8;
    let doubled = 2.0 / power(byte);
    bytes.fill(0);
    for (at, x) in floats.iter().enumerate() {
        let x = x * doubled;
        let size = x.abs().min(12.0);
        let distance = |code: &usize| (f32::from(DOUBLED[*code]) - size).abs();
        // The even one of two that are equally near comes first.
        let order = [0, 2, 4, 6, 1, 3, 5, 7];
        let nearest = order.into_iter().min_by(|a, b| distance(a).total_cmp(&distance(b)));
        let code = nearest.unwrap_or(0) as u8 | u8::from(x.is_sign_negative()) << 3;
        bytes[at / 2] |= code << (at % 2 * 4);
    }
    byte
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scaled::PIECE_ROWS;

    const VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

    /// A row's floats after it was written to each row of a strip, beside ones in all other rows.
    fn read_back(bytes: &[u8], exponents: &[u8]) -> Vec<f32> {
        let cols = 2 * bytes.len();
        let rows = (0..PIECE_ROWS).map(|row| {
            let mut strip = vec![0; cols / COLS * PIECE];
            for other in 0..PIECE_ROWS {
                if other == row {
                    write(&mut strip, row, bytes, exponents);
                } else {
                    write(&mut strip, other, &vec![0xff; bytes.len()], &vec![127; exponents.len()]);
                }
            }
            let mut out = vec![0.0; cols];
            for other in (0..PIECE_ROWS).filter(|other| *other != row) {
                read(&strip, other, &mut out);
                assert!(out.iter().all(|x| *x == -6.0), "row {other} beside {row}");
            }
            read(&strip, row, &mut out);
            out
        });
        rows.reduce(|first, other| {
            let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&first), bits(&other));
            first
        })
        .expect("sixteen rows")
    }

    #[test]
    fn elements_of_a_piece_lie_apart() {
        let mut taken = vec![0u16; CODES / 2];
        for row in 0..PIECE_ROWS {
            for col in 0..COLS {
                let bits = bits_at(row, col, 15);
                assert_eq!(bits.iter().map(|(_, bits)| bits.count_ones()).sum::<u32>(), 4);
                for (at, bits) in bits.map(|(at, bits)| (at, bits as u16)) {
                    assert_eq!(taken[at / 2] & bits, 0, "{row}, {col}");
                    taken[at / 2] |= bits;
                }
            }
        }
        assert!(taken.iter().all(|bits| *bits == u16::MAX));
    }

    #[test]
    fn every_element_times_every_power() {
        let bytes: Vec<u8> = (0..16).map(|i| i | (15 - i) << 4).collect();
        let bytes = [&bytes[..], &bytes].concat();
        for exponent in 0..=LARGEST {
            let exponents = [exponent, LARGEST - exponent];
            for (at, found) in read_back(&bytes, &exponents).into_iter().enumerate() {
                let (at, exponent) = (at % GROUP, exponents[at / GROUP]);
                let code = if at % 2 == 0 { at / 2 } else { 15 - at / 2 };
                let sign = if code < 8 { 1.0 } else { -1.0 };
                let want = sign * VALUES[code % 8] * power(exponent);
                assert_eq!(found.to_bits(), want.to_bits(), "{code} by {exponent}");
            }
        }
    }

    #[test]
    fn quantising_takes_the_nearest() {
        let floats: Vec<f32> = (0..64).map(|i| (i as f32 - 31.5) * 0.19).collect();
        let mut bytes = [0; COLS / 2];
        let (first, second) = bytes.split_at_mut(GROUP / 2);
        let exponents = [quantise(&floats[..GROUP], first), quantise(&floats[GROUP..], second)];
        for (at, (x, found)) in floats.iter().zip(read_back(&bytes, &exponents)).enumerate() {
            let near = |value: &f32| (value * power(exponents[at / GROUP]) - x.abs()).abs();
            let best = VALUES.iter().map(near).fold(f32::INFINITY, f32::min);
            assert_eq!((found - x).abs(), best, "{x} became {found}");
        }
        let exact: Vec<f32> =
            (0..64).map(|i| VALUES[i % 8] * if i % 32 < 8 { -0.25 } else { 0.25 }).collect();
        let (first, second) = bytes.split_at_mut(GROUP / 2);
        let exponents = [quantise(&exact[..GROUP], first), quantise(&exact[GROUP..], second)];
        assert_eq!(read_back(&bytes, &exponents), exact);
        let mut bytes = [1; GROUP / 2];
        assert_eq!(quantise(&[0.0; GROUP], &mut bytes), 127);
        assert_eq!(bytes, [0; GROUP / 2]);
        assert_eq!(quantise(&[f32::MAX; GROUP], &mut bytes), LARGEST);
        assert_eq!(bytes, [0x77; GROUP / 2]);
    }
}
