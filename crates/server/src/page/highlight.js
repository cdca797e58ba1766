// Colours for code: a list of tokens per family of languages, found by regular expressions whose time
// is linear in the code. The tokens' texts joined are always the code itself.
//
// Classes: k keyword, l literal, s string, c comment, n number, f function, t type, p name of a
// property or option, a added line, d deleted line, m line of a diff's head.

const LONGEST = 100_000; // characters; longer code stays without colours
const END = "(?![\\s\\S])";
const words = (text) => new Set(text.split(" "));

const DOUBLE = `"(?:[^"\\\\\\n]|\\\\[\\s\\S])*(?:"|(?=\\n)|\\\\?${END})`;
const SINGLE = `'(?:[^'\\\\\\n]|\\\\[\\s\\S])*(?:'|(?=\\n)|\\\\?${END})`;
const BACKTICK = `\`(?:[^\`\\\\]|\\\\[\\s\\S])*(?:\`|\\\\?${END})`;
const SLASHES = "\\/\\/[^\\n]*";
const STARRED = `\\/\\*[\\s\\S]*?(?:\\*\\/|${END})`;
const HASH = "#[^\\n]*";
const NUMBER = "\\b(?:0[xX][\\da-fA-F_]+|0[bB][01_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\w*";
const WORD = "[A-Za-z_$][\\w$]*";

const C = {
  rules: [["c", SLASHES], ["c", STARRED], ["s", DOUBLE], ["s", SINGLE], ["m", "^[ \\t]*#[ \\t]*\\w+"], ["n", NUMBER], ["w", WORD]],
  keywords: words("abstract alignas alignof as asm async auto await base bool boolean break byte case catch chan char class co_await co_return co_yield concept const consteval constexpr constinit continue data default defer delegate delete do double else enum event explicit export extends extern fallthrough final finally fixed float fn for foreach friend fun func go goto guard if implements import in inline inner instanceof int interface internal is lateinit let lock long map match mut mutable namespace native new noexcept nonlocal object open operator out override package params private protected protocol public range readonly ref register requires return sealed select short signed sizeof static static_assert static_cast strictfp struct super suspend switch synchronized template this throw throws transient try type typedef typeid typename typeof union unsigned using val var virtual void volatile when where while yield"),
  literals: words("true false null nil nullptr NULL iota undefined"),
};
const JS = {
  rules: [["c", SLASHES], ["c", STARRED], ["s", BACKTICK], ["s", DOUBLE], ["s", SINGLE], ["n", NUMBER], ["w", WORD]],
  keywords: words("abstract any as async await boolean break case catch class const continue debugger declare default delete do else enum export extends finally for from function get if implements import in infer instanceof interface is keyof let namespace never new number of private protected public readonly return satisfies set static string super switch this throw try type typeof unknown var void while with yield"),
  literals: words("true false null undefined NaN Infinity"),
};
const RUST = {
  rules: [["c", SLASHES], ["c", STARRED], ["s", `b?r#+"[\\s\\S]*?(?:"#|${END})`], ["s", `[bc]?"(?:[^"\\\\]|\\\\[\\s\\S])*(?:"|\\\\?${END})`],
    ["s", "b?'(?:\\\\[^'\\n]{1,9}|\\\\'|[^'\\\\\\n])'"], ["l", "'[a-z_]\\w*"], ["m", "#!?\\[[^\\]\\n]*\\]?"], ["n", NUMBER], ["f", "\\b[a-z_]\\w*!(?!=)"], ["w", WORD]],
  keywords: words("as async await box break const continue crate dyn else enum extern fn for if impl in let loop macro_rules match mod move mut pub ref return self Self static struct super trait type union unsafe use where while yield"),
  literals: words("true false"),
};
const PYTHON = {
  rules: [["c", HASH], ["s", `[rbfuRBFU]{0,2}"""[\\s\\S]*?(?:"""|${END})`], ["s", `[rbfuRBFU]{0,2}'''[\\s\\S]*?(?:'''|${END})`],
    ["s", `\\b[rbfuRBFU]{1,2}(?=["'])`], ["s", DOUBLE], ["s", SINGLE], ["m", "^[ \\t]*@[\\w.]+"], ["n", NUMBER], ["w", WORD]],
  keywords: words("and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return try while with yield self cls"),
  literals: words("True False None"),
};
const SHELL = {
  rules: [["c", "(?:^|[ \\t;])#[^\\n]*"], ["s", `"(?:[^"\\\\]|\\\\[\\s\\S])*(?:"|\\\\?${END})`], ["s", `'[^']*(?:'|${END})`],
    ["l", "\\$(?:\\{[^}\\n]*\\}?|\\w+|[@#?$!*-])"], ["p", "(?:^|[ \\t])--?[A-Za-z][\\w-]*"], ["w", "[A-Za-z_][\\w-]*"]],
  keywords: words("if then else elif fi for in do done while until case esac function return export local readonly declare unset set shift source alias exit trap sudo cd echo"),
  literals: words("true false"),
  plain: true,
};
const SQL = {
  rules: [["c", "--[^\\n]*"], ["c", STARRED], ["s", `'(?:[^']|'')*(?:'|${END})`], ["s", "\"[^\"\\n]*\"?"], ["n", NUMBER], ["w", WORD]],
  keywords: words("add all alter and as asc begin between by cascade case check column commit constraint create cross database default delete desc distinct drop else end exists foreign from full group having if in index inner insert into is join key left like limit not offset on or order outer over partition primary references returning right rollback select set table then transaction trigger union unique update using values view when where with"),
  literals: words("null true false"),
  fold: true,
};
const JSON_LIKE = {
  rules: [["c", SLASHES], ["c", STARRED], ["p", "\"(?:[^\"\\\\\\n]|\\\\.)*\"(?=[ \\t]{0,9}:)"], ["s", DOUBLE], ["n", `-?${NUMBER}`], ["w", WORD]],
  keywords: words(""), literals: words("true false null"), plain: true,
};
const YAML = {
  rules: [["c", "(?:^|[ \\t])#[^\\n]*"], ["m", "^[ \\t]*\\[[^\\n]*\\][ \\t]*$"], ["p", "^[ \\t]*(?:- )?[\\w.\"'-]+(?=[ \\t]{0,9}[:=](?:[ \\t\\n]|$))"],
    ["s", DOUBLE], ["s", SINGLE], ["l", "[&*][\\w-]+"], ["n", "\\b\\d[\\d_.:-]*\\b"], ["w", WORD]],
  keywords: words(""), literals: words("true false null yes no on off"), plain: true,
};
const XML = {
  rules: [["c", `<!--[\\s\\S]*?(?:-->|${END})`], ["m", "<[!?][^>\\n]*>?"], ["k", "<\\/?[A-Za-z][\\w:.-]*|\\/?>"], ["p", "\\b[\\w:@.-]{1,60}(?==[\"'])"],
    ["s", "=(?:\"[^\"\\n]*\"?|'[^'\\n]*'?)"], ["l", "&#?\\w{1,9};"]],
};
const CSS = {
  rules: [["c", STARRED], ["s", DOUBLE], ["s", SINGLE], ["k", "@[\\w-]+"], ["n", "#[\\da-fA-F]{3,8}\\b"], ["p", "\\b[\\w-]{1,60}(?=[ \\t]{0,9}:[ \\t])"],
    ["l", "--[\\w-]+"], ["n", "-?\\b\\d[\\d.]*(?:%|[a-z]+\\b)?"], ["t", "[.#][A-Za-z_][\\w-]*"]],
};
const DIFF = { rules: [["m", "^(?:@@|diff |index |---|\\+\\+\\+)[^\\n]*"], ["a", "^\\+[^\\n]*"], ["d", "^-[^\\n]*"]] };

