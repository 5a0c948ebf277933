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
    const said = await answer.json().catch(() => ({}));
    if (!answer.ok) throw new Error(typeof said.detail === "string" ? said.detail : `The server answered ${answer.status}.`);
    return Object.assign(said, { version: answer.headers.get("etag") });
  }

  runs() { return this.ask("runs"); }
  compare(a, b) { return this.ask("compare", { a, b }); }
  overview(run, version = null) { return this.ask(`runs/${encodeURIComponent(run)}`, {}, version); }
  rollouts(run, query) { return this.ask(`runs/${encodeURIComponent(run)}/rollouts`, query); }
  rollout(run, id) { return this.ask(`runs/${encodeURIComponent(run)}/rollouts/${encodeURIComponent(id)}`); }
  beside(run, id, query) { return this.ask(`runs/${encodeURIComponent(run)}/beside/${encodeURIComponent(id)}`, query); }
  tokens(run, id, sequence, begin) {
    return this.ask(`runs/${encodeURIComponent(run)}/tokens/${encodeURIComponent(id)}`, { sequence, begin });
  }
  artifact(run, id, file) {
    return `api/runs/${encodeURIComponent(run)}/artifacts/${encodeURIComponent(id)}?${new URLSearchParams({ file })}`;
  }
}

class Report {
  live = false;

  constructor(data) { this.data = data; }

  async runs() { return { runs: [this.data.overview] }; }
  async overview() { return this.data.overview; }
  async rollout(run, id) {
    const found = this.data.details[id];
    if (!found) throw new Error(`Rollout ${id} is not among the sampled ones of this file; hermes-rl view has all of them.`);
    return found;
  }
  async tokens(run, id, sequence, begin) {
    const found = (this.data.details[id].tokens ?? []).find((one) => one.sequence === Number(sequence) && one.start === Number(begin));
    if (!found) throw new Error("These tokens are not in this file; hermes-rl view has all of them.");
    return found;
  }
  artifact() { return null; }

  async beside(run, id, { backwards, failed: onlyFailed, cursor, ...query }) {
    const { rollouts } = await this.rollouts(run, query);
    const at = rollouts.findIndex((one) => one.id === id);
    const rest = backwards ? rollouts.slice(0, Math.max(at, 0)).reverse() : rollouts.slice(at + 1);
    return { id: rest.find((one) => !onlyFailed || !passed(one, this.data.overview))?.id ?? null, cursor: null };
  }

  async rollouts(run, query) {
    const fits = (one) => {
      const details = this.data.details[one.id];
      const value = query.reward ? one.rewards[query.reward] ?? null : one.score;
      const used = details.messages.flatMap((message) => message.calls).filter((call) => !query.tool || call.name === query.tool);
      return ["state", "stop_reason", "group"].every((name) => !query[name] || one[name] === query[name])
        && (!query.row || one.row_key === query.row)
        && (!query.tool || used.length > 0)
        && (!query.tool_errors || (query.tool ? used.some((call) => call.error) : one.call_errors > 0))
        && (!query.reward || value !== null)
        && (!query.least || (value !== null && value >= Number(query.least)))
        && (!query.most || (value !== null && value <= Number(query.most)))
        && (!query.text || JSON.stringify([details.messages, details.row, details.rewards, details.error]).toLowerCase()
          .includes(JSON.stringify(query.text).slice(1, -1).toLowerCase()));
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
    return { rollouts: found, fit: found.length, looked: found.length, total: this.data.rollouts.length, cursor: null, sampled: true };
  }
}

const embedded = document.getElementById("data");
const source = embedded ? new Report(JSON.parse(embedded.textContent)) : new Server();

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
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** A link within this page; parts are run, rollout or other words of its address. */
function link(text, parts, query = null, attributes = {}) {
  return el("a", { href: address(parts, query), ...attributes }, text);
}

function address(parts, query = null) {
  const given = Object.entries(query ?? {}).filter(([, value]) => value !== "" && value !== null && value !== false);
  const asked = new URLSearchParams(given.map(([key, value]) => [key, value === true ? "1" : value]));
  return `#${parts.map(encodeURIComponent).join("/")}${given.length ? `?${asked}` : ""}`;
}

const pre = (text, attributes = {}) => el("pre", attributes, text);
const heading = (level, text, attributes = {}) => el(`h${level}`, attributes, text);

function fold(summary, content, attributes = {}) {
  // What is folded is drawn when it is opened: a long conversation costs no more than what is seen of it.
  const inner = el("div");
  const details = el("details", attributes, el("summary", {}, summary), inner);
  const draw = () => { if (details.open && !inner.hasChildNodes()) inner.append(...[content()].flat(Infinity)); };
  details.addEventListener("toggle", draw);
  draw();
  return details;
}

function scrolled(label, ...children) {
  return el("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0" }, children);
}

// --------------------------------------------------------------------------------------------------------- Numbers

const NONE = "–";
const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

function count(value) { return value === null || value === undefined ? NONE : grouped.format(value); }

/** A number with its noun, which takes an "s" in the plural. */
function many(value, noun) { return `${count(value)} ${noun}${value === 1 ? "" : "s"}`; }

function number(value) {
  if (typeof value !== "number") return value === null || value === undefined ? NONE : String(value);
  if (Number.isInteger(value)) return count(value);
  if (Math.abs(value) >= 1000) return count(value);
  return Math.abs(value) >= 0.001 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
}

/** Scores and means of scores have three decimals, so that a column of them can be compared. */
function score(value) { return typeof value === "number" ? value.toFixed(3) : NONE; }
function share(part, whole) { return whole ? `${(100 * part / whole).toFixed(part && part < whole / 100 ? 1 : 0)} %` : NONE; }

function money(value) { return typeof value === "number" ? `${number(value)} $` : NONE; }

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

function interval(run) {
  return run.low === null ? "" : ` ${run.low.toFixed(3)} to ${run.high.toFixed(3)}`;
}

// ---------------------------------------------------------------------------------------------------------- Charts

const FEW = 5; // different values that are told in a table, since so few bars say less

