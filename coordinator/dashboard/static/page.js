"use strict";
// Shows the snapshots of /dashboard/events. Text of the server gets into the page by textContent alone.

const POINTS = 600; // seconds in the charts
const DASH = "–";
const get = (id) => document.getElementById(id);
const make = (tag, className = "", textContent = "") => Object.assign(document.createElement(tag), { className, textContent });
const setText = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const sum = (rows, of) => rows.reduce((total, row) => total + of(row), 0);

// --- figures as words ------------------------------------------------------------------------------------------------

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const count = (n) => n == null ? DASH : n < 100000 ? Math.round(n).toLocaleString("en") : compact.format(n);
const rate = (n) => n == null ? DASH : n > 0 && n < 10 ? n.toFixed(1) : count(n);
const percent = (part) => part == null ? DASH : `${(100 * part).toFixed(part > 0 && part < 0.1 ? 1 : 0)} %`;
const time = (ms) => {
  if (ms == null) return DASH;
  if (ms < 1000) return `${ms.toFixed(ms > 0 && ms < 10 ? 1 : 0)} ms`;
  return ms < 90000 ? `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s` : age(ms / 1000);
};
const age = (s) => {
  const units = [["s", 1], ["min", 60], ["h", 3600], ["d", 86400]];
  const [unit, seconds] = units.findLast(([, length]) => s >= 1.5 * length) ?? units[0];
  return `${(Math.max(0, s) / seconds).toFixed(0)} ${unit}`;
};

// --- tables: rows and their buttons stay, so that focus does ---------------------------------------------------------

const text = (title, words, className = "") => ({ title, className, show: (cell, row) => setText(cell, words(row)) });
const number = (title, words, className = "") => text(title, words, `number ${className}`);
const graded = (title, words, grade) => ({
  title, show: (cell, row) => { setText(cell, words(row)); cell.className = grade(row); },
});
const name = (title, words) => ({
  title, className: "name", show: (cell, row) => { setText(cell, words(row)); cell.title = words(row); },
});
const bar = (title, parts, words, className = "", kind = () => "") => ({
  title, className: `bars ${className}`,
  create: (cell) => cell.append(make("span", "bar"), make("span")),
  show: (cell, row) => {
    const [drawn, said] = cell.children;
    drawn.className = `bar ${kind(row)}`;
    parts(row).forEach(([part, share], at) => {
      const piece = drawn.children[at] ?? drawn.appendChild(make("i", part));
      piece.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
    });
    setText(said, words(row));
  },
});
const button = (label, does, isShown, about) => ({
  title: "", className: "number",
  create: (cell) => {
    const made = cell.appendChild(make("button", "", label));
    made.type = "button";
    made.onclick = () => does(cell.parentNode.row);
  },
  show: (cell, row) => {
    cell.firstChild.hidden = !isShown();
    cell.firstChild.setAttribute("aria-label", `${label}: ${about(row)}`);
  },
});

const tables = new Map();
function newTable(place, caption, columns, none) {
  const scroll = make("div", "scroll"), grid = make("table"), head = grid.createTHead().insertRow();
  scroll.tabIndex = 0;
  scroll.setAttribute("role", "group");
  scroll.setAttribute("aria-label", caption);
  for (const { title, className } of columns) head.append(make(title ? "th" : "td", className, title));
  scroll.append(grid);
  const nothing = make("p", "quiet", none), heading = make("h3");
  place.append(heading, scroll, nothing);
  return { heading, scroll, nothing, body: grid.createTBody(), rows: new Map() };
}
function table(place, id, caption, columns, items, keyOf, none) {
  if (!tables.has(id)) tables.set(id, newTable(place, caption, columns, none));
  const { body, rows, scroll, nothing } = tables.get(id), keys = items.map(keyOf), present = new Set(keys);
  for (const [key, row] of rows) if (!present.has(key)) { row.remove(); rows.delete(key); }
  items.forEach((item, at) => {
    let row = rows.get(keys[at]);
    if (!row) {
      rows.set(keys[at], row = make("tr"));
      for (const one of columns) {
        const cell = row.appendChild(make("td", one.className));
        one.create?.(cell);
      }
    }
    row.row = item;
    columns.forEach((one, index) => one.show(row.cells[index], item));
    if (body.children[at] !== row) body.insertBefore(row, body.children[at] ?? null);
  });
  nothing.hidden = items.length > 0;
  scroll.hidden = !items.length;
}

