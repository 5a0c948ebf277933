// The pages of `hermes-rl view` and of report.html. Whatever a run has recorded becomes text of the document and nothing
// else: elements are made by name, and no string is ever parsed as HTML.

// ---------------------------------------------------------------------------------------------- Where data come from

class Server {
  live = true;

  async ask(path, parameters = {}, version = null) {
    const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== "" && value != null));
    const headers = version === null ? {} : { "If-None-Match": version };
    let answer;
    try {
      answer = await fetch(`api/${path}${query.size ? `?${query}` : ""}`, { headers, cache: "no-store" });
    } catch {
      throw new Error("The server does not answer: `hermes-rl view` has ended, or cannot be reached.");
    }
    if (answer.status === 304) return null;
    const body = await answer.json().catch(() => ({}));
    if (!answer.ok) throw new Error(typeof body.detail === "string" ? body.detail : `The server answered ${answer.status}.`);
    return Object.assign(body, { version: answer.headers.get("etag") });
  }

  runs() { return this.ask("runs"); }
  compare(a, b) { return this.ask("compare", { a, b }); }
  overview(run, version = null) { return this.ask(`runs/${encodeURIComponent(run)}`, {}, version); }
  rollouts(run, query) { return this.ask(`runs/${encodeURIComponent(run)}/rollouts`, query); }
  rows(run, query) { return this.ask(`runs/${encodeURIComponent(run)}/rows`, query); }
  rollout(run, id) { return this.ask(`runs/${encodeURIComponent(run)}/rollouts/${encodeURIComponent(id)}`); }
  beside(run, id, query) { return this.ask(`runs/${encodeURIComponent(run)}/beside/${encodeURIComponent(id)}`, query); }
  tokens(run, id, sequence, begin) {
    return this.ask(`runs/${encodeURIComponent(run)}/tokens/${encodeURIComponent(id)}`, { sequence, begin });
  }
  artifact(run, id, file) {
    return `api/runs/${encodeURIComponent(run)}/artifacts/${encodeURIComponent(id)}?${new URLSearchParams({ file })}`;
  }
}

const PAGE = 50;

class Report {
  live = false;

  constructor(data) { this.data = data; }

  async runs() { return { runs: [this.data.overview] }; }
  async overview() { return this.data.overview; }
  async rollout(run, id) {
    const found = this.data.details[id];
    if (!found) throw new Error(`The conversation of rollout ${id} is not among the sampled ones of this file; hermes-rl view has all of them.`);
    return found;
  }
  async tokens(run, id, sequence, begin) {
    const found = (this.data.details[id].tokens ?? []).find((one) => one.sequence === Number(sequence) && one.start === Number(begin));
    if (!found) throw new Error("These tokens are not in this file; hermes-rl view has all of them.");
    return found;
  }
  artifact() { return null; }

  async beside(run, id, { backwards, failed: onlyFailed, cursor, ...query }) {
    const rollouts = this.chosen(query);
    const at = rollouts.findIndex((one) => one.id === id);
    const rest = backwards ? rollouts.slice(0, Math.max(at, 0)).reverse() : rollouts.slice(at + 1);
    return { id: rest.find((one) => this.data.details[one.id] && (!onlyFailed || failed(one)))?.id ?? null, cursor: null };
  }

  async rows(run, query) {
    const all = this.data.rows, place = query.where ? all.columns.findIndex((one) => query.where.startsWith(`${one.name}=`)) : -1;
    const fits = (row) => (!query.unsolved || !row.passed) && (!query.where || (place >= 0 && `${all.columns[place].name}=${row.columns[place]}` === query.where));
    const rows = all.rows.filter(fits), share = (row) => row.passed / row.rollouts;
    const orders = { spread: (a, b) => Math.abs(share(a) - 0.5) - Math.abs(share(b) - 0.5), name: (a, b) => (a.label < b.label ? -1 : 1),
      drop: (a, b) => fall(a) - fall(b) };
    if (orders[query.sort]) rows.sort(orders[query.sort]);
    return { ...all, rows, fit: rows.length };
  }

  async rollouts(run, { cursor, ...query }) {
    const found = this.chosen(query), start = Number(cursor) || 0, next = start + PAGE;
    return { rollouts: found.slice(start, next), fit: found.length, looked: found.length, total: this.data.rollouts.length,
      cursor: next < found.length ? next : null };
  }

  chosen(query) {
    const solved = new Set(this.data.rollouts.filter((one) => one.passed).map((one) => one.row_key));
    const text = query.text ? JSON.stringify(query.text).slice(1, -1).toLowerCase() : "";
    const fits = (one) => {
      const details = this.data.details[one.id];
      const value = query.reward ? one.rewards[query.reward] ?? null : one.score;
      const used = one.tools.filter(([name]) => !query.tool || name === query.tool);
      const [column, ...rest] = (query.where ?? "").split("=");
      return ["state", "group", "stop_reason"].every((name) => !query[name] || one[name] === query[name])
        && (!query.row || one.row_key === query.row)
        && (!query.where || this.data.categories[one.row_key]?.[column] === rest.join("="))
        && (!query.unsolved || !solved.has(one.row_key))
        && (!query.first_epoch || one.epoch >= Number(query.first_epoch)) && (!query.last_epoch || one.epoch <= Number(query.last_epoch))
        && (!query.tool || used.length > 0)
        && (!query.tool_errors || used.some(([, , errors]) => errors))
        && (!query.reward || value !== null)
        && (!query.least || (value !== null && value >= Number(query.least)))
        && (!query.most || (value !== null && value <= Number(query.most)))
        && (!text || JSON.stringify(details ? [one, details.messages, details.row, details.rewards] : one).toLowerCase().includes(text));
    };
    const found = this.data.rollouts.filter(fits);
    const sort = query.sort || "ended";
    const number = (one) => sort.startsWith("reward:") ? one.rewards[sort.slice(7)] ?? null
      : sort === "tokens" ? one.prompt_tokens + one.completion_tokens
      : sort === "tool_errors" ? one.call_errors : one[sort];
    if (sort !== "ended") {
      const sign = query.descending ? -1 : 1;
      found.sort((a, b) => (number(a) === null) - (number(b) === null) || sign * (number(a) - number(b)));
    } else if (query.descending) found.reverse();
    return found;
  }
}

const embedded = document.getElementById("data");
const source = embedded ? new Report(JSON.parse(embedded.textContent)) : new Server();

/** The change of a row's mean from the first half of its rollouts to the second. */
function fall(row) {
  const scores = row.epochs.flatMap(([, squares]) => squares.map(([, value]) => value ?? 0)), half = Math.floor(scores.length / 2);
  return half ? mean(scores.slice(half)) - mean(scores.slice(0, half)) : 0;
}

/** Whether a rollout has failed, as `hermes-rl show` counts it: an excluded one, or a seat that nobody pays, has not. */
function failed(one) { return !one.passed && !(one.score === null && ["scored", "excluded"].includes(one.state)); }

// ------------------------------------------------------------------------------------------------- Making elements

/** An element; attributes whose name begins with "on" are listeners, and null ones are left out. */
function el(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false && child !== ""));
  return node;
}

/** An element with a width or a height in per cent, which the policy of the page allows to a script alone. */
function sized(node, property, share) {
  node.style[property] = `${100 * share}%`;
  return node;
}

/** A link within this page; parts are run, rollout or other words of its address. */
function link(text, parts, query = null, attributes = {}) {
  return el("a", { href: address(parts, query), ...attributes }, text);
}

function address(parts, query = null) {
  const given = Object.entries(query ?? {}).filter(([, value]) => value !== "" && value !== null && value !== undefined && value !== false);
  const asked = new URLSearchParams(given.map(([key, value]) => [key, value === true ? "1" : value]));
  return `#${parts.map(encodeURIComponent).join("/")}${given.length ? `?${asked}` : ""}`;
}

const pre = (text, attributes = {}) => el("pre", attributes, text);
const span = (kind, ...children) => el("span", { class: kind }, children);
const heading = (level, text, attributes = {}) => el(`h${level}`, attributes, text);
const unseen = (text) => span("hidden", text);

function card(width, title, say, ...children) {
  return el("section", { class: `card ${width}` }, title ? heading(2, title) : null, say ? el("p", { class: "say" }, say) : null, children);
}

function fold(summary, content, attributes = {}) {
  // What is folded is drawn when it is opened: a long conversation costs no more than what is seen of it.
  const inner = el("div");
  const details = el("details", { class: "fold", ...attributes }, el("summary", {}, summary), inner);
  const draw = () => { if (details.open && !inner.hasChildNodes()) inner.append(...[content()].flat(Infinity).filter(Boolean)); };
  details.addEventListener("toggle", draw);
  draw();
  return details;
}

function scrolled(label, ...children) {
  return el("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0" }, children);
}

/** A table; columns are texts or [text, class], and null ones are left out with their cells. */
function table(attributes, columns, rows) {
  const head = columns.map((column) => {
    const [text, kind] = Array.isArray(column) ? column : [column, null];
    return typeof text === "object" ? text : el("th", { scope: "col", class: kind }, text);
  });
  return el("table", attributes, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows));
}

// --------------------------------------------------------------------------------------------------------- Numbers

const NONE = "–";
const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
const total = (values) => values.reduce((sum, value) => sum + value, 0);

function count(value) { return value === null || value === undefined ? NONE : grouped.format(value); }

/** A number with its noun, which takes an "s" in the plural. */
function many(value, noun) { return `${count(value)} ${noun}${value === 1 ? "" : "s"}`; }

function number(value) {
  if (typeof value !== "number") return value === null || value === undefined ? NONE : String(value);
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return count(value);
  return Math.abs(value) >= 0.001 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
}

/** Scores and means of scores have as many decimals each, so that a column of them can be compared. */
const score = (value, digits = 3) => (typeof value === "number" ? value.toFixed(digits) : NONE);
const share = (part, whole) => (whole ? `${(100 * part / whole).toFixed(part && part < whole / 100 ? 1 : 0)} %` : NONE);
const money = (value) => (typeof value === "number" ? `$${value && value < 0.01 ? (value < 0.0001 ? number(value) : value.toFixed(4)) : value.toFixed(2)}` : NONE);

function signed(value, told = score) {
  if (typeof value !== "number") return NONE;
  const text = told(Math.abs(value));
  return `${/[1-9]/.test(text) ? (value > 0 ? "+" : "−") : "±"}${text}`;
}

function shortened(text, most) { return text.length > most ? `${text.slice(0, most - 1)}…` : text; }

function kilo(value) {
  return value < 1000 ? String(Math.round(value)) : value < 1e6 ? `${(value / 1e3).toFixed(value < 1e4 ? 1 : 0)} k` : `${(value / 1e6).toFixed(2)} M`;
}

