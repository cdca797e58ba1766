"""Kernels of few rows that stand for several nodes, against PyTorch in fp32: a layer of experts with an MLP beside them, and a
recurrent layer between its linears.

few_rows.py check [NAME ...]        outputs, state, poisoned buffers, pad rows, repetition, planted bugs
few_rows.py time  [NAME ...]        microseconds of a layer as a graph replays it, for each variant
few_rows.py keys  FILE [NAME ...]   the kernels that these need, for compile.py
NAME: qwen35, v2lite (experts), delta (recurrent); all of them by default.

EMULATOR=FOLDER: `check` without a GPU, by the emulator in FOLDER, with smaller experts and fewer blocks.
"""
import ctypes, json, os, sys

EMULATED = os.environ.get("EMULATOR")
BANDWIDTH, WORST = 4.54e12, 1e-2
SOFTMAX = dict(SCORE=0, GROUPS=1, KEPT=1, GROUP_TOP=1)
EXPERTS = {
    "qwen35": dict(H=2048, I=512, E=256, TOP=8, SHARED=512, GATED=1, STAGE_BYTES=16384, STAGES=12, FLYING=6, RENORM=1, NT=0),
    "v2lite": dict(H=2048, I=1408, E=64, TOP=6, SHARED=2816, GATED=0, STAGE_BYTES=22528, STAGES=8, FLYING=4, RENORM=0, NT=2),
}
# What the emulator computes in a minute.
SMALL = {"qwen35": dict(I=64, E=16, SHARED=64, BLOCKS=3), "v2lite": dict(I=176, E=16, SHARED=2064, BLOCKS=5)}
VARIANTS = {"qwen35": [{}, dict(FLYING=4), dict(FLYING=9), dict(COPIES=4)], "v2lite": [{}, dict(FLYING=3), dict(FLYING=6)]}
DELTA = dict(KEY=128, VALUE=128, HEADS=32, SHARE=2, Q_AT=0, K_AT=2048, V_AT=4096, TAPS=4)
CHANNELS, VALUES, WIDE = 8192, 4096, 2048
ROWS = [1, 2]
SMS = 132
U64, U32, F32 = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_float


def key(source, entry=None, **defines):
    return dict(source=source, entry=entry or source, defines=[[a, str(b)] for a, b in sorted(defines.items())])


def layer_key(name, rows, **more):
    v = dict(EXPERTS[name], ROWS=rows, BLOCKS=SMS, COPIES=2, ACT=2, BIAS=0, BT=0, WEIGHT="PLAIN", **SOFTMAX)
    v.update(dict(SMALL[name] if EMULATED else {}, **more))
    return v, key("experts_layer", **v)


def delta_key(gates=1, **more):
    return key("recurrent", **dict(DELTA, BIAS=0, SILU=1, GATES=gates, NORMED=gates, H=WIDE, XT=2, WT=2, BT=0, CT=2, GT=2, AT=2, DT=2, ST=2, ZT=2, OT=2, NT=0, YT=2, **more))


def chain_keys():
    """The nodes that the recurrent kernel stands for."""
    return [key("linear_stream", K=WIDE, N=64, ROWS=1, WARPS=16, STAGES=3, ROUNDS=1, TYPE=2, NT=0, BT=0, RT=0, YT=2, BIAS=0, EPILOGUE=0, NORM=1),
            key("conv", "conv_step", TAPS=4, PLACES=3, Q_LEN=1, PIECE=16, BIAS=0, XT=2, WT=2, BT=0, YT=2),
            key("scan", **dict(DELTA, GROUPS=16, DELTA=1, SINGLE=1, VERIFY=0, DRAFTS=0, LOGGED=0, CHANGES_AT=0, DECAYS_AT=0, LOG_COLS=0, WARPS=4, TILE=1, SKIP=0, XT=2, GT=2, AT=2, DT=2, ST=0, YT=2)),
            key("gated", GROUP=128, THREADS=32, SILU=1, NORM=1, AFTER=0, SHARED=1, XT=2, ZT=2, WT=2, YT=2)]


def keys(names):
    out = [layer_key(n, rows, **v)[1] for n in names if n in EXPERTS for rows in ROWS for v in VARIANTS[n]]
    return out + [delta_key(1), delta_key(0)] * ("delta" in names) + chain_keys() * ("delta" in names)


def named(rest):
    return rest or list(EXPERTS) + ["delta"]


if __name__ == "__main__" and sys.argv[1] == "keys":
    json.dump(keys(named(sys.argv[3:])), open(sys.argv[2], "w"))
    sys.exit()

