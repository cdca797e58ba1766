//! Registers and local memory of a kernel, read from its cubin: an ELF file whose `.nv.info` section lists, per
//! function, registers and the bytes of its stack frame.

/// Resources that one thread of a kernel needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Registers.
    pub registers: u32,
    /// Bytes of local memory: spilled registers, and arrays that are indexed at run time.
    pub local: u32,
}

const REGISTERS: u8 = 0x2f;
const FRAME: u8 = 0x11;
/// Marks an attribute whose value follows it instead of being in its header.
const SIZED: u8 = 0x04;

struct Section {
    name: usize,
    kind: u32,
    offset: usize,
    size: usize,
    link: usize,
}

/// The usage of an entry, if the cubin has it.
pub fn usage(cubin: &[u8], entry: &str) -> Option<Usage> {
    let sections = sections(cubin)?;
    let names = sections.get(u16_at(cubin, 0x3e)? as usize)?.offset;
    let info = sections.iter().find(|s| text(cubin, names + s.name) == Some(".nv.info"))?;
    let function = function(cubin, &sections, entry)?;
    let mut usage = Usage::default();
    let (mut at, end) = (info.offset, info.offset + info.size);
    while at + 4 <= end {
        let (format, attribute) = (*cubin.get(at)?, *cubin.get(at + 1)?);
        let size = if format == SIZED { u16_at(cubin, at + 2)? as usize } else { 0 };
        if format == SIZED && size >= 8 && u32_at(cubin, at + 4)? == function {
            let value = u32_at(cubin, at + 8)?;
            match attribute {
                REGISTERS => usage.registers = value,
                FRAME => usage.local = value,
                _ => {}
            }
        }
        at += 4 + size;
    }
    (usage.registers != 0).then_some(usage)
}

/// The index of a function's symbol.
fn function(cubin: &[u8], sections: &[Section], name: &str) -> Option<u32> {
    const SYMBOLS: u32 = 2;
    const SYMBOL_BYTES: usize = 24;
    let table = sections.iter().find(|section| section.kind == SYMBOLS)?;
    let names = sections.get(table.link)?.offset;
    (0..table.size / SYMBOL_BYTES)
        .find(|index| {
            let at = table.offset + index * SYMBOL_BYTES;
            u32_at(cubin, at).and_then(|offset| text(cubin, names + offset as usize)) == Some(name)
        })
        .map(|index| index as u32)
}

fn sections(cubin: &[u8]) -> Option<Vec<Section>> {
    if cubin.get(..4)? != b"\x7fELF" {
        return None;
    }
    let (start, size) = (u64_at(cubin, 0x28)?, u16_at(cubin, 0x3a)? as usize);
    (0..u16_at(cubin, 0x3c)? as usize)
        .map(|index| {
            let at = start + index * size;
            Some(Section {
                name: u32_at(cubin, at)? as usize,
                kind: u32_at(cubin, at + 4)?,
                offset: u64_at(cubin, at + 24)?,
                size: u64_at(cubin, at + 32)?,
                link: u32_at(cubin, at + 40)? as usize,
            })
        })
        .collect()
}

fn text(cubin: &[u8], at: usize) -> Option<&str> {
    let bytes = cubin.get(at..)?;
    let end = bytes.iter().position(|byte| *byte == 0)?;
    std::str::from_utf8(&bytes[..end]).ok()
}

fn u16_at(cubin: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(cubin.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(cubin: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(cubin.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(cubin: &[u8], at: usize) -> Option<usize> {
    Some(u64::from_le_bytes(cubin.get(at..at + 8)?.try_into().ok()?) as usize)
}
