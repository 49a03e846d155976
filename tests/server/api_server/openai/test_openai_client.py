"""The openai package's client gets what the engine gives in process; what other clients send is answered, too.

`clients/` has the bodies that they have sent to a server that wrote them down: for a text, a stream, tools, an answer
to a call, a required call, and JSON. LangChain, LiteLLM, LlamaIndex and Vercel's AI SDK were installed for that; the
first and the last speak to /v1/responses, too.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from compiled_llm.engine.engine import Engine
from compiled_llm.requests.outputs import Completion, RequestOutput
from compiled_llm.requests.sampling_params import SamplingParams
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
    assert (path == "/v1/completions") == ("<think>" in response.text)
    assert ('"tool_calls":[' in response.text or '"function_call"' in response.text) == calls
    assert all(text in script.prompt for message in messages for text in texts(message))


def texts(message: dict[str, Any]) -> list[str]:
    """What the model has to see of a message."""
    calls = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    parts = message.get("content")
    content = [part["text"] for part in parts] if isinstance(parts, list) else [parts or ""]
    return [*calls, *content, *(message.get(name) or "" for name in ("name", "output", "reasoning_content"))]
