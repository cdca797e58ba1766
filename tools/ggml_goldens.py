#!/usr/bin/env python3
"""Writes results of llama.cpp for the tests of `--numerics ggml`.

    pip install llama-cpp-python==0.3.36 gguf     # CMAKE_ARGS as in tools/bench_cpu.py: AVX-512
    python tools/ggml_goldens.py SmolLM2-135M-Instruct.Q4_1.gguf gemma-3-270m-q4_k_m.gguf

* crates/device/tests/goldens/ggml.bin: random inputs of ggml's ops and their results, to the bit. Parts, each with its
  length before it (u32): for Q4_1, Q5_0, Q5_1 and Q8_0 weights, activations and results; a row, a norm's weight, gate
  and up and the results of norm, multiplication and SwiGLU; for one token and for five tokens queries, keys, values
  and the result of attention; pairs of (1, 0) and queries, each with its rotation by eight positions; activations,
  and for each of K_SHAPES weights and results for the first 1, the first 5 and all 27 rows of these activations, which
  llama.cpp adds up in different orders; attention in a window with heads of 256, as above; pairs of (1, 0) rotated,
  queries and their rotation, for pairs half a head apart.
* tests/goldens/llama_cpp/MODEL.json: greedy answers to 20 prompts, 32 tokens each. Prompts are processed 512 tokens at
  once, flash attention is off, the KV cache is f16 and full for layers with a window: the package's defaults.

Run from the repository's root.
"""

import ctypes
import json
import pathlib
import struct
import sys

import llama_cpp
import numpy as np
from compare_greedy import llama, prompts
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

OPS = "crates/device/tests/goldens/ggml.bin"
TOKENS = "tests/goldens/llama_cpp"
F32, F16, I32 = 0, 1, 26
# Which elements ggml rotates together.
NEIGHBOURS, HALVES_OF_A_HEAD = 0, 2
HALVES = {"Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
SMALL_BLOCKS = ["Q4_1", "Q5_0", "Q5_1", "Q8_0"]
# Type and rows of weights. Q4_K with rows in eights is repacked when a model is loaded.
K_SHAPES = [("Q4_K", 40), ("Q4_K", 36), ("Q5_K", 40), ("Q6_K", 40)]
random = np.random.default_rng(20261115)


class Ggml:
    """Graphs of a few ops on the CPU, in f32 by default."""

    def __init__(self):
        folder = pathlib.Path(llama_cpp.__file__).parent / "lib"
        self.base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"))
        self.cpu.ggml_cpu_init()

        class Params(ctypes.Structure):
            _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]

        self.base.ggml_init.restype = ctypes.c_void_p
        self.context = ctypes.c_void_p(self.base.ggml_init(Params(64 << 20, None, False)))
        self.unplaced = ctypes.c_void_p(self.base.ggml_init(Params(1 << 20, None, True)))

    def call(self, name, *arguments):
        function = getattr(self.base, name)
        function.restype = ctypes.c_void_p
        wrapped = [ctypes.c_float(a) if isinstance(a, float) else a for a in arguments]
        return ctypes.c_void_p(function(self.context, *wrapped))

    def tensor(self, kind, shape, data):
        """A tensor of `shape`, innermost first."""
        made = self.call(f"ggml_new_tensor_{len(shape)}d", kind, *map(ctypes.c_int64, shape))
        ctypes.memmove(self.data(made), data.tobytes(), data.nbytes)
        return made

    def pointer(self, library, name, *arguments):
        function = getattr(library, name)
        function.restype = ctypes.c_void_p
        return ctypes.c_void_p(function(*arguments))

    def repacked(self, kind, shape, data):
        """A matrix in the form that the CPU prefers, as models are loaded."""
        base = self.base
        registry = self.pointer(self.cpu, "ggml_backend_cpu_reg")
        device = self.pointer(base, "ggml_backend_reg_dev_get", registry, ctypes.c_size_t(0))
        extra = self.pointer(base, "ggml_backend_reg_get_proc_address", registry, b"ggml_backend_dev_get_extra_bufts")
        extra = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(extra.value)(device)
        base.ggml_backend_buft_name.restype = ctypes.c_char_p
        names = {}
        for buffer_type in extra:
            if not buffer_type:
                break
            names[base.ggml_backend_buft_name(ctypes.c_void_p(buffer_type))] = ctypes.c_void_p(buffer_type)
        size = ctypes.c_size_t(data.nbytes + 4096)
        buffer = self.pointer(base, "ggml_backend_buft_alloc_buffer", names[b"CPU_REPACK"], size)
        made = self.pointer(base, "ggml_new_tensor_2d", self.unplaced, kind, *map(ctypes.c_int64, shape))
        base.ggml_backend_tensor_alloc(buffer, made, self.pointer(base, "ggml_backend_buffer_get_base", buffer))
        base.ggml_backend_tensor_set(made, data.tobytes(), ctypes.c_size_t(0), ctypes.c_size_t(data.nbytes))
        return made

    def data(self, tensor):
        self.base.ggml_get_data.restype = ctypes.c_void_p
        return self.base.ggml_get_data(tensor)

    def floats(self, tensor, count):
        """Computes a tensor."""
        graph = self.call("ggml_new_graph")
        self.base.ggml_build_forward_expand(graph, tensor)
        self.cpu.ggml_graph_compute_with_ctx(self.context, graph, 2)
        return np.ctypeslib.as_array(ctypes.cast(self.data(tensor), ctypes.POINTER(ctypes.c_float)), (count,)).copy()


def normal(*shape):
    return random.normal(0, 1, shape).astype(np.float32)


