"""The scan of recurrent layers over prompts: token by token (scan.cu) and by chunks (scan_prepare.cu, scan_chunks.cu), against PyTorch.

scan.py check [SHAPE ...]        results and states of ragged rows, carried and new; strong decays; pad rows; poisoned buffers;
                                 repetition; rows of few tokens to the bit; planted bugs
scan.py time  [SHAPE ...]        microseconds of both ways, and of the parts; a table comes last
scan.py keys  FILE [SHAPE ...]   the kernels that these need, for compile.py
SHAPE: qwen35 (delta rule), nemotron (state space); both by default.

EMULATOR=FOLDER: `check` without a GPU, by the emulator in FOLDER, with fewer heads and tokens. CUBINS=FOLDER keeps what was compiled.
"""
import json, os, sys

EMULATED = os.environ.get("EMULATOR")
BANDWIDTH = 4.54e12
LONG, CHUNK, BF16 = 17, 64, 2
SHAPES = {
    "qwen35": dict(DELTA=1, KEY=128, VALUE=128, HEADS=32, GROUPS=16),
    "nemotron": dict(DELTA=0, KEY=128, VALUE=64, HEADS=128, GROUPS=8),
}
SMALL = {"qwen35": dict(HEADS=4, GROUPS=2), "nemotron": dict(HEADS=6, GROUPS=2)}
TIMED = [(1, 512), (16, 512), (1, 8192), (64, 64)]
SEATS, CONTEXT = 65, 1 << 20


