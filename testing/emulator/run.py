"""Runs kernels of the tree on the CPU, without a GPU: see README.md.

    from run import launch, tensor_map, bf16, f32_of
    x = bf16(numpy.random.randn(4, 256))
    launch({"source": "rms_norm", "entry": "rms_norm", "defines": [["XT", "2"], ...]}, grid=4, block=256, shared=0,
           args=[x, w, y, 256, 256, 256, 1e-6])
"""
import ctypes, hashlib, json, os, struct, sys
import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "../../tools/gpu")]
import build
import compile as gpu_compile


class Kernel(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("entry", ctypes.c_void_p), ("static_shared", ctypes.c_uint32), ("local", ctypes.c_uint32),
                ("param_bytes", ctypes.c_uint32), ("params", ctypes.c_uint32), ("param_at", ctypes.POINTER(ctypes.c_uint32)),
                ("param_size", ctypes.POINTER(ctypes.c_uint32))] + [("max_threads", ctypes.c_uint32), ("sites", ctypes.c_void_p),
                                                                    ("files", ctypes.c_void_p), ("cache", ctypes.c_void_p),
                                                                    ("none", ctypes.c_void_p), ("caches", ctypes.c_uint32)]


class Module(ctypes.Structure):
    _fields_ = [("kernels", ctypes.c_uint32), ("variables", ctypes.c_uint32), ("kernel", ctypes.POINTER(Kernel)), ("variable", ctypes.c_void_p)]


class EmulatorError(Exception):
    """What a launch did wrong."""


_state = {}


def runtime():
    if "runtime" not in _state:
        lib = ctypes.CDLL(build.runtime(), mode=ctypes.RTLD_GLOBAL)
        lib.emu_load.restype = ctypes.POINTER(Module)
        lib.emu_message.restype = ctypes.c_char_p
        lib.emu_range_add.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
        lib.emu_range_remove.argtypes = [ctypes.c_uint64]
        _state["runtime"] = lib
    return _state["runtime"]


def ptx_of(key):
    """The PTX of a kernel, kept in the emulator's folder by everything that decides it."""
    folder = gpu_compile.KERNELS
    texts = [build.read(os.path.join(folder, n)) for n in sorted(os.listdir(folder)) if n.endswith(".cuh") or n == key["source"] + ".cu"]
    path = os.path.join(build.folder(), "ptx-%s" % build.digest(json.dumps(key, sort_keys=True), *texts))
    if not os.path.exists(path):
        if "nvrtc" not in _state:
            _state["nvrtc"] = gpu_compile.Nvrtc()
        text = _state["nvrtc"].ptx(key, "compute_90a")
        with open(path + ".part", "w") as file:
            file.write(text)
        os.rename(path + ".part", path)
    return build.read(path).decode()


def load(key):
    """A kernel, ready to launch."""
    name = json.dumps(key, sort_keys=True)
    if name not in _state:
        lib = runtime()
        module = lib.emu_load(build.kernel(ptx_of(key)).encode())
        if not module:
            raise EmulatorError(lib.emu_message().decode())
        kernels = {module.contents.kernel[i].name.decode(): module.contents.kernel[i] for i in range(module.contents.kernels)}
        _state[name] = kernels[key["entry"]]
    return _state[name]


class TensorMap:
    """As cuTensorMapEncodeTiled makes it: dims and tile in elements, innermost first, strides in bytes from the second on."""
    KINDS = {1: 0, 2: 9, 4: 7, 8: 8}

    def __init__(self, array, dims, strides, tile, swizzle=0, offset=0):
        self.array, self.bytes = array, ctypes.create_string_buffer(128)
        rank = len(dims)
        words = lambda kind, values: (kind * max(len(values), 1))(*values)
        code = runtime().emu_tensor_map(
            self.bytes, self.KINDS[array.itemsize], rank, ctypes.c_uint64(array.ctypes.data + offset), words(ctypes.c_uint64, dims),
            words(ctypes.c_uint64, strides), words(ctypes.c_uint32, tile), words(ctypes.c_uint32, [1] * rank),
            {0: 0, 32: 1, 64: 2, 128: 3}[swizzle])
        if code:
            raise EmulatorError("a tensor map that a GPU would refuse")


tensor_map = TensorMap


def triple(n):
    return tuple(n) + (1,) * (3 - len(n)) if isinstance(n, (tuple, list)) else (n, 1, 1)


def packed(kernel, args, ranges):
    """The parameters as the kernel reads them."""
    if len(args) != kernel.params:
        raise EmulatorError("%s takes %d arguments, not %d" % (kernel.name.decode(), kernel.params, len(args)))
    block = bytearray(kernel.param_bytes)
    for i, arg in enumerate(args):
        at, size = kernel.param_at[i], kernel.param_size[i]
        if isinstance(arg, TensorMap):
            ranges.append(arg.array)
            data = arg.bytes.raw
        elif isinstance(arg, np.ndarray):
            ranges.append(arg)
            data = struct.pack("<Q", arg.ctypes.data)
        elif isinstance(arg, (list, tuple)):
            ranges.extend(arg)
            data = b"".join(struct.pack("<Q", a.ctypes.data) for a in arg)
        elif arg is None:
            data = bytes(8)
        elif isinstance(arg, (float, np.floating)):
            data = struct.pack("<f" if size == 4 else "<d", arg)
        else:
            data = (int(arg) & (1 << 8 * size) - 1).to_bytes(size, "little")
        if len(data) > size:
            raise EmulatorError("argument %d of %s has %d bytes, not %d" % (i, kernel.name.decode(), size, len(data)))
        block[at:at + len(data)] = data
    return bytes(block)


def launch(key, grid, block, shared=0, args=(), cluster=(1, 1, 1), more=(), dependent=False):
    """Runs one launch to its end. Arrays among the arguments are the memory that the kernel may use, to the byte, with those of
    `more`; a list of arrays is an array of addresses. Raises EmulatorError."""
    kernel, lib, ranges = load(key), runtime(), list(more)
    params = packed(kernel, list(args), ranges)
    three = lambda n: (ctypes.c_uint32 * 3)(*triple(n))
    added = set()
    for array in ranges:
        base = array if array.base is None or not isinstance(array.base, np.ndarray) else array
        if not array.flags["C_CONTIGUOUS"]:
            raise EmulatorError("an array that is not contiguous")
        if base.ctypes.data not in added and base.nbytes:
            added.add(base.ctypes.data)
            lib.emu_range_add(base.ctypes.data, base.nbytes)
    try:
        code = lib.emu_launch(ctypes.byref(kernel), three(grid), three(block), three(cluster), ctypes.c_uint32(shared), params, int(dependent))
    finally:
        for base in added:
            lib.emu_range_remove(base)
    if code:
        raise EmulatorError(lib.emu_message().decode())


def empty(count, dtype=np.float32):
    """An array that begins at a multiple of 1024 bytes, filled with NaN or its bit pattern."""
    raw = np.full(count * np.dtype(dtype).itemsize + 1024, 0xff, np.uint8)
    at = -raw.ctypes.data % 1024
    return raw[at:at + count * np.dtype(dtype).itemsize].view(dtype)


def aligned(array):
    """A copy at a multiple of 1024 bytes, flat."""
    array = np.ascontiguousarray(array)
    copy = empty(array.size, array.dtype)
    copy[:] = array.reshape(-1)
    return copy


def bf16(values):
    """Numbers as bf16 (uint16), rounded to even, in aligned memory."""
    bits = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    return aligned(((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint16))


def f32_of(bits):
    """bf16 (uint16) as numbers."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
