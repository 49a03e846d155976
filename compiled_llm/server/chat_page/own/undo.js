// What a click has taken away can be brought back, until something else is taken away or the line is closed.

import { byId } from "./elements.js";

let bringBack = null;

export function takenAway(what, back) {
  byId("taken").textContent = what;
  bringBack = back;
  byId("undo").hidden = false;
}

export function forgetTaken() {
  bringBack = null;
  byId("undo").hidden = true;
}

byId("bring-back").addEventListener("click", () => {
  const back = bringBack;
  forgetTaken();
  back();
});
byId("close-undo").addEventListener("click", forgetTaken);