function duration(seconds) {
  if (typeof seconds !== "number") return NONE;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round(seconds % 3600 / 60)} min`;
}

function moment(seconds) {
  return typeof seconds === "number" ? new Date(seconds * 1000).toLocaleString("sv-SE").slice(0, 16) : NONE;
}

// ---------------------------------------------------------------------------------------------------------- Colours

const PHASES = ["queue", "generation", "tools", "sandbox", "rewards"];

/** The place of a value in a range, in five steps; a value of another range than 0 to 1 is placed in its own. */
function step5(value, [low, high] = [0, 1]) {
  if (typeof value !== "number") return "n";
  return Math.max(0, Math.min(4, Math.floor(5 * (value - low) / (high - low || 1))));
}
function portion(value, [low, high] = [0, 1]) { return Math.max(0, Math.min(1, (value - low) / (high - low || 1))); }

/** The range of a reward, or of the score: 0 to 1, and further where values are. */
function rangeOf(found, clamp = null) {
  return clamp ?? [Math.min(0, found?.least ?? 0), Math.max(1, found?.most ?? 1)];
}

function tile(value, solved = false, range = [0, 1], word = "none") {
  return el("span", { class: `tile s${step5(value, range)}` },
    typeof value === "number" ? [solved ? el("span", { "aria-hidden": "true" }, "✓ ") : null, value.toFixed(2)] : word);
}

/** The score of a rollout, or the reason why it has none. */
function scoreTile(one, run) {
  const word = one.state === "scored" ? "not paid" : one.state.replace("_", " ");
  return tile(one.score, one.passed, run ? rangeOf(run.scores, run.clamp) : [0, 1], word);
}

function meter(value, range = [0, 1], text = null, kind = "") {
  if (typeof value !== "number") return el("span", { class: `meter ${kind}` }, el("span", { class: "track" }), el("b", { class: "quiet" }, NONE));
  const part = portion(value, range);
  const shown = text ?? (Number.isInteger(value) ? String(value) : value.toFixed(2).replace(/^(-?)0\./, "$1."));
  return el("span", { class: `meter ${kind}` }, el("span", { class: "track", "aria-hidden": "true" },
    sized(el("i", { class: `f${step5(value, range)}` }), "width", Math.max(part, value > range[0] ? 0.04 : 0))), shown === "" ? null : el("b", {}, shown));
}

function legend(items) {
  return el("div", { class: "legend" }, items.map(([kind, text]) => el("span", {}, el("i", { class: kind, "aria-hidden": "true" }), text)));
}
const SCORES = [["f0", "below 0.2"], ["f1", "0.2"], ["f2", "0.4"], ["f3", "0.6"], ["f4", "0.8 and more"]];

/** Seconds by phase as one bar, as long as its part of the longest one. */
function stack(phases, longest = total(phases)) {
  const told = phases.map((seconds, at) => [PHASES[at], seconds]).filter(([, seconds]) => seconds > 0);
  return el("div", { class: "stack", role: "img", "aria-label": told.map(([name, seconds]) => `${name} ${duration(seconds)}`).join(", ") || "no times" },
    told.map(([name, seconds]) => sized(el("i", { class: name, title: `${name} ${duration(seconds)}` }), "width", longest ? seconds / longest : 0)));
}

// ---------------------------------------------------------------------------------------------------------- Pictures

const narrow = () => window.innerWidth < 760;

function picture(width, height, label, ...children) {
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, children);
}
function written(x, y, text, attributes = {}) { return svg("text", { x, y, ...attributes }, text); }
function rule(kind, x1, y1, x2, y2, more = {}) { return svg("line", { class: kind, x1, y1, x2, y2, ...more }); }

function histogram(title, found, note) {
  const width = 180, height = 62, highest = Math.max(...found.bars.map((bar) => bar.count));
  const range = rangeOf(found), low = found.least === found.most ? range[0] : Math.min(found.least, 0), high = Math.max(found.most, low + 1e-9);
  const wide = Math.min(width / found.bars.length, 16), x = (value) => (width - wide) * (value - low) / (high - low);
  const told = (bar) => `${bar.from === bar.to ? number(bar.from) : `${number(bar.from)} to ${number(bar.to)}`}: ${count(bar.count)}`;
  const bars = found.bars.filter((bar) => bar.count).map((bar) => {
    const tall = Math.max(2, (height - 18) * bar.count / highest);
    return svg("rect", { class: `f${step5((bar.from + bar.to) / 2, range)}`, x: x(bar.from), y: height - 14 - tall, width: wide - 1.5,
      height: tall }, svg("title", {}, told(bar)));
  });
  return el("div", {}, el("div", { class: "row" }, heading(3, shortened(title, 24)), span("space"), span("quiet small", note)),
    picture(width, height, `${title}: ${found.bars.filter((bar) => bar.count).map(told).join("; ")}`, bars, rule("axis", 0, height - 14, width, height - 14),
      written(0, height - 2, number(low), { class: "quiet" }), written(width, height - 2, number(high), { class: "quiet", "text-anchor": "end" })));
}

/** Means of runs, the earliest first, with their intervals; the last one is the run that is shown. */
function trend(points, width = 360, height = 64) {
  let low = Math.min(...points.map((one) => one.low ?? one.mean)), high = Math.max(...points.map((one) => one.high ?? one.mean));
  if (high - low < 0.1) [low, high] = [(high + low) / 2 - 0.05, (high + low) / 2 + 0.05];
  const x = (at) => (points.length < 2 ? width / 2 : 6 + (width - 12) * at / (points.length - 1)),
    y = (value) => height - 6 - (height - 12) * (value - low) / (high - low);
  return picture(width, height, `Mean scores of the runs: ${points.map((one) => `${one.label} ${score(one.mean, 2)}`).join(", ")}`,
    svg("polyline", { class: "course", points: points.map((one, at) => `${x(at)},${y(one.mean)}`).join(" ") }),
    points.map((one, at) => [one.low === null || one.low === undefined ? null : rule("axis", x(at), y(one.low), x(at), y(one.high)),
      svg("circle", { class: `f${step5(one.mean)} ${at === points.length - 1 ? "here" : ""}`, cx: x(at), cy: y(one.mean), r: at === points.length - 1 ? 5 : 3 },
        svg("title", {}, `${one.label} ${score(one.mean, 2)}`))]));
}

/** The steps from weights and values to a score; `parts` are [name, weight, value], a weight of null is a gate. */
function waterfall(parts, result, { clamp = null, digits = 3, taken = 0, width = narrow() ? 340 : 412 } = {}) {
  const added = parts.filter(([, weight]) => weight !== null), gates = parts.filter(([, weight]) => weight === null);
  const low = Math.min(0, ...added.map(([, weight, value]) => weight * (value ?? 0))), left = 108, right = 128;
  const most = Math.max(0.001, total(added.map(([, weight]) => Math.max(0, weight))), result ?? 0);
  const x = (value) => left + (width - left - right) * (value - low) / (most - low), closed = gates.some(([, , value]) => value === 0), tall = 24;
  const told = [], drawn = [];
  let at = 0, line = 0;
  const label = (text) => written(0, line * tall + 16, shortened(text, 16), { class: "bold" });
  const right_of = (text, more) => written(width, line * tall + 16, [svg("tspan", { class: "quiet" }, text), ` ${more}`], { "text-anchor": "end" });
  for (const [name, weight, value] of added) {
    const got = weight * (value ?? 0), until = at + got;
    if (weight - got > 1e-9) drawn.push(svg("rect", { class: "missing", x: x(Math.max(until, at)), y: line * tall + 5,
      width: Math.max(0, x(at + weight) - x(Math.max(until, at))), height: 14 }));
    if (got) drawn.push(svg("rect", { class: `f${step5(value)} ${closed ? "faded" : ""}`, x: Math.min(x(at), x(until)), y: line * tall + 5,
      width: Math.max(1, Math.abs(x(until) - x(at))), height: 14 }));
    drawn.push(label(name), right_of(`${number(weight)} × ${value === null ? NONE : number(Number(value.toFixed(3)))} =`, score(got, digits)));
    told.push(`${name}: weight ${weight} times ${value === null ? "nothing" : number(value)} is ${score(got, digits)}`);
    at = until;
    line += 1;
  }
  for (const [name, , value] of gates) {
    const open = value === 0 ? "✕ gate closed: nothing counts" : value === 1 ? "✓ gate open" : "gate";
    drawn.push(label(name), written(left, line * tall + 16, open, { class: value === 0 ? "bad" : "quiet" }),
      right_of("", `× ${number(value === null ? null : Number(value.toFixed(3)))}`));
    told.push(`gate ${name} ${number(value)}`);
    line += 1;
  }
  if (clamp && (at > clamp[1] || at < clamp[0])) {
    drawn.push(label("clamp"), written(left, line * tall + 16, `${score(at)} is cut to ${number(at > clamp[1] ? clamp[1] : clamp[0])}`, { class: "quiet" }));
    line += 1;
  }
  const y = line * tall;
  drawn.push(rule("axis", 0, y + 2, width, y + 2), written(0, y + 19, "score", { class: "bold" }),
    written(width, y + 19, score(result, digits), { class: "bold", "text-anchor": "end" }));
  if (typeof result === "number") drawn.push(svg("rect", { class: `f${step5(result)}`, x: Math.min(x(0), x(result)), y: y + 8,
    width: Math.max(1, Math.abs(x(result) - x(0))), height: 14 }));
  const picturesque = picture(width, y + 26, `Score ${score(result, digits)}: ${told.join(", ")}`, drawn);
  return [picturesque, Math.abs(taken) > 0.0005 ? el("p", { class: "quiet small" },
    `${taken > 0 ? "Closed gates and limits take" : "Limits add"} ${score(Math.abs(taken))} ${taken > 0 ? "from" : "to"} the sum.`) : null];
}

/** Intervals below each other with a line at 0; each is {name, value, low, high, note}. */
function forest(rows, told, neutral = false) {
  const width = narrow() ? 350 : 620, left = narrow() ? 78 : 130, right = narrow() ? 172 : 200, tall = 24;
  const known = rows.filter((row) => row.value !== null && row.value !== undefined);
  const reach = Math.max(1e-9, ...known.flatMap((row) => [Math.abs(row.low ?? row.value), Math.abs(row.high ?? row.value)]));
  const x = (value) => left + (width - left - right) * (Math.max(-reach, Math.min(reach, value)) + reach) / (2 * reach);
  const name = (text) => shortened(text, Math.floor(left / 7));
  const lines = rows.map((row, at) => {
    const y = at * tall + tall / 2, sure = row.low !== null && row.low !== undefined;
    const side = sure && row.low > 0 ? 1 : sure && row.high < 0 ? -1 : 0, kind = side && !neutral ? (side > 0 ? "better" : "worse") : "even";
    if (row.note) return [written(0, y + 4, name(row.name)), written(width, y + 4, row.note, { class: "quiet", "text-anchor": "end" })];
    return [rule("line", 0, y + tall / 2, width, y + tall / 2), written(0, y + 4, name(row.name)),
      sure ? [rule(`whisker ${kind}`, x(row.low), y, x(row.high), y), rule(`whisker ${kind}`, x(row.low), y - 4, x(row.low), y + 4),
        rule(`whisker ${kind}`, x(row.high), y - 4, x(row.high), y + 4)] : null,
      svg("circle", { class: kind, cx: x(row.value), cy: y, r: side ? 5 : 4 }),
      written(width, y + 4, [side && !neutral ? (side > 0 ? "▲ " : "▼ ") : "", told(row.value),
        svg("tspan", { class: "quiet" }, sure ? ` ${told(row.low)} to ${told(row.high)}` : " one row")], { "text-anchor": "end" })];
  });
  return picture(width, rows.length * tall, rows.map((row) => row.note ? `${row.name}: ${row.note}` : `${row.name}: ${told(row.value)}, 95 % interval ${told(row.low)} to ${told(row.high)}`).join("; "),
    rule("axis", x(0), 0, x(0), rows.length * tall), lines);
}

// ----------------------------------------------------------------------------------------------------------- Pages

const main = document.getElementById("main");
const live = document.getElementById("live");
let drawn = 0; // which drawing is the latest: what an older one still waits for is not shown any more
let timer = null;
let here = null; // the address that is shown
let climbing = false; // whether the next page is returned to rather than opened
let seeking = false; // whether the next page is opened for its search
let go = null; // how the page that is shown goes to the rollout beside it
let turnPage = null; // how the list that is shown goes on to its next page; null where it has none
let keysHere = {}; // the keys that the page has besides those of every page
const left = new Map(); // by address, how a page was when it was left: how far scrolled, where its focus was, which page of its list

function kept(hash) {
  if (!left.has(hash)) left.set(hash, {});
  return left.get(hash);
}

/** Set what stands above the page: the way to it, its name, facts beside it, buttons, and its views. */
function place({ crumbs = [], title, facts = [], actions = [], tabs = [] }) {
  const all = source.live && (crumbs.length || title !== "Runs") ? [["Runs", []], ...crumbs] : crumbs;
  document.getElementById("crumbs").replaceChildren(...all.map(([text, parts, query]) => el("li", {},
    link(text, parts, query, { "data-up": true, onclick: () => { climbing = true; } }))));
  document.getElementById("title").replaceChildren(title);
  document.getElementById("facts").replaceChildren(...facts.flat(Infinity).filter(Boolean));
  document.getElementById("actions").replaceChildren(...actions.flat(Infinity).filter(Boolean));
  document.getElementById("tabs").replaceChildren(...tabs.map(([text, parts, query, on]) => link(text, parts, query, { "aria-current": on ? "page" : null })));
  document.title = title === "Runs" ? "hermes-rl" : `${title} · hermes-rl`;
}

function problem(error) {
  return el("p", { class: "note bad", role: "alert" }, error.message ?? String(error));
}

async function draw() {
  const turn = ++drawn;
  clearTimeout(timer);
  // A page that the browser, or a key, returns to is shown as it was left; one that a link opens begins at its top.
  const before = here, hash = location.hash, returned = climbing || history.state?.seen === true, seek = seeking;
  if (before !== null) kept(before).focus = document.activeElement?.getAttribute("href");
  if (!returned) left.delete(hash);
  history.replaceState({ seen: true }, "");
  climbing = seeking = false;
  go = turnPage = null;
  keysHere = {};
  live.textContent = "";
  const [path, asked] = hash.slice(1).split("?");
  try {
    let parts = path.split("/").map(decodeURIComponent).filter((part) => part !== "");
    if (!parts.length && !source.live) parts = [source.data.overview.run];
    const query = Object.fromEntries(new URLSearchParams(asked ?? ""));
    const page = parts.length === 0 ? await runsPage(turn, query)
      : parts[0] === "compare" && parts.length === 3 ? await comparePage(turn, parts[1], parts[2], query)
      : parts.length === 1 || (parts.length === 2 && TABS.includes(parts[1])) ? await runPage(turn, parts[0], parts[1] ?? "summary", query)
      : parts.length === 2 || (parts.length === 3 && VIEWS.includes(parts[2])) ? await rolloutPage(turn, parts[0], parts[1], parts[2] ?? "conversation", query)
      : nowhere();
    if (turn !== drawn) return;
    here = hash;
    main.replaceChildren(...page.flat(Infinity).filter(Boolean));
    window.scrollTo(0, kept(hash).scroll ?? 0);
    if (turn > 1) main.focus({ preventScroll: true });
    if (returned) {
      const links = [...main.querySelectorAll("a")];
      const again = links.find((one) => one.hash === before) ?? links.find((one) => one.getAttribute("href") === kept(hash).focus);
      again?.focus({ preventScroll: true });
      again?.scrollIntoView({ block: "nearest" });
    }
    if (seek) search();
  } catch (error) {
    if (turn !== drawn) return;
    here = hash;
    place({ title: "This page cannot be shown" });
    main.replaceChildren(problem(error), el("p", {}, source.live ? link("All runs", []) : link("The run", [source.data.overview.run])));
  }
}

function nowhere() { throw new Error("There is nothing at this address."); }

/** Look again after a while, as long as the same page is shown. */
function later(turn, seconds, look) {
  if (!source.live) return;
  timer = setTimeout(async () => {
    if (turn !== drawn) return;
    try {
      await look();
    } catch (error) {
      if (turn !== drawn) return;
      live.textContent = error.message;
      later(turn, 5, look);
    }
  }, 1000 * seconds);
}

/** Put other nodes in an element, and the focus back on the link or box that had it. */
function exchange(node, nodes) {
  const name = (one) => one.getAttribute("href") ?? one.getAttribute("aria-label");
  const focused = node.contains(document.activeElement) ? name(document.activeElement) : null;
  node.replaceChildren(...[nodes].flat(Infinity).filter(Boolean));
  if (focused) [...node.querySelectorAll("a, input, button")].find((one) => name(one) === focused)?.focus({ preventScroll: true });
}

// ----------------------------------------------------------------------------------------------------- Keyboard

const KEYS = [["j k", "next entry of a list, and the one before; next rollout"], ["n", "next one that failed"], ["Enter", "open"],
  ["1 2 3 4 5", "views of a page"], ["p", "peek: a rollout beside the list"], ["x", "choose a run for comparison"], ["c", "compare the chosen runs"],
  ["f b s", "rows of a comparison: fixed, broken, the same"], ["g t o", "of a rollout: its group, its tokens, open all tool results"],
  ["u", "back to the list, where it was left"], ["Escape", "drop the last filter; back"], ["/", "search for a text"], ["?", "these keys"]];

async function step(backwards, onlyFailed) {
  if (go) return go(backwards, onlyFailed);
  let from = document.activeElement;
  for (;;) {
    const all = [...main.querySelectorAll("a[data-entry]")];
    const at = all.findIndex((one) => one === from || (from?.closest("tr, article")?.contains(one) ?? false));
    const rest = backwards ? all.slice(0, Math.max(at, 0)).reverse() : all.slice(at + 1);
    const next = rest.find((one) => !onlyFailed || one.dataset.entry === "failed");
    if (next) {
      live.textContent = "";
      next.focus({ preventScroll: true });
      return (next.closest("tr") ?? next).scrollIntoView({ block: "nearest" });
    }
    if (backwards || !turnPage || !await turnPage()) break;
    from = null;
  }
  live.textContent = onlyFailed ? "No failed one follows in this list." : "The list ends here.";
}

function up() {
  const above = [...document.querySelectorAll("#crumbs a")].at(-1);
  if (above) above.click();
}

function escape() {
  const [path, asked] = location.hash.split("?");
  const filters = [...new URLSearchParams(asked ?? "")].filter(([key]) => !["sort", "descending"].includes(key));
  if (go || !filters.length) return up();
  const query = new URLSearchParams(asked);
  query.delete(filters.at(-1)[0]);
  location.hash = query.size ? `${path}?${query}` : path;
}

function search() {
  const field = document.getElementById("by-text");
  if (field) {
    field.focus();
    field.select();
  } else {
    seeking = true;
    if (go || document.querySelector("#tabs a") === null) up();
    else document.querySelectorAll("#tabs a")[1].click();
  }
}

const help = el("dialog", { "aria-label": "Keys" }, heading(2, "Keys"),
  el("dl", { class: "fields" }, KEYS.map(([keys, what]) => [el("dt", {}, keys.split(" ").map((key) => [el("kbd", {}, key), " "])), el("dd", {}, what)])),
  el("form", { method: "dialog" }, el("button", { type: "submit" }, "Close")));
document.body.append(help);
const ACTS = { j: () => step(false, false), k: () => step(true, false), n: () => step(false, true), u: up, Escape: escape, "/": search,
  "?": () => help.showModal(), Enter: () => document.activeElement?.click(),
  ...Object.fromEntries([1, 2, 3, 4, 5].map((key) => [key, () => document.querySelectorAll("#tabs a")[key - 1]?.click()])) };
let acting = Promise.resolve(); // keys that are pressed fast wait for the page that the one before them opens
document.getElementById("keys").addEventListener("click", () => help.showModal());
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || help.open) return;
  const field = event.target.closest("input:not([type=checkbox]), select, textarea");
  if (field) {
    if (event.key === "Escape") main.focus({ preventScroll: true });
    return;
  }
  if (!Object.hasOwn(ACTS, event.key) && !Object.hasOwn(keysHere, event.key) && !"fbsxcpgto".includes(event.key)) return;
  // A link is opened in its turn, so that n and Enter pressed fast open what n leads to.
  if (event.key === "Enter" && (event.shiftKey || event.target.closest("button, summary, input"))) return;
  event.preventDefault();
  acting = acting.then(async () => {
    while (here !== location.hash) await new Promise((wake) => setTimeout(wake, 10));
    await (keysHere[event.key] ?? ACTS[event.key])?.();
  }).catch((error) => { live.textContent = error.message; });
});

// The colours are those of the system, or the ones that were chosen here.
const THEMES = { auto: "light dark", light: "light", dark: "dark" };
let theme = "auto";
try { theme = localStorage.getItem("theme") ?? "auto"; } catch { /* a page of a file may keep nothing */ }
function colour() {
  document.documentElement.style.colorScheme = THEMES[theme] ?? THEMES.auto;
  document.getElementById("theme").textContent = `Theme: ${theme}`;
}
document.getElementById("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  theme = names[(names.indexOf(theme) + 1) % names.length];
  try { localStorage.setItem("theme", theme); } catch { /* it lasts as long as the page */ }
  colour();
});
colour();

// ------------------------------------------------------------------------------------------------------------ Runs

const picked = []; // the runs that are chosen for comparison, in the order in which they were chosen

async function runsPage(turn, query) {
  const body = el("div", { class: "flush" }), tools = el("div", { class: "flush tools-bar" }), bar = el("div", { class: "flush compare-bar" });
  let known = { runs: [] }, listed = "", barred = null; // what is drawn: a look that finds nothing new draws nothing
  const choose = (run, on) => {
    const at = picked.indexOf(run);
    if (on && at < 0) picked.push(run);
    if (!on && at >= 0) picked.splice(at, 1);
    drawBar();
  };
  const drawBar = () => {
    const chosen = picked.map((run) => known.runs.find((one) => one.run === run)).filter(Boolean);
    const now = chosen.map(named).join("\n");
    if (now === barred) return;
    barred = now;
    bar.hidden = !chosen.length;
    if (!chosen.length) return bar.replaceChildren();
    const specs = new Set(chosen.map((run) => run.spec));
    const two = chosen.length === 2 && specs.size === 1;
    bar.replaceChildren(el("b", {}, chosen.length === 1 ? "1 run chosen, choose one more" : `${chosen.length} runs chosen`),
      span("quiet small space", chosen.map((run, at) => `${"ABCDEFGH"[at] ?? "…"}: ${named(run)}`).join(" · "),
        specs.size > 1 ? " · runs of different specs cannot be compared" : chosen.length > 2 ? " · two runs are compared at a time" : ""),
      el("button", { type: "button", onclick: () => { picked.length = 0; show(); drawBar(); } }, "Clear"),
      el("button", { type: "button", class: "primary", disabled: !two, onclick: compareChosen }, "Compare ", el("kbd", {}, "c")));
  };
  const compareChosen = () => {
    if (picked.length !== 2) { live.textContent = "Choose two runs: x chooses the one that has the focus."; return; }
    location.hash = address(["compare", picked[0], picked[1]]);
  };
  keysHere = {
    x: () => document.activeElement?.closest("tr")?.querySelector("input[type=checkbox]")?.click(),
    c: compareChosen,
  };
  const show = () => {
    const text = (query.text ?? "").toLowerCase();
    const fits = (run) => (!query.mode || run.mode === query.mode) && (!query.tag || run.label?.tags.includes(query.tag)) && (!query.running || run.running)
      && (!text || [run.spec, run.path, run.model, run.label?.name, run.label?.note, ...(run.label?.tags ?? [])].join(" ").toLowerCase().includes(text));
    const chosen = known.runs.filter(fits);
    exchange(body, [runsTable(chosen, choose), known.more ? el("p", { class: "quiet" }, `Not listed: ${many(known.more, "older run")}.`) : null]);
    document.getElementById("shown").textContent = `${chosen.length} of ${many(known.runs.length, "run")}`;
  };
  const look = async () => {
    known = await source.runs();
    if (turn !== drawn) return;
    nameAll(known.runs);
    const modes = [...new Set(known.runs.map((run) => run.mode).filter(Boolean))], tags = [...new Set(known.runs.flatMap((run) => run.label?.tags ?? []))];
    const chip = (text, key, value) => link(text, [], { ...query, [key]: query[key] === value ? null : value },
      { class: `chip${query[key] === value ? " on" : ""}`, "aria-current": query[key] === value ? "true" : null });
    const field = document.getElementById("by-text");
    if (!field) {
      tools.replaceChildren(el("input", { id: "by-text", type: "search", "aria-label": "Search runs: names, tags, notes, paths",
        placeholder: "Search runs  /", value: query.text,
        oninput: (event) => { query.text = event.target.value; history.replaceState({ seen: true }, "",
          address([], query)); here = location.hash; show(); } }), el("span", { id: "chips", class: "row" }), span("space"),
          el("span", { id: "shown", role: "status", class: "quiet" }));
      main.contains(tools) || main.prepend(tools);
    }
    const now = JSON.stringify(known);
    if (now !== listed) {
      listed = now;
      exchange(tools.querySelector("#chips"), [modes.length > 1 ? modes.map((mode) => chip(mode, "mode", mode)) : null,
        tags.map((tag) => chip(`# ${tag}`, "tag", tag)),
        known.runs.some((run) => run.running) ? chip(`● running ${known.runs.filter((run) => run.running).length}`, "running", "1") : null]);
      show();
      drawBar();
    }
    later(turn, known.reading ? 0.2 : 3, look);
  };
  place({ title: "Runs" });
  main.replaceChildren(tools, body, bar); // fields are found by their ids from here on
  await look();
  return [tools, body, bar, el("p", { class: "quiet small" },
    "▲ ▼ better and worse than the earlier run beyond chance, ≈ not. `hermes-rl label RUN --name … --tag … --note …` names a run.")];
}

