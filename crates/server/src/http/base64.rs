//! Base64 in headers.

/// The bytes of a text without padding; `last` are the characters of the values 62 and 63. `None` if it has others.
pub(super) fn decode(text: &str, last: [u8; 2]) -> Option<Vec<u8>> {
    let (mut out, mut bits, mut held) = (Vec::new(), 0u32, 0);
    for byte in text.bytes() {
        let six = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            _ if byte == last[0] => 62,
            _ if byte == last[1] => 63,
            _ => return None,
        };
        bits = (bits << 6) | u32::from(six);
        held += 6;
        if held >= 8 {
            held -= 8;
            out.push((bits >> held) as u8);
            bits &= (1 << held) - 1;
        }
    }
    Some(out)
}
