"""The GEMMs of gpt-oss-20b's experts in MXFP4 (`experts.cu`, `experts_fp4.cuh`): checked against PyTorch in fp32, then timed as graph
replays with dependent launch.

experts4.py check [ROWS ...]    outputs of both GEMMs, poisoned buffers, repetition, a planted wrong exponent
experts4.py time  [ROWS ...]    microseconds of the launch for each form; one row has four experts, more rows are routed at random
experts4.py keys  FILE          the kernels that these need, for compile.py

A layer's weights are 0.42 GB: L2 does not help. EMULATOR=FOLDER: `check` without a GPU, with a small layer.
"""
import ctypes, json, os, sys

EMULATED = os.environ.get("EMULATOR")
E, TOP, H, I = (6, 2, 320, 320) if EMULATED else (32, 4, 2880, 2880)
SMS, SHARED, BANDWIDTH, WORST, PIECE = 3 if EMULATED else 132, 232448, 4.54e12, 8e-3, 544
ALPHA, LIMIT = 1.702, 7.0
ROWS = [1, 8, 64, 256]
U64, U32 = ctypes.c_uint64, ctypes.c_uint32


def forms(rows):
    """Tokens of a task, rows of gate and up and of down, threads that copy tokens: the engine's choice first."""
    if EMULATED:
        return [(8, 160, 80, 32), (16, 80, 160, 32), (48, 160, 160, 64)]
    if rows <= 1:
        return [(8, 192, 96, 32), (8, 192, 192, 32), (8, 240, 96, 32), (8, 96, 96, 32)]
    if rows <= 16:
        return [(8, 240, 240, 32), (8, 192, 192, 32), (8, 240, 144, 32)]
    if rows <= 96:
        return [(16, 240, 240, 32), (24, 240, 240, 32), (8, 240, 240, 32), (16, 192, 192, 32)]
    return [(48, 240, 240, 64), (32, 240, 240, 64), (64, 240, 240, 64), (64, 192, 192, 64)]


