"""Tiles of `linear_wgmma` for a few hundred to two thousand tokens (EVEN): checks them against PyTorch in fp32, and times them
beside cuBLASLt and `linear_tiles`. Qwen3-8B's four linears, bf16, random data.

even.py compile                   fills the folder of kernels, on all cores (no GPU needed)
even.py check [TOKENS,...]        every tile, all and some of the tokens live; outputs and what follows the live tokens are NaN before
even.py time  [TOKENS,...]        microseconds of each, in turns under load; then the lines of a table of variants
                                   where one is 2 % faster than what runs today

A tile is written W×C: W weight rows, C tokens.
"""
import ctypes, json, os, sys
from concurrent.futures import ProcessPoolExecutor
from compile import Nvrtc

TOKENS = (208, 256, 320, 384, 512, 640, 832, 1024, 1344)
SMS, SHARED = 132, 232448
SHAPES = (("qkv", 6144, 4096, 0), ("o", 4096, 4096, 1), ("gate_up", 24576, 4096, 2), ("down", 4096, 12288, 1))
TEXTS = ("norm+linear", "linear+residual", "norm+linear+silu", "linear+residual")
FOLDER = os.environ.get("CUBINS", "/tmp/cubins")


def whole(columns):
    return -(-columns // (16 if columns > 128 else 8)) * (16 if columns > 128 else 8)


def price(rows, n, k, wide, columns):
    """Microseconds as `ops/linear/even.rs` reckons them."""
    across = -(-rows // columns)
    rounds = -(-(-(-n // wide) * across) // SMS)
    return rounds * (max(wide * columns * 2 * k / 5.2e6, (wide + columns) * 2 * k / 68e3) + 1.5)


def shapes(rows, n, k):
    """The tiles worth measuring: the four cheapest whose weights fit three warpgroups."""
    found = {(w, whole(-(-rows // across))) for w in (64, 128, 192) for across in range(-(-rows // 256), 9)}
    return sorted((s for s in found if s[1] >= 64 and s[1] < rows), key=lambda s: price(rows, n, k, *s))[:4]


def key(rows, n, k, epilogue, shape):
    wide, columns = shape
    stages = min((SHARED - 2048 - 4 * columns) // ((wide + columns) * 128), 20)
    defines = dict(K=k, N=n, ROWS=rows, WIDE=wide, COLUMNS=columns, STAGES=stages, SPLIT=1, TYPE=2, BT=0, RT=2 if epilogue == 1 else 0, YT=2,
                   BIAS=0, EPILOGUE=epilogue, LIVE=1, PAIRS=int(epilogue == 1), EVEN=1, PRODUCES=0, CONSUMES=0)
    return {"source": "linear_wgmma", "entry": "linear_wgmma", "defines": [[a, str(b)] for a, b in defines.items()]}


def tiles_key(n, k, epilogue):
    defines = dict(K=k, N=n, STAGES=4, BAND=8, TYPE=2, BT=0, RT=2, YT=2, BIAS=0, LIVE=1, EPILOGUE=epilogue, PRODUCES=0, CONSUMES=0)
    return {"source": "linear_tiles", "entry": "linear_tiles", "defines": [[a, str(b)] for a, b in defines.items()]}


GATE_MUL = {"source": "gate_mul", "entry": "gate_mul", "defines": [["XT", "2"], ["YT", "2"], ["ALIGNED", "1"], ["ACT", "2"]]}


def compile_one(key):
    Nvrtc().cached(key, "sm_90a", FOLDER)


def compile_all(tokens):
    keys = [GATE_MUL] + [tiles_key(n, k, e) for _, n, k, e in SHAPES]
    keys += [key(rows, n, k, e, s) for rows in tokens for _, n, k, e in SHAPES for s in shapes(rows, n, k)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, keys))
    return len(keys)


class Rounds:
    def __init__(self, kernels, x, w, y, residual, epilogue, shape, live):
        import torch
        from products import U64, tensor_map
        wide, columns = shape
        rows, k, n = x.shape[0], x.shape[1], w.shape[0]
        kernel = key(rows, n, k, epilogue, shape)
        self.shared = int(dict(kernel["defines"])["STAGES"]) * (wide + columns) * 128 + 1024
        self.function = kernels.get(kernel, self.shared)
        self.live = torch.tensor([live], dtype=torch.int32, device="cuda")
        nothing, number = U64(0), ctypes.c_uint32
        self.args = [tensor_map(x, columns), tensor_map(w, wide), nothing, U64(residual.data_ptr()), U64(y.data_ptr()),
                     U64(self.live.data_ptr()), nothing, nothing, nothing, number(residual.stride(0)), number(y.stride(0)), ctypes.c_float(0)]
        tiles = -(-n // wide) * -(-rows // columns)
        self.grid = min(SMS, tiles)
        groups = wide // 64
        self.threads = groups * 128 + (128 if groups == 3 and columns > 160 else 32)

    def go(self):
        import torch
        from products import launch
        launch(self.function, self.args, (self.grid, 1, 1, self.threads, 1, 1), self.shared, torch.cuda.current_stream().cuda_stream, 1)


class Case:
    """One linear with tensors of its size."""

    def __init__(self, rows, n, k, epilogue, live):
        import torch
        normal = lambda *shape: torch.randn(*shape, device="cuda").bfloat16()
        out = n // 2 if epilogue == 2 else n
        self.x, self.w = normal(rows, k), (normal(n, k) * 0.02)
        self.y, self.residual, self.c = normal(rows, out), normal(rows, out), normal(rows, n)
        p = self.x[:live].float() @ self.w.float().t()
        self.want = (torch.nn.functional.silu(p[:, 0::2]) * p[:, 1::2] if epilogue == 2 else
                     p + self.residual[:live].float() if epilogue == 1 else p)
        self.x[live:] = float("nan")

    def made(self, kernels, epilogue, shape, live):
        return Rounds(kernels, self.x, self.w, self.y, self.residual, epilogue, shape, live)


def check(tokens):
    import torch
    from step import Kernels, rel
    kernels, bad, count = Kernels(), 0, 0
    for rows in tokens:
        for name, n, k, epilogue in SHAPES:
            for live in (rows, rows * 4 // 5 - 3, 1):
                case = Case(rows, n, k, epilogue, live)
                for shape in shapes(rows, n, k):
                    case.y.fill_(float("nan"))
                    kernel = case.made(kernels, epilogue, shape, live)
                    kernel.go()
                    torch.cuda.synchronize()
                    error, clean = rel(case.y[:live], case.want), bool(torch.isnan(case.y[live:]).all())
                    first = case.y[:live].clone()
                    for _ in range(3):
                        kernel.go()
                    torch.cuda.synchronize()
                    same, count = bool((first == case.y[:live]).all()), count + 1
                    if not error < 6e-3 or not clean or not same:
                        bad += 1
                        print("BAD %d live %d %s %d×%d error %.1e clean %s same %s" % ((rows, live, name) + shape + (error, clean, same)), flush=True)
    print("%d checks, %d bad" % (count, bad))
    return bad


def time(tokens):
    import torch
    import products
    from step import Kernels
    kernels, handle = Kernels(), products.made(products.LT.cublasLtCreate)
    room = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    silu = kernels.get(GATE_MUL, 0)
    table = []
    print("tokens linear    library  tiles  " + "tiles of this kernel, fastest first (µs)")
    for rows in tokens:
        for at, (name, n, k, epilogue) in enumerate(SHAPES):
            case = Case(rows, n, k, epilogue, rows)
            tried = shapes(rows, n, k)
            candidates = [products.Library(handle, room, silu, case.x, case.w, case.y, case.c, epilogue),
                          products.Tiles(kernels, case.x, case.w, case.y, case.residual, epilogue, {}, rows)]
            candidates += [case.made(kernels, epilogue, shape, rows) for shape in tried]
            times = products.measured(candidates, 2.0 * rows * n * k)
            own = sorted(zip(times[2:], tried))
            print("%6d %-8s %7.1f %7.1f  " % (rows, name, times[0], times[1]) + "  ".join("%d×%d %.1f" % (s + (t,)) for t, s in own), flush=True)
            now, (best, (wide, columns)) = times[0] if epilogue != 2 else min(times[:2]), own[0]
            if best < 0.98 * now:
                types = "BF16 BF16 BF16"
                table.append("%s %dx%dx%d %s\twgmma,wide=%d,columns=%d,split=1,even=1\t%d\t%d"
                             % (TEXTS[at], rows, k, n, types, wide, columns, best * 1e3, now * 1e3))
    print("\n".join(table))


def main():
    tokens = tuple(int(t) for t in sys.argv[2].split(",")) if len(sys.argv) > 2 else TOKENS
    count = compile_all(tokens)
    if sys.argv[1] == "compile":
        print("%d kernels in %s" % (count, FOLDER))
    elif sys.argv[1] == "check":
        sys.exit(check(tokens) > 0)
    else:
        time(tokens)


if __name__ == "__main__":
    main()
