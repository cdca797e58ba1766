// The engine view over /live, the description of the model, and whether the server is ready.
//
// The stream of /live is open only while the view is seen: it is a connection of its own, and browsers
// allow few of them to one server. Otherwise the page asks now and then whether the server is ready.

import { setModel } from "./chat.js";
import { $, make } from "./dom.js";
import { showExperts } from "./experts.js";
import { setDefaults } from "./parameters.js";
import { addSteps, bucketOf, drawStrip, isEager, listenToStrip } from "./strip.js";

const ASK_EVERY = 10_000; // milliseconds between questions whether the server is ready
let rates = [];
let before = null;
let source = null;
let wanted = false; // the engine view is open
let buckets = []; // buckets with a drawing of their plan

const short = (n) => n >= 1e6 ? (n / 1e6).toFixed(1) + "M" : n >= 1e4 ? (n / 1e3).toFixed(1) + "k" : String(Math.round(n));

function setState(ready, text) {
  $("state").className = "state " + (ready ? "ready" : "down");
  const shown = $("state").querySelector("b");
  if (shown.textContent !== text) shown.textContent = text;
  $("state").title = text;
}

function tick(view) {
  const ready = view.ready.Ok !== undefined || view.ready.Err === undefined;
  setState(ready, ready ? "ready" : view.ready.Err);
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
  showExperts(view.experts);
  addSteps(view.steps);
}

function spark() {
  const top = Math.max(...rates, 1);
  const x = (i) => (240 * i) / Math.max(rates.length - 1, 1);
  const y = (r) => 46 - (44 * r) / top;
  const line = rates.map((r, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(r).toFixed(1)}`).join("");
  $("spark").querySelector(".line").setAttribute("d", line);
  $("spark").querySelector(".area").setAttribute("d", line + "L240 48L0 48Z");
}

// ---------------------------------------------------------------- constant data

/** Reads the model's description; false: it is not there yet. */
async function describe() {
  try {
    const graph = await (await fetch("live/graph")).json();
    setModel(graph.model);
    $("model").textContent = graph.model;
    $("model").title = `The served model: ${graph.model}`;
    document.title = "Dacapo · " + graph.model;
    setDefaults(graph.defaults);
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
      $("plan").replaceChildren();
    }
    $("plan_box").hidden = !buckets.length;
    if (wanted && buckets.length && !$("plan").firstChild) plan(buckets[0]);
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
  const name = bucketOf(step);
  const found = buckets.find((known) => known === name || known.startsWith(name + "x"));
  if (found && !isEager(step)) plan(found);
}

// ---------------------------------------------------------------- the connection

async function askReady() {
  if (source || document.hidden) return;
  try {
    const response = await fetch("health/ready");
    const body = await response.json();
    if (!source) setState(response.ok, response.ok ? "ready" : body.error?.message ?? "not ready");
  } catch {
    if (!source) setState(false, "no connection");
  }
}

function connect() {
  const open = wanted && !document.hidden;
  if (open && !source) {
    source = new EventSource("live");
    source.onmessage = (e) => tick(JSON.parse(e.data));
    source.onerror = () => { setState(false, "no connection"); before = null; };
    source.onopen = () => describe();
  } else if (!open && source) {
    source.close();
    source = null;
    before = null;
  }
  if (!open) askReady();
}

/** Opens or closes the view's connection. */
export function showEngine(open) {
  if (open !== wanted) { wanted = open; connect(); }
  if (open) {
    if (buckets.length && !$("plan").firstChild) plan(buckets[0]);
    drawStrip();
  }
}

export async function listenToEngine() {
  $("bucket").onchange = () => plan($("bucket").value);
  listenToStrip(planOf);
  document.addEventListener("visibilitychange", connect);
  setInterval(askReady, ASK_EVERY);
  askReady();
  // While a model is loaded, its description is not complete.
  for (let i = 0; i < 20 && !(await describe()); i++) await new Promise((done) => setTimeout(done, 1000));
}
