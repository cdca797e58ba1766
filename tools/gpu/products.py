"""GEMMs of prefill: checks `linear_tiles` against PyTorch in fp32 (outputs poisoned), then times it alternating with cuBLASLt.

products.py ROWS[:LIVE][,ROWS...] [BAND=8,STAGES=4 ...]       Qwen3-8B's four GEMMs, bf16, random data

The GPU is limited by power: the first run after a pause is up to 15 % faster, so candidates alternate under load and
the median is reported.
"""
import ctypes, glob, os, sys
import torch
from step import Attribute, Config, Kernels, cuda, ok as driver_ok, rel


def library():
    folders = [os.path.dirname(torch.__file__) + "/../nvidia/cu13/lib", os.path.dirname(torch.__file__) + "/../nvidia/cublas/lib"]
    for folder in folders + ["/usr/local/cuda/lib64"]:
        for path in sorted(glob.glob(folder + "/libcublasLt.so.1?")):
            return ctypes.CDLL(path)
    return ctypes.CDLL("libcublasLt.so.13")


LT = library()
P, U64, I = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int


def ok(code):
    if code:
        raise RuntimeError("cuBLASLt status %d" % code)


class Result(ctypes.Structure):
    _fields_ = [("algo", U64 * 8), ("workspace", ctypes.c_size_t), ("state", I), ("waves", ctypes.c_float), ("rest", I * 4)]


def made(create, *args):
    handle = P()
    ok(create(ctypes.byref(handle), *args))
    return handle


SHAPES = (("qkv", 6144, 4096, 0), ("o", 4096, 4096, 1), ("gate_up", 24576, 4096, 2), ("down", 4096, 12288, 1))


