// The figures of the server, from /metrics. Each has the name there beside it, or as its tooltip.

const EVERY = 2000; // milliseconds
const KEPT = 60; // figures of the chart
const speeds = [];
let before = null; // the figures of last time, and when that was

function show(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text;
}

function say(kind, text) {
  byId("state").className = `state ${kind}`;
  show("state", text);
}

// {"compiled_llm_pages{state=\"free\"}": 12, ...}
function figuresIn(text) {
  const lines = text.split("\n").filter((line) => line.startsWith("compiled_llm_"));
  return Object.fromEntries(lines.map((line) => [line.slice(0, line.lastIndexOf(" ")), Number(line.slice(line.lastIndexOf(" ") + 1))]));
}

const count = (value) => (value === undefined ? "–" : Math.round(value).toLocaleString("en"));

function seconds(value) {
  if (value === undefined) return "–";
  const milliseconds = value * 1000;
  if (milliseconds >= 10_000) return `${Math.round(value).toLocaleString("en")} s`;
  if (milliseconds >= 1000) return `${value.toFixed(1)} s`;
  return `${milliseconds.toFixed(milliseconds < 10 ? 2 : milliseconds < 100 ? 1 : 0)} ms`;
}

function showFigures(figures) {
  for (const [id, name] of [["first", "first_token"], ["inter", "inter_token"], ["queue", "queue"]]) {
    show(`${id}-50`, seconds(figures[`compiled_llm_${name}_seconds{quantile="0.5"}`]));
    show(`${id}-99`, seconds(figures[`compiled_llm_${name}_seconds{quantile="0.99"}`]));
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

// ---- how the server is

let named = false;

async function look() {
  try {
    const figures = figuresIn(await (await checked(await ask("/metrics"))).text());
    if (figures.compiled_llm_new_tokens_total === undefined) return await lookWhatItDoes();
    if (!named) await nameModel();
    say("ready", "ready");
    showFigures(figures);
  } catch (error) {
    before = null;
    if (error instanceof Refused) say("lost", byId("key-form").hidden ? error.message : "asks for an API key");
    else say("lost", "the server does not answer");
  }
}

async function lookWhatItDoes() {
  before = null;
  const { doing } = await (await ask("/ready")).json();
  say("", doing === "ready" ? "busy" : doing);
}

async function nameModel() {
  const { data } = await (await checked(await ask("/v1/models"))).json();
  show("model", data[0].id);
  document.title = data[0].id;
  named = true;
}

async function keepLooking() {
  for (;;) {
    if (!document.hidden && byId("key-form").hidden) await look();
    await new Promise((resolve) => setTimeout(resolve, EVERY));
  }
}
