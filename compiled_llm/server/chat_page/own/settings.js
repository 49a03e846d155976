// The settings: what is sent of them, and the marks at those that are out of range. Nothing is sent of an empty one.

import { byId } from "./elements.js";
import { isKept, load, store } from "./storage.js";

const NUMBERS = { temperature: "temperature", "top-p": "top_p", "max-tokens": "max_completion_tokens", seed: "seed" };
const FIELDS = [...Object.keys(NUMBERS), "system", "stop", "thinking"];
const KEY = "settings";

export function settings() {
  const given = Object.entries(NUMBERS).filter(([id]) => byId(id).value);
  const stop = byId("stop").value.split("\n").filter(Boolean);
  const thinking = byId("thinking").value;
  return {
    ...Object.fromEntries(given.map(([id, name]) => [name, Number(byId(id).value)])),
    ...(stop.length && { stop }),
    ...(thinking && { chat_template_kwargs: { enable_thinking: thinking === "on" } }),
  };
}

export const systemPrompt = () => byId("system").value.trim();

// The first field that is out of range; each has its mark.
export function firstWrong() {
  return FIELDS.map(byId).find((field) => !mark(field));
}

function mark(field) {
  const right = field.validity.valid;
  const said = byId(`${field.id}-wrong`);
  if (!said) return right;
  field.setAttribute("aria-invalid", String(!right));
  const { min, max } = field;
  said.textContent = right ? "" : max ? `From ${min} to ${Number(max).toLocaleString("en")}` : `A whole number from ${min}`;
  return right;
}

export function limitTokens(most) {
  byId("max-tokens").max = most ?? "";
  mark(byId("max-tokens"));
}

export const keepSettings = () => store(KEY, Object.fromEntries(FIELDS.map((id) => [id, byId(id).value])));

for (const [id, value] of Object.entries(load(KEY) ?? {})) {
  if (FIELDS.includes(id)) byId(id).value = value;
}
for (const field of FIELDS.map(byId)) {
  mark(field);
  field.addEventListener("input", () => {
    mark(field);
    if (isKept()) keepSettings();
  });
}