class Library:
    """The algorithm that cuBLASLt proposes first; SiLU·mul as a launch after it."""

    def __init__(self, handle, room, silu, x, w, y, c, epilogue):
        self.handle, self.room, self.silu, self.x, self.w, self.y, self.epilogue = handle, room, silu, x, w, y, epilogue
        self.out = c
        self.desc = made(LT.cublasLtMatmulDescCreate, 68, 0)
        ok(LT.cublasLtMatmulDescSetAttribute(self.desc, 3, ctypes.byref(I(1)), ctypes.c_size_t(4)))
        layout = lambda t: made(LT.cublasLtMatrixLayoutCreate, 14, U64(t.shape[1]), U64(t.shape[0]), ctypes.c_int64(t.shape[1]))
        self.lw, self.lx, self.ly = layout(w), layout(x), layout(c)
        want = made(LT.cublasLtMatmulPreferenceCreate)
        ok(LT.cublasLtMatmulPreferenceSetAttribute(want, 1, ctypes.byref(ctypes.c_size_t(room.numel())), ctypes.c_size_t(8)))
        self.result, given = Result(), I()
        ok(LT.cublasLtMatmulAlgoGetHeuristic(handle, self.desc, self.lw, self.lx, self.ly, self.ly, want, 1, ctypes.byref(self.result), ctypes.byref(given)))

    def go(self):
        one, other = ctypes.c_float(1), ctypes.c_float(1 if self.epilogue == 1 else 0)
        pointer = lambda t: P(t.data_ptr())
        stream = torch.cuda.current_stream().cuda_stream
        ok(LT.cublasLtMatmul(self.handle, self.desc, ctypes.byref(one), pointer(self.w), self.lw, pointer(self.x), self.lx, ctypes.byref(other),
                             pointer(self.out), self.ly, pointer(self.out), self.ly, ctypes.byref(self.result.algo), pointer(self.room),
                             ctypes.c_size_t(self.room.numel()), P(stream)))
        if self.epilogue == 2:
            half, n = self.y.shape[1], self.out.shape[1]
            args = [U64(self.out.data_ptr()), U64(self.y.data_ptr()), ctypes.c_uint32(half), ctypes.c_uint32(n), ctypes.c_uint32(half), U64(0)]
            launch(self.silu, args, ((half + 1023) // 1024, self.y.shape[0], 1, 256, 1, 1), 0, stream)


def launch(function, args, dims, shared, stream, cluster=1):
    pointers = (P * len(args))(*[ctypes.addressof(a) for a in args])
    attrs = (Attribute * 1)()
    attrs[0].id = 4
    attrs[0].value[:3] = [cluster, 1, 1]
    config = Config((ctypes.c_uint * 6)(*dims), shared, stream, ctypes.addressof(attrs), int(cluster > 1))
    driver_ok(cuda.cuLaunchKernelEx(ctypes.byref(config), function, pointers, None))


def tensor_map(t, rows):
    raw = ctypes.create_string_buffer(192)
    at = (ctypes.addressof(raw) + 63) & ~63
    two = lambda kind, *v: (kind * len(v))(*v)
    driver_ok(cuda.cuTensorMapEncodeTiled(P(at), 9, 2, P(t.data_ptr()), two(U64, t.shape[1], t.shape[0]), two(U64, t.stride(0) * 2),
                                          two(ctypes.c_uint32, 64, rows), two(ctypes.c_uint32, 1, 1), 0, 3, 2, 0))
    keep = (ctypes.c_char * 128).from_address(at)
    keep._raw = raw
    return keep


class Tiles:
    def __init__(self, kernels, x, w, y, residual, epilogue, options, live):
        k, n, rows = x.shape[1], w.shape[0], x.shape[0]
        defines = dict(K=k, N=n, STAGES=4, BAND=8, TYPE=2, BT=0, RT=2, YT=2, BIAS=0, LIVE=1, EPILOGUE=epilogue, PRODUCES=0, CONSUMES=0)
        defines.update(options)
        self.shared = int(defines["STAGES"]) * 49152 + 1024
        self.function = kernels.get({"source": "linear_tiles", "entry": "linear_tiles", "defines": [[a, str(b)] for a, b in defines.items()]}, self.shared)
        self.live = torch.tensor([live], dtype=torch.int32, device="cuda")
        nothing, zero = U64(0), ctypes.c_uint32(0)
        self.args = [tensor_map(x, 128), tensor_map(w, 128), nothing, U64(residual.data_ptr()), U64(y.data_ptr()), U64(self.live.data_ptr()), nothing, nothing, nothing,
                     ctypes.c_uint32(rows), ctypes.c_uint32(residual.stride(0)), ctypes.c_uint32(y.stride(0)), ctypes.c_float(0),
                     nothing, nothing, nothing, nothing, nothing, nothing, zero, zero, ctypes.c_float(0), ctypes.c_float(0)]
        tiles = (rows + 255) // 256 * ((n + 255) // 256)
        self.grid = min(132, 2 * tiles)

    def go(self):
        launch(self.function, self.args, (self.grid, 1, 1, 384, 1, 1), self.shared, torch.cuda.current_stream().cuda_stream, 2)


def measured(candidates, flops):
    """Median microseconds of each, measured alternately."""
    graphs = []
    for c in candidates:
        c.go()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        reps = max(1, int(4e-3 / (flops / 7e14)))
        with torch.cuda.graph(graph):
            for _ in range(reps):
                c.go()
        graphs.append((graph, reps))
    times = [[] for _ in graphs]
    for turn in range(6):
        for at, (graph, reps) in enumerate(graphs):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()
            a.record()
            for _ in range(4):
                graph.replay()
            b.record()
            b.synchronize()
            if turn > 1:
                times[at].append(a.elapsed_time(b) / reps / 4 * 1e3)
    return [sorted(t)[len(t) // 2] for t in times]


def main():
    handle, kernels = made(LT.cublasLtCreate), Kernels()
    room = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    silu = kernels.get({"source": "gate_mul", "entry": "gate_mul", "defines": [["XT", "2"], ["YT", "2"], ["ALIGNED", "1"], ["ACT", "2"]]}, 0)
    variants = [dict(pair.split("=") for pair in v.split(",")) for v in sys.argv[2:]] or [{}]
    for text in sys.argv[1].split(","):
        rows, _, live = text.partition(":")
        rows, live = int(rows), int(live or rows)
        for name, n, k, epilogue in SHAPES:
            x, w = torch.randn(rows, k, device="cuda").bfloat16(), (torch.randn(n, k, device="cuda") * 0.02).bfloat16()
            out = n // 2 if epilogue == 2 else n
            y, residual, c = (torch.randn(rows, m, device="cuda").bfloat16() for m in (out, out, n))
            p = x[:live].float() @ w.float().t()
            want = torch.nn.functional.silu(p[:, 0::2]) * p[:, 1::2] if epilogue == 2 else p + residual[:live].float() if epilogue == 1 else p
            del p
            candidates, line = [Library(handle, room, silu, x, w, y, c, epilogue)], ""
            for options in variants:
                y.fill_(float("nan"))
                tiles = Tiles(kernels, x, w, y, residual, epilogue, options, live)
                tiles.go()
                torch.cuda.synchronize()
                e = rel(y[:live], want)
                if not e < 6e-3 or not torch.isnan(y[(live + 255) // 256 * 256:]).all():
                    line += " BAD %.1e" % e
                candidates.append(tiles)
            del want
            flops = 2.0 * rows * n * k
            times = measured(candidates, flops)
            print("%5d live %5d %-8s library %.0f us (%.0f TF)" % (rows, live, name, times[0], flops / times[0] * 1e-6),
                  " ".join("%s %.0f us (%.0f TF)" % (",".join("%s=%s" % i for i in o.items()) or "tiles", t, flops / t * 1e-6)
                           for o, t in zip(variants, times[1:])), "error %.1e" % e, line, flush=True)


if __name__ == "__main__":
    main()
