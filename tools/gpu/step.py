"""Runs the launches printed by `lowered_step`: checks each op against PyTorch in fp32, times whole steps.

step.py check  STEP.json...        every node, poisoned outputs, against PyTorch
step.py chain  STEP.json...        40 replays with dependent launch, the same bits as node by node
step.py time   STEP.json...        ms per step as one graph with dependent launch
                                   PARTS=1: and per kind of node; MAPPED=1: and as the engine runs it
step.py layers FIVE.json ONE.json...  a persistent step against PyTorch in fp32 and against its five-node form
"""
import ctypes, json, os, random, sys
import torch
from compile import Nvrtc

cuda = ctypes.CDLL("libcuda.so.1")
TYPES = {"f32": torch.float32, "f16": torch.float16, "b_f16": torch.bfloat16, "u32": torch.int32, "u8": torch.uint8}
SIZES = {"f32": 4, "f16": 2, "b_f16": 2, "u32": 4, "u8": 1}
RING_ENTRIES = 32


def ok(code):
    if code:
        name = ctypes.c_char_p()
        cuda.cuGetErrorName(code, ctypes.byref(name))
        raise RuntimeError("CUDA error %d %s" % (code, name.value))


class Config(ctypes.Structure):
    _fields_ = [("dims", ctypes.c_uint * 6), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
                ("attrs", ctypes.c_void_p), ("count", ctypes.c_uint)]


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class Kernels:
    def __init__(self):
        self.nvrtc, self.functions, self.modules = Nvrtc(), {}, []

    def get(self, key, shared):
        name = json.dumps(key)
        if name not in self.functions:
            cubin = self.nvrtc.cached(key, "sm_90a", os.environ.get("CUBINS", "/tmp/cubins"))
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            ok(cuda.cuModuleLoadData(ctypes.byref(module), cubin))
            ok(cuda.cuModuleGetFunction(ctypes.byref(function), module, key["entry"].encode()))
            self.modules.append(module)
            self.functions[name] = function
        function = self.functions[name]
        if shared > 48 << 10:
            ok(cuda.cuFuncSetAttribute(function, 8, shared))
        return function


KERNELS = None


