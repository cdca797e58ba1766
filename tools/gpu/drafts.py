"""Attention of rows with drafts, and what an EAGLE-3 head runs between its linears: checked against PyTorch in fp32, then timed.

drafts.py compile FOLDER           all kernels that these need, on all cores; CUBINS=FOLDER for the rest
drafts.py check [KIND,...]         attention, pieces: ragged lengths, poisoned pages and outputs, pad rows, repetition
drafts.py time [ROWS,...]          microseconds of attention a layer at context 512, as it was, by parts of the change, and as it is
drafts.py pieces                   microseconds of the kernels between a head's linears; DACAPO_KERNELS=FOLDER: those of another version
drafts.py linears [TOKENS]         microseconds of a layer's linears at 256 tokens, with their norms: the library, and tiles in place of it
drafts.py keys FILE                the kernels, for compile.py

Layers take turns, 0.25 GB and more: L2 does not help.
"""
import itertools, json, os, random, sys

SMS, SHARED, PER_SM, E4M3, BF16, CONTEXT = 132, 232448, 233472, 3, 2, 512
QWEN = (128, 32, 8)
# Head size, query heads, KV heads: groups of 2, 3, 4, 6 and 8, wide heads, an odd number of chunks.
SHAPES = [(128, 16, 8), (64, 9, 3), (256, 8, 2), (80, 12, 2), (128, 32, 4)]
EIGHT_K = 8 << 10
# Columns, K, epilogue (0 stores, 1 adds a residual, 2 multiplies SiLU of gates).
LINEARS = dict(qkv=(6144, 4096, 0), o=(4096, 4096, 1), gate_up=(24576, 4096, 2), down=(4096, 12288, 1))


def up(a, b):
    return (a + b - 1) // b


class Plan:
    """A kernel with its launch."""

    def __init__(self, source, grid, threads, shared, label, cluster=(1, 1, 1), **defines):
        if defines.get("KT") == BF16:
            del defines["KT"]
        self.key = dict(source=source, entry=source, defines=[[a, str(b)] for a, b in sorted(defines.items())])
        self.grid, self.threads, self.shared, self.label, self.cluster, self.defines = grid, threads, shared, label, cluster, defines
        self.narrow = defines.get("KT") == E4M3


