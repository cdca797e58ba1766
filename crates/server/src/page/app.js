// The page: a chat over the public API, conversations kept in the browser, and a view of the engine.

import { changedElsewhere, listenToChat, openChat, stop } from "./chat.js";
import { $ } from "./dom.js";
import { listenToEngine, showEngine } from "./engine.js";
import { drawList, listenToList } from "./list.js";
import { closeNarrow, listenToPanels } from "./panels.js";
import { listenToParameters } from "./parameters.js";
import { store } from "./store.js";
import { drawStrip } from "./strip.js";

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  drawStrip();
}
$("theme").onclick = () => {
  const name = document.documentElement.dataset.theme === "light" ? "dark" : "light";
  store.write("theme", name);
  setTheme(name);
};
matchMedia("(prefers-color-scheme: light)").addEventListener("change", (event) => {
  if (store.read("theme") === null) setTheme(event.matches ? "light" : "dark");
});

/** Opens the conversation that the address names. */
function openAddress() {
  const id = location.hash.startsWith("#/") ? location.hash.slice(2) : null;
  if (!openChat(id)) {
    history.replaceState(null, "", location.pathname + location.search);
    openChat(null);
  }
}
addEventListener("popstate", openAddress);
addEventListener("storage", (event) => {
  const found = /^dacapo\.head\.(.+)$/.exec(event.key ?? "");
  if (found) changedElsewhere(found[1]);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !closeNarrow()) stop();
});
$("skip").onclick = (event) => { event.preventDefault(); $("prompt").focus(); };

listenToParameters();
listenToList();
listenToChat(drawList);
listenToPanels(showEngine);
openAddress();
listenToEngine();
$("prompt").focus();
