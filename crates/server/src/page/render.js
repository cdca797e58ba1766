// Trees of markdown.js as elements. Only nodes are built and no HTML is parsed, so text of a model
// cannot run as code. What did not change stays in place: a long answer draws fast while it grows,
// and a selection inside it survives.

import { copyButton, make } from "./dom.js";
import { Growing } from "./markdown.js";

/** The element that holds the children of a tree's node, where it is not the node's own. */
const holders = new WeakMap();
const inside = (element) => holders.get(element) ?? element;

function frame(node) {
  if (node.tag === "fence") {
    const box = make("div", "code");
    const head = make("div", "head");
    head.append(make("span", "", node.lang), copyButton("Copy this code", () => code.textContent));
    const pre = make("pre");
    pre.tabIndex = 0;
    const code = make("code");
    pre.append(code);
    box.append(head, pre);
    holders.set(box, code);
    return box;
  }
  if (node.tag === "table") {
    const box = make("div", "table");
    box.tabIndex = 0;
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", "Table");
    const table = make("table");
    box.append(table);
    holders.set(box, table);
    return box;
  }
  const element = make(node.tag, node.cls);
  if (node.tag === "pre") element.tabIndex = 0;
  if (node.href) {
    element.href = node.href;
    element.title = node.href;
    element.target = "_blank";
    element.rel = "noopener noreferrer nofollow";
  }
  if (node.start !== undefined) element.start = node.start;
  return element;
}

function build(node) {
  if (typeof node === "string") return document.createTextNode(node);
  const element = frame(node);
  const holder = inside(element);
  for (const kid of node.kids) holder.append(build(kid));
  return element;
}

const sameFrame = (a, b) => a.tag === b.tag && a.cls === b.cls && a.href === b.href && a.start === b.start && a.lang === b.lang;

const same = (a, b) => a === b || (typeof a === "object" && typeof b === "object" && sameFrame(a, b)
  && a.kids.length === b.kids.length && a.kids.every((kid, i) => same(kid, b.kids[i])));

/** Makes the children of `parent`, which show the nodes `old`, show the nodes `now`. */
function patch(parent, old, now) {
  const first = Math.min(old.length, now.length);
  for (let i = 0; i < first; i++) {
    const a = old[i], b = now[i];
    if (same(a, b)) continue;
    const shown = parent.childNodes[i];
    if (typeof a === "string" && typeof b === "string") {
      if (b.startsWith(a)) shown.appendData(b.slice(a.length)); else shown.data = b;
    } else if (typeof a === "object" && typeof b === "object" && sameFrame(a, b)) {
      patch(inside(shown), a.kids, b.kids);
    } else {
      shown.replaceWith(build(b));
    }
  }
  while (parent.childNodes.length > now.length) parent.lastChild.remove();
  for (let i = first; i < now.length; i++) parent.append(build(now[i]));
}

/** The Markdown of one message, in `parent`. */
export class Rendered {
  constructor(parent) {
    this.parent = parent;
    this.growing = new Growing();
    this.nodes = [];
  }
  update(text) {
    const [settled, fresh] = this.growing.update(text);
    const now = [...this.nodes.slice(0, settled), ...fresh];
    patch(this.parent, this.nodes, now);
    this.nodes = now;
  }
}
