// One answer on the page: as it comes, and as it was kept.

import { button, byId, copy, count, element, seconds } from "./elements.js";
import { GrowingMarkdown } from "./markdown.js";

const SHARE = 4; // of the time, drawing takes one part in so many
const leftOut = (count) => count && `${count === 1 ? "the oldest image was" : `the ${count} oldest images were`} left out: no room for more`;

const scrolledDown = () => byId("log").scrollHeight - byId("log").scrollTop - byId("log").clientHeight < 80;
export const scrollDown = () => (byId("log").scrollTop = byId("log").scrollHeight);

export class ShownAnswer {
  constructor(turn, actions) {
    this.turn = turn; // {question, answer, thought, note, shown}; answer and thought grow here
    this.actions = actions; // buttons that stand below it, beside Copy
    this.first = this.usage = this.reason = this.drawing = null;
    this.leftOut = 0; // earlier images for which the request had no room
    this.article = element("article", "", "assistant waiting");
    this.article.setAttribute("aria-label", "Answer");
    this.text = element("div");
    this.markdown = new GrowingMarkdown(this.text);
    this.below = element("div", "", "below");
    this.article.append(this.text, this.below);
    this.busy = true;
    turn.shown.append(this.article);
    scrollDown();
  }

  set busy(busy) {
    this.article.setAttribute("aria-busy", String(busy)); // it is read out once it is whole
    this.article.classList.toggle("waiting", busy);
  }

  note(text) {
    this.follow(() => this.below.replaceChildren(...(text ? [element("p", text, "note")] : [])));
  }

  // Change what is shown. Where the end was in sight, it stays so; the chat may not be the one that is open.
  follow(change) {
    const follows = this.article.isConnected && scrolledDown();
    change();
    if (follows) scrollDown();
  }

  ask(leftOut) {
    this.note("");
    this.leftOut = leftOut;
    this.began = performance.now();
  }

  take({ choices, usage }) {
    this.usage = usage ?? this.usage;
    const [choice] = choices;
    if (!choice) return;
    this.reason = choice.finish_reason ?? this.reason;
    const thought = choice.delta.reasoning_content ?? "";
    const text = choice.delta.content ?? "";
    if (!thought && !text) return;
    this.first ??= performance.now();
    this.last = performance.now();
    this.turn.thought += thought;
    this.turn.answer += text;
    this.drawing ??= setTimeout(() => requestAnimationFrame(() => this.draw()), this.pause ?? 0);
  }

  draw() {
    const begins = performance.now();
    clearTimeout(this.drawing);
    this.drawing = null;
    this.follow(() => {
      if (this.turn.answer) this.article.classList.remove("waiting");
      this.showThought();
      this.markdown.draw(this.turn.answer);
    });
    this.pause = (SHARE - 1) * (performance.now() - begins);
  }

  showThought() {
    if (!this.turn.thought) return;
    if (!this.thought) {
      this.thought = element("div");
      const details = element("details");
      details.append(element("summary", "Reasoning"), this.thought);
      this.article.prepend(details);
    }
    this.thought.textContent = this.turn.thought;
  }

  end(how = "") {
    if (this.reason === "length") how = "cut: no more tokens, or no more time";
    if (!this.turn.answer) how = `${how || "no answer"}; the next question goes without this one`;
    this.turn.note = [how, leftOut(this.leftOut), ...this.figures()].filter(Boolean).join(" · ");
    this.close();
  }

  figures() {
    if (!this.usage) return [];
    const { prompt_tokens, completion_tokens, prompt_tokens_details } = this.usage;
    const speed = completion_tokens > 1 && this.last > this.first ? (1000 * (completion_tokens - 1)) / (this.last - this.first) : 0;
    return [
      `${count(completion_tokens)} tokens`,
      speed && `${speed.toLocaleString("en", { maximumFractionDigits: speed < 10 ? 1 : 0 })} a second`,
      this.first && `first after ${seconds((this.first - this.began) / 1000)}`,
      `${count(prompt_tokens_details.cached_tokens)} of ${count(prompt_tokens)} prompt tokens cached`,
    ];
  }

  fail(message) {
    const error = element("p", message, "error");
    error.setAttribute("role", "alert");
    this.close(error);
  }

  close(error) {
    this.busy = false;
    this.draw();
    const copying = button("Copy", () => copy(this.turn.answer, copying), "quiet");
    copying.setAttribute("aria-label", "Copy answer");
    const actions = element("div", "", "actions");
    actions.append(...(this.turn.answer ? [copying] : []), ...this.actions);
    const note = error || !this.turn.note ? [] : [element("p", this.turn.note, "note")];
    this.follow(() => this.below.replaceChildren(...(error ? [error] : []), actions, ...note));
  }
}
