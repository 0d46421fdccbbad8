// The cards: a figure, its curve, and an explanation; and the table of replicas.

import { cellOf, Chart, count, element, $, perSecond, share, shown, time, total } from "./chart.js";

const since = (text) => `Since the start: ${text}`;
const byName = (counts) => Object.entries(counts).map(([name, number]) => `${count(number)} × ${name}`).join(", ");
const replicasShown = () => (shown.scope ? [shown.sample.replicas[shown.scope - 1]] : shown.sample.replicas);
const sum = (values) => values.reduce((all, one) => all + one, 0);
const ofSizes = (name) => (shown.sample.sizes?.[name] ?? 0) * replicasShown().length;

const PREFIX_HITS = "Share of the prompt tokens of the last ten seconds that the cache held already, from earlier prompts that begin alike. They are not computed again.";
const STEPS_AHEAD = "Steps (forward passes of the model) queued at the device. The server schedules ahead, so that the device never waits for it; 0 means idle.";
const BUSY = "Share of the time in which the device computes a step. Far below 100 % with requests queued: the host is too slow, or too few samples run.";
const KV_CACHE = "Share of the memory for attention keys and values that requests hold. Memory kept for reuse holds earlier prompts; it is free for requests that need it.";
const QUEUED = "Requests that wait for a free slot or for memory. If they grow, requests arrive faster than they are computed.";
const PREEMPTED = "Samples that were stopped because memory ran out. They continue later, and compute some of their tokens again. Many of them: lower --max-running, or give the cache more memory.";

// A card has one curve with a large figure, or several with a key. value: its figures; without it, the latest cells.
const CARDS = {
  load: [
    { title: "Output", unit: "tok/s", curves: ["output"], write: count },
    { title: "Input", unit: "tok/s", curves: ["input"], write: count, why: "Tokens of prompts that arrive, whether or not the cache holds them." },
    {
      title: "Running", unit: "requests", curves: ["requests"], write: count,
      beside: (cell) => `${count(cell("samples"))} of at most ${count(ofSizes("samples"))} samples`,
      why: "Requests of which at least one sample is being generated. A request with n = 8 has eight samples.",
    },
    { title: "Queued", unit: "requests", curves: ["queued"], write: count, why: QUEUED },
  ],
  latency: [
    ["Queue", "queue", "Time that a request waited in the engine before its prompt was computed."],
    ["First token", "ttft", "Time from a request's arrival to its first token: the wait in the queue and the computation of its prompt."],
    ["Each token", "token", "Time per token after the first: the decode time of a request divided by its tokens."],
    ["Whole request", "e2e", "Time from a request's arrival to the end of its answer."],
  ].map(([title, kind, why]) => ({
    title, why: `${why} p50: half of the requests took less; p99: one in a hundred took longer.`,
    curves: ["p50", "p90", "p99"].map((one) => `${kind}_${one}`), labels: ["p50", "p90", "p99"], write: time, of: "latency",
    value: (name) => shown.sample.latency[shown.window === "hour" ? 1 : 0][shown.latency.indexOf(name)],
  })),
  engine: [
    {
      title: "KV cache used", curves: ["pages"], write: share, top: 1, why: KV_CACHE,
      beside: (cell) => `${count(cell("pages") * ofSizes("cache"))} of ${count(ofSizes("cache"))} tokens; ${share(cell("cached"))} kept for reuse`,
    },
    { title: "Prefix hits", curves: ["hits"], write: share, top: 1, beside: () => "of prompt tokens, 10 s", why: PREFIX_HITS },
    { title: "Steps ahead", curves: ["ahead"], write: count, why: STEPS_AHEAD },
    { title: "Device busy", curves: ["busy"], write: share, top: 1, id: "busy-title", why: BUSY },
  ],
  problems: [
    {
      title: "Errors", curves: ["server_errors", "client_errors"], labels: ["server, 5xx", "client, 4xx"], write: count, of: "server",
      beside: () => since(byName(shown.sample.errors) || "none"), value: (name) => total(name, "server"), each: perSecond,
      why: "Answers of the API with an error status. 4xx: the request was wrong or refused; 499: its client left, which the figure leaves out. 5xx: the server could not answer; its log says why.",
    },
    {
      title: "Refused", unit: "requests", curves: ["refused"], write: count, of: "server", value: (name) => total(name, "server"), each: perSecond,
      beside: () => since(byName(shown.sample.refused) || "none"),
      why: "Requests and connections beyond a limit of the server, such as --max-queued or a rate limit. The name is that of the limit.",
    },
    {
      title: "Preempted", unit: "samples", curves: ["preempted"], write: count, value: (name) => total(name), each: perSecond, why: PREEMPTED,
      beside: () => since(count(sum(replicasShown().map((one) => one.preemptions)))),
    },
  ],
  batches: [
    {
      title: "Lines without an answer", curves: ["batch_lines"], write: count, of: "server",
      beside: () => {
        const [open, ended, lines, answered] = shown.sample.batches ?? [{}, {}, {}, {}];
        return `${count(lines.running)} running, ${count(lines.waiting)} waiting. Open batches: ${byName(nonZero(open)) || "none"}. `
          + `Since the start: ${count(answered.completed)} lines completed, ${count(answered.failed)} failed; `
          + `batches ended: ${byName(nonZero(ended)) || "none"}`;
      },
      why: "A batch is a file of requests, uploaded to /v1/files and started with /v1/batches. Each of its lines is a request. Other requests go first.",
    },
  ],
};
const nonZero = (counts) => Object.fromEntries(Object.entries(counts).filter(([, number]) => number));
const updates = [];
let explanations = 0;