function histogram(title, found, told = number, more = null) {
  if (!found || !found.count) return el("section", { class: "card" }, heading(3, title), el("p", {}, "No values."));
  const summary = `${many(found.count, "value")} · mean ${told(found.mean)} · median ${told(found.median)}${more ? ` · ${more}` : ""}`;
  if (found.bars.length <= FEW && found.bars.every((bar) => bar.from === bar.to)) {
    const rows = found.bars.map((bar) => el("tr", {}, el("th", { scope: "row" }, told(bar.from)), el("td", { class: "number" }, count(bar.count)),
      el("td", { class: "number" }, share(bar.count, found.count)), barCell(bar.count, found.count)));
    const card = small(title, ["Value", "Count", "Share", null], rows, "");
    card.append(el("p", {}, summary));
    return card;
  }
  const highest = Math.max(...found.bars.map((bar) => bar.count));
  const width = 100 / found.bars.length;
  const range = (bar) => bar.from === bar.to ? told(bar.from) : `${told(bar.from)} to ${told(bar.to)}`;
  const bars = found.bars.map((bar, place) => {
    const height = bar.count ? Math.max(66 * bar.count / highest, 1.5) : 0;
    return svg("rect", { class: "bar", x: place * width + width * 0.06, y: 70 - height, width: width * 0.88, height },
      svg("title", {}, `${range(bar)}: ${count(bar.count)}`));
  });
  const spoken = found.bars.filter((bar) => bar.count).map((bar) => `${range(bar)}: ${count(bar.count)}`).join("; ");
  return el("section", { class: "card" },
    heading(3, title),
    svg("svg", { viewBox: "0 0 100 72", preserveAspectRatio: "none", role: "img", "aria-label": `${title}. ${spoken}` },
      bars, svg("line", { class: "axis", x1: 0, y1: 70.5, x2: 100, y2: 70.5 })),
    el("div", { class: "ends", "aria-hidden": "true" }, el("span", {}, told(found.least)), el("span", {}, told(found.most))),
    el("p", {}, summary));
}

/** How something changes over the run, in the order in which rollouts ended. */
function curve(title, values, told, low, high, note) {
  if (values.length < 2) return null;
  const points = values.map((value, place) => `${100 * place / (values.length - 1)},${70 - 66 * (value - low) / (high - low || 1)}`);
  return el("section", { class: "card" },
    heading(3, title),
    svg("svg", { viewBox: "0 0 100 72", preserveAspectRatio: "none", role: "img",
      "aria-label": `${title}, ${many(values.length, "part")} of the run in the order in which rollouts ended: ${values.map(told).join(", ")}` },
    svg("line", { class: "axis", x1: 0, y1: 70.5, x2: 100, y2: 70.5 }), svg("polyline", { class: "curve", points: points.join(" ") })),
    el("div", { class: "ends", "aria-hidden": "true" }, el("span", {}, "first"), el("span", {}, "last")),
    el("p", {}, `${note} · axis from ${told(low)} to ${told(high)}`));
}

function course(parts) {
  const values = parts.map((part) => part.mean);
  const note = parts.length ? `each point is ${many(parts[0].count, "rollout")}` : "";
  return curve("Mean score over the run", values, number, Math.min(0, ...values), Math.max(1, ...values), note);
}

function spending(parts) {
  const values = parts.map((part) => part.cost);
  return curve("Cost over the run", values, money, 0, Math.max(0, ...values), "of all rollouts that had ended");
}

function barCell(part, whole, bad = false) {
  const bar = el("i", { class: bad ? "bad" : null });
  bar.style.setProperty("--share", `${whole ? 100 * part / whole : 0}%`);
  return el("td", { class: "share", "aria-hidden": "true" }, bar);
}

/** A table of few columns in a card; the first of each row heads it. */
function small(title, columns, rows, empty) {
  if (!rows.length) return el("section", { class: "card" }, heading(3, title), el("p", {}, empty));
  return el("section", { class: "card" }, heading(3, title), el("div", { class: "scroll" }, el("table", { "aria-label": title },
    el("thead", {}, el("tr", {}, columns.map((name, place) => name === null
      ? el("td", { "aria-hidden": "true" }) : el("th", { scope: "col", class: place ? "number" : null }, name)))),
    el("tbody", {}, rows))));
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
let turnPage = null; // how the list that is shown goes on to its next page; false where it has none
const left = new Map(); // by address, how a page was when it was left: how far scrolled, where its focus was, which page of its list

function kept(hash) {
  if (!left.has(hash)) left.set(hash, {});
  return left.get(hash);
}

function place(crumbs, title) {
  const all = source.live ? [["Runs", []], ...crumbs] : crumbs;
  document.getElementById("crumbs").replaceChildren(...all.map(([text, parts, query], at) => el("li", {},
    at === all.length - 1 ? el("span", { "aria-current": "page" }, text)
      : link(text, parts, query, { "data-up": true, onclick: () => { climbing = true; } }))));
  document.title = title ? `${title} · hermes-rl` : "hermes-rl";
}

function failed(error) {
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
  live.textContent = "";
  const [path, asked] = hash.slice(1).split("?");
  try {
    let parts = path.split("/").map(decodeURIComponent).filter((part) => part !== "");
    if (!parts.length && !source.live) parts = [source.data.overview.run];
    const query = Object.fromEntries(new URLSearchParams(asked ?? ""));
    const page = parts.length === 0 ? await runsPage(turn)
      : parts[0] === "compare" && parts.length === 3 ? await comparePage(turn, parts[1], parts[2])
      : parts.length === 1 ? await runPage(turn, parts[0], query)
      : parts[1] === "group" && parts.length > 2 ? await groupPage(turn, parts[0], parts[2], query)
      : parts.length === 2 ? await rolloutPage(turn, parts[0], parts[1], query)
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
    place(path ? [["not shown", []]] : [], "not shown");
    main.replaceChildren(heading(1, "This page cannot be shown"), failed(error),
      el("p", {}, source.live ? link("All runs", []) : link("The run", [source.data.overview.run])));
  }
}

function nowhere() { throw new Error("There is nothing at this address."); }

// ----------------------------------------------------------------------------------------------------- Keyboard

const KEYS = [["j", "next entry of a list; next rollout"], ["k", "the one before"], ["n", "next one that failed"], ["Enter", "open"],
  ["c", "compare: press it at one run, then at another"], ["u, Escape", "back to the list, where it was left"], ["/", "search for a text"], ["?", "these keys"]];

/** Whether a rollout has passed, as `hermes-rl show` counts it; one without a score has not. */
// One that was left out, or a seat that nobody pays, has no score, and has not failed.
function passed(one, run) { return one.score === null ? ["scored", "excluded"].includes(one.state) : one.score >= run.success; }

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
  else if (location.hash.includes("?")) location.hash = location.hash.split("?")[0];
}

let toCompare = null; // the run that was chosen first

function compare() {
  const run = document.activeElement?.dataset.run;
  if (!run || run === toCompare) live.textContent = "Choose a run with j and k, then press c; then do so with another one.";
  else if (toCompare === null) live.textContent = "Choose the run that it is compared with, and press c again.";
  else location.hash = address(["compare", toCompare, run]);
  toCompare = run && toCompare === null ? run : null;
}

function search() {
  const field = document.getElementById("by-text");
  if (field) {
    field.focus();
    field.select();
  } else if (go || main.querySelector(".group")) {
    seeking = true;
    up();
  }
}

const help = el("dialog", { "aria-label": "Keys" }, el("h2", {}, "Keys"),
  el("dl", { class: "row" }, KEYS.map(([key, what]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)])),
  el("form", { method: "dialog" }, el("button", { type: "submit" }, "Close")));
