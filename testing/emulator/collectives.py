"""Instructions that several threads execute together, barriers, asynchronous copies and matrix instructions."""
import re

MMA = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 3, "e5m2": 4, "s8": 5, "u8": 6}
SHFL = {"up": 0, "down": 1, "bfly": 2, "idx": 3}
REDUX = {"add": 0, "min": 1, "max": 2, "and": 3, "or": 4, "xor": 5}


def emit(e, s, parts):
    """Emits the instruction if it is one of these."""
    f = {"shfl": shfl, "vote": vote, "match": match, "redux": redux, "elect": elect, "activemask": activemask, "bar": bar, "barrier": bar,
         "mma": mma, "ldmatrix": ldmatrix, "movmatrix": movmatrix, "wgmma": wgmma, "mbarrier": mbarrier, "cp": copy,
         "call": call}.get(parts[0])
    if f is None:
        return False
    f(e, parts, *s.operands)
    return True


def two(operand):
    """A register and the predicate behind it."""
    first, _, second = operand.partition("|")
    return first, second or None


def with_predicate(e, d, kind, text):
    d, p = two(d)
    e.emit("{ _Bool p_ = 0; const %s v_ = %s;" % ("u32", text))
    e.put(d, kind, "v_")
    if p and p != "_":
        e.put(p, "pred", "p_")
    e.emit("}")


def shfl(e, parts, d, a, b, c, mask):
    v = [e.value(x, "b32") for x in (a, b, c, mask)]
    with_predicate(e, d, "b32", "emu_shfl(t, %d, %d, %s, %s, %s, %s, &p_)" % (e.site, SHFL[parts[2]], *v))


def vote(e, parts, d, a, mask):
    mode = {"all": 0, "any": 1, "uni": 2, "ballot": 3}[parts[2]]
    e.put(d, parts[-1], "emu_vote(t, %d, %d, %s, %s)" % (e.site, mode, e.value(a, "pred"), e.value(mask, "b32")))


def match(e, parts, d, a, mask):
    with_predicate(e, d, "b32", "emu_match(t, %d, %d, %s, %s, &p_)" % (e.site, parts[1] == "all", e.value(a, parts[-1]), e.value(mask, "b32")))


def redux(e, parts, d, a, mask):
    if parts[-1] == "f32":
        raise NotImplementedError("redux of floats")
    op = REDUX[parts[2]] + (8 if parts[-1] == "s32" else 0)
    e.put(d, parts[-1], "emu_redux(t, %d, %d, %s, %s)" % (e.site, op, e.value(a, "b32"), e.value(mask, "b32")))


def elect(e, parts, d, mask):
    with_predicate(e, d, "b32", "emu_elect(t, %d, %s, &p_)" % (e.site, e.value(mask, "b32")))


def activemask(e, parts, d):
    e.put(d, "b32", "emu_activemask(t, %d)" % e.site)


def bar(e, parts, *operands):
    rest = [p for p in parts[1:] if p not in ("cta", "aligned")]
    if rest[0] == "cluster":
        return e.emit("emu_cluster_%s(t, %d);" % (rest[1], e.site))
    if rest[0] == "warp":
        return e.emit("emu_warp_sync(t, %d, %s);" % (e.site, e.value(operands[0], "b32")))
    if rest[0] == "red":
        d, operands, predicate = operands[0], list(operands[1:-1]), operands[-1]
        mode = {"popc": 2, "and": 3, "or": 4}[rest[1]]
        value = e.value(predicate, "pred")
    else:
        d, mode, value = None, {"sync": 0, "arrive": 1}[rest[0]], "0"
    count = e.value(operands[1], "u32") if len(operands) > 1 else "0"
    text = "emu_bar(t, %d, %s, %s, %d, %s)" % (e.site, e.value(operands[0], "u32"), count, mode, value)
    e.put(d, "u32" if rest[-1] == "u32" else "pred", text) if d else e.emit("%s;" % text)


def array(e, name, operand):
    """A C array with the registers of an operand."""
    values = [e.value(r, "b32") for r in e.parts(operand)]
    e.emit("u32 %s[] = {%s};" % (name, ", ".join(values)))
    return len(values)


