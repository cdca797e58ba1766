"""Arithmetic, bits, predicates and conversions: the part of `translate.Emitter` that computes registers from registers."""
from ptx import SIZES

C_TYPES = {"pred": "_Bool", "b8": "u8", "b16": "u16", "b32": "u32", "b64": "u64", "u8": "u8", "u16": "u16", "u32": "u32", "u64": "u64",
           "s8": "s8", "s16": "s16", "s32": "s32", "s64": "s64", "f32": "f32", "f64": "f64", "f16": "u16", "bf16": "u16",
           "f16x2": "u32", "bf16x2": "u32"}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}


class Unknown(Exception):
    """What the translator does not know."""


def bits_of(kind):
    return SIZES[kind] * 8


class Arithmetic:
    """Methods named after instructions; they use `value`, `put` and `emit` of the emitter."""

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
