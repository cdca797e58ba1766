"""Linears of few rows whose weights are blocks of GGUF files (`linear_blocks.cu`): checked against PyTorch in fp32, then timed as graph
replays with dependent launch.

blocks.py check [TYPE ...]           every form of the kernel: poisoned outputs, repetition, a planted wrong block
blocks.py time  [TYPE ...] [ROWS ...] microseconds of the linears of Qwen3-8B for each form, and of a layer
blocks.py keys  FILE                 the kernels that these need, for compile.py
TYPE: q4k, q6k, q80 for `time`; `check` has all eight. ROWS: 1, 2, 4. Weights take turns, 0.4 GB and more: L2 does not help.

EMULATOR=FOLDER: `check` without a GPU, by the emulator in FOLDER, with fewer columns of the result.
"""
import ctypes, json, os, sys

EMULATED = os.environ.get("EMULATOR")
# Outputs, columns of K, epilogue (1 residual, 2 SiLU·mul), norm.
SHAPES = dict(qkv=(6144, 4096, 0, 1), o=(4096, 4096, 1, 0), gate_up=(24576, 4096, 2, 1), down=(4096, 12288, 1, 0), head=(151936, 4096, 0, 1))
# Name: number, columns of a block, bytes of a block.
TYPES = dict(q40=(10, 32, 18), q41=(11, 32, 20), q50=(12, 32, 22), q51=(13, 32, 24), q80=(14, 32, 34), q4k=(22, 256, 144), q5k=(23, 256, 176), q6k=(24, 256, 210))
# What Qwen3-8B has: types of each linear.
USED = dict(q4k=("qkv", "o", "gate_up", "down"), q6k=("down", "head"), q80=("qkv", "o", "gate_up", "down", "head"))
SMS, SHARED, BANDWIDTH, WORST = 132, 232448, 4.54e12, 5e-3
# Forms to compare: macros; `stages` and `warps` are the launch's.
FORMS = dict(old=dict(SPREAD=0), new={}, new3=dict(stages=3), new4=dict(stages=4))
U64, U32, F32 = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_float


