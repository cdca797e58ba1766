// Text is readable in both themes: the contrast that WCAG 2 asks for (AA), from the colours in style.css.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

const css = readFileSync(new URL("../../src/page/style.css", import.meta.url), "utf8");

function colours(selector) {
  const block = css.slice(css.indexOf(selector + " {")).split("}")[0];
  return Object.fromEntries([...block.matchAll(/--([\w-]+): #([\da-f]{6}|[\da-f]{3})\b/g)].map(([, name, hex]) => [name, hex.length === 3 ? hex.replace(/./g, "$&$&") : hex]));
}
function luminance(hex) {
  const [r, g, b] = [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function contrast(a, b) {
  const [light, dark] = [luminance(a), luminance(b)].sort((x, y) => y - x);
  return (light + 0.05) / (dark + 0.05);
}

test("contrast of text", () => {
  assert.equal(contrast("000000", "ffffff"), 21);
  const base = colours(":root");
  for (const [theme, own] of [["dark", base], ["light", { ...base, ...colours(":root[data-theme=\"light\"]") }]]) {
    const pairs = ["bg", "panel", "raised"].flatMap((ground) => [["text", ground], ["dim", ground]]);
    for (const ground of ["bg", "panel"]) pairs.push(["accent", ground], ["bad", ground], ["eager", ground]);
    pairs.push(["accent-text", "accent"]);
    for (const name of ["text", "dim", "key", "literal", "string", "comment", "number", "function", "type", "name", "bad"]) pairs.push([name, "code"]);
    for (const [front, ground] of pairs) {
      const found = contrast(own[front], own[ground]);
      assert.ok(found >= 4.5, `${theme}: ${front} on ${ground} is ${found.toFixed(2)}`);
    }
  }
});