/** Give each run the name that people gave it, or as much of the end of its path as tells it from the others. */
function nameAll(runs) {
  for (const run of runs) {
    const parts = (run.path ?? run.run).split("/");
    let size = 1;
    const tail = (path) => (path ?? "").split("/").slice(-size).join("/");
    while (size < parts.length && runs.some((other) => other !== run && tail(other.path) === tail(run.path))) size += 1;
    run.shown = run.label?.name || tail(run.path) || run.run;
  }
}

function named(run) { return run.shown ?? (run.label?.name || run.path?.split("/").at(-1) || run.run); }

function runsTable(runs, choose) {
  if (!runs.length) return el("p", { class: "tools-bar" }, "There is no such run.");
  const specs = [...new Set(runs.map((run) => run.spec ?? ""))];
  const columns = [[unseen("Compare"), null], "Run", ["Mode · model", "wide"], ["Score", "number"], ["Interval, 0 to 1", "optional"],
    ["Change", "number wide"], ["Solved", "number optional"],
    ["Finished", "number optional"], ["Rollouts", "number wide"], runs.some((run) => run.cost) ? ["Cost", "number optional"] : null,
      ["Started · time", "number optional"]].filter(Boolean);
  const rows = specs.flatMap((spec) => {
    const own = runs.filter((run) => (run.spec ?? "") === spec);
    const head = specs.length > 1 || own.length > 2 ? el("tr", { class: "head" },
      el("th", { scope: "colgroup", colspan: columns.length }, specHead(spec, own))) : null;
    return [head, ...own.map((run) => runRow(run, own, choose, columns.some((column) => column[0] === "Cost")))];
  });
  return scrolled("Runs", table({ class: "runs" }, columns, rows.filter(Boolean)));
}

function specHead(spec, own) {
  const scored = own.filter((run) => typeof run.mean === "number" && !run.running && run.started).sort((a, b) => a.started - b.started);
  const mode = ["serve", "process", "evaluate"].map((one) => scored.filter((run) => run.mode === one)).sort((a, b) => b.length - a.length)[0];
  const best = mode.reduce((top, run) => (run.mean > (top?.mean ?? -Infinity) ? run : top), null);
  return el("div", { class: "row" }, heading(2, spec || "spec not read yet"), span("quiet small", many(own.length, "run")),
    mode.length > 2 ? [withWidth(trend(mode.slice(-30).map((run) => ({ ...run, label: named(run) })), 260, 36), 220),
      span("small", "last ", tile(mode.at(-1).mean), best === mode.at(-1) ? " the best so far" : ` best ${score(best.mean, 2)} (${named(best)})`)] : null);
}

function withWidth(node, pixels) {
  node.style.width = `${pixels}px`;
  return node;
}

function runRow(run, own, choose, costs) {
  const earlier = own.filter((one) => one.mode === run.mode && one.started < run.started && typeof one.mean === "number")
    .sort((a, b) => b.started - a.started)[0];
  const box = el("input", { type: "checkbox", checked: picked.includes(run.run), "aria-label": `Compare ${named(run)}`,
    onchange: (event) => choose(run.run, event.target.checked) });
  const about = [run.label?.tags.map((tag) => [" ", span("chip", `# ${tag}`)]) ?? null, run.running ? [" ", span("chip good", "● running")] : null,
    run.label?.note ? [" ", span("quiet small", run.label.note)] : null];
  const nothing = !run.error && !run.rollouts && run.read === 1;
  return el("tr", {}, el("td", {}, box),
    el("th", { scope: "row" }, link(named(run), [run.run], null, { "data-entry": run.failed || run.error ? "failed" : "", title: run.path }), about,
      el("div", { class: "quiet small narrow" }, [run.mode, run.model].filter(Boolean).join(" · ")),
      run.label?.name ? el("div", { class: "quiet mono wide" }, run.path.split("/").slice(-2).join("/")) : null),
    el("td", { class: "quiet wide" }, [run.mode, run.model].filter(Boolean).join(" · ")),
    run.error || nothing ? el("td", { colspan: costs ? 8 : 7, class: "quiet" }, run.error ?? "no rollout has ended, or its rollouts are elsewhere") : [
      el("td", { class: "number" }, run.read < 1 && !run.rollouts ? span("quiet small", "reading …") : tile(run.mean)),
      el("td", { class: "optional" }, whisker(run)),
      el("td", { class: "number wide" }, change(earlier, run)),
      el("td", { class: "number optional" }, share(run.passed, run.scored)),
      el("td", { class: "number optional" }, share(run.finished, run.rollouts)),
      el("td", { class: "number wide" }, count(run.rollouts),
        run.failed ? [" ", el("span", { class: "bad", title: "without a score" }, `✕ ${count(run.failed)}`)] : null),
      costs ? el("td", { class: "number optional" }, money(run.cost)) : null,
      el("td", { class: "number optional quiet" }, `${moment(run.started)} · ${duration(run.seconds)}`)]);
}

function whisker(run) {
  if (typeof run.mean !== "number") return null;
  const width = 150, x = (value) => 4 + (width - 8) * Math.max(0, Math.min(1, value));
  const sure = typeof run.low === "number";
  return withWidth(picture(width, 16, sure ? `95 % interval ${score(run.low)} to ${score(run.high)}` : "no interval", rule("line", 4, 8, width - 4, 8),
    [0, 0.5, 1].map((at) => rule("line", x(at), 3, x(at), 13)),
    sure ? rule("whisker", x(run.low), 8, x(run.high), 8) : null,
      svg("circle", { class: sure ? `f${step5(run.mean)}` : "even", cx: x(run.mean), cy: 8, r: 5 })), 150);
}

/** The difference of two runs' means; their intervals say whether it is more than chance. */
function differs(before, run) {
  if (!before || typeof before.low !== "number" || typeof run.low !== "number") return null;
  const by = run.mean - before.mean, error = Math.hypot((run.high - run.low) / 2, (before.high - before.low) / 2);
  return { by, low: by - error, high: by + error };
}

function change(before, run) {
  const found = differs(before, run);
  if (!found) return null;
  const kind = found.low > 0 ? "good" : found.high < 0 ? "bad" : "quiet", sign = { good: "▲", bad: "▼", quiet: "≈" }[kind];
  return el("span", { class: kind, title: `than ${named(before)}` }, `${sign} ${signed(found.by, (value) => score(value, 2))}`);
}

// ------------------------------------------------------------------------------------------------------- One run

const TABS = ["summary", "rollouts", "rows", "compare", "spec"];

async function runPage(turn, name, tab, query) {
  let run = await source.overview(name);
  if (turn !== drawn) return [];
  const frame = () => {
    const size = { rollouts: ` ${count(run.attempts)}`, rows: ` ${count(run.rows)}` };
    place({
      title: run.label.name || run.spec || run.run,
      facts: [span("quiet small mono wide", run.path.split("/").slice(-3).join("/")), tile(run.mean),
        typeof run.low === "number" ? span("quiet small nowrap", `${score(run.low, 2)} to ${score(run.high, 2)} over ${many(run.rows, "row")}`) : null,
        run.running ? span("chip good", "● running") : null, run.read < 1 ? span("quiet small", `${share(run.read, 1)} read so far`) : null,
          run.label.tags.map((tag) => span("chip wide", `# ${tag}`))],
      tabs: TABS.filter((one) => source.live || one !== "compare").map((one) => [`${one[0].toUpperCase()}${one.slice(1)}${size[one] ?? ""}`,
        one === "summary" ? [name] : [name, one], null, one === tab]),
    });
  };
  frame();
  const part = await { summary: summaryPart, rollouts: rolloutsPart, rows: rowsPart, compare: comparePart, spec: specPart }[tab](turn, name, query, run);
  const look = async () => {
    const found = await source.overview(name, run.version);
    if (turn !== drawn) return;
    if (found !== null) {
      const anew = found.generation !== run.generation;
      run = found;
      frame();
      part.grown?.(run, anew);
    }
    later(turn, run.read < 1 ? 0.2 : run.running ? 2 : 5, look);
  };
  later(turn, run.read < 1 ? 0.2 : 2, look);
  return part.nodes;
}

function notes(run) {
  return [run.label.note ? el("p", { class: "say" }, run.label.note) : null,
    run.excluded ? el("p", { class: "note" }, run.excluded) : run.torn ? el("p", { class: "note" },
      `Of rollouts.jsonl ${many(run.torn, "line")} cannot be read and ${run.torn === 1 ? "is" : "are"} left out.`) : null,
    run.sampled ? el("p", { class: "note" }, run.sampled) : null].filter(Boolean);
}

function summaryPart(turn, name, query, run) {
  const body = el("div");
  const show = (now) => exchange(body, summary(name, now));
  show(run);
  return { nodes: [body], grown: show };
}

function summary(name, run) {
  if (!run.rollouts) return [...notes(run), el("p", {}, "No rollout has ended yet.")];
  const varying = run.rewards.filter((one) => one.least !== one.most);
  const cut = run.stop_reasons.length > 1 || run.failures.length;
  const small = [cut ? stopsCard(name, run) : null, run.times.length ? timesCard(run) : null, run.spent ? spentCard(run) : null,
    run.tools.length > 1 || run.tools.some((one) => one.errors) ? toolsCard(name, run) : null].filter(Boolean);
  small.forEach((one) => one.classList.add(["c12", "c12", "c6", "c4", "c3"][small.length]));
  return [...notes(run), el("div", { class: "grid" }, goodCard(name, run), wrongCard(name, run), run.steps.length > 1 ? overTimeCard(run) : null,
    run.scores && (run.scores.least !== run.scores.most || varying.length) ? spreadCard(run, varying) : null, small,
      run.flight ? flightCard(run) : null), constants(run)];
}

