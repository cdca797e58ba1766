// The list of conversations: open, rename, delete.

import { openChat, openId, removeChat, renameChat, save } from "./chat.js";
import { $, iconButton, make, notify } from "./dom.js";
import { closeNarrow } from "./panels.js";
import { store } from "./store.js";

let drawn = "";

/** Opens a conversation (null: a new one) and keeps its address, so that a reload finds it. */
export function go(id) {
  if (!openChat(id)) return;
  history.pushState(null, "", id === null ? location.pathname + location.search : "#/" + id);
  closeNarrow();
  $("prompt").focus();
}

function rename(entry, item) {
  const field = make("input");
  field.value = entry.title;
  field.maxLength = 120;
  field.setAttribute("aria-label", "Title of the conversation");
  let ended = false;
  const end = (keep) => {
    if (ended) return;
    ended = true;
    drawn = "";
    if (keep && field.value.trim() !== entry.title) renameChat(entry.id, field.value.trim());
    drawList();
    document.querySelector(`#chats [data-id="${CSS.escape(entry.id)}"] .open`)?.focus();
  };
  field.onkeydown = (event) => {
    if (event.key === "Enter" && !event.isComposing) end(true);
    if (event.key === "Escape") { event.stopPropagation(); end(false); }
  };
  field.onblur = () => end(true);
  item.replaceChildren(field);
  field.select();
}

function remove(entry) {
  const items = [...$("chats").children];
  const at = items.findIndex((item) => item.dataset.id === entry.id);
  const wasOpen = entry.id === openId();
  const chat = removeChat(entry.id);
  if (wasOpen) go(null);
  drawList();
  if (!wasOpen) ($("chats").children[Math.min(at, items.length - 2)]?.querySelector(".open") ?? $("new_chat")).focus();
  notify(`Deleted “${entry.title}”.`, "Undo", () => {
    if (!chat) return;
    save(chat);
    go(chat.id);
  });
}

function itemOf(entry, current) {
  const item = make("li");
  item.dataset.id = entry.id;
  const open = make("button", "open", entry.title);
  open.type = "button";
  open.title = entry.title;
  if (current) { item.className = "current"; open.setAttribute("aria-current", "page"); }
  open.onclick = () => go(entry.id);
  open.ondblclick = () => rename(entry, item);
  item.append(open,
    iconButton("edit", `Rename ${entry.title}`, () => rename(entry, item)),
    iconButton("delete", `Delete ${entry.title}`, () => remove(entry)));
  return item;
}

/** Draws the list where it changed; a title that is being edited is left alone. */
export function drawList() {
  const current = openId();
  const entries = store.list();
  const now = JSON.stringify([current, entries.map(({ id, title }) => [id, title])]);
  const editing = drawn !== "" && $("chats").querySelector("input");
  if (now === drawn || editing) return;
  drawn = now;
  $("chats").replaceChildren(...entries.map((entry) => itemOf(entry, entry.id === current)));
  $("no_chats").hidden = entries.length > 0;
}

export function listenToList() {
  $("new_chat").onclick = () => go(null);
  $("new_small").onclick = () => go(null);
}
