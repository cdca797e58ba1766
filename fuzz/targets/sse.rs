//! Any bytes as server-sent events: the events do not depend on the pieces.
#![no_main]

use libfuzzer_sys::fuzz_target;
use load::SseParser;

fn read<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Vec<String> {
    let (mut parser, mut events) = (SseParser::default(), Vec::new());
    for piece in pieces {
        parser.push(piece, |data| events.push(data.to_string()));
    }
    events
}

fuzz_target!(|input: &[u8]| {
    let Some((first, bytes)) = input.split_first() else { return };
    let size = usize::from(*first).max(1);
    assert_eq!(read(bytes.chunks(size)), read(std::iter::once(bytes)));
});