def up(a, b):
    return -(-a // b)


class Plan:
    """A kernel with its launch, as ops/linear/blocks.rs makes it."""

    def __init__(self, kind, shape, rows, blocks=SMS, warps=16, stages=None, bias=0, **form):
        (wt, each, size), (n, k, epilogue, norm) = TYPES[kind], shape
        self.kind, self.shape, self.rows, self.threads = kind, shape, rows, warps * 32
        tiles = up(n, 16)
        self.grid = min(tiles, blocks)
        rounds, chunks = up(tiles, blocks), up(up(k, 256), warps)
        chunk = 256 // each * size
        whole = k // each * size % 16 == 0 and chunk % 16 == 0
        pitch = (up(chunk + (0 if whole else 14), 16) | 1) * 16
        x = warps * chunks * (rows * 576 + (128 if kind == "q6k" else 64) * 4)
        most = min(warps * 2 // rows, 4)
        buffers = max(rounds, 1) if rounds <= most else 2 * most
        size_of = lambda stages: warps * stages * 16 * pitch + x + buffers * warps * 16 * rows * 4
        fits = [s for s in range(2, max(2, min(rounds * chunks, stages or 6)) + 1) if size_of(s) <= SHARED - 2048]
        self.stages = fits[-1] if fits else None
        self.shared = size_of(self.stages) if fits else 0
        v = dict(K=k, N=n, ROWS=rows, WARPS=warps, STAGES=self.stages, ROUNDS=rounds, WT=wt, NT=2, BT=2, RT=2, YT=2, NORM=norm, BIAS=bias, EPILOGUE=epilogue, **form)
        self.key = dict(source="linear_blocks", entry="linear_blocks", defines=[[a, str(b)] for a, b in sorted(v.items())])


def forms(kind, name, rows):
    """Plans worth timing, by label; the same kernel only once."""
    out = {}
    for label, form in FORMS.items():
        plan = Plan(kind, SHAPES[name], rows, **form)
        if plan.stages and json.dumps(plan.key) not in [json.dumps(p.key) for p in out.values()]:
            out[label] = plan
    return out


# Small shapes for the emulator, and odd ones for both: columns that are no whole chunks, and an odd number of chunks.
ODD = dict(odd=(40, 1280, 0, 1), five=(72, 768, 1, 0), part=(40, 288, 1, 1))
SMALL = dict(qkv=(80, 4096, 0, 1), gate_up=(112, 4096, 2, 1), down=(40, 12288, 1, 0))


def checked(kinds):
    """(label, plan) of everything to check."""
    for kind in kinds:
        shapes = dict(SMALL if EMULATED else {n: SHAPES[n] for n in ("qkv", "gate_up", "down")}, **ODD)
        for name, shape in shapes.items():
            if shape[1] % TYPES[kind][1]:
                continue
            for rows in (1, 2, 3, 4, 5):
                if EMULATED and (rows not in (1, 2, 3) or rows > 1 and name not in ("down", "odd")):
                    continue
                for label, form in FORMS.items() if not EMULATED else [("new", {})]:
                    if label != "old" or rows < 5:
                        yield "%s %s %d rows %s" % (kind, name, rows, label), Plan(kind, shape, rows, blocks=3 if EMULATED else SMS, **form)


def all_keys():
    timed_ones = [p.key for kind, names in USED.items() for name in names for rows in (1, 2, 4) for p in forms(kind, name, rows).values()]
    return list({json.dumps(k): k for k in timed_ones + [p.key for _, p in checked(TYPES) if p.stages]}.values())


def asked_for():
    """The kinds and rows of the command line."""
    rows, kinds = [int(p) for p in sys.argv[2:] if p.isdigit()], [p for p in sys.argv[2:] if not p.isdigit()]
    return kinds or list(TYPES if sys.argv[1] == "check" else USED), rows or [1, 2, 4]


if __name__ == "__main__" and sys.argv[1] == "keys":
    json.dump(all_keys(), open(sys.argv[2], "w"))
    sys.exit()
if __name__ == "__main__" and not EMULATED:
    from compile import compile_all
    kinds, rows_list = asked_for()
    plans = [p for _, p in checked(kinds)] if sys.argv[1] == "check" else [p for kind in kinds for name in USED[kind] for r in rows_list for p in forms(kind, name, r).values()]
    compile_all(p.key for p in plans if p.stages)

import torch

if EMULATED:
    sys.path.insert(0, EMULATED)
    import run as emulator
    DEVICE = "cpu"
else:
    from experts import Launch, timed
    DEVICE = "cuda"
    torch.backends.cuda.matmul.allow_tf32 = False


def random_blocks(kind, n, k):
    """Random blocks whose scales make values of about 0.02: bytes, n × bytes of a row."""
    _, each, size = TYPES[kind]
    b = torch.randint(0, 256, (n, k // each, size), dtype=torch.uint8, device=DEVICE)
    def put(at, scale):
        v = (torch.rand(n, k // each, device=DEVICE) + 0.5) * scale
        b[:, :, at:at + 2] = v.half().view(torch.uint8).view(n, k // each, 2)
    scales = dict(q40=4e-3, q41=4e-3, q50=2e-3, q51=2e-3, q80=2.5e-4, q4k=8e-5, q5k=4e-5, q6k=1.5e-5)
    put(208 if kind == "q6k" else 0, scales[kind])
    if kind in ("q41", "q51"):
        put(2, -0.03)
    if kind in ("q4k", "q5k"):
        put(2, 6e-4)
    return b.view(n, -1)


def dequantized(kind, data, k):
    """Blocks as float32, n × k, as GGUF defines them."""
    _, each, size = TYPES[kind]
    n = data.shape[0]
    b = data.view(n * k // each, size)
    half = lambda at: b[:, at:at + 2].contiguous().view(torch.float16).float()
    nibbles = lambda q: torch.cat([q & 15, q >> 4], 1).float()
    if kind in ("q40", "q41", "q50", "q51", "q80"):
        d = half(0)
        if kind == "q80":
            return (d * b[:, 2:].view(torch.int8).float()).view(n, k)
        at = dict(q40=2, q41=4, q50=6, q51=8)[kind]
        q = nibbles(b[:, at:at + 16])
        if kind in ("q50", "q51"):
            bits = b[:, at - 4:at]
            high = torch.stack([bits >> i & 1 for i in range(8)], 2).view(-1, 32)
            q = q + 16 * high.float()
        if kind in ("q41", "q51"):
            return (d * q + half(2)).view(n, k)
        return (d * (q - (8 if kind == "q40" else 16))).view(n, k)
    if kind == "q6k":
        low, high, scales = b[:, :128].view(-1, 2, 2, 32), b[:, 128:192].view(-1, 2, 32), b[:, 192:208].view(torch.int8).float()
        q = torch.stack([(low[:, :, i % 2] >> 4 * (i // 2) & 15) | (high >> 2 * i & 3) << 4 for i in range(4)], 2).float() - 32
        return (half(208) * scales.repeat_interleave(16, 1) * q.reshape(-1, 256)).view(n, k)
    s = b[:, 4:16]
    a, m, c = s[:, :4], s[:, 4:8], s[:, 8:]
    scale = torch.cat([a & 63, (c & 15) | (a >> 6) << 4], 1).float().repeat_interleave(32, 1)
    least = torch.cat([m & 63, c >> 4 | (m >> 6) << 4], 1).float().repeat_interleave(32, 1)
    q = b[:, size - 128:].view(-1, 4, 32)
    q = torch.stack([q & 15, q >> 4], 2).reshape(-1, 256)
    if kind == "q5k":
        q = q | (torch.stack([b[:, 16:48] >> i & 1 for i in range(8)], 1).reshape(-1, 256) << 4)
    return (half(0) * scale * q.float() - half(2) * least).view(n, k)


class Linear:
    """Inputs, outputs and the launch of one linear."""

    def __init__(self, plan, data, residual=None):
        n, k, epilogue, norm = plan.shape
        out, rows = n // 2 if epilogue == 2 else n, plan.rows
        half = lambda *shape, std, mean=0.0: torch.empty(*shape, device=DEVICE).normal_(mean, std).bfloat16()
        self.plan, self.data = plan, data
        self.x, self.norm, self.residual = half(rows, k, std=1.0), half(k, std=0.1, mean=1.0), half(rows, out, std=0.3)
        self.y = torch.empty(rows, out, device=DEVICE, dtype=torch.bfloat16)
        args = [self.x, data, None, self.norm if norm else None, self.residual if epilogue == 1 else None, self.y, k, out, out, 1e-6]
        if EMULATED:
            kinds = {torch.bfloat16: torch.int16}
            self.native = [a if not torch.is_tensor(a) else a.view(kinds.get(a.dtype, a.dtype)).numpy() for a in args]
        else:
            number = lambda a: F32(a) if isinstance(a, float) else U32(a)
            native = [U64(a.data_ptr()) if torch.is_tensor(a) else U64(0) if a is None else number(a) for a in args]
            self.launch = Launch(plan.key, native, plan.grid, plan.threads, plan.shared)

    def go(self, dependent=True):
        if EMULATED:
            emulator.launch(self.plan.key, grid=self.plan.grid, block=self.plan.threads, shared=self.plan.shared, args=self.native)
        else:
            self.launch.go(dependent)

    def want(self, w):
        n, k, epilogue, norm = self.plan.shape
        x = self.x.float()
        if norm:
            x = x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * self.norm.float()
        p = x @ w.t()
        if epilogue == 2:
            return torch.nn.functional.silu(p[:, 0::2]) * p[:, 1::2]
        return p + self.residual.float() if epilogue == 1 else p


def error_of(got, want):
    """The largest error of a row or of sixteen columns, by the size of all."""
    if not torch.isfinite(got).all():
        return float("nan")
    wide = want.shape[1] // 8 * 8
    error = (got - want).pow(2)
    most = max(error.mean(1).sqrt().max(), error[:, :wide].view(len(got), -1, 8).mean((0, 2)).sqrt().max())
    return (most / want.pow(2).mean().sqrt()).item()


def check(kinds):
    bad, worst, count, weights, planted = 0, {}, 0, {}, {}
    for label, plan in checked(kinds):
        if not plan.stages:
            continue
        name = (plan.kind, plan.shape)
        if name not in weights:
            weights.clear()
            torch.manual_seed(7)
            data = random_blocks(plan.kind, plan.shape[0], plan.shape[1])
            weights[name] = data, dequantized(plan.kind, data, plan.shape[1])
        data, w = weights[name]
        linear, first = Linear(plan, data), None
        for turn in range(1 if EMULATED else 4):
            linear.y.fill_(float("nan"))
            linear.go(turn > 0)
            if not EMULATED:
                torch.cuda.synchronize()
            first = linear.y.clone() if first is None else first
            bad += not torch.equal(first, linear.y)
        error = error_of(first.float(), linear.want(w))
        failed = not error < WORST
        bad += failed
        count += 1
        form = plan.kind + " " + label.split()[-1]
        worst[form] = max(worst.get(form, 0.0), error if error == error else 9.9)
        if failed or EMULATED:
            print("%-28s stages %d error %.1e%s" % (label, plan.stages, error, " BAD" if failed else ""), flush=True)
        if plan.kind not in planted:
            # A planted fault: one byte of one block's scale.
            planted[plan.kind] = wrong = w.clone()
            wrong[3, :256] *= 1.5
            bad += error_of(first.float(), linear.want(wrong)) < WORST
    print("%d checks, worst %s" % (count, " ".join("%s %.1e" % i for i in worst.items())))
    print("failures %d" % bad, flush=True)
    return bad


def captured(linears):
    for l in linears[:2]:
        l.go()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for l in linears:
            l.go()
    return graph


def measure(kinds, rows_list):
    table = []
    for kind in kinds:
        _, each, size = TYPES[kind]
        for name in USED[kind]:
            n, k = SHAPES[name][:2]
            bytes_ = n * k // each * size
            torch.manual_seed(1)
            first = random_blocks(kind, n, k)
            weights = [first] + [first.roll(t, 0) for t in range(1, max(2, up(400 << 20, bytes_)))]
            for rows in rows_list:
                plans = forms(kind, name, rows)
                keep = [[Linear(p, w) for w in weights] for p in plans.values()]
                us = [t / len(l) for t, l in zip(timed([captured(l) for l in keep]), keep)]
                table.append((kind, name, rows, bytes_ / BANDWIDTH * 1e6, dict(zip(plans, us)), {l: p.stages for l, p in plans.items()}))
                print("%s %s %d:" % table[-1][:3], " ".join("%s/%d %.2f" % (l, p.stages, t) for (l, p), t in zip(plans.items(), us)), flush=True)
                del keep
            del weights, first
    print("%-5s %-8s %4s %7s | %s" % ("type", "linear", "rows", "floor", " ".join("%7s" % l for l in FORMS)))
    for kind, name, rows, floor, us, stages in table:
        print("%-5s %-8s %4d %7.2f | %s" % (kind, name, rows, floor, " ".join("%7.2f" % us[l] if l in us else "      -" for l in FORMS)))


def main():
    kinds, rows = asked_for()
    if sys.argv[1] == "check":
        sys.exit(check(kinds) > 0)
    measure(kinds, rows)


if __name__ == "__main__":
    main()