def shape(name):
    v = dict(SHAPES[name], **(SMALL[name] if EMULATED else {}))
    keys, values = v["GROUPS"] * v["KEY"], v["HEADS"] * v["VALUE"]
    q, k, at = (0, keys, 2 * keys) if v["DELTA"] else (values + keys, values, 0)
    return dict(v, SHARE=v["HEADS"] // v["GROUPS"], Q_AT=q, K_AT=k, V_AT=at, DRAFTS=0)


def key(source, **defines):
    return dict(source=source, entry=source, defines=[[a, str(b)] for a, b in sorted(defines.items())])


def token_key(v, long):
    return key("scan", **v, SINGLE=0, VERIFY=0, LOGGED=0, CHANGES_AT=0, DECAYS_AT=0, LOG_COLS=0, WARPS=4, TILE=32, SKIP=1 - v["DELTA"], XT=2, GT=2, AT=2, DT=2, ST=2, YT=2, LONG=long)


def prepare_key(v):
    return key("scan_prepare", **{n: v[n] for n in v if n not in ("V_AT", "VALUE")}, LONG=LONG, GT=2, AT=2, DT=2)


def chunk_key(v, warps, apart):
    return key("scan_chunks", **v, LONG=LONG, WARPS=warps, APART=apart, SKIP=1 - v["DELTA"], ST=2)


def variants(v):
    """Warps, and whether results are computed apart."""
    return [(4, 1), (2, 1), (2, 0), (4, 0)]


def record_bytes(v):
    return (2 if v["DELTA"] else 1) * 10 * 512 + 4 * CHUNK * 4 + 16


def threads(warps, apart):
    return 32 * warps * (1 + apart)


def chunk_shared(v, warps, apart):
    handed = 2 * warps * (v["KEY"] // 16 + CHUNK // 16) * 512
    return apart * handed + (2 + apart) * (CHUNK * (2 * (v["KEY"] + 8) + 16 * warps + 8) * 2 + record_bytes(v))


def keys(names):
    return [k for v in map(shape, names) for k in [token_key(v, 0), token_key(v, LONG), prepare_key(v)] + [chunk_key(v, *w) for w in variants(v)]]


def named(rest):
    return rest or list(SHAPES)


if __name__ == "__main__" and sys.argv[1] == "keys":
    json.dump(keys(named(sys.argv[3:])), open(sys.argv[2], "w"))
    sys.exit()

import torch
from few_rows import DEVICE, Kernel, captured, half
if not EMULATED:
    from experts import timed


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Layer:
    """A layer's inputs, states and kernels. A row: tokens, tokens before them, its seat; rows without a seat (SEATS) are pads."""

    def __init__(self, name, rows, seed=0, strong=0.0, alike=0.0):
        torch.manual_seed(seed)
        v = self.v = shape(name)
        self.rows, self.counts = rows, [r[0] for r in rows]
        self.starts = [sum(self.counts[:i]) for i in range(len(rows) + 1)]
        self.live = self.starts[-1]
        self.bucket = self.live + 3
        cols, values = 2 * v["GROUPS"] * v["KEY"] + v["HEADS"] * v["VALUE"], v["HEADS"] * v["VALUE"]
        reads = v["HEADS"] * (2 if v["DELTA"] else 1)
        self.x, self.gates = half(self.bucket, cols + 16, std=1.0), half(self.bucket, reads + 8, std=1.0)
        # Heads forget within some tokens to some thousands, as those of models do; `strong` of the tokens forget everything.
        self.a, self.dt = torch.empty(v["HEADS"], device=DEVICE).uniform_(-6.0, 1.0).bfloat16(), half(v["HEADS"], std=0.5)
        self.skip = None if v["DELTA"] else half(v["HEADS"], std=1.0)
        if strong:
            chosen = torch.rand(self.bucket, device=DEVICE) < strong
            self.gates[chosen, reads - v["HEADS"]:reads] = 60.0
        if alike:
            at = slice(v["K_AT"], v["K_AT"] + v["GROUPS"] * v["KEY"])
            self.x[:, at] = self.x[:1, at] + alike * self.x[:, at]
        self.x[self.live:] = float("nan")
        self.gates[self.live:] = float("nan")
        self.state0 = torch.empty(SEATS, v["HEADS"] * v["KEY"] * v["VALUE"], device=DEVICE).normal_(0, 0.3)
        for count, before, seat in rows:
            if before == 0 and seat < SEATS:
                self.state0[seat] = float("nan")
        self.state, self.y = self.state0.clone(), half(self.bucket, values)
        tables = [ints([r[2] for r in rows]), ints(self.starts), ints([r[0] + r[1] for r in rows]), None]
        self.tables = tables
        slots = self.bucket // CHUNK + len(rows)
        self.records = torch.zeros(slots * v["HEADS"] * record_bytes(v), dtype=torch.uint8, device=DEVICE)
        strides = [self.x.shape[1], self.gates.shape[1], self.state.shape[1], values]
        least = 0.0 if v["DELTA"] else 0.01
        token = lambda long: Kernel(token_key(v, long), [self.x, self.gates, self.a, self.dt, self.skip, self.state, self.y] + tables + [SEATS, CONTEXT, 0] + strides + [least, 1e-6],
                                    (v["VALUE"] // 32, v["HEADS"], len(rows)), 128)
        self.tokens, self.short = token(0), token(LONG)
        self.prepare = Kernel(prepare_key(v), [self.x, self.gates, self.a, self.dt, self.records] + tables + [len(rows), SEATS, CONTEXT, 0] + strides[:2] + [least, 1e-6], (slots, v["GROUPS"], 1), 128)
        self.chunks = {w: Kernel(chunk_key(v, *w), [self.x, self.records, self.skip, self.state, self.y] + tables + [SEATS, CONTEXT, strides[0], strides[2], strides[3]],
                                 (v["VALUE"] // (16 * w[0]), v["HEADS"], len(rows)), threads(*w), chunk_shared(v, *w)) for w in variants(v)}

    def by_chunks(self, variant):
        return [self.prepare, self.chunks[variant], self.short]

    def go(self, kernels):
        """Results and states after these launches; NaN where nothing was written."""
        self.state.copy_(self.state0)
        self.y.fill_(float("nan"))
        self.records.fill_(0xff)
        [k.done() for k in kernels]
        return self.y.clone(), self.state.clone()

    def expected(self):
        """Results and states, token by token, all rows beside each other."""
        v, real = self.v, torch.float64
        h, g, kd, vd = v["HEADS"], v["GROUPS"], v["KEY"], v["VALUE"]
        y = torch.full((self.bucket, h * vd), float("nan"), device=DEVICE, dtype=real)
        state = self.state0.to(real)
        rows = [r for r in range(len(self.rows)) if self.rows[r][2] < SEATS and self.counts[r] > 0]
        for many in sorted({self.counts[r] for r in rows}):
            own = [r for r in rows if self.counts[r] == many]
            seats = torch.tensor([self.rows[r][2] for r in own], device=DEVICE)
            s = state[seats].view(-1, h, kd, vd)
            s[torch.tensor([self.rows[r][1] == 0 for r in own], device=DEVICE)] = 0
            starts = torch.tensor([self.starts[r] for r in own], device=DEVICE)
            for i in range(many):
                x, gate = self.x[starts + i].to(real), self.gates[starts + i].to(real)
                part = lambda at, heads, size: x[:, at:at + heads * size].view(-1, heads, size)
                q, k, value = part(v["Q_AT"], g, kd), part(v["K_AT"], g, kd), part(v["V_AT"], h, vd)
                if v["DELTA"]:
                    unit = lambda t: t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()
                    q, k = unit(q) / kd ** 0.5, unit(k)
                q, k = q.repeat_interleave(h // g, 1), k.repeat_interleave(h // g, 1)
                step = torch.nn.functional.softplus(gate[:, h * v["DELTA"]:h * v["DELTA"] + h] + self.dt.to(real))
                held = step if v["DELTA"] else step.clamp(min=0.01)
                s = s * torch.exp(-self.a.to(real).exp() * held)[..., None, None]
                known = torch.einsum("rhk,rhkv->rhv", k, s) if v["DELTA"] else 0.0
                d = (gate[:, :h].sigmoid() if v["DELTA"] else held)[..., None] * (value - known)
                s = s + k[..., None] * d[:, :, None, :]
                out = torch.einsum("rhk,rhkv->rhv", q, s)
                if self.skip is not None:
                    out = out + self.skip.to(real)[:, None] * value
                y[starts + i] = out.reshape(len(own), -1)
            state[seats] = s.reshape(len(own), -1)
        return y, state


def worst(got, want, size):
    """The largest error of a head's vector or matrix, relative to its length, but not to less than a tenth of the usual one: sums that cancel are
    as wrong as their terms. NaN must be where it is expected."""
    got, want = got.to(torch.float64).reshape(-1, size), want.reshape(-1, size)
    if not torch.equal(got.isnan(), want.isnan()):
        return 9.9
    length = want.norm(dim=-1)
    usual = length.square().nanmean().sqrt()
    return ((got - want).norm(dim=-1) / length.clamp(min=0.1 * usual + 1e-6)).nan_to_num(0.0).max().item()


def errors(layer, got, want):
    """Of the results and of the states: of single vectors, and the root of the mean square."""
    v = layer.v
    rms = lambda a, b: ((a - b).square().nansum() / b.square().nansum()).sqrt().item()
    return (worst(got[0], want[0], v["VALUE"]), worst(got[1], want[1], v["KEY"] * v["VALUE"]), rms(got[0].double(), want[0]), rms(got[1].double(), want[1]))


# Largest errors: of one head's result of a token, of a head's matrix, and of all results and states as root mean squares. Operands are
# bf16, whose rounding is up to 2^-9 = 2e-3, 1.1e-3 as root mean square; results are rounded to bf16 in both ways.
MOST = (0.15, 2e-2, 8e-3, 4e-3)
CASES = {
    "ragged": dict(rows=[(200, 0, 3), (1, 40, 5), (17, 9, 0), (0, 0, SEATS), (16, 3, 1), (64, 100, 8), (65, 0, 2), (130, 1, 4), (0, 0, SEATS)]),
    "strong decays": dict(rows=[(150, 7, 6), (70, 0, 1)], strong=0.1),
    "keys alike": dict(rows=[(200, 0, 3), (70, 9, 1)], alike=0.1),
    "boundaries": dict(rows=[(63, 1, 0), (127, 0, 1), (128, 5, 2), (129, 5, 3), (33, 5, 4), (48, 5, 7)]),
}
LARGE = {
    "many": dict(rows=[(96 + 13 * i, (i % 3) * 50, i) for i in range(60)]),
    "long": dict(rows=[(8192, 0, 3)]),
    "16 x 512": dict(rows=[(512, 512 * (i % 2), i) for i in range(16)]),
    "decode beside": dict(rows=[(1, 300 + i, i) for i in range(63)] + [(449, 0, 63)]),
}


def check(name):
    bad = 0
    for case, made in dict(CASES, **({} if EMULATED else LARGE)).items():
        layer = Layer(name, **made)
        want = layer.expected()
        one = layer.go([layer.tokens])
        print("%s, %s: by token %s" % (name, case, " ".join("%.1e" % e for e in errors(layer, one, want))), flush=True)
        few = [t for r in range(len(layer.rows)) if layer.counts[r] < LONG for t in range(layer.starts[r], layer.starts[r + 1])]
        seats = [r[2] for r in layer.rows if r[0] < LONG and r[2] < SEATS]
        for variant in layer.chunks:
            got = layer.go(layer.by_chunks(variant))
            found = errors(layer, got, want)
            same = torch.equal(got[0][few], one[0][few]) and torch.equal(got[1][seats], one[1][seats])
            differ = 0
            for _ in range(1 if EMULATED else 10):
                again = layer.go(layer.by_chunks(variant))
                differ += not all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(got, again))
            failed = any(not e < most for e, most in zip(found, MOST)) or not same or differ
            bad += bool(failed)
            print("%s, %s: chunks, %d warps, apart %d: %s; short rows the same %s, repeated %d%s" % (name, case, *variant, " ".join("%.1e" % e for e in found), same, differ, " BAD" if failed else ""), flush=True)
    return bad + planted(name)


def planted(name):
    """Bugs planted in what kernels read; the comparison must find each."""
    bad = 0
    layer = Layer(name, [(100, 30, 2), (70, 5, 4)])
    want, variant = layer.expected(), variants(layer.v)[0]
    seat, start, length, _ = layer.tables
    plants = {
        "nothing": lambda: None,
        "another seat": lambda: seat.copy_(seat.flip(0)),
        "states forgotten": lambda: length.copy_(ints([100, 75])),
        "a token of the next row": lambda: start[1].add_(1),
        "tokens at a boundary": lambda: layer.x[63:65].copy_(layer.x[63:65].flip(0).clone()),
        "the last token's gates": lambda: layer.gates[169].add_(1.0),
    }
    for plant, apply in plants.items():
        saved = [t.clone() for t in (seat, start, length, layer.x, layer.gates)]
        apply()
        got = layer.go(layer.by_chunks(variant))
        for t, old in zip((seat, start, length, layer.x, layer.gates), saved):
            t.copy_(old)
        found = any(not e < most for e, most in zip(errors(layer, got, want), MOST))
        bad += found != (plant != "nothing")
        print("%s planted %s: %s" % (name, plant, "found" if found else "not found"), flush=True)
    return bad


def time(name):
    """Lines of the table."""
    lines = []
    for rows, tokens in TIMED:
        layer = Layer(name, [(tokens, 0 if rows > 32 else 5, i) for i in range(rows)])
        layer.state0.nan_to_num_(0.0), layer.go([])
        v, each = layer.v, 10
        ways = [[layer.tokens], [layer.prepare], [layer.short]] + [part for w in layer.chunks for part in ([layer.chunks[w]], layer.by_chunks(w))]
        us = [t / each for t in timed([captured(way * each)[0] for way in ways])]
        moved = 2 * layer.live * (layer.x.shape[1] + layer.y.shape[1]) + rows * 8 * layer.state.shape[1]
        alone, whole = us[3::2], us[4::2]
        print("%s %d x %d: chunks alone %s" % (name, rows, tokens, " ".join("%s %.1f" % ("+".join(map(str, w)), t) for w, t in zip(layer.chunks, alone))))
        all_three = " ".join("%7.1f" % t for t in whole)
        lines.append("%-9s %2d x %-5d %7.1f %8.1f %8.1f %6.1f  %s %6.1f" % (name, rows, tokens, moved / BANDWIDTH * 1e6, *us[:3], all_three, us[0] / min(whole)))
        print(lines[-1], flush=True)
        del layer
    return lines


def main():
    mode, names = sys.argv[1], named(sys.argv[2:])
    if mode == "check":
        bad = sum(check(n) for n in names)
        print("failures", bad)
        sys.exit(bad > 0)
    lines = [line for n in names for line in time(n)]
    print("\nµs of a layer's scan: bytes at 4.54 TB/s, by token, preparation, short rows; then all three by warps + results apart; times faster")
    print("%-20s %7s %8s %8s %6s  %s" % ("", "floor", "token", "prepare", "short", " ".join("%7s" % "+".join(map(str, w)) for w in variants(shape("qwen35")))))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
