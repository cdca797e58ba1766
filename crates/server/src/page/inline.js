// Inline Markdown: text to a tree of plain values, `string | { tag, kids, href?, cls? }`.
//
// Emphasis and brackets follow CommonMark's algorithm with a stack of delimiters, so that the time
// is linear in the text. Images become links: the page loads nothing from other servers. HTML stays text.

const DEEPEST = 30; // levels of elements; what is deeper is plain text
const PLAIN = /[^\\`*_~[\]!<&\nh$]+/y;
const WEB = /https?:\/\/[^\s<>`]+/iy;
const ANGLE = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/iy;
const BREAK = /<br ?\/?>/iy;
const ENTITY = /&(?:(amp|lt|gt|quot|apos|nbsp)|#(\d{1,6})|#x([\da-f]{1,5}));/iy;
const NAMED = { amp: "&", lt: "<", gt: ">", quot: "\"", apos: "'", nbsp: "\u00a0" };
const TARGET = /\([ \n]?(<[^<>\n]*>|[^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)(?:[ \n]("[^"]*"|'[^']*'))?[ \n]?\)/y;
const MATH = { "\\(": "\\)", "\\[": "\\]", "$$": "$$" };

/** The address if a click on it may be allowed, else null: only absolute http, https and mailto. */
export function safeLink(text) {
  let url;
  try { url = new URL(text); } catch { return null; }
  return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
}

const at = (pattern, text, from) => { pattern.lastIndex = from; return pattern.exec(text); };
const isSpace = (c) => c === undefined || /\s/.test(c);
const isPunctuation = (c) => c !== undefined && /[\p{P}\p{S}]/u.test(c);

/** Finds the end of code spans. Each length of backticks is searched once from left to right. */
class Ticks {
  constructor(text) {
    this.starts = new Map();
    for (const run of text.matchAll(/`+/g)) {
      const n = run[0].length;
      if (!this.starts.has(n)) this.starts.set(n, { list: [], next: 0 });
      this.starts.get(n).list.push(run.index);
    }
  }
  closer(n, from) {
    const found = this.starts.get(n);
    if (!found) return -1;
    while (found.list[found.next] < from) found.next++;
    return found.list[found.next] ?? -1;
  }
}

/** Parts of the result as a linked list, so that wrapping some of them costs only their number. */
class Parts {
  constructor() { this.head = { prev: null, next: null }; this.tail = this.head; }
  add(value) {
    const part = { value, prev: this.tail, next: null };
    this.tail.next = part;
    this.tail = part;
    return part;
  }
  text(value) {
    if (typeof this.tail.value === "string" && !this.tail.kept) this.tail.value += value;
    else this.add(value);
  }
  remove(part) {
    part.prev.next = part.next;
    if (part.next) part.next.prev = part.prev; else this.tail = part.prev;
  }
  /** Takes the values after `from` and before `to` (null: the end) out. */
  take(from, to) {
    const kids = [];
    for (let part = from.next; part !== to; part = part.next) if (part.value !== "") kids.push(part.value);
    from.next = to;
    if (to) to.prev = from; else this.tail = from;
    return join(kids);
  }
  after(part, value) {
    const added = { value, prev: part, next: part.next };
    if (part.next) part.next.prev = added; else this.tail = added;
    part.next = added;
  }
}

const join = (kids) => {
  const out = [];
  for (const kid of kids) {
    if (typeof kid === "string" && typeof out.at(-1) === "string") out[out.length - 1] += kid;
    else out.push(kid);
  }
  return out;
};

function plainText(nodes) {
  let out = "";
  for (const stack = [...nodes].reverse(); stack.length;) {
    const node = stack.pop();
    if (typeof node === "string") out += node;
    else for (let i = node.kids.length - 1; i >= 0; i--) stack.push(node.kids[i]);
  }
  return out;
}

/** The tree with its deepest levels as plain text, so that nothing which walks it runs out of stack. */
function limit(kids, depth) {
  if (depth === DEEPEST) return [plainText(kids)];
  for (const kid of kids) if (typeof kid !== "string") kid.kids = limit(kid.kids, depth + 1);
  return kids;
}

class Inline {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.parts = new Parts();
    this.last = null; // the top of the stack of delimiters
    this.brackets = [];
    this.ticks = new Ticks(text);
    this.missing = new Set(); // ends of formulas that do not come again
  }

  run() {
    while (this.at < this.text.length) {
      const plain = at(PLAIN, this.text, this.at);
      if (plain) { this.parts.text(plain[0]); this.at += plain[0].length; continue; }
      if (!this.special(this.text[this.at])) this.parts.text(this.text[this.at++]);
    }
    this.emphasis(null);
    return limit(this.parts.take(this.parts.head, null), 0);
  }

  special(c) {
    switch (c) {
      case "\\": return this.formula() || this.escape();
      case "$": return this.formula();
      case "`": return this.code();
      case "*": case "_": case "~": return this.delimiter(c);
      case "[": return this.open("[");
      case "!": return this.text[this.at + 1] === "[" && this.open("![");
      case "]": return this.close();
      case "<": return this.angle();
      case "&": return this.entity();
      case "\n": return this.newline();
      default: return this.address();
    }
  }

  node(value, length) { this.parts.add(value); this.at += length; return true; }

  escape() {
    const c = this.text[this.at + 1];
    if (c === "\n") return this.node({ tag: "br", kids: [] }, 2);
    if (c === undefined || !/[!-/:-@[-`{-~]/.test(c)) return false;
    this.parts.text(c);
    this.at += 2;
    return true;
  }

  // Formulas are shown as they are written: their underscores and stars are not emphasis.
  formula() {
    const start = this.text.slice(this.at, this.at + 2), end = MATH[start];
    if (!end || this.missing.has(end)) return false;
    const found = this.text.indexOf(end, this.at + 2);
    if (found < 0) { this.missing.add(end); return false; }
    const inside = this.text.slice(this.at + 2, found).trim();
    return this.node({ tag: "code", cls: "math", kids: [inside] }, found + 2 - this.at);
  }

  code() {
    let n = 1;
    while (this.text[this.at + n] === "`") n++;
    const end = this.ticks.closer(n, this.at + n);
    if (end < 0) { this.parts.text("`".repeat(n)); this.at += n; return true; }
    let inside = this.text.slice(this.at + n, end).replaceAll("\n", " ");
    if (inside.length > 2 && inside.startsWith(" ") && inside.endsWith(" ")) inside = inside.slice(1, -1);
    return this.node({ tag: "code", kids: [inside] }, end + n - this.at);
  }

  newline() {
    const last = this.parts.tail;
    if (typeof last.value === "string" && !last.kept) last.value = last.value.trimEnd();
    // A single line break stays one: models write verses and addresses this way.
    return this.node({ tag: "br", kids: [] }, 1);
  }

  entity() {
    const found = at(ENTITY, this.text, this.at);
    if (!found) return false;
    const code = found[2] ? parseInt(found[2], 10) : parseInt(found[3] ?? "0", 16);
    this.parts.text(found[1] ? NAMED[found[1].toLowerCase()] : code ? String.fromCodePoint(code) : "\ufffd");
    this.at += found[0].length;
    return true;
  }

  angle() {
    const line = at(BREAK, this.text, this.at);
    if (line) return this.node({ tag: "br", kids: [] }, line[0].length);
    const found = at(ANGLE, this.text, this.at);
    const href = found && safeLink(found[1]);
    return Boolean(href) && this.node({ tag: "a", href, kids: [found[1]] }, found[0].length);
  }

  address() {
    const before = this.text[this.at - 1];
    const found = before !== undefined && /\w/.test(before) ? null : at(WEB, this.text, this.at);
    if (!found) return false;
    // A bracket that was not opened inside the address ends it, and so does punctuation after it.
    let length = 0;
    for (let open = 0; length < found[0].length; length++) {
      const c = found[0][length];
      open += c === "(" ? 1 : c === ")" ? -1 : 0;
      if (open < 0) break;
    }
    while (length && ".,;:!?'\"*_~]|".includes(found[0][length - 1])) length--;
    const text = found[0].slice(0, length), href = safeLink(text);
    return Boolean(href) && this.node({ tag: "a", href, kids: [text] }, length);
  }

  delimiter(char) {
    let n = 1;
    while (this.text[this.at + n] === char) n++;
    const before = this.text[this.at - 1], after = this.text[this.at + n];
    const left = !isSpace(after) && (!isPunctuation(after) || isSpace(before) || isPunctuation(before));
    const right = !isSpace(before) && (!isPunctuation(before) || isSpace(after) || isPunctuation(after));
    const part = this.parts.add(char.repeat(n));
    part.kept = true;
    this.at += n;
    if (char === "~" && n !== 2) return true;
    const opens = left && (char !== "_" || !right || isPunctuation(before));
    const closes = right && (char !== "_" || !left || isPunctuation(after));
    const mark = { part, at: this.at, char, n, whole: n, opens, closes, prev: this.last, next: null };
    if (this.last) this.last.next = mark;
    this.last = mark;
    return true;
  }

  drop(mark) {
    if (mark.prev) mark.prev.next = mark.next;
    if (mark.next) mark.next.prev = mark.prev; else this.last = mark.prev;
  }

  /** Pairs the delimiters above `floor`, then removes them from the stack. */
  emphasis(floor) {
    const lowest = new Map(); // up to this place there is no opener for such a closer
    let closer = this.last;
    while (closer && closer.prev !== floor) closer = closer.prev;
    if (this.last === floor) return;
    while (closer) {
      if (!closer.closes) { closer = closer.next; continue; }
      const kind = closer.char + closer.opens + (closer.whole % 3);
      const end = lowest.get(kind) ?? -1;
      let opener = closer.prev;
      while (opener !== floor && opener.at > end && !pair(opener, closer)) opener = opener.prev;
      if (opener === floor || opener.at <= end) {
        lowest.set(kind, closer.prev?.at ?? -1);
        const next = closer.next;
        if (!closer.opens) this.drop(closer);
        closer = next;
        continue;
      }
      closer = this.wrap(opener, closer);
    }
    while (this.last !== floor && this.last) this.drop(this.last);
  }

  /** Puts what is between two delimiters into an element; returns the next closer to look at. */
  wrap(opener, closer) {
    const used = opener.n >= 2 && closer.n >= 2 ? 2 : 1;
    const tag = closer.char === "~" ? "del" : used === 2 ? "strong" : "em";
    this.parts.after(opener.part, { tag, kids: this.parts.take(opener.part, closer.part) });
    for (let mark = closer.prev; mark !== opener; mark = closer.prev) this.drop(mark);
    for (const mark of [opener, closer]) {
      mark.n -= used;
      mark.part.value = mark.char.repeat(mark.n);
      if (!mark.n) { this.parts.remove(mark.part); this.drop(mark); }
    }
    return closer.n ? closer : closer.next;
  }

  open(sign) {
    const part = this.parts.add(sign);
    part.kept = true;
    this.brackets.push({ part, mark: this.last });
    this.at += sign.length;
    return true;
  }

  close() {
    const bracket = this.brackets.pop();
    if (!bracket) return false;
    const found = at(TARGET, this.text, this.at + 1);
    const href = found && safeLink(found[1].replace(/^<|>$/g, ""));
    if (!href) return false;
    this.emphasis(bracket.mark);
    const image = bracket.part.value === "![";
    const kids = this.parts.take(bracket.part, null);
    this.parts.remove(bracket.part);
    const node = { tag: "a", href, kids: kids.length ? kids : [href] };
    if (image) node.cls = "image";
    this.parts.add(node);
    this.at += 1 + found[0].length;
    if (!image) this.brackets = []; // no links in links
    return true;
  }
}

function pair(opener, closer) {
  if (opener.char !== closer.char || !opener.opens) return false;
  if (!opener.closes && !closer.opens) return true;
  return (opener.whole + closer.whole) % 3 !== 0 || (opener.whole % 3 === 0 && closer.whole % 3 === 0);
}

/** The inline tree of `text`. */
export function inline(text) {
  return new Inline(text).run();
}