function goodCard(name, run) {
  const [uneven, groups] = run.uneven, before = run.history.at(-1), found = differs(before, run);
  const verdict = found && (found.low > 0 ? [el("b", { class: "good" }, "▲ Better"),
    " than "] : found.high < 0 ? [el("b", { class: "bad" }, "▼ Worse"), " than "] : [el("b", {}, "≈ No difference beyond chance"), " to "]);
  const two = (value) => score(value, 2);
  const facts = [[`score ≥ ${number(run.success)}`, share(run.passed, run.scored)],
    run.rows > 1 ? ["rows ever solved", `${count(run.solved_rows)} of ${count(run.rows)}`] : null,
    groups ? ["uneven groups", `${count(uneven)} of ${count(groups)}`] : null].filter(Boolean);
  return card("c4", "Is it good?", null,
    el("div", { class: "row" }, span("big", score(run.mean, 2)),
      span("quiet small", typeof run.low === "number" ? `mean score, 95 % interval ${two(run.low)} to ${two(run.high)}` : run.mean === null ? "nothing is graded" : "mean score; one row has no interval")),
    found ? el("p", {}, verdict, link(before.label, ["compare", before.run, name]),
      `: ${signed(found.by, two)} (${signed(found.low, two)} to ${signed(found.high, two)})`) : null,
    run.history.length ? [trend([...run.history, { label: "this run", mean: run.mean, low: run.low, high: run.high }]),
      el("div", { class: "row quiet small" }, el("span", {}, run.history[0].label), span("space"),
        el("span", {}, `the last ${run.history.length + 1} runs of this spec`))] : null,
    el("dl", { class: "key-values" }, facts.map(([key, value]) => el("div", {}, el("dt", {}, key), el("dd", {}, value)))),
    run.composition?.parts.length && run.combine === "sum" ? [heading(3, "What the mean is made of"),
      waterfall(run.composition.parts.map((one) => [one.name, one.weight, one.mean]), run.mean, { taken: run.composition.taken, width: 352 })] : null);
}

function findingLink(name, finding) {
  const rows = finding.kind === "rows" || finding.kind === "category";
  return rows ? link("See rows", [name, "rows"], finding.filter) : link(many(finding.rollouts, "rollout"), [name, "rollouts"], finding.filter);
}

/** A sentence with the name of its subject in bold. */
function emphasised(text, subject) {
  const at = subject ? text.indexOf(subject) : -1;
  return at < 0 ? [text] : [text.slice(0, at), el("b", {}, subject), text.slice(at + subject.length)];
}

function wrongCard(name, run) {
  const most = Math.max(0.001, ...run.findings.map((one) => one.cost));
  return card("c8", "What went wrong, the most costly first",
    run.findings.length ? "Bars: points of the mean score. Causes overlap, so they do not add up to what is missing." : null,
    run.findings.length ? el("ol", { class: "findings" }, run.findings.map((one, at) => el("li", { class: "find" }, span("rank", at + 1),
      el("div", {}, el("p", {}, emphasised(one.text, one.subject.replace("=", " = "))),
        el("div", { class: "cost" }, el("span", { class: "track", "aria-hidden": "true" },
        sized(el("i", { class: "f0" }), "width", one.cost / most)), `costs ${score(one.cost, 2)} · `, link("example", [name, one.example]))),
      findingLink(name, one)))) : el("p", {}, run.mean === null ? "Nothing is graded." : "Nothing that costs 0.005 points of the mean score or more."),
    run.read_first.length ? [heading(3, "Read these first, one of each kind"),
      el("ul", { class: "reads" }, run.read_first.map((one) => el("li", {}, scoreTile(one, run), rolloutLink(name, one),
      span("quiet small cut", [one.stop_reason === "finished" ? null : one.stop_reason, one.reason].filter(Boolean).join("; ")))))] : null,
    run.columns.map((column) => el("p", { class: "row" }, el("b", { class: "small" }, `By ${column.name}`),
      column.values.map((one) => el("span", {}, tile(one.mean), " ", link(one.value, [name, "rollouts"], { where: `${column.name}=${one.value}` }),
      span("quiet small", ` ${count(one.rollouts)}`))))));
}

/** A rollout by the name of its row and its place, as in the terminal. */
function rolloutLink(name, one, query = null, attributes = {}) {
  const own = source.live || source.data.details[one.id];
  const at = `${one.epoch}-${one.index}${one.attempt ? `r${one.attempt}` : ""}`;
  const text = [span("cut", one.label || one.row_key), span("quiet", `:${at}`)];
  return own ? link(text, [name, one.id], query, { class: "rollout", ...attributes }) : el("span", { title: "its conversation is not in this file" }, text);
}

function overTimeCard(run) {
  const width = narrow() ? 352 : 830, tall = 236, leftEdge = 30, right = narrow() ? 8 : 130, low = Math.min(0, run.scores?.least ?? 0),
    high = Math.max(1, run.scores?.most ?? 1);
  const slot = (width - leftEdge - right) / run.steps.length, x = (at) => leftEdge + slot * (at + 0.5),
    y = (value) => 8 + (tall - 48) * (1 - (value - low) / (high - low || 1));
  const fell = run.findings.find((one) => one.kind === "drop")?.subject;
  const fits = (name) => run.rewards.some((one) => one.name === name && one.least >= low && one.most <= high); // on this axis
  const names = [...new Set(run.steps.flatMap((one) => Object.keys(one.rewards)))].filter(fits).sort((a, b) => (b === fell) - (a === fell)).slice(0, 4);
  const lines = [...names, "score"], patterns = ["2 3", "8 4", "10 3 2 3", "4 4"];
  const dots = run.dots.map(([at, value, id], place) => svg("circle",
    { class: `f${step5(value, [low, high])}`, cx: x(at) + slot * 0.6 * (((place * 0.618) % 1) - 0.5), cy: y(value), r: 1.6, "fill-opacity": 0.6 }));
  const course = lines.map((name, place) => {
    const kind = name === "score" ? "score" : name === fell ? "fell" : "";
    const points = run.steps.map((one, at) => [x(at), name === "score" ? one.mean : one.rewards[name]])
      .filter(([, value]) => typeof value === "number").map(([at, value]) => [at, y(value)]);
    return [svg("polyline", { class: `course ${kind}`, points: points.map((one) => one.join(",")).join(" "),
      "stroke-dasharray": name === "score" ? null : patterns[place % patterns.length] }),
      points.map(([at, level]) => mark(kind, place, at, level))];
  });
  let lowest = 0;
  const labels = narrow() ? null : lines.map((name) => [name,
    name === "score" ? run.steps.at(-1).mean : run.steps.at(-1).rewards[name]]).filter(([, value]) => typeof value === "number")
      .sort((a, b) => b[1] - a[1]).map(([name, value]) => {
    lowest = Math.max(y(value) + 4, lowest + 15);
    const kind = name === "score" ? "score" : name === fell ? "fell" : "";
    return [mark(kind, lines.indexOf(name), width - right + 12, lowest - 4),
      written(width - right + 20, lowest, name.slice(0, 17), { class: kind === "score" ? "bold" : kind === "fell" ? "bad" : "quiet" })];
  });
  const best = run.steps.reduce((top, one) => (one.mean > top.mean ? one : top)), last = run.steps.at(-1);
  const every = Math.ceil(run.steps.length / (narrow() ? 4 : 9));
  return card("c8", "Scores over time", `Best in ${best.label} (${score(best.mean, 2)}), last ${score(last.mean, 2)}. Dots are rollouts, whiskers 95 % intervals.${narrow() ? ` Lines: ${lines.join(", ")}.` : ""}`,
    picture(width, tall, `Mean score: ${run.steps.map((one) => `${one.label} ${score(one.mean, 2)}`).join(", ")}`,
      [low, (low + high) / 2, high].map((value) => [rule("line", leftEdge, y(value), width - right, y(value)),
      written(leftEdge - 6, y(value) + 4, number(value), { class: "quiet", "text-anchor": "end" })]),
      dots, run.steps.map((one, at) => (typeof one.low === "number" ? rule("whisker", x(at), y(Math.max(low, one.low)), x(at),
        y(Math.min(high, one.high))) : null)), course, labels,
      run.steps.map((one, at) => (at % every ? null : [written(x(at), tall - 22, one.label, { class: "quiet", "text-anchor": "middle" }),
        one.weights ? written(x(at), tall - 7, `weights ${one.weights}`, { class: "quiet", "text-anchor": "middle" }) : null]))));
}

function mark(kind, place, x, y) {
  if (kind === "score") return svg("circle", { class: "mark score", cx: x, cy: y, r: 4 });
  const shapes = [`M${x} ${y - 4}L${x + 4} ${y + 3}L${x - 4} ${y + 3}Z`, `M${x - 3} ${y - 3}H${x + 3}V${y + 3}H${x - 3}Z`,
    `M${x} ${y - 4}L${x + 4} ${y}L${x} ${y + 4}L${x - 4} ${y}Z`];
  return svg("path", { class: `mark ${kind}`, d: shapes[place % shapes.length] });
}

function spreadCard(run, varying) {
  const weight = (name) => (run.weights[name] === null ? "gate" : run.weights[name] === undefined ? "" : `× ${number(run.weights[name])}`);
  const low = total(run.scores.bars.filter((bar) => bar.to < 0.2).map((bar) => bar.count)),
    high = total(run.scores.bars.filter((bar) => bar.from >= 0.8).map((bar) => bar.count));
  const shown = varying.slice(0, 7);
  return card(run.steps.length > 1 ? "c4" : "c12", "How scores are spread",
    `${share(low, run.scores.count)} below 0.2, ${share(high, run.scores.count)} at 0.8 or more.`,
    el("div", { class: "spread-grid sides" }, run.scores.least !== run.scores.most ? histogram("score", run.scores,
      score(run.scores.mean, 2)) : null, shown.map((one) => histogram(one.name, one, `${weight(one.name)} · ${score(one.mean, 2)}`))),
    varying.length > shown.length ? el("p", { class: "quiet small" }, `and ${varying.length - shown.length} more rewards`) : null);
}

function stopsCard(name, run) {
  const natural = total(run.stop_reasons.filter((one) => one.natural).map((one) => one.count)), again = run.failed_attempts - run.failed;
  const rows = run.stop_reasons.map((one) => el("tr", {}, el("th", { scope: "row" },
    link(one.name, [name, "rollouts"], { stop_reason: one.name }, { title: one.what })),
    el("td", { class: "fill" }, meter(one.count / run.rollouts, [0, 1], "", "long plain")), el("td", { class: "number" }, count(one.count)),
      el("td", { class: "number" }, tile(one.mean))));
  return card("", "How rollouts stopped", `${share(natural, run.rollouts)} finished by themselves${again > 0 ? `; ${many(again, "attempt")} failed for other reasons and ${again === 1 ? "was" : "were"} run again` : ""}.`,
    table({ "aria-label": "Stop reasons" }, ["Stop reason", [unseen("Share"), null], ["Rollouts", "number"], ["Score", "number"]], rows),
    run.failures.map((one) => el("p", { class: "small" }, el("b", {}, `${count(one.count)} × ${one.name}: `),
      link(one.last.slice(0, 160) || "the last one", [name, one.rollout]))));
}

function timesCard(run) {
  const [all, ...each] = run.times, shares = all.phases.map((seconds, at) => [PHASES[at], seconds]).sort((a, b) => b[1] - a[1]),
    longest = Math.max(...each.map((one) => total(one.phases)), 1e-9);
  const row = (one, scale) => el("tr", {}, el("th", { scope: "row" }, one.name), el("td", { class: "fill" }, stack(one.phases, scale)),
    el("td", { class: "number" }, duration(one.total)));
  return card("", "Where the time went", total(all.phases) ? `${shares[0][0]} takes ${share(shares[0][1], total(all.phases))} of all ${duration(all.total)} of rollout time.` : `${duration(all.total)} of rollout time.`,
    legend(PHASES.filter((phase, at) => all.phases[at] > 0).map((phase) => [phase, phase])),
    table({ "aria-label": "Time by phase" }, [[unseen("Rollouts"), null], [unseen("Phases"), null], ["Time", "number"]],
      [row(all, total(all.phases)), ...each.map((one) => row(one, longest))]));
}

function spentCard(run) {
  const spent = run.spent, most = Math.max(spent.prompt, spent.completion);
  const rows = [["prompt", kilo(spent.prompt), spent.prompt / most], ["completion", kilo(spent.completion), spent.completion / most],
    spent.per_second ? ["sampled per second", number(Number(spent.per_second.toPrecision(3)))] : null,
    ["per rollout, median", kilo(spent.median)], run.passed < run.scored ? ["spent on unsolved ones", share(spent.unsolved, 1)] : null,
      spent.per_solved !== null ? ["cost of a solved one", money(spent.per_solved)] : null].filter(Boolean);
  return card("", "Tokens and cost", `${kilo(spent.prompt + spent.completion)} tokens${run.cost === null ? "" : `, ${money(run.cost)}`}${run.tokens > spent.prompt + spent.completion ? `; ${kilo(run.tokens)} with all attempts` : ""}.`,
    table({ "aria-label": "Tokens and cost" }, [[unseen("Quantity"), null], [unseen("Share"), null], [unseen("Value"), "number"]],
      rows.map(([key, value, part]) => el("tr", {}, el("th", { scope: "row" }, key),
      el("td", { class: "fill" }, part === undefined ? null : meter(part, [0, 1], "", "long plain")), el("td", { class: "number" }, value)))));
}

function toolsCard(name, run) {
  const most = Math.max(1, ...run.tools.map((one) => one.calls)),
    worst = run.tools.reduce((top, one) => (one.errors / Math.max(one.calls, one.errors, 1) > top.errors / Math.max(top.calls, top.errors, 1) ? one : top));
  return card("", "Tools", worst.errors ? `${worst.name || "A call without a name"} fails most often, in ${share(worst.errors, Math.max(worst.calls, worst.errors))} of its calls.` : "No call failed.",
    table({ "aria-label": "Tools" }, ["Tool", [unseen("Share"), null], ["Calls", "number"], ["Failed", "number"]],
      run.tools.slice(0, 12).map((one) => el("tr", {}, el("th", { scope: "row" }, link(one.name || "(no name)", [name, "rollouts"], { tool: one.name })),
      el("td", { class: "fill" }, meter(one.calls / most, [0, 1], "", "long plain")), el("td", { class: "number" }, count(one.calls)),
        el("td", { class: "number" }, one.errors ? link(count(one.errors), [name, "rollouts"], { tool: one.name, tool_errors: true }) : "0")))));
}

