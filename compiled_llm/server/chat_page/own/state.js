// How the server is: until it is ready, what it does, how far it is, and how long that has taken.

import { byId, seconds, show } from "./elements.js";
import { giveRoom } from "./messages.js";
import { ask, asksForKey, checked, Refused, whenKeyIsGiven } from "./server.js";
import { limitTokens } from "./settings.js";

const EVERY = { ready: 3000, else: 1000 }; // milliseconds
const SLOWER = { compiling: "; slower until it is compiled", failed: "; slower: compiling has failed" };
let named = false;
let starting = null; // while the server prepares: the promise that it is done, and what keeps it

export const isStarting = () => starting !== null;

// Resolves once the server no longer prepares, and at once if it does not; rejects if the signal comes first.
export async function started(signal) {
  const aborted = new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason)));
  await Promise.race([starting?.done, aborted]);
}

function setStarting(is) {
  if (is === isStarting()) return;
  if (!is) starting.end();
  starting = null;
  if (!is) return;
  starting = {};
  starting.done = new Promise((resolve) => (starting.end = resolve));
}

function say(kind, text) {
  byId("state").className = `state ${kind}`;
  show("state", text);
}

function showStarting({ ready, doing, step, steps, seconds: taken }) {
  byId("starting").hidden = ready;
  byId("hello").hidden = !ready;
  setStarting(!ready);
  if (ready) return;
  show("doing", doing);
  show("how-long", seconds(Math.round(taken)));
  byId("progress").hidden = !steps;
  byId("progress").max = steps ?? 1;
  byId("progress").value = steps ? step - 1 : 0;
}

async function look() {
  try {
    const found = await (await ask("/ready")).json();
    showStarting(found);
    if (found.ready && !named) await nameModel();
    say(found.ready ? "ready" : "", found.doing + (SLOWER[found.uncompiled] ?? ""));
    return found.ready;
  } catch (error) {
    named = false;
    setStarting(false); // whoever waits asks, and is told why that fails
    if (error instanceof Refused) say("lost", asksForKey() ? "asks for an API key" : error.message);
    else say("lost", "the server does not answer");
    return false;
  }
}

async function nameModel() {
  const { data } = await (await checked(await ask("/v1/models"))).json();
  show("model", data[0].id);
  document.title = data[0].id;
  limitTokens(data[0].max_model_len);
  giveRoom(data[0].limit_mm_per_prompt.image, data[0].max_body_bytes);
  byId("add-image").hidden = !data[0].input_modalities?.includes("image");
  byId("ask").hidden = !data[0].output_modalities?.includes("text");
  show("hello", byId("ask").hidden ? "This model scores texts, and writes none." : "Ask something.");
  named = true;
}

async function keepLooking() {
  for (;;) {
    const ready = (document.hidden && !isStarting()) || asksForKey() || (await look());
    await new Promise((resolve) => setTimeout(resolve, EVERY[ready ? "ready" : "else"]));
  }
}

whenKeyIsGiven(look);
keepLooking();
