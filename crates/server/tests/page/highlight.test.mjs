// The colours of code: the right words are marked, and the code itself never changes.

import assert from "node:assert/strict";
import { test } from "node:test";
import { highlight } from "../../src/page/highlight.js";
import { random } from "./random.mjs";

const text = (tokens) => tokens.map((token) => (typeof token === "string" ? token : token.kids[0])).join("");
const marked = (code, language) => highlight(code, language).filter((token) => typeof token !== "string").map((token) => `${token.cls}:${token.kids[0]}`);

test("words of each family", () => {
  assert.deepEqual(marked("fn main() { let x: Vec<'a> = \"a\\\"b\"; } // end", "rust"),
    ["k:fn", "f:main", "k:let", "t:Vec", "l:'a", "s:\"a\\\"b\"", "c:// end"]);
  assert.deepEqual(marked("let c = 'x'; println!(\"{}\", 0xff_u8);", "rs"), ["k:let", "s:'x'", "f:println!", "s:\"{}\"", "n:0xff_u8"]);
  assert.deepEqual(marked("def f(x):\n    '''doc\n\"'''\n    return None # no", "python"), ["k:def", "f:f", "s:'''doc\n\"'''", "k:return", "l:None", "c:# no"]);
  assert.deepEqual(marked("const a = `x\n${1}`; /* c\n */ await b(2.5e3)", "js"), ["k:const", "s:`x\n${1}`", "c:/* c\n */", "k:await", "f:b", "n:2.5e3"]);
  assert.deepEqual(marked("SELECT name FROM t WHERE a = 'it''s' -- x", "sql"), ["k:SELECT", "k:FROM", "k:WHERE", "s:'it''s'", "c:-- x"]);
  assert.deepEqual(marked("{\"a\": [1, -2.5, true, \"b\"]}", "json"), ["p:\"a\"", "n:1", "n:-2.5", "l:true", "s:\"b\""]);
  assert.deepEqual(marked("curl --data \"$A\" | sh # run", "bash"), ["p: --data", "s:\"$A\"", "c: # run"]);
  assert.deepEqual(marked("<a href=\"x\">&amp;</a><!-- c -->", "html"), ["k:<a", "p:href", "s:=\"x\"", "k:>", "l:&amp;", "k:</a", "k:>", "c:<!-- c -->"]);
  assert.deepEqual(marked("--- a\n+++ b\n@@ 1 @@\n+new\n-old\n same", "diff"), ["m:--- a", "m:+++ b", "m:@@ 1 @@", "a:+new", "d:-old"]);
  assert.deepEqual(marked("key: true # c\nother = 5", "yaml"), ["p:key", "l:true", "c: # c", "p:other", "n:5"]);
  assert.deepEqual(marked(".a { color: #fff; --x: 2px }", "css").slice(0, 3), ["t:.a", "p:color", "n:#fff"]);
});

test("an unknown language, none, and long code stay plain", () => {
  assert.deepEqual(highlight("let x", "klingon"), ["let x"]);
  assert.deepEqual(highlight("let x", ""), ["let x"]);
  assert.deepEqual(highlight("", "rust"), []);
  const long = "let x = 1;\n".repeat(20_000);
  assert.deepEqual(highlight(long, "rust"), [long]);
});

test("the tokens joined are the code, in linear time", () => {
  const pick = random(3);
  const pieces = ["\"", "'", "`", "\\", "//", "/*", "*/", "#", "\n", " ", "let", "x", "(", "1", "0x", "r#\"", "\"#", "'''", "\"\"\"", "<!--", "<", ">", "=", "--", "${", "@", "&", ";", "é", "😀"];
  const languages = ["c", "js", "rust", "python", "bash", "sql", "json", "yaml", "html", "css", "diff"];
  for (let round = 0; round < 2200; round++) {
    let code = "";
    for (let n = pick(30); n > 0; n--) code += pieces[pick(pieces.length)];
    const language = languages[round % languages.length];
    assert.equal(text(highlight(code, language)), code, JSON.stringify([language, code]));
  }
  for (const language of languages) {
    for (const piece of pieces) {
      const code = piece.repeat(Math.floor(90_000 / piece.length));
      const began = process.cpuUsage().user;
      assert.equal(text(highlight(code, language)), code);
      assert.ok(process.cpuUsage().user - began < 2e6, `${language} ${JSON.stringify(piece)}`);
    }
  }
});