class Step:
    def __init__(self, path, memory=None):
        global KERNELS
        KERNELS = KERNELS or Kernels()
        self.data = json.load(open(path))
        self.path = path
        self.memory = memory if memory is not None else {}
        # With another layout, tables and weights would be mixed up.
        layout = json.dumps([self.data["shape"], self.data["named"]["rope"]])
        if self.memory.get("layout") != layout:
            self.memory.clear()
            self.memory["layout"] = layout
        for region, size in self.data["regions"].items():
            have = self.memory.get(region)
            if have is None or have.numel() < size:
                self.memory.pop(region, None)
                # MAPPED: mail and ring in host memory, as they are in the engine.
                mapped = region == "host_mapped" and "MAPPED" in os.environ
                fresh = torch.zeros(max(size, 256), dtype=torch.uint8, device="cpu" if mapped else "cuda", pin_memory=mapped)
                self.memory[region] = fresh
                if region in ("weights", "kv"):
                    half = fresh.view(torch.bfloat16)
                    for i in range(0, half.numel(), 1 << 28):
                        half[i:i + (1 << 28)].normal_(0, 0.02 if region == "weights" else 1.0)
        self.memory["state"].zero_()
        self.memory["host_mapped"].zero_()
        named = self.data["named"]
        for name, t in named.items():
            if "norm" in name:
                self.view(t).normal_(1.0, 0.1)
        rope = self.view(named["rope"])
        d = rope.shape[1]
        angle = torch.arange(rope.shape[0], device="cuda").float()[:, None] * (
            1e6 ** (-torch.arange(0, d, 2, device="cuda").float() / d))[None]
        rope.copy_(torch.cat([angle.cos(), angle.sin()], 1))
        self.launch_list = [self.prepare(n) for n in self.data["nodes"]]

    def address(self, span):
        return self.memory[span["region"]].data_ptr() + span["offset"]

    def view(self, t):
        s, size = t["span"], SIZES[t["dtype"]]
        n = ((t["rows"] - 1) * t["stride"] + t["cols"]) * size
        flat = self.memory[s["region"]][s["offset"]:s["offset"] + n].view(TYPES[t["dtype"]])
        return flat.as_strided((t["rows"], t["cols"]), (t["stride"], 1))

    def state(self, name):
        return self.view(self.data["state"][name])

    def prepare(self, node):
        out = []
        for low in node["lowered"]:
            if "launch" not in low:
                out.append(low)
                continue
            l = low["launch"]
            args = []
            for a in l["args"]:
                if a == "null":
                    args.append(ctypes.c_uint64(0))
                elif "addresses" in a:
                    args.append((ctypes.c_uint64 * len(a["addresses"]))(*[self.address(x) for x in a["addresses"]]))
                elif "address" in a:
                    args.append(ctypes.c_uint64(self.address(a["address"])))
                elif "u32" in a:
                    args.append(ctypes.c_uint32(a["u32"]))
                elif "u64" in a:
                    args.append(ctypes.c_uint64(a["u64"]))
                elif "f32" in a:
                    args.append(ctypes.c_float(a["f32"]))
                else:
                    args.append(self.tensor_map(a["tensor_map"]))
            pointers = (ctypes.c_void_p * len(args))(*[ctypes.addressof(a) for a in args])
            out.append(dict(function=KERNELS.get(l["kernel"], l["shared"]), args=args, pointers=pointers,
                            dims=l["grid"] + l["block"], shared=l["shared"], cluster=l["cluster"], waits=l["waits"]))
        return out

    def tensor_map(self, m):
        raw = ctypes.create_string_buffer(128 + 64)
        at = (ctypes.addressof(raw) + 63) & ~63
        n = len(m["dims"])
        ok(cuda.cuTensorMapEncodeTiled(
            ctypes.c_void_p(at), 9 if m["dtype"] == "b_f16" else 6, n, ctypes.c_void_p(self.address(m["span"])),
            (ctypes.c_uint64 * n)(*m["dims"]), (ctypes.c_uint64 * max(1, n - 1))(*m["strides"]),
            (ctypes.c_uint32 * n)(*m["tile"]), (ctypes.c_uint32 * n)(*[1] * n), 0,
            {0: 0, 32: 1, 64: 2, 128: 3}[m["swizzle"]], 2, 0))
        keep = (ctypes.c_char * 128).from_address(at)
        keep._raw = raw
        return keep

    def run(self, index, dependent=True):
        stream = torch.cuda.current_stream().cuda_stream
        for low in self.launch_list[index]:
            if "gemm" in low:
                g = low["gemm"]
                x, w, y = self.view(g["x"]), self.view(g["w"]), self.view(g["y"])
                if g["residual"]:
                    torch.addmm(self.view(g["residual"]), x, w.t(), out=y)
                elif y.dtype != x.dtype:
                    y.copy_(x @ w.t())
                else:
                    torch.mm(x, w.t(), out=y)
                continue
            attrs = (Attribute * 2)()
            count = 0
            if dependent and low["waits"]:
                attrs[count].id, attrs[count].value[0] = 6, 1
                count += 1
            if low["cluster"] != [1, 1, 1]:
                attrs[count].id = 4
                attrs[count].value[:3] = low["cluster"]
                count += 1
            config = Config((ctypes.c_uint * 6)(*low["dims"]), low["shared"], stream, ctypes.addressof(attrs), count)
            ok(cuda.cuLaunchKernelEx(ctypes.byref(config), low["function"], low["pointers"], None))

    def set_rows(self, lengths, q_lens=None):
        """Seats 0..rows with these many tokens in their pages, pages in random order."""
        self.memory["state"].zero_()
        limits = self.data["limits"]
        rows, per = len(lengths), limits["pages_per_seat"]
        table = self.state("page_table")
        table[:rows] = (torch.randperm(rows * per, device="cuda") + 1).view(rows, per).int()
        self.state("seat_len")[0, :rows] = torch.tensor(lengths, dtype=torch.int32)
        self.state("seat_token")[0, :rows] = torch.randint(0, limits["vocab"], (rows,), dtype=torch.int32)
        self.state("row_seat")[0, :rows] = torch.arange(rows, dtype=torch.int32)
        self.state("row_q_len")[0, :rows] = torch.tensor(q_lens or [1] * rows, dtype=torch.int32)
        self.state("row_flags")[0, :rows] = 1
        self.state("counts")[0, 2] = rows
        self.state("params")[:, 2] = 0x3f800000


