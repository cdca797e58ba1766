"""Writes crates/device/tests/goldens/quant.bin: random blocks of every GGUF type of the device,
dequantised by the `gguf` package (pip install gguf). Run from the repository's root."""

import struct

import gguf
import numpy as np

TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
# Byte offsets of the f16 numbers in a block.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}
BLOCKS = 2

random = np.random.default_rng(20260101)
with open("crates/device/tests/goldens/quant.bin", "wb") as out:
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        elems, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 256, (BLOCKS, size), dtype=np.uint8)
        for at in HALVES[name]:
            halves = random.uniform(-1, 1, BLOCKS).astype(np.float16)
            blocks[:, at : at + 2] = halves.view(np.uint8).reshape(BLOCKS, 2)
        values = gguf.quants.dequantize(blocks, kind).astype(np.float32)
        out.write(struct.pack("<II", blocks.size, values.size))
        out.write(blocks.tobytes() + values.tobytes())
