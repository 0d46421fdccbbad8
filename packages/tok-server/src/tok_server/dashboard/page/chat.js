// The chat: what is said goes to /v1/chat/completions with all before it, the answer appears as it is written.

import { count, element, $, time } from "./chart.js";
import { headers, readEvents } from "./events.js";

let messages = [], writing = null;

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

async function answer(model) {
  const talked = messages;  // another list, once a new conversation has begun
  const began = performance.now(), place = say("assistant"), told = { text: "", usage: null, first: null };
  place.classList.add("writing");
  writing = new AbortController();
  $("send").textContent = "Stop";
  try {
    await stream(place, told, model);
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

async function stream(place, told, model) {
  const system = $("system").value.trim(), most = $("most").valueAsNumber, temperature = $("temperature").valueAsNumber;
  const body = {
    model, stream: true, stream_options: { include_usage: true },
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

function send(event, model) {
  event.preventDefault();
  if (writing) return writing.abort();
  const text = $("said").value.trim();
  if (!text) return;
  $("said").value = "";
  messages.push({ role: "user", content: text });
  say("user", text);
  answer(model);
}

function beginAnew() {
  writing?.abort();
  messages = [];
  $("talk").replaceChildren();
  $("said").focus();
}

// model: tells the name of the model that is served
export function beginChat(model) {
  $("ask").addEventListener("submit", (event) => send(event, model()));
  $("said").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event, model());
  });
  $("anew").addEventListener("click", beginAnew);
}
