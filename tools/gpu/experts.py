"""A layer of experts (router, plan, products, sum): checked against PyTorch in fp32, then timed as graph replays.

experts.py check [TOKENS,...] [VARIANT]       routing, plan and outputs; imbalance; poisoned buffers; repetition; planted bugs
experts.py time  [TOKENS,...] [TILE=8,UP=64,DOWN=64 ...]   microseconds of a layer and of its kernels, for each variant
experts.py layer                              the layer as one kernel, for one to four tokens: checked and timed against the chain
experts.py tried [TOKENS,...]                 microseconds of a layer and of its GEMMs for each variant of a list
experts.py keys  FILE [TOKENS,...] [VARIANT ...]     the kernels that these need, for compile.py

With the word fp8 anywhere: e4m3 weights with a scale for 128 × 128.
Qwen3-30B-A3B's shape, bf16, random weights. Layers take turns on eight sets of weights, 9.7 GB: L2 does not help.
"""
import ctypes, json, sys

FP8 = "fp8" in sys.argv
sys.argv = [a for a in sys.argv if a != "fp8"]

H, I, E, TOP, LAYERS, SMS = 2048, 768, 128, 8, 8, 132
BANDWIDTH, PEAK = 4.54e12, 690e12
EXPERT_BYTES = 3 * H * I * (1 if FP8 else 2)
P, U64, U32, F32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_float
SOFTMAX = dict(SCORE=0, GROUPS=1, KEPT=1, GROUP_TOP=1, RENORM=1)
ROUTINGS = [SOFTMAX, dict(SOFTMAX, RENORM=0), dict(SOFTMAX, GROUPS=8, KEPT=3), dict(SCORE=1, GROUPS=8, KEPT=4, GROUP_TOP=2, RENORM=1),
            dict(SCORE=1, GROUPS=1, KEPT=1, GROUP_TOP=1, RENORM=0)]


def chosen(tokens):
    """The variant for so many tokens."""
    if FP8:
        return tried(tokens)[0]
    if tokens <= 1:
        return dict(TILE=8, UP=64, DOWN=64, DEPTH=2)
    if tokens <= 8:
        return dict(TILE=8, UP=96, DOWN=128, DEPTH=2)
    if tokens <= 96:
        return dict(TILE=16, UP=128, DOWN=128, DEPTH=2)
    if tokens <= 256:
        return dict(TILE=32, UP=128, DOWN=128, COPIERS=64, DEPTH=2)
    if tokens <= 1024:
        return dict(TILE=64, UP=128, DOWN=128, DEPTH=2) if tokens <= 512 else dict(TILE=128, UP=256, DOWN=256)
    return dict(TILE=256, UP=128, DOWN=128, PASS=0, GATHERED=1, CLUSTER=2)


def tried(tokens):
    """Variants for e4m3 weights that are worth timing, the best one first."""
    v = lambda tile, up, down=None, **more: dict(TILE=tile, UP=up, DOWN=down or up, **more)
    b = lambda *a, **more: v(*a, BYTES=1, **more)
    if tokens <= 1:
        return [v(8, 64), v(8, 96, 128), b(8, 128, COPIERS=32)]
    if tokens <= 8:
        few = [b(8, 192, 256, COPIERS=32), b(8, 256, COPIERS=32)]
        return few[::1 if tokens <= 4 else -1] + [b(8, 128, COPIERS=64), b(8, 96, 128, COPIERS=32), v(8, 256)]
    if tokens <= 96:
        return [b(16, 256, COPIERS=64), b(16, 256, COPIERS=96), b(16, 128, COPIERS=64), b(16, 192, 128, COPIERS=64), b(8, 128, COPIERS=64), v(16, 256)]
    if tokens <= 256:
        return [b(32, 256, COPIERS=96), b(24, 256, COPIERS=96), b(48, 256, COPIERS=96), b(32, 192, 128, COPIERS=96), v(32, 256, COPIERS=64)]
    if tokens <= 1024:
        return [v(64, 192, 128), b(48, 256, COPIERS=96), b(32, 256, COPIERS=96)]
    return [v(128, 128, PASS=0, GATHERED=1, CLUSTER=2), v(256, 128, PASS=0, GATHERED=1, CLUSTER=2, AHEAD=0)]


def wide(v):
    return (max(v["UP"], v["DOWN"]) + 63) // 64 * 64