export function addCards() {
  for (const [place, cards] of Object.entries(CARDS)) for (const card of cards) addCard($(place), card);
  $("replica-heads").append(...COLUMNS.map(([title, , why]) => element("th", { scope: "col", textContent: title, title: why ?? "" })));
}

export function updateCards() {
  updates.forEach((update) => update());
  fillTable();
  $("batches-section").hidden = !shown.sample.batches;
}

function addCard(place, { title, unit = "", curves, labels = [], write, top, of = "scope", beside, id = "", why, value, each }) {
  const chart = new Chart(title, { columns: curves, labels, write: each ?? write, top, of });
  const values = curves.map((name) => element(labels.length ? "b" : "span", { id: `figure-${name}` }));
  const card = element("article", { className: "card" }, element("h3", { textContent: title, id }));
  if (why) card.append(...explanation(title, why));
  if (labels.length) {
    const keys = labels.map((label, n) => element("span", {}, element("i", { className: `k${n}` }), label, values[n]));
    card.append(element("p", { className: "key" }, ...keys));
  } else card.append(element("p", { className: "figure" }, values[0], element("small", { textContent: unit })));
  const extra = element("p", { className: "beside" });
  if (beside || !labels.length) card.append(extra);
  card.append(element("div", { className: "plot" }, chart.svg, chart.tip));
  place.append(card);
  updates.push(() => {
    const cell = (name) => cellOf(shown.sample.row, name, of);
    curves.forEach((name, n) => { values[n].textContent = write(value ? value(name) : cell(name)); });
    if (beside) extra.textContent = beside(cell);
  });
}

// A button, and the text that it shows and hides.
function explanation(title, why) {
  const text = element("p", { className: "why", id: `why-${++explanations}`, textContent: why, hidden: true });
  const button = element("button", { type: "button", className: "ask", textContent: "?" });
  button.setAttribute("aria-label", `Explain: ${title}`);
  button.setAttribute("aria-controls", text.id);
  const open = (is) => {
    text.hidden = !is;
    button.setAttribute("aria-expanded", is);
  };
  open(false);
  button.addEventListener("click", () => open(text.hidden));
  button.addEventListener("keydown", (event) => { if (event.key === "Escape") open(false); });
  return [button, text];
}

/* The table */

const COLUMNS = [
  ["Replica", (_, __, number) => String(number)],
  ["State", (replica) => [element("span", { className: dotClass(replica.state) }), replica.state]],
  ["Output tok/s", (_, cell) => count(cell("output"))],
  ["Input tok/s", (_, cell) => count(cell("input"))],
  ["Running", (_, cell) => count(cell("requests"))],
  ["Queued", (_, cell) => count(cell("queued")), QUEUED],
  ["KV cache", (_, cell) => share(cell("pages")), KV_CACHE],
  ["Prefix hits", (_, cell) => share(cell("hits")), PREFIX_HITS],
  ["Steps ahead", (_, cell) => count(cell("ahead")), STEPS_AHEAD],
  ["Busy", (_, cell) => share(cell("busy")), BUSY],
  ["Preempted", (replica) => count(replica.preemptions), `Since the start. ${PREEMPTED}`],
  ["Restarts", (replica) => count(replica.restarts), "Since the start. A replica restarts by itself after one of its processes has died."],
];

function fillTable() {
  const { replicas } = shown.sample, table = $("replicas");
  if (table.rows.length !== replicas.length) table.replaceChildren(...replicas.map(makeRow));
  replicas.forEach((replica, number) => {
    const cell = (name) => cellOf(shown.sample.row, name, "scope", replicas.length > 1 ? number + 1 : 0);
    const { cells } = table.rows[number];
    COLUMNS.forEach(([, content], n) => cells[n].replaceChildren(...[content(replica, cell, number)].flat()));
    if (replica.detail) cells[1].append(element("small", { textContent: replica.detail }));
  });
}

function makeRow() {
  const cells = COLUMNS.map(([label]) => {
    const made = element("td");
    made.dataset.label = label;
    return made;
  });
  return element("tr", {}, ...cells);
}

export const dotClass = (state) => `dot ${state === "ready" ? "good" : state === "failed" ? "bad" : ""}`;
