"""Translates PTX to C for the runtime of the emulator: `translate.py FILE.ptx` prints the C."""
import re, sys
from ptx import Reader, SIZES, split
from arithmetic import Arithmetic, C_TYPES, Unknown, bits_of
import collectives

SPECIAL = {"%laneid": "t->lane", "%warpid": "t->warp", "%cluster_ctarank": "t->cluster_ctarank",
           "%cluster_nctarank": "t->cluster_nctarank", "%lanemask_lt": "((1u << t->lane) - 1)",
           "%lanemask_le": "((2u << t->lane) - 1)", "%lanemask_eq": "(1u << t->lane)", "%lanemask_gt": "(-(2u << t->lane))",
           "%lanemask_ge": "(-(1u << t->lane))", "%clock": "(u32)emu_clock()", "%clock64": "emu_clock()",
           "%globaltimer": "emu_clock()", "%smid": "0u", "%nsmid": "132u", "%gridid": "1ull", "WARP_SZ": "32"}


class Emitter(Arithmetic):
    """The C of one function."""

    def __init__(self, module, f, sites):
        self.module, self.f, self.sites = module, f, sites
        self.out, self.site, self.caches, self.seen = [], 0, 0, set()
        self.shared_at, self.symbols = {}, {}
        self.layout()

    def layout(self):
        """Places of shared variables: static ones first, then the dynamic memory, at one place in the module."""
        shared = lambda f: [v for v in self.module.variables + f.variables if v.space == "shared"]
        ends = []
        for f in self.module.functions:
            at = 1024
            for v in shared(f):
                if v.bytes:
                    at = -(-at // v.align) * v.align
                    if f is self.f:
                        self.shared_at[v.name] = at
                    at += v.bytes
            ends.append(at)
        end = max(ends)
        for v in shared(self.f):
            if not v.bytes:
                end = self.shared_at[v.name] = -(-end // v.align) * v.align
        self.static = end - 1024
        self.local = sum(v.bytes + v.align for v in self.f.variables if v.space == "local")
        at, self.param_at = 0, {}
        for v in self.f.params:
            at = -(-at // v.align) * v.align
            self.param_at[v.name] = at
            at += v.bytes
        self.param_bytes = at

    # ---- operands -----------------------------------------------------------------------------

    def name(self, operand):
        return "R" + operand.replace("%", "").replace("$", "_")

    def symbol(self, name):
        if name in self.shared_at:
            return "%du" % self.shared_at[name]
        if name in self.param_at:
            if not self.f.entry:
                return "(u64)in[%d]" % list(self.param_at).index(name)
            return "(u64)(t->params + %d)" % self.param_at[name]
        if self.f.result and name == self.f.result.name:
            return "(u64)out"
        if any(v.name == name for v in self.f.variables + self.module.variables):
            return "(u64)V%s" % name.replace("$", "_")
        raise Unknown("operand " + name)

    def value(self, operand, kind):
        """An operand as a C expression of the type."""
        c, bits = C_TYPES[kind], bits_of(kind)
        operand = operand.strip()
        if kind == "pred":
            if operand.startswith("!"):
                return "!" + self.name(operand[1:])
            return str(int(int(operand) != 0)) if re.match(r"-?\d", operand) else self.name(operand)
        negative = operand.startswith("-") and not operand[1:2].isdigit()
        if operand.startswith("0f") or operand.startswith("0F"):
            word = "0x%su" % operand[2:]
            return "u2f(%s)" % word if kind == "f32" else "((%s)%s)" % (c, word)
        if operand.startswith("0d") or operand.startswith("0D"):
            return "u2d(0x%sull)" % operand[2:] if kind == "f64" else "0x%sull" % operand[2:]
        if re.match(r"-?\d", operand):
            number = int(operand.rstrip("U"), 0) if not re.match(r"-?0[0-7]+$", operand) else int(operand, 8)
            if kind in ("f32", "f64"):
                return "%s(0x%xull)" % ("u2f" if kind == "f32" else "u2d", number)
            return "((%s)0x%xull)" % (c, number & (1 << bits) - 1)
        if operand in self.f.registers:
            have, name = self.f.registers[operand], self.name(operand)
            return self.convert(name, have, kind)
        if m := re.match(r"%(tid|ntid|ctaid|nctaid|cluster_ctaid|cluster_nctaid|clusterid|nclusterid)\.([xyz])$", operand):
            return "((%s)t->%s[%d])" % (c, m[1], "xyz".index(m[2]))
        if operand in SPECIAL:
            return "((%s)%s)" % (c, SPECIAL[operand])
        if m := re.match(r"([\w$]+)\s*\+\s*(\d+)$", operand):
            return "((%s)(%s + %s))" % (c, self.symbol(m[1]), m[2])
        if negative:
            raise Unknown("operand " + operand)
        return "((%s)%s)" % (c, self.symbol(operand))

    @staticmethod
    def convert(text, have, want):
        if have == want:
            return text
        if have == "f32":
            return text if want == "f32" else "((%s)f2u(%s))" % (C_TYPES[want], text)
        if have == "f64":
            return text if want == "f64" else "((%s)d2u(%s))" % (C_TYPES[want], text)
        if want == "f32":
            return "u2f(%s)" % text
        if want == "f64":
            return "u2d(%s)" % text
        return "((%s)%s)" % (C_TYPES[want], text)

    def put(self, operand, kind, text):
        """Assigns an expression of the type to a register."""
        if operand == "_":
            self.emit("(void)(%s);" % text)
            return
        have = self.f.registers.get(operand)
        if have is None:
            raise Unknown("register " + operand)
        if have in ("f32", "f64") and kind != have:
            text = "%s((u%d)(%s))" % ("u2f" if have == "f32" else "u2d", bits_of(have), text)
        elif kind in ("f32", "f64") and have != kind:
            text = "%s(%s)" % ("f2u" if kind == "f32" else "d2u", text)
        self.emit("%s = %s;" % (self.name(operand), text))

    def parts(self, operand):
        """Registers of a vector operand, or the one."""
        operand = operand.strip()
        return split(operand[1:-1]) if operand.startswith("{") else [operand]

    def address(self, operand, kind="u64"):
        inner = operand.strip()[1:-1].strip()
        m = re.match(r"(.+?)\s*(\+|-)\s*(-?\w+)$", inner) if not re.match(r"-?\d", inner) else None
        if m:
            offset = int(m[3], 0) * (-1 if m[2] == "-" else 1)
            return "(%s + (%s)%dll)" % (self.value(m[1], kind), kind, offset)
        return self.value(inner, kind)

    def cache(self):
        self.caches += 1
        return "&C[%d]" % (self.caches - 1)

    def emit(self, text):
        self.out.append("    " + text)

    # ---- statements ---------------------------------------------------------------------------

    def body(self):
        for label, statement in self.f.body:
            if label:
                self.out.append("L%s:;" % label.replace("$", "_"))
                self.seen.add(label)
                continue
            self.site = self.sites.setdefault(statement.place, len(self.sites))
            try:
                if statement.guard:
                    self.emit("if (%s) {" % self.value(statement.guard, "pred"))
                self.instruction(statement)
                if statement.guard:
                    self.emit("}")
            except (Unknown, KeyError, ValueError, TypeError, IndexError) as e:
                raise NotImplementedError("%s %s: %s %s" % (statement.op, ", ".join(statement.operands), type(e).__name__, e))

    def instruction(self, s):
        parts = s.op.split(".")
        if collectives.emit(self, s, parts):
            return
        method = getattr(self, "op_" + parts[0], None)
        if method is None:
            raise Unknown("instruction")
        method(parts, *s.operands)

    def op_bra(self, parts, label):
        if label in self.seen:
            self.emit("if (!--emu_fuel) emu_out_of_fuel(t);")
        self.emit("goto L%s;" % label.replace("$", "_"))

    def op_ret(self, parts):
        self.emit("return;")

    op_exit = op_ret

    def op_trap(self, parts):
        self.emit('emu_trap(t, %d, "trap");' % self.site)

    op_brkpt = op_trap

    def nothing(self, parts, *operands):
        pass

    def op_griddepcontrol(self, parts):
        self.emit("emu_grid_%s(t);" % ("wait" if parts[1] == "wait" else "trigger"))

    op_fence = op_membar = op_setmaxnreg = op_prefetch = op_prefetchu = nothing
    op_discard = op_applypriority = nothing

    def op_nanosleep(self, parts, time):
        self.emit("emu_pause(t, %d);" % self.site)

    def op_createpolicy(self, parts, d, *rest):
        self.put(d, "b64", "0ull")

    # ---- moves and memory ---------------------------------------------------------------------

    def op_mov(self, parts, d, a):
        kind = parts[-1]
        if d.startswith("{") or a.startswith("{"):
            return self.pack(kind, d, a)
        self.put(d, kind, self.value(a, kind))

    def pack(self, kind, d, a):
        to, of = self.parts(d), self.parts(a)
        bits = bits_of(kind)
        if len(to) > 1:
            part = bits // len(to)
            self.emit("{ const u%d v = %s;" % (bits, self.value(of[0], "b%d" % bits)))
            for i, register in enumerate(to):
                self.put(register, "b%d" % part, "(u%d)(v >> %d)" % (part, i * part))
            self.emit("}")
        else:
            part = bits // len(of)
            text = " | ".join("(u%d)%s << %d" % (bits, self.value(r, "b%d" % part), i * part) for i, r in enumerate(of))
            self.put(to[0], "b%d" % bits, "(u%d)(%s)" % (bits, text))

    def space(self, parts):
        for p in parts:
            if p in ("global", "shared", "local", "param", "const") or p.startswith("shared::") or p.startswith("param::"):
                return p.split("::")[0]
        return "generic"

    def pointer(self, space, operand, size, writes=False):
        site = "%d | WRITES" % self.site if writes else str(self.site)
        if space == "shared":
            return "emu_shared(t, %d, %s, %d)" % (self.site, self.address(operand, "u32"), size)
        if space == "param":
            return "(char*)%s" % self.address(operand)
        if space == "local":
            return "emu_local(t, %d, %s, %d)" % (self.site, self.address(operand), size)
        if space in ("global", "const"):
            return "emu_global(t, %s, %s, %s, %d)" % (site, self.cache(), self.address(operand), size)
        return "emu_generic(t, %s, %s, %s, %d)" % (site, self.cache(), self.address(operand), size)

    def width(self, parts):
        return next((int(p[1]) for p in parts if p in ("v2", "v4", "v8")), 1)

    def op_ld(self, parts, d, address, policy=None):
        kind, registers = parts[-1], self.parts(d)
        size = SIZES[kind] * self.width(parts)
        self.emit("{ const char* q = %s;" % self.pointer(self.space(parts), address, size))
        if any(p in parts for p in ("volatile", "relaxed", "acquire")):
            self.emit("emu_poll(t, %d, q, %d);" % (self.site, size))
        c = C_TYPES[kind]
        for i, register in enumerate(registers):
            text = "READ(%s, q + %d)" % (c, i * SIZES[kind])
            if register == "_":
                continue
            have = self.f.registers[register]
            if kind in ("s8", "s16", "s32") and SIZES[have] > SIZES[kind]:
                text = "(s%d)%s" % (bits_of(have), text)
            self.put(register, kind, text)
        self.emit("}")

    op_ldu = op_ld

    def op_st(self, parts, address, a, policy=None):
        kind, registers = parts[-1], self.parts(a)
        size = SIZES[kind] * self.width(parts)
        self.emit("{ char* q = %s;" % self.pointer(self.space(parts), address, size, True))
        for i, register in enumerate(registers):
            self.emit("WRITE(%s, q + %d, %s);" % (C_TYPES[kind], i * SIZES[kind], self.value(register, kind)))
        self.emit("emu_progress++; }")

    def op_cvta(self, parts, d, a):
        if "shared" in " ".join(parts):
            if "to" in parts:
                self.put(d, "u64", "emu_to_shared(t, %d, %s)" % (self.site, self.value(a, "u64")))
            else:
                self.put(d, "u64", "(u64)(t->shared + %s)" % self.value(a, "u64"))
        else:
            self.put(d, "u64", self.value(a, "u64"))

    def op_isspacep(self, parts, d, a):
        if "shared" not in parts[1]:
            raise Unknown("space")
        self.put(d, "pred", "(%s - (u64)(t->shared + t->shared_from) < t->shared_to - t->shared_from)" % self.value(a, "u64"))

    def op_mapa(self, parts, d, a, rank):
        kind = parts[-1]
        if "shared::cluster" not in parts:
            raise Unknown("generic mapa")
        self.put(d, kind, "emu_mapa(t, %d, %s, %s)" % (self.site, self.value(a, "u32"), self.value(rank, "u32")))

    def op_atom(self, parts, d, address, b, c=None):
        kind = parts[-1]
        op = next(p for p in parts[1:] if p in ("add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas"))
        registers, values = self.parts(d) if d else [], self.parts(b)
        scalar, size = C_TYPES[kind], SIZES[kind]
        self.emit("{ char* q = %s;" % self.pointer(self.space(parts), address, size * len(values), True))
        for i, v in enumerate(values):
            at = "q + %d" % (i * size)
            self.emit("const %s o%d = READ(%s, %s), v%d = %s;" % (scalar, i, scalar, at, i, self.value(v, kind)))
            o, v = "o%d" % i, "v%d" % i
            if op == "cas":
                text = "%s == %s ? %s : %s" % (o, v, self.value(c, kind), o)
            elif op == "add" and kind in ("f16", "bf16", "f16x2", "bf16x2"):
                text = self.halves(kind, lambda x, y: "%s + %s" % (x, y), o, v)
            else:
                text = {"add": "%s + %s", "min": "%s < %s ? o : v", "max": "%s > %s ? o : v", "and": "%s & %s", "or": "%s | %s", "xor": "%s ^ %s",
                        "exch": "(%s, %s)", "inc": "%s >= %s ? 0 : o + 1", "dec": "%s - 1 < %s ? o - 1 : v"}[op] % (o, v)
                text = re.sub(r"\b([ov])\b", r"\g<1>%d" % i, text)
            self.emit("WRITE(%s, %s, %s);" % (scalar, at, text))
        self.emit("emu_progress++;")
        if len(values) == 1 and registers:
            # A loop of atomics that change nothing waits, too.
            self.emit("if (READ(%s, q) == o0) emu_poll(t, %d, q, %d);" % (scalar, self.site, size))
        for i, r in enumerate(registers):
            self.put(r, kind, "o%d" % i)
        self.emit("}")

    def op_red(self, parts, address, b, policy=None):
        if "async" in parts:
            raise Unknown("red.async")
        self.op_atom(parts, None, address, b)


def variable(v, static):
    name = "V" + v.name.replace("$", "_")
    if v.space == "param":
        return "_Alignas(16) char %s[%d];" % (name, v.bytes)
    values = ""
    count = v.count
    if v.values:
        listed = split(v.values.strip()[1:-1]) if v.values.strip().startswith("{") else [v.values]
        values = " = {%s}" % ", ".join(("0x%s" % x[2:]) if x[:2].lower() in ("0f", "0d") else x for x in listed)
        count = max(count, len(listed))
    kind = {"f32": "u32", "f64": "u64"}.get(v.kind, C_TYPES[v.kind])
    return "%s_Alignas(%d) %s %s[%d]%s;" % ("static " if static else "", max(v.align, SIZES[v.kind]), kind, name, max(count, 1), values)


def translate(text):
    """The C of a module."""
    module = Reader(text).module()
    out, kernels, sites = ['#include "device.h"'], [], {}
    kept = [v for v in module.variables if v.space in ("global", "const")]
    out += [variable(v, True) for v in kept]
    heads = {f.name: "static void F%s(T* t%s)" % (f.name, "" if f.entry else ", char** in, char* out") for f in module.functions}
    out += [head + ";" for head in heads.values()]
    for f in module.functions:
        e = Emitter(module, f, sites)
        e.body()
        used = {}
        for name, kind in f.registers.items():
            used.setdefault(C_TYPES[kind], []).append(e.name(name))
        if e.caches:
            out.append("static struct emu_range none_%s, *C_%s[] = {[0 ... %d] = &none_%s};" % (f.name, f.name, e.caches - 1, f.name))
        body = "\n".join(e.out)
        words = set(re.findall(r"\bR\w+", body))
        out.append(heads[f.name] + " {")
        if e.caches:
            out.append("    struct emu_range** const C = C_%s;" % f.name)
        out.append("    u32 CC = 0;")
        for kind, names in used.items():
            names = [n for n in names if n in words]
            for i in range(0, len(names), 20):
                out.append("    %s %s;" % (kind, ", ".join(names[i:i + 20])))
        out += ["    " + variable(v, False) for v in f.variables if v.space in ("local", "param")]
        out += [body, "}"]
        if not f.entry:
            continue
        at = ", ".join(str(e.param_at[v.name]) for v in f.params) or "0"
        size = ", ".join(str(v.bytes) for v in f.params) or "0"
        out.append("static const u32 at_%s[] = {%s}, size_%s[] = {%s};" % (f.name, at, f.name, size))
        kernels.append('{"%s", F%s, %d, %d, %d, %d, at_%s, size_%s, %d, SITES, FILES, %s}' % (
            f.name, f.name, e.static, e.local, e.param_bytes, len(f.params), f.name, f.name, f.max_threads,
            "C_%s, &none_%s, %d" % (f.name, f.name, e.caches) if e.caches else "0, 0, 0"))
    files = {n: i for i, n in enumerate(sorted({p[k] for p in sites for k in (0, 2)}))}
    names = Reader(text).files
    out.append("static const char* const FILES[] = {%s};" % ", ".join('"%s"' % names.get(n, "?") for n in files))
    out.append("static const struct emu_site SITES[] = {%s};" % ", ".join("{%d, %d, %d, %d}" % (files[p[0]], p[1], files[p[2]], p[3]) for p in sites))
    out.append("static const struct emu_kernel KERNELS[] = {%s};" % ", ".join(kernels))
    out.append("static const struct emu_variable VARIABLES[] = {%s};" % (", ".join(
        '{"%s", V%s, sizeof V%s}' % (v.name, v.name.replace("$", "_"), v.name.replace("$", "_")) for v in kept) or "{0}"))
    out.append("const struct emu_module emu_module = {%d, %d, KERNELS, VARIABLES};" % (len(kernels), len(kept)))
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    sys.stdout.write(translate(open(sys.argv[1]).read()))