def rel(out, ref):
    out, ref = out.float(), ref.float()
    return ((out - ref).norm() / ref.norm().clamp_min(1e-30)).item()


def norm(x, w, eps=1e-6):
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w.float()


class Checker:
    """Checks each node against PyTorch, from its actual inputs."""

    def __init__(self, step, lengths, q_lens=None):
        self.s, self.worst = step, {}
        step.set_rows(lengths, q_lens)
        self.lengths, self.q_lens = lengths, q_lens or [1] * len(lengths)
        self.shape = step.data["shape"]
        self.kvs = self.kv_views()

    def kv_views(self):
        sh, s = self.shape, self.s
        out, per_layer = [], None
        layers = 1 + max(n["layer"] for n in s.data["nodes"] if n["layer"] is not None)
        total = s.data["regions"]["kv"] // layers
        page = 2 * sh["kv_heads"] * 16 * sh["head_dim"]
        pages = len(self.lengths) * s.data["limits"]["pages_per_seat"] + 1
        flat = s.memory["kv"].view(torch.bfloat16)
        return [flat[l * (total // 2):l * (total // 2) + pages * page].view(pages, 2, sh["kv_heads"], 16, sh["head_dim"])
                for l in range(layers)]

    def note(self, name, error):
        if not (error <= self.worst.get(name, -1)):
            self.worst[name] = error

    def rope(self, x, positions):
        t = self.s.view(self.s.data["named"]["rope"])[positions.long()]
        h = x.shape[-1] // 2
        c, n = t[:, None, :h], t[:, None, h:]
        a, b = x[..., :h], x[..., h:]
        return torch.cat([a * c - b * n, b * c + a * n], -1)

    def run(self):
        s, sh = self.s, self.shape
        v = lambda name: s.view(s.data["named"][name])
        rows, tokens = len(self.lengths), sum(self.q_lens)
        d, hq, hk = sh["head_dim"], sh["q_heads"], sh["kv_heads"]
        for i, node in enumerate(s.data["nodes"]):
            name, layer = node["name"], node["layer"]
            L = lambda n: v("%d.%s" % (layer, n))
            x = v("x")
            before = x.clone()
            qkv0, att0, act0 = v("qkv").clone(), v("attended").clone(), v("act").clone()
            out = {"qkv": "qkv", "attention": "attended", "gate_up": "act", "head": "logits", "embed": "x"}.get(name)
            if out:
                v(out).fill_(float("nan"))
            # Keep what the previous op prepared; poison the rest of the scratch.
            if name in ("attention", "o", "down"):
                s.memory["state"][s.data["scratch"]["offset"] + 65536:].fill_(255)
            s.run(i)
            torch.cuda.synchronize()
            if name == "prologue":
                want = torch.cat([torch.arange(a, a + q) for a, q in zip(self.lengths, self.q_lens)])
                got = s.state("position")[0, :tokens].cpu()
                self.note("prologue", float((got != want).sum()))
                self.positions = s.state("position")[0, :tokens].clone()
            elif name == "embed":
                self.note(name, rel(x[:tokens], v("embed")[s.state("token")[0, :tokens].long()]))
            elif name == "qkv":
                self.note(name, rel(v("qkv")[:tokens], norm(before, L("norm1")).bfloat16().float()[:tokens] @ L("qkv").float().t()))
            elif name == "rope_kv":
                q = self.rotated(qkv0, layer, store=False)
                self.note("q rotated", rel(v("qkv")[:tokens, :hq * d], q.reshape(tokens, hq * d)))
            elif name == "attention":
                self.attention(qkv0, layer)
            elif name == "o":
                self.note(name, rel(x[:tokens], (before.float() + att0.float() @ L("o").float().t())[:tokens]))
            elif name == "gate_up":
                p = norm(before, L("norm2")).bfloat16().float()[:tokens] @ L("gate_up").float().t()
                self.note(name, rel(v("act")[:tokens], torch.nn.functional.silu(p[:, 0::2]) * p[:, 1::2]))
            elif name == "down":
                self.note(name, rel(x[:tokens], (before.float() + act0.float() @ L("down").float().t())[:tokens]))
            elif name == "gather":
                last = torch.tensor(self.q_lens).cumsum(0) - 1
                self.note(name, rel(v("last"), x[last.cuda()]))
            elif name == "head":
                src = v("last") if any(n["name"] == "gather" for n in s.data["nodes"]) else before
                w = v("lm_head") if "lm_head" in s.data["named"] else v("embed")
                self.note(name, rel(v("logits")[:rows], norm(src[:rows], v("final_norm")).bfloat16().float() @ w.float().t()))
            elif name == "sample":
                want = v("logits")[:rows].argmax(-1).int()
                self.note(name, float((s.state("seat_token")[0, :rows] != want).sum()))
                entry = s.data["mail"]["entry"]
                at = s.data["state"]["ring"]["offset"] + 4 * entry
                ring = s.memory["host_mapped"][at:at + 4 * entry].view(torch.int32)
                self.note("ring", float((ring[16::s.data["mail"]["entry_row"]][:rows] != want).sum()) + float(ring[0].item() != 1) + float(ring[2].item() != rows))
                lens = torch.tensor(self.lengths) + torch.tensor(self.q_lens)
                self.note("seat_len", float((s.state("seat_len")[0, :rows].cpu() != lens).sum()))
        sem = s.memory["state"][s.data["scratch"]["offset"]:][:65536]
        self.note("semaphores", float(sem[:min(65536, sem.numel())].count_nonzero()))
        return self.worst

    def rotated(self, qkv, layer, store):
        s, sh = self.s, self.shape
        d, hq, hk = sh["head_dim"], sh["q_heads"], sh["kv_heads"]
        tokens = sum(self.q_lens)
        v = lambda n: s.view(s.data["named"]["%d.%s" % (layer, n)])
        all_heads = qkv[:tokens].float().view(tokens, hq + 2 * hk, d)
        q = self.rope(norm(all_heads[:, :hq], v("q_norm")), self.positions).bfloat16()
        k = self.rope(norm(all_heads[:, hq:hq + hk], v("k_norm")), self.positions).bfloat16()
        values = all_heads[:, hq + hk:].bfloat16()
        slot = s.state("kv_slot")[0, :tokens].long()
        kv = self.kvs[layer]
        self.note("k written", rel(kv[slot // 16, 0, :, slot % 16], k))
        self.note("v written", rel(kv[slot // 16, 1, :, slot % 16], values))
        return q

    def attention(self, qkv, layer):
        s, sh = self.s, self.shape
        d, hq, hk = sh["head_dim"], sh["q_heads"], sh["kv_heads"]
        decode = not any(n["name"] == "rope_kv" for n in s.data["nodes"])
        tokens = sum(self.q_lens)
        q = self.rotated(qkv, layer, True) if decode else qkv[:tokens].view(tokens, -1, d)[:, :hq]
        got = s.view(s.data["named"]["attended"])
        table, at, kv = s.state("page_table"), 0, self.kvs[layer]
        for r, (n, ql) in enumerate(zip(self.lengths, self.q_lens)):
            total = n + ql
            pages = table[r, :(total + 15) // 16].long()
            k = kv[pages, 0].permute(1, 0, 2, 3).reshape(hk, -1, d)[:, :total].float().repeat_interleave(hq // hk, 0)
            val = kv[pages, 1].permute(1, 0, 2, 3).reshape(hk, -1, d)[:, :total].float().repeat_interleave(hq // hk, 0)
            scores = torch.einsum("qhd,hkd->hqk", q[at:at + ql].float(), k) * d ** -0.5
            mask = torch.arange(total, device="cuda")[None] > (n + torch.arange(ql, device="cuda"))[:, None]
            want = torch.einsum("hqk,hkd->qhd", scores.masked_fill(mask[None], float("-inf")).softmax(-1), val)
            self.note("attention", rel(got[at:at + ql], want.reshape(ql, hq * d)))
            at += ql


def graph_of(step, indices):
    for i in indices:
        step.run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in indices:
            step.run(i)
    return graph


def timed(graph, reset, rounds=7, per=12):
    times = []
    for _ in range(rounds):
        reset()
        torch.cuda.synchronize()
        graph.replay()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        for _ in range(per):
            graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) / per)
    return sorted(times)[len(times) // 2]


def in_flight(step, graph, reset, steps=64):
    """ms from result to result with two steps in flight, results polled from the ring (needs MAPPED)."""
    import time
    reset()
    step.memory["host_mapped"].zero_()
    torch.cuda.synchronize()
    entry, ring = 4 * step.data["mail"]["entry"], step.address(step.data["state"]["ring"])
    words = [ctypes.c_uint64.from_address(ring + i * entry) for i in range(RING_ENTRIES)]
    graph.replay()
    times, last = [], None
    for n in range(1, steps + 1):
        graph.replay()
        word = words[n % RING_ENTRIES]
        while word.value != n:
            pass
        now = time.perf_counter()
        if n > 8:
            times.append(now - last)
        last = now
    torch.cuda.synchronize()
    return sorted(times)[len(times) // 2] * 1000


def chain(path, memory):
    """Replays with dependent launch give the bits of a run that waits after every node."""
    step = Step(path, memory)
    rows = step.data["named"]["logits"]["rows"]
    room = (step.data["limits"]["pages_per_seat"] - 1) * 16
    lengths = [random.randrange(0, room) for _ in range(rows)]
    step.set_rows(lengths)
    keep, kv = step.memory["state"].clone(), step.memory["kv"].clone()
    nodes = range(len(step.data["nodes"]))

    def reset():
        step.memory["state"].copy_(keep)
        step.memory["kv"].copy_(kv)
        step.memory["workspace"].fill_(255)
        torch.cuda.synchronize()

    reset()
    for i in nodes:
        step.run(i, dependent=False)
        torch.cuda.synchronize()
    logits = step.view(step.data["named"]["logits"]).clone()
    tokens, pages = step.state("seat_token").clone(), step.memory["kv"].clone()
    reset()
    graph = graph_of(step, nodes)
    bad = 0
    for _ in range(40):
        reset()
        graph.replay()
        torch.cuda.synchronize()
        same = torch.equal(logits, step.view(step.data["named"]["logits"])) and torch.equal(tokens, step.state("seat_token"))
        bad += not (same and torch.equal(pages, step.memory["kv"]))
    return bad


def reference(step, lengths):
    """The residual stream after all layers, in fp32, from the pages and weights in memory."""
    named, sh = step.data["named"], step.data["shape"]
    v = lambda n: step.view(named[n]).float()
    checker = Checker.__new__(Checker)
    checker.s, checker.shape, checker.lengths = step, sh, lengths
    layers = sum(n.endswith(".norm1") for n in named)
    d, hq, hk, rows = sh["head_dim"], sh["q_heads"], sh["kv_heads"], len(lengths)
    page, pages = 2 * hk * 16 * d, rows * step.data["limits"]["pages_per_seat"] + 1
    total, flat = step.data["regions"]["kv"] // layers, step.memory["kv"].view(torch.bfloat16)
    x = v("embed")[step.state("seat_token")[0, :rows].long()]
    positions, table = torch.tensor(lengths, device="cuda"), step.state("page_table")
    fresh = []
    for l in range(layers):
        L = lambda n: v("%d.%s" % (l, n))
        kv = flat[l * (total // 2):l * (total // 2) + pages * page].view(pages, 2, hk, 16, d)
        heads = (norm(x, L("norm1")) @ L("qkv").t()).view(rows, hq + 2 * hk, d)
        q = checker.rope(norm(heads[:, :hq], L("q_norm")), positions)
        k, values = checker.rope(norm(heads[:, hq:hq + hk], L("k_norm")), positions), heads[:, hq + hk:]
        fresh.append((k, values))
        out = []
        for r, n in enumerate(lengths):
            own = table[r, :(n + 15) // 16].long()
            old = lambda which: kv[own, which].permute(1, 0, 2, 3).reshape(hk, -1, d)[:, :n].float()
            ks = torch.cat([old(0), k[r][:, None]], 1).repeat_interleave(hq // hk, 0)
            vs = torch.cat([old(1), values[r][:, None]], 1).repeat_interleave(hq // hk, 0)
            p = (torch.einsum("hd,hkd->hk", q[r], ks) * d ** -0.5).softmax(-1)
            out.append(torch.einsum("hk,hkd->hd", p, vs).reshape(-1))
        x = x + torch.stack(out) @ L("o").t()
        p = norm(x, L("norm2")) @ L("gate_up").t()
        x = x + (torch.nn.functional.silu(p[:, 0::2]) * p[:, 1::2]) @ L("down").t()
    return x, fresh


def compare_layers(five, one, memory, rounds=3):
    """Checks both forms of a step against the reference: ragged lengths, poisoned memory, and a wrap of the generations."""
    worst = {}
    for turn in range(rounds):
        # Twice: the second time nothing grows, and all addresses stay valid.
        for _ in range(2):
            steps = [Step(five, memory), Step(one, memory)]
        rows = steps[0].data["named"]["logits"]["rows"]
        room = (steps[0].data["limits"]["pages_per_seat"] - 1) * 16
        lengths = [random.randrange(0, room) for _ in range(rows)] if turn else [room - 1] + [r for r in range(rows - 1)]
        torch.manual_seed(turn)
        kv = memory["kv"].clone()
        for step, name in zip(steps, ("five", "one")):
            memory["kv"].copy_(kv)
            torch.manual_seed(turn)
            step.set_rows(lengths)
            if name == "five":
                want, fresh = reference(step, lengths)
            memory["workspace"].fill_(255)
            if name == "one" and turn:
                layers = sum(n.endswith(".norm1") for n in step.data["named"])
                exchange = step.view(step.data["named"]["exchange"]).view(torch.int64)
                exchange[0, 0] = 0xffffffff // layers - 2 - (turn > 1)
            repeats = 3 if name == "one" else 1
            for again in range(repeats):
                keep = memory["state"].clone()
                for i in range(len(step.data["nodes"]) - 1):
                    step.run(i)
                    torch.cuda.synchronize()
                if again + 1 < repeats:
                    exchange = step.view(step.data["named"]["exchange"]).clone()
                    memory["state"].copy_(keep)
                    step.view(step.data["named"]["exchange"]).copy_(exchange)
                    memory["workspace"].fill_(255)
                x = step.view(step.data["named"]["x"])[:rows] if again + 1 == repeats else None
            logits = step.view(step.data["named"]["logits"])[:rows]
            worst[name] = max(worst.get(name, 0), rel(x, want))
            if name == "five":
                before = logits.clone(), x.clone()
            else:
                worst["logits"] = max(worst.get("logits", 0), rel(logits, before[0]))
                worst["x"] = max(worst.get("x", 0), rel(x, before[1]))
                slot = step.state("kv_slot")[0, :rows].long()
                total = step.data["regions"]["kv"] // len(fresh)
                sh = step.data["shape"]
                page = 2 * sh["kv_heads"] * 16 * sh["head_dim"]
                flat = memory["kv"].view(torch.bfloat16)
                for l, (k, v) in enumerate(fresh):
                    pages = rows * step.data["limits"]["pages_per_seat"] + 1
                    view = flat[l * (total // 2):l * (total // 2) + pages * page].view(pages, 2, sh["kv_heads"], 16, sh["head_dim"])
                    worst["k"] = max(worst.get("k", 0), rel(view[slot // 16, 0, :, slot % 16], k))
                    worst["v"] = max(worst.get("v", 0), rel(view[slot // 16, 1, :, slot % 16], v))
        memory["kv"].copy_(kv)
    return worst


def time_step(path, memory, context, parts=True):
    step = Step(path, memory)
    rows = step.data["named"]["logits"]["rows"]
    decode = not any(n["name"] == "rope_kv" for n in step.data["nodes"])
    tokens = step.data["named"]["x"]["rows"]
    if decode:
        reset = lambda: step.set_rows([context] * rows)
    else:
        reset = lambda: step.set_rows([0] * rows, [tokens // rows] * rows)
    reset()
    nodes = step.data["nodes"]
    whole = timed(graph_of(step, range(len(nodes))), reset, per=12 if decode else 3)
    result = {"whole": whole}
    if decode and "MAPPED" in os.environ:
        result["in flight"] = in_flight(step, graph_of(step, range(len(nodes))), reset)
    if parts:
        reset()
        step.run(0)
        torch.cuda.synchronize()
        keep = step.memory["state"].clone()
        back = lambda: step.memory["state"].copy_(keep)
        for kind in dict.fromkeys(n["name"] for n in nodes):
            idx = [i for i, n in enumerate(nodes) if n["name"] == kind]
            result[kind] = timed(graph_of(step, idx), back if kind != "prologue" else reset, rounds=3, per=4) * 1000 / len(idx)
    return result


def main():
    mode, files = sys.argv[1], sys.argv[2:]
    torch.manual_seed(int(os.environ.get("SEED", "1")))
    random.seed(1)
    memory = {}
    five = files.pop(0) if mode == "layers" else None
    for f in files:
        name = os.path.basename(f)
        try:
            if mode == "layers":
                worst = compare_layers(five, f, memory)
                print(name, " ".join("%s %.2e" % kv for kv in worst.items()), flush=True)
            elif mode == "check":
                step = Step(f, memory)
                rows = step.data["named"]["logits"]["rows"]
                tokens = step.data["named"]["x"]["rows"]
                room = (step.data["limits"]["pages_per_seat"] - 1) * 16
                if any(n["name"] == "rope_kv" for n in step.data["nodes"]):
                    cuts = sorted(random.sample(range(1, tokens), rows - 1)) if rows > 1 else []
                    q = [b - a for a, b in zip([0] + cuts, cuts + [tokens])]
                    lengths = [random.randrange(0, max(1, room - x)) for x in q]
                else:
                    q, lengths = None, [random.randrange(0, room) for _ in range(rows)]
                worst = Checker(step, lengths, q).run()
                bad = [k for k, e in worst.items() if not e < 6e-3]
                print(name, "BAD " + str(bad) if bad else "ok", " ".join("%s %.1e" % kv for kv in worst.items()), flush=True)
            elif mode == "chain":
                print(name, "%d of 40 replays differ" % chain(f, memory), flush=True)
            else:
                r = time_step(f, memory, int(os.environ.get("CONTEXT", "576")), parts="PARTS" in os.environ)
                print("%-28s %.3f ms  " % (name, r.pop("whole")) + " ".join("%s %.2f" % kv for kv in r.items()), flush=True)
        except Exception as e:
            print(name, "FAILED", str(e)[:1500], flush=True)
            if "CUDA error" in str(e) and "INVALID_VALUE" not in str(e):
                raise


if __name__ == "__main__":
    main()
