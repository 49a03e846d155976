// The chat: questions, and answers as they come.

const turns = []; // {question, answer}: those with an answer are sent again with the next question
let running = null; // what ends the answer that is under way

const scrolledDown = () => byId("log").scrollHeight - byId("log").scrollTop - byId("log").clientHeight < 80;
const scrollDown = () => (byId("log").scrollTop = byId("log").scrollHeight);

function messages(turn) {
  const system = byId("system").value.trim();
  const said = turns.filter((other) => other.answer && other !== turn);
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    ...said.flatMap(({ question, answer }) => [
      { role: "user", content: question },
      { role: "assistant", content: answer },
    ]),
    { role: "user", content: turn.question },
  ];
}

function settings() {
  const temperature = byId("temperature").value;
  const most = byId("max-tokens").value;
  return {
    ...(temperature && { temperature: Number(temperature) }),
    ...(most && { max_completion_tokens: Number(most) }),
  };
}

async function answer(turn) {
  const shown = new ShownAnswer(turn);
  const stopping = new AbortController();
  setRunning(stopping);
  try {
    const body = { messages: messages(turn), ...settings(), stream: true, stream_options: { include_usage: true } };
    const headers = { "Content-Type": "application/json" };
    const options = { method: "POST", headers, body: JSON.stringify(body), signal: stopping.signal };
    for await (const chunk of events(await checked(await ask("/v1/chat/completions", options)))) {
      if (chunk.error) throw new Refused(chunk.error.message);
      shown.take(chunk);
    }
    shown.end();
  } catch (error) {
    if (stopping.signal.aborted) shown.end("stopped");
    else shown.fail(error instanceof Refused ? error.message : "the server does not answer");
  } finally {
    if (running === stopping) setRunning(null);
  }
}

// One answer on the page; the text is drawn once a frame, however many tokens come in it.
class ShownAnswer {
  constructor(turn) {
    this.turn = turn;
    this.text = this.thought = "";
    this.began = performance.now();
    this.first = this.usage = this.reason = null;
    this.drawing = false;
    this.below = []; // what stands under the text
    this.article = element("article", "", "assistant waiting");
    this.article.setAttribute("aria-label", "Answer");
    this.busy = true;
    turn.shown.append(this.article);
    scrollDown();
  }

  set busy(busy) {
    this.article.setAttribute("aria-busy", String(busy)); // it is read out once it is whole
    this.article.classList.toggle("waiting", busy);
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
    this.thought += thought;
    this.text += text;
    this.turn.answer = this.text;
    if (!this.drawing) requestAnimationFrame(() => this.draw());
    this.drawing = true;
  }

  draw() {
    this.drawing = false;
    const follows = scrolledDown();
    if (this.text) this.article.classList.remove("waiting");
    this.article.replaceChildren(...this.thoughts(), ...markdown(this.text), ...this.below);
    if (follows) scrollDown();
  }

  thoughts() {
    if (!this.thought) return [];
    this.details ??= element("details");
    this.details.replaceChildren(element("summary", "Reasoning"), element("div", this.thought));
    return [this.details];
  }

  end(how = "") {
    if (this.reason === "length") how = "cut: no more tokens, or no more time";
    if (!this.text) how = `${how || "no answer"}; the next question goes without this one`;
    this.close(element("p", [how, ...this.figures()].filter(Boolean).join(" · "), "note"));
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
    const again = element("button", "Try again");
    again.type = "button";
    again.addEventListener("click", () => {
      if (running) return;
      this.article.remove();
      this.turn.answer = "";
      answer(this.turn);
    });
    this.close(error, again);
  }

  close(...below) {
    this.busy = false;
    this.below = below;
    this.draw();
    scrollDown();
  }
}

function setRunning(stopping) {
  running = stopping;
  byId("send").textContent = running ? "Stop" : "Send";
  allowSending();
}

function allowSending() {
  byId("send").disabled = !running && !byId("question").value.trim();
}

function fit() {
  byId("question").style.height = "auto";
  byId("question").style.height = `${byId("question").scrollHeight + 2}px`;
  allowSending();
}

// ---- what the user does

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return running.abort();
  const question = byId("question").value.trim();
  if (!question) return;
  const turn = { question, answer: "", shown: element("div", "", "turn") };
  const said = element("article", question, "user");
  said.setAttribute("aria-label", "You");
  turn.shown.append(said);
  byId("empty").hidden = true;
  byId("log").append(turn.shown);
  turns.push(turn);
  byId("question").value = "";
  fit();
  answer(turn);
});

byId("question").addEventListener("input", fit);

byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) byId("ask").requestSubmit(); // Enter does not stop an answer: the next question may be half written
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (document.body.classList.contains("side")) byId("open-side").click();
  else running?.abort();
});

byId("new").addEventListener("click", () => {
  running?.abort();
  setRunning(null);
  turns.length = 0;
  byId("log").replaceChildren(byId("empty"));
  byId("empty").hidden = false;
  if (document.body.classList.contains("side")) byId("open-side").click();
  byId("question").focus();
});

byId("open-side").addEventListener("click", () => {
  const open = document.body.classList.toggle("side");
  byId("open-side").setAttribute("aria-expanded", String(open));
  byId("open-side").setAttribute("aria-label", open ? "Back to the chat" : "Settings and figures");
  byId("open-side").textContent = open ? "Chat" : "Settings";
});

fit();
keepLooking();
