"""Adapters inside the linears of a batch: checked against PyTorch in fp32, then timed as graph replays with dependent launch.

adapters.py check              every plan, tables in disorder, rows without adapter, outputs poisoned, repetition
adapters.py time [SLOTS,...]   microseconds of Qwen3-8B's four linears at 64 rows: without adapters, with that many
                               slots and none, one and all of them in use
adapters.py keys FILE          the kernels that these need, for compile.py

Weights take turns, 0.4 GB and more: L2 does not help.
"""
import ctypes, json, os, sys

# Columns, K, epilogue, parts, whether they come in turns, where parts end; tile and split at 64 rows.
SHAPES = dict(qkv=(6144, 4096, 0, 3, 0, (4096, 5120), (48, 1)), o=(4096, 4096, 1, 1, 0, (0, 0), (64, 2)),
              gate_up=(24576, 4096, 2, 2, 1, (0, 0), (192, 1)), down=(4096, 12288, 1, 1, 0, (0, 0), (64, 2)))
SMS, SHARED, WORDS, AT = 132, 232448, 16, 3
TYPES = dict(TYPE=2, BT=2, RT=2, YT=2, BIAS=0, LIVE=1, PAIRS=1, PRODUCES=0, CONSUMES=0)


def up(a, b):
    return (a + b - 1) // b


def static_bytes(wide, columns, parts, rank):
    """Shared memory of the warps that work on adapters."""
    return 1664 + (8 if wide == 192 else 3) * 256 + min(parts, 2) * columns * (16 if rank == 16 else rank + 4) * 2


