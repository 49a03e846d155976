"""The openai package's client gets what the engine gives in process; what other clients send is answered, too.

`clients/` has the bodies that they have sent to a server that wrote them down: for a text, a stream, tools, an answer
to a call, a required call, and JSON. LangChain, LiteLLM, LlamaIndex and Vercel's AI SDK were installed for that; the
first and the last speak to /v1/responses, too.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from compiled_llm.engine.engine import Engine
from compiled_llm.requests.outputs import Completion, Logprob, RequestOutput
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.server.logprobs.columns import CompletionColumn
from compiled_llm.server.openai.completions.request import CompletionRequest
from compiled_llm.server.openai.tokenizer.token_bytes import TokenNames
from support.server.running_servers import RunningServer, chat_tokenizer
from support.server.scripted import CALL, Script

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "the quick "}, {"type": "text", "text": "fox"}]},
]
PLAIN = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the quick fox"}]


def expected(engine: Engine, given: dict[str, Any], prompt: Any = PLAIN) -> RequestOutput:
    return engine.generate([prompt], SamplingParams(**{"max_tokens": 30, **given}))[0]


def reason(completion: Completion) -> str:
    return "stop" if completion.finish_reason == "stop" else "length"


@pytest.mark.parametrize(
    "given", [{"temperature": 0.0}, {"seed": 7, "n": 3}, {"seed": 7, "stop": ["a", "e"]}], ids=", ".join
)
def test_a_chat_is_answered_as_in_process(client: Any, engine: Engine, given: Any) -> None:
    theirs = expected(engine, given)
    ours = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=30, **given)
    assert [choice.message.content for choice in ours.choices] == [answer.text for answer in theirs.outputs]
    assert [choice.finish_reason for choice in ours.choices] == [reason(answer) for answer in theirs.outputs]
    assert [choice.index for choice in ours.choices] == list(range(len(theirs.outputs)))
    assert ours.usage.prompt_tokens == len(theirs.prompt_token_ids)
    assert ours.usage.prompt_tokens_details.cached_tokens == (len(theirs.prompt_token_ids) - 1) // 4 * 4  # whole pages
    assert ours.usage.completion_tokens == sum(len(answer.token_ids) for answer in theirs.outputs)
    assert (ours.model, ours.object) == ("tiny", "chat.completion")


def test_texts_and_tokens_are_continued(client: Any, engine: Engine) -> None:
    prompts: list[Any] = ["the quick fox", "漢字"]
    ids = [chat_tokenizer()(prompt)["input_ids"] for prompt in prompts]
    for given in (prompts, ids, prompts[0], ids[0]):
        options: dict[str, Any] = {"model": "tiny", "prompt": given, "seed": 3, "n": 2, "max_tokens": 6}
        ours = client.completions.create(**options)
        asked = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        theirs = [expected(engine, {"seed": 3, "n": 2, "max_tokens": 6}, prompt) for prompt in asked]
        assert [choice.text for choice in ours.choices] == [a.text for output in theirs for a in output.outputs]


@pytest.mark.whole
def test_two_hundred_streams_at_once(api_server: RunningServer, engine: Engine) -> None:
    prompts = ["fox " * (1 + number % 20) for number in range(200)]
    theirs = [expected(engine, {"temperature": 0.0, "max_tokens": 10}, prompt).text for prompt in prompts[:20]] * 10

    async def stream(client: openai.AsyncOpenAI, prompt: str) -> str:
        asked: Any = {"model": "tiny", "prompt": prompt, "max_tokens": 10, "temperature": 0.0, "stream": True}
        chunks = await client.completions.create(**asked)
        return "".join([choice.text async for chunk in chunks for choice in chunk.choices])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{api_server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(stream(client, prompt) for prompt in prompts))

    assert asyncio.run(all_of_them()) == theirs


def test_the_model_has_its_names(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "other"]
    assert client.models.retrieve("other").id == "other"
    with pytest.raises(openai.NotFoundError, match="there is no 'gpt-9'"):
        client.models.retrieve("gpt-9")


FILES = sorted((Path(__file__).parent / "clients").glob("*.json"))
SENT = [
    pytest.param(request["path"], request["body"], id=f"{file.stem}-{number}")
    for file in FILES
    for number, request in enumerate(json.loads(file.read_text())["requests"])
]


def test_there_are_clients() -> None:
    assert len(FILES) == 6


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), SENT)
def test_what_a_client_sends_is_answered(
    script: Script, speaker: RunningServer, path: str, body: dict[str, Any], stream: bool
) -> None:
    messages = body.get("messages") or body.get("input") or []
    calls = bool(body.get("tools")) and messages[-1].get("role") == "user"
    script.text = f"<think>Hm.</think>{CALL if calls else 'Sunny.'}"
    sent = {**body, "stream": stream}
    if not stream:
        sent.pop("stream_options", None)
    response = speaker.http.post(path, json=sent)
    assert response.status_code == 200, response.text
    if stream:
        last = response.text.strip().rpartition("\n\n")[2]
        assert last == "data: [DONE]" or last.startswith("event: response.completed\n")
    # Without a reader of thoughts `<think>` is text like any other: a busy machine cuts it over two events.
    written = "".join(json.loads(text) for text in re.findall(r'"text":("(?:[^"\\]|\\.)*")', response.text))
    assert (path == "/v1/completions") == ("<think>" in written)
    assert ('"tool_calls":[' in response.text or '"function_call"' in response.text) == calls
    assert all(text in script.prompt for message in messages for text in texts(message))


def texts(message: dict[str, Any]) -> list[str]:
    """What the model has to see of a message."""
    calls = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    parts = message.get("content")
    content = [part["text"] for part in parts] if isinstance(parts, list) else [parts or ""]
    return [*calls, *content, *(message.get(name) or "" for name in ("name", "output", "reasoning_content"))]


# ---- log-probabilities as harnesses and clients ask for them


TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS = ["the quick fox", "漢", "a" * 700, "over the lazy dog"]
THE_FOX: Any = [{"role": "user", "content": "the fox"}]


def ids(text: str) -> list[int]:
    return list(chat_tokenizer()(text)["input_ids"])


def scores_of(engine: Engine, prompt: str) -> list[float]:
    """The log-probability of each of the prompt's tokens but the first."""
    (output,) = engine.generate([ids(prompt)], SamplingParams(max_tokens=1, prompt_logprobs=0))
    return [next(iter((place or {}).values())).logprob for place in list(output.prompt_logprobs or ())[1:]]