document.body.append(help);
const ACTS = { j: () => step(false, false), k: () => step(true, false), n: () => step(false, true), c: compare, u: up, Escape: up, "/": search,
  "?": () => help.showModal(), Enter: () => document.activeElement?.click() };
let acting = Promise.resolve(); // keys that are pressed fast wait for the page that the one before them opens
document.getElementById("keys").addEventListener("click", () => help.showModal());
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || help.open) return;
  const field = event.target.closest("input:not([type=checkbox]), select");
  if (field) {
    if (event.key === "Escape") main.focus({ preventScroll: true });
    return;
  }
  if (!Object.hasOwn(ACTS, event.key)) return;
  // A link is opened in its turn, so that n and Enter pressed fast open what n leads to.
  if (event.key === "Enter" && (event.shiftKey || event.target.closest("button, summary, input"))) return;
  event.preventDefault();
  acting = acting.then(async () => {
    while (here !== location.hash) await new Promise((wake) => setTimeout(wake, 10));
    await ACTS[event.key]();
  }).catch((error) => { live.textContent = error.message; });
});

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

// ------------------------------------------------------------------------------------------------------------ Runs

async function runsPage(turn) {
  place([], "");
  const body = el("div"), choice = el("div");
  let known = [];
  const show = async () => {
    const found = await source.runs();
    if (turn !== drawn) return;
    const key = document.activeElement?.getAttribute("href");
    const same = known.length === found.runs.length && known.every((name, at) => name === found.runs[at].run);
    known = found.runs.map((run) => run.run);
    if (!same) choice.replaceChildren(found.runs.length > 1 ? compareForm(found.runs) : "");
    body.replaceChildren(runsTable(found.runs), found.more ? el("p", { class: "quiet" }, `Not listed: ${many(found.more, "older run")}.`) : "");
    if (key && document.activeElement === document.body) {
      [...body.querySelectorAll("a")].find((one) => one.getAttribute("href") === key)?.focus();
    }
    later(turn, found.reading ? 0.2 : 3, show);
  };
  await show();
  return [heading(1, "Runs"), body, choice];
}

function runsTable(runs) {
  if (!runs.length) return el("p", {}, "There is no run yet.");
  const SEEN = ["Run", "Mean score, 95 % interval", "Failures"]; // also where the window is narrow
  const columns = ["Run", "Mode", "Model", "Groups", "Rollouts", "Mean score, 95 % interval", "Failures", "Cost", "Started", "Time"];
  return scrolled("Runs", el("table", { class: "wide" },
    el("thead", {}, el("tr", {}, columns.map((name, at) =>
      el("th", { scope: "col", class: [at > 2 ? "number" : "", SEEN.includes(name) ? "" : "minor"].join(" ") }, name)))),
    el("tbody", {}, runs.map((run) => el("tr", {},
      el("th", { scope: "row" }, link(run.spec ?? run.run, [run.run], null, { "data-entry": run.failed || run.error ? "failed" : "", "data-run": run.run }), " ", run.running ? el("span", { class: "pill good" }, "running") : null,
        run.question ? el("div", { class: "preview" }, run.question) : null,
        el("div", { class: "quiet narrow" }, [run.mode, run.model, run.error ? null : many(run.rollouts, "rollout")].filter(Boolean).join(" · ")),
        el("div", { class: "quiet mono" }, run.path)),
      el("td", { class: "minor" }, run.mode ?? NONE),
      el("td", { class: "minor" }, run.model ?? NONE),
      run.error ? el("td", { colspan: 7 }, run.error) : [
        el("td", { class: "number minor" }, count(run.groups)),
        el("td", { class: "number minor" }, count(run.rollouts), run.read < 1 ? el("div", { class: "quiet" }, `${share(run.read, 1)} read`) : null),
        el("td", { class: "number" }, score(run.mean), el("span", { class: "quiet" }, interval(run))),
        el("td", { class: "number" }, failures(run)),
        el("td", { class: "number minor" }, money(run.cost)),
        el("td", { class: "number minor" }, moment(run.started)),
        el("td", { class: "number minor" }, duration(run.seconds)),
      ])))));
}

/** Rollouts without a score in the end, and attempts that failed and were played again. */
function failures(run) {
  const again = run.failed_attempts - run.failed;
  return [run.failed ? el("span", { class: "bad" }, count(run.failed)) : "0",
    again > 0 ? el("small", { class: "quiet" }, ` · ${many(again, "attempt")} played again`) : null];
}

// ------------------------------------------------------------------------------------------------------ Two runs

function compareForm(runs) {
  // The name of its folder tells a run, but for runs that lie in folders of the same name.
  const short = (run) => `${run.spec ?? ""} · ${run.path.split("/").at(-1)}`;
  const named = (run) => runs.filter((other) => short(other) === short(run)).length > 1 ? `${run.spec ?? ""} · ${run.path}` : short(run);
  const choice = (label, key, chosen) => el("label", { for: `compare-${key}` }, label, el("select", { id: `compare-${key}`, name: key },
    runs.map((run, at) => el("option", { value: run.run, selected: at === chosen }, named(run)))));
  const form = el("form", { "aria-label": "Compare two runs",
    onsubmit: (event) => {
      event.preventDefault();
      const asked = new FormData(form);
      location.hash = address(["compare", asked.get("a"), asked.get("b")]);
    } },
  choice("Compare run A", "a", 1), choice("with run B", "b", 0), el("button", { type: "submit" }, "Compare"));
  return form;
}

const signed = (told) => (value) => value === null ? NONE : `${value > 0 ? "+" : ""}${told(value)}`;

