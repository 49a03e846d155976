// The chat: questions, their answers, and what the user does with them.

import { ShownAnswer, scrollDown } from "./answer.js";
import { drop, keep, kept, list, newChat, save } from "./chats.js";
import { button, byId, element } from "./elements.js";
import { pictures, setPictures, shownPicture, whenPicturesChange } from "./pictures.js";
import { ask, checked, events, Refused } from "./server.js";
import { firstWrong, keepSettings, settings, systemPrompt } from "./settings.js";
import { isStarting, started } from "./state.js";
import { whenKeptChanges } from "./storage.js";

const EVERY = 2000; // milliseconds after which more of an answer is kept
const UNFINISHED = "not finished"; // said of what is kept of an answer that has failed, or whose page was left

let chat = newChat();
let running = null; // what ends the answer that is under way
let edited = null; // the turn whose question is in the field again

export function messages(turn) {
  const system = systemPrompt();
  const before = chat.turns.slice(0, chat.turns.indexOf(turn)).filter((other) => other.answer);
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    ...before.flatMap((other) => [asked(other), { role: "assistant", content: other.answer }]),
    asked(turn),
  ];
}

function asked({ question, images }) {
  if (!images) return { role: "user", content: question };
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: [...parts, ...(question ? [{ type: "text", text: question }] : [])] };
}

async function answer(turn) {
  const begun = chat;
  Object.assign(turn, { answer: "", thought: "", note: UNFINISHED });
  const shown = new ShownAnswer(turn, actions(turn));
  const stopping = new AbortController();
  setRunning(stopping);
  const keeping = keepWhile(begun, turn);
  try {
    const body = { messages: messages(turn), ...settings(), stream: true, stream_options: { include_usage: true } };
    const headers = { "Content-Type": "application/json" };
    const options = { method: "POST", headers, body: JSON.stringify(body), signal: stopping.signal };
    if (isStarting()) shown.note("It is asked once the model is ready.");
    await started(stopping.signal);
    shown.ask();
    for await (const chunk of events(await checked(await ask("/v1/chat/completions", options)))) {
      if (chunk.error) throw new Refused(chunk.error.message);
      shown.take(chunk);
      keeping.nowAndThen();
    }
    shown.end();
  } catch (error) {
    if (stopping.signal.aborted) shown.end("stopped");
    else shown.fail(error instanceof Refused ? error.message : "the server does not answer");
  } finally {
    keeping.end();
    if (running === stopping) setRunning(null);
    if (begun.turns.includes(turn)) keepAndList(begun);
  }
}

// Keep a chat while an answer is under way: from its beginning, now and then, and when the page is left.
function keepWhile(begun, turn) {
  const over = new AbortController();
  let last = performance.now();
  const soFar = () => {
    last = performance.now();
    if (begun.turns.includes(turn)) keep(begun);
  };
  soFar();
  listChats();
  addEventListener("pagehide", soFar, { signal: over.signal });
  document.addEventListener("visibilitychange", soFar, { signal: over.signal });
  return { nowAndThen: () => performance.now() - last > EVERY && soFar(), end: () => over.abort() };
}

// ---- turns on the page

function showTurn(turn) {
  turn.shown = element("div", "", "turn");
  const said = element("article", turn.question, "user");
  said.prepend(...(turn.images ?? []).map(shownPicture));
  said.setAttribute("aria-label", "You");
  const below = element("div", "", "actions own");
  below.append(...[["Edit", edit], ["Delete", remove]].map(([name, action]) => button(name, () => action(turn), "quiet idle")));
  turn.shown.append(said, below);
  byId("empty").hidden = true;
  byId("log").append(turn.shown);
}

function actions(turn) {
  return [button("Regenerate", () => again(turn), "quiet idle")];
}

function again(turn) {
  if (running || !settingsAreRight()) return;
  cutAfter(turn);
  turn.shown.querySelector(".assistant")?.remove();
  answer(turn);
  byId("question").focus();
}

