"""Checks every variant of the Hopper kernel for prefill attention against PyTorch in fp32, then times it.

ROWS=64 lowered_step 8b 8192 8256 1 prefill > step.json
prefill.py STEP.json [VARIANT...]       VARIANT: KV=128,STAGES=2,TURNS=1; `mma` comes from a step lowered with ATTENTION=mma

Pages, outputs and everything past a row's end are NaN before each check; pad tokens must not change.
"""
import copy, math, random, sys
import torch
from step import Step, rel, timed


def rows_of(name, rows, tokens, room):
    """(tokens, context before them) of each row."""
    if name == "1x8192":
        return [(min(tokens, room), 0)]
    if name == "16x512":
        return [(512, 0)] * 16
    if name == "mixed":
        return [(tokens // 2, 0)] + [(1, min(4000, room - 1))] * (rows - 1)
    if name == "decode":
        return [(1, min(4000, room - 1) - 37 * r) for r in range(rows)]
    if name == "ragged":
        # A chunk of a prompt beside contexts as people have them: a mean of about 680, few of several thousand.
        fixed = random.Random(7)
        prompt = lambda: min(max(fixed.lognormvariate(math.log(512) - 0.32, 0.8), 4), 3000)
        answer = lambda: fixed.random() * min(fixed.lognormvariate(math.log(230) + 0.18, 0.6), 1500)
        return [(1, min(int(prompt() + answer()), room - 1)) for _ in range(rows - 1)] + [(min(193, tokens - rows), 300)]
    if name == "offsets":
        return [(1 + r % 5, r * 3) for r in range(rows)]
    if name == "chunk":
        return [(2048, room - 2048 - 5), (777, 1001)]
    q = [random.choice([1, 2, 17, 128, random.randrange(1, 300)]) for _ in range(rows)]
    while sum(q) > tokens:
        q.pop()
    return [(n, random.choice([0, 1, 15, 16, random.randrange(0, room - n)])) for n in q]


class Bench:
    def __init__(self, step):
        self.s, self.sh = step, step.data["shape"]
        self.index = next(i for i, n in enumerate(step.data["nodes"]) if n["name"] == "attention")
        self.qkv = step.view(step.data["named"]["qkv"])
        self.out = step.view(step.data["named"]["attended"])
        limits = step.data["limits"]
        self.rows, self.tokens = limits["rows"], self.qkv.shape[0]
        self.room = (limits["pages_per_seat"] - 1) * 16
        defines = dict(step.data["nodes"][self.index]["lowered"][0]["launch"]["kernel"]["defines"])
        self.window = int(defines["WINDOW"]) or None
        sh = self.sh
        page = 2 * sh["kv_heads"] * 16 * sh["head_dim"]
        pages = self.rows * limits["pages_per_seat"] + 1
        self.kv = step.memory["kv"].view(torch.bfloat16)[:pages * page].view(pages, 2, sh["kv_heads"], 16, sh["head_dim"])

    def defines(self):
        """Those of all kernels of the node."""
        launches = [low["launch"]["kernel"]["defines"] for low in self.s.data["nodes"][self.index]["lowered"]]
        return {name: value for defines in launches for name, value in defines}

    def set(self, rows, steep=False):
        s = self.s
        s.memory["state"].zero_()
        per = s.data["limits"]["pages_per_seat"]
        seats = torch.randperm(self.rows)[:len(rows)].cuda()
        table = s.state("page_table")
        order = (torch.randperm(self.rows * per, device="cuda") + 1).view(self.rows, per).int()
        table[:self.rows] = order
        self.kv.fill_(float("nan"))
        start, at = [0], 0
        for r, (q, context) in enumerate(rows):
            pages = table[seats[r], :(q + context + 15) // 16].long()
            fresh = torch.randn((len(pages), 2, self.sh["kv_heads"], 16, self.sh["head_dim"]), device="cuda").bfloat16()
            if steep:
                # Some pages with much larger scores than all before them.
                fresh[torch.rand(len(pages), device="cuda") < 0.1, 0] *= 60
            last = (q + context) % 16
            if last:
                fresh[-1, :, :, last:] = float("nan")
            self.kv[pages] = fresh
            at += q
            start.append(at)
        starts = torch.full((self.rows + 1,), at, dtype=torch.int32)
        starts[:len(start)] = torch.tensor(start)
        s.state("q_start")[0, :self.rows + 1] = starts.cuda()
        s.state("kv_len")[0, :len(rows)] = torch.tensor([q + c for q, c in rows], dtype=torch.int32)
        s.state("row_seat")[0, :len(rows)] = seats.int()
        # As the prologue has it from 17 to 64 rows: equal shares of all pages, three for four rows.
        split, pages = self.defines().get("COUNT_SPLIT"), sum((q + c + 15) // 16 for q, c in rows)
        if split is not None:
            s.state("counts")[0, int(split)] = 16 * max(-(-pages // max(self.rows * 3 // 4, 8)), 1)
        self.qkv.normal_()
        self.seats, self.spec, self.start = seats, rows, start

    def check(self):
        sh = self.sh
        d, hq, hk = sh["head_dim"], sh["q_heads"], sh["kv_heads"]
        self.out.fill_(float("nan"))
        self.s.run(self.index)
        torch.cuda.synchronize()
        live = self.start[-1]
        worst = 0.0 if torch.isnan(self.out[live:]).all() else float("inf")
        table = self.s.state("page_table")
        for r, (q, context) in enumerate(self.spec):
            n, at = q + context, self.start[r]
            pages = table[self.seats[r], :(n + 15) // 16].long()
            keys, limit = torch.arange(n, device="cuda")[None], (context + torch.arange(q, device="cuda"))[:, None]
            mask = keys > limit
            if self.window:
                mask |= keys + self.window <= limit
            for h in range(hk):
                k = self.kv[pages, 0, h].reshape(-1, d)[:n].float()
                v = self.kv[pages, 1, h].reshape(-1, d)[:n].float()
                g = hq // hk
                x = self.qkv[at:at + q, h * g * d:(h + 1) * g * d].reshape(q, g, d).float()
                for i in range(g):
                    scores = (x[:, i] @ k.t()) * d ** -0.5
                    want = scores.masked_fill_(mask, float("-inf")).softmax(-1) @ v
                    got = self.out[at:at + q, (h * g + i) * d:(h * g + i + 1) * d]
                    e = rel(got, want)
                    worst = max(worst, e if e == e else float("inf"))
        return worst

    def flops(self):
        pairs = sum(q * c + q * (q + 1) // 2 for q, c in self.spec)
        return 4 * pairs * self.sh["q_heads"] * self.sh["head_dim"]

    def time(self):
        self.s.run(self.index)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                self.s.run(self.index)
        return timed(graph, lambda: None, rounds=5, per=3) / 10


def variant(step, text):
    """The step with another shape of the kernel."""
    node = next(n for n in step["nodes"] if n["name"] == "attention")
    step["nodes"] = [node]
    launch = node["lowered"][0]["launch"]
    if text in ("", "mma"):
        return step
    asked = dict(pair.split("=") for pair in text.split(","))
    defines = {k: v for k, v in launch["kernel"]["defines"]}
    defines.update(asked)
    launch["kernel"]["defines"] = [[k, defines[k]] for k in defines]
    d, kv, stages = (int(defines[k]) for k in ("D", "KV", "STAGES"))
    launch["shared"] = 2 * d * (int(defines.get("Q_STAGES", 2)) * 128 + 2 * stages * kv) + 1024
    return step


def main():
    import json, os, tempfile
    files = [f for f in sys.argv[1:] if f.endswith(".json")]
    variants = [v for v in sys.argv[1:] if not v.endswith(".json")] or [""]
    torch.manual_seed(3)
    random.seed(3)
    memory = {}
    for f in files:
        base = json.load(open(f))
        kernel = next(n for n in base["nodes"] if n["name"] == "attention")["lowered"][0]["launch"]["kernel"]
        for text in variants if kernel["entry"] == "attention_wgmma" else [""]:
            path = os.path.join(tempfile.gettempdir(), "variant.json")
            json.dump(variant(copy.deepcopy(base), text), open(path, "w"))
            line = "%-24s %-26s" % (os.path.basename(f), text or kernel["entry"])
            try:
                bench = Bench(Step(path, memory))
                for name in os.environ.get("CASES", "offsets,random,random2,steep,decode,ragged,chunk,mixed,16x512,1x8192").split(","):
                    bench.set(rows_of(name, bench.rows, bench.tokens, bench.room), name == "steep")
                    error = bench.check()
                    line += " %s %s" % (name, "BAD %.1e" % error if not error < 6e-3 else "%.1e" % error)
                    if name in ("decode", "ragged", "chunk", "mixed", "16x512", "1x8192"):
                        ms = bench.time()
                        line += " %.0f us %.0f TF" % (ms * 1000, bench.flops() / ms * 1e-9)
                print(line, flush=True)
            except Exception as e:
                print(line, "FAILED", str(e)[:400], flush=True)
                if "CUDA error" in str(e):
                    raise


if __name__ == "__main__":
    main()
