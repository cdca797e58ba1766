// The parameters of a request, in their drawer. What the user chose is kept; the rest are the model's.

import { $ } from "./dom.js";
import { store } from "./store.js";

const RANGES = ["temperature", "top_p", "min_p"];
const FIELDS = [...RANGES, "top_k", "max_tokens", "seed", "system", "stop"];
const first = new Map(); // the values of the page, by field
let ofModel = {};

function set(id, value) {
  $(id).value = value;
  const told = document.querySelector(`output[for=${id}]`);
  if (told) told.textContent = Number($(id).value);
}

/** Shows on the button whether something differs from the defaults. */
function mark() {
  const changed = FIELDS.some((id) => store.read(id) !== null);
  $("show_parameters").classList.toggle("changed", changed);
  $("reset").disabled = !changed;
}

/** The model's defaults, where the user has chosen nothing. */
export function setDefaults(defaults) {
  ofModel = Object.fromEntries(Object.entries(defaults).filter(([id]) => FIELDS.includes(id)));
  for (const [id, value] of Object.entries(ofModel)) {
    if (store.read(id) === null && document.activeElement !== $(id)) set(id, value);
  }
}

export const systemMessage = () => $("system").value.trim();

export function parameters() {
  const whole = (id) => { const n = parseInt($(id).value, 10); return Number.isNaN(n) ? undefined : n; };
  const stop = $("stop").value.split("\n").filter((line) => line !== "");
  return {
    temperature: Number($("temperature").value),
    top_p: Number($("top_p").value),
    min_p: Number($("min_p").value),
    top_k: whole("top_k"),
    max_tokens: whole("max_tokens"),
    seed: whole("seed"),
    stop: stop.length ? stop : undefined,
  };
}

export function listenToParameters() {
  for (const id of FIELDS) {
    first.set(id, $(id).value);
    const kept = store.read(id);
    if (kept !== null) set(id, kept);
    $(id).addEventListener("input", () => set(id, $(id).value));
    $(id).addEventListener("change", () => { store.write(id, $(id).value); mark(); });
  }
  $("reset").onclick = () => {
    for (const id of FIELDS) { store.erase(id); set(id, ofModel[id] ?? first.get(id)); }
    mark();
  };
  mark();
}
