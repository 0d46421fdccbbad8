// The server's address and an example, each with a button that copies it.

import { $ } from "./chart.js";
import { EXAMPLES } from "./chat.js";

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function showAddress({ model, keyed }) {
  const base = new URL("v1", document.baseURI).href;
  const body = `{"model": ${JSON.stringify(model)}, "messages": [{"role": "user", "content": ${JSON.stringify(EXAMPLES[1])}}]}`;
  const lines = [`curl ${base}/chat/completions`, "-H 'Content-Type: application/json'"];
  if (keyed) lines.push('-H "Authorization: Bearer $API_KEY"');
  $("base").textContent = base;
  $("curl").textContent = [...lines, `-d ${quoted(body)}`].join(" \\\n  ");
}

export function beginCopying() {
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button));
}

async function copy(button) {
  const source = $(button.dataset.copy);
  try {
    await navigator.clipboard.writeText(source.textContent);
    note(button, "Copied");
  } catch { // browsers give the clipboard to secure pages only: https, or this machine
    source.focus();
    getSelection().selectAllChildren(source);
    note(button, "Press Ctrl+C");
  }
}

function note(button, text) {
  button.textContent = text;
  $("announcement").textContent = text;
  setTimeout(() => {
    button.textContent = "Copy";
    $("announcement").textContent = "";
  }, 2500);
}
