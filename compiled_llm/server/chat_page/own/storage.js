// What this browser keeps for the page, unless it is switched off.

import { byId } from "./elements.js";

const PREFIX = "compiled_llm.";
const OFF = `${PREFIX}off`;

export const isKept = () => byId("keep").checked;

export function names() {
  return Object.keys(localStorage).filter((name) => name.startsWith(PREFIX)).map((name) => name.slice(PREFIX.length));
}

export function load(name) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name));
  } catch {
    return null; // another page of this address may have written anything
  }
}

export function store(name, value) {
  if (!isKept()) return;
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
    byId("full").hidden = true;
  } catch {
    byId("full").hidden = false;
  }
}

// Another tab of this address has kept or forgotten something.
export function whenKeptElsewhere(action) {
  addEventListener("storage", ({ key }) => key?.startsWith(PREFIX) && action(key.slice(PREFIX.length)));
}

export const forget = (name) => localStorage.removeItem(PREFIX + name);

export function whenKeptChanges(action) {
  byId("keep").addEventListener("change", () => {
    if (isKept()) localStorage.removeItem(OFF);
    else names().forEach(forget);
    if (!isKept()) localStorage.setItem(OFF, "1");
    action();
  });
}

byId("keep").checked = localStorage.getItem(OFF) === null;
