// The chats of this browser and of this visit: their list, and files of them. A chat is {id, title, changed, turns}.

import { button, byId, element } from "./elements.js";
import { areImages } from "./images.js";
import { forget, load, names, store, whenKeptElsewhere } from "./storage.js";

const CHAT = "chat.";
const known = new Map(kept().map((chat) => [chat.id, chat])); // those of this visit also if nothing is kept

export const newChat = () => ({ id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", changed: 0, turns: [] });

export function keep(chat) {
  chat.title = titleOf(chat.turns[0]);
  chat.changed = Date.now();
  if (!chat.turns.length) return drop(chat);
  known.set(chat.id, chat);
  write(chat);
}

const write = (chat) => store(CHAT + chat.id, { ...chat, turns: chat.turns.map(plain) });

export const keepAll = () => known.forEach(write);

const titleOf = (turn) => turn?.question.slice(0, 80) || (turn?.images ? "Image" : "");

const plain = ({ question, images, answer, thought, note }) => ({ question, ...(images && { images }), answer, thought, note });

export function drop(chat) {
  known.delete(chat.id);
  forget(CHAT + chat.id);
}

export const isKnown = (chat) => known.get(chat.id) === chat;

export const latestFirst = () => [...known.values()].sort((one, other) => other.changed - one.changed);

function isChat(chat) {
  const texts = (turn) => typeof turn?.question === "string" && typeof turn.answer === "string" && areImages(turn.images);
  return typeof chat?.id === "string" && Array.isArray(chat.turns) && chat.turns.length > 0 && chat.turns.every(texts);
}

export function kept() {
  return names().filter((name) => name.startsWith(CHAT)).map(load).filter(isChat);
}

export function whenChangedElsewhere(action) {
  whenKeptElsewhere((name) => {
    if (!name.startsWith(CHAT)) return;
    const [id, chat] = [name.slice(CHAT.length), load(name)];
    if (!isChat(chat)) known.delete(id);
    else if (!known.get(id)?.turns.some(({ shown }) => shown)) known.set(id, chat); // what is shown here stays
    action();
  });
}

// Show the list; `open` and `remove` are told which chat is meant.
export function list(current, isRunning, open, remove) {
  const lines = latestFirst().map((chat) => {
    const line = element("li");
    const opening = button(chat.title, () => open(chat), "title");
    if (chat === current) opening.setAttribute("aria-current", "true");
    if (isRunning(chat)) opening.classList.add("waiting");
    if (isRunning(chat)) opening.setAttribute("aria-label", `${chat.title} (being answered)`);
    const deleting = button("Delete", () => remove(chat), "quiet");
    deleting.setAttribute("aria-label", `Delete the chat ${chat.title}`);
    line.append(opening, deleting);
    return line;
  });
  byId("chats").replaceChildren(...lines);
}

function markdownOf({ title, turns }) {
  const shown = (images) => (images ?? []).map(() => "(an image)\n\n").join("");
  const parts = turns.map(
    ({ question, images, answer }) => `## Question\n\n${shown(images)}${question}\n\n## Answer\n\n${answer}`,
  );
  return `# ${title.replaceAll("\n", " ")}\n\n${parts.join("\n\n")}\n`;
}

export function save(chat, kind) {
  const plainly = { ...chat, turns: chat.turns.map(plain) };
  const text = kind === "md" ? markdownOf(plainly) : JSON.stringify(plainly, null, 2);
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], { type: kind === "md" ? "text/markdown" : "application/json" }));
  link.download = `chat.${kind}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
