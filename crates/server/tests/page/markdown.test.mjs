// The Markdown of the page: what it makes, that nothing a model writes can run, and that an answer
// drawn piece by piece equals the whole.

import assert from "node:assert/strict";
import { test } from "node:test";
import { safeLink } from "../../src/page/inline.js";
import { Growing, markdown } from "../../src/page/markdown.js";
import { random } from "./random.mjs";

/** A tree as HTML, to compare with the output that the CommonMark and GFM specifications give. */
function html(nodes) {
  const escape = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  return nodes.map((node) => {
    if (typeof node === "string") return escape(node);
    const { tag, kids, href, start, cls } = node;
    if (tag === "br" || tag === "hr") return `<${tag}>`;
    if (tag === "fence") return `<pre${node.lang ? ` ${node.lang}` : ""}>${html(kids)}</pre>`;
    const extra = (href ? ` href="${href}"` : "") + (start !== undefined ? ` start="${start}"` : "") + (cls ? ` ${cls}` : "");
    return `<${tag}${extra}>${html(kids)}</${tag}>`;
  }).join("");
}
const same = (source, expected) => assert.equal(html(markdown(source)), expected, source);

test("paragraphs, headings, rules", () => {
  same("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>");
  same("# A #\n## B\ntext\n---\nmore", "<h3>A</h3><h4>B</h4><p>text</p><hr><p>more</p>");
  same("#hash and 1.5\n2020. was", "<p>#hash and 1.5<br>2020. was</p>");
  same("    let x;\n\n    let y;\nz", "<pre>let x;\n\nlet y;</pre><p>z</p>");
});

// The numbers are those of the examples in the CommonMark specification 0.31.
test("emphasis as CommonMark has it", () => {
  same("*foo bar*", "<p><em>foo bar</em></p>"); // 350
  same("a * foo bar*", "<p>a * foo bar*</p>"); // 351
  same("foo*bar*", "<p>foo<em>bar</em></p>"); // 354
  same("foo_bar_", "<p>foo_bar_</p>"); // 359
  same("пристаням_стремятся_", "<p>пристаням_стремятся_</p>"); // 361
  same("foo-_(bar)_", "<p>foo-<em>(bar)</em></p>"); // 363
  same("**foo*bar**", "<p><strong>foo*bar</strong></p>");
  same("*foo **bar** baz*", "<p><em>foo <strong>bar</strong> baz</em></p>"); // 409
  same("*foo**bar**baz*", "<p><em>foo<strong>bar</strong>baz</em></p>"); // 411
  same("*foo**bar*", "<p><em>foo**bar</em></p>"); // 412
  same("***foo** bar*", "<p><em><strong>foo</strong> bar</em></p>"); // 413
  same("foo***bar***baz", "<p>foo<em><strong>bar</strong></em>baz</p>"); // 416
  same("**foo, *bar*, baz**", "<p><strong>foo, <em>bar</em>, baz</strong></p>");
  same("~~gone~~ and ~kept~", "<p><del>gone</del> and ~kept~</p>");
  same("2 * 3 * 4 and snake_case_name", "<p>2 * 3 * 4 and snake_case_name</p>");
});

test("code spans, escapes, entities, formulas", () => {
  same("`` a ` b `` and `*x*`", "<p><code>a ` b</code> and <code>*x*</code></p>");
  same("`open and *em*", "<p>`open and <em>em</em></p>");
  same("\\*not\\* \\# &amp; &lt;b&gt; &#65;&#x42; &copy;", "<p>*not* # &amp; &lt;b&gt; AB &amp;copy;</p>");
  same("\\(a_1 * b_2\\) and $$x_i$$", "<p><code math>a_1 * b_2</code> and <code math>x_i</code></p>");
  same("\\[\n- x + y\n\\]\nafter", "<pre math>- x + y</pre><p>after</p>");
  same("costs $5 and $6", "<p>costs $5 and $6</p>");
});

test("fences", () => {
  same("```nope\nlet *a* = <b>;\n```\nafter", "<pre nope>let *a* = &lt;b&gt;;</pre><p>after</p>");
  same("~~~\n```\n~~~", "<pre>```</pre>");
  same("````\n```\ninner\n```\n````", "<pre>```\ninner\n```</pre>");
  same("text\n```\nno end", "<p>text</p><pre>no end</pre>");
  const long = "let a = /* b\n c */ 1;\n".repeat(200);
  const [fence] = markdown("```js\n" + long + "```");
  assert.deepEqual([fence.kids.length, new Set(fence.kids.map((part) => part.cls)).size], [7, 1]);
  assert.equal(plain([fence]), long.slice(0, -1));
  same("- item\n  ```nope\n  a\n    b\n  ```", "<ul><li>item<pre nope>a\n  b</pre></li></ul>");
});

