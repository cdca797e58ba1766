// Tests the page in headless Chromium: send, stream, stop, live view; takes screenshots.
//
//     node testing/clients/page.mjs http://127.0.0.1:8000 FOLDER
//
// Needs playwright-core (npm) and Chromium (CHROMIUM=/usr/bin/chromium).

import assert from "node:assert/strict";
import { mkdirSync } from "node:fs";
import { chromium } from "playwright-core";

const [base = "http://127.0.0.1:8000", folder = "screenshots"] = process.argv.slice(2);
mkdirSync(folder, { recursive: true });
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"],
});
const context = await browser.newContext({ viewport: { width: 1400, height: 900 }, colorScheme: "dark" });
const page = await context.newPage();
const problems = [];
page.on("console", (message) => { if (message.type() === "error") problems.push(message.text()); });
page.on("pageerror", (error) => problems.push(String(error)));
page.on("request", (request) => { if (!request.url().startsWith(base) && !request.url().startsWith("data:")) problems.push("outside: " + request.url()); });
const shot = (name) => page.screenshot({ path: `${folder}/${name}.png` });

await page.goto(base + "/");
await page.waitForSelector(".state.ready");
await page.waitForSelector("#config tbody tr");

// Every bucket has a drawing of its plan.
const pictured = (name) => page.waitForFunction((name) => {
  const picture = document.querySelector("#plan img");
  return picture?.complete && picture.naturalWidth > 0 && (!name || picture.alt.includes(` ${name}:`));
}, name);
await pictured();
const buckets = await page.locator("#bucket option").allTextContents();
assert.ok(buckets.length > 1 && buckets.some((name) => name.startsWith("decode/")), buckets.join());
for (const name of [buckets[buckets.length - 1], buckets[0]]) {
  await page.selectOption("#bucket", name);
  await pictured(name);
}
await page.focus("#prompt");
await shot("1-start");

// Keyboard control: the message box has the focus, Enter sends.
assert.equal(await page.evaluate(() => document.activeElement.id), "prompt");
await page.keyboard.type("Tell me about **graphs** and `replay`.");
await page.keyboard.press("Enter");
await page.waitForSelector("#stop_button:not([hidden])");
const body = page.locator(".message.assistant .body").last();
await page.waitForFunction(() => (document.querySelector(".message.assistant .body")?.textContent.length ?? 0) > 10);
const early = (await body.textContent()).length;
await page.waitForTimeout(600);
const later = (await body.textContent()).length;
assert.ok(later > early, "the answer does not stream");
await shot("2-streaming");
await page.waitForSelector("#stop_button[hidden]", { state: "attached", timeout: 120000 });
assert.ok(await page.locator(".message.assistant .note").count());

// The live view shows the steps and their totals.
await page.waitForFunction(() => document.querySelector("#steps_text").textContent.startsWith("#"));
assert.ok((await page.locator("#sums div").count()) === 4);
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
await shot("3-answered");

// Escape stops an answer.
await page.focus("#prompt");
await page.keyboard.type("Please think about it.");
await page.keyboard.press("Enter");
await page.waitForSelector("#stop_button:not([hidden])");
await page.waitForTimeout(400);
await page.keyboard.press("Escape");
await page.waitForSelector("#stop_button[hidden]", { state: "attached" });
assert.match(await page.locator(".message.assistant .note").last().textContent(), /stopped by the user/);
await shot("4-stopped");

// The button stops it too, and the text so far stays.
await page.keyboard.type("Count from one to a hundred, in words.");
await page.keyboard.press("Enter");
await page.click("#stop_button");
await page.waitForSelector("#stop_button[hidden]", { state: "attached" });
assert.equal(await page.locator(".message.user").count(), 3);

// An error from the server is shown.
await page.click("#settings summary");
await page.fill("#max_tokens", "0");
await page.focus("#prompt");
await page.keyboard.type("This is refused.");
await page.keyboard.press("Enter");
await page.waitForSelector(".message .error");
assert.match(await page.textContent(".message .error"), /max_tokens/);
await page.fill("#max_tokens", "1024");
if (!(await (await fetch(base + "/live/graph")).json()).defaults.temperature) {
  // The model has no defaults, so the page uses its own.
  assert.deepEqual([await page.inputValue("#temperature"), await page.inputValue("#top_p")], ["0.7", "0.95"]);
}
await shot("5-parameters");

await page.click("#settings summary");
await page.click("#theme");
assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), "light");
await page.evaluate(() => document.querySelector("#live").scrollTo(0, 9999));
await shot("6-light");
await page.setViewportSize({ width: 420, height: 860 });
await shot("7-small");
await page.setViewportSize({ width: 1400, height: 900 });
await page.click("#clear");
await page.waitForSelector("#hello");

const unexpected = problems.filter((text) => !text.includes("400"));
assert.deepEqual(unexpected, []);
await browser.close();
console.log("ok     the page");