function flightCard(run) {
  const width = narrow() ? 720 : 1300, tall = 110, { bins, most, seconds, failed: when } = run.flight,
    x = (at) => 30 + (width - 40) * at / (bins.length - 1), y = (value) => 8 + (tall - 30) * (1 - value / most);
  let below = bins.map(() => 0);
  const areas = PHASES.map((phase, place) => {
    const above = bins.map((bin, at) => below[at] + bin[place]);
    const path = [...above.map((value, at) => `${x(at)},${y(value)}`), ...below.map((value, at) => `${x(at)},${y(value)}`).reverse()].join(" ");
    below = above;
    return bins.some((bin) => bin[place] > 0) ? svg("polygon", { class: phase, points: path }) : null;
  });
  const idle = bins.filter((bin) => total(bin) < 0.6 * most).length;
  return card("c12", "Rollouts in flight", `Up to ${Math.round(most)} at a time; ${share(idle, bins.length)} of the time less than 60 % of that.`,
    legend(PHASES.filter((phase, place) => bins.some((bin) => bin[place] > 0)).map((phase) => [phase, phase])),
    scrolled("Rollouts in flight over time", wideOnly(picture(width, tall,
      `Rollouts in flight, at most ${Math.round(most)}, over ${duration(seconds)}`, areas,
      written(24, 14, Math.round(most), { class: "quiet", "text-anchor": "end" }), written(24, tall - 20, "0", { class: "quiet", "text-anchor": "end" }),
      when.map((at) => written(x((bins.length - 1) * Math.min(1, at / seconds)), tall - 20, "▲", { class: "bad", "text-anchor": "middle" })),
      [0, 0.25, 0.5, 0.75, 1].map((part) => written(x(part * (bins.length - 1)), tall - 3, part ? duration(part * seconds) : "0 s",
        { class: "quiet", "text-anchor": part === 0 ? "start" : part === 1 ? "end" : "middle" }))))),
    when.length ? el("p", { class: "quiet small" }, el("span", { class: "bad" }, "▲"), " a failed attempt") : null);
}

function wideOnly(node) {
  if (narrow()) node.style.minWidth = "640px";
  return node;
}

/** What is the same in every rollout, in one line. */
function constants(run) {
  const sampling = run.said.policy?.[0]?.sampling ?? {};
  const same = [run.model ? `model ${run.model}` : null, ...["temperature",
    "top_p"].filter((key) => typeof sampling[key] === "number").map((key) => `${key} ${sampling[key]}`),
    ...run.rewards.filter((one) => one.least === one.most).map((one) => `reward ${one.name} ${number(one.least)}`),
      run.scores && run.scores.least === run.scores.most ? `score ${number(run.scores.least)}` : null,
    run.stop_reasons.length === 1 && !run.failures.length ? `stop reason ${run.stop_reasons[0].name}` : null,
      run.tools.length === 1 && !run.tools[0].errors ? `tool ${run.tools[0].name}, ${many(run.tools[0].calls, "call")}, none failed` : null,
    run.said.quarantined?.length ? `${many(run.said.quarantined.length, "row")} quarantined` : null,
      run.started ? `started ${moment(run.started)}` : null, run.seconds === null ? null : duration(run.seconds),
      run.flight ? null : "no times of calls are recorded"].filter(Boolean);
  return el("p", { class: "quiet small" }, el("b", {}, "The same everywhere: "), same.join(" · "));
}

function specPart(turn, name, query, run) {
  return { nodes: [el("div", { class: "grid" }, card("c7", "The spec as it ran", null, pre(run.spec_text)),
    card("c5", "run.json", null, el("p", { class: "say mono" }, run.path), pre(JSON.stringify(run.said, null, 1))))] };
}

async function comparePart(turn, name, query, run) {
  const { runs } = await source.runs();
  nameAll(runs);
  const others = runs.filter((one) => one.run !== name && one.spec === run.spec && typeof one.mean === "number");
  if (!others.length) return { nodes: [el("p", {}, "There is no other run of this spec to compare with. ", link("All runs", []))] };
  const before = run.history.at(-1)?.run;
  others.sort((a, b) => (b.run === before) - (a.run === before) || (b.mode === run.mode) - (a.mode === run.mode));
  return { nodes: [el("p", { class: "say" }, "Compare this run, as B, with another one of its spec:"),
    table({ class: "runs", "aria-label": "Runs to compare with" },
    ["A", "Mode · model", ["Score", "number"], ["Interval, 0 to 1", "wide"], ["Started", "number wide"]],
    others.map((one) => el("tr", {}, el("th", { scope: "row" }, link(named(one), ["compare", one.run, name], null, { "data-entry": "" }),
      one.run === before ? span("quiet small", " the run before") : null), el("td", { class: "quiet" }, [one.mode, one.model].filter(Boolean).join(" · ")),
      el("td", { class: "number" }, tile(one.mean)), el("td", { class: "wide" }, whisker(one)),
        el("td", { class: "number quiet wide" }, moment(one.started)))))] };
}

// --------------------------------------------------------------------------------------------- Rollouts of a run

const WORDS = { stop_reason: "stop reason", first_epoch: "epoch from", last_epoch: "epoch to", tool_errors: "with failed calls", least: "from",
  most: "to", unsolved: "rows never solved", where: "", text: "text", group: "group", row: "row", state: "state", tool: "tool", reward: "value of" };
let peeking = false, filtering = false; // whether a rollout is shown beside the list, and whether the filters are open

function chips(parts, query) {
  return Object.entries(query).filter(([key, value]) => value && key in WORDS).map(([key, value]) => {
    const text = ["tool_errors", "unsolved"].includes(key) ? WORDS[key] : `${WORDS[key]} ${key === "where" ? value.replace("=", ": ") : value}`.trim();
    const { [key]: _, ...rest } = query;
    return link([text, el("span", { "aria-hidden": "true" }, "✕")], parts, rest, { class: "chip on", "aria-label": `Remove the filter ${text}` });
  });
}

async function rolloutsPart(turn, name, query, run) {
  const list = el("div", {}), news = el("p", { role: "status", class: "small" }), buttons = el("div", { class: "tools-bar" }),
    aside = el("aside", { "aria-label": "Peek", hidden: true });
  const state = kept(location.hash), before = state.before ?? []; // cursors of the pages that were shown before this one
  let cursor = null, shown = 0, wait = null;
  const show = async (from) => {
    buttons.querySelectorAll("button").forEach((button) => { button.disabled = true; });
    const found = await source.rollouts(name, { ...query, cursor: from });
    // A search in texts is done in pieces: a page that is not full goes on from where it stopped.
    while (turn === drawn && found.cursor && found.rollouts.length < PAGE && query.text) {
      news.textContent = `${count(found.looked)} of ${many(found.fit, "rollout")} searched`;
      const more = await source.rollouts(name, { ...query, cursor: found.cursor });
      found.rollouts.push(...more.rollouts);
      Object.assign(found, { cursor: more.cursor, looked: more.looked });
    }
    if (turn !== drawn) return;
    [cursor, shown] = [from, found.total];
    Object.assign(state, { before, cursor });
    news.replaceChildren();
    list.replaceChildren(rolloutsTable(name, query, found, run));
    const turnTo = (to, forward) => async () => {
      forward ? before.push(cursor) : before.pop();
      await show(to);
      list.querySelector("a")?.focus();
    };
    turnPage = found.cursor ? async () => { await turnTo(found.cursor, true)(); return true; } : null;
    const scores = found.rollouts.map((one) => one.score).filter((value) => value !== null);
    document.getElementById("shown").textContent = query.text ? `${count(found.rollouts.length)} found on this page` : `${count(found.fit)} of ${many(found.total, "rollout")}`;
    buttons.replaceChildren(...(before.length || found.cursor ? [el("button",
      { type: "button", disabled: !before.length, onclick: turnTo(before.at(-1), false) }, "Previous page"),
      el("button", { type: "button", disabled: !found.cursor, onclick: turnTo(found.cursor, true) }, "Next page")] : []),
        ...(scores.length ? [span("quiet small", "on this page: mean ", tile(mean(scores)))] : []));
  };
  const peek = async () => {
    const id = peeking && document.activeElement?.closest("tr")?.dataset.rollout;
    body.classList.toggle("with-peek", peeking);
    aside.hidden = !peeking;
    document.getElementById("peek")?.setAttribute("aria-pressed", peeking);
    if (!id) { if (!aside.hasChildNodes()) aside.replaceChildren(el("p", { class: "quiet" }, "j and k choose a rollout.")); return; }
    const one = await source.rollout(name, id).catch((error) => ({ problem: error }));
    if (turn === drawn) aside.replaceChildren(...[one.problem ? problem(one.problem) : peeked(name, one, run)].flat(Infinity).filter(Boolean));
  };
  list.addEventListener("focusin", () => { if (peeking) { clearTimeout(wait); wait = setTimeout(peek, 60); } });
  list.addEventListener("click", (event) => {
    if (event.target.closest("a, button") || !event.target.closest("tr[data-rollout]")) return;
    event.target.closest("tr").querySelector("a[data-entry]")?.focus();
    if (!narrow()) { peeking = true; peek(); }
  });
  const toggle = () => { peeking = !peeking; return peek(); };
  keysHere = { p: toggle };
  const body = el("div", { class: "flush" }, el("div", {}, list, buttons), aside);
  const search = (text) => {
    const { text: _, ...rest } = query;
    query = text ? { ...rest, text } : rest;
    history.replaceState({ seen: true }, "", address([name, "rollouts"], query));
    here = location.hash;
    before.length = 0;
    bar.replaceChildren(...chips([name, "rollouts"], query));
    return show(null).catch((error) => { news.textContent = error.message; });
  };
  const tools = el("div", { class: "flush tools-bar" }, el("input",
    { id: "by-text", type: "search", "aria-label": "Search texts, reasons, rows", placeholder: "Search texts, reasons, rows  /", value: query.text,
    oninput: (event) => { clearTimeout(wait); wait = setTimeout(() => search(event.target.value), 250); },
    onkeydown: (event) => {
      if (event.key !== "Enter") return;
      const text = event.target.value, first = () => list.querySelector("a[data-entry]")?.focus();
      if (text === (query.text ?? "")) return first();
      clearTimeout(wait); // what is listed does not have this text yet
      return search(text).then(first);
    } }), filterPop(name, query, run));
  const bar = el("span", { class: "row", id: "filters" }, chips([name, "rollouts"], query));
  tools.append(bar, ...quick(name, query, run), span("space"), el("span", { id: "shown", role: "status", class: "quiet" }),
    el("button", { type: "button", id: "peek", class: "wide", "aria-pressed": peeking, onclick: toggle }, "Peek ", el("kbd", {}, "p")));
  main.replaceChildren(tools, news, body); // fields are found by their ids from here on
  await show(state.cursor ?? null);
  if (peeking) peek();
  return {
    nodes: [tools, news, body],
    grown(now, anew) {
      const more = now.attempts - shown;
      if (!anew && (more <= 0 || now.read < 1)) return;
      run = now;
      const again = () => { before.length = 0; show(null).then(() => list.querySelector("a")?.focus()); };
      news.replaceChildren(anew ? "The run was graded anew. " : `${many(more, "rollout")} more. `,
        el("button", { type: "button", onclick: again }, "Show them"));
    },
  };
}

/** Filters that are asked for most often, where they select something. */
function quick(name, query, run) {
  if (Object.keys(query).some((key) => key in WORDS)) return [];
  const chip = (text, more) => link(text, [name, "rollouts"], { ...query, ...more }, { class: "chip" });
  return [run.scores && run.scores.least <= 0.2 ? chip("score ≤ 0.2", { most: "0.2" }) : null,
    run.failed_attempts ? chip(`without a score ${run.failed_attempts}`, { state: "failed" }) : null].filter(Boolean);
}

function filterPop(name, query, run) {
  const form = el("div"), goTo = () => {
    const values = Object.fromEntries([...form.querySelectorAll("select, input")].map((field) => [field.name,
      field.type === "checkbox" ? field.checked : field.value]));
    location.hash = address([name, "rollouts"], { ...query, ...values });
  };
  const field = (label, key, control) => [el("label", { for: `by-${key}` }, label), control];
  const choice = (label, key, values, none) => (values.length > 1 || query[key] ? field(label, key,
    el("select", { id: `by-${key}`, name: key, onchange: goTo }, el("option", { value: "" }, none),
    [...new Set([...values, query[key]].filter(Boolean))].map((value) => el("option", { value, selected: query[key] === value },
      value.replace("=", ": "))))) : []);
  const bound = (label, key) => field(label, key, el("input", { id: `by-${key}`, type: "number", step: "any", name: key, value: query[key], onchange: goTo }));
  form.append(...[choice("Stop reason", "stop_reason", run.stop_reasons.map((one) => one.name), "any"),
    choice("Rows with", "where", run.columns.flatMap((column) => column.values.map((one) => `${column.name}=${one.value}`)), "any"),
    choice("State", "state", ["scored", "excluded", "failed", "waiting", "retries_exhausted"], "any"),
      choice("Tool called", "tool", run.tools.map((one) => one.name), "any"),
    field("with failed calls", "tool_errors", el("input", { id: "by-tool_errors", type: "checkbox", name: "tool_errors",
      checked: Boolean(query.tool_errors), onchange: goTo })),
    choice("Value of", "reward", run.rewards.map((one) => one.name), "the score"), bound("from", "least"), bound("to", "most"),
    run.steps[0]?.label.startsWith("epoch") ? [bound("Epoch from", "first_epoch"), bound("Epoch to", "last_epoch")] : [],
    field("Sort by", "sort", el("select", { id: "by-sort", name: "sort", onchange: goTo },
      [["", "when they ended"], ["score", "score"], ["seconds", "time"], ["tokens", "tokens"], ["turns", "turns"], ["calls", "tool calls"],
      ["tool_errors", "failed calls"], ...run.rewards.map((one) => [`reward:${one.name}`, `reward ${one.name}`])]
      .map(([value, text]) => el("option", { value, selected: (query.sort ?? "") === value }, text)))),
    field("descending", "descending", el("input", { id: "by-descending", type: "checkbox", name: "descending", checked: Boolean(query.descending),
      onchange: goTo }))].flat(Infinity));
  return el("details", { class: "pop", open: filtering, ontoggle: (event) => { filtering = event.target.open; } },
    el("summary", {}, "+ Filter and sort"), form);
}

function rolloutsTable(name, query, found, run) {
  if (!found.rollouts.length) return el("p", { class: "tools-bar" }, found.total ? "No rollout fits." : "No rollout has ended yet.");
  const rewards = run.rewards.filter((one) => one.least !== one.most).slice(0, 5), varies = (of) => new Set(found.rollouts.map(of)).size > 1;
  const head = (text, sort, kind) => {
    const on = sort && query.sort === sort;
    return [el("th", { scope: "col", class: kind, "aria-sort": on ? (query.descending ? "descending" : "ascending") : null },
      sort ? el("button", { type: "button", onclick: () => { location.hash = address([name, "rollouts"],
        { ...query, sort, descending: on ? !query.descending : true }); } }, text) : text)];
  };
  const numbers = [["Turns", "turns", (one) => one.turns, (one) => count(one.turns)],
    ["Calls", "calls", (one) => one.calls, (one) => (one.call_errors ? [count(one.calls),
    el("span", { class: "bad", title: "failed" }, ` ✕${one.call_errors}`)] : count(one.calls))],
    ["Tokens", "tokens", (one) => one.prompt_tokens + one.completion_tokens,
      (one) => kilo(one.prompt_tokens + one.completion_tokens)]].filter(([, , of]) => varies(of));
  const stops = run.stop_reasons.length > 1, reasons = found.rollouts.some((one) => one.reason || one.error);
  const columns = [head("Score", "score", "w-score"), head("Rollout", null, "w-row"),
    ...rewards.map((one) => head(el("span", { class: "cut" }, one.name), `reward:${one.name}`, "w-reward wide")),
    stops ? head("Stop reason", null, "w-stop wide") : null,
    ...numbers.map(([text, sort]) => head(text, sort, "w-number number optional")), head("Time", "seconds", "w-number number"),
      head(reasons ? "Why, or its answer" : "Answer", null, "w-why wide")].filter(Boolean);
  return scrolled("Rollouts", table({ class: "list" }, columns, found.rollouts.map((one) => el("tr", { "data-rollout": one.id },
    el("td", {}, scoreTile(one, run)),
    el("th", { scope: "row", class: "w-row cut", title: one.label }, rolloutLink(name, one, query, { "data-entry": failed(one) ? "failed" : "" })),
    rewards.map((reward) => el("td", { class: "w-reward" }, span("reward-name", reward.name, " "), rewardCell(one.rewards[reward.name], reward, run))),
    stops ? el("td", { class: "w-stop cut" }, one.stop_reason === "finished" ? span("quiet wide", "finished") : span("bad", "■ ", one.stop_reason)) : null,
    numbers.map(([, , , told]) => el("td", { class: "number optional" }, told(one))),
    el("td", { class: "number" }, duration(one.seconds)),
    el("td", { class: "w-why cut quiet", title: one.reason || one.answer }, one.reason || one.error || (one.answer ? `→ ${one.answer}` : ""))))));
}

