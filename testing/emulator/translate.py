"""Translates PTX to C for the runtime of the emulator: `translate.py FILE.ptx` prints the C."""
import re, sys
from ptx import Reader, SIZES, split
import collectives

C_TYPES = {"pred": "_Bool", "b8": "u8", "b16": "u16", "b32": "u32", "b64": "u64", "u8": "u8", "u16": "u16", "u32": "u32", "u64": "u64",
           "s8": "s8", "s16": "s16", "s32": "s32", "s64": "s64", "f32": "f32", "f64": "f64", "f16": "u16", "bf16": "u16",
           "f16x2": "u32", "bf16x2": "u32"}
SPECIAL = {"%laneid": "t->lane", "%warpid": "t->warp", "%cluster_ctarank": "t->cluster_ctarank",
           "%cluster_nctarank": "t->cluster_nctarank", "%lanemask_lt": "((1u << t->lane) - 1)",
           "%lanemask_le": "((2u << t->lane) - 1)", "%lanemask_eq": "(1u << t->lane)", "%lanemask_gt": "(-(2u << t->lane))",
           "%lanemask_ge": "(-(1u << t->lane))", "%clock": "(u32)emu_clock()", "%clock64": "emu_clock()",
           "%globaltimer": "emu_clock()", "%smid": "0u", "%nsmid": "132u", "%gridid": "1ull", "WARP_SZ": "32"}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}


class Unknown(Exception):
    pass


def bits_of(kind):
    return SIZES[kind] * 8