test("lists", () => {
  same("- a\n- b", "<ul><li>a</li><li>b</li></ul>");
  same("- a\n  - b\n    - c\n- d", "<ul><li>a<ul><li>b<ul><li>c</li></ul></li></ul></li><li>d</li></ul>");
  same("1. a\n  - b\n2. c", "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>");
  same("1. a\n   1. b\n\n      more", "<ol><li>a<ol><li><p>b</p><p>more</p></li></ol></li></ol>");
  same("3. a\n4) b", '<ol start="3"><li>a</li><li>b</li></ol>');
  same("* a\n\n* b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>");
  same("- a\nlazy\n\nout", "<ul><li>a<br>lazy</li></ul><p>out</p>");
  same("- [x] done\n- [ ] open", "<ul><li task>☑ done</li><li task>☐ open</li></ul>");
  same("Steps:\n1. one\n2. two", "<p>Steps:</p><ol><li>one</li><li>two</li></ol>");
  same("1. one\n```nope\nx\n```\n2. two", '<ol><li>one</li></ol><pre nope>x</pre><ol start="2"><li>two</li></ol>');
});

test("quotes", () => {
  same("> a\n> > b\n>\n> - c\n\nd", "<blockquote><p>a</p><blockquote><p>b</p></blockquote><ul><li>c</li></ul></blockquote><p>d</p>");
});

test("tables", () => {
  same("Here:\n| a | b |\n|:--|--:|\n| 1 | `x\\|y` | extra |\n| *2* |\nend",
    "<p>Here:</p><table><thead><tr><th>a</th><th right>b</th></tr></thead>" +
    "<tbody><tr><td>1</td><td right><code>x|y</code></td></tr><tr><td><em>2</em></td></tr></tbody></table><p>end</p>");
  same("a | b\n- | :-:\n1 | 2<br>3", "<table><thead><tr><th>a</th><th center>b</th></tr></thead><tbody><tr><td>1</td><td center>2<br>3</td></tr></tbody></table>");
  same("a | b\n---\nc", "<p>a | b</p><hr><p>c</p>");
});

test("links", () => {
  same("[a *b*](https://x.org/p_(q) \"t\")", '<p><a href="https://x.org/p_(q)">a <em>b</em></a></p>');
  same("see https://x.org/a_b_c, (https://x.org/d). **https://x.org**",
    '<p>see <a href="https://x.org/a_b_c">https://x.org/a_b_c</a>, (<a href="https://x.org/d">https://x.org/d</a>). <strong><a href="https://x.org/">https://x.org</a></strong></p>');
  same("<mailto:a@b.org> ![pic](https://x.org/i.png)", '<p><a href="mailto:a@b.org">mailto:a@b.org</a> <a href="https://x.org/i.png" image>pic</a></p>');
  same("[a [b](https://x.org)](https://y.org)", '<p>[a <a href="https://x.org/">b</a>](<a href="https://y.org/">https://y.org</a>)</p>');
  same("[1] and [x] (y)", "<p>[1] and [x] (y)</p>");
});

const HOSTILE = [
  "<img src=x onerror=alert(1)>", "<script>alert(1)</script>", "<svg/onload=alert(1)>", "[a](javascript:alert(1))",
  "[a](JaVaScRiPt:alert(1))", "[a](java\nscript:alert(1))", "[a](&#106;avascript:alert(1))", "[a](data:text/html,<script>)",
  "![a](javascript:alert(1))", "<javascript:alert(1)>", "[a](vbscript:x)", "[a](//evil.example)", "[a](/v1/models)",
  "[a](\u0001javascript:alert(1))", "[a](<javascript:alert(1)>)", "```<img onerror=1>\n<img onerror=1>\n```", "| <img onerror=1> |\n|---|\n| [a](javascript:1) |",
  "> - [a](file:///etc/passwd)", "# [a](about:blank) <b onclick=x>",
];
const TAGS = new Set("p h3 h4 h5 h6 hr br ul ol li blockquote table thead tbody tr th td fence pre code span strong em del a".split(" "));
const CLASSES = new Set(["math", "image", "task", "part", "right", "center", ...("klscnftpadm")]);

