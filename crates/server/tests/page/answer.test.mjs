// What is sent to the server, and how its events are read.

import assert from "node:assert/strict";
import { test } from "node:test";
import { contentOf, requestMessages, stream } from "../../src/page/answer.js";
import { textOf } from "../../src/page/files.js";

const say = (role, content, files) => ({ role, content, ...(files ? { files } : {}) });

test("files stand before the text, in a fence that they cannot close", () => {
  assert.equal(contentOf(say("user", "plain")), "plain");
  assert.equal(contentOf(say("user", "why?", [{ name: "a.md", text: "x\n````\ny\n" }])), "File a.md:\n`````\nx\n````\ny\n`````\n\nwhy?");
  assert.equal(contentOf(say("user", "", [{ name: "a", text: "1" }, { name: "b", text: "2" }])), "File a:\n```\n1\n```\n\nFile b:\n```\n2\n```");
});

test("roles alternate, whatever failed before", () => {
  const roles = (messages, system) => requestMessages(messages, system).map(({ role, content }) => `${role[0]}:${content}`);
  assert.deepEqual(roles([say("user", "a")], "be kind"), ["s:be kind", "u:a"]);
  assert.deepEqual(roles([say("user", "a"), say("assistant", ""), say("user", "b")], ""), ["u:b"]);
  assert.deepEqual(roles([say("user", "a"), say("assistant", "b"), say("user", "c")], ""), ["u:a", "a:b", "u:c"]);
  assert.deepEqual(Object.keys(requestMessages([{ ...say("user", "a"), note: "x" }], "")[0]), ["role", "content"]);
});

test("only UTF-8 text is a text file", () => {
  const bytes = (...values) => new Uint8Array(values);
  assert.equal(textOf(new TextEncoder().encode("é\r\n😀")), "é\n😀");
  assert.equal(textOf(bytes(0x89, 0x50, 0x4e, 0x47)), null);
  assert.equal(textOf(bytes(0x61, 0, 0x62)), null);
  assert.equal(textOf(bytes(0xff, 0xfe, 0x61, 0)), null);
  assert.equal(textOf(bytes()), "");
});

/** Answers `fetch` with these bytes, in pieces of `size`. */
function serve(text, size, status = 200) {
  const bytes = new TextEncoder().encode(text);
  globalThis.fetch = async () => new Response(new ReadableStream({
    start(controller) {
      for (let i = 0; i < bytes.length; i += size) controller.enqueue(bytes.slice(i, i + size));
      controller.close();
    },
  }), { status });
}
const event = (value) => `data: ${JSON.stringify(value)}\n\n`;
const piece = (delta, finish_reason = null) => event({ choices: [{ delta, finish_reason }] });

async function read() {
  let content = "", thought = "";
  const end = await stream([], {}, undefined, (more, thinking) => { content += more; thought += thinking; });
  return { content, thought, ...end };
}

test("events are read however the bytes are cut", async () => {
  const text = piece({ role: "assistant", content: "" }) + piece({ reasoning_content: "hm é" }) + piece({ content: "a 😀\n\n" }) + ": ping\n\n"
    + piece({ content: "b" }) + piece({}, "length") + event({ choices: [], usage: { completion_tokens: 3 } }) + "data: [DONE]\n\n";
  for (const size of [1, 2, 3, 7, 64, 9999]) {
    serve(text, size);
    const { content, thought, reason, usage, tokens } = await read();
    assert.deepEqual([content, thought, reason, usage.completion_tokens, tokens], ["a 😀\n\nb", "hm é", "length", 3, 3]);
  }
});

test("errors are told in the server's words", async () => {
  serve(JSON.stringify({ error: { message: "max_tokens must be at least 1" } }), 99, 400);
  await assert.rejects(read(), /^Error: max_tokens must be at least 1$/);
  serve("<html>", 99, 502);
  await assert.rejects(read(), /502/);
  serve(piece({ content: "a" }) + event({ error: { message: "device lost" } }), 99);
  await assert.rejects(read(), /device lost/);
  serve(piece({ content: "a" }), 99);
  await assert.rejects(read(), /ended before the answer/);
});
