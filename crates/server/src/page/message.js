// One message of a conversation on the page.

import { copyButton, icon, iconButton, make } from "./dom.js";
import { chip } from "./files.js";
import { Rendered } from "./render.js";

/** Files of a message: each opens to show its text. */
function fileList(files) {
  const box = make("div", "files");
  for (const file of files) {
    const details = make("details");
    const summary = make("summary");
    summary.append(chip(file));
    const pre = make("pre", "", file.text);
    pre.tabIndex = 0;
    details.append(summary, pre);
    box.append(details);
  }
  return box;
}

export class MessageView {
  /** `acts`: { edit(text), again(), following() } for what the buttons do. */
  constructor(message, name, acts) {
    this.message = message;
    this.acts = acts;
    this.box = make("article", "message " + message.role);
    this.box.setAttribute("aria-label", name);
    this.body = make("div", "body");
    this.body.dir = "auto";
    this.box.append(make("h2", message.role === "user" ? "hidden" : "who", name));
    if (message.files?.length) this.box.append(fileList(message.files));
    this.box.append(this.body);
    this.foot = make("div", "foot");
    this.box.append(this.foot);
    if (message.role === "user") {
      this.body.textContent = message.content;
      this.body.hidden = message.content === "";
      this.foot.append(copyButton("Copy this message", () => message.content), iconButton("edit", "Edit this message", () => this.edit()));
    } else {
      this.rendered = new Rendered(this.body);
      this.draw();
      this.finish();
    }
  }

  /** Shows an answer as far as it is there. */
  draw() {
    const { thought, content } = this.message;
    if (thought) this.drawThought(thought, content);
    this.rendered.update(content);
  }

  drawThought(thought, content) {
    if (!this.thinking) {
      this.thinking = make("details", "thought");
      this.thinking.open = content === "";
      this.thinking.append(make("summary", "", "Thinking"), make("div"));
      this.body.before(this.thinking);
    }
    const shown = this.thinking.lastChild;
    const old = shown.textContent;
    if (thought !== old) {
      if (old && thought.startsWith(old)) shown.firstChild.appendData(thought.slice(old.length));
      else shown.textContent = thought;
    }
    // Thoughts fold away once, when the answer begins; after that the user decides.
    if (content && !this.folded) { this.thinking.open = false; this.folded = true; }
  }

  start() {
    this.box.classList.add("writing");
    this.foot.replaceChildren();
  }

  /** Ends an answer: its figures, its error and its buttons. */
  finish() {
    const { content, note, error } = this.message;
    this.box.classList.remove("writing");
    this.box.querySelector(".error")?.remove();
    if (error) this.foot.before(make("p", "error", error));
    this.foot.replaceChildren();
    if (content) this.foot.append(copyButton("Copy this answer", () => this.message.content));
    const again = iconButton("again", content ? "Answer again" : "Try again", () => this.acts.again());
    again.classList.add("again");
    if (!content) again.append(make("span", "", "Try again"));
    this.foot.append(again);
    if (note) this.foot.append(make("span", "note", note));
  }

  /** Replaces the message by a form with its text. */
  edit() {
    if (this.box.querySelector("form")) return;
    const form = make("form", "edit");
    const field = make("textarea");
    field.value = this.message.content;
    field.setAttribute("aria-label", "Edit your message");
    field.rows = Math.min(Math.max(this.message.content.split("\n").length, 2), 12);
    const buttons = make("div", "buttons");
    const cancel = make("button", "quiet", "Cancel");
    cancel.type = "button";
    const send = make("button", "", "Send");
    const count = this.acts.following();
    if (count > 1) buttons.append(make("span", "note", `Replaces the ${count} messages below`));
    buttons.append(make("span", "grow"), cancel, send);
    form.append(field, buttons);
    const close = () => {
      form.remove();
      this.body.hidden = this.message.content === "";
      this.foot.hidden = false;
      this.foot.querySelector("[aria-label^=Edit]")?.focus();
    };
    cancel.onclick = close;
    form.onsubmit = (event) => {
      event.preventDefault();
      const text = field.value.trim();
      if (text || this.message.files?.length) this.acts.edit(text);
    };
    field.onkeydown = (event) => {
      if (event.key === "Escape") { event.stopPropagation(); close(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
    };
    this.body.hidden = true;
    this.foot.hidden = true;
    this.body.after(form);
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }
}

/** The button above a long conversation of which only the end is shown. */
export function earlierButton(count, act) {
  const button = make("button", "earlier quiet", `Show ${count} earlier messages`);
  button.type = "button";
  button.prepend(icon("up"));
  button.onclick = act;
  return button;
}