class Plan:
    """A kernel with its launch, as ops/experts/shape.rs makes it."""

    def __init__(self, form):
        self.tile, self.up, self.down, copiers = self.form = form
        wide = -(-max(self.up, self.down) // 64) * 64
        chunks = [H // 64, I // 64]
        depth = self.depth = max(d for d in range(1, 6) if all(c % d == 0 for c in chunks))
        stage = -(-max(self.up, self.down) // 16 * depth * PIECE // 1024) * 1024 + self.tile * 128 * depth
        stages = min(40, (SHARED - 1024 - (16 * 40 + wide // 64 * self.tile * 8 + self.tile * 4)) // stage)
        self.threads, self.shared, self.label = wide * 2 + 128, stages * stage + 1024, "%d,%d,%d" % form[:3]
        v = dict(H=H, I=I, TOP=TOP, ACT=2, ALPHA="%rf" % ALPHA, LIMIT="%rf" % LIMIT, UP_BIAS=2, DOWN_BIAS=2, UP_WIDE=self.up, DOWN_WIDE=self.down, TILE=self.tile,
                 STAGES=stages, DEPTH=depth, PHASES=3, PASS=1, GATHERED=0, CLUSTER=1, COPIERS=copiers, WEIGHT="FP4_GROUP")
        self.key = dict(source="experts", entry="experts", defines=[[a, str(b)] for a, b in sorted(v.items())])


if __name__ == "__main__" and sys.argv[1] == "keys":
    json.dump([Plan(f).key for r in ROWS for f in forms(r)], open(sys.argv[2], "w"))
    sys.exit()
if __name__ == "__main__" and not EMULATED:
    from compile import compile_all
    compile_all(Plan(f).key for r in [int(a) for a in sys.argv[2:]] or ROWS for f in forms(r))

import torch

if EMULATED:
    sys.path.insert(0, EMULATED)
    import run as emulator
    DEVICE = "cpu"
else:
    from experts import Launch, P, cuda, ok, tensor_map, timed
    DEVICE = "cuda"
    torch.backends.cuda.matmul.allow_tf32 = False

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=DEVICE)


def pieces_of(codes, exponents):
    """Codes [rows][cols] and exponents [rows][cols / 32] in the order of src/scaled/mxfp4.rs."""
    rows, cols = codes.shape
    # strip, +8, g, piece, word, +8 columns, j, column of two
    c = codes.view(rows // 16, 2, 8, cols // 64, 4, 2, 4, 2).int().permute(0, 3, 2, 6, 4, 7, 5, 1)
    c = c.reshape(rows // 16, cols // 64, 8, 4, 4, 2, 4)   # strip, piece, g, j, word, half, element 2 · (column + 8) + (row + 8)
    half = torch.zeros(c.shape[:-1], dtype=torch.int32, device=codes.device)
    for r in range(3):
        half |= (c[..., r] & 8) << (12 - 3 * r) | (c[..., r] & 7) << (6 - 3 * r)
    a, b = c[..., 0::2, :, 3], c[..., 1::2, :, 3]
    half[..., 0::2, :] |= (a & 8) << 11 | (a & 1) << 13 | (b & 8) << 8 | (b & 1) << 10
    half[..., 1::2, :] |= (a & 6) << 12 | (b & 6) << 9
    words = torch.stack([half & 255, half >> 8], -1).to(torch.uint8).reshape(rows // 16, cols // 64, 512)
    e = exponents.view(rows // 16, 2, 8, cols // 64, 2).permute(0, 3, 2, 4, 1).reshape(rows // 16, cols // 64, 32)
    return torch.cat([words, e], 2).contiguous()


class Weights:
    def __init__(self, seed, keeps):
        torch.manual_seed(seed)
        self.keeps, self.plain = keeps, {}
        half = lambda *shape: (torch.randn(*shape, device=DEVICE) * 0.1).bfloat16()
        self.up, self.down = self.matrix("up", E * 2 * I, H), self.matrix("down", E * H, I)
        self.up_bias, self.down_bias = half(E * 2 * I), half(E * H)

    def matrix(self, name, rows, cols):
        if not self.keeps:
            data = torch.randint(0, 256, (rows // 16, cols // 64, PIECE), dtype=torch.uint8, device=DEVICE)
            data[:, :, 512:] = 120
            return data
        codes = torch.randint(0, 16, (rows, cols), dtype=torch.uint8, device=DEVICE)
        exponents = torch.randint(117, 121, (rows, cols // 32), dtype=torch.uint8, device=DEVICE)
        self.plain[name] = codes, exponents
        return pieces_of(codes, exponents)

    def rows(self, name, first, last):
        codes, exponents = (t[first:last] for t in self.plain[name])
        sign = 1.0 - 2.0 * (codes >> 3).float()
        return sign * VALUES[(codes & 7).long()] * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)


def piece_map(t, depth, rows):
    """Pieces in units of four bytes, beside and below each other."""
    below, beside, _ = t.shape
    if EMULATED:
        return emulator.tensor_map(t.view(torch.int32).numpy(), [PIECE // 4, beside, below], [PIECE, PIECE * beside], [PIECE // 4, depth, rows // 16])
    raw = ctypes.create_string_buffer(192)
    at = (ctypes.addressof(raw) + 63) & ~63
    array = lambda of, *v: (of * len(v))(*v)
    ok(cuda.cuTensorMapEncodeTiled(P(at), 7, 3, P(t.data_ptr()), array(U64, PIECE // 4, beside, below), array(U64, PIECE, PIECE * beside),
                                   array(U32, PIECE // 4, depth, rows // 16), array(U32, 1, 1, 1), 0, 0, 2, 0))
    keep = (ctypes.c_char * 128).from_address(at)
    keep._raw = raw
    return keep


class Layer:
    """The plan of a routing, buffers and the launch."""

    def __init__(self, weights, rows, plan, seed, ready=None):
        self.w, self.count, self.plan = weights, rows, plan
        torch.manual_seed(seed)
        ids = torch.rand(rows, E).argsort(1)[:, :TOP]
        self.ids, self.gains = ids, torch.rand(rows, TOP).softmax(1)
        flat, gains = ids.flatten(), self.gains.flatten()
        order = torch.sort(flat, stable=True)[1]
        tasks, first = [], 0
        for e in range(E):
            count = int((flat == e).sum())
            parts = -(-count // plan.tile)
            each = -(-(-(-count // parts)) // 8) * 8 if parts else 0
            tasks += [(e, first + t * each, min(count - t * each, each), parts) for t in range(parts)]
            first += count
        most = max(16, len(tasks))
        ints = lambda v: torch.tensor(v, dtype=torch.int32).to(DEVICE)
        self.tasks, self.head, self.rows = ints(tasks + [(0, 0, 0, 0)] * (most - len(tasks))), ints([len(tasks)]), order.int().to(DEVICE)
        self.sorted = gains[order].to(DEVICE)
        self.ready = torch.zeros(most, dtype=torch.int32, device=DEVICE) if ready is None else ready
        self.x = torch.randn(rows, H, device=DEVICE).bfloat16()
        self.act = torch.zeros(rows * TOP + 64, I, device=DEVICE, dtype=torch.bfloat16)
        self.parts = torch.zeros(rows * TOP, H, device=DEVICE, dtype=torch.bfloat16)
        box = min(plan.tile, 64)
        maps = [piece_map(weights.up, plan.depth, plan.up), piece_map(weights.down, plan.depth, plan.down)]
        args = [self.x, self.tasks, self.head, self.rows, self.sorted, self.ready, self.act, self.parts, H, weights.up_bias, weights.down_bias]
        if EMULATED:
            native = lambda t: t.view(torch.int16).numpy() if t.dtype == torch.bfloat16 else t.numpy()
            act = emulator.tensor_map(native(self.act), [I, self.act.shape[0]], [I * 2], [64, box], 128)
            self.native = maps + [act, act] + [native(a) if torch.is_tensor(a) else a for a in args]
        else:
            act = tensor_map(self.act, box)
            native = maps + [act, act] + [U64(a.data_ptr()) if torch.is_tensor(a) else U32(a) for a in args]
            self.launch = Launch(plan.key, native, SMS, plan.threads, plan.shared)

    def poison(self):
        self.ready.zero_()
        self.act.fill_(float("nan"))
        self.parts.fill_(float("nan"))

    def go(self, dependent=True):
        if EMULATED:
            emulator.launch(self.plan.key, grid=SMS, block=self.plan.threads, shared=self.plan.shared, args=self.native)
        else:
            self.launch.go(dependent)

    def want(self):
        out = torch.zeros(self.count * TOP, H, device=DEVICE)
        flat = self.ids.flatten()
        for e in flat.unique().tolist():
            slots = (flat == e).nonzero().flatten().to(DEVICE)
            p = self.x[slots // TOP].float() @ self.w.rows("up", e * 2 * I, (e + 1) * 2 * I).t() + self.w.up_bias[e * 2 * I:(e + 1) * 2 * I].float()
            p = p.view(len(slots), I // 8, 2, 8)
            gate, up = p[:, :, 0].reshape(-1, I).clamp(max=LIMIT), p[:, :, 1].reshape(-1, I).clamp(-LIMIT, LIMIT)
            act = (gate * torch.sigmoid(ALPHA * gate) * (up + 1)).bfloat16().float()
            out[slots] = (act @ self.w.rows("down", e * H, (e + 1) * H).t() + self.w.down_bias[e * H:(e + 1) * H].float()) * self.gains.flatten().to(DEVICE)[slots, None]
        return out


def error_of(got, want):
    return ((got.float() - want).norm(dim=1) / want.norm(dim=1)).nan_to_num(9.9).max().item()


def check(rows_list):
    bad, weights = 0, Weights(3, True)
    for rows in rows_list:
        for form in forms(rows):
            layer, first = Layer(weights, rows, Plan(form), rows), None
            for turn in range(1 if EMULATED else 4):
                layer.poison()
                layer.go(False)
                if not EMULATED:
                    torch.cuda.synchronize()
                first = layer.parts.clone() if first is None else first
                bad += not torch.equal(first, layer.parts)
            error = error_of(first, layer.want())
            bad += not error < WORST
            print("rows %d form %s error %.1e%s" % (rows, layer.plan.label, error, "" if error < WORST else " BAD"), flush=True)
    # A planted fault: the exponents of sixteen rows and 64 columns.
    expert = int(layer.ids[0, 0])
    layer.w.down[expert * H // 16 + 2, 1, 512:] += 1
    layer.poison()
    layer.go(False)
    error = error_of(layer.parts, layer.want())
    bad += error < WORST
    print("planted: %.1e %s" % (error, "found" if error >= WORST else "MISSED"))
    print("failures %d" % bad, flush=True)
    return bad


def captured(layers, ready):
    ready.zero_()
    [l.go() for l in layers[:1]]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ready.zero_()
        [l.go() for l in layers]
    return graph


def measure(rows_list):
    table, weights = [], [Weights(s, False) for s in range(2)]
    for rows in rows_list:
        plans, keep, graphs, count = [Plan(f) for f in forms(rows)], [], [], 16
        for plan in plans:
            most = max(16, rows * TOP)
            ready = torch.zeros(count, most, dtype=torch.int32, device=DEVICE)
            layers = [Layer(weights[s % 2], rows, plan, 100 * rows + s, ready[s]) for s in range(count)]
            keep.append((layers, ready))
            graphs.append(captured(layers, ready))
        experts = sum(len(l.ids.unique()) for l in keep[0][0]) / count
        floor = experts * 3 * H * I * 17 / 32 / BANDWIDTH * 1e6
        us = [t / count for t in timed(graphs)]
        table.append("%4d rows, %4.1f experts, bytes %6.1f | %s" % (rows, experts, floor, "  ".join("%s: %.1f" % (p.label, t) for p, t in zip(plans, us))))
        print(table[-1], flush=True)
    print("microseconds of both GEMMs (tokens of a task, rows of gate and up, rows of down)")
    print("\n".join(table))


def main():
    rows = [int(a) for a in sys.argv[2:]] or ([1, 9, 40] if EMULATED else ROWS)
    sys.exit(check(rows) > 0) if sys.argv[1] == "check" else measure(rows)


if __name__ == "__main__":
    main()
