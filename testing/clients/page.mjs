// Tests the page in headless Chromium and takes screenshots.
//
//     node testing/clients/page.mjs http://127.0.0.1:8000 FOLDER
//
// Needs playwright-core (npm) and Chromium (CHROMIUM=/usr/bin/chromium). The answers come from the
// server, except where a test needs certain text: then the test answers in its place.

import assert from "node:assert/strict";
import { mkdirSync } from "node:fs";
import { chromium } from "playwright-core";
import { HOSTILE, SAMPLE } from "./page_texts.mjs";

const [base = "http://127.0.0.1:8000", folder = "screenshots"] = process.argv.slice(2);
mkdirSync(folder, { recursive: true });
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"],
});
const problems = [];

/** A page in a browser without a past; `before` runs in it ahead of the page's scripts. */
async function visit({ width = 1400, height = 900, scheme = "dark", before } = {}) {
  const context = await browser.newContext({ viewport: { width, height }, colorScheme: scheme, permissions: ["clipboard-read", "clipboard-write"] });
  const page = await context.newPage();
  page.setDefaultTimeout(60_000);
  page.on("console", (message) => { if (message.type() === "error") problems.push(message.text()); });
  page.on("pageerror", (error) => problems.push(String(error)));
  page.on("dialog", (dialog) => { problems.push("dialog: " + dialog.message()); dialog.dismiss(); });
  page.on("request", (request) => { if (!request.url().startsWith(base) && !request.url().startsWith("data:")) problems.push("outside: " + request.url()); });
  if (before) await page.addInitScript(before);
  await page.goto(base + "/");
  await page.waitForSelector(".state.ready");
  return page;
}

const shot = (page, name) => page.screenshot({ path: `${folder}/${name}.png` });
const texts = (page, selector) => page.locator(selector).allTextContents();
const answered = (page) => page.waitForSelector("#stop_button[hidden]", { state: "attached", timeout: 120_000 });
const widthFits = async (page) => assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth && document.querySelector("#log").scrollWidth <= document.querySelector("#log").clientWidth), "the page scrolls sideways");

async function say(page, text) {
  await page.focus("#prompt");
  await page.keyboard.type(text);
  await page.keyboard.press("Enter");
}

/** The next requests get this text as the answer; the bodies of the requests are returned. */
async function answerWith(page, text) {
  const asked = [];
  await page.unrouteAll();
  await page.route("**/v1/chat/completions", async (route) => {
    asked.push(JSON.parse(route.request().postData()));
    const pieces = text.match(/[\s\S]{1,37}/g) ?? [];
    const chunks = pieces.map((content) => ({ choices: [{ delta: { content }, finish_reason: null }] }));
    chunks.push({ choices: [{ delta: {}, finish_reason: "stop" }] });
    const body = chunks.map((chunk) => `data: ${JSON.stringify(chunk)}\n\n`).join("") + "data: [DONE]\n\n";
    await route.fulfill({ contentType: "text/event-stream", body });
  });
  return asked;
}

// ---------------------------------------------------------------- tests

/** The first visit has answers that are long enough to be seen growing, and no longer. */
function shortAnswers() {
  if (localStorage.getItem("dacapo.max_tokens") === null && !sessionStorage.length) localStorage.setItem("dacapo.max_tokens", "160");
  sessionStorage.setItem("visited", "yes");
}

async function chatting() {
  const page = await visit({ before: shortAnswers });
  const live = [];
  page.on("request", (request) => { if (request.url().endsWith("/live")) live.push(request.url()); });
  assert.ok(await page.locator("#live").isHidden(), "the engine view is open at first");
  assert.equal(await page.evaluate(() => document.activeElement.id), "prompt");
  await shot(page, "1-start-dark");
  await say(page, "Tell me about **graphs** and `replay`.");
  await page.waitForSelector("#stop_button:not([hidden])");
  const body = page.locator(".message.assistant .body").last();
  await page.waitForFunction(() => (document.querySelector(".message.assistant .body")?.textContent.length ?? 0) > 10);
  const early = (await body.textContent()).length;
  await page.waitForTimeout(600);
  assert.ok((await body.textContent()).length > early, "the answer does not stream");
  await shot(page, "2-streaming");
  await answered(page);
  assert.match(await page.locator(".message.assistant .note").textContent(), /\d+ tokens in .* s · prompt \d+/);
  assert.deepEqual(live, [], "the live stream is open although the view is closed");

  // Escape stops an answer, and so does the button; the text so far stays.
  await say(page, "Please think about it.");
  await page.waitForSelector("#stop_button:not([hidden])");
  await page.waitForTimeout(400);
  await page.keyboard.press("Escape");
  await answered(page);
  assert.match((await texts(page, ".message.assistant .note")).at(-1), /stopped by the user/);
  await say(page, "Count from one to a hundred, in words.");
  await page.click("#stop_button");
  await answered(page);
  assert.equal(await page.locator(".message.user").count(), 3);

  // A reload keeps the conversation: its messages, its place in the list, its address.
  const before = await texts(page, ".message .body");
  const notes = await texts(page, ".message .note");
  await page.reload();
  await page.waitForSelector(".message");
  assert.deepEqual(await texts(page, ".message .body"), before);
  assert.deepEqual(await texts(page, ".message .note"), notes);
  assert.deepEqual(await texts(page, "#chats .current .open"), ["Tell me about graphs and replay."]);
  await shot(page, "3-reloaded");
  return page;
}

