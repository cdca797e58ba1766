"""Linears with e4m3 and int4 weights: checked against PyTorch in fp32, then timed as graph replays with dependent launch.

lowp.py check [KIND,...]            every kernel, poisoned outputs, repetition, a planted wrong scale
lowp.py time  [ROWS,...] [KIND,...] microseconds of Qwen3-8B's four linears, the best variant of each kind
lowp.py short                       the kernels with fewer instructions beside those before them, at 1 to 256 rows: two minutes, and one to compile
lowp.py keys  FILE [short]          the kernels that these need, for compile.py

Kinds: plain (bf16 weights, to compare), stream, mixed (wgmma, bf16 activations), bytes (wgmma, e4m3 activations), tiles; stream4 and mixed4 for int4;
lean and lean4 (stream with fewer instructions, K of `down` in two shares or not), turns and turns4 (wgmma whose warpgroups take turns with K, or, at
256 rows, with MMAs; e4m3 activations, int4); channel (tiles with a scale per row), quantize. Weights take turns, 0.4 GB and more: L2 does not help.
"""
import ctypes, json, os, sys

SHAPES = dict(qkv=(6144, 4096, 0), o=(4096, 4096, 1), gate_up=(24576, 4096, 2), down=(4096, 12288, 1))
SMS, SHARED, BANDWIDTH, PEAK = 132, 232448, 4.54e12, 1500e12
FP8_BLOCK, FP8_CHANNEL, INT4_GROUP, PIECE = 1, 2, 3, 1072
TYPES = dict(TYPE=2, BT=2, RT=2, YT=2, BIAS=0)
SHORT_ROWS, SHORT_KINDS, SHORT = [1, 8, 16, 64, 256], ["stream4", "lean4", "mixed4", "turns4", "stream", "lean", "bytes", "turns"], "short" in sys.argv
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192]
CHECKED = dict(lean=[1, 3, 8], lean4=[1, 3, 8, 16], turns=[16, 64, 256], turns4=[8, 16, 64, 256],
               stream=[1, 2, 4, 7, 8, 11, 16], stream4=[1, 3, 8, 16], mixed=[5, 16, 64, 100], mixed4=[5, 16, 64],
               bytes=[16, 64, 128, 256], tiles=[200, 256, 700, 1024], channel=[256, 700])


def key(source, **defines):
    return dict(source=source, entry=source, defines=[[a, str(b)] for a, b in sorted(defines.items())])


def up(a, b):
    return (a + b - 1) // b


class Plan:
    """A kernel with its launch: key, grid, threads, shared memory, cluster."""

    def __init__(self, kind, k, grid, threads, shared, cluster=1, label=""):
        self.kind, self.key, self.grid, self.threads, self.shared, self.cluster, self.label = kind, k, grid, threads, shared, cluster, label


