"""A web page of your own that shows answers as they are written, over an engine in the same process.

    pip install ".[demo,server]"
    uvicorn --app-dir examples stream_to_page:app

`compiled-llm serve` has OpenAI's API and a chat page; this is for an app that has routes of its own.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, StreamingResponse

import compiled_llm
from compiled_llm import Engine, SamplingParams

PAGE = """<!doctype html><title>compiled_llm</title>
<form><input name="question" size="60" placeholder="Ask" autofocus></form><pre style="white-space: pre-wrap"></pre>
<script>
const [form, shown] = [document.querySelector("form"), document.querySelector("pre")];
form.onsubmit = async (event) => {
  event.preventDefault();
  shown.textContent = "";
  const answer = await fetch("answer?question=" + encodeURIComponent(form.question.value));
  for await (const piece of answer.body.pipeThrough(new TextDecoderStream())) shown.textContent += piece;
};
</script>"""


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    model, tokenizer = compiled_llm.demo()  # or AutoModelForCausalLM.from_pretrained(...) and its tokenizer
    with Engine(compiled_llm.wrap(model), tokenizer=tokenizer) as engine:
        app.state.engine = engine
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/")
def page() -> HTMLResponse:
    return HTMLResponse(PAGE)


@app.get("/answer")
async def answer(question: str) -> StreamingResponse:
    handle = app.state.engine.submit([{"role": "user", "content": question}], SamplingParams(max_tokens=200))

    async def pieces() -> AsyncIterator[str]:
        try:
            async for piece in handle.text():
                yield piece
        finally:
            handle.cancel()  # of a reader who has left; one that has ended stays as it is

    return StreamingResponse(pieces(), media_type="text/plain; charset=utf-8")
