// How the page asks the server: with the key that the user has given, if there is one.

import { byId } from "./elements.js";

const KEY = "compiled_llm.key";

export class Refused extends Error {} // what the server has said in place of an answer

export const asksForKey = () => !byId("key-form").hidden;

export function ask(path, options = {}) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  return fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", referrerPolicy: "no-referrer" });
}

export async function checked(response) {
  if (response.ok) return response;
  if (response.status === 401) askForKey();
  const body = await response.json().catch(() => null);
  throw new Refused(body?.error?.message ?? `the server has answered with status ${response.status}`);
}

function askForKey() {
  if (asksForKey()) return;
  if (sessionStorage.getItem(KEY)) byId("key-help").textContent = "The server does not know this key.";
  byId("key-form").hidden = false;
  byId("key").focus();
}

export function whenKeyIsGiven(action) {
  byId("key-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, byId("key").value.trim());
    byId("key").value = "";
    byId("key-form").hidden = true;
    await action();
    if (!asksForKey()) byId("question").focus();
  });
}

// Server-sent events of a response, as they come.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (let part; !(part = await reader.read()).done; ) {
    const parts = (text + part.value).split("\n\n");
    text = parts.pop();
    for (const event of parts) {
      const data = event.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
  throw new Refused("the connection has ended in the midst of the answer");
}
