// One answer over /v1/chat/completions.

/** Data of the events of a response body, one by one. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const ends = held.split("\n\n");
    held = ends.pop();
    for (const event of ends) {
      for (const line of event.split("\n")) if (line.startsWith("data: ")) yield line.slice(6);
    }
  }
}

/** A fence longer than every run of backticks in the text. */
function fenceFor(text) {
  let most = 2;
  for (const run of text.matchAll(/`+/g)) most = Math.max(most, run[0].length);
  return "`".repeat(most + 1);
}

/** What the model gets for a message: its files come before its text. */
export function contentOf({ content, files }) {
  const parts = (files ?? []).map(({ name, text }) => {
    const fence = fenceFor(text);
    return `File ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return content ? [...parts, content].join("\n\n") : parts.join("\n\n");
}

/** The messages of a request. Answers that failed are left out, with their questions: roles must alternate. */
export function requestMessages(messages, system) {
  const sent = system ? [{ role: "system", content: system }] : [];
  for (const message of messages) {
    if (sent.at(-1)?.role === message.role) sent.pop();
    if (message.role === "user") sent.push({ role: "user", content: contentOf(message) });
    else if (message.content) sent.push({ role: "assistant", content: message.content });
  }
  return sent;
}

async function refusal(response) {
  try { return (await response.json()).error?.message ?? response.statusText; } catch { return response.statusText || `status ${response.status}`; }
}

/**
 * Streams an answer. `grow(content, thought, figures)` is called for every piece. Returns
 * `{ usage, reason, ...figures }`; throws what the server or the network reported.
 */
export async function stream(messages, parameters, signal, grow) {
  const began = performance.now();
  const figures = { tokens: 0, first: null, seconds: () => (performance.now() - began) / 1000 };
  let usage = null, reason = "";
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ messages, stream: true, stream_options: { include_usage: true }, ...parameters }),
    signal,
  });
  if (!response.ok) throw new Error(await refusal(response));
  for await (const data of events(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) continue;
    const { content, reasoning_content: thought } = choice.delta;
    if (content || thought) { figures.first ??= figures.seconds(); figures.tokens++; }
    if (choice.finish_reason) reason = choice.finish_reason;
    grow(content ?? "", thought ?? "", figures);
  }
  if (!reason) throw new Error("the connection ended before the answer did");
  return { usage, reason, ...figures };
}