def blocks(name, rows, cols):
    elems, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    made = random.integers(0, 256, (rows * cols // elems, size), dtype=np.uint8)
    for at in HALVES[name]:
        halves = random.uniform(-0.05, 0.05, len(made)).astype(np.float16)
        made[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return made


def attention(ggml, shape, tokens, length, window=None):
    """Queries, keys, values and the result for tokens at the end of `length` positions."""
    (heads, kv_heads, dim), cells = shape, 256
    q = 3 * normal(heads, tokens, dim)
    k, v = normal(kv_heads, length, dim).astype(np.float16), normal(kv_heads, length, dim).astype(np.float16)
    keys, values = (np.zeros((kv_heads, cells, dim), np.float16) for _ in range(2))
    keys[:, :length], values[:, :length] = k, v
    mask = np.full((tokens, cells), -np.inf, np.float32)
    for token in range(tokens):
        end = length - tokens + token + 1
        mask[token, max(0, end - (window or end)) : end] = 0
    kq = ggml.call("ggml_mul_mat", ggml.tensor(F16, (dim, cells, kv_heads), keys),
                   ggml.tensor(F32, (dim, tokens, heads), q))
    kq = ggml.call("ggml_soft_max_ext", kq, ggml.tensor(F32, (cells, tokens), mask), dim**-0.5, 0.0)
    transposed = np.ascontiguousarray(values.transpose(0, 2, 1))
    kqv = ggml.call("ggml_mul_mat", ggml.tensor(F16, (cells, dim, kv_heads), transposed), kq)
    return [q, k, v, ggml.floats(kqv, q.size)]


def rotation(ggml, x, positions, kind):
    """In place, as in llama.cpp's graphs: ggml uses another loop for it, with other fused multiply-adds."""
    rotated = ggml.call("ggml_rope_ext_inplace", ggml.tensor(F32, x.shape[::-1], x),
                        ggml.tensor(I32, (len(positions),), positions), None, x.shape[-1], kind, 8192, 100000.0, 1.0, 0.0,
                        1.0, 32.0, 1.0)
    return ggml.floats(rotated, x.size)


def write_ops(ggml):
    parts = []
    for name in SMALL_BLOCKS:
        rows, n, k = 5, 32, 160
        w, x = blocks(name, n, k), normal(rows, k)
        matrix = ggml.tensor(GGMLQuantizationType[name], (k, n), w)
        product = ggml.call("ggml_mul_mat", matrix, ggml.tensor(F32, (k, rows), x))
        parts += [w, x, ggml.floats(product, rows * n)]

    rows, n, k = 3, 32, 576
    x, weight, gate, up = normal(rows, k), 1 + normal(k) / 4, blocks("Q4_1", n, k), blocks("Q4_1", n, k)
    normed = ggml.call("ggml_rms_norm", ggml.tensor(F32, (k, rows), x), 1e-5)
    normed = ggml.call("ggml_mul", normed, ggml.tensor(F32, (k,), weight))
    both = [ggml.call("ggml_mul_mat", ggml.tensor(GGMLQuantizationType.Q4_1, (k, n), w), normed) for w in (gate, up)]
    parts += [x, weight, gate, up, ggml.floats(ggml.call("ggml_swiglu_split", *both), rows * n)]

    heads, kv_heads, dim = 6, 2, 64
    for tokens, length in ((1, 150), (5, 41)):
        parts += attention(ggml, (heads, kv_heads, dim), tokens, length)

    positions = np.array([0, 1, 2, 7, 100, 511, 1000, 8191], np.int32)
    ones = np.tile(np.array([1, 0], np.float32), (len(positions), 1, dim // 2))
    q = normal(len(positions), heads, dim)
    for x in (ones, q):
        parts += [x, rotation(ggml, x, positions, NEIGHBOURS)]

    rows, k = 27, 512
    x = normal(rows, k)
    # Largest values of either sign, in either order.
    x[:, 5], x[:, 77] = np.resize([9, -9, -9], rows), np.resize([-9, 9, 3], rows)
    parts.append(x)
    for name, n in K_SHAPES:
        w = blocks(name, n, k)
        kind, shape = GGMLQuantizationType[name], (k, n)
        whole = ggml.repacked(kind, shape, w) if (name, n % 8) == ("Q4_K", 0) else ggml.tensor(kind, shape, w)
        parts.append(w)
        for some in (1, 5, rows):
            product = ggml.call("ggml_mul_mat", whole, ggml.tensor(F32, (k, some), x[:some]))
            parts.append(ggml.floats(product, some * n))

    shape, window, positions = (4, 1, 256), 20, positions[1::2]
    for tokens in (1, 5):
        parts += attention(ggml, shape, tokens, 48, window)
    heads, _, dim = shape
    ones = np.zeros((len(positions), 1, dim), np.float32)
    ones[..., : dim // 2] = 1
    q = normal(len(positions), heads, dim)
    parts += [rotation(ggml, ones, positions, HALVES_OF_A_HEAD), q, rotation(ggml, q, positions, HALVES_OF_A_HEAD)]

    with open(OPS, "wb") as out:
        for part in parts:
            out.write(struct.pack("<I", part.nbytes) + part.tobytes())


def write_tokens(model):
    name, asking = pathlib.Path(model).name, prompts(model)
    answers = [
        {"prompt": prompt, "text": answer.text, "least_gap": round(answer.least_gap(), 5)}
        for prompt, answer in zip(asking, llama(model, asking))
    ]
    made = {"by": f"llama-cpp-python {llama_cpp.__version__}", "model": name, "answers": answers}
    to = pathlib.Path(TOKENS) / pathlib.Path(name).with_suffix(".json")
    to.parent.mkdir(exist_ok=True)
    to.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write_ops(Ggml())
    for model in sys.argv[1:]:
        write_tokens(model)
