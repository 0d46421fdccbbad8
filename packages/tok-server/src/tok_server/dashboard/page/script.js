// The dashboard: what /dashboard/events sends, as figures, curves and a table.

import { cellOf, Chart, charts, count, element, $, share, shown, span, time } from "./chart.js";
import { beginChat } from "./chat.js";
import { headers, keepKey, keyKept, readEvents } from "./events.js";

const SECONDS = 120, HOUR = 360; // rows kept, as the server does
const THEME = "tok-theme";

/* Cards */

const CARDS = {
  load: [
    { title: "Output", unit: "tok/s", column: "output", write: count },
    { title: "Input", unit: "tok/s", column: "input", write: count },
    { title: "Running", unit: "requests", column: "requests", write: count, beside: (cell) => `${count(cell("samples"))} samples` },
    { title: "Queued", unit: "requests", column: "queued", write: count },
  ],
  engine: [
    { title: "Pages used", column: "pages", write: share, top: 1 },
    { title: "Prefix hits", column: "hits", write: share, top: 1, beside: () => "of prompt tokens, 10 s" },
    { title: "Steps ahead", column: "ahead", write: count },
    { title: "Device busy", column: "busy", write: share, top: 1, id: "busy-title" },
  ],
};
const LATENCY = [["First token", "ttft"], ["Each token", "token"], ["Whole request", "e2e"]];
const SHARES = ["p50", "p90", "p99"];
const updates = [];

function addCard(place, { title, unit = "", column, write, top, beside, id = "" }) {
  const chart = new Chart(title, { columns: [column], write, top });
  const value = element("span", { id: `figure-${column}` });
  const figure = element("p", { className: "figure" }, value, element("small", { textContent: unit }));
  const extra = element("p", { className: "beside" });
  const heading = element("h3", { textContent: title, id });
  place.append(element("article", { className: "card" }, heading, figure, extra, chart.svg, chart.tip));
  updates.push(() => {
    const cell = (name) => cellOf(shown.sample.row, name, shown.scope);
    value.textContent = write(cell(column));
    if (beside) extra.textContent = beside(cell);
  });
}

function addLatency(place, [title, kind]) {
  const columns = SHARES.map((one) => `${kind}_${one}`);
  const chart = new Chart(title, { columns, labels: SHARES, write: time, of: "latency" });
  const values = columns.map((name) => element("b", { id: `figure-${name}` }));
  const key = SHARES.map((label, n) => element("span", {}, element("i", { className: `k${n}` }), label, values[n]));
  const legend = element("p", { className: "key" }, ...key);
  place.append(element("article", { className: "card" }, element("h3", { textContent: title }), legend, chart.svg, chart.tip));
  updates.push(() => columns.forEach((name, n) => {
    values[n].textContent = time(shown.sample.latency[shown.latency.indexOf(name)]);
  }));
}

function fillTable() {
  const several = shown.sample.replicas.length > 1;
  const rows = shown.sample.replicas.map((replica, number) => {
    const cell = (name) => cellOf(shown.sample.row, name, several ? number + 1 : 0);
    const state = element("td", { title: replica.detail }, dot(replica.state), replica.state);
    const cells = [
      count(cell("output")), count(cell("input")), count(cell("requests")), count(cell("queued")),
      share(cell("pages")), share(cell("hits")), count(cell("ahead")), share(cell("busy")), count(replica.restarts),
    ];
    return element("tr", {}, element("td", { textContent: number }), state,
      ...cells.map((textContent) => element("td", { textContent })));
  });
  $("replicas").replaceChildren(...rows);
}

const dot = (state) => element("span", { className: dotClass(state) });
const dotClass = (state) => `dot ${state === "ready" ? "good" : state === "failed" ? "bad" : ""}`;

function show() {
  const { sample } = shown;
  if (!sample) return;
  $("state").textContent = sample.state;
  $("dot").className = dotClass(sample.state);
  $("facts").textContent = [sample.device, `up ${span(sample.uptime)}`].filter(Boolean).join(" · ");
  $("busy-title").textContent = sample.device.includes("cuda") ? "GPU busy" : "Device busy";
  $("latency-of").textContent = `percentiles of the last hour (${count(sample.ended)} requests); curves: of ten seconds each`;
  notice(sample.detail);
  updates.forEach((update) => update());
  charts.forEach((chart) => chart.draw());
  fillTable();
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
    columns: data.columns, latency: data.latency_columns, model: data.model, seconds: data.seconds, tens: data.tens,
    sample: data.sample,
  });
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
      $("key-form").hidden = true;
      await readEvents(response, (event, data) => {
        pause = 1000;
        receive(event, data);
      });
    } catch (error) {
      console.info(`connection: ${error.message}`);
    }
    $("state").textContent = "no connection";
    $("dot").className = "dot bad";
    notice("The server does not answer. Trying again …");
    await wait(pause);
  }
}

function askForKey() {
  $("state").textContent = "locked";
  $("facts").textContent = keyKept() ? "The key was refused." : "";
  $("key-form").hidden = false;
  $("key").focus();
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
  for (const [id, cards] of Object.entries(CARDS)) cards.forEach((card) => addCard($(id), card));
  LATENCY.forEach((one) => addLatency($("latency"), one));
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
    follow();
  });
  beginChat(() => shown.model);
  follow();
}

begin();