async function comparePage(turn, a, b) {
  place([["compare", ["compare", a, b]]], "compare");
  let both;
  try {
    both = await source.compare(a, b);
  } catch (error) {
    return [heading(1, "These two runs cannot be compared"), failed(error),
      el("p", {}, "A: ", link(a, [a], null, { class: "mono" }), el("br"), "B: ", link(b, [b], null, { class: "mono" })),
      el("nav", { class: "buttons", "aria-label": "Back" }, link("choose other runs", []))];
  }
  if (turn !== drawn) return [];
  const { found } = both;
  const told = (value) => Math.abs(value) >= 100 || (value && Math.abs(value) < 0.001) ? number(value) : score(value);
  const change = signed(told);
  const beyond = (one) => one.low !== null && (one.low > 0 || one.high < 0);
  const measure = (one) => el("tr", {}, el("th", { scope: "row" }, one.name),
    el("td", { class: "number" }, told(one.a)), el("td", { class: "number" }, told(one.b)), el("td", { class: "number" }, change(one.difference)),
    el("td", { class: "number" }, one.low === null ? NONE : `${change(one.low)} to ${change(one.high)}`),
    el("td", {}, beyond(one) ? "beyond chance" : one.low === null ? "not known" : "within chance"));
  const rows = (kind) => found[kind].map((row) => el("tr", {},
    el("th", { scope: "row" }, row.label || row.row_key, row.label === row.row_key ? null : el("div", { class: "quiet mono" }, row.row_key)),
    el("td", {}, el("span", { class: kind === "broken" ? "pill bad" : "pill good" }, kind)),
    el("td", { class: "number" }, link(`${row.a} of ${row.of}`, [a, row.shown_a])), el("td", { class: "number" }, link(`${row.b} of ${row.of}`, [b, row.shown_b], null, { "data-entry": kind === "broken" ? "failed" : "" }))));
  const changed = [...rows("broken"), ...rows("fixed")];
  const table = (label, columns, body, numbered) => scrolled(label, el("table", { class: "wide" },
    el("thead", {}, el("tr", {}, columns.map((text, at) => el("th", { scope: "col", class: numbered.includes(at) ? "number" : null }, text)))), el("tbody", {}, body)));
  return [
    heading(1, "Two runs compared"),
    el("p", {}, "A: ", link(both.a, [a], null, { class: "mono" }), ` · ${both.model_a}`, el("br"), "B: ", link(both.b, [b], null, { class: "mono" }), ` · ${both.model_b}`),
    el("nav", { class: "buttons", "aria-label": "Direction" }, link("exchange A and B", ["compare", b, a])),
    both.refusals.map((text) => el("p", { class: "note bad" }, `Graded differently, so that the scores do not mean the same: ${text}`)),
    both.warnings.map((text) => el("p", { class: "note" }, text)),
    el("p", {}, el("strong", {}, both.verdict), `; ${many(found.score.rows, "row")} graded in both.`,
      found.score.detectable === null ? "" : ` Four times in five, so many rows would show a true difference of ${number(found.score.detectable)} or more.`),
    found.bounds ? el("p", { class: "note" }, `Without a score: ${many(found.ungraded_a, "rollout")} in A, ${count(found.ungraded_b)} in B; graded, they could make the difference ${change(found.bounds[0])} to ${change(found.bounds[1])}.`) : null,
    table("Differences", ["Mean of", "A", "B", "B − A", "95 % interval", "Chance"],
      [found.score, found.passes, ...found.measures.filter((one) => one.a || one.b)].map(measure), [1, 2, 3, 4]),
    heading(2, "Rows that changed"),
    el("p", { class: "quiet" }, `${many(both.fixed, "row")} fixed, ${count(both.broken)} broken (a pass scores ${number(found.success)} or more); sign test p = ${number(found.p)}. The numbers lead to a rollout that shows it.`),
    changed.length ? table("Rows that changed", ["Row", "Change", "Passed in A", "Passed in B"], changed, [2, 3]) : el("p", {}, "Every row passes as often in both."),
  ];
}

// ------------------------------------------------------------------------------------------------------- One run

async function runPage(turn, name, query) {
  let run = await source.overview(name);
  if (turn !== drawn) return [];
  place([[run.spec ?? name, [name]]], run.spec ?? name);
  const head = el("div"), figures = el("div", { class: "cards" }), rows = el("div");
  const show = () => {
    head.replaceChildren(...runHead(run));
    // What is folded open, and where the focus is, stays as it is while numbers change.
    const focused = document.activeElement?.getAttribute("href");
    figures.replaceChildren(...runFigures(run, name));
    rows.replaceChildren(...runRows(run, name));
    if (focused && document.activeElement === document.body) {
      [...main.querySelectorAll("a")].find((one) => one.getAttribute("href") === focused)?.focus();
    }
    live.textContent = run.running ? "running; the numbers are kept up to date" : "";
  };
  show();
  const table = await rolloutsSection(turn, name, query, run);
  const look = async () => {
    const found = await source.overview(name, run.version);
    if (turn !== drawn) return;
    if (found !== null) {
      const anew = found.generation !== run.generation;
      run = found;
      show();
      table.grown(run, anew);
    }
    later(turn, run.read < 1 ? 0.2 : run.running ? 2 : 5, look);
  };
  later(turn, run.read < 1 ? 0.2 : 2, look);
  const jump = (text, node) => el("button", { type: "button", onclick: () => node.scrollIntoView() }, text);
  const numbers = heading(2, "Numbers");
  return [head, el("nav", { class: "buttons", "aria-label": "Parts of this page" }, jump("Numbers", numbers), jump("Rows", rows)),
    ...table.nodes, numbers, figures, rows, ...runAbout(run)];
}

function runHead(run) {
  const facts = [
    ["Mean score", score(run.mean)],
    ["Rollouts", [count(run.rollouts), el("small", {}, run.read < 1 ? ` ${source.live ? "read so far" : "are told of"} (${share(run.read, 1)})` : "")]],
    ["Groups", count(run.groups)],
    ["Rows", count(run.rows)],
    ["Failures", failures(run)],
    ["Tokens", count(run.tokens)],
    run.cost === null ? null : ["Cost", money(run.cost)],
    ["Time", duration(run.seconds)],
  ].filter(Boolean);
  return [
    heading(1, [run.spec ?? run.run, " ", run.running ? el("span", { class: "pill good" }, "running") : null]),
    el("p", { class: "quiet" }, [run.mode, run.model, run.fingerprint, `started ${moment(run.started)}`].filter(Boolean).join(" · "),
      el("br"), el("span", { class: "mono" }, run.path)),
    el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    run.low === null ? null : el("p", { class: "quiet" },
      `95 % interval of the mean, rows taken as independent: ${score(run.low)} to ${score(run.high)}`),
    run.excluded ? el("p", { class: "note" }, run.excluded) : run.torn ? el("p", { class: "note" }, `Of rollouts.jsonl ${many(run.torn, "line")} cannot be read and ${run.torn === 1 ? "is" : "are"} left out.`) : null,
    run.sampled ? el("p", { class: "note" }, run.sampled) : null,
  ].filter(Boolean);
}

