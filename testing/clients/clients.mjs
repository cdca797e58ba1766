// The unmodified openai package for Node against a running server.
//
//     node testing/clients/clients.mjs http://127.0.0.1:8000 [KEY]

import assert from "node:assert/strict";
import OpenAI from "openai";

const [base = "http://127.0.0.1:8000", key = "none"] = process.argv.slice(2);
const client = new OpenAI({ baseURL: base + "/v1", apiKey: key, maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Say hello, in Grüße and 世界." }];

const whole = await client.chat.completions.create({ model, messages, max_tokens: 40, temperature: 0 });
assert.ok(whole.choices[0].message.content);
console.log("ok     complete response");

let text = "";
let usage = null;
const stream = await client.chat.completions.create({
  model, messages, max_tokens: 40, temperature: 0, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.ok(usage.completion_tokens > 0);
console.log("ok     streamed");

const helper = client.chat.completions.stream({ model, messages, max_tokens: 20 });
assert.ok((await helper.finalChatCompletion()).choices[0].message.content);
console.log("ok     stream helper");

const tools = [{ type: "function", function: { name: "weather", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }];
const called = await client.chat.completions.create({ model, messages, tools, tool_choice: "required", max_tokens: 200, temperature: 0 });
const call = called.choices[0].message.tool_calls[0];
assert.equal(call.function.name, "weather");
assert.ok("city" in JSON.parse(call.function.arguments));
console.log("ok     tools");

await assert.rejects(client.chat.completions.create({ model: "none", messages }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ model, messages, temperature: 9 }), (e) => e instanceof OpenAI.BadRequestError && e.param === "temperature");
console.log("ok     errors");

const leaving = await client.chat.completions.create({ model, messages, max_tokens: 200, stream: true });
for await (const _ of leaving) break;
assert.ok((await client.completions.create({ model, prompt: "Once", max_tokens: 3 })).choices[0].text);
console.log("ok     early disconnect");
