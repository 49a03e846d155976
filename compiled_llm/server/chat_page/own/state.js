// How the server is: until it is ready, what it does, how far it is, and how long that has taken.

import { byId, seconds, show } from "./elements.js";
import { ask, asksForKey, checked, Refused, whenKeyIsGiven } from "./server.js";
import { limitTokens } from "./settings.js";

const EVERY = { ready: 3000, else: 1000 }; // milliseconds
let named = false;

function say(kind, text) {
  byId("state").className = `state ${kind}`;
  show("state", text);
}

function showStarting({ ready, doing, step, steps, seconds: taken }) {
  byId("starting").hidden = ready;
  byId("hello").hidden = !ready;
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
    say(found.ready ? "ready" : "", found.doing);
    return found.ready;
  } catch (error) {
    named = false;
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
  named = true;
}

async function keepLooking() {
  for (;;) {
    const ready = document.hidden || asksForKey() || (await look());
    await new Promise((resolve) => setTimeout(resolve, EVERY[ready ? "ready" : "else"]));
  }
}

whenKeyIsGiven(look);
keepLooking();
