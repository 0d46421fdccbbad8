// Curves of the rows that the server has sent, and figures as text.

export const $ = (id) => document.getElementById(id);
const SPAN = { seconds: 120, hour: 3600 };

// What there is to show: rows as the server sends them, the names of their cells, and what of them is looked at.
export const shown = {
  window: "seconds", scope: 0, columns: [], latency: [], server: [], model: "",
  seconds: [], tens: [], sample: null,
};

export function element(name, settings = {}, ...children) {
  const made = Object.assign(document.createElement(name), settings);
  made.append(...children);
  return made;
}

function drawn(name, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

/* Figures as text */

const NONE = "–";

export function count(value) {
  if (value == null) return NONE;
  if (value < 10 && value % 1 > 0.05) return value.toFixed(1);
  if (value < 100_000) return Math.round(value).toLocaleString("en");
  return value < 1e6 ? `${(value / 1e3).toFixed(0)}k` : `${(value / 1e6).toFixed(2)}M`;
}

export const perSecond = (value) => (value == null ? NONE : `${count(value)}/s`);

export function share(value) {
  if (value == null) return NONE;
  const percent = value * 100;
  return `${percent > 0 && percent < 9.95 ? percent.toFixed(1) : Math.round(percent)}\u00a0%`;
}

export function time(value) {
  if (value == null) return NONE;
  if (value < 0.01) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1e3)} ms`;
  return value < 100 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : `${Math.round(value)} s`;
}

export function span(seconds) {
  const whole = Math.floor(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  if (hours >= 48) return `${Math.floor(hours / 24)} days`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

/* Charts */

const LEFT = 34, BOTTOM = 15, TOP = 6;
export const charts = [];

export class Chart {
  // columns: the cells of a row that are curves. top: the axis' fixed end; without it, the next round number.
  // of: "scope" for cells of the replicas shown, "latency" or "server".
  constructor(title, { columns, labels = [], write, top, of = "scope" }) {
    Object.assign(this, { title, columns, labels, write, top, of, rows: [], cursor: null });
    this.svg = drawn("svg", { class: "chart", role: "img", tabindex: "0" });
    this.tip = element("div", { className: "tip", hidden: true, ariaHidden: "true" });
    this.svg.addEventListener("pointerdown", (event) => pointAll(this.timeAt(event)));
    this.svg.addEventListener("pointermove", (event) => pointAll(this.timeAt(event)));
    this.svg.addEventListener("pointerleave", () => pointAll(null));
    this.svg.addEventListener("blur", () => pointAll(null));
    this.svg.addEventListener("keydown", (event) => this.step(event));
    new ResizeObserver(() => this.draw()).observe(this.svg);
    charts.push(this);
  }

  cell(row, name) {
    return cellOf(row, name, this.of);
  }

  draw() {
    const { width, height } = this.svg.getBoundingClientRect();
    this.svg.replaceChildren();
    if (!width || !shown.sample) return;
    this.rows = rowsShown();
    const now = shown.sample.row[0], length = SPAN[shown.window];
    const values = this.rows.flatMap((row) => this.columns.map((name) => this.cell(row, name) ?? 0));
    const top = this.top ?? round(Math.max(...values, this.of === "latency" ? 1e-3 : 1));
    this.x = (at) => LEFT + (1 - (now - at) / length) * (width - LEFT - 3);
    const y = (value) => TOP + (1 - Math.min(value / top, 1)) * (height - TOP - BOTTOM);
    this.axes(width, height, top, y);
    this.columns.forEach((name, number) => this.curve(name, number, y));
    this.svg.setAttribute("aria-label", this.description());
    this.point(y, width, height);
  }

  axes(width, height, top, y) {
    for (const part of [0, 0.5, 1]) {
      const level = y(part * top);
      this.svg.append(drawn("line", { class: "grid", x1: LEFT, x2: width, y1: level, y2: level }));
      if (part === 0.5) continue;
      this.text(LEFT - 5, level + 3.5, "end", short(part * top, this.write(part * top)));
    }
    this.text(LEFT, height - 2, "start", shown.window === "hour" ? "1 h ago" : "2 min ago");
    this.text(width, height - 2, "end", "now");
  }

  text(x, y, anchor, content) {
    const made = drawn("text", { x, y, "text-anchor": anchor });
    made.textContent = content;
    this.svg.append(made);
  }

  curve(name, number, y) {
    const pieces = [[]], farthest = shown.window === "hour" ? 25 : 4; // seconds between points of one line
    let before = null;
    for (const row of this.rows) {
      const value = this.cell(row, name);
      if (value == null || (before !== null && row[0] - before > farthest)) pieces.push([]);
      if (value != null) pieces.at(-1).push([this.x(row[0]), y(value)]);
      before = row[0];
    }
    for (const points of pieces.filter((one) => one.length)) {
      const path = "M" + points.map((point) => point.map((at) => at.toFixed(1)).join(" ")).join("L");
      const end = points.length === 1 ? "h.01" : "";
      if (this.columns.length === 1) {
        const base = y(0).toFixed(1);
        const area = `${path}L${points.at(-1)[0].toFixed(1)} ${base}L${points[0][0].toFixed(1)} ${base}Z`;
        this.svg.append(drawn("path", { class: "area", d: area }));
      }
      this.svg.append(drawn("path", { class: `curve s${number}`, d: path + end }));
    }
  }

  timeAt(event) {
    const { left, width } = this.svg.getBoundingClientRect();
    const part = (event.clientX - left - LEFT) / (width - LEFT - 3);
    return shown.sample && shown.sample.row[0] - (1 - Math.min(Math.max(part, 0), 1)) * SPAN[shown.window];
  }

  step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") pointAll(null);
    if (!by || !this.rows.length) return;
    event.preventDefault();
    const at = this.cursor === null ? this.rows.length : this.rows.indexOf(nearest(this.rows, this.cursor));
    pointAll(this.rows[Math.min(Math.max(at + by, 0), this.rows.length - 1)][0]);
  }

  point(y, width, height) {
    this.tip.hidden = this.cursor === null || !this.rows.length;
    if (this.tip.hidden) return;
    const row = nearest(this.rows, this.cursor), x = this.x(row[0]);
    this.svg.append(drawn("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: height - BOTTOM }));
    const told = this.columns.map((name, number) => {
      const value = this.cell(row, name);
      if (value != null) this.svg.append(drawn("circle", { class: `p${number}`, cx: x, cy: y(value), r: 3 }));
      const label = this.labels.length ? [element("i", { className: `k${number}` }), `${this.labels[number]} `] : [];
      return element("span", {}, ...label, element("b", { textContent: this.write(value) }));
    });
    const at = new Date(row[0] * 1000).toLocaleTimeString([], { hour12: false });
    this.tip.replaceChildren(element("span", { textContent: at }), ...told);
    const beside = x < width / 2 ? x + 8 : x - 8 - this.tip.offsetWidth;
    this.tip.style.left = `${Math.min(Math.max(beside, 0), width - this.tip.offsetWidth)}px`;
  }

  description() {
    const row = this.rows.at(-1);
    const told = this.columns.map((name, n) => [this.labels[n], this.write(row && this.cell(row, name))].join(" ").trim());
    return `${this.title}, now: ${told.join(", ")}. Arrow keys show earlier values.`;
  }
}

function pointAll(at) {
  for (const chart of charts) {
    chart.cursor = at;
    chart.draw();
  }
}

const nearest = (rows, at) => rows.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));
const short = (value, text) => (value === 0 ? "0" : text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "").replace(/,000$/, "k").replace(/\s/, ""));

function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].find((one) => one * power >= value * 0.999) * power;
}

const rowsShown = () => (shown.window === "seconds" ? shown.seconds : [...shown.tens, ...newest()]);

// Rows of single seconds: all that are shown, or those that no row of ten seconds covers yet.
function newest() {
  if (shown.window === "seconds") return shown.seconds;
  const last = shown.tens.at(-1)?.[0] ?? 0;
  return shown.seconds.filter((row) => row[0] > last);
}

// A row: time, columns of all replicas together, latencies, columns of the server, columns of each of several replicas.
// Scope 0 is all replicas together.
export function cellOf(row, name, of = "scope", scope = shown.scope) {
  const width = shown.columns.length, server = 1 + width + shown.latency.length;
  if (of === "latency") return row[1 + width + shown.latency.indexOf(name)];
  if (of === "server") return row[server + shown.server.indexOf(name)];
  return row[(scope ? server + shown.server.length + (scope - 1) * width : 1) + shown.columns.indexOf(name)];
}

// How often something happened in the window shown. Rows of ten seconds hold the mean of a second.
export function total(name, of) {
  const sum = (rows) => rows.reduce((all, row) => all + (cellOf(row, name, of) ?? 0), 0);
  return Math.round(sum(newest()) + (shown.window === "hour" ? 10 * sum(shown.tens) : 0));
}