def scatter(e, operand, name):
    for i, r in enumerate(e.parts(operand)):
        e.put(r, "b32", "%s[%d]" % (name, i))


def mma(e, parts, d, a, b, c):
    shape, types = parts[3], parts[-4:]
    if types[0] not in ("f32", "s32") or types[3] != types[0] or types[1] != types[2] or parts[4:6] != ["row", "col"]:
        raise NotImplementedError("mma of " + ".".join(types))
    kind, k = MMA[types[1]], int(re.match(r"m16n8k(\d+)$", shape)[1])
    e.emit("{")
    array(e, "a_", a), array(e, "b_", b), array(e, "c_", c)
    e.emit("u32 d_[4]; emu_mma(t, %d, %d, d_, a_, b_, c_);" % (e.site, kind | k << 8))
    scatter(e, d, "d_")
    e.emit("}")


def ldmatrix(e, parts, d, address):
    if "m8n8" not in parts or parts[-1] != "b16":
        raise NotImplementedError("ldmatrix of another shape")
    count = int(next(p for p in parts if re.match(r"x[124]$", p))[1])
    e.emit("{ u32 d_[4]; emu_ldmatrix(t, %d, d_, %d, %d, %s);" % (e.site, count, "trans" in parts, e.address(address, "u32")))
    scatter(e, d, "d_")
    e.emit("}")


def movmatrix(e, parts, d, a):
    e.put(d, "b32", "emu_movmatrix(t, %d, %s)" % (e.site, e.value(a, "b32")))


def wgmma(e, parts, *operands):
    what = parts[1]
    if what in ("fence", "commit_group", "wait_group"):
        left = e.value(operands[0], "u32") if operands else "0"
        number = {"fence": 0, "commit_group": 1, "wait_group": 2}[what]
        return e.emit("emu_wgmma_sync(t, %d, %d, %s);" % (e.site, number, left))
    shape, types = re.match(r"m64n(\d+)k(\d+)$", parts[4]), parts[5:]
    if types[0] != "f32" or types[1] != types[2] and not {types[1], types[2]} <= {"e4m3", "e5m2"} or types[1] != types[2]:
        raise NotImplementedError("wgmma of " + ".".join(types))
    d, a, b, add, *rest = operands
    rest = [int(x) for x in rest]
    a_sign, b_sign = (rest + [1, 1])[:2] if rest else (1, 1)
    held = a.startswith("{")
    flags = rest[2:]
    a_transposed, b_transposed = ([0] + flags if held else flags + [0, 0])[:2] if flags else (0, 0)
    e.emit("{")
    array(e, "d_", d)
    if held:
        array(e, "a_", a)
    e.emit("emu_wgmma(t, %d, %d, %d, d_, %s, %s, %s, %s, %d, %d, %d, %d);" % (
        e.site, MMA[types[1]] | int(shape[2]) << 8, int(shape[1]), "a_" if held else "0", "0" if held else e.value(a, "b64"),
        e.value(b, "b64"), e.value(add, "pred"), a_sign, b_sign, a_transposed, b_transposed))
    scatter(e, d, "d_")
    e.emit("}")


def mbarrier(e, parts, *operands):
    what = parts[1]
    shared = any(p.startswith("shared") for p in parts)
    at = lambda operand: e.address(operand, "u32") if shared else "(u32)emu_to_shared(t, %d, %s)" % (e.site, e.address(operand))
    if what == "init":
        return e.emit("emu_mbar_init(t, %d, %s, %s);" % (e.site, at(operands[0]), e.value(operands[1], "u32")))
    if what == "inval":
        return e.emit("emu_mbar_inval(t, %d, %s);" % (e.site, at(operands[0])))
    if what in ("expect_tx", "complete_tx"):
        name = what.split("_")[0]
        return e.emit("emu_mbar_%s(t, %d, %s, %s);" % (name, e.site, at(operands[0]), e.value(operands[1], "u32")))
    if what in ("arrive", "arrive_drop"):
        operands = list(operands)
        state = operands.pop(0) if not operands[0].startswith("[") else "_"
        given = e.value(operands[1], "u32") if len(operands) > 1 else None
        count, size = ("1", given) if "expect_tx" in parts else (given or "1", "0")
        return e.put(state, "b64", "emu_mbar_arrive(t, %d, %s, %s, %s, %d)" % (e.site, at(operands[0]), count, size, what != "arrive"))
    if what in ("try_wait", "test_wait"):
        phase = e.value(operands[2], "u32") if "parity" in parts else "emu_mbar_parity(%s)" % e.value(operands[2], "b64")
        return e.put(operands[0], "pred", "emu_mbar_wait(t, %d, %s, %s, %d)" % (e.site, at(operands[1]), phase, what == "test_wait"))
    raise NotImplementedError(".".join(parts))