function runFigures(run, name) {
  const ended = run.stop_reasons.map((one) => el("tr", {}, el("th", { scope: "row" }, link(one.name, [name], { stop_reason: one.name }, { title: one.what })),
    el("td", { class: "number" }, count(one.count)), el("td", { class: "number" }, share(one.count, run.rollouts)), barCell(one.count, run.rollouts, !one.caused_by_policy)));
  const causes = run.failures.map((one) => el("tr", {}, el("th", { scope: "row" }, link(one.name, [name, one.rollout]), el("p", {}, one.last.slice(0, 240))),
    el("td", { class: "number" }, count(one.count))));
  const most = Math.max(1, ...run.tools.map((one) => one.calls));
  const tools = run.tools.map((one) => el("tr", {}, el("th", { scope: "row" }, link(one.name, [name], { tool: one.name })),
    el("td", { class: "number" }, count(one.calls)),
    el("td", { class: "number" }, one.errors ? link(`${count(one.errors)} (${share(one.errors, Math.max(one.calls, one.errors))})`, [name], { tool: one.name, tool_errors: true }) : "0"), barCell(one.calls, most)));
  const longest = Math.max(0, ...run.phases.map((one) => one.seconds));
  const phases = run.phases.map((one) => el("tr", {}, el("th", { scope: "row" }, one.name), el("td", { class: "number" }, duration(one.mean)),
    el("td", { class: "number" }, duration(one.seconds)), barCell(one.seconds, longest)));
  const spread = run.spread;
  return [
    histogram("Scores", run.scores),
    course(run.course) ?? "",
    histogram("Spread of scores within groups", spread, number, spread ? `${count(spread.uniform)} of ${many(spread.groups, "group")} ${spread.uniform === 1 ? "is" : "are"} uniform` : null),
    run.rewards.map((one) => histogram(`Reward ${one.name}`, one)),
    small("How rollouts ended", ["Ending", "Rollouts", "Share", null], ended, "No rollout has ended."),
    small("Failed attempts by cause", ["Cause, and the last one", "Attempts"], causes, "No attempt failed."),
    small("Tools", ["Tool", "Calls", "Failed", null], tools, "No tool was called."),
    small("Time by phase", ["Phase", "Per rollout", "In total", null], phases, "No times are recorded."),
    histogram("Turns", run.turns),
    histogram("Prompt tokens", run.prompt_tokens),
    histogram("Completion tokens", run.completion_tokens),
    run.costs ? [spending(run.spending) ?? "", histogram("Cost of a rollout", run.costs, money)] : [],
    histogram("Time of a rollout", run.seconds_spread, duration),
  ].flat();
}

function runRows(run, name) {
  const rows = run.by_row.rows.map((one) => el("tr", {}, el("th", { scope: "row" }, link(one.label || one.row_key, [name], { row: one.row_key }),
      one.expected ? el("div", { class: "preview" }, `expected: ${one.expected}`) : null,
      one.label === one.row_key ? null : el("div", { class: "quiet mono" }, one.row_key)),
    el("td", { class: "number" }, `${count(one.scored)} of ${count(one.rollouts)}`), el("td", { class: "number" }, score(one.mean)),
    el("td", { class: "number" }, one.least === null ? NONE : `${number(one.least)} to ${number(one.most)}`)));
  return [
    heading(2, "Rows"),
    el("p", { class: "quiet" }, `${many(run.by_row.count, "row")}${run.by_row.count > run.by_row.rows.length ? `; the ${count(run.by_row.rows.length)} with the lowest means are listed` : ""}, the lowest mean first.`),
    scrolled("Rows", el("table", { class: "wide" },
      el("thead", {}, el("tr", {}, ["Row", "Scored", "Mean", "Scores from, to"].map((text, at) => el("th", { scope: "col", class: at ? "number" : null }, text)))),
      el("tbody", {}, rows))),
  ];
}

function runAbout(run) {
  return [
    heading(2, "About this run"),
    fold("The spec as it ran", () => pre(run.spec_text)),
    fold("What run.json says", () => pre(JSON.stringify(run.said, null, 2))),
  ];
}

// --------------------------------------------------------------------------------------------- Rollouts of a run

const COLUMNS = [["", "Question and answer", "id"], ["score", "Score", "number"], ["", "Ending", "minor"], ["turns", "Turns", "number minor"],
  ["tokens", "Tokens", "number minor"], ["calls", "Calls", "number minor"], ["tool_errors", "Failed calls", "number minor"],
  ["seconds", "Time", "number minor"]];

async function rolloutsSection(turn, name, query, run) {
  const list = el("div"), news = el("p", { role: "status" }), buttons = el("div", { class: "buttons" });
  const state = kept(location.hash);
  const before = state.before ?? []; // cursors of the pages that were shown before this one
  let cursor = null, shown = 0;
  const show = async (from) => {
    buttons.querySelectorAll("button").forEach((button) => { button.disabled = true; });
    const found = await source.rollouts(name, { ...query, cursor: from });
    // A search in texts is done in pieces: a page that is not full goes on from where it stopped.
    while (turn === drawn && found.cursor && found.rollouts.length < 50 && query.text) {
      news.textContent = `${count(found.looked)} of ${many(found.fit, "rollout")} searched`;
      const more = await source.rollouts(name, { ...query, cursor: found.cursor });
      found.rollouts.push(...more.rollouts);
      Object.assign(found, { cursor: more.cursor, looked: more.looked });
    }
    if (turn !== drawn) return;
    cursor = from;
    shown = found.total;
    Object.assign(state, { before, cursor });
    news.replaceChildren();
    list.replaceChildren(rolloutsTable(name, query, found, run));
    const turnTo = (to, forward) => async () => {
      forward ? before.push(cursor) : before.pop();
      await show(to);
      list.querySelector("a")?.focus();
    };
    turnPage = async () => Boolean(found.cursor) && (await turnTo(found.cursor, true)(), true);
    const told = query.text ? `${count(found.rollouts.length)} found on this page`
      : `${count(found.fit)} of ${many(found.total, found.sampled ? "sampled rollout" : "rollout")}`;
    buttons.replaceChildren(
      el("button", { type: "button", disabled: !before.length, onclick: turnTo(before.at(-1), false) }, "Previous page"),
      el("button", { type: "button", disabled: !found.cursor, onclick: turnTo(found.cursor, true) }, "Next page"),
      el("span", { class: "quiet" }, told));
  };
  await show(state.cursor ?? null);
  return {
    nodes: [filterForm(name, query, run), news, list, buttons],
    grown(now, anew) {
      const more = now.attempts - shown;
      if (!anew && more <= 0) return;
      if (!anew && now.read < 1) return;
      const again = () => { before.length = 0; show(null).then(() => list.querySelector("a")?.focus()); };
      news.replaceChildren(anew ? "The run was graded anew. " : `${many(more, "rollout")} more. `,
        el("button", { type: "button", onclick: again }, "Show them"));
    },
  };
}