function rewardCell(value, reward, run) {
  if (run.weights[reward.name] === null && (value === 0 || value === 1)) return value ? span("quiet small", "✓ open") : span("bad small", "✕ closed");
  return meter(value, rangeOf(reward));
}

function partsOf(one, run) {
  const weights = Object.keys(run.weights).length ? run.weights : Object.fromEntries(one.rewards.map((reward) => [reward.name, undefined]));
  return one.rewards.filter((reward) => weights[reward.name] !== undefined && weights[reward.name] !== 0).map((reward) => [reward.name,
    weights[reward.name], reward.value]);
}

/** Why a rollout has its score: the sum of its rewards where the run says how they are weighted, else their values. */
function whyScore(one, run) {
  const parts = partsOf(one, run), others = one.rewards.filter((reward) => !parts.some(([name]) => name === reward.name));
  const sum = run.combine === "sum" && parts.length > 0 && !one.seat;
  const listed = sum ? others : one.rewards;
  return [sum ? [waterfall(parts, one.score, { clamp: run.clamp }),
    parts.some(([, weight, value]) => weight > 0 && value !== null && value < 1) ? el("p", { class: "quiet small" },
    "dashed: what was not earned") : null] : null,
    listed.length ? table({ "aria-label": "Rewards" }, [sum ? "Metric" : "Reward", ["Value", "number"]],
      listed.map((reward) => el("tr", {}, el("th", { scope: "row" }, reward.name), el("td", { class: "number" }, number(reward.value))))) : null,
    !sum && parts.length ? el("p", { class: "quiet small" },
      `The score is the ${run.combine} of weight × value: ${parts.map(([name, weight]) => `${name} ${weight === null ? "gate" : number(weight)}`).join(", ")}.`) : null];
}

function peeked(name, one, run) {
  const answer = [...one.messages].reverse().find((message) => message.role === "assistant" && message.text);
  return [el("div", { class: "row" }, scoreTile(one, run), heading(2, `${one.label || one.row_key}:${one.epoch}-${one.index}`), span("space"),
    link("Open", [name, one.id])), whyScore(one, run),
    one.error ? el("p", { class: "note bad" }, one.error) : null,
      one.rewards.filter((reward) => reward.reason).map((reward) => el("div", { class: "why" }, heading(3, reward.name), pre(reward.reason.slice(0, 600)))),
    answer ? el("div", { class: "why" }, heading(3, "Last answer"), pre(answer.text.slice(0, 1200))) : null,
      heading(3, `Time ${duration(one.seconds)}`), phasesOf(one),
    one.members.length > 1 ? [heading(3, "Its group"), el("p", { class: "row" },
      one.members.map((member) => link(scoreTile(member, run), [name, member.id], null,
      { title: member.id, "aria-label": `${member.id}, score ${score(member.score, 2)}` })))] : null];
}

function phasesOf(one) {
  const phases = PHASES.map((phase) => one.timings[phase] ?? 0);
  return total(phases) ? [stack(phases), legend(PHASES.filter((phase, at) => phases[at] > 0).map((phase) => [phase,
    `${phase} ${duration(one.timings[phase])}`]))] : null;
}

// ------------------------------------------------------------------------------------------------- Rows of a run

async function rowsPart(turn, name, query, run) {
  const body = el("div", { class: "flush" }), tools = el("div", { class: "flush tools-bar" });
  const show = async () => {
    const found = await source.rows(name, query);
    if (turn !== drawn) return;
    const chip = (text, key, value) => link(text, [name, "rows"], { ...query, [key]: query[key] === value ? null : value, start: null },
      { class: `chip${query[key] === value ? " on" : ""}`, "aria-current": query[key] === value ? "true" : null });
    exchange(tools, [span("quiet", "Each square is a rollout, filled as high as its score."), span("space"),
      found.unsolved || query.unsolved ? chip(`never solved ${found.unsolved}`, "unsolved", "1") : null,
      found.columns.slice(0, 2).filter((column) => column.values.length <= 6).map((column) => column.values.map((value) => chip(`${column.name}: ${value}`, "where", `${column.name}=${value}`))),
      query.where && !found.columns.slice(0, 2).some((column) => column.values.length <= 6 && query.where.startsWith(`${column.name}=`)) ? chip(query.where.replace("=", ": "), "where", query.where) : null,
      el("label", { class: "small", for: "by-sort" }, unseen("Sort by"),
        el("select", { id: "by-sort", onchange: (event) => { location.hash = address([name, "rows"], { ...query, sort: event.target.value, start: null }); } },
        [["", "solved, lowest first"], ["spread", "most mixed first"], ["drop", "largest fall first"],
          ["name", "name"]].map(([value, text]) => el("option", { value, selected: (query.sort ?? "") === value }, text)))),
      el("span", { id: "shown", role: "status", class: "quiet" }, `${found.fit} of ${many(found.total, "row")}`)]);
    exchange(body, [rowsTable(name, found, run), found.next ? el("p", { class: "tools-bar" },
      link("Next rows", [name, "rows"], { ...query, start: found.next })) : null, el("div", { class: "tools-bar" }, legend(SCORES))]);
  };
  await show();
  return { nodes: [tools, body], grown: (now) => { run = now; if (!main.contains(document.activeElement)) show(); } };
}

function rowsTable(name, found, run) {
  if (!found.rows.length) return el("p", { class: "tools-bar" }, "No row fits.");
  const range = rangeOf(run.scores, run.clamp), epochs = [...new Set(found.rows.flatMap((row) => row.epochs.map(([epoch]) => epoch)))].sort((a, b) => a - b);
  const one = found.rows.every((row) => row.rollouts === 1), reasons = found.rows.some((row) => row.reason),
    labels = found.rows.map((row) => row.label || row.row_key), questions = found.rows.some((row) => row.question && row.question !== row.label);
  const columns = ["Row", ...found.columns.map((column) => [column.name, "wide"]), one ? null : "Solved", ["Mean", "number"],
    ...epochs.map((epoch) => (epochs.length > 1 ? `epoch ${epoch}` : "Rollouts")),
    reasons ? ["Most frequent reason", "wide"] : questions ? ["Prompt", "wide"] : null].filter(Boolean);
  const square = ([id, value]) => {
    const fill = sized(el("i", { class: value === null ? "sn" : `f${step5(value, range)}` }), "height",
      value === null ? 1 : Math.max(0.08, portion(value, range)));
    const told = `${id}, score ${score(value, 2)}`;
    return source.live || source.data.details[id] ? link(fill, [name, id], null, { "aria-label": told, title: told, tabindex: "-1" }) : el("span",
      { role: "img", "aria-label": told, title: told }, fill);
  };
  const made = table({ class: "rows-table", "aria-label": "Rows and their rollouts" }, columns, found.rows.map((row, at) => el("tr", {},
    el("th", { scope: "row", class: "w-row" }, link(shortened(labels[at], 60), [name, "rollouts"], { row: row.row_key },
      { title: row.question, "data-entry": row.passed ? "" : "failed" })),
    row.columns.map((value) => el("td", { class: "quiet wide" }, value)),
    one ? null : el("td", {}, meter(row.passed / row.rollouts, [0, 1], ""), span("small", ` ${count(row.passed)} of ${count(row.rollouts)}`)),
    el("td", { class: "number" }, tile(row.mean, false, range)),
    epochs.map((epoch) => el("td", { class: "w-squares" }, el("div", { class: "squares" },
      (row.epochs.find(([which]) => which === epoch)?.[1] ?? []).map(square)))),
    reasons ? el("td", { class: "quiet wide reason", title: row.reason?.[0] },
      row.reason ? `${row.reason[1]} × ${row.reason[0].slice(0, 90)}` : "") : questions ? el("td", { class: "quiet wide reason" },
      row.question.slice(0, 90)) : null)));
  // One stop of the Tab key leads into the squares, and the arrow keys from there.
  made.querySelector(".squares a")?.setAttribute("tabindex", "0");
  made.addEventListener("keydown", (event) => {
    const from = event.target.closest(".squares a"), by = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (!from || !by) return;
    event.preventDefault();
    const lines = [...made.querySelectorAll("tbody tr")], line = lines.indexOf(from.closest("tr")),
      at = [...lines[line].querySelectorAll(".squares a")].indexOf(from);
    const to = [...(lines[line + by[0]]?.querySelectorAll(".squares a") ?? [])][at + by[1]];
    if (!to) return;
    from.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  });
  return scrolled("Rows", made);
}

// ------------------------------------------------------------------------------------------------------ A rollout

const VIEWS = ["conversation", "tokens", "group", "record"];

async function rolloutPage(turn, name, id, view, query) {
  const run = await source.overview(name);
  const one = await source.rollout(name, id);
  if (turn !== drawn) return [];
  filtering = false;
  const again = (own) => [name, own, ...(view === "conversation" ? [] : [view])];
  go = async (backwards, onlyFailed) => {
    let cursor = null;
    live.textContent = "Looking …";
    do { // a search for a text is done in pieces
      const found = await source.beside(name, id, { ...query, backwards: backwards ? 1 : null, failed: onlyFailed ? 1 : null, cursor });
      if (turn !== drawn) return;
      // In place of this one: the browser's way back leads to the list.
      if (found.id !== null) return location.replace(address(again(found.id), query));
      cursor = found.cursor;
    } while (cursor !== null);
    live.textContent = onlyFailed ? "No failed one follows in this list." : "The list ends here.";
  };
  const beside = (text, key, backwards, onlyFailed) => el("button",
    { type: "button", onclick: () => step(backwards, onlyFailed).catch((error) => { live.textContent = error.message; }) }, text, " ",
    el("kbd", { class: "wide" }, key));
  const members = one.seats.length > 1 ? one.seats : one.members,
    views = VIEWS.filter((each) => (each !== "group" || members.length > 1) && (each !== "tokens" || one.sequences.length || one.prompt_text));
  const names = { conversation: "Conversation", tokens: "Tokens",
    group: one.seats.length > 1 ? `Episode of ${members.length}` : `Group of ${members.length}`, record: "Row and record" };
  place({
    crumbs: [[run.label.name || run.spec || name, [name]], ["Rollouts", [name, "rollouts"], query]],
    title: `${shortened(one.label || one.row_key, 48)}:${one.epoch}-${one.index}${one.attempt ? `r${one.attempt}` : ""}${one.seat ? ` ${one.seat}` : ""}`,
    facts: [scoreTile(one, run), one.natural ? span("quiet small", one.stop_reason) : span("bad small", "■ ", one.stop_reason)],
    actions: [beside("← prev", "k", true, false), beside("next →", "j", false, false), beside("next failed", "n", false, true)],
    tabs: views.map((each) => [names[each], each === "conversation" ? [name, id] : [name, id, each], query, each === view]),
  });
  const to = (each) => () => { if (views.includes(each)) location.hash = address(each === view ? [name, id] : [name, id, each], query); };
  keysHere = { g: to("group"), t: to("tokens"), o: () => { const all = [...main.querySelectorAll("details.call")],
    open = all.some((each) => !each.open); all.forEach((each) => { each.open = open; }); } };
  const about = [one.error ? el("p", { class: "note bad" }, one.error) : null,
    one.cut ? el("p", { class: "note" }, `Not shown here: ${one.cut === 1 ? "1 entry" : `${count(one.cut)} entries`}; rollouts.jsonl has the whole rollout.`) : null];
  const shown = { conversation: conversationView, tokens: tokensView, group: groupView, record: recordView };
  return [about, await shown[view](name, one, run, members)];
}

function conversationView(name, one, run) {
  const folded = total(one.messages.map((message) => message.calls.length));
  const best = one.members.filter((member) => member.score !== null).reduce((top, member) => (member.score > (top?.score ?? -Infinity) ? member : top), null);
  const missing = partsOf(one, run).filter(([, weight, value]) => weight > 0 && value !== null && value < 1)
    .sort((a, b) => b[1] * (1 - b[2]) - a[1] * (1 - a[2]))[0];
  const say = one.score === null ? "It has no score." : missing && run.combine === "sum" ? `${missing[0]} is missing ${score(missing[1] * (1 - missing[2]), 2)}${best && best.id !== one.id && best.score > one.score ? `; the best of its group has ${score(best.score, 2)}` : ""}.` : "";
  const events = timeline(one);
  return [events ? el("section", { class: "card" }, el("div", { class: "row" }, heading(2, "Timeline"),
    legend(PHASES.filter((phase) => events.phases.has(phase)).map((phase) => [phase, phase])),
    span("quiet small wide", "numbers are turns; a click goes to the turn")),
    scrolled("Timeline of the rollout", wideOnly(events.drawn))) : null,
  el("div", { class: "two" }, el("section", { "aria-labelledby": "conversation" },
    el("div", { class: "row" }, heading(2, "Conversation", { id: "conversation" }),
      folded ? el("button", { type: "button", onclick: () => keysHere.o() }, "Open all ", el("kbd", {}, "o")) : null,
      folded ? span("quiet small", `${many(folded, "tool call")} folded`) : null),
    conversation(one), ended(one), programPart(one)),
  el("div", {}, one.rewards.length ? card("", one.score === null ? "Rewards" : `Why ${score(one.score, 2)}`, say || null, whyScore(one, run),
    one.rewards.filter((reward) => reward.reason || reward.metrics || reward.per_turn).map((reward) => el("div", { class: "why" },
      heading(3, [reward.name, span("quiet", ` = ${number(reward.value)}`)]), reward.reason ? pre(reward.reason) : null,
      reward.metrics ? el("p", { class: "quiet small" }, Object.entries(reward.metrics)
        .map(([key, value]) => `${key} ${number(value)}`).join(" · ")) : null,
        reward.per_turn ? el("p", { class: "quiet small" }, `per turn: ${reward.per_turn.map(number).join(", ")}`) : null))) : null,
    numbersCard(name, one, run), events ? null : el("p", { class: "quiet small" }, "When its calls started was not recorded.")))];
}

