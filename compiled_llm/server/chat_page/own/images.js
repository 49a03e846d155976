// Images that go with the next question: chosen, pasted or dropped, and made small enough to be sent and kept.

import { button, byId, element } from "./elements.js";

const LONGEST = 1536; // pixels of a side
const SMALL = 300_000; // characters up to which an image stays as sharp as it is
const DATA = "data:image/";
let chosen = [];
let changed = () => {};

export const chosenImages = () => chosen;

export function setImages(urls) {
  chosen = [...urls];
  byId("images").replaceChildren(...chosen.map(line));
  byId("images").hidden = chosen.length === 0;
  changed();
}

export function whenImagesChange(action) {
  changed = action;
}

export function shownImage(url) {
  const image = element("img", "", "image");
  image.src = url;
  image.alt = "Image";
  return image;
}

// Whether these are images that this page has kept; another page of its address may have written anything.
export const areImages = (urls) =>
  urls === undefined || (Array.isArray(urls) && urls.every((url) => typeof url === "string" && url.startsWith(DATA)));

function line(url, place) {
  const made = element("li");
  const leaving = button("Remove", () => setImages(chosen.filter((_, other) => other !== place)), "quiet");
  leaving.setAttribute("aria-label", "Remove the image");
  made.append(shownImage(url), leaving);
  return made;
}

async function add(files) {
  byId("no-image").hidden = true;
  for (const file of files) {
    try {
      setImages([...chosen, await scaled(file)]);
    } catch {
      byId("no-image").textContent = `${file.name} is no image that this browser can show.`;
      byId("no-image").hidden = false;
    }
  }
  byId("question").focus();
}

async function scaled(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, LONGEST / Math.max(bitmap.width, bitmap.height));
  const canvas = element("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const drawing = canvas.getContext("2d");
  drawing.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  const sharp = canvas.toDataURL("image/png");
  if (sharp.length <= SMALL) return sharp;
  drawing.globalCompositeOperation = "destination-over"; // JPEG has no transparency
  drawing.fillStyle = "white";
  drawing.fillRect(0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

// A model that reads text alone has no button: what is pasted or dropped then is the browser's.
function take(event, files) {
  if (byId("add-image").hidden || !files?.length) return;
  event.preventDefault();
  add([...files]);
}

byId("add-image").addEventListener("click", () => byId("image-files").click());
byId("image-files").addEventListener("change", ({ target }) => {
  add([...target.files]).then(() => (target.value = ""));
});
document.addEventListener("paste", (event) => take(event, event.clipboardData?.files));
document.addEventListener("dragover", (event) => {
  if (!byId("add-image").hidden && event.dataTransfer?.types.includes("Files")) event.preventDefault();
});
document.addEventListener("drop", (event) => take(event, event.dataTransfer?.files));