function filterForm(name, query, run) {
  const field = (label, id, control) => el("label", { for: id }, label, control);
  const choice = (label, key, values, none) => field(label, `by-${key}`, el("select", { id: `by-${key}`, name: key },
    el("option", { value: "" }, none), [...new Set([...values, query[key]].filter(Boolean))].map((value) =>
      el("option", { value, selected: query[key] === value }, value))));
  const sorts = ["ended", "score", "turns", "tokens", "calls", "tool_errors", "seconds", ...run.rewards.map((one) => `reward:${one.name}`)];
  const words = { ended: "when they ended", tool_errors: "failed calls", calls: "tool calls", seconds: "time" };
  const box = (label, key) => el("label", { class: "check" }, el("input", { type: "checkbox", name: key, value: "1", checked: Boolean(query[key]) }), label);
  const form = el("form", { "aria-label": "Filter and sort rollouts",
    onsubmit: (event) => {
      event.preventDefault();
      location.hash = address([name], Object.fromEntries(new FormData(form)));
    } },
    field("Text", "by-text", el("input", { id: "by-text", type: "search", name: "text", value: query.text })),
    el("button", { type: "submit" }, "Show"),
    Object.keys(query).length ? link("Clear", [name]) : null,
    el("details", { open: window.innerWidth > 700 }, el("summary", {}, "Filter and sort"), el("div", {},
    choice("Ending", "stop_reason", run.stop_reasons.map((one) => one.name), "any"),
    choice("State", "state", ["scored", "excluded", "failed", "waiting"], "any"),
    choice("Tool called", "tool", run.tools.map((one) => one.name), "any"),
    box("with failed calls", "tool_errors"),
    choice("Value of", "reward", run.rewards.map((one) => one.name), "the score"),
    field("from", "by-least", el("input", { id: "by-least", type: "number", step: "any", name: "least", value: query.least })),
    field("to", "by-most", el("input", { id: "by-most", type: "number", step: "any", name: "most", value: query.most })),
    field("Sort by", "by-sort", el("select", { id: "by-sort", name: "sort" }, sorts.map((value) =>
      el("option", { value: value === "ended" ? "" : value, selected: (query.sort || "ended") === value }, words[value] ?? value.replace(":", " "))))),
    box("descending", "descending"))),
    ["row", "group"].filter((key) => query[key]).map((key) => el("input", { type: "hidden", name: key, value: query[key] })));
  return form;
}

function rolloutsTable(name, query, found, run) {
  if (!found.rollouts.length) return el("p", {}, found.total ? "No rollout fits." : "No rollout has ended yet.");
  const rewards = run.rewards.slice(0, 6).map((one) => one.name);
  const head = ([sort, text, kind]) => {
    const on = sort && query.sort === sort;
    return el("th", { scope: "col", class: kind || null, "aria-sort": on ? (query.descending ? "descending" : "ascending") : null },
      sort ? el("button", { type: "button", onclick: () => {
        location.hash = address([name], { ...query, sort, descending: on ? !query.descending : true });
      } }, text) : text);
  };
  const columns = [...COLUMNS.slice(0, 2), ...rewards.map((one) => [`reward:${one}`, one, "number minor"]), ...COLUMNS.slice(2)];
  return scrolled("Rollouts", el("table", { class: "wide" },
    el("thead", {}, el("tr", {}, columns.map(head))),
    el("tbody", {}, found.rollouts.map((one) => el("tr", {},
      el("th", { scope: "row", class: "id" },
        link(one.label || one.id, [name, one.id], query, { "data-entry": passed(one, run) ? "" : "failed" }),
        one.answer ? el("div", { class: "preview" }, `→ ${one.answer}`) : null,
        el("div", { class: "quiet narrow" }, `${one.stop_reason} · ${many(one.turns, "turn")} · ${duration(one.seconds)}`),
        el("div", { class: "quiet" }, el("span", { class: "mono" }, one.id), one.attempt ? ` attempt ${one.attempt + 1}` : null)),
      el("td", { class: "number" }, scorePill(one)),
      rewards.map((reward) => el("td", { class: "number minor" }, number(one.rewards[reward]))),
      el("td", { class: "minor" }, one.stop_reason, one.error ? el("div", { class: "quiet" }, one.error.slice(0, 120)) : null),
      el("td", { class: "number minor" }, count(one.turns)),
      el("td", { class: "number minor" }, count(one.prompt_tokens + one.completion_tokens)),
      el("td", { class: "number minor" }, count(one.calls)),
      el("td", { class: "number minor" }, one.call_errors ? el("span", { class: "bad" }, count(one.call_errors)) : "0"),
      el("td", { class: "number minor" }, duration(one.seconds)))))));
}

function scorePill(one) {
  if (one.score === null) return el("span", { class: one.state === "failed" ? "pill bad" : "pill" }, one.state === "scored" ? "not paid" : one.state.replace("_", " "));
  return score(one.score);
}

// ------------------------------------------------------------------------------------------------------ A rollout

async function rolloutPage(turn, name, id, query) {
  const run = await source.overview(name);
  const one = await source.rollout(name, id);
  if (turn !== drawn) return [];
  place([[run.spec ?? name, [name], query], [id, [name, id]]], id);
  go = async (backwards, onlyFailed) => {
    let cursor = null;
    live.textContent = "Looking …";
    do { // a search for a text is done in pieces
      const asked = { ...query, backwards: backwards ? 1 : null, failed: onlyFailed ? 1 : null, cursor };
      const found = await source.beside(name, id, asked);
      if (turn !== drawn) return;
      // In place of this one: the browser's way back leads to the list.
      if (found.id !== null) return location.replace(address([name, found.id], query));
      cursor = found.cursor;
    } while (cursor !== null);
    live.textContent = onlyFailed ? "No failed one follows in this list." : "The list ends here.";
  };
  const beside = (text, backwards, onlyFailed) => el("button", { type: "button", onclick: () =>
    step(backwards, onlyFailed).catch((error) => { live.textContent = error.message; }) }, text);
  const folds = el("div");
  folds.append(...conversation(one));
  const all = (open) => () => folds.querySelectorAll("details").forEach((details) => { details.open = open; });
  return [
    heading(1, ["Rollout ", el("code", {}, id)]),
    el("p", { class: "quiet" }, `row ${one.row_key} · member ${one.index + 1} of group `, el("span", { class: "mono" }, one.group),
      one.attempt ? ` · attempt ${one.attempt + 1}` : "", one.policy?.model ? ` · ${one.policy.model}` : ""),
    el("dl", { class: "facts" }, [
      ["Score", scorePill(one)], ["Ending", one.stop_reason], ["Turns", count(one.turns)],
      ["Tokens", [count(one.prompt_tokens + one.completion_tokens), el("small", {}, ` (${count(one.completion_tokens)} sampled)`)]],
      ["Tool calls", [count(one.calls), one.call_errors ? el("small", { class: "bad" }, ` (${count(one.call_errors)} failed)`) : ""]],
      ["Time", duration(one.seconds)],
    ].map(([key, value]) => el("div", {}, el("dt", {}, key), el("dd", {}, value)))),
    one.error ? el("p", { class: "note bad" }, one.error) : null,
    one.cut ? el("p", { class: "note" }, `Not shown here: ${one.cut === 1 ? "1 entry" : `${count(one.cut)} entries`}; rollouts.jsonl has the whole rollout.`) : null,
    el("nav", { class: "buttons", "aria-label": "Beside it in the list" },
      beside("← previous", true, false), beside("next →", false, false), beside("next failed", false, true),
      one.seats.length > 1 ? link(`${many(one.seats.length, "seat")} of its episode side by side`, [name, "group", one.group], { seats: one.id }) : null,
      one.members.length > 1 ? link(`${many(one.members.length, "member")} side by side`, [name, "group", one.group]) : null,
      link("rollouts of this row", [name], { row: one.row_key })),
    el("div", { class: "split" },
      el("section", { "aria-labelledby": "conversation" },
        el("div", { class: "buttons" }, heading(2, "Conversation", { id: "conversation" }),
          el("button", { type: "button", onclick: all(true) }, "Open all"), el("button", { type: "button", onclick: all(false) }, "Fold all")),
        folds, programPart(one), ...tokenViews(name, one)),
      el("aside", { "aria-label": "Row, rewards and artifacts" }, rewardCard(one), rowCard(one), artifactCard(name, one), timeCard(one), attemptsCard(name, one))),
  ];
}