function numbersCard(name, one, run) {
  const costs = typeof one.cost === "number" ? one.cost : null;
  const facts = [["time", duration(one.seconds)], ["turns", count(one.turns)],
    one.calls ? ["tool calls", one.call_errors ? [count(one.calls), span("bad", `, ${count(one.call_errors)} failed`)] : count(one.calls)] : null,
    ["prompt tokens, all turns", count(one.prompt_tokens)], ["sampled tokens", count(one.completion_tokens)], costs === null ? null : ["cost", money(costs)],
    one.policy?.model ? ["model", shortened(one.policy.model, 32)] : null,
      typeof one.policy?.version === "number" ? ["weights", String(one.policy.version)] : null, one.image ? ["image", one.image.slice(0, 19)] : null,
      typeof one.started_at === "number" ? ["started", moment(one.started_at)] : null,
      ["row", link("its rollouts", [name, "rollouts"], { row: one.row_key })]].filter(Boolean);
  return card("", "Numbers", null, table({ "aria-label": "Numbers" }, [[unseen("Quantity"), null], [unseen("Value"), "number"]],
    facts.map(([key, value]) => el("tr", {}, el("th", { scope: "row" }, key), el("td", { class: "number" }, value)))), phasesOf(one),
    one.attempts.length > 1 ? [heading(3, "Attempts at this place"),
      el("ul", { class: "tree" }, one.attempts.map((each) => el("li", {},
      each.id === one.id ? el("code", {}, each.id) : link(each.id, [name, each.id], null, { class: "mono" }),
      span("quiet small", ` ${each.state}, ${each.stop_reason}`))))] : null);
}

/** Model calls, tool calls and rewards of a rollout over time; null where their starts were not recorded. */
function timeline(one) {
  const events = [];
  if (one.sandbox_start) events.push(["sandbox", one.sandbox_start.started_at, one.sandbox_start.seconds, "start of the sandbox", null]);
  for (const call of one.model_calls) events.push(["generation", call.started_at, call.seconds, `turn ${call.turn}`, call.turn]);
  let turn = 0;
  for (const message of one.messages) {
    turn = message.turn ?? turn;
    for (const call of message.calls) if (call.started_at) events.push(["tools", call.started_at, call.seconds ?? 0,
      `${call.name}${call.error ? " failed" : ""}, turn ${turn}`, turn, Boolean(call.error)]);
  }
  for (const reward of one.rewards) if (reward.started_at) events.push(["rewards", reward.started_at, reward.seconds, `reward ${reward.name}`, null]);
  if (!events.some(([phase]) => phase === "generation")) return null;
  const first = Math.min(one.started_at ?? Infinity, ...events.map(([, at]) => at)),
    last = Math.max(...events.map(([, at, seconds]) => at + seconds)), all = Math.max(last - first, 0.001);
  const width = narrow() ? 720 : 1300, x = (at) => 4 + (width - 8) * (at - first) / all, lane = { sandbox: 4, generation: 4, tools: 22, rewards: 40 };
  const drawn = picture(width, 70, `Timeline: ${events.map(([, , seconds, text]) => `${text} ${duration(seconds)}`).join("; ")}`,
    events.map(([phase, at, seconds, text, turn, bad]) => {
    const wide = Math.max(2, x(at + seconds) - x(at) - 1);
    const goes = turn === null ? {} : { onclick: () => document.getElementById(`turn-${turn}`)?.scrollIntoView(), cursor: "pointer" };
    return svg("g", goes, svg("rect", { class: phase, x: x(at), y: lane[phase], width: wide, height: 14, rx: 2 },
      svg("title", {}, `${text}, ${duration(seconds)}`)),
      bad ? written(x(at) + 4, lane[phase] + 11, wide > 80 ? `✕ failed ${duration(seconds)}` : "✕",
        { class: "inside" }) : phase === "generation" && wide > 16 ? written(x(at) + 3, lane[phase] + 11, turn, { class: "inside" }) : null);
  }), [0, 0.25, 0.5, 0.75, 1].map((part) => written(4 + part * (width - 8), 68, part ? duration(part * all) : "0 s",
    { class: "quiet", "text-anchor": part === 0 ? "start" : part === 1 ? "end" : "middle" })));
  return { drawn, phases: new Set(events.map(([phase]) => phase)) };
}

function ended(one) {
  if (one.natural) return el("p", { class: "quiet small" }, `■ ${one.stop_reason}: ${one.stop}`);
  return el("p", { class: "stop" }, el("b", { class: "bad" }, `■ stopped: ${one.stop_reason}`),
    span("quiet", ` after ${many(one.turns, "turn")}${one.stop ? `: ${one.stop}` : ""}`));
}

const LONG = 600; // characters of a system prompt that is folded: it is the same in each rollout

function conversation(one) {
  if (!one.messages.length) return [el("p", {}, "It has no conversation.")];
  return one.messages.map((message) => {
    const call = message.turn ? one.model_calls[message.turn - 1] : null;
    return el("section", { class: `message ${/^[a-z]+$/.test(message.role) ? message.role : "other"}`, id: message.turn ? `turn-${message.turn}` : null },
      el("header", {}, el("b", {}, message.role), message.turn ? el("span", {}, `turn ${message.turn}`) : message.prompt ? el("span", {},
        "prompt") : null, call ? [el("span", {}, many(call.completion_tokens, "token")), el("span", {}, duration(call.seconds))] : null),
      message.reasoning ? fold(`Reasoning (${many(message.reasoning.length, "character")})`, () => pre(message.reasoning, { tabindex: "0" })) : null,
      message.role === "system" && message.text.length > LONG
        ? fold(`${message.text.slice(0, 90)} … (${many(message.text.length, "character")})`, () => pre(message.text, { tabindex: "0" }))
        : message.text ? pre(message.text, { class: message.text.length > 6000 ? "long" : null, tabindex: message.text.length > 6000 ? "0" : null }) : null,
      message.calls.map(toolCall));
  });
}

/** The calls of an agent program as a tree, what it has printed, and how it ended; null where none has played. */
function programPart(one) {
  const program = one.program;
  if (!program) return null;
  const lines = program.lines.map((line) => el("li", { class: `depth${Math.min(line.depth, 5)}` }, fold(
    [el("strong", {}, line.kind.replace("_", " ")), ` · call${line.calls.length === 1 ? "" : "s"} ${line.turns}`,
      line.from === null ? "" : ` · behind call ${line.from}`,
      el("span", { class: "quiet" }, ` · ${many(line.tokens, "token")}, ${line.trained === line.tokens ? "all" : line.trained ? count(line.trained) : "none"} trained`)],
    () => el("table", {}, el("tbody", {}, line.calls.map((call) => el("tr", {}, el("th", { scope: "row", class: "number" }, call.turn),
      el("td", { class: "mono" }, call.preview || NONE), el("td", { class: "number quiet" }, count(call.tokens)))))))));
  return el("section", { "aria-labelledby": "program" },
    heading(2, "Program", { id: "program" }),
    el("p", { class: "quiet" }, [many(program.requests, "request"),
      program.refused ? `, ${count(program.refused)} refused${program.refusal ? ` (${program.refusal})` : ""}` : "",
      program.exit_code === null ? " · ended by us" : ` · ended with status ${program.exit_code}`,
      program.sampling ? ` · asked for ${program.sampling}, and the spec's sampling was used` : ""]),
    lines.length ? el("ul", { class: "tree", "aria-label": "Its calls of the model" }, lines) : el("p", {}, "It has not called the model."),
    program.output.trim() ? fold(`Its output, at last (${many(program.output.length, "character")})`, () => pre(program.output, { tabindex: "0" })) : null);
}

/** The result of a tool; the JSON of a terminal as its output, with the exit code. */
function unwrapped(call) {
  const failure = call.error !== null && call.error !== undefined;
  try {
    const result = JSON.parse(call.result);
    if (result && typeof result.output === "string") return { text: result.output || "(nothing was printed)",
      failure: failure || Boolean(result.exit_code), exit: result.exit_code || 0 };
  } catch { /* it is no JSON */ }
  return { text: call.result, failure, exit: 0 };
}

function toolCall(call) {
  const { text, failure, exit } = unwrapped(call), lines = (text ?? "").trimEnd().split("\n");
  const outcome = [failure ? `✕ ${exit ? `exit ${exit}` : "failed"}` : null,
    lines.length > 1 ? `${count(lines.length)} lines` : lines[0].slice(0, 50), call.seconds ? duration(call.seconds) : null].filter(Boolean).join(" · ");
  return fold([el("code", { class: "bold" }, call.name), span("quiet mono cut", given(call.arguments)),
    span(`small ${failure ? "bad" : "quiet"}`, outcome)], () => [
    heading(3, "Arguments"), pre(pretty(call.arguments), { tabindex: "0" }),
    call.error ? [heading(3, "Error"), pre(call.error)] : [],
    heading(3, "Result"), call.result === null ? el("p", { class: "quiet" },
      "The model was told nothing.") : pre(exit || text !== call.result ? text : pretty(text), { tabindex: "0" }),
  ], { class: `fold call${failure ? " failed" : ""}` });
}

/** The arguments of a call in one line. */
function given(text) {
  try {
    const parsed = JSON.parse(text);
    if (parsed && typeof parsed === "object" && !Array.isArray(parsed)) return Object.entries(parsed)
      .map(([key, value]) => `${key}=${JSON.stringify(value)}`).join(", ").slice(0, 200);
  } catch { /* as it was written */ }
  return text.replace(/\s+/g, " ").slice(0, 200);
}

function pretty(text) {
  try {
    const parsed = JSON.parse(text);
    return typeof parsed === "object" && parsed !== null ? JSON.stringify(parsed, null, 2) : text;
  } catch {
    return text;
  }
}

function recordView(name, one) {
  const told = (value) => pre(typeof value === "string" ? value : JSON.stringify(value, null, 1));
  const { messages: _, tools: _tools, members: _members, row, artifacts, sequences: _sequences, tokens: _tokens, ...rest } = one;
  return el("div", { class: "grid" }, card("c6", "Row", row ? null : "The row of this group was not recorded.",
    row ? el("dl", { class: "fields" }, Object.entries(row).map(([key, value]) => [
    el("dt", {}, key, one.expected.includes(key) ? [" ", span("chip", "expected")] : null), el("dd", {}, told(value))])) : null),
  card("c6", "Record, without conversation and tokens", null,
    fold("As JSON", () => pre(JSON.stringify(rest, null, 1), { tabindex: "0" }), { class: "fold", open: true }),
    artifacts.length ? [heading(3, "Artifacts"), artifacts.map((artifact) => el("div", {},
      el("p", {}, el("strong", {}, artifact.name), artifact.problem ? ` · ${artifact.problem}` : ` · ${many(artifact.bytes, "byte")} in ${many(artifact.files_count ?? artifact.files.length, "file")}`),
      el("ul", {}, artifact.files.map((file) => {
        const href = source.artifact(name, one.id, file);
        return el("li", {}, href ? el("a", { href, download: true, class: "mono" }, file) : el("span", { class: "mono" }, file));
      }))))] : null));
}

// --------------------------------------------------------------------------------------------- Prompt and tokens

const CHUNK = 2000; // tokens that the server sends at once
const UNLIKELY = -1, SURPRISING = -2; // log-probabilities: 37 % and 13 %

function tokensView(name, one) {
  const trained = total(one.sequences.map((sequence) => sequence.trained)), all = total(one.sequences.map((sequence) => sequence.tokens));
  return [card("", "What is trained on", one.sequences.length ? `${count(trained)} of ${many(all, "token")} (${share(trained, all)}) were sampled and are trained on${one.sequences.length > 1 ? `, in ${count(one.sequences.length)} sequences` : ""}.` : "No tokens are recorded: the server rendered the messages itself, or the run only measures.",
    one.sequences.length ? el("p", { class: "legend" }, span("tokens", span("t", "trained")), "sampled by the policy",
      span("tokens", span("t l1", "unlikely")), "below 37 %", span("tokens", span("t l2", "surprising")), "below 13 %",
      "plain: prompt, tools, template") : null,
    one.sequences.map((sequence, at) => [one.sequences.length > 1 ? heading(3,
      `Sequence ${at + 1}: ${many(sequence.tokens, "token")}, ${count(sequence.trained)} trained`) : null,
      at < 3 ? tokenView(name, one, at) : fold("Show its tokens", () => tokenView(name, one, at))])),
  el("section", { class: "card" }, heading(2, "What the model saw first"), fold("The prompt exactly as the model got it", () => promptView(one)))];
}

function promptView(one) {
  if (one.prompt_text) return pre(one.prompt_text, { tabindex: "0" });
  const asked = one.messages.filter((message) => message.prompt).map(({ role, text }) => ({ role, text }));
  return [el("p", { class: "quiet" }, "As messages, and the schemas of the tools, which the server rendered by its chat template:"),
    pre(JSON.stringify({ messages: asked, tools: one.tools }, null, 2), { tabindex: "0" })];
}

function tokenView(name, one, sequence) {
  const readout = el("p", { role: "status", class: "mono" }, "Point at a token, or use the arrow keys, to see its log-probability.");
  const box = el("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens; the arrow keys go from one to the next" });
  const strip = el("div"), more = el("div", { class: "row" });
  let current = null, first = Infinity, last = 0;
  const told = (token) => {
    current?.classList.remove("current");
    current = token;
    current.classList.add("current");
    readout.textContent = token.dataset.told;
  };
  box.addEventListener("mouseover", (event) => { if (event.target !== box) told(event.target); });
  box.addEventListener("keydown", (event) => {
    const way = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    if (!way) return;
    event.preventDefault();
    const next = current ? current[way] : box.firstElementChild;
    if (next) { told(next); next.scrollIntoView({ block: "nearest" }); }
  });
  const load = async (begin, until = null) => {
    try {
      const found = await source.tokens(name, one.id, sequence, begin);
      const spans = found.tokens.map((token, at) => tokenSpan(token, found.start + at, found.versions));
      if (until === null) box.append(...spans);
      else box.prepend(...spans.slice(0, until - begin));
      if (!found.decoded) readout.textContent = `${found.why || "The run's tokenizer is not on this machine"}: ids are shown.`;
      first = Math.min(first, found.start);
      if (until === null) last = found.end;
      const whole = found.total;
      strip.replaceChildren(trainedStrip(box, first, whole));
      more.replaceChildren(...[first > 0 && source.live ? el("button", { type: "button", onclick: () => load(Math.max(first - CHUNK, 0), first) },
        "Show tokens before") : null,
        last < whole && source.live ? el("button", { type: "button", onclick: () => load(last) }, "Show tokens after") : null,
          span("quiet small", `tokens ${count(first + 1)} to ${count(last)} of ${count(whole)}`)].filter(Boolean));
    } catch (error) {
      more.replaceChildren(problem(error));
    }
  };
  load(one.sequences[sequence].start);
  return [strip, box, readout, more];
}

/** The tokens that are shown as a strip: trained ones are dark. */
function trainedStrip(box, first, whole) {
  const runs = [];
  [...box.children].forEach((token, at) => {
    const on = token.classList.contains("t");
    if (runs.at(-1)?.on === on) runs.at(-1).size += 1;
    else runs.push({ on, at: first + at, size: 1 });
  });
  const width = narrow() ? 352 : 1300, x = (at) => width * at / whole;
  return picture(width, 30, `${count(total(runs.filter((one) => one.on).map((one) => one.size)))} of the shown tokens are trained on`,
    svg("rect", { class: "untrained", x: 0, y: 2, width, height: 12 }),
    runs.filter((one) => one.on).map((one) => svg("rect", { class: "trained", x: x(one.at), y: 0, width: Math.max(2, x(one.size)), height: 16 })),
      written(0, 28, "token 0", { class: "quiet" }), written(width, 28, count(whole), { class: "quiet", "text-anchor": "end" }));
}