def attention(shape, rows, each, kt=BF16, warps=None, cluster=None, stages=None, cuts=None, window=0, softcap=None, context=CONTEXT):
    """As the op lowers it for rows of `each` tokens, with what is given in place of the rule."""
    d, hq, hkv = shape
    group, stage = hq // hkv, 2 * 16 * (2 * d + 16 if kt == BF16 else d if d % 128 == 0 else (d // 16 | 1) * 16)
    if each * group > (8 if d > 128 else 32):
        return None
    part, bytes_ = each * group * (d + 4) * 4, kt == E4M3
    ways = up(max(1, 2 * SMS // 8 // (1 if rows <= 4 else 2 if rows <= 16 else 4)) * 8, hkv)
    static = lambda w: up(each * group, 8) * 8 * (2 * (d + 8) + 8 * w) + each * 4 * d + 64
    rings = lambda w: max(2 * w * stage, w * part) + static(w)
    left = lambda c: c * up(each * group, c) * (d + 4) * 4 if c > 1 else 0
    few_bytes = bytes_ and rows <= 32
    suited = 8 if rows <= 2 and context <= EIGHT_K else 2 if 5 <= rows <= 16 else 1
    many = few_bytes and not 9 <= rows <= 16
    warps = warps or next((w for w in ((8, 4, 2) if many else (4, 2)) if rings(w) <= SHARED), 1)
    cluster = cluster or next((c for c in (8, 4, 2) if c <= suited and left(c) + rings(warps) <= SHARED), 1)
    if rows <= 4:
        split, y, z = 2, cuts or up(max(ways // rows, 8), cluster), rows
    elif rows <= 64:
        split, y, z = 1, rows + up(ways, cluster), 1
    else:
        split, y, z, cluster = 0, rows, 1, 1
    deep = min(max(max((108 << 10) - left(cluster), 0) // (warps * stage), 2), 4)

    def filled(s):
        slots = SMS * max(PER_SM // (warps * s * stage + left(cluster) + 1024), 1)
        return rows * hkv / (up(rows * hkv, slots) * slots)
    own = 2 if few_bytes and warps > 4 else min(max((48 << 10) // (warps * stage), 2), 4) if bytes_ else 2 if filled(2) >= filled(deep) else deep
    stages = stages or own
    shared = max(warps * stages * stage, warps * part) + left(cluster)
    if shared + static(warps) > SHARED:
        return None
    extra = {} if softcap is None else dict(SOFTCAP="%rf" % softcap)
    label = "%dx%d%s" % (warps, stages, "/%d" % cluster if cluster > 1 else "") + (" y=%d" % cuts if cuts else "")
    return Plan("attention", (hkv, y * cluster, z), warps * 32, shared, label, (1, cluster, 1), WARPS=warps, STAGES=stages, SPLIT=split, CLUSTER=cluster, ROWS32=up(rows, 32) if split == 1 else 1,
                LEAST_PAGES=4, SINGLE=1, ROPE=1, Q_TOKENS=each, WINDOW=window, TYPE=2, YT=2, QN=1, KN=1, QNT=2, KNT=2, COUNT_SPLIT=5, FIXED=0, ONES=0, D=d, HQ=hq, HKV=hkv, PAGE=16, KT=kt, **extra)


def checked():
    """(plan, rows, each, context)."""
    out = [(attention(QWEN, rows, each), rows, each, CONTEXT) for rows in (1, 2, 4, 8) for each in range(2, 9)]
    for kt, shape, rows in itertools.product((BF16, E4M3), SHAPES, (1, 3)):
        out += [(attention(shape, rows, each, kt), rows, each, CONTEXT) for each in (2, 4, 9)]
    out += [(attention(QWEN, rows, each, E4M3), rows, each, CONTEXT) for rows, each in ((1, 4), (2, 8), (4, 4), (8, 4))]
    out += [(attention(QWEN, rows, 4, window=w), rows, 4, CONTEXT) for rows, w in ((1, 40), (4, 40), (2, 3))]
    out += [(attention(QWEN, 2, 4, softcap=30.0), 2, 4, CONTEXT), (attention(QWEN, 1, 1), 1, 1, CONTEXT)]
    # Long contexts: rounds of the ring, splits that are merged through L2.
    out += [(attention(QWEN, rows, 4, context=c), rows, 4, 3000) for rows, c in ((1, EIGHT_K), (2, EIGHT_K), (1, 2 * EIGHT_K), (4, EIGHT_K))]
    out += [(attention(QWEN, 1, 4, warps=w, cluster=c), 1, 4, CONTEXT) for w in (4, 8) for c in (1, 2, 4, 8)]
    return [case for case in out if case[0]]


def timed_plans(rows, each):
    """As it was (one or two rows of 8 k tokens and drafts had no clusters), forms of the change, and the rule's."""
    own = attention(QWEN, rows, each)
    forms = [dict(warps=4, cluster=1 if rows <= 2 else None), dict(warps=4), dict(warps=8, stages=2)]
    if rows <= 4:
        forms += [dict(warps=w, cluster=c) for w in (4, 8) for c in (2, 4, 8)]
    if rows <= 2:
        forms += [dict(warps=w, cluster=8, cuts=c) for w in (4, 8) for c in (1, 2)]
    plans = [attention(QWEN, rows, each, **f) for f in forms]
    same = lambda p: json.dumps([p.key, p.grid])
    # The labels of the first and the rule's say so; equal ones are timed once.
    plans[0].label += " (was)"
    own.label += " (is, was)" if same(own) == same(plans[0]) else " (is)"
    first = {}
    for plan in [own] + plans:
        if plan:
            first.setdefault(same(plan), plan)
    return list(first.values())


# ---- what a head runs between its linears ----

SEATS, PER_SEAT, VOCAB, DRAFTED = 8, 513, 151936, 32000
WORDS = dict(SEATS=SEATS, ROWS_LIMIT=SEATS, PAGES_PER_SEAT=PER_SEAT, PAGE=16, VOCAB=VOCAB, COUNT_ROWS=2, COUNT_TOKENS=3, COUNT_MAX_KV=4, COUNT_SPLIT=5, ROW_PROMPT=2)


def named(source, entry, grid, threads, **defines):
    plan = Plan(source, grid, threads, 0, entry, **defines)
    plan.key["entry"] = entry
    return plan


def propose(rows, kind=0, index=0, behind=1):
    return named("propose", "propose", (rows, 1, 1), 1024, XT=kind, INDEX=index, BEHIND=behind, **WORDS)


def tap(rows, size=2):
    return named("features", "tap", (rows, 1, 1), 256, BYTES=size)


def recall(rows, size=2):
    return named("features", "recall", (rows, 1, 1), 256, BYTES=size)


def follow(tokens, size=2, own=0, made=0):
    return named("follow", "follow", (tokens, 1, 1), 256, BYTES=size, OWN=own, MADE=made, **WORDS)


def wgmma(name, tokens, wide, columns, split, stages=None):
    """A linear of bf16 by tiles, as the op lowers it."""
    n, k, epilogue = LINEARS[name]
    stage, tiles = (wide + columns) * 128, up(n, wide) * up(tokens, columns)
    chunks = k // 64 // split * (1 if split > 1 else 2)
    most = min((SHARED - 2048 - 4 * columns) // stage, 20)
    least = max(up(wide * columns * 4, stage), 3)
    if wide + columns > 448 or tiles * split > SMS and split > 1 or k % (64 * split) or most < least:
        return None
    stages = max(min(stages or most, chunks), least)
    threads = up(wide, 64) * 128 + (128 if wide == 192 and columns > 160 else 32)
    label = "%dx%d/%d,%d" % (wide, columns, split, stages)
    return Plan("linear_wgmma", (min(tiles * split, SMS // split * split), 1, 1), threads, stages * stage + 1024, label, (split, 1, 1), K=k, N=n, ROWS=tokens, WIDE=wide, COLUMNS=columns,
                STAGES=stages, SPLIT=split, TYPE=2, BT=0, RT=2 if epilogue == 1 else 0, YT=2, BIAS=0, EPILOGUE=epilogue, LIVE=1, PAIRS=int(epilogue == 1), PRODUCES=0, CONSUMES=0)


def rms_norm(tokens):
    return named("rms_norm", "rms_norm", (tokens, 1, 1), 256, XT=2, WT=2, YT=2, ALIGNED=1)


def linear_plans(name, tokens):
    """Tiles worth timing; for gate/up and down the rule's come first, the library is there for the others."""
    half = up(up(tokens, 2), 16) * 16
    third, whole = up(up(tokens, 3), 8) * 8, up(tokens, 16) * 16
    some = dict(qkv=[(128, half, 1), (128, third, 1), (64, whole, 1), (192, half, 1), (192, 64, 1), (128, whole, 2), (192, whole, 2)],
                o=[(64, half, 1), (128, half, 2), (64, whole, 2), (64, whole, 1), (128, third, 1), (192, half, 2), (64, third, 1)],
                gate_up=[(192, whole, 1), (192, half, 1), (128, whole, 1)],
                down=[(128, half, 2), (64, whole, 2), (64, half, 1), (128, third, 1), (192, half, 2)])[name]
    plans = [wgmma(name, tokens, *s) for s in some]
    return list({json.dumps(p.key): p for p in plans if p}.values())


def keys():
    out = [case[0] for case in checked()] + [p for rows in (1, 2, 4, 8) for each in (2, 4, 8) for p in timed_plans(rows, each)] + [attention(QWEN, r, 1) for r in (1, 2, 4, 8)]
    out += [propose(rows, kind, index, behind) for rows, kind, index, behind in ((1, 0, 0, 1), (5, 0, 1, 1), (5, 2, 0, 0))]
    out += [make(rows, size) for make in (tap, recall) for rows, size in ((1, 2), (4, 2), (3, 4))]
    out += [follow(8, size, own, made) for size in (2, 4) for own, made in ((0, 0), (1, 0), (0, 1))]
    out += [p for name in LINEARS for p in linear_plans(name, 256)] + [rms_norm(256)]
    return list({json.dumps(p.key): p.key for p in out}.values())


def compile_one(key):
    from compile import Nvrtc
    Nvrtc().cached(key, "sm_90a", sys.argv[2])


if __name__ == "__main__" and sys.argv[1] == "keys":
    json.dump(keys(), open(sys.argv[2], "w"))
    sys.exit()
if __name__ == "__main__" and sys.argv[1] == "compile":
    from concurrent.futures import ProcessPoolExecutor
    with ProcessPoolExecutor() as pool:
        list(pool.map(compile_one, keys()))
    sys.exit()

import torch
from kv8 import BOUND, EPS, Launch, Report, World, as_words, written, worst_head
from lowp import F32, U32, U64, pointer, recorded, tensor_map, timed

torch.backends.cuda.matmul.allow_tf32 = False


def check_attention(report, plan, rows, each, context):
    shape, kt = tuple(plan.defines[k] for k in ("D", "HQ", "HKV")), plan.defines.get("KT", BF16)
    room = context - each
    edges = [0, room, 16 - each % 16, 15, 16, 63, 64, room - 1, 1, 17]
    # One row meets several lengths; the last of several rows may be a pad row.
    cases = [[n] for n in (edges[:6] if context == CONTEXT else [room, 2049])] if rows == 1 else [[edges[r % 10] if r < 10 else random.randrange(0, room) for r in range(rows)], [random.randrange(0, room) for _ in range(rows)]]
    for at, lengths in enumerate(cases):
        world = World(shape, [(each, max(n, 0)) for n in lengths], kt, context=context)
        launch, bad, first = world.launch(plan), [], None
        pad = rows > 1 and at == 1
        if pad:
            world.kv_len[-1] = 0
            world.rows, world.tokens = world.rows[:-1], world.tokens - each
        q, k, v = world.fresh(world.qkv)
        before, slot = world.kv[0].clone(), world.slot.long()
        # The newest tokens are not in their pages yet.
        before[slot // 16, :, :, slot % 16] = 0x7f if plan.narrow else float("nan")
        for turn in range(3):
            world.kv[0].copy_(before)
            world.out.fill_(float("nan"))
            launch.go(turn > 0)
            torch.cuda.synchronize()
            first = world.out.clone() if first is None else first
            if not torch.equal(first, world.out):
                bad.append("repetition differs")
        bad += written(world, before, k, v)
        if pad and world.out[world.tokens:].any():
            bad.append("a pad row is not zero")
        want = world.want(q, plan.defines["WINDOW"], float(str(plan.defines.get("SOFTCAP", "0f"))[:-1]))
        if world.semaphores.any():
            bad.append("semaphores")
        label = "%s rows %d of %d, %s split %d %s%s" % (shape, rows, each, plan.label, plan.defines["SPLIT"], lengths, " KT=%s" % plan.defines.get("KT", BF16))
        report.note("attention", label, worst_head(first[:world.tokens].float(), want, shape[0]), BOUND, bad)


class Tables:
    """What propose and follow read and write, with `live` of `rows` rows."""

    def __init__(self, rows, live):
        words = lambda n: as_words([7777] * n)
        self.counts, self.fed_counts = words(64), words(64)
        self.counts[2], self.counts[3] = live, live * 4
        self.lens = random.sample(range(20, 8000), SEATS) + [0]
        self.seats = random.sample(range(SEATS), rows)
        self.seat_len, self.row_seat = as_words(self.lens), as_words(self.seats)
        self.flags = as_words([2 if r == 2 else 1 for r in range(SEATS)])
        self.table = torch.randint(1, 9999, (SEATS + 1, PER_SEAT), dtype=torch.int32, device="cuda")
        self.drafts = as_words([r % 4 for r in range(SEATS)])
        self.start, self.token = as_words([4 * r for r in range(SEATS + 1)]), torch.arange(4 * SEATS, dtype=torch.int32, device="cuda")
        self.fed = {name: words(SEATS + 1) for name in ("q_start", "kv_len", "last_index", "token", "position", "kv_slot", "token_row")}
        self.ids = torch.randperm(VOCAB, device="cuda")[:DRAFTED].int()


def launch_propose(plan, tables, logits, ids=True):
    t, fed = tables, tables.fed
    args = [logits, t.counts, t.start, t.token, t.seat_len, t.row_seat, t.flags, t.table, t.drafts, t.fed_counts] + list(fed.values())
    args = [pointer(a) for a in args] + [pointer(t.ids if ids else None)] + [U32(v) for v in (logits.shape[1], logits.stride(0), plan.grid[0], 33)]
    launch = Launch(plan, args)
    launch.held = tables, logits
    return launch


def check_propose(report):
    for rows, live, kind, index, behind in ((1, 1, 0, 0, 1), (5, 4, 0, 1, 1), (5, 5, 2, 0, 0)):
        for vocab, shift in ((DRAFTED, 0), (31999, 0), (1003, 1), (40000, 0), (7, 3)):
            tables, plan, bad = Tables(rows, live), propose(rows, kind, index, behind), []
            wide = torch.randn(rows, vocab + 8, device="cuda")
            wide[0, vocab // 2] = wide[0, vocab - 1] = 9.0
            if rows > 3:
                wide[1] = float("nan")
                wide[3, :] = float("-inf")
                wide[2, ::3] = float("nan")
            wide = wide if kind == 0 else wide.bfloat16()
            logits = wide[:, shift:shift + vocab]
            known = vocab <= DRAFTED
            before = tables.token.clone()
            launch_propose(plan, tables, logits, known).go(False)
            torch.cuda.synchronize()
            clean = logits.float().nan_to_num(float("-inf"), float("inf"), float("-inf"))
            best = clean.argmax(1)
            best[clean.amax(1) == float("-inf")] = 0
            token = before.clone()
            for r in range(rows):
                draft = (tables.ids[best[r]] if known else best[r]).item() if r < live else 0
                place, length = 4 * r + index + 1, tables.lens[tables.seats[r]]
                if r < live and r == 2:
                    draft = before[place].item()
                elif r < live and index < r % 4:
                    token[place] = draft
                at = length + index + 1 - behind
                slot = tables.table[tables.seats[r], at // 16].item() * 16 + at % 16
                want = dict(q_start=r, kv_len=at + 1, last_index=r, token=draft, position=at, kv_slot=slot, token_row=r) if r < live else \
                    dict(q_start=live, kv_len=0, last_index=0, token=0, position=0, kv_slot=r % 16, token_row=SEATS)
                bad += ["row %d %s %d instead of %d" % (r, name, tables.fed[name][r].item(), v) for name, v in want.items() if tables.fed[name][r].item() != v]
            totals = [tables.lens[tables.seats[r]] + index + 2 - behind for r in range(live)]
            counts = [live, live, max(totals), max(up(sum(up(t, 16) for t in totals), 33), 1) * 16]
            if tables.fed_counts[2:6].tolist() != counts or tables.fed["q_start"][rows].item() != live:
                bad.append("counts %s instead of %s" % (tables.fed_counts[2:6].tolist(), counts))
            if not torch.equal(tables.token, token):
                bad.append("drafts")
            report.note("propose", "%d of %d rows, %d logits, shift %d, kind %d" % (live, rows, vocab, shift, kind), 0.0, BOUND, bad)


def some_rows(rows, cols, size, shift=0):
    kind = torch.int16 if size == 2 else torch.int32
    return torch.randint(-30000, 30000, (rows, cols + 64), device="cuda").to(kind)[:, shift:shift + cols]


def launch_copy(plan, row_seat, x, y, drafted=0):
    u = [U32(v) for v in ((x.shape[1], x.stride(0), y.stride(0), 0) if plan.label == "tap" else (x.shape[1], x.stride(0), y.stride(0), drafted, SEATS))]
    return Launch(plan, ([] if plan.label == "tap" else [pointer(row_seat)]) + [pointer(x), pointer(y)] + u)


def launch_follow(plan, tables, kept, last, last_len, y):
    t = tables
    t.verified_position = as_words([t.lens[s] - 2 + i for s in t.seats for i in range(4)])
    t.verified_row = as_words([r for r in range(len(t.seats)) for _ in range(4)])
    t.fed4 = {name: as_words([7777] * 4 * SEATS) for name in ("token", "position", "kv_slot", "token_row")}
    args = [t.counts, t.start, t.token, t.verified_position, t.verified_row, t.seat_len, t.row_seat, t.table, kept, last, last_len, t.fed_counts] + list(t.fed4.values()) + [y]
    launch = Launch(plan, [pointer(a) for a in args] + [U32(v) for v in (kept.shape[1], kept.stride(0), last.stride(0), y.stride(0))])
    # The next launch makes tables of its own.
    launch.held = args
    return launch


def check_copies(report):
    for cols, size, shift in ((4096, 2, 0), (12288, 2, 0), (4096, 4, 0), (100, 2, 0), (4097, 2, 1), (2304, 2, 4), (33, 4, 3), (20000, 2, 0)):
        row_seat = as_words([5, 99, 2, 0])
        rows = 1 if size == 2 and cols == 12288 else 4 if size == 2 else 3
        for make in (tap, recall, recall):
            plan, x, bad = make(rows, size), some_rows(SEATS + 1, cols, size, shift), []
            drafted = int(make is recall and rows == 4)
            wide = some_rows(rows, cols, size)
            y, wanted = wide[:, :cols], wide.clone()
            from_ = torch.arange(rows) if make is tap or drafted else row_seat[:rows].clamp(max=SEATS).cpu()
            launch = launch_copy(plan, row_seat, x[:rows] if make is tap else x, y, drafted)
            past = wide.as_strided((rows, 64), (wide.stride(0), 1), wide.storage_offset() + cols).clone()
            launch.go(False)
            torch.cuda.synchronize()
            if not torch.equal(y, x[from_.cuda()]):
                bad.append("rows differ")
            if not torch.equal(past, wide.as_strided((rows, 64), (wide.stride(0), 1), wide.storage_offset() + cols)):
                bad.append("wrote past its rows")
            report.note(plan.label, "%d columns of %d bytes, shift %d" % (cols, size, shift), 0.0, BOUND, bad)
        for own, made in ((0, 0), (1, 0), (0, 1)):
            tables, bad = Tables(2, 2), []
            tables.counts[3] = 8
            kept, last, y = some_rows(8, cols, size, shift), some_rows(SEATS + 1, cols, size, shift), some_rows(8, cols, size)
            kept0, last0 = kept.clone(), last.clone()
            known, lens = tables.seats[0], [tables.lens[s] for s in tables.seats]
            last_len = torch.zeros(SEATS + 1, dtype=torch.int32, device="cuda")
            last_len[known] = lens[0] - 2
            len0 = last_len.clone()
            launch_follow(follow(8, size, own, made), tables, kept, last, last_len, y).go(False)
            torch.cuda.synchronize()
            want = kept0 if own else torch.cat([last0[known][None], kept0[:3], torch.zeros_like(kept0[:1]), kept0[4:7]])
            if not own:
                # Two tokens of each row were accepted.
                last0[tables.seats[0]], last0[tables.seats[1]] = kept0[1], kept0[5]
                len0[tables.seats] = as_words(lens)
            bad += ["states"] * (not torch.equal(y, want)) + ["last states"] * (not torch.equal(last, last0)) + ["lengths"] * (not torch.equal(last_len, len0))
            at = [n - 2 + i for n in lens for i in range(4)]
            slots = [tables.table[tables.seats[t // 4], (p - 1) // 16].item() * 16 + (p - 1) % 16 if t != 4 else 4 for t, p in enumerate(at)]
            fed = dict(token=list(range(8)), position=[p - 1 for p in at], kv_slot=slots, token_row=[0] * 4 + [1] * 4)
            bad += [name for name, v in fed.items() if tables.fed4[name][:8].tolist() != ([7777] * 8 if made else v)]
            report.note("follow", "%d columns of %d bytes, shift %d, own %d, made %d" % (cols, size, shift, own, made), 0.0, BOUND, bad)


def check(kinds):
    random.seed(1)
    torch.manual_seed(1)
    report = Report()
    if "attention" in kinds:
        for case in checked()[::int(os.environ.get("EVERY", "1"))]:
            check_attention(report, *case)
    if "pieces" in kinds:
        check_propose(report)
        check_copies(report)
    report.show()
    return len(report.failed)


def time_attention(all_rows):
    for rows, each in itertools.product(all_rows, (1, 2, 4, 8)):
        plans = timed_plans(rows, each) if each > 1 else [attention(QWEN, rows, 1, **f) for f in ([{}, dict(cluster=1), dict(cuts=1), dict(cuts=2)] if rows <= 2 else [{}])]
        row = [(each, CONTEXT + 64 - each)] * rows
        size = rows * (CONTEXT + 64) * QWEN[2] * QWEN[0] * 4
        layers = min(max(up(250 << 20, size), 3), 100)
        world = World(QWEN, row, BF16, context=CONTEXT + 80, layers=layers, poison=False)
        kept = [[world.launch(plan, l) for l in range(layers)] for plan in plans]
        us = [t / layers for t in timed([recorded(launches) for launches in kept], 0.02)]
        marked = lambda at: (" (" not in plans[at].label, us[at])
        print("%d rows of %d tokens: %s" % (rows, each, ", ".join("%s %.2f" % (plans[at].label, us[at]) for at in sorted(range(len(us)), key=marked))), flush=True)


def time_pieces():
    many, out = 64, {}
    tables = Tables(1, 1)
    logits = torch.randn(1, DRAFTED, device="cuda")
    out["propose 1x32000"] = [launch_propose(propose(1), tables, logits)] * many
    row_seat = as_words([0] * SEATS)
    for cols, rows, make in ((4096, 1, tap), (4096, 4, tap), (4096, 1, recall), (12288, 1, recall)):
        x, y = some_rows(SEATS + 1, cols, 2), some_rows(SEATS + 1, cols, 2)
        out["%s %dx%d" % (make.__name__, rows, cols)] = [launch_copy(make(rows), row_seat, x[:rows] if make is tap else x, y)] * many
    kept, last, y = [some_rows(SEATS + 1, 12288, 2) for _ in range(3)]
    last_len = torch.zeros(SEATS + 1, dtype=torch.int32, device="cuda")
    last_len[tables.seats[0]] = tables.lens[tables.seats[0]] - 2
    out["follow 8x12288, own"] = [launch_follow(follow(8, own=1), tables, kept, last, last_len, y)] * many
    out["follow 8x4096, made"] = [launch_follow(follow(8, made=1), tables, kept[:, :4096], last[:, :4096], last_len, y[:, :4096])] * many
    out["follow 8x12288"] = [launch_follow(follow(8), tables, kept, last, last_len, y)] * many
    us = timed([recorded(launches) for launches in out.values()], 0.02)
    for name, t in zip(out, us):
        print("%-20s %.2f us" % (name, t / many), flush=True)


class Library:
    """A linear by the library, as the engine calls it; its launch has no dependent launch."""

    def __init__(self, x, w, y, residual=None):
        self.x, self.w, self.y, self.residual = x, w, y, residual

    def go(self, dependent=True):
        if self.residual is None:
            torch.mm(self.x, self.w.t(), out=self.y)
        else:
            torch.addmm(self.residual, self.x, self.w.t(), out=self.y)


def time_linears(tokens):
    """Each linear alone, then a layer's chain of norms and linears with what is best."""
    layers, data = 3, {}
    for name, (n, k, epilogue) in LINEARS.items():
        x, residual = torch.randn(tokens, k, device="cuda").bfloat16(), torch.randn(tokens, n // 2 if epilogue == 2 else n, device="cuda").bfloat16()
        data[name] = x, [(torch.randn(n, k, device="cuda") * 0.02).bfloat16() for _ in range(layers)], residual, torch.empty_like(residual)
    live, norm = as_words([tokens]), torch.ones(4096, device="cuda").bfloat16()
    plain = torch.randn(tokens, 4096, device="cuda").bfloat16()

    def tile(name, plan, layer):
        x, ws, residual, y = data[name]
        args = [tensor_map(x, int(plan.defines["COLUMNS"])), tensor_map(ws[layer], int(plan.defines["WIDE"])), U64(0), pointer(residual), pointer(y), pointer(live), U64(0), U64(0), U64(0)]
        return Launch(plan, args + [U32(y.stride(0)), U32(y.stride(0)), F32(EPS)])

    def library(name, layer):
        x, ws, residual, y = data[name]
        return Library(x, ws[layer], y, residual if LINEARS[name][2] == 1 else None)

    def normed(name):
        x = data[name][0]
        return Launch(rms_norm(tokens), [pointer(plain), pointer(norm), pointer(x), U32(4096), U32(4096), U32(4096), F32(EPS)])
    best = {}
    for name in LINEARS:
        plans = linear_plans(name, tokens)
        # Three layers' weights of these are below the size of L2 twice over: turns of the others come between.
        forms = [("library", lambda l: library(name, l))] * (name in ("qkv", "o")) + [(p.label, lambda l, p=p: tile(name, p, l)) for p in plans]
        for label, make in forms[1:] if forms[0][0] == "library" else forms:
            x, ws, residual, y = data[name]
            y.fill_(float("nan"))
            make(0).go(False)
            torch.cuda.synchronize()
            p = x.float() @ ws[0].float().t()
            p = torch.nn.functional.silu(p[:, 0::2]) * p[:, 1::2] if LINEARS[name][2] == 2 else p + residual.float() * (LINEARS[name][2] == 1)
            error = ((y.float() - p).norm() / p.norm()).item()
            if not error < 1e-2:
                print("BAD", name, label, error)
        us = [t / layers / 4 for t in timed([recorded([make(l) for _ in range(4) for l in range(layers)]) for _, make in forms], 0.03)]
        order = sorted(range(len(forms)), key=lambda i: us[i])
        best[name] = [forms[i] for i in order[:2]]
        print("%-8s %s" % (name, ", ".join("%s %.1f" % (forms[i][0], us[i]) for i in order)), flush=True)
    rule = dict(qkv=("library", lambda l: library("qkv", l)), o=("library", lambda l: library("o", l)))
    for name in ("gate_up", "down"):
        plan = linear_plans(name, tokens)[0]
        rule[name] = (plan.label, lambda l, name=name, plan=plan: tile(name, plan, l))
    own = {name: next((f for f in best[name] if f[0] != "library"), best[name][0]) for name in LINEARS}
    chains = [("rule", rule)] + [("own " + "+".join(names), {**rule, **{n: own[n] for n in names}}) for names in (("qkv",), ("o",), ("qkv", "o"), ("qkv", "o", "down"))]

    def chain(forms, l):
        return [normed("qkv"), forms["qkv"][1](l), forms["o"][1](l), normed("gate_up"), forms["gate_up"][1](l), forms["down"][1](l)]
    us = timed([recorded([launch for l in range(layers) for launch in chain(forms, l)]) for _, forms in chains], 0.1)
    for (label, forms), t in zip(chains, us):
        print("a layer, %-22s %.1f us (%s)" % (label, t / layers, ", ".join("%s %s" % (n, f[0]) for n, f in forms.items())), flush=True)


def main():
    mode, rest = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    if mode == "check":
        sys.exit(check(rest.split(",") if rest else ["attention", "pieces"]) > 0)
    if mode == "time":
        time_attention([int(r) for r in rest.split(",")] if rest else [1, 2, 4, 8])
    if mode == "pieces":
        time_pieces()
    if mode == "linears":
        time_linears(int(rest or 256))


if __name__ == "__main__":
    main()
