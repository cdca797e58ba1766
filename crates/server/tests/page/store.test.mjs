// What the page keeps, and what it does where nothing can be kept.

import assert from "node:assert/strict";
import { test } from "node:test";
import { Store, titleOf } from "../../src/page/store.js";
import { random } from "./random.mjs";

/** Storage with room for `room` characters, as browsers have it. */
class Fake {
  constructor(room = Infinity) { this.map = new Map(); this.room = room; }
  get length() { return this.map.size; }
  key(i) { return [...this.map.keys()][i] ?? null; }
  getItem(key) { return this.map.get(key) ?? null; }
  setItem(key, value) {
    let used = key.length + value.length;
    for (const [other, held] of this.map) if (other !== key) used += other.length + held.length;
    if (used > this.room) throw new Error("QuotaExceededError");
    this.map.set(key, value);
  }
  removeItem(key) { this.map.delete(key); }
}
const say = (role, content) => ({ role, content });
function chatWith(store, ...messages) {
  const chat = store.create();
  chat.messages.push(...messages);
  return chat;
}

test("a conversation is read back whole by another page", () => {
  const storage = new Fake();
  const store = new Store(storage);
  const chat = chatWith(store, { ...say("user", "héllo 😀"), files: [{ name: "a.txt", text: "x\n" }] },
    { ...say("assistant", "**hi**"), thought: "hm", note: "3 tokens" }, { ...say("assistant", ""), error: "no" });
  assert.equal(store.save(chat), true);
  assert.deepEqual(new Store(storage).load(chat.id), chat);
  assert.deepEqual(new Store(storage).list(), [{ id: chat.id, title: "héllo 😀", updated: chat.updated }]);
});

test("rename, delete, order", () => {
  const store = new Store(new Fake());
  const [a, b] = [chatWith(store, say("user", "a")), chatWith(store, say("user", "b"))];
  a.updated = 1;
  b.updated = 2;
  store.save(a);
  store.save(b);
  assert.deepEqual(store.list().map((chat) => chat.title), ["b", "a"]);
  a.named = true;
  a.title = "mine";
  a.messages.push(say("user", "more"));
  a.updated = 3;
  store.save(a);
  assert.deepEqual(store.list().map((chat) => chat.title), ["mine", "b"]);
  assert.equal(store.load(a.id).named, true);
  store.remove(a.id);
  assert.equal(store.load(a.id), null);
  assert.deepEqual(store.list().map((chat) => chat.title), ["b"]);
  assert.equal(store.backend.length, 2, "a removed conversation leaves keys behind");
});

test("full storage keeps the conversation in memory, and the others where they are", () => {
  const storage = new Fake(600);
  const store = new Store(storage);
  const small = chatWith(store, say("user", "small"));
  assert.equal(store.save(small), true);
  const large = chatWith(store, say("user", "x".repeat(600)));
  assert.equal(store.save(large), false);
  assert.equal(store.load(large.id), large);
  assert.equal(store.list().length, 2);
  assert.deepEqual(new Store(storage).list().map((chat) => chat.id), [small.id]);
  // Room again: it is stored.
  storage.room = Infinity;
  assert.equal(store.save(large), true);
  assert.equal(new Store(storage).list().length, 2);
});

test("a conversation that outgrows the storage is not shown by its old text", () => {
  const store = new Store(new Fake(400));
  const chat = chatWith(store, say("user", "one"));
  assert.equal(store.save(chat), true);
  chat.messages.push(say("assistant", "y".repeat(400)));
  assert.equal(store.save(chat), false);
  assert.equal(store.load(chat.id).messages.length, 2);
  store.remove(chat.id);
  assert.deepEqual(store.list(), []);
});

test("storage that is missing or always throws", () => {
  const throws = new Proxy({}, { get() { throw new Error("SecurityError"); } });
  for (const backend of [null, throws]) {
    const store = new Store(backend);
    assert.equal(store.write("theme", "dark"), false);
    assert.equal(store.read("theme"), null);
    const chat = chatWith(store, say("user", "a"));
    assert.equal(store.save(chat), false);
    assert.equal(store.list().length, 1);
    assert.equal(store.load(chat.id), chat);
    store.erase("theme");
    store.remove(chat.id);
    assert.deepEqual(store.list(), []);
  }
});

test("damaged values are skipped", () => {
  const storage = new Fake();
  const store = new Store(storage);
  const good = chatWith(store, say("user", "good"));
  store.save(good);
  const bad = ["", "{", "null", "[]", "7", "{\"messages\":3}", "\"x\""];
  bad.forEach((json, i) => {
    storage.setItem(`dacapo.chat.bad${i}`, json);
    storage.setItem(`dacapo.head.bad${i}`, json);
    assert.ok(store.load(`bad${i}`) === null, json);
  });
  assert.ok(store.list().some((chat) => chat.id === good.id));
  storage.setItem("dacapo.chat.odd", JSON.stringify({ title: 5, messages: [null, 1, { role: "system", content: "x" }, { role: "user", content: 3 },
    { role: "user", content: "kept", files: [null, { name: "f" }, { name: "g", text: "t", href: "x" }], onclick: "x" }] }));
  assert.deepEqual(store.load("odd").messages, [{ role: "user", content: "kept", files: [{ name: "g", text: "t" }] }]);
});

test("random work on full and roomy storage equals a plain map", () => {
  const pick = random(11);
  for (let round = 0; round < 200; round++) {
    const store = new Store(new Fake(pick(2) ? Infinity : 200 + pick(3000)));
    const expected = new Map();
    for (let n = 0; n < 40; n++) {
      const known = [...expected.keys()];
      const what = pick(3);
      if (what === 0 || !known.length) {
        const chat = chatWith(store, say("user", "m".repeat(pick(300))));
        store.save(chat);
        expected.set(chat.id, structuredClone(chat));
      } else if (what === 1) {
        const chat = store.load(known[pick(known.length)]);
        chat.messages.push(say("assistant", "n".repeat(pick(300))));
        store.save(chat);
        expected.set(chat.id, structuredClone(chat));
      } else {
        const id = known[pick(known.length)];
        store.remove(id);
        expected.delete(id);
      }
    }
    assert.deepEqual(new Set(store.list().map((chat) => chat.id)), new Set(expected.keys()));
    for (const [id, chat] of expected) assert.deepEqual(store.load(id), chat);
  }
});

test("titles", () => {
  assert.equal(titleOf([]), "New chat");
  assert.equal(titleOf([say("user", "  # Two **words**\nmore")]), "Two words");
  assert.equal(titleOf([{ ...say("user", ""), files: [{ name: "a.txt", text: "" }] }]), "a.txt");
  const long = titleOf([say("user", "😀".repeat(100))]);
  assert.equal([...long].length, 60);
  assert.ok(long.endsWith("😀…"));
});