function edit(turn) {
  if (running) return;
  edited = turn;
  byId("editing").hidden = false;
  byId("question").value = turn.question;
  setPictures(turn.images ?? []);
  fit();
  byId("question").focus();
}

function stopEditing() {
  if (edited) byId("question").value = "";
  if (edited) setPictures([]);
  edited = null;
  byId("editing").hidden = true;
  fit();
  byId("question").focus();
}

function remove(turn) {
  if (running) return;
  if (edited === turn) stopEditing();
  turn.shown.remove();
  chat.turns.splice(chat.turns.indexOf(turn), 1);
  byId("empty").hidden = chat.turns.length > 0;
  keepAndList();
  byId("question").focus();
}

function cutAfter(turn) {
  for (const later of chat.turns.splice(chat.turns.indexOf(turn) + 1)) later.shown.remove();
}

// ---- chats

const listChats = () => list(chat, open, removeChat);

function keepAndList(changed = chat) {
  keep(changed);
  listChats();
}

function open(other) {
  if (other.id !== chat.id) showChat(other);
  if (document.body.classList.contains("side")) byId("open-side").click();
  byId("question").focus();
}

function showChat(other) {
  running?.abort();
  setRunning(null);
  stopEditing();
  chat = other;
  byId("log").replaceChildren(byId("empty"));
  byId("empty").hidden = chat.turns.length > 0;
  for (const turn of chat.turns) {
    showTurn(turn);
    turn.thought ??= "";
    new ShownAnswer(turn, actions(turn)).close();
  }
  scrollDown();
  listChats();
}

function removeChat(other) {
  if (other.id === chat.id) {
    chat.turns.length = 0; // an answer under way is not kept
    open(newChat());
  }
  drop(other);
  listChats();
}

// ---- the question

function setRunning(stopping) {
  running = stopping;
  byId("send").textContent = running ? "Stop" : "Send";
  document.body.classList.toggle("running", running !== null);
  allowSending();
}

function allowSending() {
  byId("send").disabled = !running && !byId("question").value.trim() && !pictures().length;
}

function fit() {
  byId("question").style.height = "auto";
  byId("question").style.height = `${byId("question").scrollHeight + 2}px`;
  allowSending();
}

function settingsAreRight() {
  const wrong = firstWrong();
  if (!wrong) return true;
  if (!wrong.offsetParent) byId("open-side").click();
  wrong.focus();
  return false;
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return running.abort();
  const question = byId("question").value.trim();
  if ((!question && !pictures().length) || !settingsAreRight()) return;
  const place = edited ? chat.turns.indexOf(edited) : chat.turns.length;
  for (const later of chat.turns.splice(place)) later.shown.remove();
  const turn = { question, ...(pictures().length && { images: pictures() }) };
  chat.turns.push(turn);
  edited = null;
  byId("editing").hidden = true;
  byId("question").value = "";
  setPictures([]);
  fit();
  showTurn(turn);
  answer(turn);
});

byId("question").addEventListener("input", fit);
whenPicturesChange(allowSending);
byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) byId("ask").requestSubmit(); // Enter does not stop an answer: the next question may be half written
});
byId("stop-editing").addEventListener("click", stopEditing);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (document.body.classList.contains("side")) byId("open-side").click();
  else if (running) running.abort();
  else if (edited) stopEditing();
});

// ---- beside the chat

byId("new").addEventListener("click", () => open(newChat()));
byId("export-md").addEventListener("click", () => save(chat, "md"));
byId("export-json").addEventListener("click", () => save(chat, "json"));
whenKeptChanges(() => {
  keep(chat);
  keepSettings();
  listChats();
});
byId("open-side").addEventListener("click", () => {
  const isOpen = document.body.classList.toggle("side");
  byId("open-side").setAttribute("aria-expanded", String(isOpen));
  byId("open-side").textContent = isOpen ? "Chat" : "Menu";
});

const [latest] = kept();
if (latest) open(latest);
else listChats();
fit();