@pytest.mark.parametrize("tokens", [False, True])
def test_prompts_are_scored_without_an_answer(client: Any, engine: Engine, tokens: bool) -> None:
    prompts: Any = [ids(prompt) for prompt in PROMPTS] if tokens else PROMPTS
    ours = client.completions.create(model="tiny", prompt=prompts, max_tokens=0, echo=True, logprobs=1, temperature=0)
    assert [choice.index for choice in ours.choices] == [0, 1, 2, 3]
    for prompt, choice in zip(PROMPTS, ours.choices, strict=True):
        assert (choice.text, choice.finish_reason) == (prompt, "length")
        found = choice.logprobs
        first, *values = found.token_logprobs
        assert first is None
        assert values == pytest.approx(scores_of(engine, prompt), abs=1e-3)
        lengths = {len(told) for told in (found.tokens, found.text_offset, found.top_logprobs)}
        assert lengths == {len(ids(prompt))}
    assert (ours.usage.prompt_tokens, ours.usage.completion_tokens) == (sum(len(ids(prompt)) for prompt in PROMPTS), 0)


def test_a_prompt_that_fills_all_positions_is_scored(api_server: RunningServer) -> None:
    longest = api_server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    body = {"prompt": [[5, 6] * (longest // 2)], "max_tokens": 0, "echo": True, "logprobs": 0}
    assert api_server.http.post(TEXT, json=body).status_code == 200
    for more in ({"max_tokens": 1}, {"prompt": [[5] * (longest + 1)]}):
        error = api_server.http.post(TEXT, json={**body, **more}).json()["error"]
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


def test_what_a_stream_has_left_to_say_of_no_token_has_no_log_probabilities(api_server: RunningServer) -> None:
    for path, body in (
        (TEXT, {"prompt": "a", "logprobs": 1}),
        (CHAT, {"messages": THE_FOX, "logprobs": True, "top_logprobs": 1}),
    ):
        for more in ({"stop_token_ids": list(range(60, 120))}, {"logit_bias": {"70": 100}, "stop_token_ids": [70]}):
            choices = [
                choice
                for event in api_server.events(path, **{**body, "max_tokens": 8, "seed": 2, **more})
                for choice in event["choices"]
            ]
            assert choices[-1]["finish_reason"] == "stop"
            assert choices[-1]["logprobs"] is None or "logit_bias" not in more
            assert all(choice["logprobs"] is None or any(choice["logprobs"].values()) for choice in choices)


def test_of_tokens_with_one_text_the_likeliest_is_told() -> None:
    """Halves of characters read alike, and lm-eval takes the likeliest of these for the greedy one."""
    token_bytes: Any = {7: b"\xff", 8: b"\xff", 3: b"x"}.__getitem__
    handle: Any = None
    column = CompletionColumn(CompletionRequest(prompt="", logprobs=2), TokenNames(token_bytes), handle)
    (top,) = column.written([{7: Logprob(-1.0, 1), 8: Logprob(-3.0, 3), 3: Logprob(-2.0, 2)}]).top_logprobs
    assert top == {"\ufffd": -1.0, "x": -2.0}


def test_the_chosen_token_is_among_the_likeliest(api_server: RunningServer) -> None:
    body = {"prompt": "the fox", "max_tokens": 5, "echo": True, "seed": 3, "logprobs": 0}
    found = api_server.http.post(TEXT, json=body).json()["choices"][0]["logprobs"]
    assert found["top_logprobs"][0] is None
    assert found["top_logprobs"][1:] == [
        {token: value} for token, value in zip(found["tokens"][1:], found["token_logprobs"][1:], strict=True)
    ]
    body = {"messages": THE_FOX, "max_tokens": 5, "seed": 3, "logprobs": True, "top_logprobs": 0}
    content = api_server.http.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    assert [place["top_logprobs"] for place in content] == [[]] * 5  # as OpenAI's
