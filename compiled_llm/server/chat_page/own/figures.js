// The figures of the server, from /metrics, while they are unfolded. Each has its name there as a tooltip.

import { byId, count, seconds, show } from "./elements.js";
import { ask, asksForKey, checked, Refused } from "./server.js";

const EVERY = 2000; // milliseconds
const KEPT = 60; // figures of the chart
const speeds = [];
const histograms = {}; // those of the last looks, by name
let before = null; // the figures of last time, and when that was

// {"compiled_llm_pages{state=\"free\"}": 12, ...}
function figuresIn(text) {
  const lines = text.split("\n").filter((line) => line.startsWith("compiled_llm_"));
  return Object.fromEntries(lines.map((line) => [line.slice(0, line.lastIndexOf(" ")), Number(line.slice(line.lastIndexOf(" ") + 1))]));
}

function showFigures(figures) {
  for (const [id, name] of [["first", "time_to_first_token"], ["inter", "inter_token_latency"], ["queue", "request_queue_time"]]) {
    const recent = recentBuckets(figures, `compiled_llm_${name}_seconds_bucket`);
    show(`${id}-50`, seconds(quantile(recent, 0.5)));
    show(`${id}-99`, seconds(quantile(recent, 0.99)));
  }
  show("running", count(figures.compiled_llm_running));
  show("waiting", count(figures.compiled_llm_waiting));
  show("cuda_graphs", count(figures.compiled_llm_cuda_graphs));
  show("cold-starts", count(figures.compiled_llm_cold_starts_total));
  show("preemptions", count(figures.compiled_llm_preemptions_total));
  const prompts = figures.compiled_llm_prompt_tokens_total;
  show("hits", prompts ? `${Math.round((100 * figures.compiled_llm_cached_tokens_total) / prompts)} %` : "–");
  showPages(figures);
  showSpeed(figures.compiled_llm_new_tokens_total);
}

// [[bound, how many were at most so long], ...] of the time that the chart shows; of all time if there were none.
function recentBuckets(figures, name) {
  const now = Object.entries(figures)
    .filter(([label]) => label.startsWith(`${name}{le=`))
    .map(([label, count]) => [Number(label.split('"')[1].replace("+Inf", "Infinity")), count]);
  const looks = (histograms[name] ??= []);
  if (now.at(-1)?.[1] < looks.at(-1)?.at(-1)[1]) looks.length = 0; // another engine process
  looks.push(now);
  if (looks.length > KEPT) looks.shift();
  const since = now.map(([bound, count], index) => [bound, count - looks[0][index][1]]);
  return since.at(-1)?.[1] ? since : now;
}

// As Prometheus's histogram_quantile: evenly between the bounds of its bucket.
function quantile(buckets, share) {
  const wanted = share * (buckets.at(-1)?.[1] ?? 0);
  if (!wanted) return undefined;
  const index = buckets.findIndex(([, count]) => count >= wanted);
  const [low, before] = index ? buckets[index - 1] : [0, 0];
  const [high, count] = buckets[index];
  return high === Infinity ? low : low + ((high - low) * (wanted - before)) / (count - before);
}

function showPages(figures) {
  const [used, cached, free] = ["used", "cached", "free"].map((state) => figures[`compiled_llm_pages{state="${state}"}`]);
  const total = used + cached + free;
  show("pages-used", count(used));
  show("pages-cached", count(cached));
  show("pages-free", count(free));
  show("pages-total", total ? count(total) : "–");
  byId("bar-used").style.width = `${total ? (100 * used) / total : 0}%`;
  byId("bar-cached").style.width = `${total ? (100 * cached) / total : 0}%`;
}

function showSpeed(tokens) {
  const now = { tokens, time: performance.now() };
  if (before) {
    const speed = Math.max(0, (1000 * (now.tokens - before.tokens)) / (now.time - before.time)); // a new engine process begins at 0
    show("speed", speed.toLocaleString("en", { maximumFractionDigits: speed < 10 ? 1 : 0 }));
    speeds.push(speed);
    if (speeds.length > KEPT) speeds.shift();
  }
  before = now;
  drawSpeeds();
}

function drawSpeeds() {
  const most = Math.max(...speeds, 1);
  const points = speeds.map((speed, index) => `${((KEPT - speeds.length + index) * 240) / (KEPT - 1)},${46 - (44 * speed) / most}`);
  byId("speeds").firstElementChild.setAttribute("d", points.length > 1 ? `M${points.join("L")}` : "");
}

async function look() {
  try {
    const figures = figuresIn(await (await checked(await ask("/metrics"))).text());
    if (figures.compiled_llm_new_tokens_total === undefined) before = null; // it is not ready
    else showFigures(figures);
  } catch (error) {
    before = null;
    if (!(error instanceof Refused || error instanceof TypeError)) throw error; // the state says so
  }
}

async function keepLooking() {
  for (;;) {
    if (byId("figures").open && !document.hidden && !asksForKey()) await look();
    else before = null;
    await new Promise((resolve) => setTimeout(resolve, EVERY));
  }
}

byId("figures").addEventListener("toggle", () => byId("figures").open && look());
keepLooking();
