// What the page keeps in the browser: settings, and conversations.
//
// A conversation has two keys: `chat.ID` with its messages, and `head.ID` with what the list shows. No
// key is shared by conversations, so two tabs do not overwrite each other's. Where the browser stores
// nothing (private windows, blocked or full storage), conversations live until the page is closed.

const PREFIX = "dacapo.";
const text = (value) => (typeof value === "string" ? value : "");

/** One message from JSON of unknown shape, or null. */
function messageFrom(value) {
  if (!["user", "assistant"].includes(value?.role) || typeof value.content !== "string") return null;
  const message = { role: value.role, content: value.content };
  for (const key of ["thought", "note", "error"]) if (text(value[key])) message[key] = value[key];
  if (Array.isArray(value.files)) {
    message.files = value.files.filter((file) => text(file?.name) && typeof file.text === "string").map(({ name, text }) => ({ name, text }));
  }
  return message;
}

function conversationFrom(id, json) {
  const value = JSON.parse(json);
  if (!Array.isArray(value?.messages)) return null;
  const messages = value.messages.map(messageFrom).filter((message) => message !== null);
  return { id, title: text(value.title), named: value.named === true, updated: Number(value.updated) || 0, messages };
}

/** A title from the first message. */
export function titleOf(messages) {
  const first = messages.find((message) => message.role === "user");
  if (!first) return "New chat";
  const line = (first.content.trim() || first.files?.[0]?.name || "").split("\n")[0].replace(/\*\*|`|^#+ /g, "").replace(/\s+/g, " ");
  const letters = [...line];
  return letters.length > 60 ? letters.slice(0, 59).join("").trimEnd() + "…" : line || "New chat";
}

export class Store {
  /** `backend`: an object like localStorage, or null. */
  constructor(backend) {
    this.backend = backend;
    this.memory = new Map(); // conversations that could not be stored, by id
  }

  read(key) {
    try { return this.backend?.getItem(PREFIX + key) ?? null; } catch { return null; }
  }

  /** Whether the value was kept. */
  write(key, value) {
    try {
      if (!this.backend) return false;
      this.backend.setItem(PREFIX + key, value);
      return true;
    } catch {
      return false;
    }
  }

  erase(key) {
    try { this.backend?.removeItem(PREFIX + key); } catch { /* it is not there either */ }
  }

  /** An empty conversation; it is stored when it has a message. */
  create() {
    const id = Date.now().toString(36) + Math.floor(Math.random() * 36 ** 6).toString(36).padStart(6, "0");
    return { id, title: "New chat", named: false, updated: Date.now(), messages: [] };
  }

  /** Keeps a conversation; false: only until the page is closed. */
  save(conversation) {
    if (!conversation.named) conversation.title = titleOf(conversation.messages);
    const { id, title, named, updated, messages } = conversation;
    const kept = this.write("chat." + id, JSON.stringify({ title, named, updated, messages }))
      && this.write("head." + id, JSON.stringify({ title, updated }));
    if (kept) this.memory.delete(id); else this.memory.set(id, conversation);
    return kept;
  }

  load(id) {
    const held = this.memory.get(id);
    if (held) return held;
    const json = this.read("chat." + id);
    if (json === null) return null;
    try { return conversationFrom(id, json); } catch { return null; }
  }

  remove(id) {
    this.memory.delete(id);
    this.erase("chat." + id);
    this.erase("head." + id);
  }

  /** [{ id, title, updated }], the newest first. */
  list() {
    const found = new Map();
    let keys = [];
    try { keys = this.backend ? Array.from({ length: this.backend.length }, (_, i) => this.backend.key(i)) : []; } catch { /* none */ }
    for (const key of keys) {
      if (!key?.startsWith(PREFIX + "head.")) continue;
      const id = key.slice(PREFIX.length + 5);
      try {
        const head = JSON.parse(this.read("head." + id));
        found.set(id, { id, title: text(head.title) || "New chat", updated: Number(head.updated) || 0 });
      } catch { /* not ours, or damaged */ }
    }
    for (const { id, title, updated } of this.memory.values()) found.set(id, { id, title, updated });
    return [...found.values()].sort((a, b) => b.updated - a.updated || (a.id < b.id ? 1 : -1));
  }
}

/** The browser's storage, or null where reading it is not allowed. */
function browserStorage() {
  try { return globalThis.localStorage ?? null; } catch { return null; }
}

export const store = new Store(browserStorage());
