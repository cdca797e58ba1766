// Text files that are attached to the next message.

import { $, icon, iconButton, make, notify } from "./dom.js";

const LARGEST = 512 * 1024; // bytes of one file
let attached = [];

const sizeText = (n) => (n < 1024 ? `${n} B` : `${(n / 1024).toFixed(n < 10240 ? 1 : 0)} KB`);

/** The text of a file's bytes, or null where they are not UTF-8 text. */
export function textOf(bytes) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    return text.includes("\0") ? null : text.replaceAll("\r\n", "\n");
  } catch {
    return null;
  }
}

/** The name and size of a file, as a small label. */
export function chip(file) {
  const box = make("span", "chip");
  box.append(icon("file"), make("span", "name", file.name), make("small", "", sizeText(file.text.length)));
  return box;
}

function draw() {
  $("attached").replaceChildren(...attached.map((file) => {
    const box = chip(file);
    box.append(iconButton("close", `Remove ${file.name}`, () => {
      attached = attached.filter((other) => other !== file);
      draw();
      $("prompt").focus();
    }));
    return box;
  }));
  $("attached").hidden = !attached.length;
}

async function add(files) {
  const refused = [];
  for (const file of files) {
    try {
      const text = file.size <= LARGEST ? textOf(await file.arrayBuffer()) : null;
      if (text !== null) attached.push({ name: file.name, text });
      else refused.push(`${file.name} is ${file.size > LARGEST ? `larger than ${sizeText(LARGEST)}` : "not a text file in UTF-8"}.`);
    } catch {
      refused.push(`${file.name} cannot be read.`);
    }
  }
  if (refused.length) notify(refused.join(" "));
  draw();
}

/** Whether files wait for the next message. */
export const hasFiles = () => attached.length > 0;

/** Takes the attached files, for the message that is sent now. */
export function takeFiles() {
  const files = attached;
  attached = [];
  draw();
  return files;
}

/** Files come from the button, from a drop on the chat and from the clipboard. */
export function listenForFiles() {
  const input = $("file");
  $("attach").onclick = () => input.click();
  input.onchange = async () => { await add([...input.files]); input.value = ""; $("prompt").focus(); };
  const chat = $("chat");
  const carries = (event) => event.dataTransfer?.types.includes("Files");
  chat.addEventListener("dragover", (event) => {
    if (!carries(event)) return;
    event.preventDefault();
    chat.classList.add("drop");
  });
  chat.addEventListener("dragleave", (event) => { if (!chat.contains(event.relatedTarget)) chat.classList.remove("drop"); });
  chat.addEventListener("drop", (event) => {
    if (!carries(event)) return;
    event.preventDefault();
    chat.classList.remove("drop");
    add([...event.dataTransfer.files]);
  });
  $("prompt").addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    add(files);
  });
}