function tokenSpan([text, turn, logprob], at, versions) {
  if (turn < 0) return el("span", { class: "c", "data-told": `token ${count(at)}: context, not trained on` }, text);
  const level = logprob === null ? "" : logprob < SURPRISING ? " l2" : logprob < UNLIKELY ? " l1" : "";
  const [before, after] = versions[turn] ?? [null, null];
  const weights = before === null || before === undefined ? "" : `; weights ${before === after || after === null ? before : `${before} to ${after}`}`;
  return el("span", { class: `t${level}`,
    "data-told": `token ${count(at)}: trained on; log-probability ${logprob ?? "not told"}; model call ${turn + 1}${weights}` }, text);
}

// ------------------------------------------------------------------------------------------- A group side by side

const BESIDE = 8;

async function groupView(name, one, run, all) {
  const seats = one.seats.length > 1, query = Object.fromEntries(new URLSearchParams(location.hash.split("?")[1] ?? ""));
  const ordered = seats ? all : [...all].sort((a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity)), start = Math.max(Number(query.from) || 0, 0);
  const members = await Promise.all(ordered.slice(start, start + BESIDE)
    .map((each) => source.rollout(name, each.id).catch((error) => ({ ...each, problem: error }))));
  const turns = (each) => (each.messages ?? []).filter((message) => message.turn);
  const said = (message) => (message ? [message.text, ...message.calls.map((call) => `${call.name}(${given(call.arguments)})${call.error ? " ✕ failed" : ""}`)].filter(Boolean).join("\n") || "(nothing)" : null);
  const most = Math.max(0, ...members.map((each) => turns(each).length));
  const rows = [...Array(Math.min(most, 60)).keys()].map((at) => members.map((each) => said(turns(each)[at])));
  const parts = rows.findIndex((cells) => new Set(cells).size > 1), longest = Math.max(1e-9, ...members.map((each) => each.seconds ?? 0));
  const scores = all.map((each) => each.score).filter((value) => value !== null), equal = scores.length > 1 && new Set(scores).size === 1;
  const lines = rows.map((cells, at) => el("tr", { "data-same": new Set(cells).size === 1 ? "" : null },
    el("th", { scope: "row" }, `turn ${at + 1}`), cells.map((text, place) => (text === null ? el("td", { class: "absent" }, unseen("no such turn"))
    : place > 0 && text === cells[0] ? el("td", { class: "same" }, "= the same") : el("td", { class: place > 0 && !seats ? "differs" : null }, pre(text))))));
  const same = lines.filter((line) => line.hasAttribute("data-same"));
  const further = (from, text) => (from >= 0 && from < all.length ? link(text, [name, one.id, "group"], { ...query, from }) : null);
  const first = seats ? "The agents of one episode." : `Best first. ${parts < 0 ? "All turns are the same" : `The first difference is in turn ${parts + 1}`}${equal ? "; all scores are equal, so a trainer learns nothing from them" : ""}.`;
  return [el("p", { class: "row" }, el("b", {}, first), seats ? null : span("quiet", "Orange edge: differs from the first. Hatched: no such turn."),
    same.length ? el("label", { class: "small" }, el("input",
    { type: "checkbox", onchange: (event) => same.forEach((line) => { line.hidden = event.target.checked; }) }), " only turns that differ") : null),
    one.row ? fold([el("b", {}, "Row "), span("quiet", one.label || one.row_key)],
      () => el("dl", { class: "fields" }, Object.entries(one.row).map(([key, value]) => [el("dt", {}, key),
      el("dd", {}, pre(typeof value === "string" ? value : JSON.stringify(value, null, 1)))]))) : null,
    el("p", { class: "row" }, start ? further(Math.max(start - BESIDE, 0), "← better ones") : null, further(start + BESIDE, "further members →")),
    scrolled("Members side by side", el("table", { class: "members" },
      el("thead", {}, el("tr", {}, el("td", {}), members.map((each) => el("th", { scope: "col", class: each.id === one.id ? "here" : null },
      el("div", { class: "row" }, scoreTile(each, run), link(`${each.seat || `${each.epoch}-${each.index}`}`, [name, each.id], null,
      { "data-entry": failed(each) ? "failed" : "", "aria-label": each.id })),
      el("p", { class: "quiet small" }, each.stop_reason === "finished" ? "finished" : span("bad", "■ ", each.stop_reason),
        ` · ${many(each.turns, "turn")} · ${duration(each.seconds)}`), each.problem ? problem(each.problem) : null)))),
    el("tbody", {}, el("tr", {}, el("th", { scope: "row" }, "rewards"),
      members.map((each) => el("td", {}, Array.isArray(each.rewards) ? each.rewards.map((reward) => el("div", { class: "row" },
      span("small", reward.name), span("space"), rewardCell(reward.value, run.rewards.find((known) => known.name === reward.name) ?? reward, run))) : null))),
      el("tr", {}, el("th", { scope: "row" }, "time"), members.map((each) => el("td", {},
        each.timings ? sized(el("div", {}, stack(PHASES.map((phase) => each.timings[phase] ?? 0))), "width",
        (each.seconds ?? 0) / longest) : null))), lines)))];
}

// ------------------------------------------------------------------------------------------------------ Two runs

async function comparePage(turn, a, b, query) {
  place({ title: "Compare" });
  if (here !== location.hash) main.replaceChildren(el("p", { class: "quiet" }, "Comparing …"));
  let both;
  try {
    both = await source.compare(a, b);
  } catch (error) {
    place({ crumbs: [], title: "These two runs cannot be compared" });
    return [problem(error), el("p", {}, "A: ", link(a, [a], null, { class: "mono" }), el("br"), "B: ", link(b, [b], null, { class: "mono" })),
      el("p", {}, link("choose other runs", []))];
  }
  if (turn !== drawn) return [];
  const { found } = both, main_ = found.score, pair = [both.a, both.b].map((path, at) => ({ path, label: { name: both.names["ab"[at]] } }));
  nameAll(pair);
  const name = (side) => named(pair["ab".indexOf(side)]);
  const side = main_.low !== null && main_.low > 0 ? "good" : main_.high !== null && main_.high < 0 ? "bad" : "quiet",
    sign = { good: "▲", bad: "▼", quiet: "≈" }[side];
  place({ crumbs: [], title: "Compare", facts: [link(`A ○ ${name("a")}`, [a], null, { class: "chip", title: both.a }),
    link(`B ● ${name("b")}`, [b], null, { class: "chip bold", title: both.b }), link("Swap", ["compare", b, a], query, { class: "chip" })] });
  const kinds = { broken: "▼ broken", same: "= same", fixed: "▲ fixed" },
    counts = Object.fromEntries(Object.keys(kinds).map((kind) => [kind, both.rows.filter((row) => row.change === kind).length]));
  counts.same = both.graded - both.fixed - both.broken;
  [counts.fixed, counts.broken] = [both.fixed, both.broken];
  const goTo = (change_) => () => { location.hash = address(["compare", a, b], { change: query.change === change_ ? null : change_ }); };
  keysHere = { f: goTo("fixed"), b: goTo("broken"), s: goTo("same") };
  const rewards = found.measures.filter((one) => one.name.startsWith("reward/")).map((one) => ({ ...one, name: one.name.slice(7) }));
  const asRow = (one) => (one.difference === 0 && one.a === one.b && rewardIsEqual(one) ? { name: one.name, value: 0,
    note: `${number(one.a)} in both` } : { name: one.name, value: one.difference, low: one.low, high: one.high });
  const costs = found.measures.filter((one) => !one.name.startsWith("reward/") && (one.a || one.b) && one.a).map((one) => ({ name: one.name.replaceAll("_", " "), value: one.difference / one.a, low: one.low === null ? null : one.low / one.a, high: one.high === null ? null : one.high / one.a, note: one.difference === 0 && one.a === one.b ? `${number(one.a)} in both` : null }));
  const other = [...both.warnings, both.found.left_out ? `${many(both.found.left_out, "row")} left out, graded in one of them at most` : null].filter(Boolean);
  const chosen = both.rows.filter((row) => !query.change || row.change === query.change);
  const body = el("tbody", {}, chosen.flatMap((row) => comparedRow(row, a, b)));
  return [el("div", { class: "flush" }, el("div", { class: "verdict" },
    el("div", {}, el("p", { class: "quiet small" }, `B − A, mean score of ${many(main_.rows, "row")} graded in both`),
      el("p", { class: `big ${side}` }, `${sign} ${signed(main_.difference)}`)),
    intervalPicture(main_),
    el("div", {}, el("p", {}, el("b", {}, `${both.verdict[0].toUpperCase()}${both.verdict.slice(1)}`),
      main_.low === null ? "." : `: 95 % interval ${signed(main_.low)} to ${signed(main_.high)}.`,
      ` ${many(both.fixed, "row")} fixed, ${count(both.broken)} broken, ${count(counts.same)} the same; sign test p = ${number(found.p)}.`),
      main_.detectable === null ? null : el("p", { class: "quiet small" },
        `Four times in five, so many rows would show a true difference of ${number(main_.detectable)} or more.`),
      other.length ? el("p", { class: "quiet small" }, `Not the same in both: ${other.join("; ")}.`) : null,
      found.bounds ? el("p", { class: "quiet small" }, `Without a score: ${many(found.ungraded_a, "rollout")} in A, ${count(found.ungraded_b)} in B; graded, they could make the difference ${signed(found.bounds[0])} to ${signed(found.bounds[1])}.`) : null)),
  both.refusals.length ? el("div", { class: "tools-bar" }, el("p", { class: "note bad" },
    `Graded differently, so that the scores do not mean the same: ${both.refusals.join("; ")}`)) : null),
  el("div", { class: "grid" }, card("c6", "Which reward explains it", "Difference of the means; the line is 0. Full dots are beyond chance.",
    forest([asRow(found.score), { ...asRow(found.passes), name: "solved" }, ...rewards.map(asRow)], (value) => signed(value))),
    costs.length ? card("c6", "What it costs", "Difference in per cent of A; left of the line is less.",
      forest(costs, (value) => signed(100 * value, (part) => `${part.toFixed(0)} %`), true)) : null),
  el("div", { class: "flush" }, el("div", { class: "tools-bar" }, el("b", {}, "Rows"),
    Object.entries(kinds).filter(([kind]) => counts[kind]).map(([kind, text]) => link(`${text} ${count(counts[kind])}`, ["compare", a, b],
    { change: query.change === kind ? null : kind }, { class: `chip${query.change === kind ? " on" : ""}`,
    "aria-current": query.change === kind ? "true" : null })),
    span("space"), el("span", { class: "quiet small", role: "status" },
      `○ A ● B · a row passes with ${number(found.success)} or more · ${count(chosen.length)} of ${count(both.graded)}, the most broken first`)),
  scrolled("Rows of both runs", el("table", { class: "compared" },
    el("thead", {}, el("tr", {}, [["Row"], ["A passes", "wide"], ["Mean score of the row, 0 to 1"], ["B passes", "wide"], ["B − A", "number"],
    ["Change", "wide"]].map(([text, kind]) => el("th", { scope: "col", class: kind ?? null }, text)))), body)))];
}

function rewardIsEqual(one) { return one.low === null || (one.low === 0 && one.high === 0) || one.difference === 0; }

function intervalPicture(one) {
  const width = 420, reach = Math.max(0.1, Math.abs(one.difference), Math.abs(one.low ?? 0), Math.abs(one.high ?? 0)) * 1.15,
    x = (value) => width / 2 + value / reach * (width / 2 - 14);
  const kind = one.low > 0 ? "better" : one.high < 0 ? "worse" : "even", ticks = [-1, -0.5, 0, 0.5, 1].map((part) => part * reach / 1.15);
  return picture(width, 46, `Difference ${signed(one.difference)}${one.low === null ? "" : `, 95 % interval ${signed(one.low)} to ${signed(one.high)}`}`, rule("line", 0, 18, width, 18), rule("axis", x(0), 2, x(0), 34),
    ticks.map((value) => written(x(value), 45, value ? signed(value, (part) => score(part, 2)) : "0", { class: "quiet", "text-anchor": "middle" })),
    one.low === null ? null : [rule(`whisker ${kind}`, x(one.low), 18, x(one.high), 18), rule(`whisker ${kind}`, x(one.low), 9, x(one.low), 27),
      rule(`whisker ${kind}`, x(one.high), 9, x(one.high), 27)], svg("circle", { class: kind, cx: x(one.difference), cy: 18, r: 7 }));
}

function comparedRow(row, a, b) {
  const width = narrow() ? 110 : 440, x = (value) => 8 + (width - 16) * Math.max(0, Math.min(1, value)), [before, after] = row.means,
    kind = { fixed: "better", broken: "worse", same: "same" }[row.change];
  const passes = (passed) => (row.of <= 8 ? el("span", { class: "dots", role: "img", "aria-label": `${passed} of ${row.of}` }, "●".repeat(passed),
    "○".repeat(row.of - passed)) : `${passed} of ${row.of}`);
  const sides = el("tr", { hidden: true }, el("td", { colspan: 6 }));
  const button = el("button", { type: "button", "aria-expanded": "false", "data-entry": "", onclick: () => {
    sides.hidden = !sides.hidden;
    button.setAttribute("aria-expanded", !sides.hidden);
    if (!sides.hidden && !sides.firstChild.hasChildNodes()) sides.firstChild.append(el("div", { class: "sides" },
      [["A", a, 0], ["B", b, 1]].map(([which, run, place]) => el("div", { class: "card flat" }, heading(3, which),
      el("p", { class: "row" }, row.rollouts[place].map(([id, value]) => span("nowrap", tile(value), " ",
      link(id.slice(id.lastIndexOf(":") + 1), [run, id], null, { title: id }))))))));
  } }, shortened(row.label, 60));
  return [el("tr", {}, el("th", { scope: "row" }, button), el("td", { class: "wide" }, passes(row.passed[0])),
    el("td", {}, withWidth(picture(width, 18, `A ${score(before, 2)}, B ${score(after, 2)}`, rule("line", 8, 9, width - 8, 9),
      rule(`whisker ${kind}`, x(before), 9, x(after), 9), svg("circle", { class: `open ${kind}`, cx: x(before), cy: 9, r: 5, "fill-opacity": 0 }),
      svg("circle", { class: kind, cx: x(after), cy: 9, r: 6 })), width)),
    el("td", { class: "wide" }, passes(row.passed[1])), el("td", { class: "number" },
      span("narrow", { fixed: "▲ ", broken: "▼ ", same: "= " }[row.change]), signed(after - before, (value) => score(value, 2))),
    el("td", { class: `nowrap wide ${{ fixed: "good", broken: "bad", same: "quiet" }[row.change]}` },
      { fixed: "▲ fixed", broken: "▼ broken", same: "= same" }[row.change])), sides];
}

// ----------------------------------------------------------------------------------------------------------- Begin

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
if (source.live && new URLSearchParams(location.search).has("token")) {
  // The token is a cookie now; an address that is copied or sent does not give it away.
  history.replaceState(null, "", location.pathname + location.hash);
}
history.scrollRestoration = "manual"; // the browser would scroll before the page is there
window.addEventListener("scroll", () => { if (here === location.hash) kept(here).scroll = window.scrollY; }, { passive: true });
window.addEventListener("hashchange", draw);
draw();
