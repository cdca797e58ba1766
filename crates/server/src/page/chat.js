// The open conversation: its messages, the message box, and the answers that are being written.

import { requestMessages, stream } from "./answer.js";
import { $, announce, notify } from "./dom.js";
import { hasFiles, listenForFiles, takeFiles } from "./files.js";
import { earlierButton, MessageView } from "./message.js";
import { parameters, systemMessage } from "./parameters.js";
import { store } from "./store.js";

const SHOWN = 60; // messages of a long conversation that are shown at first
const MORE = 100; // messages that are added to them on demand
const SAVE_EVERY = 2000; // milliseconds between saves of an answer that is being written

let open = store.create();
let served = "Model";
let views = []; // of the messages that are shown, the last ones
let changed = () => {}; // called where the list of conversations may differ
let told = false; // the user knows that storage does not work
const runs = new Map(); // answers that are being written, by conversation
const hello = $("hello");
const log = $("log");

export const openId = () => open.id;

export function setModel(name) {
  served = name;
  for (const view of views) if (view.message.role === "assistant") view.box.querySelector(".who").textContent = name;
}

// ---------------------------------------------------------------- showing

const atEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 80;
const toEnd = () => { log.scrollTop = log.scrollHeight; };

function viewOf(message) {
  return new MessageView(message, message.role === "user" ? "You" : served, {
    edit: (text) => edit(message, text),
    again: () => again(message),
    following: () => open.messages.length - 1 - open.messages.indexOf(message),
  });
}

function append(message) {
  hello.remove();
  const view = viewOf(message);
  views.push(view);
  log.append(view.box);
  return view;
}

function show(count = SHOWN) {
  const { messages } = open;
  const from = Math.max(messages.length - count, 0);
  log.replaceChildren();
  views = [];
  if (from > 0) log.append(earlierButton(Math.min(from, MORE), showEarlier));
  for (const message of messages.slice(from)) append(message);
  if (!messages.length) log.append(hello);
  const run = runs.get(open.id);
  if (run) { run.view = views.at(-1); run.view.start(); }
  $("meter").textContent = "";
  busy();
}

function showEarlier() {
  const height = log.scrollHeight;
  show(views.length + MORE);
  log.scrollTop = log.scrollHeight - height;
  log.focus({ preventScroll: true });
}

/** Opens a stored conversation; null opens an empty one. False: there is no such conversation. */
export function openChat(id) {
  const found = id === null ? store.create() : runs.get(id)?.conversation ?? (id === open.id ? open : store.load(id));
  if (!found) return false;
  open = found;
  show();
  toEnd();
  changed();
  return true;
}

/** Another tab changed a conversation. */
export function changedElsewhere(id) {
  if (id === open.id && !runs.has(id)) {
    const found = store.load(id);
    if (found) { open = found; show(); toEnd(); }
  }
  changed();
}

/** The title was changed in the list. */
export function renameChat(id, title) {
  const chat = id === open.id ? open : runs.get(id)?.conversation ?? store.load(id);
  if (!chat) return;
  chat.named = title !== "";
  if (title) chat.title = title;
  save(chat);
}

/** Removes a conversation; returns it, so that the user can take it back. */
export function removeChat(id) {
  const chat = id === open.id ? open : runs.get(id)?.conversation ?? store.load(id);
  runs.get(id)?.controller.abort("removed");
  runs.delete(id);
  store.remove(id);
  return chat;
}

export function save(conversation) {
  const kept = store.save(conversation);
  if (!kept && !told) {
    told = true;
    notify("This browser's storage is full or not allowed: the conversation is kept only until this page is closed.");
  }
  changed();
}

// ---------------------------------------------------------------- asking

function noteOf({ usage, tokens, seconds, reason }) {
  const count = usage?.completion_tokens ?? tokens;
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  const prompt = usage ? ` · prompt ${usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""}` : "";
  return `${count} ${count === 1 ? "token" : "tokens"} in ${seconds().toFixed(1)} s${prompt} · ${reason}`;
}

function meter({ tokens, first, seconds }) {
  if (first === null) return;
  // The rate of a few tokens, or of some that came at once, says nothing.
  const time = seconds() - first;
  const rate = tokens >= 8 && time >= 0.1 ? ` · ${((tokens - 1) / time).toFixed(0)} tok/s` : "";
  $("meter").textContent = `${tokens} ${tokens === 1 ? "token" : "tokens"} · first ${first.toFixed(2)} s${rate}`;
}