class Emitter:
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
        self.emit("emu_poll(t, %d);" % self.site)

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
        if any(p in parts for p in ("volatile", "relaxed", "acquire")):
            self.emit("emu_poll(t, %d);" % self.site)
        self.emit("{ const char* q = %s;" % self.pointer(self.space(parts), address, size))
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
        for i, r in enumerate(registers):
            self.put(r, kind, "o%d" % i)
        self.emit("}")

    def op_red(self, parts, address, b, policy=None):
        if "async" in parts:
            raise Unknown("red.async")
        self.op_atom(parts, None, address, b)

    # ---- arithmetic ---------------------------------------------------------------------------

    def halves(self, kind, f, *values):
        """An operation on f16 or bf16 numbers, one or two, rounded once."""
        widen, narrow = ("h2f", "f2h") if kind.startswith("f16") else ("b2f", "f2b")
        half = lambda v, i: "(f64)%s((u16)((%s) >> %d))" % (widen, v, 16 * i)
        one = lambda i: "%s(d2f_odd(%s))" % (narrow, f(*[half(v, i) for v in values]))
        return "(u32)%s | (u32)%s << 16" % (one(0), one(1)) if kind.endswith("x2") else one(0)

    def finish(self, parts, text):
        if "ftz" in parts:
            text = "ftz(%s)" % text
        return "sat(%s)" % text if "sat" in parts else text

    def directed(self, parts):
        """The function that rounds a double to a float in the direction that the instruction names."""
        mode = next((r for r in ("rz", "rm", "rp") if r in parts), None)
        if mode and parts[-1] != "f32":
            raise Unknown("rounding")
        return mode and "d2f_" + mode

    def arithmetic(self, parts, sign, d, a, b):
        kind = parts[-1]
        if kind in ("f16", "bf16", "f16x2", "bf16x2"):
            x, y = self.value(a, kind), self.value(b, kind)
            return self.put(d, kind, self.halves(kind, lambda p, q: "%s %s %s" % (p, sign, q), x, y))
        x, y = self.value(a, kind), self.value(b, kind)
        if kind in ("f32", "f64"):
            if "ftz" in parts:
                x, y = "ftz(%s)" % x, "ftz(%s)" % y
            if directed := self.directed(parts):
                return self.put(d, kind, self.finish(parts, "%s((f64)%s %s (f64)%s)" % (directed, x, sign, y)))
            return self.put(d, kind, self.finish(parts, "(%s %s %s)" % (x, sign, y)))
        if "sat" in parts or "cc" in parts:
            return self.carry(parts, sign, d, x, y, kind)
        u = "u%d" % bits_of(kind)
        self.put(d, kind, "(%s)((%s)%s %s (%s)%s)" % (u, u, x, sign, u, y))

    def carry(self, parts, sign, d, x, y, kind):
        if "sat" in parts or sign != "+" or bits_of(kind) != 32:
            raise Unknown("saturation or borrow")
        self.emit("{ const u64 v = (u64)(u32)%s + (u32)%s; CC = v >> 32;" % (x, y))
        self.put(d, "u32", "(u32)v")
        self.emit("}")

    def op_addc(self, parts, d, a, b):
        self.emit("{ const u64 v = (u64)%s + %s + CC; CC = v >> 32;" % (self.value(a, "u32"), self.value(b, "u32")))
        self.put(d, "u32", "(u32)v")
        self.emit("}")

    def op_add(self, parts, d, a, b):
        self.arithmetic(parts, "+", d, a, b)

    def op_sub(self, parts, d, a, b):
        self.arithmetic(parts, "-", d, a, b)

    def op_mul(self, parts, d, a, b):
        kind = parts[-1]
        if kind[0] in "fb":
            return self.arithmetic(parts, "*", d, a, b)
        self.put(d, *self.product(parts, a, b))

    op_mul24 = op_mul

    def product(self, parts, a, b):
        kind, bits = parts[-1], bits_of(parts[-1])
        x, y, sign = self.value(a, kind), self.value(b, kind), kind[0]
        if "wide" in parts:
            wide = "%s%d" % (sign, bits * 2)
            return wide, "((%s)%s * (%s)%s)" % (wide, x, wide, y)
        if "hi" in parts:
            if bits == 64:
                return kind, "%s(%s, %s)" % ("mulhi64s" if sign == "s" else "mulhi64", x, y)
            return kind, "(%s)((%s64)%s * (%s64)%s >> %d)" % (C_TYPES[kind], sign, x, sign, y, bits)
        return kind, "(u%d)((u64)%s * (u64)%s)" % (bits, x, y)

    def op_mad(self, parts, d, a, b, c):
        if parts[-1][0] == "f":
            return self.op_fma(parts, d, a, b, c)
        if "cc" in parts:
            raise Unknown("carry")
        kind, text = self.product(parts, a, b)
        self.put(d, kind, "(u%d)(%s + %s)" % (bits_of(kind), text, self.value(c, kind)))

    op_mad24 = op_mad

    def op_fma(self, parts, d, a, b, c):
        kind = parts[-1]
        x, y, z = (self.value(v, kind) for v in (a, b, c))
        if kind in ("f16", "bf16", "f16x2", "bf16x2"):
            text = self.halves(kind, lambda p, q, r: "fma(%s, %s, %s)" % (p, q, r), x, y, z)
            if "relu" in parts:
                raise Unknown("relu")
            return self.put(d, kind, text)
        if "ftz" in parts:
            x, y, z = ("ftz(%s)" % v for v in (x, y, z))
        if directed := self.directed(parts):
            return self.put(d, kind, self.finish(parts, "%s(fma(%s, %s, %s))" % (directed, x, y, z)))
        self.put(d, kind, self.finish(parts, "%s(%s, %s, %s)" % ("fmaf" if kind == "f32" else "fma", x, y, z)))

    def op_div(self, parts, d, a, b):
        kind = parts[-1]
        x, y = self.value(a, kind), self.value(b, kind)
        if kind in ("f32", "f64"):
            if "ftz" in parts:
                x, y = "ftz(%s)" % x, "ftz(%s)" % y
            return self.put(d, kind, self.finish(parts, "(%s / %s)" % (x, y)))
        self.put(d, kind, "(%s ? %s / %s : (%s)-1)" % (y, x, y, C_TYPES[kind]))

    def op_rem(self, parts, d, a, b):
        kind = parts[-1]
        x, y = self.value(a, kind), self.value(b, kind)
        self.put(d, kind, "(%s ? %s %% %s : %s)" % (y, x, y, x))

    def unary(self, parts, d, a, f):
        kind = parts[-1]
        x = self.value(a, kind)
        if "ftz" in parts:
            x = "ftz(%s)" % x
        self.put(d, kind, self.finish(parts, f % x))

    def op_rcp(self, parts, d, a):
        self.unary(parts, d, a, "(1.0f / %s)" if parts[-1] == "f32" else "(1.0 / %s)")

    def op_sqrt(self, parts, d, a):
        self.unary(parts, d, a, "sqrtf(%s)" if parts[-1] == "f32" else "sqrt(%s)")

    def op_rsqrt(self, parts, d, a):
        self.unary(parts, d, a, "(f32)(1.0 / sqrt(%s))")

    def transcendental(self, parts, d, a, f):
        if parts[-1] in ("f16", "bf16", "f16x2", "bf16x2"):
            return self.put(d, parts[-1], self.halves(parts[-1], lambda x: f.replace("f(", "(") % x, self.value(a, parts[-1])))
        self.unary(parts, d, a, f)

    def op_ex2(self, parts, d, a):
        self.transcendental(parts, d, a, "exp2f(%s)")

    def op_lg2(self, parts, d, a):
        self.transcendental(parts, d, a, "log2f(%s)")

    def op_sin(self, parts, d, a):
        self.transcendental(parts, d, a, "sinf(%s)")

    def op_cos(self, parts, d, a):
        self.transcendental(parts, d, a, "cosf(%s)")

    def op_tanh(self, parts, d, a):
        self.transcendental(parts, d, a, "tanhf(%s)")

    def op_copysign(self, parts, d, a, b):
        kind = parts[-1]
        self.put(d, kind, "copysign%s(%s, %s)" % ("f" if kind == "f32" else "", self.value(b, kind), self.value(a, kind)))

    def op_testp(self, parts, d, a):
        kind, f = parts[-1], {"finite": "isfinite", "infinite": "isinf", "notanumber": "isnan", "number": "!isnan"}[parts[1]]
        self.put(d, "pred", "%s(%s)" % (f, self.value(a, kind)))

    def signs(self, parts, d, a, mask, op):
        kind = parts[-1]
        self.put(d, kind, "(%s)(%s %s %s)" % (C_TYPES[kind], self.value(a, kind), op, mask))

    def op_neg(self, parts, d, a):
        kind = parts[-1]
        if kind in ("f16", "bf16", "f16x2", "bf16x2"):
            return self.signs(parts, d, a, "0x80008000u", "^")
        if kind in ("f32", "f64"):
            return self.unary(parts, d, a, "(-%s)")
        self.put(d, kind, "(u%d)(0 - (u%d)%s)" % (bits_of(kind), bits_of(kind), self.value(a, kind)))

    def op_abs(self, parts, d, a):
        kind = parts[-1]
        if kind in ("f16", "bf16", "f16x2", "bf16x2"):
            return self.signs(parts, d, a, "0x7fff7fffu", "&")
        if kind in ("f32", "f64"):
            return self.unary(parts, d, a, "fabsf(%s)" if kind == "f32" else "fabs(%s)")
        x = self.value(a, kind)
        self.put(d, kind, "(%s < 0 ? (s%d)(0 - (u%d)%s) : %s)" % (x, bits_of(kind), bits_of(kind), x, x))

    def extreme(self, parts, d, a, b, c, name, sign):
        kind = parts[-1]
        if c is not None:
            raise Unknown("three operands")
        x, y = self.value(a, kind), self.value(b, kind)
        if kind[0] in "us":
            text = "(%s %s %s ? %s : %s)" % (x, sign, y, x, y)
            return self.put(d, kind, "(%s < 0 ? 0 : %s)" % (text, text) if "relu" in parts else text)
        f = "f%s_nan" % name if "NaN" in parts else "f%s_" % name
        if kind == "f64":
            return self.put(d, kind, "f%s(%s, %s)" % (name, x, y))
        if kind in ("f16", "bf16", "f16x2", "bf16x2"):
            return self.put(d, kind, self.halves(kind, lambda p, q: "(f64)%s(%s, %s)" % (f, p, q), x, y))
        if "ftz" in parts:
            x, y = "ftz(%s)" % x, "ftz(%s)" % y
        self.put(d, kind, "%s(%s, %s)" % (f, x, y))

    def op_min(self, parts, d, a, b, c=None):
        self.extreme(parts, d, a, b, c, "min", "<")

    def op_max(self, parts, d, a, b, c=None):
        self.extreme(parts, d, a, b, c, "max", ">")

    # ---- bits ---------------------------------------------------------------------------------

    def bitwise(self, parts, d, a, b, sign):
        kind = parts[-1]
        self.put(d, kind, "(%s)(%s %s %s)" % (C_TYPES[kind], self.value(a, kind), sign, self.value(b, kind)))

    def op_and(self, parts, d, a, b):
        self.bitwise(parts, d, a, b, "&")

    def op_or(self, parts, d, a, b):
        self.bitwise(parts, d, a, b, "|")

    def op_xor(self, parts, d, a, b):
        self.bitwise(parts, d, a, b, "^")

    def op_not(self, parts, d, a):
        kind = parts[-1]
        self.put(d, kind, ("!%s" if kind == "pred" else "(" + C_TYPES[kind] + ")~%s") % self.value(a, kind))

    def op_cnot(self, parts, d, a):
        self.put(d, parts[-1], "!%s" % self.value(a, parts[-1]))

    def op_shl(self, parts, d, a, n):
        bits = bits_of(parts[-1])
        text = "shl%d(%s, %s)" % (max(bits, 32), self.value(a, "b%d" % bits), self.value(n, "u32"))
        self.put(d, parts[-1], "(u%d)%s" % (bits, text))

    def op_shr(self, parts, d, a, n):
        kind, bits = parts[-1], bits_of(parts[-1])
        f = "sar" if kind[0] == "s" else "shr"
        self.put(d, kind, "(%s)%s%d(%s, %s)" % (C_TYPES[kind], f, max(bits, 32), self.value(a, kind), self.value(n, "u32")))

    def op_shf(self, parts, d, a, b, n):
        amount = self.value(n, "u32")
        amount = "(%s & 31)" % amount if "wrap" in parts else "(%s > 32 ? 32 : %s)" % (amount, amount)
        self.put(d, "b32", "shf_%s(%s, %s, %s)" % (parts[1], self.value(a, "b32"), self.value(b, "b32"), amount))

    def op_bfe(self, parts, d, a, at, length):
        kind = parts[-1]
        self.put(d, kind, "(%s)bfe_%s(%s, %s, %s, %d)" % (C_TYPES[kind], kind[0], self.value(a, kind), self.value(at, "u32"),
                                                       self.value(length, "u32"), bits_of(kind)))

    def op_bfi(self, parts, d, a, b, at, length):
        kind = parts[-1]
        self.put(d, kind, "(%s)bfi_(%s, %s, %s, %s, %d)" % (C_TYPES[kind], self.value(a, kind), self.value(b, kind), self.value(at, "u32"),
                                                        self.value(length, "u32"), bits_of(kind)))

    def op_bfind(self, parts, d, a):
        kind = parts[-1]
        x, bits = self.value(a, kind), bits_of(kind)
        if kind[0] == "s":
            x = "(%s < 0 ? ~%s : %s)" % (x, x, x)
        top = "clz%d(%s)" % (bits, x)
        self.put(d, "u32", "(%s == %d ? ~0u : %s)" % (top, bits, top if "shiftamt" in parts else "%d - %s" % (bits - 1, top)))

    def op_brev(self, parts, d, a):
        self.put(d, parts[-1], "brev%d(%s)" % (bits_of(parts[-1]), self.value(a, parts[-1])))

    def op_clz(self, parts, d, a):
        self.put(d, "u32", "clz%d(%s)" % (bits_of(parts[-1]), self.value(a, parts[-1])))

    def op_popc(self, parts, d, a):
        self.put(d, "u32", "(u32)__builtin_popcountll(%s)" % self.value(a, parts[-1]))

    def op_prmt(self, parts, d, a, b, c):
        if len(parts) > 2:
            raise Unknown("prmt mode")
        self.put(d, "b32", "prmt_(%s, %s, %s)" % tuple(self.value(v, "b32") for v in (a, b, c)))

    def op_lop3(self, parts, d, a, b, c, table):
        if len(parts) > 2:
            raise Unknown("lop3 mode")
        self.put(d, "b32", "lop3_(%s, %s, %s, %s)" % tuple(self.value(v, "b32") for v in (a, b, c, table)))

    def op_dp4a(self, parts, d, a, b, c):
        signs = tuple(int(p[0] == "s") for p in parts[-2:])
        self.put(d, "b32", "dp4a_(%s, %s, %s, %d, %d)" % (tuple(self.value(v, "b32") for v in (a, b, c)) + signs))

    # ---- predicates and conversions -----------------------------------------------------------

    def comparison(self, op, kind, x, y, flush):
        if kind[0] == "f" or kind.startswith("bf"):
            if kind in ("f16", "bf16"):
                widen = "h2f(%s)" if kind == "f16" else "b2f(%s)"
                x, y = widen % x, widen % y
            if flush:
                x, y = "ftz(%s)" % x, "ftz(%s)" % y
            if op in ("num", "nan"):
                return "%s__builtin_isunordered(%s, %s)" % ("!" if op == "num" else "", x, y)
            plain = op[:-1] if op.endswith("u") else op
            text = "(%s %s %s)" % (x, COMPARE[plain], y)
            if op.endswith("u"):
                return "(__builtin_isunordered(%s, %s) || %s)" % (x, y, text)
            return "(!__builtin_isunordered(%s, %s) && %s)" % (x, y, text) if op == "ne" else text
        return "(%s %s %s)" % (x, COMPARE[op], y)

    def op_setp(self, parts, d, a, b, c=None):
        kind, op = parts[-1], parts[1]
        if kind.endswith("x2"):
            raise Unknown("pairs")
        text = self.comparison(op, kind, self.value(a, kind), self.value(b, kind), "ftz" in parts)
        both = d.split("|")
        self.emit("{ const _Bool v = %s;" % text)
        if c is None:
            values = ["v", "!v"]
        else:
            sign = {"and": "&&", "or": "||", "xor": "!="}[parts[2]]
            other = self.value(c, "pred")
            values = ["v %s %s" % (sign, other), "!v %s %s" % (sign, other)]
        if len(both) > 1:
            self.emit("const _Bool w = %s;" % values[1])
        self.put(both[0], "pred", values[0])
        if len(both) > 1:
            self.put(both[1], "pred", "w")
        self.emit("}")

    def op_set(self, parts, d, a, b):
        kind, to = parts[-1], parts[-2]
        text = self.comparison(parts[1], kind, self.value(a, kind), self.value(b, kind), "ftz" in parts)
        if kind.endswith("x2"):
            raise Unknown("pairs")
        self.put(d, to, "(%s ? %s)" % (text, "1.0f : 0.0f" if to == "f32" else "~0u : 0u"))

    def op_selp(self, parts, d, a, b, p):
        kind = parts[-1]
        self.put(d, kind, "(%s ? %s : %s)" % (self.value(p, "pred"), self.value(a, kind), self.value(b, kind)))

    def op_slct(self, parts, d, a, b, c):
        kind = parts[1]
        self.put(d, kind, "(%s >= 0 ? %s : %s)" % (self.value(c, parts[-1]), self.value(a, kind), self.value(b, kind)))

    def op_cvt(self, parts, d, *operands):
        to, of = parts[-2], parts[-1]
        a = operands[0]
        small = {"e4m3x2": ("e4m3", 8), "e5m2x2": ("e5m2", 8), "e2m1x2": ("e2m1", 4)}
        if to in small:
            name, bits = small[to]
            hi, lo = operands[:2] if of == "f32" else (None, None)
            if hi is None:
                pair, widen = self.value(a, "b32"), "h2f" if of == "f16x2" else "b2f"
                hi, lo = "%s((u16)(%s >> 16))" % (widen, pair), "%s((u16)%s)" % (widen, pair)
            else:
                hi, lo = self.value(hi, "f32"), self.value(lo, "f32")
            wide = "b16" if bits == 8 else "b8"
            return self.put(d, wide, "(u16)(emu_f2%s(%s) << %d | emu_f2%s(%s))" % (name, hi, bits, name, lo))
        if of in small:
            name, bits = small[of]
            pair = self.value(a, "b16")
            text = " | ".join("(u32)f2h(emu_%s(%s >> %d & %d)) << %d" % (name, pair, i * bits, (1 << bits) - 1, 16 * i) for i in (0, 1))
            return self.put(d, "b32", text)
        if to in ("f16x2", "bf16x2"):
            narrow = "f2h" if to == "f16x2" else "f2b"
            return self.put(d, "b32", "(u32)%s << 16 | %s" % tuple(self.narrowed(parts, narrow, self.value(v, "f32")) for v in operands))
        x = self.value(a, of)
        floats = {"f16": "h2f(%s)", "bf16": "b2f(%s)", "f32": "%s", "f64": "%s"}
        if of in floats:
            x = floats[of] % x
            if "ftz" in parts and of in ("f32",):
                x = "ftz(%s)" % x
        mode = next((i for i, m in enumerate(("rni", "rzi", "rmi", "rpi")) if m in parts), None)
        if to in floats:
            return self.to_float(parts, d, to, of, x, mode)
        bits, sign = bits_of(to), to[0]
        if of in floats:
            if to == "u64":
                return self.put(d, to, "to_u64(%s, %d)" % (x, mode))
            low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if sign == "s" else (0, (1 << bits) - 1)
            top = "0x1p63" if to == "s64" else "%d.0" % high
            return self.put(d, to, "(%s)to_int(%s, %d, %d.0, %s)" % (C_TYPES[to], x, mode, low, top))
        text = "(%s)%s" % (C_TYPES[to], x)
        if "sat" in parts:
            low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if sign == "s" else (0, (1 << bits) - 1)
            text = "({ const __int128 w = %s; (%s)(w < %dll ? %dll : w > %dll ? %dll : w); })" % (x, C_TYPES[to], low, low, high, high)
        self.put(d, to, self.extended(d, text, to))

    def extended(self, d, text, kind):
        """A narrow integer goes into a wider register with its sign or zeros."""
        have = self.f.registers.get(d)
        if have and have[0] in "bus" and SIZES[have] > SIZES[kind] and kind[0] == "s":
            return "(s%d)%s" % (bits_of(have), text)
        return text

    def narrowed(self, parts, f, x):
        if "relu" in parts:
            x = "fmax_(%s, 0.0f)" % x
        if "satfinite" in parts and f == "f2h":
            x = "fmax_nan(fmin_nan(%s, 65504.0f), -65504.0f)" % x
        return "%s(%s)" % (f, x)

    def to_float(self, parts, d, to, of, x, mode):
        if mode is not None:
            x = "%s(%s)" % (("nearbyint", "trunc", "floor", "ceil")[mode], x)
        directed = next((r for r in ("rz", "rm", "rp") if r in parts), None)
        if to in ("f16", "bf16"):
            if directed:
                raise Unknown("rounding")
            if of[0] in "us" or of == "f64":
                x = "d2f_odd((f64)%s)" % x
            return self.put(d, to, self.narrowed(parts, "f2h" if to == "f16" else "f2b", x))
        if directed:
            if to != "f32":
                raise Unknown("rounding")
            return self.put(d, to, "d2f_%s((f64)%s)" % (directed, x))
        self.put(d, to, self.finish(parts, "(%s)%s" % (to, x)))


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
