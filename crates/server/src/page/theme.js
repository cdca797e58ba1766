"use strict";
// Runs before the first paint, so that the page does not flash in the wrong colours.
(() => {
  let kept = null;
  try { kept = localStorage.getItem("dacapo.theme"); } catch { /* storage is not allowed */ }
  const light = matchMedia("(prefers-color-scheme: light)");
  document.documentElement.dataset.theme = kept ?? (light.matches ? "light" : "dark");
})();
