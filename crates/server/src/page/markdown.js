// Markdown blocks: text to a tree of plain values (see inline.js), without the DOM.
//
// Differences from CommonMark, because models write so: `---` below a paragraph is a rule, two spaces
// nest a list below "1.", and a line break in a paragraph is kept. HTML is shown as text.

import { highlight, inParts } from "./highlight.js";
import { inline } from "./inline.js";

const PART = 60; // lines of code that are drawn together
const DEEPEST = 12; // levels of quotes and lists; what is deeper is one paragraph

const indentOf = (line) => line.length - line.trimStart().length;
const isBlank = (line) => line.trim() === "";
const isQuote = (line) => /^ {0,3}>/.test(line);
const isHeading = (line) => /^ {0,3}#{1,6}(?: |$)/.test(line);
const isRule = (line) => {
  const bare = line.replaceAll(" ", "");
  return bare.length >= 3 && "-*_".includes(bare[0]) && bare === bare[0].repeat(bare.length);
};

function fenceOf(line) {
  const found = /^( *)(`{3,}|~{3,})([^\n]*)$/.exec(line);
  if (!found || (found[2][0] === "`" && found[3].includes("`"))) return null;
  return { indent: found[1].length, sign: found[2], lang: found[3].trim().split(/[\s{,]/)[0] };
}

function markerOf(line) {
  const found = /^( *)([-*+•]|\d{1,9}[.)])( +|$)(.*)$/.exec(line);
  if (!found || isRule(line)) return null;
  const [, space, sign, gap, rest] = found;
  const ordered = /\d/.test(sign[0]);
  const wide = gap.length > 4 ? 1 : Math.max(gap.length, 1);
  const body = " ".repeat(Math.max(gap.length - wide, 0)) + rest;
  return { indent: space.length, ordered, number: parseInt(sign, 10), offset: space.length + sign.length + wide, body };
}

/** The cells of a table row; `\|` is a bar inside a cell. */
function cellsOf(line) {
  const cells = [""];
  const row = line.trim();
  for (let i = row.startsWith("|") ? 1 : 0; i < row.length; i++) {
    if (row[i] === "\\" && row[i + 1] === "|") { cells[cells.length - 1] += "|"; i++; }
    else if (row[i] === "|") cells.push("");
    else cells[cells.length - 1] += row[i];
  }
  if (cells.length > 1 && isBlank(cells.at(-1))) cells.pop();
  return cells.map((cell) => cell.trim());
}

/** The alignment of each column, if a table starts at line `i`. */
function columnsAt(lines, i) {
  const next = lines[i + 1];
  if (next === undefined || !lines[i].includes("|") || !next.includes("-") || /[^\s|:-]/.test(next)) return null;
  const signs = cellsOf(next);
  if (!signs.every((sign) => /^:?-+:?$/.test(sign)) || signs.length !== cellsOf(lines[i]).length) return null;
  if (signs.length === 1 && !next.includes("|")) return null;
  return signs.map((sign) => (sign.endsWith(":") ? (sign.startsWith(":") ? "center" : "right") : ""));
}

const isFormula = (line) => line.trim() === "$$" || line.trim() === "\\[";

/** Whether line `i` ends a paragraph above it. */
function interrupts(lines, i) {
  const line = lines[i];
  if (isBlank(line) || isQuote(line) || isHeading(line) || isRule(line) || fenceOf(line) || isFormula(line)) return true;
  const marker = markerOf(line);
  if (marker) return marker.body !== "" && (!marker.ordered || marker.number === 1);
  return columnsAt(lines, i) !== null;
}

function fence(lines, i) {
  const { indent, sign, lang } = fenceOf(lines[i]);
  const code = [];
  for (i++; i < lines.length; i++) {
    const line = lines[i].trim();
    if (line.length >= sign.length && line === sign[0].repeat(line.length)) { i++; break; }
    code.push(lines[i].slice(Math.min(indent, indentOf(lines[i]))));
  }
  return [{ tag: "fence", lang, kids: inParts(highlight(code.join("\n"), lang), PART) }, i];
}

function formula(lines, i) {
  const end = lines[i].trim() === "$$" ? "$$" : "\\]";
  const code = [];
  for (i++; i < lines.length && lines[i].trim() !== end; i++) code.push(lines[i]);
  return [{ tag: "pre", cls: "math", kids: [code.join("\n")] }, i + 1];
}

function heading(lines, i) {
  const found = /^ {0,3}(#{1,6}) *(.*)$/.exec(lines[i]);
  let text = found[2].trimEnd();
  const bare = text.replace(/#*$/, "");
  if (bare === "" || bare.endsWith(" ")) text = bare.trimEnd();
  // The page has its own h1 and h2.
  return [{ tag: "h" + Math.min(found[1].length + 2, 6), kids: inline(text) }, i + 1];
}

function quote(lines, i, depth) {
  const inside = [];
  for (; i < lines.length && isQuote(lines[i]); i++) inside.push(lines[i].replace(/^ {0,3}> ?/, ""));
  return [{ tag: "blockquote", kids: parse(inside, depth + 1).map((block) => block.node) }, i];
}

function table(lines, i) {
  const columns = columnsAt(lines, i);
  const row = (line, tag) => ({
    tag: "tr",
    kids: cellsOf(line).slice(0, columns.length).map((cell, at) => {
      const node = { tag, kids: inline(cell) };
      if (columns[at]) node.cls = columns[at];
      return node;
    }),
  });
  const head = row(lines[i], "th");
  const rows = [];
  for (i += 2; i < lines.length && lines[i].includes("|") && !interrupts(lines, i); i++) rows.push(row(lines[i], "td"));
  return [{ tag: "table", kids: [{ tag: "thead", kids: [head] }, { tag: "tbody", kids: rows }] }, i];
}

/** The lines of one item, from its marker on: [lines, next line, whether a blank line separates blocks]. */
function itemLines(lines, i, marker) {
  const body = [marker.body];
  let loose = false, inner = Infinity; // what is indented by `inner` belongs to a list inside
  for (i++; i < lines.length; i++) {
    const line = lines[i], indent = indentOf(line);
    if (isBlank(line)) {
      let next = i + 1;
      while (next < lines.length && isBlank(lines[next])) next++;
      const inside = next < lines.length && indentOf(lines[next]) >= marker.indent + 2;
      if (!inside) return [body, i, loose];
      loose ||= !markerOf(lines[next]) && !fenceOf(lines[next]) && indentOf(lines[next]) < inner;
      for (; i < next; i++) body.push("");
      i--;
    } else if (indent >= marker.indent + 2) {
      if (markerOf(line)) inner = indent + 2;
      body.push(line.slice(Math.min(indent, marker.offset)));
    } else if (markerOf(line) || interrupts([line], 0)) {
      return [body, i, loose];
    } else {
      body.push(line.trimStart());
    }
  }
  return [body, i, loose];
}

function list(lines, i, depth) {
  const first = markerOf(lines[i]);
  const items = [];
  let loose = false;
  for (;;) {
    const [body, next, apart] = itemLines(lines, i, markerOf(lines[i]));
    items.push(body);
    loose ||= apart;
    i = next;
    let following = i;
    while (following < lines.length && isBlank(lines[following])) following++;
    const marker = following < lines.length ? markerOf(lines[following]) : null;
    if (!marker || marker.ordered !== first.ordered) break;
    loose ||= following > i;
    i = following;
  }
  const kids = items.map((body) => {
    const task = /^\[([ xX])\] (.*)$/.exec(body[0]);
    if (task) body[0] = (task[1] === " " ? "☐ " : "☑ ") + task[2];
    const blocks = parse(body, depth + 1).map((block) => block.node);
    const inside = loose ? blocks : blocks.flatMap((node) => (node.tag === "p" ? node.kids : [node]));
    return task ? { tag: "li", cls: "task", kids: inside } : { tag: "li", kids: inside };
  });
  const node = { tag: first.ordered ? "ol" : "ul", kids };
  if (first.ordered && first.number !== 1) node.start = first.number;
  return [node, i];
}

function indented(lines, i) {
  const code = [];
  for (; i < lines.length && (isBlank(lines[i]) || indentOf(lines[i]) >= 4); i++) code.push(lines[i].slice(4));
  while (isBlank(code.at(-1))) { code.pop(); i--; }
  return [{ tag: "fence", lang: "", kids: [code.join("\n")] }, i];
}

function paragraph(lines, i) {
  const block = [lines[i].trim()];
  for (i++; i < lines.length && !interrupts(lines, i); i++) block.push(lines[i].trim());
  return [{ tag: "p", kids: inline(block.join("\n")) }, i];
}

function blockAt(lines, i, depth) {
  const line = lines[i];
  if (depth >= DEEPEST) return [{ tag: "p", kids: [lines.slice(i).join("\n")] }, lines.length];
  if (fenceOf(line)) return fence(lines, i);
  if (isFormula(line)) return formula(lines, i);
  if (isRule(line)) return [{ tag: "hr", kids: [] }, i + 1];
  if (isHeading(line)) return heading(lines, i);
  if (isQuote(line)) return quote(lines, i, depth);
  if (markerOf(line)) return list(lines, i, depth);
  if (indentOf(line) >= 4) return indented(lines, i);
  if (columnsAt(lines, i)) return table(lines, i);
  return paragraph(lines, i);
}

/** The blocks of some lines: [{ node, line }], where `line` is the number of a block's first line. */
function parse(lines, depth) {
  const blocks = [];
  let i = 0;
  while (i < lines.length) {
    if (isBlank(lines[i])) { i++; continue; }
    const [node, next] = blockAt(lines, i, depth);
    blocks.push({ node, line: i });
    i = next;
  }
  return blocks;
}

const clean = (line) => line.replace(/\r$/, "").replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    "));

/** The blocks of `text`: [{ node, at }], where `at` is the offset of a block in the text. */
export function blocks(text) {
  const raw = text.split("\n");
  const starts = [];
  let offset = 0;
  for (const line of raw) { starts.push(offset); offset += line.length + 1; }
  return parse(raw.map(clean), 0).map(({ node, line }) => ({ node, at: starts[line] }));
}

/** The tree of `text`. */
export function markdown(text) {
  return blocks(text).map((block) => block.node);
}

/**
 * Markdown that grows at its end. Where a block ends depends on at most two lines after it, so text
 * that is added changes the last two blocks only: the ones before are parsed once.
 */
export class Growing {
  constructor() { this.text = ""; this.settled = 0; this.count = 0; }
  /** Takes the whole text so far; returns [number of settled blocks, the blocks after them]. */
  update(text) {
    if (!text.startsWith(this.text.slice(0, this.settled))) { this.settled = 0; this.count = 0; }
    this.text = text;
    const before = this.count;
    const fresh = blocks(text.slice(this.settled));
    const done = Math.max(fresh.length - 2, 0);
    if (done) { this.settled += fresh[done].at; this.count += done; }
    return [before, fresh.map((block) => block.node)];
  }
}
