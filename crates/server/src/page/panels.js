// Which panels are open: the list, and one of parameters and engine view. On a narrow screen a panel
// lies over the chat, one at a time; on a wide one it stands beside it.

import { $ } from "./dom.js";
import { store } from "./store.js";

const PANELS = { list: "show_list", parameters: "show_parameters", live: "show_engine" };
const wide = matchMedia("(min-width: 1000px)");
const shown = new Set();
let opened = () => {};

function draw() {
  for (const [id, button] of Object.entries(PANELS)) {
    $(id).hidden = !shown.has(id);
    $(button).setAttribute("aria-expanded", String(shown.has(id)));
  }
  const over = !wide.matches && shown.size > 0;
  $("shade").hidden = !over;
  $("chat").inert = over;
  opened(shown.has("live"));
}

function toggle(id) {
  const open = !shown.has(id);
  if (!wide.matches) shown.clear();
  else if (id !== "list") { shown.delete("parameters"); shown.delete("live"); }
  if (open && id === "live" && innerWidth < 1280) shown.delete("list"); // else little is left for the chat
  if (open) shown.add(id); else shown.delete(id);
  if (wide.matches) {
    if (id === "list") store.write("list", open ? "open" : "closed");
    store.write("panel", ["parameters", "live"].find((name) => shown.has(name)) ?? "");
  }
  draw();
  if (open && (id !== "list" || !wide.matches)) $(id).querySelector("button, input, textarea, [tabindex]")?.focus();
}

/** The panels that a screen of this width has when the page is opened. */
function start() {
  shown.clear();
  if (wide.matches) {
    if (store.read("list") !== "closed") shown.add("list");
    const side = store.read("panel");
    if (side === "parameters" || side === "live") shown.add(side);
    if (side === "live" && innerWidth < 1280) shown.delete("list");
  }
  draw();
}

/** Closes a panel that lies over the chat; false: there is none. */
export function closeNarrow() {
  if (wide.matches || !shown.size) return false;
  const [id] = shown;
  shown.clear();
  draw();
  $(PANELS[id]).focus();
  return true;
}

/** `whenLive(open)` is told whether the engine view is open. */
export function listenToPanels(whenLive) {
  opened = whenLive;
  for (const [id, button] of Object.entries(PANELS)) $(button).onclick = () => toggle(id);
  for (const button of document.querySelectorAll("[data-close]")) {
    button.onclick = () => { toggle(button.dataset.close); $(PANELS[button.dataset.close]).focus(); };
  }
  $("shade").onclick = closeNarrow;
  wide.addEventListener("change", start);
  start();
}