/** The engine view: buckets, plans, steps. */
async function engine(page) {
  await page.click("#show_engine");
  await page.waitForSelector("#config tbody tr");
  const pictured = (name) => page.waitForFunction((name) => {
    const picture = document.querySelector("#plan img");
    return picture?.complete && picture.naturalWidth > 0 && (!name || picture.alt.includes(` ${name}:`));
  }, name);
  await pictured();
  const buckets = await texts(page, "#bucket option");
  assert.ok(buckets.length > 1 && buckets.some((name) => name.startsWith("decode/")), buckets.join());
  for (const name of [buckets.at(-1), buckets[0]]) {
    await page.selectOption("#bucket", name);
    await pictured(name);
  }
  await say(page, "Say hello.");
  await page.waitForFunction(() => document.querySelector("#steps_text").textContent.startsWith("#"));
  await answered(page);
  assert.equal(await page.locator("#sums div").count(), 4);
  await page.focus("#strip");
  await page.keyboard.press("ArrowLeft");
  const detail = await page.textContent("#step_detail");
  assert.match(detail, /step \d+ · (decode|prefill)\//);
  if (!detail.includes("eager")) {
    await page.keyboard.press("Enter");
    const shown = await page.inputValue("#bucket");
    assert.ok(detail.includes(shown.split("x")[0]), `${detail} is drawn as ${shown}`);
    await pictured(shown);
  }
  await shot(page, "4-engine-dark");
  await page.click("#theme");
  assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), "light");
  await page.evaluate(() => document.querySelector("#live").scrollTo(0, 9999));
  await shot(page, "5-engine-light");
  await page.click("[data-close=live]");
  assert.ok(await page.locator("#live").isHidden());
}

/** The drawer stands beside the chat; an error of the server is shown and can be tried again. */
async function parameters(page) {
  await page.click("#show_parameters");
  const [chat, drawer] = [await page.locator("#chat").boundingBox(), await page.locator("#parameters").boundingBox()];
  assert.ok(chat.x + chat.width <= drawer.x + 1 && chat.width > 500, "the drawer covers the chat");
  if (!(await (await fetch(base + "/live/graph")).json()).defaults.temperature) {
    // The model has no defaults, so the page uses its own.
    assert.deepEqual([await page.inputValue("#temperature"), await page.inputValue("#top_p")], ["0.7", "0.95"]);
  }
  await page.fill("#max_tokens", "0");
  await say(page, "This is refused.");
  await page.waitForSelector(".message .error");
  assert.match(await page.textContent(".message .error"), /max_tokens/);
  await shot(page, "6-parameters-light");
  await page.click("#reset");
  assert.equal(await page.inputValue("#max_tokens"), "1024");
  await page.fill("#max_tokens", "8");
  await page.locator(".message:last-child .again").click();
  await page.waitForFunction(() => !document.querySelector(".error") && document.querySelector(".message:last-child .note"));
  await page.reload();
  await page.waitForSelector("#parameters:not([hidden])");
  assert.equal(await page.inputValue("#max_tokens"), "8");
  await page.click("#reset");
  await page.click("#show_parameters");
}

async function editing() {
  const page = await visit({ scheme: "light" });
  const asked = await answerWith(page, "first answer");
  await say(page, "one");
  await answered(page);
  await say(page, "two");
  await answered(page);
  await page.locator(".message.assistant").last().getByRole("button", { name: "Answer again" }).click();
  await page.waitForFunction(() => document.querySelectorAll(".message:last-child .note").length === 1);
  assert.deepEqual(asked.at(-1).messages.map((message) => message.content), ["one", "first answer", "two"]);
  assert.equal(await page.locator(".message").count(), 4);
  await page.locator(".message.user").first().hover();
  await page.locator(".message.user").first().getByRole("button", { name: "Edit this message" }).click();
  assert.match(await page.textContent(".edit"), /Replaces the 3 messages below/);
  await shot(page, "7-edit-light");
  await page.keyboard.press("Escape");
  assert.equal(await page.locator(".message").count(), 4);
  await page.locator(".message.user").first().getByRole("button", { name: "Edit this message" }).click();
  await page.keyboard.press("Control+a");
  await page.keyboard.type("changed");
  await page.keyboard.press("Enter");
  await answered(page);
  assert.deepEqual(asked.at(-1).messages.map((message) => message.content), ["changed"]);
  assert.equal(await page.locator(".message").count(), 2);
  await page.getByRole("button", { name: "Copy this answer" }).click();
  await page.waitForSelector(".tool.done");
  assert.equal(await page.evaluate(() => navigator.clipboard.readText()), "first answer");
  await page.context().close();
}