def stream(kind, name, rows, stages, warps=16, split=1):
    n, k, epilogue = SHAPES[name]
    int4, lean = kind.endswith("4"), kind.startswith("lean")
    whole, k = k, k // split
    plain = kind == "plain"
    weight = 0 if plain else INT4_GROUP if int4 else FP8_BLOCK
    norm = int(name in ("qkv", "gate_up"))
    rounds, most, sets = up(up(n, 16), SMS // split), min(4, warps * 2 // rows), up(rows, 8)
    chunk = 64 if plain else 256 if int4 else 128
    held = up(k // chunk, warps) * (chunk // 32) * sets <= (8 if plain else 24 if int4 and not norm and sets == 1 and rows > 2 else 16)
    if (sets > 1 and not held) or rows * warps > 256 and rows * 16 > warps * 32 or split > 1 and (not held or norm or epilogue == 2):
        return None
    buffers = max(rounds, 1) if rounds <= most else 2 * most
    shared = warps * stages * (2 * PIECE if int4 else 2064 if weight == FP8_BLOCK else 2048) + (warps * rows * up(k // chunk, warps) * chunk * 2 if held and rows <= 2 and not plain else 0 if held else rows * (2 * k + 64)) + buffers * warps * 16 * rows * 4
    if shared > SHARED - 2048 - (4096 if split > 1 else 0):
        return None
    extra = dict(LEAN=1, SPLIT=split) if lean else {}
    kk = key("linear_stream", WEIGHT=weight, K=whole, N=n, ROWS=rows, WARPS=warps, STAGES=stages, ROUNDS=rounds, NT=2, NORM=norm, EPILOGUE=epilogue, **TYPES, **extra)
    return Plan(kind, kk, min(up(n, 16), SMS // split) * split, warps * 32, shared, split, "%dx%d%s" % (warps, stages, "" if split == 1 else "/%d" % split))


def wgmma(kind, name, rows, wide, split, columns=None, stages=None, ahead=None, most_shared=SHARED, turns=1, ordered=0):
    n, k, epilogue = SHAPES[name]
    int4, bytes_ = kind.endswith("4"), int(kind in ("bytes", "turns"))
    columns = columns or up(rows, 8) * 8
    columns = up(columns, 16) * 16 if columns > 128 else columns
    groups, each = wide // 64, 1 if bytes_ else 2
    stage = (up(wide // 16 * PIECE, 1024) * 1024 if int4 else wide * 128) + each * columns * 128
    tiles = up(n, wide) * up(rows, columns)
    chunks = k // 128 // split
    static = 4096 + 2 * groups * 2 * chunks * 4 + 64 * 16
    sums = turns * wide * columns * 4
    behind = sums if turns > 1 and split == 1 else 0
    most = min((most_shared - 1024 - static - behind) // (stage + bytes_ * columns * 4), 20)
    least = max(up(sums, stage) if split > 1 else 0, 3)
    stages = max(min(stages or most, 2 * chunks), least)
    if stages > most or (split > 1 and tiles * split > SMS) or k % (128 * split) or columns > (128 if not bytes_ else 256) or (columns > 128 and groups > 2) or groups * turns > 4:
        return None
    extra = {} if ahead is None else dict(AHEAD=ahead)
    if kind.startswith("turns"):
        extra.update(TURNS=turns, LEAN=int(int4), ORDERED=ordered)
    kk = key("linear_wgmma", WEIGHT=INT4_GROUP if int4 else FP8_BLOCK, BYTES=bytes_, K=k, N=n, ROWS=rows, WIDE=wide, COLUMNS=columns, STAGES=stages,
             SPLIT=split, LIVE=1, PAIRS=1, PRODUCES=0, CONSUMES=0, EPILOGUE=epilogue, **TYPES, **extra)
    threads = groups * turns * 128 + (128 if groups * turns > 1 else 32)
    label = "%dx%d/%d,stages=%d%s%s" % (wide, columns, split, stages, "" if ahead is None else ",ahead=%d" % ahead, ",ordered" if ordered else "" if turns == 1 else ",turns=%d" % turns)
    return Plan(kind, kk, min(tiles * split, SMS // split * split), threads, stages * stage + 1024 + behind, split, label)


def tiles(kind, name, rows, quantizes=0, band=8):
    n, k, epilogue = SHAPES[name]
    if quantizes and epilogue != 2:
        return None
    kk = key("linear_tiles", WEIGHT=FP8_CHANNEL if kind == "channel" else FP8_BLOCK, K=k, N=n, STAGES=4, BAND=band, TYPE=2, RT=2, YT=2, LIVE=1, EPILOGUE=epilogue,
             PRODUCES=0, CONSUMES=0, QUANTIZES=quantizes)
    return Plan(kind, kk, min(SMS, 2 * up(rows, 256) * up(n, 256)), 384, 4 * 49152 + 1024, 2, "tiles%s%s" % (",quantizes" if quantizes else "", "" if band == 8 else ",band=%d" % band))


def short(kind, name, rows):
    """Plans for a short run: what the engine takes, and the new kernels."""
    columns = min(up(rows, 8) * 8, 128)
    if kind == "stream":
        return [stream(kind, name, rows, s) for s in (3, 4)]
    if kind == "stream4":
        return [stream(kind, name, rows, 4)]
    if kind in ("lean", "lean4"):
        out = [stream(kind, name, rows, s, w) for w, s in ((16, 3), (16, 4), (8, 5))]
        return out + [stream(kind, name, rows, s, w, 2) for w, s in ((16, 3), (16, 4), (12, 4))]
    if kind in ("mixed4", "bytes") and rows > 8:
        return [wgmma(kind, name, rows, *p, columns=columns) for p in ((64, 1), (64, 2), (128, 2), (192, 1))]
    if kind in ("turns", "turns4") and (rows > 8 or kind == "turns4" and rows == 8):
        shapes = dict(gate_up=((192, 1, 1), (128, 1, 2), (64, 1, 3)), qkv=((64, 1, 2), (64, 1, 3), (64, 1, 4), (192, 1, 1)))
        shapes = shapes.get(name, ((64, 2, 1), (64, 2, 2), (64, 2, 3), (64, 2, 4), (128, 2, 1)))
        halves = [64] if rows > 64 else []
        out = [wgmma(kind, name, rows, w, s, columns=c, turns=t) for c in [columns] + halves for w, s, t in shapes]
        # Sums of many tokens leave no registers for more warpgroups; e4m3 with one turn is `bytes`.
        of = lambda p, name: int(dict(p.key["defines"])[name])
        most = 256 if kind == "turns4" else 128
        fits = lambda p: p and (of(p, "COLUMNS") * of(p, "TURNS") * of(p, "WIDE") // 64 <= most or of(p, "WIDE") == 192)
        # With e4m3 activations turns of different lengths would serialise MMAs, and one turn is `bytes`.
        same = lambda p: of(p, "TURNS") in (2, 4)
        ordered = [wgmma(kind, name, rows, *p, ordered=1) for p in ((192, 1, 128), (128, 1, 256), (128, 2, 256))] if kind == "turns" and rows > 128 else []
        return [p for p in out if fits(p) and (kind == "turns4" or same(p))] + ordered
    return []


def variants(kind, name, rows):
    """Plans worth timing."""
    out = short(kind, name, rows) if SHORT or kind.startswith(("lean", "turns")) else []
    if SHORT:
        return unique_of(out)
    if kind == "plain" and rows <= 8:
        out += [stream(kind, name, rows, stages) for stages in (3, 4, 5, 6)]
    if kind in ("stream", "stream4") and rows <= 16:
        for stages in (3, 4, 6):
            out += [stream(kind, name, rows, stages)]
        out += [stream(kind, name, rows, stages, 8) for stages in (4, 5, 6, 10)]
    # Rings of which two fit on a multiprocessor, and whole ones.
    small = lambda *a, **b: wgmma(kind, name, rows, *a, most_shared=113 << 10, **b)
    if kind in ("mixed", "mixed4") and 4 < rows <= 128:
        out += [wgmma(kind, name, rows, *p) for p in ((64, 1), (64, 2), (128, 2), (192, 1), (192, 2))] + [small(64, 1), small(64, 2), small(128, 2)]
    if kind == "bytes" and 8 < rows <= 256:
        columns = min(up(rows, 8) * 8, 128)
        out += [wgmma(kind, name, rows, *p, columns=columns) for p in ((64, 1), (64, 2), (128, 1), (128, 2), (192, 1))] + [small(64, 1, columns=columns), small(64, 2, columns=columns), small(128, 2, columns=columns)]
        out += [wgmma(kind, name, rows, *p, columns=64) for p in ((64, 1), (128, 1), (128, 2), (192, 1))] * (rows == 128) + [wgmma(kind, name, rows, 128, s, columns=256) for s in (1, 2)] * (rows == 256)
    if kind == "tiles" and rows >= 128:
        out += [tiles(kind, name, rows), tiles(kind, name, rows, 1)] + [tiles(kind, name, rows, 0, b) for b in (4, 16)] * (rows >= 8192)
    if kind == "channel" and rows >= 128:
        out += [tiles(kind, name, rows)]
    return unique_of(out)


def unique_of(plans):
    return list({json.dumps(p.key): p for p in plans if p}.values())


def checked(kind, name, rows):
    """Plans to check: all variants' kinds of code, not all depths."""
    if kind in ("stream", "stream4", "lean", "lean4"):
        more = [stream(kind, name, rows, s, w, 2) for w, s in ((16, 3), (16, 4), (12, 4))] if kind.startswith("lean") else []
        return [stream(kind, name, rows, 4), stream(kind, name, rows, 5, 8) if rows <= 8 else None] + more
    if kind == "turns4":
        return unique_of([wgmma(kind, name, rows, 64, s, columns=min(up(rows, 8) * 8, 64), turns=t) for s in (1, 2) for t in (1, 2, 3, 4)] + short(kind, name, rows))
    if kind == "turns":
        return short(kind, name, rows)
    if kind in ("mixed", "mixed4"):
        return [wgmma(kind, name, rows, w, s) for w, s in ((64, 1), (64, 2), (128, 1), (192, 1))]
    if kind == "bytes":
        return [wgmma(kind, name, rows, w, s, columns=c) for w, s, c in ((64, 1, None), (128, 1, None), (64, 2, min(128, up(rows, 8) * 8)), (192, 1, min(128, up(rows, 8) * 8)), (128, 2, min(64, up(rows, 8) * 8)))
                if c or rows <= 256]
    return [tiles(kind, name, rows), tiles(kind, name, rows, 1)]


def quantize_plan(k, mode, rows):
    return Plan("quantize", key("quantize", K=k, MODE=mode, WHOLE=0, NT=2, LIVE=1), None, 256, 0)


def checked_keys(kinds):
    out = [quantize_plan(k, mode, 0).key for k in (4096, 12288) for mode in (0, 1, 2)]
    return out + [p.key for kind in kinds for r in CHECKED[kind] for name in SHAPES for p in checked(kind, name, r) if p]


def keys():
    if SHORT:
        return list({json.dumps(k): k for k in [p.key for r in SHORT_ROWS for kind in SHORT_KINDS for name in SHAPES for p in variants(kind, name, r)]}.values())
    out = checked_keys(CHECKED)
    for kind in ("plain", "stream", "stream4", "lean", "lean4", "mixed", "mixed4", "bytes", "turns", "turns4", "tiles", "channel"):
        out += [p.key for r in ROWS for name in SHAPES for p in variants(kind, name, r)]
    return list({json.dumps(k): k for k in out}.values())


if __name__ == "__main__" and sys.argv[1] == "keys":
    json.dump(keys(), open(sys.argv[2], "w"))
    sys.exit()
if __name__ == "__main__" and sys.argv[1] in ("short", "check"):
    from compile import compile_all
    compile_all(keys() if SHORT else checked_keys([kind for a in sys.argv[2:] for kind in a.split(",")] or CHECKED))

import torch
from step import Attribute, Config, Kernels, cuda, ok

P, U64, U32, F32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_float
KERNELS = Kernels()
EPS = 1e-6
torch.backends.cuda.matmul.allow_tf32 = False


def encoded(kind, t, dims, strides, box, swizzle):
    raw = ctypes.create_string_buffer(192)
    at = (ctypes.addressof(raw) + 63) & ~63
    array = lambda of, v: (of * len(v))(*v)
    ok(cuda.cuTensorMapEncodeTiled(P(at), kind, len(dims), P(t.data_ptr()), array(U64, dims), array(U64, strides), array(U32, box), array(U32, [1] * len(dims)), 0, swizzle, 2, 0))
    keep = (ctypes.c_char * 128).from_address(at)
    keep._raw = raw
    return keep


def tensor_map(t, rows):
    """Boxes of 128 bytes and `rows` rows."""
    size = t.element_size()
    return encoded(9 if size == 2 else 0, t, [t.shape[1], t.shape[0]], [t.stride(0) * size], [128 // size, rows], 3)


def piece_map(t, rows):
    """Int4 pieces in units of eight bytes: boxes of 128 columns and `rows` rows."""
    below, beside, piece = t.shape
    return encoded(4, t, [piece // 8, beside, below], [piece, piece * beside], [piece // 8, 1, rows // 16], 0)


class Launch:
    def __init__(self, plan, args, grid=None):
        self.plan, self.args = plan, args
        self.function = KERNELS.get(plan.key, plan.shared)
        self.pointers = (P * len(args))(*[ctypes.addressof(a) for a in args])
        self.dims = (ctypes.c_uint * 6)(*(grid or (plan.grid, 1, 1)), plan.threads, 1, 1)

    def go(self, dependent=True):
        attrs, count = (Attribute * 2)(), 0
        if dependent:
            attrs[count].id, attrs[count].value[0] = 6, 1
            count += 1
        if self.plan.cluster > 1:
            attrs[count].id = 4
            attrs[count].value[:3] = [self.plan.cluster, 1, 1]
            count += 1
        config = Config(self.dims, self.plan.shared, torch.cuda.current_stream().cuda_stream, ctypes.addressof(attrs), count)
        ok(cuda.cuLaunchKernelEx(ctypes.byref(config), self.function, self.pointers, None))


ORDER = torch.tensor([2 * (p // 4) + (p % 4 >> 1) + 8 * (p % 4 & 1) for p in range(16)])


def in_order(b):
    """Bytes as weights.cuh wants them."""
    return b.view(b.shape[0], -1, 16)[:, :, ORDER.to(b.device)].reshape(b.shape).contiguous()


def plain_order(b):
    inverse = ORDER.argsort().to(b.device)
    return b.view(b.shape[0], -1, 16)[:, :, inverse].reshape(b.shape).contiguous()


def scale_rows(n, gated):
    r = torch.arange(n, device="cuda")
    return r // 256 * 2 + r % 2 if gated else r // 128


class Weight:
    """One matrix with its scales, and its plain form in fp32."""

    def __init__(self, name, kind, seed):
        torch.manual_seed(seed)
        self.n, self.k, epilogue = SHAPES[name]
        n, k, self.gated = self.n, self.k, epilogue == 2
        new = lambda *s: torch.rand(*s, device="cuda") + 0.5
        self.int4, self.channel = kind.endswith("4"), kind == "channel"
        if kind == "plain":
            self.data, self.scales = (torch.randn(n, k, device="cuda") * 0.02).bfloat16(), torch.zeros(1, device="cuda")
        elif self.int4:
            q, zero = torch.randint(0, 16, (n, k), device="cuda", dtype=torch.int32), torch.randint(4, 13, (n, k // 128), device="cuda", dtype=torch.int32)
            scale = (new(n, k // 128) * 0.0044).half()
            self.plain = lambda: (q - zero.repeat_interleave(128, 1)).float() * scale.float().repeat_interleave(128, 1)
            v = q.view(n // 16, 2, 8, k // 128, 8, 2, 4, 2)   # tile, +8, g, group, step, +8 columns, j, column
            words = sum(v[:, hi, :, :, :, c, :, e] << 4 * (2 * c + hi + 4 * e) for hi in (0, 1) for c in (0, 1) for e in (0, 1))
            words = words.view(n // 16, 8, k // 128, 2, 4, 4).permute(0, 2, 3, 1, 5, 4).contiguous()   # tile, group, half, g, j, step
            tiled = lambda t: t.view(n // 16, 16, k // 128).permute(0, 2, 1).contiguous()
            self.data = torch.cat([words.view(n // 16, k // 128, -1).view(torch.uint8), tiled(scale).view(torch.uint8), tiled(zero.to(torch.uint8))], 2).contiguous()
            assert self.data.shape[2] == PIECE
            self.scales = torch.zeros(1, device="cuda")
        else:
            q = (torch.randn(n, k, device="cuda") * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
            self.data = in_order(q.view(torch.uint8))
            if self.channel:
                self.scales = new(n) * 2e-4
                self.plain = lambda: q.float() * self.scales[:, None]
            else:
                self.scales = new(n // 128, k // 128) * 2e-4
                self.plain = lambda: q.float() * self.scales[scale_rows(n, self.gated)].repeat_interleave(128, 1)

    def copy(self, turn):
        other = Weight.__new__(Weight)
        other.__dict__.update(self.__dict__)
        other.data = self.data.view(-1).roll(turn * 4096 * 16).view(self.data.shape) if not self.int4 else self.data.clone()
        other.scales = self.scales.clone()
        return other


def pointer(t):
    return U64(0 if t is None else t.data_ptr())


class Linear:
    """Inputs and outputs of one linear, and its launches."""

    def __init__(self, name, kind, rows, live=None):
        self.name, self.kind, self.rows, self.live_rows = name, kind, rows, rows if live is None else live
        self.n, self.k, self.epilogue = SHAPES[name]
        out = self.n // 2 if self.epilogue == 2 else self.n
        self.x = torch.randn(rows, self.k, device="cuda").bfloat16()
        self.norm = (1 + 0.1 * torch.randn(self.k, device="cuda")).bfloat16()
        self.residual = (torch.randn(rows, out, device="cuda") * 0.3).bfloat16()
        self.y = torch.empty(rows, out, device="cuda", dtype=torch.bfloat16)
        self.live = torch.tensor([self.live_rows], dtype=torch.int32, device="cuda")
        self.stride = up(rows, 256) * 256
        self.q = torch.zeros(rows, self.k, device="cuda", dtype=torch.uint8)
        self.scales = torch.full((self.k // 128, self.stride), float("nan"), device="cuda")
        self.yq = torch.empty(rows, out, device="cuda", dtype=torch.uint8)
        self.y_scales = torch.empty(out // 128, self.stride, device="cuda")
        if kind == "channel":
            s = self.x.float().abs().amax(1) / 448
            self.q = in_order((self.x.float() / s[:, None]).to(torch.float8_e4m3fn).view(torch.uint8))
            self.scales = s.contiguous()
        elif kind in ("bytes", "tiles", "turns"):
            quantized(self, 0).go(False)

    def launch(self, plan, w):
        u = lambda *v: [U32(i) for i in v]
        defines = dict(plan.key["defines"])
        if plan.kind in ("plain", "stream", "stream4", "lean", "lean4"):
            args = [pointer(self.x), pointer(w.data), U64(0), pointer(self.norm), pointer(self.residual), pointer(self.y)]
            return Launch(plan, args + u(self.k, self.k, self.y.stride(0), self.y.stride(0)) + [F32(EPS), pointer(w.scales)])
        if plan.kind in ("mixed", "mixed4", "bytes", "turns", "turns4"):
            wide, columns = int(defines["WIDE"]), int(defines["COLUMNS"])
            x = tensor_map(self.q if plan.kind in ("bytes", "turns") else self.x, columns)
            weights = piece_map(w.data, wide) if plan.kind == "turns4" else x if w.int4 else tensor_map(w.data, wide)
            args = [x, weights, U64(0), pointer(self.residual), pointer(self.y), pointer(self.live), U64(0), U64(0), U64(0)]
            return Launch(plan, args + u(self.y.stride(0), self.y.stride(0)) + [F32(EPS), pointer(w.scales), pointer(self.scales), pointer(w.data)] + u(self.stride))
        quantizes = defines["QUANTIZES"] == "1"
        y = self.yq if quantizes else self.y
        args = [tensor_map(self.q, 128), tensor_map(w.data, 128), pointer(self.residual), pointer(y), pointer(self.live), U64(0), U64(0), U64(0)]
        args += u(self.rows, self.y.stride(0), y.stride(0)) + [F32(EPS)] + [U64(0)] * 6 + u(0, 0) + [F32(EPS), F32(EPS)]
        return Launch(plan, args + [pointer(w.scales), pointer(self.scales), pointer(self.y_scales)] + u(self.stride))

    def dequantized(self):
        q = plain_order(self.q).view(torch.float8_e4m3fn).float()
        if self.kind == "channel":
            return q * self.scales[:, None]
        return q * self.scales[:, :self.rows].t().repeat_interleave(128, 1)

    def want(self, w):
        x = self.x.float()
        if self.kind in ("bytes", "tiles", "channel", "turns"):
            x = self.dequantized()
        elif self.kind.startswith(("stream", "lean")) and self.name in ("qkv", "gate_up"):
            x = x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + EPS) * self.norm.float()
        p = x @ w.plain().t()
        if self.epilogue == 2:
            return torch.nn.functional.silu(p[:, 0::2]) * p[:, 1::2]
        return p + self.residual.float() if self.epilogue == 1 else p

    def poison(self):
        self.y.fill_(float("nan"))
        self.yq.fill_(0x7f)
        self.y_scales.fill_(float("nan"))

    def result(self, plan):
        if dict(plan.key["defines"]).get("QUANTIZES") == "1":
            return plain_order(self.yq).view(torch.float8_e4m3fn).float() * self.y_scales[:, :self.rows].t().repeat_interleave(128, 1)
        return self.y.float()


def worst_block(got, want):
    """The largest error of 128 columns: one wrong scale shows."""
    error = (got - want).pow(2)
    columns = error.view(error.shape[0], -1, 128).mean((0, 2)).sqrt().max()
    rows = error.mean(1).sqrt().max()
    size = want.pow(2).mean().sqrt()
    return (max(columns, rows) / size).item() if torch.isfinite(columns) else float("nan")


def quantized(linear, mode, x=None, k=None):
    rows, k = linear.rows, k or linear.k
    x = linear.x if x is None else x
    plan = quantize_plan(k, mode, rows)
    grid = (rows, 1, 1) if mode == 1 else (up(k // 16, 256), rows, 1)
    args = [pointer(x), pointer(linear.norm), pointer(linear.q), pointer(linear.scales), pointer(linear.live), U32(rows), U32(x.stride(0)), U32(linear.q.stride(0)), U32(linear.stride), F32(EPS)]
    return Launch(plan, args, grid)


def check_quantize():
    bad = 0
    for name, rows in (("qkv", 1), ("qkv", 77), ("down", 300)):
        linear = Linear(name, "stream", rows)
        for mode in (0, 1, 2):
            x = linear.x
            if mode == 2:
                pairs = torch.randn(rows, 2 * linear.k, device="cuda").bfloat16()
                x = pairs
                v = (torch.nn.functional.silu(pairs[:, 0::2].float()) * pairs[:, 1::2].float()).bfloat16().float()
            elif mode == 1:
                f = x.float()
                v = (f * torch.rsqrt(f.pow(2).mean(1, keepdim=True) + EPS) * linear.norm.float()).bfloat16().float()
            else:
                x[0, :128] = 0
                v = x.float()
            linear.q.fill_(0x7f)
            linear.scales.fill_(float("nan"))
            quantized(linear, mode, x).go(False)
            torch.cuda.synchronize()
            most = v.view(rows, -1, 128).abs().amax(2)
            scale = torch.where(most > 0, most * torch.tensor(1 / 448, dtype=torch.float32, device="cuda"), torch.ones_like(most))
            q = (v.view(rows, -1, 128) * (1 / scale)[:, :, None]).view(rows, -1).to(torch.float8_e4m3fn)
            got = linear.scales[:, :rows].t()
            wrong = (plain_order(linear.q) != q.view(torch.uint8)).float().mean().item()
            off = ((got - scale).abs() / scale).max().item()
            # Mode 0 is exact; the others may round a bf16 differently.
            fine = (wrong == 0 and off == 0) if mode == 0 else (wrong < 5e-3 and off < 8e-3)
            bad += not fine
            print("quantize mode %d rows %4d K %5d: bytes that differ %.1e scales %.1e%s" % (mode, rows, linear.k, wrong, off, "" if fine else " BAD"), flush=True)
    return bad


def check(kinds):
    bad, bound = check_quantize(), dict(tiles=1e-2)
    for kind in kinds:
        worst, count, failed = 0.0, 0, []
        for name in SHAPES:
            w = Weight(name, kind, 1)
            for rows in CHECKED[kind]:
                live = rows if kind.startswith(("stream", "lean")) or rows < 20 else rows - 3
                linear = Linear(name, kind, rows, live)
                want = linear.want(w)[:live]
                for plan in checked(kind, name, rows):
                    if not plan:
                        continue
                    quant = dict(plan.key["defines"]).get("QUANTIZES") == "1"
                    launch, first, differ = linear.launch(plan, w), None, 0
                    for turn in range(4):
                        linear.poison()
                        try:
                            launch.go(turn > 0)
                            torch.cuda.synchronize()
                        except Exception as e:
                            print("CRASH", kind, name, rows, plan.label, e, flush=True)
                            raise
                        got = linear.result(plan)[:live].clone()
                        first = got if first is None else first
                        differ += not torch.equal(got, first)
                    error = worst_block(first, want)
                    limit = 4e-2 if quant else 1e-2
                    if not quant:
                        worst = max(worst, error if error == error else 9.9)
                    count += 1
                    past = not quant and live < rows and not torch.isnan(linear.y[live:]).all()
                    if not error < limit or differ or past:
                        failed.append("%s %d %s error %.1e differ %d past %d" % (name, rows, plan.label, error, differ, past))
                del linear, want
            # A planted fault: one wrong scale.
            rows = CHECKED[kind][-1]
            linear = Linear(name, kind, rows)
            want = linear.want(w)
            if w.int4:
                at = w.data[3, 5, 1024:1026].view(torch.float16)
                at *= 3
            elif kind == "channel":
                w.scales[70] *= 3
            else:
                w.scales[1, 3] *= 1.5
            plan = [p for p in checked(kind, name, rows) if p and dict(p.key["defines"]).get("QUANTIZES") != "1"]
            if plan:
                linear.poison()
                linear.launch(plan[0], w).go(False)
                torch.cuda.synchronize()
                error = worst_block(linear.y.float(), want)
                if not error > 1e-2:
                    failed.append("%s planted fault MISSED %.1e" % (name, error))
            del linear, want, w
        bad += len(failed)
        print("%-8s %3d checks, worst %.1e%s" % (kind, count, worst, "" if not failed else " BAD %d" % len(failed)), flush=True)
        for f in failed[:6]:
            print("    ", f, flush=True)
    print("failures %d" % bad, flush=True)
    return bad


def timed(graphs, seconds=0.03):
    times = [[] for _ in graphs]
    for turn in range(3):
        for at, graph in enumerate(graphs):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()
            a.record()
            graph.replay()
            b.record()
            b.synchronize()
            reps = max(1, int(seconds / 3 / (a.elapsed_time(b) * 1e-3)))
            a.record()
            for _ in range(reps):
                graph.replay()
            b.record()
            b.synchronize()
            times[at].append(a.elapsed_time(b) / reps * 1e3)
    return [sorted(t)[len(t) // 2] for t in times]


def recorded(launches):
    for l in launches[:2]:
        l.go()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for l in launches:
            l.go()
    return graph


def measure(rows_list, kinds, log):
    best = {}
    for name, (n, k, epilogue) in SHAPES.items():
        for weights, members in (("plain", ("plain",)), ("stream", ("stream", "lean", "mixed", "bytes", "turns", "tiles")), ("stream4", ("stream4", "lean4", "mixed4", "turns4")), ("channel", ("channel",))):
            members = [m for m in members if m in kinds]
            if not members:
                continue
            first = Weight(name, weights, 7)
            size = first.data.numel() * first.data.element_size() + first.scales.numel() * 4
            sets = [first] + [first.copy(t) for t in range(1, up(400 << 20, size))]
            for rows in rows_list:
                for kind in members:
                    plans = variants(kind, name, rows)
                    if not plans:
                        continue
                    linear, few = Linear(name, kind, rows), sets if rows < 2000 else sets[:3]
                    if kind == "channel":
                        few = few[:3]
                    graphs, keep = [], []
                    for plan in plans:
                        launches = [linear.launch(plan, w) for w in few] * (2 if rows <= 64 else 1)
                        keep.append(launches)
                        graphs.append(recorded(launches))
                    us = [t / len(l) for t, l in zip(timed(graphs, 0.03 if rows < 2000 else 0.1), keep)]
                    floor = max(size / BANDWIDTH, 2.0 * rows * n * k / (PEAK if kind in ("bytes", "turns", "tiles", "channel") else 800e12)) * 1e6
                    order = sorted(zip(us, (p.label for p in plans)))
                    rate = "%.2f TB/s" % (size / order[0][0] * 1e-6) if rows <= 64 else "%.0f TF" % (2.0 * rows * n * k / order[0][0] * 1e-6)
                    print("%-7s %5d %-8s" % (name, rows, kind), " ".join("%.2f(%s)" % o for o in order), file=log, flush=True)
                    best[kind, rows, name] = (order[0][0], rate, floor / order[0][0], order[0][1])
                    del graphs, keep, linear
            del sets, first
    print("rows  kind     " + " | ".join("%-38s" % n for n in SHAPES) + "| sum us")
    for rows in rows_list:
        for kind in kinds:
            cells = [best.get((kind, rows, n)) for n in SHAPES]
            if any(cells):
                print("%5d %-8s " % (rows, kind) + " | ".join("%-38s" % ("%.2f %s %2.0f%% %s" % (c[0], c[1], 100 * c[2], c[3]) if c else "-") for c in cells) + "| %.1f" % sum(c[0] for c in cells if c), flush=True)
    if "quantize" in kinds:
        for rows in rows_list:
            line = []
            for k, mode in ((4096, 0), (4096, 1), (12288, 0), (12288, 2)):
                linear = Linear("down" if k == 12288 else "qkv", "stream", rows)
                x = torch.randn(rows, 2 * k, device="cuda").bfloat16() if mode == 2 else linear.x
                us = timed([recorded([quantized(linear, mode, x)] * 20)])[0] / 20
                line.append("K %d mode %d %.2f" % (k, mode, us))
            print("quantize %5d us: %s" % (rows, ", ".join(line)), flush=True)


def main():
    mode, rest = sys.argv[1], [p for a in sys.argv[2:] for p in a.split(",")]
    rows, kinds = [int(p) for p in rest if p.isdigit()], [p for p in rest if not p.isdigit()]
    if mode == "check":
        sys.exit(check(kinds or list(CHECKED)) > 0)
    log = open(os.environ.get("OUT", "/tmp") + "/lowp.log", "a")
    if mode == "short":
        return measure(SHORT_ROWS, SHORT_KINDS, log)
    measure(rows or ROWS, kinds or ["stream", "mixed", "bytes", "tiles", "channel", "stream4", "mixed4", "plain", "quantize"], log)


if __name__ == "__main__":
    main()
