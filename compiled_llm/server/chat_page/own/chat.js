// The chats: questions, their answers, and what the user does with them.

import { ShownAnswer, scrollDown } from "./answer.js";
import { drop, isKnown, keep, keepAll, latestFirst, list, newChat, save, whenChangedElsewhere } from "./chats.js";
import { button, byId, element } from "./elements.js";
import { request } from "./messages.js";
import { chosenImages, setImages, shownImage, whenImagesChange } from "./images.js";
import { ask, checked, events, Refused } from "./server.js";
import { firstWrong, keepSettings, settings } from "./settings.js";
import { isStarting, started } from "./state.js";
import { isKept, whenKeptChanges } from "./storage.js";
import { forgetTaken, takenAway } from "./undo.js";

const EVERY = 2000; // milliseconds after which more of an answer is kept
const UNFINISHED = "not finished"; // said of what is kept of an answer that has failed, or whose page was left

let chat = newChat(); // the one that is open
const running = new Map(); // of each chat with an answer under way: what ends that
let edited = null; // the turn whose question is in the field again

const isRunning = (which = chat) => running.has(which);

async function answer(begun, turn) {
  Object.assign(turn, { answer: "", thought: "", note: UNFINISHED });
  const shown = new ShownAnswer(turn, actions(turn));
  const stopping = new AbortController();
  running.set(begun, stopping);
  const keeping = keepWhile(begun, turn);
  showRunning();
  try {
    if (isStarting()) shown.note("It is asked once the model is ready.");
    await started(stopping.signal);
    const { messages, leftOut } = request(begun.turns.slice(0, begun.turns.indexOf(turn) + 1));
    shown.ask(leftOut);
    const body = JSON.stringify({ messages, ...settings(), stream: true, stream_options: { include_usage: true } });
    const options = { method: "POST", headers: { "Content-Type": "application/json" }, body, signal: stopping.signal };
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
    if (running.get(begun) === stopping) running.delete(begun);
    showRunning();
  }
}

// Keep a chat while an answer is under way: from its beginning, now and then, and when the page is left.
function keepWhile(begun, turn) {
  const over = new AbortController();
  let last = performance.now();
  const soFar = () => {
    last = performance.now();
    if (isKnown(begun) && begun.turns.includes(turn)) keep(begun); // neither is taken away
  };
  keep(begun);
  addEventListener("pagehide", soFar, { signal: over.signal });
  document.addEventListener("visibilitychange", soFar, { signal: over.signal });
  const end = () => {
    over.abort();
    soFar();
  };
  return { nowAndThen: () => performance.now() - last > EVERY && soFar(), end };
}

// ---- turns on the page

function showTurn(turn) {
  turn.shown = element("div", "", "turn");
  const said = element("article", turn.question, "user");
  said.prepend(...(turn.images ?? []).map(shownImage));
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
  if (isRunning() || !settingsAreRight()) return;
  askAt(chat.turns.indexOf(turn), turn.question, turn.images);
  byId("question").focus();
}

// Ask in the place of the turns from there on, which can be brought back.
function askAt(place, question, images) {
  const [begun, before] = [chat, [...chat.turns]];
  const turn = { question, ...(images?.length && { images }) };
  for (const later of begun.turns.splice(place, Infinity, turn)) later.shown.remove();
  if (edited && !begun.turns.includes(edited)) stopEditing();
  forgetTaken();
  const gone = before.slice(place).filter((later) => later.answer).length;
  if (gone) takenAway(gone === 1 ? "An answer was replaced." : `${gone} answers have gone.`, () => bringBack(begun, before));
  showTurn(turn);
  answer(begun, turn);
}

function bringBack(other, turns) {
  running.get(other)?.abort();
  other.turns = turns;
  keep(other);
  showChat(other);
}

function edit(turn) {
  if (isRunning()) return;
  edited = turn;
  byId("editing").hidden = false;
  byId("question").value = turn.question;
  setImages(turn.images ?? []);
  fit();
  byId("question").focus();
}

function stopEditing() {
  if (edited) byId("question").value = "";
  if (edited) setImages([]);
  edited = null;
  byId("editing").hidden = true;
  fit();
  byId("question").focus();
}

function remove(turn) {
  if (isRunning()) return;
  if (edited === turn) stopEditing();
  const [begun, before] = [chat, [...chat.turns]];
  turn.shown.remove();
  chat.turns.splice(chat.turns.indexOf(turn), 1);
  byId("empty").hidden = chat.turns.length > 0;
  takenAway("A question and its answer are deleted.", () => bringBack(begun, before));
  keep(chat);
  listChats();
  byId("question").focus();
}

// ---- chats

const listChats = () => list(chat, isRunning, open, removeChat);

function open(other) {
  if (other !== chat) showChat(other);
  if (document.body.classList.contains("side")) byId("open-side").click();
  byId("question").focus();
}

function showChat(other) {
  stopEditing();
  chat = other;
  byId("log").replaceChildren(byId("empty"));
  byId("empty").hidden = chat.turns.length > 0;
  for (const turn of chat.turns) {
    if (turn.shown) byId("log").append(turn.shown); // its answer may be under way
    else showKept(turn);
  }
  scrollDown();
  showRunning();
}

function showKept(turn) {
  showTurn(turn);
  turn.thought ??= "";
  new ShownAnswer(turn, actions(turn)).close();
}

function removeChat(other) {
  running.get(other)?.abort();
  drop(other);
  if (other === chat) open(newChat());
  else listChats();
  takenAway(`The chat “${other.title}” is deleted.`, () => bringBack(other, other.turns));
}

// ---- the question

function showRunning() {
  byId("send").textContent = isRunning() ? "Stop" : "Send";
  document.body.classList.toggle("running", isRunning());
  allowSending();
  listChats();
}

function allowSending() {
  byId("send").disabled = !isRunning() && !byId("question").value.trim() && !chosenImages().length;
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
  if (isRunning()) return running.get(chat).abort();
  const question = byId("question").value.trim();
  if ((!question && !chosenImages().length) || !settingsAreRight()) return;
  const [place, images] = [edited ? chat.turns.indexOf(edited) : chat.turns.length, chosenImages()];
  edited = null;
  byId("editing").hidden = true;
  byId("question").value = "";
  setImages([]);
  fit();
  askAt(place, question, images);
});

byId("question").addEventListener("input", fit);
whenImagesChange(allowSending);
byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!isRunning()) byId("ask").requestSubmit(); // Enter does not stop an answer: the next question may be half written
});
byId("stop-editing").addEventListener("click", stopEditing);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (document.body.classList.contains("side")) byId("open-side").click();
  else if (isRunning()) running.get(chat).abort();
  else if (edited) stopEditing();
});

// ---- beside the chat

byId("new").addEventListener("click", () => open(newChat()));
byId("export-md").addEventListener("click", () => save(chat, "md"));
byId("export-json").addEventListener("click", () => save(chat, "json"));
whenChangedElsewhere(listChats);
whenKeptChanges(() => {
  forgetTaken();
  keepAll();
  keepSettings();
  if (!isKept()) takenAway("Chats and settings are no longer kept: they go when this page is closed.", () => byId("keep").click());
});
byId("open-side").addEventListener("click", () => {
  const isOpen = document.body.classList.toggle("side");
  byId("open-side").setAttribute("aria-expanded", String(isOpen));
  byId("open-side").textContent = isOpen ? "Chat" : "Menu";
});

const [latest] = latestFirst();
if (latest) open(latest);
else listChats();
fit();
