// The chat: what is said goes to /v1/chat/completions with all before it, the answer appears as it is written.

import { count, element, $, shown, time } from "./chart.js";
import { headers, readEvents } from "./events.js";

// The demo model answers these.
export const EXAMPLES = [
  "What can you do?",
  "Tom buys 4 books for 12 dollars each and 3 pens for 5 dollars each. How much does he spend in all?",
  "A van goes 30 miles an hour for 11 hours and then 50 miles an hour for 4 hours. How many miles does it go in all?",
];
let messages = [], writing = null;

function showExamples() {
  const buttons = EXAMPLES.map((text) => element("button", { type: "button", className: "example", textContent: text }));
  for (const one of buttons) one.addEventListener("click", () => begin(one.textContent));
  const hint = element("p", { textContent: "Ask the model something. Its answer appears here as it is written. For example:" });
  $("talk").replaceChildren(element("div", { className: "empty" }, hint, ...buttons));
}

function say(who, text = "") {
  $("talk").querySelector(".empty")?.remove();
  const made = element("div", { className: `said ${who}`, textContent: text });
  $("talk").append(made);
  made.scrollIntoView({ block: "nearest" });
  return made;
}

function follows(change) {
  const talk = $("talk"), near = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
  change();
  if (near) talk.scrollTop = talk.scrollHeight;
}

async function answer() {
  const talked = messages;  // another list, once a new conversation has begun
  const began = performance.now(), place = say("assistant"), told = { text: "", usage: null, first: null };
  place.classList.add("writing");
  writing = new AbortController();
  $("send").textContent = "Stop";
  try {
    await stream(place, told);
    talked.push({ role: "assistant", content: told.text });
  } catch (error) {
    if (error.name === "AbortError") talked.push({ role: "assistant", content: told.text });
    else if (talked === messages) {
      talked.pop();
      say("failed", error.message);
    }
  }
  place.classList.remove("writing");
  if (!place.textContent) place.remove();
  if (told.usage && told.first) {
    const seconds = (performance.now() - told.first) / 1000, tokens = told.usage.completion_tokens;
    const rate = tokens > 1 ? ` · ${count((tokens - 1) / seconds)} tok/s` : "";
    const text = `${count(tokens)} tokens${rate} · first after ${time((told.first - began) / 1000)}`;
    follows(() => place.append(element("div", { className: "told", textContent: text })));
  }
  writing = null;
  $("send").textContent = "Send";
}

async function stream(place, told) {
  const system = $("system").value.trim(), most = $("most").valueAsNumber, temperature = $("temperature").valueAsNumber;
  const body = {
    model: shown.model, stream: true, stream_options: { include_usage: true },
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    ...(most ? { max_tokens: most } : {}), ...(Number.isNaN(temperature) ? {} : { temperature }),
  };
  const response = await fetch("v1/chat/completions", {
    method: "POST", signal: writing.signal, body: JSON.stringify(body),
    headers: { "Content-Type": "application/json", ...headers() },
  });
  if (!response.ok) throw new Error((await response.json().catch(() => null))?.error?.message ?? `status ${response.status}`);
  const parts = {};
  const add = (kind, text) => follows(() => {
    told.first ??= performance.now();
    parts[kind] ??= place.appendChild(element("div", { className: kind }));
    parts[kind].append(text);
  });
  await readEvents(response, (_, data) => {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data), delta = chunk.choices?.[0]?.delta;
    if (chunk.error) throw new Error(chunk.error.message);
    if (delta?.reasoning_content) add("thought", delta.reasoning_content);
    if (delta?.content) add("text", delta.content);
    told.text += delta?.content ?? "";
    told.usage = chunk.usage ?? told.usage;
  });
}

function send(event) {
  event.preventDefault();
  if (writing) return writing.abort();
  const text = $("said").value.trim();
  if (!text) return;
  $("said").value = "";
  begin(text);
}

function begin(text) {
  messages.push({ role: "user", content: text });
  say("user", text);
  $("said").focus({ preventScroll: true });
  answer();
}

function beginAnew() {
  writing?.abort();
  messages = [];
  showExamples();
  $("said").focus();
}

export function beginChat() {
  showExamples();
  $("ask").addEventListener("submit", send);
  $("said").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  $("anew").addEventListener("click", beginAnew);
}
