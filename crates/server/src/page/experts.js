// What experts do, in the engine view: a column for each layer of a model that has experts.

import { $, make } from "./dom.js";

/** Figures of a layer from the counters of /live: experts with tokens in a step, and how busy the busiest expert is. */
export function figures(layer) {
  const chosen = layer.steps ? layer.chosen / layer.steps : 0;
  const even = layer.tokens / layer.experts;
  return { chosen, share: chosen / layer.experts, busiest: even ? layer.busiest / even : 0 };
}

/** Shows the layers; hides the section for a model without experts. */
export function showExperts(layers) {
  $("experts_box").hidden = !layers?.length;
  if (!layers?.length) return;
  const columns = $("experts");
  while (columns.children.length < layers.length) columns.append(make("i"));
  while (columns.children.length > layers.length) columns.lastChild.remove();
  let chosen = 0, busiest = 0, idle = 0;
  layers.forEach((layer, at) => {
    const shown = figures(layer);
    const column = columns.children[at];
    column.style.height = Math.max(2, 100 * shown.share) + "%";
    column.title = `layer ${layer.layer}: ${shown.chosen.toFixed(1)} of ${layer.experts} experts in a step, the busiest has ${shown.busiest.toFixed(1)} times an even share, ${layer.idle} have had no token`;
    chosen += shown.chosen / layers.length;
    busiest = Math.max(busiest, shown.busiest);
    idle += layer.idle;
  });
  $("experts_text").textContent = `${chosen.toFixed(1)} of ${layers[0].experts} in a step`;
  $("experts_busy").textContent = `busiest ${busiest.toFixed(1)} × an even share · ${idle} without tokens`;
  columns.setAttribute("aria-label", `Experts: ${chosen.toFixed(1)} of ${layers[0].experts} have tokens in a step, on average over ${layers.length} layers`);
}