const LONG = 600; // characters of a system prompt that is folded: it is the same in each rollout

function conversation(one) {
  if (!one.messages.length) return [el("p", {}, "It has no conversation.")];
  return one.messages.map((message) => el("section", { class: `message ${/^[a-z]+$/.test(message.role) ? message.role : "other"}` },
    heading(3, [message.role, message.prompt ? " · prompt" : "", message.turn ? ` · turn ${message.turn}` : ""]),
    message.reasoning ? fold(`Reasoning (${many(message.reasoning.length, "character")})`, () => pre(message.reasoning)) : null,
    message.role === "system" && message.text.length > LONG
      ? fold(`${message.text.slice(0, 90)} … (${many(message.text.length, "character")})`, () => pre(message.text))
      : message.text ? pre(message.text, { class: message.text.length > 6000 ? "long" : null, tabindex: message.text.length > 6000 ? "0" : null }) : null,
    message.calls.map(toolCall)));
}

/** The calls of an agent program as a tree, what it has printed, and how it ended; null where none has played. */
function programPart(one) {
  const program = one.program;
  if (!program) return null;
  const lines = program.lines.map((line) => el("li", { class: `depth${Math.min(line.depth, 5)}` }, fold(
    [el("strong", {}, line.kind.replace("_", " ")), ` · call${line.calls.length === 1 ? "" : "s"} ${line.turns}`, line.from === null ? "" : ` · behind call ${line.from}`,
      el("span", { class: "quiet" }, ` · ${many(line.tokens, "token")}, ${line.trained === line.tokens ? "all" : line.trained ? count(line.trained) : "none"} trained`)],
    () => el("table", {}, el("tbody", {}, line.calls.map((call) => el("tr", {}, el("th", { scope: "row", class: "number" }, call.turn),
      el("td", { class: "mono" }, call.begins || NONE), el("td", { class: "number quiet" }, count(call.tokens)))))))));
  return el("section", { "aria-labelledby": "program" },
    heading(2, "Program", { id: "program" }),
    el("p", { class: "quiet" }, [many(program.requests, "request"), program.refused ? `, ${count(program.refused)} refused${program.refusal ? ` (${program.refusal})` : ""}` : "",
      program.exit_code === null ? " · ended by us" : ` · ended with status ${program.exit_code}`,
      program.sampling ? ` · asked for ${program.sampling}, and the spec's sampling was used` : ""]),
    lines.length ? el("ul", { class: "calls", "aria-label": "Its calls of the model" }, lines) : el("p", {}, "It has not called the model."),
    program.output.trim() ? fold(`Its output, at last (${many(program.output.length, "character")})`, () => pre(program.output, { tabindex: "0" })) : null);
}

function toolCall(call) {
  const bare = call.error !== null && call.error !== undefined;
  return fold([el("code", {}, `${call.name} `), el("span", { class: "quiet mono" }, call.arguments.replace(/\s+/g, " ").slice(0, 90)),
    call.seconds === null || call.seconds === undefined ? "" : el("span", { class: "quiet" }, ` · ${duration(call.seconds)}`),
    bare ? [" ", el("span", { class: "pill bad" }, "failed")] : ""],
  () => [
    heading(4, "Arguments"), pre(pretty(call.arguments), { tabindex: "0" }),
    bare ? [heading(4, "Error"), pre(call.error)] : [],
    heading(4, "Result"), call.result === null ? el("p", { class: "quiet" }, "The model was told nothing.") : pre(pretty(call.result), { tabindex: "0" }),
  ]);
}

function pretty(text) {
  try {
    const parsed = JSON.parse(text);
    return typeof parsed === "object" && parsed !== null ? JSON.stringify(parsed, null, 2) : text;
  } catch {
    return text;
  }
}

function rewardCard(one) {
  const rows = one.rewards.map((reward) => el("tr", {}, el("th", { scope: "row" }, reward.name,
    reward.reason ? el("p", {}, reward.reason) : null,
    reward.metrics ? el("p", {}, Object.entries(reward.metrics).map(([key, value]) => `${key} ${number(value)}`).join(" · ")) : null,
    reward.per_turn ? el("p", {}, `per turn: ${reward.per_turn.map(number).join(", ")}`) : null),
  el("td", { class: "number" }, number(reward.value))));
  return small("Rewards", ["Reward and its reason", "Value"], rows, "No reward was called.");
}

function rowCard(one, level = 3) {
  if (!one.row) return el("section", { class: "card" }, heading(level, "Row"), el("p", {}, "The row of this group was not recorded."));
  const told = (value) => pre(typeof value === "string" ? value : JSON.stringify(value, null, 1));
  return el("section", { class: "card" }, heading(level, "Row, with what is expected"), el("dl", { class: "row" },
    Object.entries(one.row).map(([key, value]) => [
      el("dt", {}, key, one.expected.includes(key) ? [" ", el("span", { class: "pill good" }, "expected")] : null), el("dd", {}, told(value))])));
}

function artifactCard(name, one) {
  if (!one.artifacts.length) return null;
  return el("section", { class: "card" }, heading(3, "Artifacts"), one.artifacts.map((artifact) => el("div", {},
    el("p", {}, el("strong", {}, artifact.name), artifact.problem ? ` · ${artifact.problem}` : ` · ${many(artifact.bytes, "byte")} in ${many(artifact.files_count ?? artifact.files.length, "file")}`),
    el("ul", {}, artifact.files.map((file) => {
      const href = source.artifact(name, one.id, file);
      return el("li", {}, href ? el("a", { href, download: true, class: "mono" }, file) : el("span", { class: "mono" }, file));
    })))));
}