import torch

if EMULATED:
    sys.path.insert(0, EMULATED)
    import run as emulator
    DEVICE = "cpu"
else:
    from experts import Launch, timed
    DEVICE = "cuda"


def half(*shape, std=0.02, mean=0.0):
    return torch.empty(*shape, device=DEVICE, dtype=torch.bfloat16).normal_(mean, std)


def ints(*shape):
    return torch.zeros(*shape, dtype=torch.int32, device=DEVICE)


class Kernel:
    """A launch on a GPU or the emulator; arguments are tensors, numbers or None."""

    def __init__(self, k, args, grid, threads, shared=0, cluster=1):
        self.k, self.args, self.grid, self.threads, self.shared, self.cluster = k, args, grid, threads, shared, cluster
        if EMULATED:
            kinds = {torch.bfloat16: torch.int16}
            self.native = [a if not torch.is_tensor(a) else a.view(kinds.get(a.dtype, a.dtype)).numpy() for a in args]
        else:
            number = lambda a: F32(a) if isinstance(a, float) else U32(a)
            self.launch = Launch(k, [U64(a.data_ptr()) if torch.is_tensor(a) else U64(0) if a is None else number(a) for a in args],
                                 grid[0], threads, shared, cluster)
            self.launch.dims[1], self.launch.dims[2] = grid[1], grid[2]

    def go(self):
        if EMULATED:
            emulator.launch(self.k, grid=self.grid, block=self.threads, shared=self.shared, args=self.native, cluster=(self.cluster, 1, 1))
        else:
            self.launch.go()

    def done(self):
        self.go()
        if not EMULATED:
            torch.cuda.synchronize()


def row_errors(got, want):
    return ((got.float() - want).norm(dim=-1) / want.norm(dim=-1)).nan_to_num(9.9)


# ---- experts ------------------------------------------------------------------------------------


class ExpertWeights:
    def __init__(self, name, seed):
        torch.manual_seed(seed)
        v = self.v = layer_key(name, 1)[0]
        h, i, e, s = v["H"], v["I"], v["E"], v["SHARED"]
        self.up, self.down, self.router = half(e * 2 * i, h), half(e * h, i), half(e, h)
        self.shared_up, self.shared_down, self.gate = half(2 * s, h), half(h, s), half(1, h)
        self.norm = half(h, std=0.2, mean=1.0) if v["NT"] == 2 else torch.empty(h, device=DEVICE).normal_(1.0, 0.2)