async function list() {
  const page = await visit({ scheme: "light" });
  await answerWith(page, "yes");
  for (const text of ["alpha", "beta", "gamma"]) {
    await page.click("#new_chat");
    await say(page, text);
    await page.waitForSelector(".message.assistant .note");
  }
  const titles = () => texts(page, "#chats .open");
  assert.deepEqual(await titles(), ["gamma", "beta", "alpha"]);
  await page.getByRole("button", { name: "alpha", exact: true }).click();
  assert.deepEqual(await texts(page, ".message.user .body"), ["alpha"]);
  await page.goBack();
  assert.deepEqual(await texts(page, ".message.user .body"), ["gamma"]);
  await page.getByRole("button", { name: "gamma", exact: true }).focus();
  await page.getByRole("button", { name: "Rename gamma" }).click();
  await page.keyboard.type("Third <b>letter</b>");
  await page.keyboard.press("Enter");
  assert.deepEqual(await titles(), ["Third <b>letter</b>", "beta", "alpha"]);
  await page.getByRole("button", { name: "beta", exact: true }).hover();
  await page.getByRole("button", { name: "Delete beta" }).click();
  assert.deepEqual(await titles(), ["Third <b>letter</b>", "alpha"]);
  await shot(page, "8-list-light");
  await page.getByRole("button", { name: "Undo" }).click();
  assert.deepEqual(await texts(page, ".message.user .body"), ["beta"]);
  await page.getByRole("button", { name: "Delete beta" }).click();
  await page.reload();
  await page.waitForSelector("#hello");
  assert.deepEqual(await titles(), ["Third <b>letter</b>", "alpha"]);

  // Another tab sees the changes.
  const other = await page.context().newPage();
  await other.goto(base + "/");
  await other.waitForSelector(".state.ready");
  await answerWith(other, "no");
  await say(other, "delta");
  await page.waitForFunction(() => document.querySelector("#chats .open").textContent === "delta");
  await page.context().close();
}

/** Text of a model never runs, loads nothing, and links only where it may. */
async function hostile() {
  const page = await visit();
  await answerWith(page, HOSTILE);
  await say(page, "<img src=x onerror=window.ran=1>");
  await page.waitForSelector(".message.assistant .note");
  await page.waitForTimeout(300);
  assert.equal(await page.evaluate(() => window.ran), undefined);
  assert.equal(await page.locator(".message :is(img, script, iframe, style, object, embed, form)").count(), 0);
  const links = await page.locator(".message a").evaluateAll((all) => all.map((a) => [a.protocol, a.rel, a.target]));
  assert.ok(links.length > 0);
  for (const [protocol, rel, target] of links) {
    assert.ok(["http:", "https:", "mailto:"].includes(protocol), protocol);
    assert.ok(rel.includes("noopener") && target === "_blank");
  }
  const names = await page.locator(".message *").evaluateAll((all) => [...new Set(all.flatMap((node) => node.getAttributeNames()))]);
  assert.deepEqual(names.filter((name) => name.startsWith("on") || name === "style"), []);
  await page.reload();
  await page.waitForSelector(".message.assistant .note");
  assert.equal(await page.evaluate(() => window.ran), undefined);
  await page.context().close();
}

