// The strip of the last steps: height is the bucket, the pale part padding; below, host and device time.

import { $, make } from "./dom.js";

const KEEP = 400;
let steps = [];
let chosen = null; // the number of the selected step

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const isEager = (step) => step.run !== "replayed";
export const bucketOf = (step) => `${step.phase}/${step.phase === "decode" ? step.bucket_rows : step.bucket_tokens}`;

/** Takes new steps; numbers that start again mean that the engine restarted. */
export function addSteps(fresh) {
  if (!fresh.length) return;
  if (steps.length && fresh[0].step <= steps.at(-1).step) steps = [];
  steps = [...steps, ...fresh].slice(-KEEP);
  drawStrip();
  sums();
}

export function drawStrip() {
  const canvas = $("strip");
  const scale = devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (!width) return;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const g = canvas.getContext("2d");
  g.scale(scale, scale);
  g.clearRect(0, 0, width, height);
  if (!steps.length) return;
  const slot = width / KEEP;
  const rowsHeight = 88, timeTop = 108;
  const most = Math.max(...steps.map((s) => s.bucket_rows), 4);
  const longest = Math.max(...steps.map((s) => Math.max(s.host_us + s.device_us, 1)));
  const colours = { decode: css("--decode"), prefill: css("--prefill") };
  const eager = css("--eager"), pad = css("--pad"), dim = css("--dim"), accent = css("--accent");
  steps.forEach((step, i) => {
    const x = width - (steps.length - i) * slot;
    const tall = (n) => (rowsHeight - 18) * Math.log2(1 + n) / Math.log2(1 + most);
    const wide = Math.max(slot - (slot > 2 ? 0.6 : 0), 1);
    const whole = tall(step.bucket_rows), live = tall(step.live_rows);
    g.fillStyle = pad;
    g.globalAlpha = 0.55;
    g.fillRect(x, rowsHeight - whole, wide, whole);
    g.globalAlpha = 1;
    g.fillStyle = isEager(step) ? eager : colours[step.phase];
    g.fillRect(x, rowsHeight - live, wide, live);
    const time = (us) => ((height - timeTop - 4) * us) / longest;
    g.fillStyle = dim;
    g.fillRect(x, height - 2 - time(step.device_us), wide, time(step.device_us));
    g.fillStyle = accent;
    const host = Math.max(time(step.host_us), 1);
    g.fillRect(x, height - 2 - time(step.device_us) - host, wide, host);
    if (step.step === chosen) {
      g.strokeStyle = css("--text");
      g.strokeRect(x - 1, 1, wide + 2, height - 2);
    }
  });
  g.fillStyle = dim;
  g.font = "10px ui-monospace, monospace";
  g.fillText(`rows ≤ ${most}`, 6, 12);
  g.fillText(`host + device ≤ ${longest >= 1000 ? (longest / 1000).toFixed(1) + " ms" : longest + " µs"}`, 6, rowsHeight + 14);
}

function sums() {
  const replayed = steps.filter((s) => !isEager(s)).length;
  const live = steps.reduce((n, s) => n + s.live_rows, 0);
  const padded = steps.reduce((n, s) => n + s.padded_rows, 0);
  const median = (key) => steps.map((s) => s[key]).sort((a, b) => a - b)[steps.length >> 1];
  const last = steps.at(-1);
  const span = last.at + last.device_us - steps[0].at;
  const device = steps.reduce((n, s) => n + s.device_us, 0);
  $("steps_text").textContent = `#${last.step} · ${bucketOf(last)}`;
  const rows = [
    ["replayed", ((100 * replayed) / steps.length).toFixed(0) + " %"],
    ["padding", ((100 * padded) / Math.max(live + padded, 1)).toFixed(0) + " %"],
    ["host, median", median("host_us") + " µs"],
    ["device busy", span > 0 ? Math.min(100, (100 * device) / span).toFixed(0) + " %" : "–"],
  ];
  $("sums").replaceChildren(...rows.map(([name, value]) => {
    const box = make("div");
    box.append(make("dt", "", name), make("dd", "", value));
    return box;
  }));
  const reasons = new Map();
  for (const step of steps) if (isEager(step)) reasons.set(step.run.eager, (reasons.get(step.run.eager) ?? 0) + 1);
  const list = [...reasons].sort((a, b) => b[1] - a[1]).slice(0, 4);
  $("reasons").replaceChildren(...list.map(([why, n]) => make("li", "", `${n} eager: ${why}`)));
}

function choose(index) {
  const step = steps[Math.max(0, Math.min(steps.length - 1, index))];
  if (!step) return;
  chosen = step.step;
  const how = isEager(step) ? `eager: ${step.run.eager}` : "replayed";
  $("step_detail").textContent = `step ${step.step} · ${bucketOf(step)} · ${step.live_rows} live + ${step.padded_rows} padded rows · ${how} · host ${step.host_us} µs · device ${step.device_us} µs`;
  drawStrip();
}

/** `pick(step)` is told which step was clicked, or chosen with Enter. */
export function listenToStrip(pick) {
  const strip = $("strip");
  const pickChosen = () => { const step = steps.find((s) => s.step === chosen); if (step) pick(step); };
  strip.onpointermove = (e) => choose(steps.length - Math.ceil((strip.clientWidth - e.offsetX) / (strip.clientWidth / KEEP)));
  strip.onclick = pickChosen;
  strip.onkeydown = (e) => {
    if (e.key === "Enter") { pickChosen(); return; }
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -KEEP, End: KEEP }[e.key];
    if (by === undefined) return;
    e.preventDefault();
    const at = steps.findIndex((s) => s.step === chosen);
    choose((at < 0 ? steps.length - 1 : at) + by);
  };
  addEventListener("resize", drawStrip);
}