function timeCard(one) {
  const phases = Object.entries(one.timings).filter(([key]) => key !== "total");
  const longest = Math.max(0, ...phases.map(([, value]) => value));
  return small("Time by phase", ["Phase", "Time", null], phases.map(([key, value]) => el("tr", {}, el("th", { scope: "row" }, key),
    el("td", { class: "number" }, duration(value)), barCell(value, longest))), "No times are recorded.");
}

function attemptsCard(name, one) {
  if (one.attempts.length < 2) return null;
  return small("Attempts at this place", ["Attempt", "State"], one.attempts.map((each) => el("tr", {}, el("th", { scope: "row" },
    each.id === one.id ? el("code", {}, each.id) : link(each.id, [name, each.id], null, { class: "mono" })),
  el("td", { class: "number" }, each.state))), "");
}

// --------------------------------------------------------------------------------------------- Prompt and tokens

function tokenViews(name, one) {
  const prompt = fold("The prompt exactly as the model got it", () => promptView(name, one));
  const sequences = one.sequences.map((sequence, at) => fold(
    `Tokens of sequence ${at + 1} of ${one.sequences.length}: ${count(sequence.tokens)}, ${count(sequence.trained)} of them trained on`,
    () => tokenView(name, one, at)));
  return [heading(2, "What the model saw"), prompt, sequences.length ? sequences
    : el("p", { class: "quiet" }, "No tokens are recorded: the server rendered the messages itself, or the run only measures.")];
}

function promptView(name, one) {
  if (one.prompt_text) return pre(one.prompt_text, { tabindex: "0" });
  const asked = one.messages.filter((message) => message.prompt).map(({ role, text }) => ({ role, text }));
  return [el("p", { class: "quiet" }, "As messages, and the schemas of the tools, which the server rendered by its chat template:"),
    pre(JSON.stringify({ messages: asked, tools: one.tools }, null, 2), { tabindex: "0" })];
}

const CHUNK = 2000; // tokens that the server sends at once
const LEVELS = [["p4", "≥ 0.9", 0.9], ["p3", "≥ 0.5", 0.5], ["p2", "≥ 0.1", 0.1], ["p1", "≥ 0.01", 0.01], ["p0", "below", 0]];

function tokenView(name, one, sequence) {
  const readout = el("p", { role: "status", class: "mono" }, "Point at a token, or use the arrow keys, to see its log-probability.");
  const box = el("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens; the arrow keys go from one to the next" });
  const more = el("div", { class: "buttons" });
  let current = null;
  const told = (span) => {
    current?.classList.remove("current");
    current = span;
    current.classList.add("current");
    readout.textContent = span.dataset.told;
  };
  box.addEventListener("mouseover", (event) => { if (event.target !== box) told(event.target); });
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = current ? current[step] : box.firstElementChild;
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
      further(found.total);
    } catch (error) {
      more.replaceChildren(failed(error));
    }
  };
  let first = Infinity, last = 0;
  const further = (total) => more.replaceChildren(...[
    first > 0 && source.live ? el("button", { type: "button", onclick: () => load(Math.max(first - CHUNK, 0), first) }, "Show tokens before") : "",
    last < total && source.live ? el("button", { type: "button", onclick: () => load(last) }, "Show tokens behind") : "",
    el("span", { class: "quiet" }, `tokens ${count(first + 1)} to ${count(last)} of ${count(total)}`)].filter(Boolean));
  load(one.sequences[sequence].start);
  return [
    el("ul", { class: "legend" }, el("li", {}, "context, not trained on: ", el("span", { class: "quiet" }, "grey")),
      el("li", {}, "trained on, by probability:"), LEVELS.map(([kind, text]) => el("li", {}, el("span", { class: kind }, text))), el("li", {}, el("span", { class: "px" }, "not told"))),
    box, readout, more];
}

function tokenSpan([text, turn, logprob], at, versions) {
  if (turn < 0) return el("span", { class: "c", "data-told": `token ${count(at)}: context, not trained on` }, text);
  const level = logprob === null ? "px" : LEVELS.find(([, , least]) => Math.exp(logprob) >= least)[0];
  const [before, after] = versions[turn] ?? [null, null];
  const weights = before === null || before === undefined ? "" : `; weights ${before === after || after === null ? before : `${before} to ${after}`}`;
  return el("span", { class: `s ${level}`,
    "data-told": `token ${count(at)}: trained on; log-probability ${logprob ?? "not told"}; model call ${turn + 1}${weights}` }, text);
}

// ------------------------------------------------------------------------------------------- A group side by side

const BESIDE = 8;

async function groupPage(turn, name, group, query) {
  const run = await source.overview(name);
  const found = await source.rollouts(name, { group });
  if (!found.rollouts.length) throw new Error(`There is no group ${group} among the rollouts of this page.`);
  const first = await source.rollout(name, query.seats ?? found.rollouts[0].id);
  const begin = Math.max(Number(query.from) || 0, 0);
  const those = query.seats ? first.seats : first.members;
  const called = (one) => query.seats ? `Seat ${one.seat}` : `Member ${one.index + 1}`;
  const chosen = those.slice(begin, begin + BESIDE);
  const members = await Promise.all(chosen.map((one) => source.rollout(name, one.id).catch((error) => ({ ...one, problem: error }))));
  if (turn !== drawn) return [];
  place([[run.spec ?? name, [name]], [`group ${group}`, [name, "group", group]]], group);
  const scores = those.map((one) => one.score).filter((value) => value !== null);
  const mean = scores.length ? scores.reduce((sum, value) => sum + value, 0) / scores.length : null;
  const further = (from, text) => from >= 0 && from < those.length ? link(text, [name, "group", group], { ...query, from }) : null;
  return [
    heading(1, [query.seats ? "Episode " : "Group ", el("code", {}, query.seats ?? group)]),
    el("p", { class: "quiet" }, `${["", first.row_key].includes(found.rollouts[0].label) ? "" : `${found.rollouts[0].label} · `}${many(those.length, query.seats ? "seat" : "member")} of row ${first.row_key}; mean score ${score(mean)}${scores.length > 1 && new Set(scores).size === 1 ? "; all scores are equal" : ""}`),
    rowCard(first, 2),
    el("nav", { class: "buttons", "aria-label": "Members" }, begin ? further(Math.max(begin - BESIDE, 0), "← earlier members") : null, further(begin + BESIDE, "later members →")),
    el("div", { class: "group", role: "region", "aria-label": "Members side by side", tabindex: "0" }, members.map((one) => el("article", { "aria-label": called(one) },
      heading(2, link(called(one), [name, one.id], { group }, { "data-entry": passed(one, run) ? "" : "failed" })),
      el("p", {}, scorePill(one), ` · ${one.stop_reason} · ${many(one.turns, "turn")} · ${duration(one.seconds)}`),
      one.problem ? failed(one.problem) : [rewardCard(one), el("p"), conversation({ ...one, messages: one.messages.filter((message) => !message.prompt) })]))),
  ];
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