async function rendering() {
  const page = await visit();
  await answerWith(page, SAMPLE);
  await say(page, "Show everything.");
  await page.waitForSelector(".message.assistant .note");
  for (const selector of ["table th", "blockquote", "ul ul li", "ol > li", "a[href^='https:']", ".code .k", "h3", "hr", "del"]) {
    assert.ok(await page.locator(".message.assistant .body " + selector).count(), selector);
  }
  await page.locator(".code .tool").first().click();
  await page.waitForSelector(".code .tool.done");
  assert.match(await page.evaluate(() => navigator.clipboard.readText()), /^fn main\(\) \{\n/);
  await page.evaluate(() => document.querySelector("#log").scrollTo(0, 0));
  await shot(page, "9-markdown-dark");
  await page.click("#theme");
  await shot(page, "9-markdown-light");
  await page.evaluate(() => document.querySelector("#log").scrollTo(0, 99999));
  await shot(page, "9-markdown-light-end");
  await page.setViewportSize({ width: 320, height: 640 });
  await widthFits(page);
  await shot(page, "9-markdown-320");

  // A long answer that grows: blocks that are complete are never drawn again, and each update is fast.
  const result = await page.evaluate(async (sample) => {
    const { Rendered } = await import("/render.js");
    const box = document.createElement("div");
    const rendered = new Rendered(box);
    const whole = (sample + "\n\n").repeat(40);
    rendered.update(whole.slice(0, 400));
    const first = box.firstChild;
    let slowest = 0;
    for (let end = 400; end < whole.length; end += 97) {
      const began = performance.now();
      rendered.update(whole.slice(0, end));
      slowest = Math.max(slowest, performance.now() - began);
    }
    rendered.update(whole);
    const fresh = document.createElement("div");
    new Rendered(fresh).update(whole);
    return { same: first === box.firstChild && box.isEqualNode(fresh), slowest, length: whole.length };
  }, SAMPLE);
  assert.ok(result.same, "an answer in pieces differs from the whole");
  assert.ok(result.slowest < 200, `an update took ${result.slowest} ms`);
  await page.context().close();
}

async function files() {
  const page = await visit();
  const asked = await answerWith(page, "read");
  await page.setInputFiles("#file", [
    { name: "notes.md", mimeType: "text/markdown", buffer: Buffer.from("# Notes\n```\ncode\n```\n") },
    { name: "photo.png", mimeType: "image/png", buffer: Buffer.from([0x89, 0x50, 0x4e, 0x47, 0, 1, 2, 0xff]) },
    { name: "huge.txt", mimeType: "text/plain", buffer: Buffer.alloc(600_000, "a") },
  ]);
  await page.waitForSelector("#attached .chip");
  assert.deepEqual(await texts(page, "#attached .name"), ["notes.md"]);
  await page.waitForSelector("#notice:not([hidden])");
  await shot(page, "10-attach-dark");
  await say(page, "Summarise.");
  await page.waitForSelector(".message.assistant .note");
  assert.equal(asked[0].messages[0].content, "File notes.md:\n````\n# Notes\n```\ncode\n```\n````\n\nSummarise.");
  await page.reload();
  await page.waitForSelector(".files summary");
  await page.click(".files summary");
  assert.match(await page.textContent(".files pre"), /# Notes/);
  await page.context().close();
}

/** Chatting works where the browser keeps nothing. */
async function storage() {
  const full = () => { Storage.prototype.setItem = () => { throw new DOMException("full", "QuotaExceededError"); }; };
  const barred = () => { Object.defineProperty(window, "localStorage", { get() { throw new DOMException("no", "SecurityError"); } }); };
  for (const before of [full, barred]) {
    const page = await visit({ before });
    await answerWith(page, "still here");
    await say(page, "one");
    await page.waitForSelector(".message.assistant .note");
    assert.match(await page.textContent("#notice"), /kept only until this page is closed/);
    await page.click("#new_chat");
    await say(page, "two");
    await page.waitForSelector(".message.assistant .note");
    assert.deepEqual(await texts(page, "#chats .open"), ["two", "one"]);
    await page.getByRole("button", { name: "one", exact: true }).click();
    assert.deepEqual(await texts(page, ".message .body"), ["one", "still here"]);
    await page.context().close();
  }
}

async function narrow() {
  for (const scheme of ["light", "dark"]) {
    const page = await visit({ width: 320, height: 640, scheme });
    await widthFits(page);
    await shot(page, `11-narrow-${scheme}`);
    await answerWith(page, "A short answer with `code` and a [link](https://example.org).");
    await say(page, "A question at 320 pixels, which is long enough to need a second line.");
    await page.waitForSelector(".message.assistant .note");
    await widthFits(page);
    await shot(page, `12-narrow-answer-${scheme}`);
    for (const [button, panel] of [["show_list", "list"], ["show_parameters", "parameters"], ["show_engine", "live"]]) {
      await page.click("#" + button);
      const box = await page.locator("#" + panel).boundingBox();
      assert.ok(box.x >= 0 && box.x + box.width <= 320.5, `${panel} does not fit`);
      await page.waitForTimeout(300);
      await shot(page, `13-narrow-${panel}-${scheme}`);
      await page.keyboard.press("Escape");
      assert.ok(await page.locator("#" + panel).isHidden());
      assert.equal(await page.evaluate(() => document.activeElement.id), button);
    }
    await widthFits(page);
    await page.context().close();
  }
}

const page = await chatting();
await engine(page);
await parameters(page);
await page.context().close();
for (const part of [editing, list, hostile, rendering, files, storage, narrow]) await part();
assert.deepEqual(problems.filter((text) => !text.includes("400")), []);
await browser.close();
console.log("ok     the page");
