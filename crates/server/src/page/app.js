"use strict";
// The page: a chat over the public API, and a view of the engine over /live. No frameworks.

const $ = (id) => document.getElementById(id);
const make = (tag, cls, text) => {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (text !== undefined) node.textContent = text;
  return node;
};
const store = {
  get: (key) => { try { return localStorage.getItem("dacapo." + key); } catch { return null; } },
  set: (key, value) => { try { localStorage.setItem("dacapo." + key, value); } catch { /* private window */ } },
};

// ---------------------------------------------------------------- theme and layout

const theme = (name) => { document.documentElement.dataset.theme = name; store.set("theme", name); drawStrip(); };
$("theme").onclick = () => theme(document.documentElement.dataset.theme === "light" ? "dark" : "light");
$("toggle").onclick = () => {
  const hidden = document.body.classList.toggle("narrow");
  $("toggle").setAttribute("aria-expanded", String(!hidden));
  drawStrip();
};

// ---------------------------------------------------------------- markdown, the common subset

// Builds nodes and never parses HTML, so that text of the model cannot run as code.
function inline(parent, text) {
  const parts = /(`[^`\n]+`)|(\*\*[^*\n]+\*\*)|(\*[^*\s][^*\n]*\*)/g;
  let at = 0;
  for (const found of text.matchAll(parts)) {
    parent.append(text.slice(at, found.index));
    if (found[1]) parent.append(make("code", "", found[1].slice(1, -1)));
    else if (found[2]) parent.append(make("strong", "", found[2].slice(2, -2)));
    else parent.append(make("em", "", found[3].slice(1, -1)));
    at = found.index + found[0].length;
  }
  parent.append(text.slice(at));
}

function markdown(text) {
  const out = document.createDocumentFragment();
  const lines = text.split("\n");
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    if (line.startsWith("```")) {
      const code = [];
      for (i++; i < lines.length && !lines[i].startsWith("```"); i++) code.push(lines[i]);
      i++;
      const pre = make("pre");
      pre.append(make("code", "", code.join("\n")));
      pre.tabIndex = 0;
      out.append(pre);
    } else if (/^#{1,6} /.test(line)) {
      const head = make("h4");
      inline(head, line.replace(/^#+ /, ""));
      out.append(head);
      i++;
    } else if (/^\s*([-*•]|\d+[.)]) /.test(line)) {
      const list = make(/^\s*\d/.test(line) ? "ol" : "ul");
      for (; i < lines.length && /^\s*([-*•]|\d+[.)]) /.test(lines[i]); i++) {
        const item = make("li");
        inline(item, lines[i].replace(/^\s*([-*•]|\d+[.)]) /, ""));
        list.append(item);
      }
      out.append(list);
    } else if (line.trim() === "") {
      i++;
    } else {
      const p = make("p");
      const block = [];
      for (; i < lines.length && lines[i].trim() !== "" && !/^(```|#{1,6} |\s*([-*•]|\d+[.)]) )/.test(lines[i]); i++) block.push(lines[i]);
      inline(p, block.join("\n"));
      out.append(p);
    }
  }
  return out;
}

// ---------------------------------------------------------------- chat

let messages = [];
let running = null; // the AbortController of the current answer
let served = "";

function show(role, text) {
  $("hello")?.remove();
  const box = make("article", "message " + role);
  box.append(make("div", "who", role === "user" ? "You" : served || "Model"));
  const body = make("div", "body", text);
  box.append(body);
  $("log").append(box);
  $("log").scrollTop = $("log").scrollHeight;
  return { box, body };
}

const sizes = ["temperature", "top_p", "min_p"];
for (const id of sizes) {
  const field = $(id);
  const told = document.querySelector(`output[for=${id}]`);
  field.oninput = () => { told.textContent = Number(field.value); };
}
for (const id of [...sizes, "top_k", "max_tokens", "seed", "system", "stop"]) {
  const kept = store.get(id);
  if (kept !== null) { $(id).value = kept; $(id).oninput?.(); }
  $(id).addEventListener("change", () => store.set(id, $(id).value));
}

function parameters() {
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

// Events of a response body, one by one.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    let end;
    while ((end = held.indexOf("\n\n")) >= 0) {
      const event = held.slice(0, end);
      held = held.slice(end + 2);
      for (const line of event.split("\n")) if (line.startsWith("data: ")) yield line.slice(6);
    }
  }
}

async function ask(text) {
  messages.push({ role: "user", content: text });
  show("user", text);
  const { box, body } = show("assistant", "");
  box.classList.add("writing");
  const system = $("system").value.trim();
  const sent = system ? [{ role: "system", content: system }, ...messages] : messages;
  const began = performance.now();
  let first = null, answer = "", thought = "", tokens = 0, reason = "", usage = null, drawn = false;
  running = new AbortController();
  busy(true);

  const draw = () => {
    drawn = false;
    const log = $("log");
    const follow = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    let thinking = box.querySelector("details.thought");
    if (thought) {
      if (!thinking) {
        thinking = make("details", "thought");
        thinking.open = true;
        thinking.append(make("summary", "", "Thinking"), make("div"));
        box.insertBefore(thinking, body);
      }
      thinking.querySelector("div").textContent = thought;
      if (answer && thinking.open && !thinking.dataset.closed) { thinking.open = false; thinking.dataset.closed = "1"; }
    }
    body.replaceChildren(markdown(answer));
    const seconds = (performance.now() - began) / 1000;
    if (first !== null) $("meter").textContent = `${tokens} tokens · first ${(first / 1000).toFixed(2)} s · ${(tokens / Math.max(seconds - first / 1000, 0.001)).toFixed(0)} tok/s`;
    if (follow) log.scrollTop = log.scrollHeight;
  };
  const later = () => { if (!drawn) { drawn = true; requestAnimationFrame(draw); } };

  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ messages: sent, stream: true, stream_options: { include_usage: true }, ...parameters() }),
      signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error?.message ?? response.statusText);
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) usage = chunk.usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      const { content, reasoning_content: reasoning } = choice.delta;
      if (content || reasoning) { first ??= performance.now() - began; tokens++; }
      answer += content ?? "";
      thought += reasoning ?? "";
      if (choice.finish_reason) reason = choice.finish_reason;
      later();
    }
  } catch (e) {
    if (e.name === "AbortError") reason = "stopped by the user";
    else box.append(make("p", "error", e.message));
  }
  if (usage) tokens = usage.completion_tokens;
  draw();
  box.classList.remove("writing");
  const seconds = ((performance.now() - began) / 1000).toFixed(1);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  const prompt = usage ? ` · prompt ${usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""}` : "";
  if (reason) box.append(make("p", "note", `${tokens} tokens in ${seconds} s${prompt} · ${reason}`));
  if (answer) messages.push({ role: "assistant", content: answer });
  else messages.pop();
  running = null;
  busy(false);
}

function busy(is) {
  $("log").setAttribute("aria-busy", String(is));
  $("stop_button").hidden = !is;
  $("send").disabled = is;
  if (!is) $("prompt").focus();
}

function send() {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  grow();
  ask(text);
}
function grow() {
  const field = $("prompt");
  field.style.height = "auto";
  field.style.height = Math.min(field.scrollHeight + 2, innerHeight * 0.4) + "px";
}
$("ask").onsubmit = (e) => { e.preventDefault(); send(); };
$("prompt").oninput = grow;
$("prompt").onkeydown = (e) => {
  if (e.key === "Enter" && !e.shiftKey && !e.isComposing) { e.preventDefault(); send(); }
};
document.addEventListener("keydown", (e) => { if (e.key === "Escape" && running) running.abort(); });
$("stop_button").onclick = () => running?.abort();
const hello = $("hello");
const starters = () => {
  for (const button of hello.querySelectorAll("button")) button.onclick = () => { if (!running) ask(button.textContent); };
};
starters();
$("clear").onclick = () => {
  running?.abort();
  messages = [];
  $("log").replaceChildren(hello);
  $("meter").textContent = "";
  $("prompt").focus();
};

// ---------------------------------------------------------------- the live view

const KEEP = 400;
let steps = [];
let chosen = null; // the number of the selected step
let rates = [];
let before = null;

const short = (n) => n >= 1e6 ? (n / 1e6).toFixed(1) + "M" : n >= 1e4 ? (n / 1e3).toFixed(1) + "k" : String(Math.round(n));
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function tick(view) {
  const ready = view.ready.Ok !== undefined || view.ready.Err === undefined;
  $("state").className = "state " + (ready ? "ready" : "down");
  $("state").querySelector("b").textContent = ready ? "ready" : view.ready.Err;
  if (before && view.now_us > before.now_us) {
    const rate = Math.max(0, (view.tokens - before.tokens) / ((view.now_us - before.now_us) / 1e6));
    rates.push(rate);
    if (rates.length > 120) rates.shift();
    // The engine publishes its state in bursts: show a short mean.
    const last = rates.slice(-4);
    $("tps").textContent = short(last.reduce((a, b) => a + b, 0) / last.length);
    spark();
  }
  before = view;
  $("running").textContent = view.running;
  $("seats").textContent = "of " + view.seats;
  $("running_bar").style.width = view.seats ? (100 * view.running) / view.seats + "%" : "0";
  $("queue").textContent = view.queue;
  $("queue_bar").style.width = Math.min(100, (100 * view.queue) / Math.max(view.seats, 1)) + "%";
  const pages = view.pages;
  const all = pages.used + pages.cached + pages.free;
  for (const kind of ["used", "cached", "free"]) $("pages").querySelector("." + kind).style.flexGrow = pages[kind];
  $("pages_text").textContent = all ? `${short(pages.used)} used · ${short(pages.cached)} cached · ${short(all)} total` : "";
  $("pages").setAttribute("aria-label", `KV pages: ${pages.used} used, ${pages.cached} cached, ${pages.free} free`);
  const { looked_up, found } = view.prefix;
  $("prefix").textContent = looked_up ? `prefix hits ${((100 * found) / looked_up).toFixed(0)} %` : "";
  if (view.steps.length) {
    if (steps.length && view.steps[0].step <= steps[steps.length - 1].step) steps = [];
    steps.push(...view.steps);
    steps = steps.slice(-KEEP);
    drawStrip();
    sums();
  }
}

function spark() {
  const top = Math.max(...rates, 1);
  const x = (i) => (240 * i) / Math.max(rates.length - 1, 1);
  const y = (r) => 46 - (44 * r) / top;
  const line = rates.map((r, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(r).toFixed(1)}`).join("");
  $("spark").querySelector(".line").setAttribute("d", line);
  $("spark").querySelector(".area").setAttribute("d", line + "L240 48L0 48Z");
}

const isEager = (step) => step.run !== "replayed";
const bucket = (step) => `${step.phase}/${step.phase === "decode" ? step.bucket_rows : step.bucket_tokens}`;

function drawStrip() {
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
  const last = steps[steps.length - 1];
  const span = last.at + last.device_us - steps[0].at;
  const device = steps.reduce((n, s) => n + s.device_us, 0);
  $("steps_text").textContent = `#${last.step} · ${bucket(last)}`;
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
  $("step_detail").textContent = `step ${step.step} · ${bucket(step)} · ${step.live_rows} live + ${step.padded_rows} padded rows · ${how} · host ${step.host_us} µs · device ${step.device_us} µs`;
  drawStrip();
}
$("strip").onpointermove = (e) => choose(steps.length - Math.ceil((e.currentTarget.clientWidth - e.offsetX) / (e.currentTarget.clientWidth / KEEP)));
$("strip").onclick = () => { const step = steps.find((s) => s.step === chosen); if (step) planOf(step); };
$("strip").onkeydown = (e) => {
  if (e.key === "Enter") return $("strip").onclick();
  const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -KEEP, End: KEEP }[e.key];
  if (by === undefined) return;
  e.preventDefault();
  const at = steps.findIndex((s) => s.step === chosen);
  choose((at < 0 ? steps.length - 1 : at) + by);
};
addEventListener("resize", drawStrip);