const FAMILIES = [
  [C, "c h cpp c++ cc cxx hpp cu cuda java kotlin kt swift go golang cs csharp c# php scala dart zig glsl wgsl metal objc groovy"],
  [JS, "js javascript jsx ts typescript tsx mjs cjs node"],
  [RUST, "rust rs"],
  [PYTHON, "python py python3 py3 ruby rb r julia jl elixir nim"],
  [SHELL, "bash sh shell zsh fish console shell-session powershell ps1 dockerfile docker makefile make"],
  [SQL, "sql sqlite postgres postgresql mysql psql"],
  [JSON_LIKE, "json jsonc json5 jsonl"],
  [YAML, "yaml yml toml ini conf properties env"],
  [XML, "html xml svg xhtml vue htm"],
  [CSS, "css scss less"],
  [DIFF, "diff patch"],
];
const LANGUAGES = new Map(FAMILIES.flatMap(([family, names]) => names.split(" ").map((name) => [name, family])));

function kindOf(family, word, code, end) {
  const key = family.fold ? word.toLowerCase() : word;
  if (family.keywords.has(key)) return "k";
  if (family.literals.has(key)) return "l";
  if (family.plain) return "";
  if (code[end] === "(") return "f";
  return /^[A-Z]\w*[a-z]/.test(word) ? "t" : "";
}

/** Cuts tokens into parts of some lines: the browser lays out only those that are seen. */
export function inParts(tokens, lines) {
  const parts = [];
  let part = [], left = lines;
  for (const token of tokens) {
    const text = typeof token === "string" ? token : token.kids[0];
    const add = (piece) => part.push(typeof token === "string" ? piece : { ...token, kids: [piece] });
    let from = 0;
    for (let end = text.indexOf("\n"); end >= 0; end = text.indexOf("\n", end + 1)) {
      if (--left > 0) continue;
      add(text.slice(from, end + 1));
      parts.push({ tag: "span", cls: "part", kids: part });
      [part, left, from] = [[], lines, end + 1];
    }
    if (from < text.length) add(text.slice(from));
  }
  if (!parts.length) return tokens;
  if (part.length) parts.push({ tag: "span", cls: "part", kids: part });
  return parts;
}

/** The code as a list of `string | { tag: "span", cls, kids: [string] }`. */
export function highlight(code, language) {
  const family = LANGUAGES.get(language.toLowerCase());
  if (!family || code.length > LONGEST) return code === "" ? [] : [code];
  family.pattern ??= new RegExp(family.rules.map(([, source]) => `(${source})`).join("|"), "gm");
  const out = [];
  const plain = (text) => {
    if (text === "") return;
    if (typeof out.at(-1) === "string") out[out.length - 1] += text; else out.push(text);
  };
  let done = 0;
  for (const found of code.matchAll(family.pattern)) {
    plain(code.slice(done, found.index));
    done = found.index + found[0].length;
    const rule = found.indexOf(found[0], 1) - 1;
    const kind = family.rules[rule][0];
    const cls = kind === "w" ? kindOf(family, found[0], code, done) : kind;
    if (cls) out.push({ tag: "span", cls, kids: [found[0]] }); else plain(found[0]);
  }
  plain(code.slice(done));
  return out;
}