class Experts:
    def __init__(self, weights, name, rows, live, **more):
        w, v = weights, weights.v
        v, k = layer_key(name, rows, **more)
        self.w, self.v, self.rows, self.live = w, v, rows, live
        h, acts = v["H"], v["TOP"] * v["I"] + v["SHARED"]
        self.x, self.residual, self.y = half(rows, h, std=3.0), half(rows, h, std=0.05), half(rows, h)
        self.choice, self.count = ints(rows, 2 * v["TOP"]), torch.tensor([live], dtype=torch.int32, device=DEVICE)
        words = 32 + v["COPIES"] * rows * (v["E"] + acts // 2)
        self.exchange = torch.zeros(words, dtype=torch.int64, device=DEVICE)
        self.load = torch.zeros(v["E"] + 2, dtype=torch.int64, device=DEVICE)
        self.kernel = Kernel(k, [self.x, w.norm, w.router, None, w.up, w.down, self.residual, self.y, self.choice, self.exchange, self.count, words, h, h, h, 1e-6, 1.0,
                                 self.load, w.shared_up, w.shared_down, w.gate if v["GATED"] else None], (v["BLOCKS"], 1, 1), 288, v["STAGES"] * v["STAGE_BYTES"])

    def poison(self):
        self.y.fill_(float("nan"))
        self.choice.fill_(0x7fffffff)

    def expected(self):
        """The choice and the output in fp32, with the activations rounded to bf16 as the members store them."""
        v, w = self.v, self.w
        x = self.x[:self.live].float()
        h = (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w.norm.float()).bfloat16().float()
        logits = h.double() @ w.router.double().t()
        best, ids = logits.softmax(-1).topk(v["TOP"], -1)
        gains = (best / best.sum(-1, keepdim=True) if v["RENORM"] else best).float()
        out = self.residual[:self.live].float().clone()
        silu = torch.nn.functional.silu
        for r in range(self.live):
            for e, gain in zip(ids[r].tolist(), gains[r].tolist()):
                pair = w.up[e * 2 * v["I"]:(e + 1) * 2 * v["I"]].view(v["I"] // 8, 2, 8, v["H"]).float()
                gate, up = pair[:, 0].reshape(v["I"], -1), pair[:, 1].reshape(v["I"], -1)
                act = (silu(gate @ h[r]) * (up @ h[r])).bfloat16().float()
                out[r] += gain * (w.down[e * v["H"]:(e + 1) * v["H"]].float() @ act)
            act = (silu(w.shared_up[0::2].float() @ h[r]) * (w.shared_up[1::2].float() @ h[r])).bfloat16().float()
            times = torch.sigmoid(w.gate[0].float() @ h[r]) if v["GATED"] else 1.0
            out[r] += times * (w.shared_down.float() @ act)
        return ids, out


def check_experts(name):
    bad, weights = 0, ExpertWeights(name, 1)
    for rows in ROWS:
        for live in sorted({rows, max(1, rows - 1)}):
            for more in VARIANTS[name][:1 if EMULATED else None]:
                torch.manual_seed(rows)
                layer = Experts(weights, name, rows, live, **more)
                ids, want = layer.expected()
                differ, turns = 0, 2 if EMULATED else 20
                for turn in range(turns):
                    layer.poison()
                    layer.kernel.done()
                    differ += turn > 0 and not torch.equal(first, layer.y[:live])
                    first = layer.y[:live].clone()
                wrong = int((layer.choice[:live, :layer.v["TOP"]].long() != ids).any(-1).sum())
                error, untouched = row_errors(layer.y[:live], want).max().item(), bool(torch.isnan(layer.y[live:].float()).all())
                counted = int(layer.load[:-2].sum()) == turns * live * layer.v["TOP"] and int(layer.load[-1]) == turns
                failed = wrong or not error < WORST or differ or not untouched or not counted
                bad += bool(failed)
                print("%s rows %d live %d %s: routed differently %d output %.1e repeated %d%s" % (name, rows, live, more, wrong, error, differ, " BAD" if failed else ""), flush=True)
    return bad + planted_experts(name, weights)


def planted_experts(name, w):
    """Bugs planted in the weights, each of which the comparison must find; how many it judges wrongly."""
    bad, v = 0, w.v
    layer = Experts(w, name, 1, 1)
    ids, want = layer.expected()
    last = ids[0, -1].item()
    plants = {"nothing": lambda: None,
              "shared gate and up in turn of eight": lambda: w.shared_up.copy_(w.shared_up.view(-1, 8, 2, v["H"]).transpose(1, 2).reshape(-1, v["H"]).clone()),
              "last part of the shared down": lambda: w.shared_down[:, -v["SHARED"] // 2:].zero_(),
              "the last expert's down": lambda: w.down[last * v["H"]:(last + 1) * v["H"]].zero_()}
    if v["GATED"]:
        plants["no gate"] = lambda: w.gate.zero_()
    for plant, apply in plants.items():
        saved = [t.clone() for t in (w.shared_up, w.shared_down, w.gate)] + [w.down[last * v["H"]:(last + 1) * v["H"]].clone()]
        apply()
        layer.poison()
        layer.kernel.done()
        for t, old in zip((w.shared_up, w.shared_down, w.gate, w.down[last * v["H"]:(last + 1) * v["H"]]), saved):
            t.copy_(old)
        error = row_errors(layer.y, want).max().item()
        found = not error < WORST
        bad += found != (plant != "nothing")
        print("%s planted %s: %s %.1e" % (name, plant, "found" if found else "not found", error), flush=True)
    return bad


def time_experts(name):
    sets = [ExpertWeights(name, s) for s in range(8)]
    for rows in ROWS:
        graphs = []
        for more in VARIANTS[name]:
            layers = [Experts(w, name, rows, rows, **more) for w in sets]
            graphs.append(captured([layer.kernel for layer in layers]))
        us = [t / len(sets) for t in timed([g for g, _ in graphs])]
        v = sets[0].v
        chosen = sum(l.choice[:, :v["TOP"]].unique().numel() for l in layers) / len(layers)
        size = (chosen * v["I"] + v["SHARED"]) * 6 * v["H"] + v["E"] * v["H"] * 2
        print("%s rows %d: %.1f experts, floor %.1f us" % (name, rows, chosen, size / BANDWIDTH * 1e6))
        for more, t in zip(VARIANTS[name], us):
            print("   %.2f us %s" % (t, more), flush=True)


# ---- recurrent layers ---------------------------------------------------------------------------


class Delta:
    """A layer's inputs, state and kernels. Lengths: 1 is a sequence's first token; a row without a seat is a pad row."""

    def __init__(self, rows, seats, lengths, seed=0):
        torch.manual_seed(seed)
        self.rows, self.seats = rows, 8
        self.row_seat = torch.tensor(seats, dtype=torch.int32, device=DEVICE)
        self.kv_len = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.live = torch.tensor([sum(s < 8 for s in seats)], dtype=torch.int32, device=DEVICE)
        self.x, self.hidden = half(rows, 12288, std=1.0), half(rows, WIDE, std=2.0)
        self.weight, self.norm, self.gate_weights = half(CHANNELS, 4, std=0.4), half(128, std=0.2, mean=1.0), half(64, WIDE)
        self.hidden_norm = torch.empty(WIDE, device=DEVICE).normal_(1.0, 0.2)
        self.a, self.dt = half(32, std=0.5), half(32, std=0.5)
        self.conv0, self.state0 = half(8, 3 * CHANNELS, std=1.0), torch.empty(8, 32 * 128 * 128, device=DEVICE).normal_(0, 0.3)
        self.conv, self.state = self.conv0.clone(), self.state0.clone()
        self.c, self.o, self.y, self.gates = half(rows, CHANNELS), half(rows, VALUES), half(rows, VALUES), half(rows, 64)
        self.one = [self.kernel(g) for g in (0, 1)]
        tables = [self.row_seat, self.row_seat, self.kv_len]
        linear, conv, scan, gated = chain_keys()
        self.chain = [
            Kernel(conv, [self.x, self.weight, None, self.conv, self.c] + tables + [self.row_seat, CHANNELS, rows, rows, 8, 4096, 0, 12288, 4, 3 * CHANNELS, CHANNELS], (32, rows, 1), 256),
            Kernel(scan, [self.c, self.gates, self.a, self.dt, None, self.state, self.o] + tables + [None, 8, 4096, 0, CHANNELS, 64, 32 * 128 * 128, VALUES, 0.0, 1e-6], (4, 32, rows), 128),
            Kernel(gated, [self.o, self.x, self.norm, self.y, VALUES, CHANNELS, VALUES, 12288, VALUES, self.live, 1e-6], (32, rows, 1), 32)]

    def kernel(self, gates):
        made = [self.hidden, self.hidden_norm, self.gate_weights] if gates else [None] * 3
        return Kernel(delta_key(gates), [self.x, self.weight, None, self.conv, self.gates, self.a, self.dt, self.state, self.x, self.norm, self.y, self.row_seat, self.kv_len,
                                         CHANNELS, 8, 4096, 0, 12288, 4, 3 * CHANNELS, 0, 64, 32 * 128 * 128, CHANNELS, 12288, VALUES, 1e-6, 1e-6] + made + [WIDE, 1e-6],
                      (8, 16, self.rows), 128, 0, 8)

    def reset(self):
        self.conv.copy_(self.conv0), self.state.copy_(self.state0)
        [t.fill_(float("nan")) for t in (self.c, self.o, self.y)]

    def made_gates(self):
        x = self.hidden.float()
        h = (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.hidden_norm).bfloat16().float()
        return (h @ self.gate_weights.float().t()).bfloat16()

    def expected(self, gates):
        """Results, states and kept inputs in fp32."""
        y, conv, state = torch.full((self.rows, VALUES), float("nan"), device=DEVICE), self.conv0.clone(), self.state0.clone()
        for r in range(self.rows):
            seat, length = int(self.row_seat[r]), int(self.kv_len[r])
            if seat >= 8:
                continue
            # The input of position p is row p mod 3.
            kept, before = conv[seat].view(3, CHANNELS), range(length - 4, length - 1)
            window = torch.stack([kept[p % 3].float() * (p >= 0) for p in before] + [self.x[r, :CHANNELS].float()])
            c = torch.nn.functional.silu((window * self.weight.float().t()).sum(0)).bfloat16().float()
            kept[(length - 1) % 3] = self.x[r, :CHANNELS]
            q, k, v = c[:2048].view(16, 128), c[2048:4096].view(16, 128), c[4096:].view(32, 128)
            unit = lambda t: t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()
            q, k = (unit(q) / 128 ** 0.5).repeat_interleave(2, 0), unit(k).repeat_interleave(2, 0)
            g = gates[r].float()
            decay = torch.exp(-self.a.float().exp() * torch.nn.functional.softplus(g[32:] + self.dt.float()))
            s = state[seat].view(32, 128, 128) * (length > 1) * decay[:, None, None]
            d = g[:32].sigmoid()[:, None] * (v - torch.einsum("hk,hkv->hv", k, s))
            s = s + k[:, :, None] * d[:, None, :]
            state[seat] = s.reshape(-1)
            o = torch.einsum("hk,hkv->hv", q, s).bfloat16().float()
            o = o * (o.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.norm.float()
            y[r] = o.reshape(-1) * torch.nn.functional.silu(self.x[r, CHANNELS:].float())
        return y, conv, state


# Rows, seats and lengths; seat 9 is none.
DELTA_CASES = [(1, [3], [17]), (1, [0], [1]), (4, [5, 9, 2, 0], [2, 7, 1, 900]), (2, [9, 9], [1, 4])]


def delta_errors(layer, gates):
    y, conv, state = layer.expected(gates)
    live = [r for r in range(layer.rows) if int(layer.row_seat[r]) < 8]
    error = max([row_errors(layer.y[live], y[live]).max().item()] if live else [0.0])
    states = ((layer.state - state).norm(dim=-1) / state.norm(dim=-1)).nan_to_num(9.9).max().item()
    pads = all(torch.isnan(layer.y[r].float()).all() for r in range(layer.rows) if r not in live)
    return error, states, torch.equal(layer.conv, conv), pads


def check_delta():
    bad = 0
    for rows, seats, lengths in DELTA_CASES:
        layer = Delta(rows, seats, lengths)
        for made in (0, 1):
            gates = layer.made_gates()
            layer.gates.copy_(gates if not made else torch.full_like(gates, float("nan")))
            layer.reset()
            layer.one[made].done()
            error, states, kept, pads = delta_errors(layer, gates)
            same = ""
            if not made:
                one = [t.clone() for t in (layer.state, layer.conv)]
                layer.reset()
                [k.done() for k in layer.chain]
                equal = torch.equal(one[0], layer.state) and torch.equal(one[1], layer.conv)
                same, bad = " bits of the chain: %s" % equal, bad + (not equal)
            failed = not (error < WORST and states < 2e-3 and kept and pads)
            bad += failed
            print("delta seats %s lengths %s gates %d: output %.1e states %.1e kept %s pads %s%s%s" % (seats, lengths, made, error, states, kept, pads, same, " BAD" if failed else ""), flush=True)
    layer, gates = Delta(1, [3], [17]), None
    gates = layer.made_gates()
    for plant, apply in (("nothing", lambda: None), ("another seat", lambda: layer.row_seat.fill_(4)), ("a first token", lambda: layer.kv_len.fill_(1)),
                         ("gates of another token", lambda: layer.hidden.normal_()), ("the gate's columns", lambda: layer.x[:, CHANNELS:].copy_(layer.x[:, CHANNELS:].flip(1)))):
        saved = [t.clone() for t in (layer.row_seat, layer.kv_len, layer.hidden, layer.x)]
        layer.reset()
        apply()
        layer.one[1].done()
        for t, old in zip((layer.row_seat, layer.kv_len, layer.hidden, layer.x), saved):
            t.copy_(old)
        error, states, kept, _ = delta_errors(layer, gates)
        found = not (error < WORST and states < 2e-3 and kept)
        bad += found != (plant != "nothing")
        print("delta planted %s: %s %.1e %.1e" % (plant, "found" if found else "not found", error, states), flush=True)
    return bad


def time_delta():
    for rows in (1, 2, 4, 8, 16, 64):
        seats = [min(r, 7) for r in range(rows)]
        layers = [Delta(rows, seats, [500] * rows, seed) for seed in range(30)]
        graphs = [captured(ks)[0] for ks in ([l.one[1] for l in layers], [l.one[0] for l in layers], [k for l in layers for k in l.chain])]
        us = [t / len(layers) for t in timed(graphs)]
        size = rows * 4 * 32 * 128 * 128 * 2 + CHANNELS * 8 + 64 * WIDE * 2
        print("delta rows %d: floor %.1f us, one with gates %.2f, one %.2f, conv + scan + gated %.2f" % (rows, size / BANDWIDTH * 1e6, *us), flush=True)


def captured(kernels):
    [k.go() for k in kernels]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        [k.go() for k in kernels]
    return graph, kernels


def main():
    mode, names = sys.argv[1], named(sys.argv[2:])
    torch.backends.cuda.matmul.allow_tf32 = False
    if mode == "check":
        bad = sum(check_delta() if n == "delta" else check_experts(n) for n in names)
        print("failures", bad)
        sys.exit(bad > 0)
    for n in names:
        time_delta() if n == "delta" else time_experts(n)


if __name__ == "__main__":
    main()
