// The dashboard: what /dashboard/events sends, as figures, curves and a table.

import { addCards, dotClass, updateCards } from "./cards.js";
import { charts, count, $, shown, span } from "./chart.js";
import { beginChat } from "./chat.js";
import { beginCopying, showAddress } from "./connect.js";
import { headers, keepKey, keyKept, readEvents } from "./events.js";

const SECONDS = 120, HOUR = 360; // rows kept, as the server does
const THEME = "tok-theme";

function show() {
  const { sample } = shown;
  if (!sample) return;
  $("state").textContent = sample.state;
  $("dot").className = dotClass(sample.state);
  const context = sample.sizes && `context ${count(sample.sizes.context)} tokens`;
  $("facts").textContent = [sample.device, context, `up ${span(sample.uptime)}`].filter(Boolean).join(" · ");
  $("busy-title").textContent = sample.device.includes("cuda") ? "GPU busy" : "Device busy";
  const hour = shown.window === "hour", ended = sample.ended[hour ? 1 : 0], window = hour ? "in the last hour" : "in the last 2 minutes";
  $("latency-of").textContent = `of ${count(ended)} ${ended === 1 ? "request" : "requests"} that ended ${window}; curves: of ten seconds each${shown.scope ? "; all replicas" : ""}`;
  $("problems-of").textContent = window + (shown.scope ? "; errors and refusals: all replicas" : "");
  notice(sample.detail);
  updateCards();
  charts.forEach((chart) => chart.draw());
}

function notice(text) {
  if ($("notice").textContent !== text) $("notice").textContent = text;
  $("notice").hidden = !text;
}

/* Events */

function receive(event, text) {
  const data = JSON.parse(text);
  if (event === "opening") open(data);
  else {
    shown.sample = data;
    shown.seconds = [...shown.seconds, data.row].slice(-SECONDS);
    if (data.tens) shown.tens = [...shown.tens, data.tens].slice(-HOUR);
  }
  if (!document.hidden) show();
}

function open(data) {
  Object.assign(shown, {
    columns: data.columns, latency: data.latency_columns, server: data.server_columns, model: data.model,
    seconds: data.seconds, tens: data.tens, sample: data.sample,
  });
  view("open");
  showAddress(data);
  $("model").textContent = data.model;
  document.title = `${data.model} · tok`;
  const replicas = data.sample.replicas.length;
  $("scope-control").hidden = replicas < 2;
  $("scope").replaceChildren(new Option("all replicas", 0));
  if (replicas > 1) data.sample.replicas.forEach((_, n) => $("scope").add(new Option(`replica ${n}`, n + 1)));
  shown.scope = Math.min(shown.scope, replicas > 1 ? replicas : 0);
  $("scope").value = shown.scope;
}

const wait = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

async function follow() {
  for (let pause = 1000; ; pause = Math.min(pause * 2, 15000)) {
    try {
      const response = await fetch("dashboard/events", { headers: headers() });
      if (response.status === 401) return askForKey();
      if (!response.ok) throw new Error(`status ${response.status}`);
      await readEvents(response, (event, data) => {
        pause = 1000;
        receive(event, data);
      });
    } catch (error) {
      console.info(`connection: ${error.message}`);
    }
    $("state").textContent = "no connection";
    $("dot").className = "dot bad";
    if (!shown.sample) $("facts").textContent = "No connection";
    notice("The server does not answer. Trying again …");
    await wait(pause);
  }
}

// Shows the dashboard ("open"), a form for the key and nothing else ("locked"), or neither ("connecting").
function view(name) {
  document.body.dataset.view = name;
}

function askForKey() {
  view("locked");
  notice("");
  document.title = "tok";
  $("model").textContent = "tok";
  $("facts").textContent = "";
  $("refused").textContent = keyKept() ? "The server does not accept this key." : "";
  $("key").focus();
  $("key").select();
}

/* Controls */

function chooseTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
  localStorage.setItem(THEME, theme);
}

function chooseWindow(button) {
  shown.window = button.dataset.window;
  for (const one of document.querySelectorAll("[data-window]")) one.setAttribute("aria-pressed", one === button);
  show();
}

function begin() {
  addCards();
  beginCopying();
  const themes = ["auto", "light", "dark"], kept = localStorage.getItem(THEME);
  chooseTheme(themes.includes(kept) ? kept : "auto");
  $("theme").addEventListener("click", () => {
    chooseTheme(themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % themes.length]);
  });
  for (const one of document.querySelectorAll("[data-window]")) one.addEventListener("click", () => chooseWindow(one));
  $("scope").addEventListener("change", () => {
    shown.scope = Number($("scope").value);
    show();
  });
  document.addEventListener("visibilitychange", show);
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    keepKey($("key").value.trim());
    $("refused").textContent = "";
    follow();
  });
  beginChat();
  follow();
}

begin();