// --- charts ----------------------------------------------------------------------------------------------------------

const charts = [
  ["Time to first token", ["p50", "p99"], (s) => [s.times.ttft_p50_ms, s.times.ttft_p99_ms], time],
  ["Time per output token", ["p50", "p99"], (s) => [s.times.tpot_p50_ms, s.times.tpot_p99_ms], time],
  ["Tokens per second", ["prompt", "output"], (s) => [s.rates.prefill, s.rates.decode], rate],
  ["Requests", ["running", "waiting"], (s) => [s.running, s.queued], count],
].map(([title, lines, of, words]) => ({ title, lines, of, words, data: [[], [], []] }));

function placed(chart) {
  const figure = make("figure"), caption = make("figcaption");
  chart.values = chart.lines.map((_, at) => make("span", `line${at}`));
  caption.append(make("b", "", chart.title), ...chart.values);
  chart.place = make("div");
  chart.place.setAttribute("role", "img");
  chart.place.setAttribute("aria-label", `${chart.title}, the last ten minutes`);
  figure.append(caption, chart.place);
  get("charts").append(figure);
  new ResizeObserver(() => chart.plot.setSize({ width: chart.place.clientWidth, height: 140 })).observe(chart.place);
}
function draw(chart) {
  if (!chart.place) placed(chart);
  chart.plot?.destroy();
  const quiet = getComputedStyle(get("footer")).color, faint = getComputedStyle(get("header")).borderBottomColor;
  const axis = { stroke: quiet, grid: { stroke: faint, width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const clock = (at) => new Date(1000 * at).toLocaleTimeString("en-GB");
  chart.plot = new uPlot({
    width: chart.place.clientWidth, height: 140, legend: { show: false }, cursor: { y: false },
    scales: { y: { range: (_, low, high) => [0, high > 0 ? 1.08 * high : 1] } },
    axes: [
      { ...axis, size: 24, space: 80, values: (_, ticks) => ticks.map(clock) },
      { ...axis, size: 58, values: (_, ticks) => ticks.map(chart.words) },
    ],
    series: [{}, ...chart.values.map((value) => (
      { stroke: getComputedStyle(value).color, width: 1.5, points: { show: false } }
    ))],
    hooks: { setCursor: [() => tell(chart)] },
  }, chart.data, chart.place);
}
function tell(chart) {
  const at = chart.plot?.cursor.idx ?? chart.data[0].length - 1;
  chart.values.forEach((node, line) => setText(node, `${chart.lines[line]} ${chart.words(chart.data[line + 1][at])}`));
}
function addPoint(chart, shown) {
  [shown.unix_s, ...chart.of(shown)].forEach((value, line) => chart.data[line].push(value ?? null));
  if (chart.data[0].length > POINTS) chart.data.forEach((line) => line.shift());
  chart.plot.setData(chart.data);
  tell(chart);
}

// --- a snapshot ------------------------------------------------------------------------------------------------------

let last = null; // the last snapshot
let counted = new Map(); // what is counted → [its count, its smoothed rate per second]
function addRates(now) {
  const seconds = last ? now.uptime_s - last.uptime_s : 0, earlier = counted;
  counted = new Map();
  const perSecond = (key, is) => {
    const [was, before] = earlier.get(key) ?? [];
    const rise = seconds > 0 && was != null ? Math.max(0, is - was) / seconds : null;
    const smooth = rise == null || before == null ? rise : 0.7 * before + 0.3 * rise;
    counted.set(key, [is, smooth]);
    return smooth;
  };
  const tokens = (role) => sum(now.pools.filter((pool) => pool.role === role), (pool) => pool.tokens);
  now.rates = {
    finished: perSecond("finished", now.finished.finished ?? 0),
    prefill: perSecond("prefill", tokens("prefill")),
    decode: perSecond("decode", tokens("decode")),
  };
  for (const pool of now.pools) for (const worker of pool.shown) {
    worker.tokensPerS = perSecond(`${pool.role}/${worker.name} tokens`, worker.tokens);
    worker.stepsPerS = perSecond(`${pool.role}/${worker.name} steps`, worker.steps);
  }
}

function showCards(s) {
  const decode = s.pools.filter((pool) => pool.role === "decode"), blocks = sum(decode, (pool) => pool.kv_blocks);
  const figures = {
    Running: [count(s.running), `on ${sum(s.pools, (pool) => pool.workers)} workers`],
    Waiting: [count(s.queued), `${count(sum(s.models, (model) => model.waiting_tokens))} prompt tokens`],
    Finished: [rate(s.rates.finished), "requests per second"],
    Output: [rate(s.rates.decode), "tokens per second"],
    TTFT: [time(s.times.ttft_p50_ms), `p99 ${time(s.times.ttft_p99_ms)}`],
    "Time per token": [time(s.times.tpot_p50_ms), `p99 ${time(s.times.tpot_p99_ms)}`],
    "KV for decode": [percent(sum(decode, (pool) => pool.kv_used) / (blocks || 1)), "reserved"],
    Sessions: [count(sum(s.models, (model) => model.sessions)), `KV kept for ${count(sum(s.models, (model) => model.leases))}`],
  };
  Object.entries(figures).forEach(([title, [value, more]], at) => {
    const card = get("cards").children[at] ?? get("cards").appendChild(make("div"));
    if (!card.firstChild) card.append(make("dt", "", title), make("dd"), make("dd", "quiet"));
    setText(card.children[1], value);
    setText(card.children[2], more);
  });
}

const filled = (w) => w.kv_used / w.kv_blocks;
const linksOf = (w) => Object.entries(w.links).map(([transport, n]) => `${n} × ${transport}`).join(", ") || DASH;
const workerColumns = (...own) => [
  text("Name", (w) => w.name),
  bar("Sequences", (w) => [["", w.seqs / w.seqs_max]], (w) => count(w.seqs), "slim"),
  bar("KV reserved", (w) => [["", filled(w)]], (w) => percent(filled(w)), "slim", (w) => filled(w) > 0.97 ? "full" : ""),
  number("Tokens/s", (w) => rate(w.tokensPerS), "wide"),
  ...own,
  text("Host", (w) => w.host, "wide"),
  graded("Health", (w) => w.health, (w) => ({ ok: "good", "left out": "bad" })[w.health] ?? "warn"),
  button("Manage", manage, () => last.can_act, (w) => w.name),
];
const timeline = (id) => button("Timeline", (r) => explain(r[id]), () => last.can_explain, (r) => r[id]);
const kept = (c) => c.finished ? c.kept / c.finished : null;
const targets = (c) => [
  c.ttft_target_ms ? `TTFT ${time(c.ttft_target_ms)}` : [], c.tpot_target_ms ? `${time(c.tpot_target_ms)} per token` : [],
].flat();
const PHASES = ["queue", "prefill", "transfer", "decode"], total = (r) => sum(PHASES, (phase) => r[`${phase}_ms`]);
const COLUMNS = {
  prefill: workerColumns(
    number("Tokens ahead", (w) => count(w.tokens_before), "wide"),
    text("KV links", (w) => [linksOf(w), ...w.links_why].join("; "), "wide"),
  ),
  decode: workerColumns(number("ms/step", (w) => w.stepsPerS > 0.1 ? (1000 / w.stepsPerS).toFixed(1) : DASH, "wide")),
  classes: [
    text("Class", (c) => c.name), bar("Share", (c) => [["", c.share]], (c) => percent(c.share)),
    number("Waiting", (c) => count(c.waiting)), number("Oldest", (c) => c.oldest_s ? age(c.oldest_s) : DASH, "wide"),
    text("Targets", (c) => targets(c).join(", ") || "none", "wide"),
    graded("Within targets", (c) => targets(c).length ? `${percent(kept(c))} of ${percent(c.percentile)}` : DASH,
      (c) => !targets(c).length || kept(c) == null ? "" : kept(c) < c.percentile ? "bad" : "good"),
  ],
  tenants: [
    text("Tenant", (t) => t.tenant), text("Class", (t) => t.class, "wide"),
    bar("Share of 10 s", (t) => [["", t.share]], (t) => percent(t.share)), number("Waiting", (t) => count(t.waiting)),
  ],
  waiting: [
    name("Request", (r) => r.id), text("Tenant", (r) => r.tenant), number("Prompt", (r) => count(r.prompt_tokens), "wide"),
    number("Waited", (r) => time(1000 * r.waited_s)), timeline("id"),
  ],
  requests: [
    number("Ago", (r) => age(r.age_s)), name("Request", (r) => r.request_id), text("Tenant", (r) => r.tenant, "wide"),
    text("Class", (r) => r.priority_class, "wide"),
    bar("Time", (r) => PHASES.map((phase) => [phase, r[`${phase}_ms`] / (total(r) || 1)]), () => "", "wide", () => "long"),
    number("TTFT", (r) => time(r.queue_ms + r.prefill_ms)), number("Total", (r) => time(total(r)), "wide"),
    number("Tokens", (r) => count(r.output_tokens), "wide"),
    graded("Outcome", (r) => r.outcome, (r) => ({ finished: "good", cancelled: "" })[r.outcome] ?? "bad"),
    timeline("request_id"),
  ],
  events: [
    number("Ago", (e) => age(e.age_s)),
    name("Who", (e) => `${e.kind} ${e.last}${e.times > 1 ? ` and ${e.times - 1} more` : ""}`),
    text("What", (e) => e.what, "wrap"),
  ],
  ratio: [text("Ratio", (r) => r.what), text("State", (r) => r.words, "wrap")],
  arms: [
    text("Policy arm", (a) => a.arm), number("Came", (a) => count(a.offered)), number("Finished", (a) => count(a.finished)),
    number("Within targets", (a) => percent(kept(a))),
  ],
};

function adviceWords(a) {
  const wants = a.wanted === a.present ? `keeps ${a.present}` : `wants ${a.wanted} instead of ${a.present}`;
  const off = a.error.ttft_p90 == null ? "" : `; its predictions of TTFT p90 were off by ${percent(a.error.ttft_p90)}`;
  return `${wants}: ${a.reason}${off}`;
}
function flipWords(f) {
  const result = f.failure ? ` (${f.failure})` : f.commit_ms ? ` in ${time(f.drained_ms + f.commit_ms)}` : "";
  return `${f.before} → ${f.role}, ${f.state}${result}${f.why ? `; ${f.why}` : ""}`;
}
const ratioRows = (s) => [
  { what: "Workers", words: s.pools.map((pool) => `${pool.workers} ${pool.role}`).join(", ") || "none" },
  ...s.autopilots.map((a) => ({ what: `Autopilot, ${a.mode}`, words: adviceWords(a) })),
  { what: "Policy", words: `version ${s.policy.number} (${s.policy.digest})` },
  ...s.policy.trial ? [{ what: "On trial", words: `version ${s.policy.trial} (${s.policy.trial_digest})` }] : [],
  ...s.flips.map((f) => ({ what: f.worker, words: flipWords(f) })).reverse(),
];

function showWorkers(s, pool) {
  const id = `${pool.model}/${pool.role}`, of = s.models.length > 1 ? ` of ${pool.model}` : "";
  table(get("workers"), id, `${pool.role} workers${of}`, COLUMNS[pool.role], pool.shown, (w) => w.name, "None.");
  const few = pool.workers > pool.shown.length ? `${pool.shown.length} of ${pool.workers}, the busiest` : pool.workers;
  setText(tables.get(id).heading, `${pool.role}${of}: ${few}`);
}
function showTrouble(s) {
  const lacking = s.pools.filter((pool) => !pool.workers).map((pool) => `no ${pool.role} worker of ${pool.model}`);
  const words = [...s.left_out, ...s.hung.map((worker) => `${worker} hung and was given up`), ...lacking].join("; ");
  get("trouble").hidden = !words;
  setText(get("trouble"), words);
}
function show(s) {
  addRates(s);
  last = s;
  setText(get("models"), s.models.map((model) => model.model).join(", ") || "no workers");
  setText(get("footer"), `${s.name}, crossdock ${s.version}, up for ${age(s.uptime_s)}, gateways: ${s.gateways}.`
    + (s.can_act ? "" : " Read only, since the coordinator has no --admin-key-file."));
  get("unlock").hidden = get("policy").hidden = !s.can_act;
  setText(get("unlock"), sessionStorage.getItem("key") ? "Lock actions" : "Unlock actions");
  showTrouble(s);
  showCards(s);
  charts.forEach((chart) => addPoint(chart, s));
  s.pools.forEach((pool) => showWorkers(s, pool));
  const list = (id, items, keyOf, none = "None.") => (
    table(get(id), id, get(`h-${id}`).textContent, COLUMNS[id], items, keyOf, none)
  );
  const [share, waiting] = [0, 1].map((at) => (c) => s.class_sums[c.name][at]);
  list("classes", s.classes.map((c) => ({ ...c, share: share(c), waiting: waiting(c) })), (c) => c.name);
  list("tenants", s.tenants, (t) => `${t.class}/${t.tenant}`, "No tenant was served in the last seconds.");
  list("waiting", s.waiting, (r) => r.id, "Nothing waits.");
  list("requests", s.requests, (r) => `${r.request_id}/${r.at}`, "None has ended yet.");
  list("events", s.events.slice().reverse(), (e) => `${e.first_at}/${e.kind}`);
  list("ratio", ratioRows(s), (r) => `${r.what}/${r.words}`);
  table(get("ratio"), "arms", "Arms of the policy", COLUMNS.arms, s.policy.trial ? s.policy.arms : [], (a) => a.arm, "");
}

// --- what needs the key ----------------------------------------------------------------------------------------------

let fading = 0;
function say(words) {
  setText(get("said"), words);
  clearTimeout(fading);
  fading = setTimeout(() => setText(get("said"), ""), 6000);
}
function ask(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done) => { dialog.onclose = () => done(dialog.returnValue); });
}
async function unlock() {
  const answer = await ask(get("key")), key = get("typed").value.trim();
  get("typed").value = "";
  if (answer && key) sessionStorage.setItem("key", key);
  return sessionStorage.getItem("key");
}
async function post(path, body) {
  const key = sessionStorage.getItem("key") ?? await unlock();
  if (!key) return null;
  try {
    const headers = { authorization: `Bearer ${key}` };
    const answer = await fetch(`dashboard/${path}`, { method: "POST", headers, body });
    const found = await answer.json();
    if (answer.ok) return found;
    if (answer.status === 401) sessionStorage.removeItem("key");
    say(found.error);
  } catch {
    say("The coordinator did not answer.");
  }
  return null;
}
async function order(message, done) {
  if (await post("orders", JSON.stringify(message))) say(done);
}
async function manage(worker) {
  setText(get("h-manage"), worker.process);
  const wanted = await ask(get("manage")), role = get("role").value;
  if (wanted === "drain") await order(["DrainRequest", worker.name, false, 20000], `${worker.name} gets nothing new`);
  if (wanted === "undo") await order(["DrainRequest", worker.name, true, 0], `${worker.name} takes requests again`);
  if (wanted === "flip") await order(["FlipRequest", worker.process, role, 20000], `${worker.process} becomes ${role}`);
}
async function explain(id) {
  say("Replaying the event log …");
  const found = await post("explain", id);
  if (!found) return;
  say("");
  setText(get("h-timeline"), found.request);
  setText(get("summary"), found.summary);
  get("steps").replaceChildren(...found.words.map((line) => {
    const step = make("li");
    step.append(...line.map((words) => make("span", "", words)));
    return step;
  }));
  await ask(get("timeline"));
}
get("policy").onsubmit = async (event) => {
  event.preventDefault();
  const action = event.submitter.value, file = get("file").files[0];
  if (action === "try" && !file) return say("Choose a tenants file to try.");
  const trial = action === "try" ? [0, await file.text(), get("share").valueAsNumber / 100] : [];
  await order(["PolicyRequest", action, ...trial], `Policy: ${event.submitter.textContent}, done`);
};
get("unlock").onclick = () => sessionStorage.getItem("key") ? sessionStorage.removeItem("key") : unlock();

// --- theme and stream ------------------------------------------------------------------------------------------------

const preferred = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (localStorage.getItem("theme") ?? (preferred.matches ? "dark" : "light")) === "dark";
function paint() {
  document.documentElement.style.colorScheme = isDark() ? "dark" : "light";
  setText(get("theme"), isDark() ? "Light" : "Dark");
  charts.forEach(draw);
}
get("theme").onclick = () => { localStorage.setItem("theme", isDark() ? "light" : "dark"); paint(); };
preferred.onchange = paint;

function connect() {
  const events = new EventSource("dashboard/events");
  const state = (words) => { setText(get("state"), words); get("state").className = words; };
  events.onmessage = (event) => { state("live"); show(JSON.parse(event.data)); };
  events.onerror = () => {
    state("reconnecting");
    if (events.readyState === EventSource.CLOSED) setTimeout(connect, 5000); // as when there are too many viewers
  };
}
paint();
connect();