def copy(e, parts, *operands):
    if parts[1] != "async":
        raise NotImplementedError(".".join(parts))
    if parts[2] == "bulk":
        return bulk(e, parts, *operands)
    if parts[2] == "commit_group":
        return e.emit("emu_cp_commit(t);")
    if parts[2] == "wait_group":
        return e.emit("emu_cp_wait(t, %s);" % e.value(operands[0], "u32"))
    if parts[2] == "wait_all":
        return e.emit("emu_cp_wait(t, ~0u);")
    if parts[2] == "mbarrier":
        return e.emit("emu_cp_arrive(t, %d, %s, %d);" % (e.site, e.address(operands[0], "u32"), "noinc" in parts))
    size = int(operands[2])
    policies = sum(p == "cache_hint" for p in parts) or any("cache_hint" in p for p in parts)
    rest = operands[3:-1] if policies else operands[3:]
    live = e.value(rest[0], "u32") if rest else str(size)
    e.emit("emu_cp_async(t, %d, %s, %s, %d, %s);" % (e.site, e.address(operands[0], "u32"), e.address(operands[1]), size, live))


def bulk(e, parts, *operands):
    names = parts[3:]
    if "prefetch" in names or "commit_group" in names or "wait_group" in names:
        # Copies out of shared memory are done at once.
        return
    operands = list(operands)
    if any("cache_hint" in p for p in parts):
        operands.pop()
    blocks = e.value(operands.pop(), "u32") if any(p.startswith("multicast") for p in parts) else "0"
    spaces = [p.split("::")[0] for p in names if p.startswith("shared") or p == "global"]
    if "tensor" in names:
        inward = spaces[0] == "shared"
        tensor = operands[1 if inward else 0].strip()[1:-1]
        m = re.match(r"(.+?),\s*\{(.*)\}$", tensor)
        at = [e.value(x.strip(), "s32") for x in m[2].split(",")]
        e.emit("{ const s32 at_[] = {%s};" % ", ".join(at))
        if inward:
            e.emit("emu_tensor(t, %d, %s, %s, %d, at_, %s, %s); }" % (e.site, e.address(operands[0], "u32"), e.address("[%s]" % m[1]), len(at),
                                                                  e.address(operands[2], "u32"), blocks))
        else:
            e.emit("emu_tensor_out(t, %d, %s, %d, at_, %s); }" % (e.site, e.address("[%s]" % m[1]), len(at), e.address(operands[1], "u32")))
        return
    if spaces == ["shared", "global"]:
        return e.emit("emu_bulk(t, %d, %s, %s, %s, %s, %s);" % (e.site, e.address(operands[0], "u32"), e.address(operands[1]),
                                                              e.value(operands[2], "u32"), e.address(operands[3], "u32"), blocks))
    if spaces == ["global", "shared"]:
        return e.emit("emu_bulk_out(t, %d, %s, %s, %s);" % (e.site, e.address(operands[0]), e.address(operands[1], "u32"), e.value(operands[2], "u32")))
    raise NotImplementedError(".".join(parts))


def call(e, parts, *operands):
    operands = list(operands)
    result = operands.pop(0).strip("() ") if operands[0].startswith("(") else None
    name = operands.pop(0)
    given = [n.strip() for n in operands[0].strip("()").split(",") if n.strip()] if operands else []
    if name == "cudaGraphSetConditional":
        return e.emit("emu_set_condition(t, READ(u64, V%s), READ(u32, V%s));" % tuple(given))
    if all(f.name != name for f in e.module.functions):
        raise NotImplementedError("call of " + name)
    e.emit("{ char* in_[] = {%s}; F%s(t, in_, %s); }" % (", ".join("V" + n for n in given) or "0", name, "V" + result if result else "0"))
