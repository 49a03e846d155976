// What is sent of a chat: its questions and answers, and as many of its images as a request has room for.

import { systemPrompt } from "./settings.js";

const OTHERS = 2 ** 16; // bytes of a request that are neither texts nor images
let room = { images: Infinity, bytes: Infinity }; // of a request, once the server has said it

export const giveRoom = (images, bytes) => (room = { images, bytes });

// {messages, leftOut} of turns, of which the last is asked now; `leftOut` is how many of the oldest images are not sent.
export function request(turns) {
  const system = systemPrompt();
  const sent = turns.filter((turn) => turn.answer || turn === turns.at(-1));
  const texts = [system, ...sent.map(({ question, answer }) => [question, answer])];
  const leftOut = surplus(sent, room.bytes - OTHERS - new Blob([JSON.stringify(texts)]).size);
  const messages = system ? [{ role: "system", content: system }] : [];
  let missing = leftOut;
  for (const { question, images = [], answer } of sent) {
    messages.push({ role: "user", content: content(question, images.slice(missing), Math.min(missing, images.length)) });
    if (answer) messages.push({ role: "assistant", content: answer });
    missing = Math.max(0, missing - images.length);
  }
  return { messages, leftOut };
}

// How many images of earlier turns have no room beside those that are newer; those of the last turn are always sent.
function surplus(sent, bytes) {
  const left = { images: room.images, bytes };
  const lacksRoom = (url) => --left.images < 0 || (left.bytes -= url.length) < 0;
  const [earlier, asked] = [sent.slice(0, -1), sent.slice(-1)].map((turns) => turns.flatMap(({ images }) => images ?? []));
  asked.forEach(lacksRoom);
  return earlier.findLastIndex(lacksRoom) + 1;
}

function content(question, urls, missing) {
  if (!urls.length && !missing) return question;
  const said = missing && `(${missing === 1 ? "An image was" : `${missing} images were`} here.)`;
  const [before, after] = [said, question].map((text) => (text ? [{ type: "text", text }] : []));
  return [...before, ...urls.map((url) => ({ type: "image_url", image_url: { url } })), ...after];
}