// ---------------------------------------------------------------- constant data

let buckets = []; // buckets with a drawing of their plan

async function describe() {
  try {
    const graph = await (await fetch("live/graph")).json();
    served = graph.model;
    $("model").textContent = graph.model;
    document.title = "Dacapo · " + graph.model;
    // The model's defaults, where the user has not chosen a value.
    for (const [id, value] of Object.entries(graph.defaults)) {
      if (store.get(id) === null && document.activeElement !== $(id)) { $(id).value = value; $(id).oninput?.(); }
    }
    const rows = [...graph.about, ...graph.config];
    for (const [id, shown] of [["config", rows], ["limits", graph.limits]]) {
      $(id).tBodies[0].replaceChildren(...shown.map((row) => {
        const tr = make("tr");
        tr.append(make("td", "", row.key), make("td", "", row.value), make("td", "", row.reason));
        return tr;
      }));
    }
    if (graph.buckets.join() !== buckets.join()) {
      buckets = graph.buckets;
      $("bucket").replaceChildren(...buckets.map((name) => make("option", "", name)));
      if (buckets.length) plan(buckets[0]);
    }
    $("plan_box").hidden = !buckets.length;
    return rows.length > 0;
  } catch {
    return false;
  }
}
function plan(name) {
  $("bucket").value = name;
  const link = make("a");
  link.href = "live/plan?bucket=" + encodeURIComponent(name);
  link.target = "_blank";
  link.title = "Open the drawing in a new tab: there every node and value shows its name";
  const picture = make("img");
  picture.alt = `The plan of ${name}: its nodes from left to right, and below them the workspace that each value uses, and for how long`;
  picture.onload = () => $("plan").classList.toggle("tall", picture.naturalWidth < 3 * picture.naturalHeight);
  picture.src = link.href;
  link.append(picture);
  $("plan").replaceChildren(link);
}
// Selecting a step in the strip shows the plan of its bucket.
function planOf(step) {
  const name = bucket(step);
  const found = buckets.find((known) => known === name || known.startsWith(name + "x"));
  if (found && !isEager(step)) plan(found);
}
$("bucket").onchange = () => plan($("bucket").value);

function watch() {
  const source = new EventSource("live");
  source.onmessage = (e) => tick(JSON.parse(e.data));
  source.onerror = () => {
    $("state").className = "state down";
    $("state").querySelector("b").textContent = "no connection";
    before = null;
  };
  source.onopen = () => describe();
}

theme(store.get("theme") ?? (matchMedia("(prefers-color-scheme: light)").matches ? "light" : "dark"));
watch();
(async () => { for (let i = 0; i < 20 && !(await describe()); i++) await new Promise((r) => setTimeout(r, 1000)); })();
$("prompt").focus();
