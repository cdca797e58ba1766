"""Reads PTX: modules, functions, statements with their place in the source."""
import re

DECLARATION = re.compile(r"\.(align|b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64)\b")
SIZES = {"pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4,
         "f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16}


class Variable:
    """A variable in shared, global, constant or local memory, or a parameter."""

    def __init__(self, space, align, kind, name, count, values):
        self.space, self.align, self.kind, self.name, self.count, self.values = space, align, kind, name, count, values
        self.bytes = SIZES[kind] * count

    @staticmethod
    def parse(text):
        m = re.match(r"(?:\.(?:visible|extern|weak|common)\s+)*\.(shared|global|const|local|param)\s+(.*)$", text.strip(), re.S)
        space, rest = m[1], m[2]
        align = re.search(r"\.align\s+(\d+)", rest)
        rest = re.sub(r"\.(align\s+\d+|ptr|global|attribute\([^)]*\)|visible|managed)\s*", "", rest)
        kind, name, extent, values = re.match(r"\.(\w+)\s+([\w$]+)\s*((?:\[\d*\])*)\s*(?:=\s*(.*))?$", rest, re.S).groups()
        count = 1
        for n in re.findall(r"\[(\d*)\]", extent):
            count *= int(n or 0)
        return Variable(space, int(align[1]) if align else SIZES[kind], kind, name, count, values)


class Statement:
    """One instruction: its guard, its parts, its operands and its place (file, line, file and line it was inlined at)."""

    def __init__(self, guard, op, operands, place, scope):
        self.guard, self.op, self.operands, self.place, self.scope = guard, op, operands, place, scope


class Function:
    def __init__(self, name, entry):
        self.name, self.entry, self.result = name, entry, None
        self.params, self.variables, self.registers, self.body, self.max_threads = [], [], {}, [], 0


def split(text):
    """Operands, split at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "[{(":
            depth += 1
        elif c in "]})":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return [p for p in parts if p]


class Reader:
    def __init__(self, text):
        self.files = {int(n): name for n, name in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M)}
        text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
        self.text = re.sub(r"//[^\n]*", "", text)
        self.at, self.variables, self.functions = 0, [], []

    def module(self):
        text, directive = self.text, re.compile(r"\s*(?:\.version|\.target|\.address_size|\.file|\.pragma)[^\n]*\n|\s+")
        while True:
            while m := directive.match(text, self.at):
                self.at = m.end()
            if self.at >= len(text):
                return self
            if text.startswith(".section", self.at):
                self.at = text.index("}", self.at) + 1
                continue
            m = re.compile(r"((?:\.\w+\s+)*?)\.(entry|func)\b").match(text, self.at)
            if m:
                self.function(m)
            else:
                end = text.index(";", self.at)
                self.variables.append(Variable.parse(text[self.at:end]))
                self.at = end + 1

    def function(self, m):
        end = re.compile("[{;]").search(self.text, m.end())
        head = self.text[m.end():end.start()]
        if end[0] == ";":
            # Declared only.
            self.at = end.end()
            return
        result, name, params = re.match(r"\s*(?:\((.*?)\))?\s*([\w$]+)\s*(?:\((.*?)\))?", head, re.S).groups()
        f = Function(name, m[2] == "entry")
        f.result = Variable.parse(result) if result else None
        params = params or ""
        f.params = [Variable.parse(p) for p in split(params)]
        threads = re.search(r"\.(?:maxntid|reqntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", head)
        if threads:
            f.max_threads = int(threads[1]) * int(threads[2] or 1) * int(threads[3] or 1)
        self.at = self.text.index("{", m.end()) + 1
        self.body(f)
        self.functions.append(f)

    def body(self, f):
        text, scopes, count, place = self.text, [{}], 0, (0, 0, 0, 0)
        blank, label = re.compile(r"\s+"), re.compile(r"([\w$]+)\s*:(?!:)")
        while True:
            m = blank.match(text, self.at)
            if m:
                self.at = m.end()
            c = text[self.at]
            if c == "{":
                count += 1
                scopes.append({"": count})
                self.labels(scopes[-1])
                self.at += 1
            elif c == "}":
                self.at += 1
                scopes.pop()
                if not scopes:
                    return
            elif text.startswith(".loc", self.at):
                end = text.index("\n", self.at)
                n = re.match(r"\.loc\s+(\d+)\s+(\d+)\s+\d+(?:.*inlined_at\s+(\d+)\s+(\d+))?", text[self.at:end])
                place = tuple(int(x or 0) for x in n.groups())
                self.at = end
            elif m := label.match(text, self.at):
                f.body.append((self.scoped(m[1], scopes), None))
                self.at = m.end()
            else:
                end = text.index(";", self.at)
                self.statement(f, text[self.at:end], scopes, place)
                self.at = end + 1

    def labels(self, scope):
        """Finds the labels of a scope, so that branches forward know them."""
        depth, i, text = 0, self.at, self.text
        while True:
            c = text[i]
            depth += (c == "{") - (c == "}")
            if depth == 0:
                break
            i += 1
        for name in re.findall(r"(?:^|[;{}\s])([A-Za-z_$][\w$]*)\s*:(?!:)", text[self.at + 1:i]):
            scope[name] = "S%d_%s" % (scope[""], name)

    @staticmethod
    def scoped(name, scopes):
        for scope in reversed(scopes):
            if name in scope:
                return scope[name]
        return name

    def statement(self, f, text, scopes, place):
        text = " ".join(text.split())
        if text.startswith(".reg"):
            kind, names = re.match(r"\.reg \.(\w+) (.*)$", text).groups()
            for name in split(names):
                m = re.match(r"([%\w$]+?)<(\d+)>$", name)
                if m:
                    for i in range(int(m[2])):
                        f.registers["%s%d" % (m[1], i)] = kind
                else:
                    unique = name if len(scopes) == 1 else "S%d_%s" % (scopes[-1][""], name.lstrip("%"))
                    scopes[-1][name] = unique
                    f.registers[unique] = kind
            return
        if re.match(r"\.(shared|local|param|global|const)\b", text):
            v = Variable.parse(text)
            # Parameters of calls have the same names in every call: one place is large enough for each.
            same = next((known for known in f.variables if v.space == "param" and known.name == v.name), None)
            if same:
                same.bytes = max(same.bytes, v.bytes)
            else:
                f.variables.append(v)
            return
        if text.startswith(".pragma") or text.startswith(".branchtargets"):
            return
        m = re.match(r"(?:@(!?[%\w$]+) )?([\w.:]+)\s*(.*)$", text)
        guard, op, rest = m.groups()
        local = {k: v for scope in scopes for k, v in scope.items() if k}
        if local:
            swap = lambda n: local.get(n[0], n[0])
            rest = re.sub(r"[%A-Za-z_$][\w$]*", swap, rest)
            guard = guard and re.sub(r"[%A-Za-z_$][\w$]*", swap, guard)
        f.body.append((None, Statement(guard, op, split(rest), place, scopes[-1])))