/** Draws an answer at most once a frame, and less often where drawing takes long. */
function drawer(run) {
  let waiting = false, cost = 0;
  const draw = () => {
    waiting = false;
    if (runs.get(run.conversation.id) !== run || open !== run.conversation) return;
    const began = performance.now();
    const follow = atEnd();
    run.view.draw();
    meter(run.figures);
    if (follow) toEnd();
    cost = performance.now() - began;
  };
  return () => {
    if (waiting) return;
    waiting = true;
    if (cost > 12) setTimeout(draw, cost * 3); else requestAnimationFrame(draw);
  };
}

/** Asks for the answer to the open conversation, whose last message is the user's. */
async function ask() {
  const conversation = open;
  const sent = requestMessages(conversation.messages, systemMessage());
  const message = { role: "assistant", content: "" };
  conversation.messages.push(message);
  conversation.updated = Date.now();
  const run = { conversation, message, controller: new AbortController(), view: append(message), saved: Date.now(), figures: null };
  runs.set(conversation.id, run);
  run.view.start();
  toEnd();
  busy();
  save(conversation);
  history.replaceState(null, "", "#/" + conversation.id);
  const later = drawer(run);
  const grow = (content, thought, figures) => {
    message.content += content;
    if (thought) message.thought = (message.thought ?? "") + thought;
    run.figures = figures;
    if (Date.now() - run.saved > SAVE_EVERY) { run.saved = Date.now(); store.save(conversation); }
    later();
  };
  try {
    message.note = noteOf(await stream(sent, parameters(), run.controller.signal, grow));
  } catch (error) {
    if (!run.controller.signal.aborted) message.error = error.message || "the connection failed";
    else if (run.figures) message.note = noteOf({ ...run.figures, reason: "stopped by the user" });
    else message.note = "stopped by the user";
  }
  if (run.controller.signal.reason !== "removed") end(run);
}

function end(run) {
  const { conversation, message } = run;
  runs.delete(conversation.id);
  conversation.updated = Date.now();
  save(conversation);
  if (open !== conversation) return;
  const follow = atEnd();
  run.view.draw();
  if (run.figures) meter(run.figures);
  run.view.finish();
  if (follow) toEnd();
  busy();
  announce(message.error ? `Error: ${message.error}` : `${served}: ${message.content.slice(0, 2000)}`);
}

/** The buttons and the state of the log follow what is running. */
function busy() {
  const is = runs.has(open.id);
  log.setAttribute("aria-busy", String(is));
  log.classList.toggle("busy", is);
  $("stop_button").hidden = !is;
  $("send").hidden = is;
}

function cutAfter(message) {
  const at = open.messages.indexOf(message);
  open.messages.length = at;
  while (views.length && !open.messages.includes(views.at(-1).message)) views.pop().box.remove();
}

function edit(message, text) {
  if (runs.has(open.id)) return;
  cutAfter(message);
  say(text, message.files);
}

function again(message) {
  if (runs.has(open.id)) return;
  cutAfter(message);
  ask();
}

function say(text, files) {
  const message = { role: "user", content: text };
  if (files?.length) message.files = files;
  open.messages.push(message);
  append(message);
  ask();
  $("prompt").focus();
}

export function stop() {
  const run = runs.get(open.id);
  run?.controller.abort();
  return Boolean(run);
}

function send() {
  const field = $("prompt"), text = field.value.trim();
  if ((!text && !hasFiles()) || runs.has(open.id)) return;
  field.value = "";
  grow();
  say(text, takeFiles());
}

function grow() {
  const field = $("prompt");
  field.style.height = "auto";
  field.style.height = Math.min(field.scrollHeight, innerHeight * 0.4) + "px";
}

/** `whenChanged()` is called where the list of conversations may differ. */
export function listenToChat(whenChanged) {
  changed = whenChanged;
  $("ask").onsubmit = (event) => { event.preventDefault(); send(); };
  $("prompt").oninput = grow;
  $("prompt").onkeydown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  };
  $("stop_button").onclick = () => { stop(); $("prompt").focus(); };
  for (const button of hello.querySelectorAll("button")) {
    button.onclick = () => { if (!runs.has(open.id)) say(button.textContent.trim(), []); };
  }
  log.onscroll = () => { $("to_end").hidden = atEnd(); };
  $("to_end").onclick = () => { toEnd(); $("prompt").focus(); };
  addEventListener("pagehide", () => { for (const run of runs.values()) store.save(run.conversation); });
  listenForFiles();
}
