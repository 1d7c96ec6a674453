// The engine, live: its three stages and its figures, read once a second while somebody looks.

import { Chart, round } from "./chart.js";
import { byId } from "./dom.js";
import { hitShare, parse, rate } from "./metrics.js";

const EVERY = 1000; // ms
const PATIENCE = 5000;

const CHARTS = {
  out: new Chart("Tokens/s", { least: 10 }),
  in: new Chart("Prompt tokens/s", { least: 10 }),
  running: new Chart("Running"),
  waiting: new Chart("Waiting"),
  cache: new Chart("KV cache in use", { most: 1 }),
  hits: new Chart("Prefix hits", { most: 1 }),
};

let before = null;
let timer = 0;
let reading = false;

/** Draw the panel, and keep it up to date. */
export function startPanel() {
  byId("charts").append(...Object.values(CHARTS).map((chart) => chart.element));
  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    before = null; // what happened meanwhile is no rate of now
    if (!document.hidden) read();
  });
  read();
}

async function read() {
  if (reading) return;
  reading = true;
  try {
    const [health, page] = await Promise.all([get("health"), get("metrics")]);
    if (!page.ok) throw new Error(`/metrics: ${page.status}`);
    show(health.ok, parse(await page.text()));
  } catch {
    lost();
  }
  reading = false;
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(read, EVERY);
}

const get = (path) => fetch(path, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });

function show(healthy, figures) {
  const now = performance.now();
  const seconds = before === null ? NaN : (now - before.at) / 1000;
  const perSecond = (name) => rate(before?.figures, figures, name, seconds);
  const figure = (name) => figures.get(name) ?? NaN;
  const out = perSecond("generation_tokens_total");
  const into = perSecond("prompt_tokens_total");
  const used = figure("kv_cache_usage_perc");
  const hits = hitShare(figures);
  CHARTS.out.add(out, round(out));
  CHARTS.in.add(into, round(into));
  for (const name of ["running", "waiting"]) {
    const count = figure(`num_requests_${name}`);
    CHARTS[name].add(count, round(count));
  }
  CHARTS.cache.add(used, percent(used));
  CHARTS.hits.add(hits, percent(hits));
  byId("totals").textContent = totals(figure);
  before = { at: now, figures };

  const scheduler = state(figures.get("scheduler_connected"));
  stage("tokenizer", "up");
  stage("scheduler", scheduler);
  stage("executor", scheduler === "up" ? state(figures.get("executor_ready")) : "unknown");
  overall(healthy ? "up" : "down", healthy ? "" : "The engine takes no requests now.");
}

function lost() {
  before = null;
  for (const chart of Object.values(CHARTS)) chart.add(NaN, "–");
  stage("tokenizer", "down");
  stage("scheduler", "unknown");
  stage("executor", "unknown");
  overall("down", "The engine does not answer. Trying again.");
}

const state = (figure) => (figure === undefined ? "unknown" : figure > 0 ? "up" : "down");

function stage(name, to) {
  const item = document.querySelector(`#stages [data-stage="${name}"]`);
  item.dataset.state = to;
  item.querySelector("small").textContent = to;
}

function overall(to, note) {
  byId("health-dot").dataset.state = to;
  byId("open-panel").title = note || "The engine is ready";
  const line = byId("engine-note");
  if (line.textContent !== note) line.textContent = note; // it is read aloud at every change
  line.hidden = note === "";
}

function totals(figure) {
  const said = [`${round(figure("requests_finished_total"))} finished`];
  for (const [name, word] of [
    ["requests_aborted_total", "stopped"],
    ["admission_rejections_total", "refused"],
    ["num_preemptions_total", "preempted"],
  ]) {
    if (figure(name) > 0) said.push(`${round(figure(name))} ${word}`);
  }
  const drafts = figure("spec_decode_num_draft_tokens_total");
  if (drafts > 0) {
    said.push(`${percent(figure("spec_decode_num_accepted_tokens_total") / drafts)} of drafts kept`);
  }
  return said.join(", ");
}

function percent(share) {
  if (Number.isNaN(share)) return "–";
  return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}