def completed(variant):
    v = dict(PASS=1, GATHERED=0, CLUSTER=1, DEPTH=2 if FP8 else 1)
    v.update(variant)
    v.setdefault("COPIERS", 8 if v["GATHERED"] else 16 if v["TILE"] <= 8 else 32 if v["TILE"] <= 32 else 64)
    static = 16 * 40 + wide(v) // 64 * v["TILE"] * 8 + v["TILE"] * 4
    v.setdefault("STAGES", min(40, (232448 - 1024 - static) // (stage_bytes(v) + 4 * v["TILE"] * v.get("BYTES", 0))))
    return v


def stage_bytes(v):
    return (wide(v) // (2 if FP8 else 1) + v["TILE"] // (1 + v.get("BYTES", 0))) * 128 * v["DEPTH"]


def key(source, entry=None, **defines):
    return dict(source=source, entry=entry or source, defines=[[a, str(b)] for a, b in sorted(defines.items())])


def route_key(tokens, routing, plans):
    shape = dict(TOKENS=16 if tokens <= 256 else 32, SHARES=8, WARPS=8) if tokens <= 1024 else dict(TOKENS=64, SHARES=2, WARPS=8)
    return shape, key("route", H=H, E=E, TOP=TOP, PLANS=int(plans), BIAS=routing["SCORE"], BT=0, **shape, **routing)


def plan_key(tokens, tile, alone=False):
    shares = 1 if alone or tokens <= 128 else 2 if tokens <= 256 else 4 if tokens <= 512 else 8
    chunk = 256 if tokens <= 256 * shares else 2048
    return shares, chunk, key("experts_plan", E=E, SPREAD=E, TOP=TOP, TILE=tile, SHARES=shares, CHUNK=chunk)


def product_key(v, phases):
    return key("experts", H=H, I=I, TOP=TOP, ACT=2, UP_WIDE=v["UP"], DOWN_WIDE=v["DOWN"], TILE=v["TILE"], STAGES=v["STAGES"], PHASES=phases,
               **{k: v[k] for k in ("PASS", "GATHERED", "CLUSTER", "COPIERS", "DEPTH", "SETS", "AHEAD", "BYTES") if k in v}, **weight())


def weight():
    return dict(WEIGHT=1) if FP8 else {}


def layer_key(rows, v):
    """Norm, router, experts and sum as one kernel."""
    v = dict(dict(BLOCKS=SMS, STAGES=12, FLYING=4, COPIES=2), **v)
    return v, key("experts_layer", H=H, I=I, E=E, TOP=TOP, ROWS=rows, ACT=2, NT=2, BIAS=0, BT=0, **v, **SOFTMAX, **weight())


def norm_key():
    return key("rms_norm", XT=2, WT=2, YT=2, ALIGNED=1)


LAYER_VARIANTS = [dict(FLYING=f, STAGES=s, COPIES=c) for f, s, c in [(3, 12, 2)] * FP8 + [(4, 12, 2), (3, 12, 4), (4, 8, 4)]]
CHECKED = [1, 2, 3, 8, 16, 33, 64, 200, 256, 512, 1000, 8192]
TIMED = [1, 8, 64, 256, 512, 8192] if not FP8 else [1, 2, 4, 8, 16, 64, 256, 512, 2048]


def keys(tokens, variants):
    out = []
    for t in tokens:
        for v in variants or (tried(t) if FP8 else [chosen(t)]):
            v = completed(v)
            out += [product_key(v, p) for p in ((1, 2, 3) if not FP8 or v == completed(chosen(t)) else (3,))] + [plan_key(t, v["TILE"], alone)[2] for alone in (False, True)]
            out += [route_key(t, SOFTMAX, True)[1]] * (t <= min(16, v["TILE"]))
        out += [route_key(t, r, False)[1] for r in ROUTINGS]
    out += [layer_key(t, v)[1] for t in tokens if t <= 4 for v in LAYER_VARIANTS] + [norm_key()]
    return out + [key("experts_sum", H=H, TOP=TOP, RESIDUAL=1), key("experts_gather", H=H, TOP=TOP)]


def arguments(rest):
    """Numbers of tokens, and variants."""
    variants = [{k: int(v) for k, v in (p.split("=") for p in a.split(","))} for a in rest if "=" in a]
    return [int(x) for a in rest if "=" not in a for x in a.split(",")], variants


if __name__ == "__main__" and sys.argv[1] == "keys":
    tokens, variants = arguments(sys.argv[3:])
    json.dump(keys(tokens or sorted(set(CHECKED + TIMED)), variants), open(sys.argv[2], "w"))
    sys.exit()

import torch
from step import Attribute, Config, Kernels, cuda, ok

KERNELS = Kernels()


class Launch:
    def __init__(self, k, args, grid, threads, shared=0, cluster=1):
        self.function, self.args, self.shared, self.cluster = KERNELS.get(k, shared), args, shared, cluster
        self.pointers = (P * len(args))(*[ctypes.addressof(a) for a in args])
        self.dims = (ctypes.c_uint * 6)(grid, 1, 1, threads, 1, 1)

    def go(self, dependent=True):
        attrs, count = (Attribute * 2)(), 0
        if dependent:
            attrs[count].id, attrs[count].value[0] = 6, 1
            count += 1
        if self.cluster > 1:
            attrs[count].id = 4
            attrs[count].value[:3] = [self.cluster, 1, 1]
            count += 1
        config = Config(self.dims, self.shared, torch.cuda.current_stream().cuda_stream, ctypes.addressof(attrs), count)
        ok(cuda.cuLaunchKernelEx(ctypes.byref(config), self.function, self.pointers, None))


def tensor_map(t, rows):
    raw = ctypes.create_string_buffer(192)
    at = (ctypes.addressof(raw) + 63) & ~63
    two = lambda kind, *v: (kind * len(v))(*v)
    size = t.element_size()
    ok(cuda.cuTensorMapEncodeTiled(P(at), 9 if size == 2 else 0, 2, P(t.data_ptr()), two(U64, t.shape[1], t.shape[0]), two(U64, t.stride(0) * size),
                                   two(U32, 128 // size, rows), two(U32, 1, 1), 0, 3, 2, 0))
    keep = (ctypes.c_char * 128).from_address(at)
    keep._raw = raw
    return keep


class Weights:
    def __init__(self, seed):
        torch.manual_seed(seed)
        new = lambda *shape: torch.empty(*shape, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
        self.up, self.down, self.router = new(E * 2 * I, H), new(E * H, I), new(E, H)
        self.bias = torch.randn(E, device="cuda") * 0.05

    def expert(self, e):
        pair = self.up[e * 2 * I:(e + 1) * 2 * I].view(I // 8, 2, 8, H).float()
        return pair[:, 0].reshape(I, H), pair[:, 1].reshape(I, H), self.down[e * H:(e + 1) * H].float()


class Bytes(Weights):
    """e4m3 with scales, as scaled.rs puts them in order: all rows, then all scales."""
    ORDER = torch.tensor([2 * (p // 4) + p % 4 // 2 + 8 * (p % 2) for p in range(16)])

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.router = torch.empty(E, H, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
        self.bias = torch.randn(E, device="cuda") * 0.05
        self.up, self.up_scales = self.matrix(E * 2 * I, H)
        self.down, self.down_scales = self.matrix(E * H, I)

    def matrix(self, rows, cols):
        room = torch.empty(rows * cols + rows * cols // 128 // 128 * 4, device="cuda", dtype=torch.uint8)
        data = room[:rows * cols].view(rows, cols)
        for i in range(0, rows, 1 << 14):
            part = data[i:i + (1 << 14)]
            plain = (torch.randn(part.shape, device="cuda") * 100).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            part.copy_(plain.view(-1, 16)[:, self.ORDER.cuda()].view(part.shape))
        scales = room[rows * cols:].view(torch.float32).view(rows // 128, cols // 128)
        scales.copy_((torch.rand(scales.shape, device="cuda") + 0.5) * 2e-4)
        return data, scales

    def plain(self, data, scales, rows, scale_rows):
        inverse = self.ORDER.argsort().cuda()
        values = data[rows].view(-1, 16)[:, inverse].view(-1, data.shape[1]).view(torch.float8_e4m3fn).float()
        return values * scales[scale_rows].repeat_interleave(128, 1)

    def expert(self, e):
        r, d = torch.arange(e * 2 * I, (e + 1) * 2 * I, device="cuda"), torch.arange(e * H, (e + 1) * H, device="cuda")
        pair = self.plain(self.up, self.up_scales, r, r // 256 * 2 + r // 8 % 2).view(I // 8, 2, 8, H)
        return pair[:, 0].reshape(I, H), pair[:, 1].reshape(I, H), self.plain(self.down, self.down_scales, d, d // 128)


def new_weights(seed):
    return (Bytes if FP8 else Weights)(seed)


class Layer:
    """The buffers and launches of one layer."""

    def __init__(self, weights, tokens, variant, routing=SOFTMAX, scale=1.0, live=None, shared=None):
        self.w, self.tokens, self.v, self.scale = weights, tokens, completed(variant), scale
        # Whether the layer is one kernel, which has no e4m3 activations.
        self.alone = False
        self.live = tokens if live is None else live
        n, tile, rows = tokens * TOP, self.v["TILE"], wide(self.v)
        self.most = max(16, min(n, n // tile + E))
        ints = lambda *s: torch.zeros(*s, dtype=torch.int32, device="cuda")
        half = lambda *s: torch.zeros(*s, dtype=torch.bfloat16, device="cuda")
        # A residual as large as what the experts add: a larger one would hide their errors.
        self.x, self.residual = half(tokens, H).normal_(), half(tokens, H).normal_(0, 0.05)
        # A row has TOP experts, then their weights.
        self.choice, self.sorted = ints(tokens, 2 * TOP), torch.zeros(n, device="cuda")
        self.ids, self.gains = self.choice[:, :TOP], self.choice[:, TOP:].view(torch.float32)
        self.counts, self.offsets, self.rows, self.place, self.tasks, self.ready, self.head = ints(E), ints(E + 1), ints(n), ints(n), ints(self.most, 4), ints(self.most), ints(1)
        # Layers may share what is large and only passes between kernels.
        self.act, self.parts, self.y, self.near = shared or (half(n, I), half(n, H), half(tokens, H), half(n, H))
        self.count = torch.tensor([self.live], dtype=torch.int32, device="cuda")
        p = lambda t: U64(t.data_ptr())
        plan = [p(t) for t in (self.counts, self.offsets, self.rows, self.place, self.sorted, self.tasks, self.ready, self.head)] + [U32(self.most), U64(0)]
        # With few tokens the router plans too.
        self.plans = tokens <= min(16, tile)
        self.route = []
        for plans in (False,) + (True,) * self.plans:
            shape, route = route_key(tokens, routing if not plans else SOFTMAX, plans)
            clusters = (tokens + shape["TOKENS"] - 1) // shape["TOKENS"]
            self.route.append(Launch(route, [p(self.x), p(weights.router), p(weights.bias), p(self.choice), p(self.count), U32(tokens), U32(H), F32(scale)] + (plan if plans else []),
                                     clusters * shape["SHARES"], shape["WARPS"] * 32, 0, shape["SHARES"]))
        self.plan = []
        for alone in (False, True):
            shares, chunk, k = plan_key(tokens, tile, alone)
            self.plan.append(Launch(k, [p(self.choice), p(self.count), U32(tokens)] + plan, shares, 1024, E * (chunk // 32 + 1) * 6, shares))
        maps = [tensor_map(weights.up, self.v["UP"]), tensor_map(weights.down, self.v["DOWN"]), tensor_map(self.near, min(tile, 64)), tensor_map(self.act, min(tile, 64))]
        args = maps + [p(self.x), p(self.tasks), p(self.head), p(self.rows), p(self.sorted), p(self.ready), p(self.act), p(self.parts), U32(H)]
        scales = [p(weights.up_scales), p(weights.down_scales)] if FP8 else []
        args += scales
        bytes_ = self.v["STAGES"] * stage_bytes(self.v) + 1024
        self.products = [Launch(product_key(self.v, phases), args, SMS, rows * 2 + 128, bytes_, self.v["CLUSTER"]) for phases in (3, 1, 2)]
        self.gather = Launch(key("experts_gather", H=H, TOP=TOP), [p(self.x), p(self.place), p(self.near), p(self.count), U32(tokens), U32(H)], tokens, H // 8)
        self.whole = ("R" if self.plans else "rp") + "g" * self.v["GATHERED"] + "es"
        self.sum = Launch(key("experts_sum", H=H, TOP=TOP, RESIDUAL=1), [p(self.parts), p(self.residual), p(self.y), p(self.count), U32(tokens)],
                          (tokens * H // 8 + 255) // 256, 256)

        self.raw, self.norm = half(tokens, H).normal_(0, 3), half(H).normal_(1, 0.2)
        self.first = Launch(norm_key(), [p(self.raw), p(self.norm), p(self.x), U32(H), U32(H), U32(H), F32(1e-6)], tokens, 256)

    def one(self, v):
        """The launch of the whole layer as one kernel."""
        self.alone = True
        v, k = layer_key(self.tokens, v)
        p = lambda t: U64(t.data_ptr())
        words = 32 + v["COPIES"] * self.tokens * (E + TOP * I // 2)
        if not hasattr(self, "exchange"):
            self.exchange = torch.zeros(32 + 8 * self.tokens * (E + TOP * I // 2), dtype=torch.int64, device="cuda")
        w, scales = self.w, [p(self.w.up_scales), p(self.w.down_scales)] if FP8 else []
        return Launch(k, [p(self.raw), p(self.norm), p(w.router), U64(0), p(w.up), p(w.down), p(self.residual), p(self.y), p(self.choice), p(self.exchange),
                          p(self.count), U32(words), U32(H), U32(H), U32(H), F32(1e-6), F32(self.scale), U64(0)] + scales, v["BLOCKS"], 288, v["STAGES"] * 16384)

    def poison(self, ids=True):
        [t.fill_(float("nan")) for t in (self.act, self.parts, self.y, self.near, self.sorted) + ((self.gains,) if ids else ())]
        for t in (self.counts, self.offsets, self.rows, self.place, self.tasks, self.ready, self.head) + ((self.ids,) if ids else ()):
            t.fill_(0x7fffffff)

    def chain(self, kinds, dependent=True):
        """Router, plan, gather, experts (or up, down), sum; R: the router that plans too, P: a plan by one block."""
        for k in kinds:
            {"r": self.route[0], "R": self.route[-1], "p": self.plan[0], "P": self.plan[1], "e": self.products[0], "u": self.products[1], "d": self.products[2], "g": self.gather, "s": self.sum, "n": self.first}[k].go(dependent)


def routed(layer, routing):
    """ids and weights by PyTorch in fp64, and where two candidates are too near to tell."""
    logits = layer.x[:layer.live].double() @ layer.w.router.double().t()
    plain = logits.sigmoid() if routing["SCORE"] else logits.softmax(-1)
    score = plain + layer.w.bias.double() if routing["SCORE"] else logits
    near = torch.zeros(logits.shape[0], dtype=torch.bool, device="cuda")
    gap = lambda sorted_, k: (sorted_[:, k - 1] - sorted_[:, k]).abs() < 1e-5 * sorted_.abs().amax(-1)
    if routing["GROUPS"] > 1:
        groups = score.view(-1, routing["GROUPS"], E // routing["GROUPS"])
        strength = groups.topk(routing["GROUP_TOP"], -1)[0].sum(-1)
        order = strength.sort(dim=-1, descending=True, stable=True)
        near |= gap(order[0], routing["KEPT"])
        kept = torch.zeros_like(strength).scatter_(1, order[1][:, :routing["KEPT"]], 1).bool()
        score = groups.masked_fill(~kept[..., None], -1e9).reshape(-1, E)
    order = score.sort(dim=-1, descending=True, stable=True)
    top = order[0][:, :TOP + 1]
    near |= ((top[:, :-1] - top[:, 1:]) < 1e-5 * top.abs().amax(-1, keepdim=True)).any(-1)
    ids = order[1][:, :TOP]
    gains = plain.gather(1, ids)
    if routing["RENORM"]:
        gains = gains / gains.sum(-1, keepdim=True)
    return ids, gains * layer.scale, near


def as_e4m3(x):
    """bf16 as e4m3 with a scale for each 128 columns, and back."""
    x = x.bfloat16().float().view(x.shape[0], -1, 128)
    scale = x.abs().amax(2, keepdim=True) * torch.tensor(1 / 448, device="cuda")
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return ((x * (1 / scale)).to(torch.float8_e4m3fn).float() * scale).view(x.shape[0], -1)


def expected(layer):
    """The layer's output in fp32, from the ids and weights that it has.

    e4m3 activations: a sum that is rounded to the next bf16 may become another e4m3, which is 6 % away. So the second GEMM is
    compared with what follows from the first one's results, and those by themselves (act_error)."""
    x, out = layer.x[:layer.live].float(), layer.residual[:layer.live].float().clone()
    quantised = as_e4m3 if layer.v.get("BYTES") and not layer.alone else lambda x: x
    layer.act_error = 0.0
    for e in layer.ids[:layer.live].unique().tolist():
        token, slot = (layer.ids[:layer.live] == e).nonzero(as_tuple=True)
        gate, up, down = layer.w.expert(e)
        mine = quantised(x[token])
        act = torch.nn.functional.silu(mine @ gate.t()) * (mine @ up.t())
        if quantised is as_e4m3:
            got = layer.act[layer.place[token * TOP + slot].long().clamp(0, layer.act.shape[0] - 1)].float()
            layer.act_error = max(layer.act_error, ((got - act).norm(dim=-1) / act.norm(dim=-1)).nan_to_num(9.9).max().item())
            act = as_e4m3(got)
        out.index_add_(0, token, (act @ down.t()) * layer.gains[token, slot][:, None])
    return out


def worst_row(layer):
    """The largest relative error of a token's output: one wrong assignment shows, whatever the number of tokens."""
    want = expected(layer)
    return max(((layer.y[:layer.live].float() - want).norm(dim=-1) / want.norm(dim=-1)).nan_to_num(9.9).max().item(), layer.act_error)


def plan_errors(layer):
    """How many things of the plan differ from what a stable sort gives."""
    ids, bad, at = layer.ids[:layer.live].flatten().long(), 0, 0
    order = ids.argsort(stable=True)
    counts = torch.bincount(ids, minlength=E)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    bad += int((layer.rows[:ids.numel()] != order).sum()) + int((layer.place[order].long() != torch.arange(ids.numel(), device="cuda")).sum()) + int((layer.counts != counts).sum()) + int((layer.offsets != offsets).sum())
    tasks, used = layer.tasks.tolist(), layer.head.item()
    for e, first, count, _ in tasks[:used]:
        bad += not (0 <= e < E and first == at and 0 < count <= layer.v["TILE"] and offsets[e] <= first and first + count <= offsets[e + 1])
        at += count
    bad += at != ids.numel() or any(t[0] != -1 for t in tasks[used:])
    return bad


# Three roundings to bf16 give 3e-3 in a row.
WORST, PATTERNS = 1e-2, ("one", "spread", "few", "skewed")


def assign(layer, pattern):
    n = layer.live
    if pattern == "one":        # every token's first expert is 5; the others are 120 to 126
        ids = torch.tensor([5, 120, 121, 122, 123, 124, 125, 126]).repeat(n, 1)
    elif pattern == "spread":   # neighbours share no expert
        ids = (torch.arange(n)[:, None] * TOP + torch.arange(TOP)) % E
    elif pattern == "few":      # ten experts have everything
        ids = torch.stack([torch.randperm(10)[:TOP] for _ in range(n)]) * 12 + 3
    else:
        weights = 1.0 / torch.arange(1, E + 1).float()
        ids = torch.multinomial(weights.expand(n, E), TOP)
    layer.ids[:n] = ids.int().cuda()
    layer.gains[:n] = torch.rand(n, TOP, device="cuda") * 0.75 + 0.25


def wrong_expert(layer):
    """Two assignments of different experts change places."""
    layer.rows[[0, -1]] = layer.rows[[-1, 0]]


def stale_list(layer):
    """The router has chosen for other tokens since the plan was made."""
    layer.x.normal_()
    layer.chain("r")


def dropped(layer):
    """The last assignment of the last task is not computed."""
    layer.tasks[layer.head.item() - 1, 2] -= 1


def weight_twice(layer):
    layer.sorted[layer.sorted.numel() // 2] **= 2


PLANTS = (None, wrong_expert, stale_list, dropped, weight_twice)


def planted(layer):
    """Bugs planted between the plan and the products, each of which the comparison must find; how many it judges wrongly."""
    bad = 0
    for plant in PLANTS:
        layer.poison()
        layer.chain("rp")
        torch.cuda.synchronize()
        if plant:
            plant(layer)
        layer.chain("es")
        torch.cuda.synchronize()
        error = worst_row(layer)
        found = not error < WORST
        bad += found != bool(plant)
        print("tokens %5d planted %-12s %s %.1e" % (layer.tokens, plant.__name__ if plant else "nothing", "found" if found else "not found", error), flush=True)
    return bad


def wrong_scales(layer, one=None):
    """Wrong scales of blocks of an expert that is used, each of which the comparison must find; how many it judges wrongly."""
    bad, go = 0, (lambda: one.go()) if one else (lambda: layer.chain(layer.whole))
    layer.poison()
    go()
    torch.cuda.synchronize()
    want = expected(layer)
    expert = layer.ids[0, 0].item()
    for name, scales, row, column in (("none", layer.w.up_scales, 0, 0), ("gate", layer.w.up_scales, expert * 2 * I // 128 + 4, H // 128 - 1), ("up", layer.w.up_scales, expert * 2 * I // 128 + 2 * I // 128 - 1, 0),
                                      ("down", layer.w.down_scales, expert * H // 128 + 3, 2)):
        before = scales[row, column].item()
        scales[row, column] = before * (1 if name == "none" else 4)
        layer.poison()
        go()
        torch.cuda.synchronize()
        scales[row, column] = before
        error = ((layer.y[:layer.live].float() - want).norm(dim=-1) / want.norm(dim=-1)).max().item()
        found = not error < WORST
        bad += found != (name != "none")
        print("tokens %5d wrong scale %-4s %s %.1e" % (layer.tokens, name, "found" if found else "not found", error), flush=True)
    return bad


def check(tokens, weights, variant=None):
    bad = 0
    for t in tokens:
        line = []
        for number, routing in enumerate(ROUTINGS[:5 - 4 * FP8]):
            layer = Layer(weights, t, chosen(t), routing, scale=1.0 if number == 0 else 2.5)
            layer.poison()
            layer.chain("r")
            torch.cuda.synchronize()
            ids, gains, near = routed(layer, routing)
            wrong = ((layer.ids != ids).any(-1) & ~near).sum().item()
            same = (layer.ids == ids).all(-1)
            error = ((layer.gains - gains).abs() / gains.abs().clamp_min(1e-6))[same].max().item()
            bad += wrong > 0 or not error < 1e-4
            line.append("%d/%d/%.0e" % (wrong, near.sum().item(), error))
        print("tokens %5d routing wrong/near/weights:" % t, " ".join(line), flush=True)
        for live in sorted({t, max(1, t - 5)}):
            layer = Layer(weights, t, variant or chosen(t), live=live)
            later = layer.whole[2 if layer.whole[0] == "r" else 1:]
            for pattern in ("router",) + ("plans",) * layer.plans + PATTERNS:
                if pattern in ("router", "plans"):
                    layer.poison()
                    layer.chain("rp" + later if pattern == "router" else "R" + later)
                else:
                    assign(layer, pattern)
                    layer.poison(ids=False)
                    layer.chain("p" + later)
                torch.cuda.synchronize()
                plan, error = plan_errors(layer), worst_row(layer)
                untouched = bool(torch.isnan(layer.y[live:]).all())
                wrong = plan or not error < WORST or not untouched
                # A plan by one block and the products as two launches give the same bits; so do repetitions of the whole.
                first, differ = layer.y.clone(), 0
                for turn in range(2 if t > 1000 else 12):
                    layer.poison(ids=False)
                    layer.chain("P" + later.replace("e", "ud") if turn == 0 else "p" + later)
                    torch.cuda.synchronize()
                    differ += not torch.equal(layer.y[:live], first[:live])
                bad += bool(wrong or differ)
                print("tokens %5d live %5d %-7s tasks %4d plan %d output %.1e%s%s" % (
                    t, live, pattern, layer.head.item(), plan, error, " BAD" if wrong else "", " DIFFERS %d" % differ if differ else ""), flush=True)
    # Equal scores: the lower index comes first.
    layer = Layer(weights, 64, chosen(64))
    saved = weights.router.clone()
    weights.router.copy_(weights.router[:8].repeat(E // 8, 1))
    layer.chain("r")
    torch.cuda.synchronize()
    same_rows = (layer.ids % 8 == layer.ids[:, :1] % 8).all() and (layer.ids == (layer.ids[:, :1] + 8 * torch.arange(TOP, device="cuda"))).all()
    weights.router.copy_(saved)
    bad += not same_rows
    bad += sum(planted(Layer(weights, t, chosen(t))) for t in (64, 1000))
    bad += sum(wrong_scales(Layer(weights, t, chosen(t))) for t in (1, 8, 64, 256, 1000) if FP8)
    print("ties", "ok" if same_rows else "BAD %s" % layer.ids[:2].tolist(), "| failures %d" % bad, flush=True)
    return bad


def check_layer(weights):
    """The layer as one kernel against the same in fp32, and against the chain of kernels."""
    bad = 0
    for t in (1, 2, 3, 4):
        for live in sorted({t, max(1, t - 1)}):
            for v in LAYER_VARIANTS if t < 3 else LAYER_VARIANTS[:1]:
                layer = Layer(weights, t, chosen(t), live=live)
                layer.chain("n" + layer.whole)
                torch.cuda.synchronize()
                ids, before = layer.ids.clone(), layer.y.clone()
                launch, worst, differ = layer.one(v), 0.0, 0
                for turn in range(20):
                    layer.poison()
                    launch.go()
                    torch.cuda.synchronize()
                    differ += turn > 0 and not torch.equal(first, layer.y[:live])
                    first = layer.y[:live].clone()
                wrong = int((layer.ids[:live] != ids[:live]).any(-1).sum())
                error, untouched = worst_row(layer), bool(torch.isnan(layer.y[live:]).all())
                failed = wrong or not error < WORST or differ or not untouched
                bad += bool(failed)
                print("layer %d live %d %s: routed differently %d output %.1e repeated %d%s" % (t, live, v, wrong, error, differ, " BAD" if failed else ""), flush=True)
    if FP8:
        layer = Layer(weights, 1, chosen(1))
        layer.chain("n")
        bad += wrong_scales(layer, layer.one(LAYER_VARIANTS[0]))
    print("layer failures", bad)
    return bad


def measure_layer(weights):
    for t in (1, 2, 4):
        n = t * TOP
        half = lambda *s: torch.zeros(*s, dtype=torch.bfloat16, device="cuda")
        layers = [Layer(w, t, chosen(t)) for w in weights]
        graphs = [recorded(layers, "n" + layers[0].whole)]
        launches = []
        for v in LAYER_VARIANTS:
            launches.append([l.one(v) for l in layers])
            [x.go() for x in launches[-1]]
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                [x.go() for x in launches[-1]]
            graphs.append(graph)
        us = [x / len(layers) for x in timed(graphs)]
        experts = sum(l.ids.unique().numel() for l in layers) / len(layers)
        print("tokens %d, experts %.1f, floor %.1f us: chain %.2f us" % (t, experts, experts * EXPERT_BYTES / BANDWIDTH * 1e6, us[0]))
        for v, x in zip(LAYER_VARIANTS, us[1:]):
            print("   layer %.2f us %s" % (x, v), flush=True)


def timed(graphs, seconds=0.04):
    """Median microseconds of each graph, in turns."""
    times = [[] for _ in graphs]
    for turn in range(5):
        for at, graph in enumerate(graphs):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()
            a.record()
            graph.replay()
            b.record()
            b.synchronize()
            reps = max(1, int(seconds / 5 / (a.elapsed_time(b) * 1e-3)))
            a.record()
            for _ in range(reps):
                graph.replay()
            b.record()
            b.synchronize()
            times[at].append(a.elapsed_time(b) / reps * 1e3)
    return [sorted(t)[len(t) // 2] for t in times]


def recorded(layers, kinds):
    for l in layers:
        l.chain(kinds)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for l in layers:
            l.chain(kinds)
    return graph


def measure(tokens, variants, weights):
    table = []
    for t in tokens:
        for v in variants or [chosen(t)]:
            n = t * TOP
            half = lambda *s: torch.zeros(*s, dtype=torch.bfloat16, device="cuda")
            shared = (half(n, I), half(n, H), half(t, H), half(n, H))
            torch.manual_seed(t)
            layers = [Layer(w, t, v, shared=shared) for w in weights]
            kinds = [layers[0].whole, "e", "u", "d", layers[0].whole[0], "p", "g", "s"]
            graphs = [recorded(layers, k) for k in kinds]
            us = [x / len(layers) for x in timed(graphs)]
            experts = sum(l.ids.unique().numel() for l in layers) / len(layers)
            floor = experts * EXPERT_BYTES / BANDWIDTH * 1e6
            sums = 6.0 * n * H * I / PEAK * 1e6
            table.append((t, " ".join("%s=%s" % i for i in layers[0].v.items() ), experts, max(floor, sums), us))
            print(table[-1], flush=True)
            del layers, graphs
    print("tokens experts floor_us | layer_us share x48_ms | products gate_up+down | route plan gather sum | variant")
    for t, v, experts, floor, us in table:
        print("%6d %7.1f %8.1f | %8.1f %4.0f%% %7.2f | %7.1f (%3.0f%%) %7.1f+%.1f | %.2f %.2f %.2f %.2f | %s" % (
            t, experts, floor, us[0], 100 * floor / us[0], us[0] * 48e-3, us[1], 100 * floor / us[1], us[2], us[3], us[4], us[5], us[6], us[7], v))


def measure_tried(tokens, weights):
    """A layer and its GEMMs for each variant, in turns; each is checked first."""
    for t in tokens:
        n = t * TOP
        half = lambda *s: torch.zeros(*s, dtype=torch.bfloat16, device="cuda")
        shared = (half(n, I), half(n, H), half(t, H), half(n, H))
        graphs, keep, labels = [], [], []
        for v in tried(t) if FP8 else [chosen(t)]:
            torch.manual_seed(t)
            layers = [Layer(w, t, v, shared=shared) for w in weights]
            keep.append(layers)
            layers[0].poison()
            layers[0].chain(layers[0].whole)
            torch.cuda.synchronize()
            labels.append("%s error %.1e" % (",".join("%s=%s" % i for i in v.items()), worst_row(layers[0])))
            graphs += [recorded(layers, layers[0].whole), recorded(layers, "e")]
        us = [x / len(weights) for x in timed(graphs)]
        experts = sum(l.ids.unique().numel() for l in layers) / len(layers)
        print("tokens %d, experts %.1f, floor %.1f us" % (t, experts, experts * EXPERT_BYTES / BANDWIDTH * 1e6))
        for layer, alone, label in sorted(zip(us[::2], us[1::2], labels)):
            print("   layer %.2f us, GEMMs %.2f us: %s" % (layer, alone, label), flush=True)
        del graphs, keep, layers


def main():
    mode, rest = sys.argv[1], sys.argv[2:]
    tokens, variants = arguments(rest)
    torch.backends.cuda.matmul.allow_tf32 = False
    if mode == "layer":
        bad = check_layer(new_weights(1))
        measure_layer([new_weights(s) for s in range(LAYERS)])
        sys.exit(bad > 0)
    if mode == "check":
        sys.exit(check(tokens or CHECKED, new_weights(1), variants[0] if variants else None) > 0)
    weights = [new_weights(s) for s in range(LAYERS)]
    if mode == "tried":
        measure_tried(tokens or TIMED, weights)
    else:
        measure(tokens or TIMED, variants, weights)


if __name__ == "__main__":
    main()