/** Every node is of a known kind, and every address is one of the three kinds that are allowed. */
function harmless(nodes) {
  for (const node of nodes) {
    if (typeof node === "string") continue;
    assert.deepEqual(Object.keys(node).filter((key) => !["tag", "kids", "href", "cls", "start", "lang"].includes(key)), []);
    assert.ok(TAGS.has(node.tag), node.tag);
    if (node.cls !== undefined) assert.ok(CLASSES.has(node.cls), node.cls);
    if (node.href !== undefined) assert.match(node.href, /^(https?:\/\/|mailto:)/);
    if (node.start !== undefined) assert.ok(Number.isInteger(node.start));
    harmless(node.kids);
  }
}
const plain = (nodes) => nodes.map((node) => (typeof node === "string" ? node : plain(node.kids))).join("");
const links = (nodes) => nodes.flatMap((node) => (typeof node === "string" ? [] : [...(node.href ? [node.href] : []), ...links(node.kids)]));

test("hostile text stays text", () => {
  for (const source of HOSTILE) {
    const tree = markdown(source);
    harmless(tree);
    assert.deepEqual(links(tree), [], source);
  }
  assert.equal(plain(markdown(HOSTILE[0])), HOSTILE[0]);
  assert.equal(plain(markdown(HOSTILE[3])), HOSTILE[3]);
  for (const bad of ["javascript:1", " javascript:1", "data:,x", "blob:https://x.org/1", "x", "/x", "//x.org", "file:///x", "ftp://x"]) assert.equal(safeLink(bad), null, bad);
});

const PIECES = ["a", "b c", "word", "\n", "\n", "\n", "\n\n", " ", "  ", "    ", "\t", "# ", "## ", "- ", "-", "--", "---", "* ", "*", "**", "_", "~~", "`", "```", "```py\n",
  "~~~", "> ", ">", "1. ", "2) ", "1", ".", "|", "| a | b |", "|--|--|", "|---", "|", "[", "](", ")", "]", "!", "<", ">", "https://x.org", "\\", "$$", "\\[", "\\]", "&amp;", "[x] ", "é", "😀", "\r\n", ...HOSTILE];

test("random text gives harmless trees, and pieces give what the whole gives", () => {
  const pick = random(7);
  for (let round = 0; round < 1200; round++) {
    let text = "";
    const growing = new Growing();
    let shown = [];
    for (let n = 1 + pick(40); n > 0; n--) {
      const piece = PIECES[pick(PIECES.length)];
      // Sometimes one character at a time, as a slow model sends them.
      for (const part of pick(4) ? [piece] : piece) {
        text += part;
        const [kept, fresh] = growing.update(text);
        assert.ok(kept <= shown.length);
        shown = [...shown.slice(0, kept), ...fresh];
      }
    }
    const whole = markdown(text);
    harmless(whole);
    assert.deepEqual(shown, whole, JSON.stringify(text));
  }
});

test("nesting is limited", () => {
  const deep = (nodes) => nodes.reduce((most, node) => Math.max(most, typeof node === "string" ? 0 : 1 + deep(node.kids)), 0);
  const n = 30_000;
  for (const [open, close] of [["*a ", "a* "], ["**", "**"], ["![", "](https://x.org)"], ["> ", ""], ["- ", ""], ["*a _b ", "b_ a* "]]) {
    const tree = markdown(open.repeat(n) + "x" + close.repeat(n));
    assert.ok(deep(tree) < 60, `${open} is ${deep(tree)} deep`);
    assert.ok(plain(tree).includes("x"));
  }
});

test("time grows with the text, not with its square", () => {
  const many = (text) => text.repeat(20_000);
  const bad = ["*a ", "a* ", "*a_ ", "**", "[", "[a](", "![", "](x)", "`a", "``a` ", "<", "\\(", "$$a ", "&", "> ", "- ", "  - ", "|", "a|b\n", "https://", "(", "~~a", "_a__ ", "[a](b '", "\n- x\n\n", "1. a\n\n"];
  for (const piece of bad) {
    const began = process.cpuUsage().user;
    harmless(markdown(many(piece)));
    harmless(markdown(many(piece) + many("a*_`](").slice(0, 60_000)));
    const took = (process.cpuUsage().user - began) / 1000;
    assert.ok(took < 3000, `${JSON.stringify(piece)} took ${took.toFixed(0)} ms`);
  }
});
