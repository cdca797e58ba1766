// Small tools for the DOM: elements, icons, the clipboard, messages to the user.

export const $ = (id) => document.getElementById(id);

/** An element; its text is set as text, never parsed. */
export function make(tag, cls, text) {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (text !== undefined) node.textContent = text;
  return node;
}

/** An icon of the sprite in index.html. */
export function icon(name) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(space, "use");
  use.setAttribute("href", "#i-" + name);
  svg.append(use);
  return svg;
}

/** A button with an icon and a name for the tooltip and for screen readers. */
export function iconButton(name, label, act) {
  const button = make("button", "tool");
  button.type = "button";
  button.title = label;
  button.setAttribute("aria-label", label);
  button.append(icon(name));
  button.addEventListener("click", act);
  return button;
}

async function copyText(text) {
  // The clipboard's API exists on https and localhost only.
  if (navigator.clipboard) {
    try { await navigator.clipboard.writeText(text); return true; } catch { /* not permitted: the old way */ }
  }
  const field = make("textarea", "hidden");
  field.value = text;
  document.body.append(field);
  const focused = document.activeElement;
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return done;
}

/** A button that copies what `text()` returns, and shows that it did. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    const done = await copyText(text());
    button.classList.toggle("done", done);
    button.replaceChildren(icon(done ? "check" : "copy"));
    announce(done ? "Copied" : "Copying is not allowed here");
    setTimeout(() => { button.classList.remove("done"); button.replaceChildren(icon("copy")); }, 1500);
  });
  return button;
}

/** Says something to screen readers only. */
export function announce(text) {
  $("announce").textContent = text;
}

let hide = null;

/** Shows a message at the bottom for some seconds, with at most one action. */
export function notify(text, action, act) {
  const box = $("notice");
  clearTimeout(hide);
  const close = () => { box.hidden = true; };
  box.replaceChildren(make("span", "", text));
  if (action) {
    const button = make("button", "link", action);
    button.type = "button";
    button.onclick = () => { close(); act(); };
    box.append(button);
  }
  box.append(iconButton("close", "Close this message", close));
  box.hidden = false;
  hide = setTimeout(close, 9000);
}