class Plan:
    def __init__(self, name, rows, slots, rank=16, slices=16, tile=None):
        n, k, epilogue, parts, turns, _, usual = SHAPES[name]
        wide, split = tile or usual
        columns, groups = up(rows, 8) * 8, up(wide, 64)
        stage = (wide + columns) * 128
        static = 2048 + 4 * columns
        if slots:
            static += static_bytes(wide, columns, parts, rank)
        most = min((SHARED - static - 1024) // stage, 20)
        chunks = k // 64 // split * (1 if split > 1 else 2)
        # A little more than half of a multiprocessor's memory: no two blocks of a linear share one.
        half = (233472 // 2 - 1024 + 3072 - 2048 - 4 * columns) // stage if wide <= 64 and columns <= 64 else most
        stages = max(min(half, chunks), max(up(wide * columns * 4, stage), 3))
        self.shared = stages * stage + 1024
        if half < most and stages < chunks:
            self.shared = max(self.shared, 233472 // 2 - 1024)
        defines = dict(TYPES, K=k, N=n, ROWS=rows, WIDE=wide, COLUMNS=columns, STAGES=stages, SPLIT=split, EPILOGUE=epilogue)
        if slots:
            defines.update(ADAPTERS=slots, RANK=rank, PARTS=parts, ALTERNATE=turns, SLICES=slices, PARAM_WORDS=WORDS, PARAM_ADAPTER=AT)
        self.key = dict(source="linear_wgmma", entry="linear_wgmma", defines=[[a, str(b)] for a, b in sorted(defines.items())])
        self.name, self.rows, self.slots, self.rank, self.slices, self.cluster, self.columns, self.wide = name, rows, slots, rank, slices, split, columns, wide
        self.grid = min(up(n, wide) * split, SMS // split * split)
        self.threads = groups * 128 + (32 if not slots else 384 if wide == 192 else 128)
        self.label = "%s %d rows, %d slots of %d, %d slices, tile %d/%d, %d stages" % (name, rows, slots, rank, slices, wide, split, stages)


def checked():
    out = [Plan(name, rows, slots, rank) for name in SHAPES for rows in (9, 33, 64) for slots, rank in ((8, 16), (64, 16), (3, 32), (5, 64))]
    return out + [Plan("qkv", 64, 8, tile=t) for t in ((64, 1), (128, 1))] + [Plan("gate_up", 64, 8, tile=(128, 1)), Plan("o", 64, 8, slices=8)]


def variants(name, slots):
    tiles = dict(qkv=((48, 1), (64, 1)), gate_up=((192, 1),)).get(name, ((64, 2),))
    return [Plan(name, 64, slots, tile=t) for t in tiles]


def keys(slots=(8, 64)):
    plans = checked() + [Plan(name, 64, 0, tile=t) for name in SHAPES for t in {v.wide: (v.wide, v.cluster) for v in variants(name, 8)}.values()]
    plans += [p for name in SHAPES for s in slots for p in variants(name, s)]
    return list({json.dumps(p.key): p.key for p in plans}.values())


if __name__ == "__main__" and sys.argv[1] == "keys":
    json.dump(keys(), open(sys.argv[2], "w"))
    sys.exit()

import torch
from lowp import F32, U32, U64, Launch, pointer, recorded, tensor_map, timed

torch.backends.cuda.matmul.allow_tf32 = False


class Weights:
    def __init__(self, name, slots, rank, seed):
        torch.manual_seed(seed)
        n, k, _, parts, turns, ends, _ = SHAPES[name]
        self.w = (torch.randn(n, k, device="cuda") * 0.02).bfloat16()
        self.a = (torch.randn(max(slots, 1) * parts * rank, k, device="cuda") * 0.02).bfloat16()
        self.b = (torch.randn(max(slots, 1) * n, rank, device="cuda") * 0.2).bfloat16()
        column = torch.arange(n, device="cuda")
        self.part = column % parts if turns else sum((column >= e).long() for e in ends[:parts - 1]) + torch.zeros_like(column)


class Linear:
    """Inputs and outputs of one linear; `of` has each row's adapter, from 1, or 0."""

    def __init__(self, name, rows, of):
        self.n, self.k, self.epilogue, self.parts = SHAPES[name][:4]
        out = self.n // 2 if self.epilogue == 2 else self.n
        self.x = torch.randn(rows, self.k, device="cuda").bfloat16()
        self.residual = (torch.randn(rows, out, device="cuda") * 0.3).bfloat16()
        self.y = torch.empty(rows, out, device="cuda", dtype=torch.bfloat16)
        self.rows, self.of = rows, of
        seats = torch.randperm(rows + 5)[:rows]
        params = torch.full((rows + 5, WORDS), 99, dtype=torch.int32)
        params[seats, AT] = torch.tensor(of, dtype=torch.int32)
        order = torch.randperm(rows)
        row_seat = torch.empty(rows, dtype=torch.int32)
        row_seat[order] = seats.int()
        self.token_row, self.row_seat, self.params = order.int().cuda(), row_seat.cuda(), params.cuda()
        self.live = torch.tensor([rows], dtype=torch.int32, device="cuda")
        self.counters = torch.zeros(2 + 64 * 12, dtype=torch.int32, device="cuda")
        self.sums = torch.empty(33 * rows * 3 * 64, device="cuda")

    def launch(self, plan, w):
        u = lambda *v: [U32(i) for i in v]
        ends = SHAPES[plan.name][5]
        args = [tensor_map(self.x, plan.columns), tensor_map(w.w, plan.wide), U64(0), pointer(self.residual), pointer(self.y), pointer(self.live), U64(0), U64(0), U64(0)]
        args += u(self.y.stride(0), self.y.stride(0)) + [F32(1e-6)]
        if plan.slots:
            args += [pointer(self.x), pointer(w.a), pointer(w.b), pointer(self.sums), pointer(self.counters), pointer(self.token_row), pointer(self.row_seat), pointer(self.params)]
            args += u(self.x.stride(0), self.rows, self.rows + 5, 0, *ends)
        return Launch(plan, args)

    def want(self, w, rank):
        x = self.x.float()
        p = x @ w.w.float().t()
        for row, adapter in enumerate(self.of):
            if adapter == 0:
                continue
            a = w.a.view(-1, self.parts, rank, self.k)[adapter - 1].float()
            b = w.b.view(-1, self.n, rank)[adapter - 1].float()
            sums = torch.einsum("prk,k->pr", a, x[row])
            p[row] += (b * sums[w.part]).sum(1)
        if self.epilogue == 2:
            return torch.nn.functional.silu(p[:, 0::2]) * p[:, 1::2]
        return p + self.residual.float() if self.epilogue == 1 else p


def error_of(got, want):
    worst = ((got - want).pow(2).mean(1).sqrt() / want.pow(2).mean(1).sqrt()).max()
    return worst.item() if torch.isfinite(worst) else float("nan")


def check():
    bad = count = 0
    worst = 0.0
    for plan in checked():
        w = Weights(plan.name, plan.slots, plan.rank, 3)
        spread = [(7 * r) % (plan.slots + 1) for r in range(plan.rows)]
        for kind, of in (("mixed", spread), ("one", [plan.slots] * plan.rows), ("none", [0] * plan.rows), ("last", [0] * (plan.rows - 1) + [1])):
            linear = Linear(plan.name, plan.rows, of)
            want, first, differ = linear.want(w, plan.rank), None, 0
            launch = linear.launch(plan, w)
            for turn in range(6):
                linear.y.fill_(float("nan"))
                linear.sums.fill_(float("nan"))
                launch.go(turn > 1)
                torch.cuda.synchronize()
                first = linear.y.clone() if first is None else first
                differ += not torch.equal(first, linear.y)
            error, left = error_of(first.float(), want), linear.counters.abs().sum().item()
            # Without its adapter a row must be far off.
            base = Linear.want(type("", (), dict(vars(linear), of=[0] * plan.rows))(), w, plan.rank) if kind == "one" else None
            missed = base is not None and error_of(base, want) < 0.05
            count += 1
            worst = max(worst, error if error == error else 9.9)
            if not error < 8e-3 or differ or left or missed:
                bad += 1
                if bad < 12:
                    print("BAD", plan.label, kind, "error %.1e differ %d counters %d%s" % (error, differ, left, " adapters too small" if missed else ""), flush=True)
        del w
    print("adapters %d checks, worst %.1e, failures %d" % (count, worst, bad), flush=True)
    return bad


def measure(all_slots):
    total = {}
    for name, (n, k, *_) in SHAPES.items():
        for slots in all_slots:
            some = up(400 << 20, n * k * 2)
            sets = [Weights(name, slots, 16, 7 + i) for i in range(some)]
            cases = []
            for tile in {v.wide: (v.wide, v.cluster) for v in variants(name, slots)}.values():
                cases.append(("without %d" % tile[0], Plan(name, 64, 0, tile=tile), 0))
            for v in variants(name, slots):
                cases += [("%d used, tile %d" % (used, v.wide), v, used) for used in sorted({0, 1, 8, slots}) if used <= slots]
            graphs, keep = [], []
            for _, plan, used in cases:
                linear = Linear(name, 64, [r % used + 1 if used else 0 for r in range(64)])
                launches = [linear.launch(plan, w) for w in sets] * 2
                keep.append((linear, launches))
                graphs.append(recorded(launches))
            us = [t / len(l[1]) for t, l in zip(timed(graphs), keep)]
            base = us[0]
            for (label, _, used), t in zip(cases, us):
                bytes_of = used * 16 * (k * SHAPES[name][3] + n) * 2
                print("%-8s %2d slots %-32s %6.2f us %+5.1f %%  (bytes of adapters %+.1f %%)" % (name, slots, label, t, 100 * (t / base - 1), 100 * bytes_of / (2 * n * k)), flush=True)
                total.setdefault((slots, used if "used" in label else None), {}).setdefault(name, []).append(t)
            del graphs, keep, sets
    for (slots, used), names in total.items():
        print("%2d slots, %-8s best of each, sum of four: %.1f us" % (slots, "without" if used is None else "%d used" % used, sum(min(t) for t in names.values())), flush=True)


def main():
    if sys.argv[1] == "check":
        sys.exit(check() > 0)
    measure([int(s) for a in sys.argv[2:] for s in a.split(",")] or [8, 64])


main()
