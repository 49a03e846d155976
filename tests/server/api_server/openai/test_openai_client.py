"""The openai package's client gets what the engine gives in process, whole and as it comes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from compiled_llm.engine.engine import Engine
from compiled_llm.requests.outputs import Completion, RequestOutput
from compiled_llm.requests.sampling_params import SamplingParams
from support.server.running_servers import RunningServer, chat_tokenizer

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "the quick "}, {"type": "text", "text": "fox"}]},
]
PLAIN = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the quick fox"}]

CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.0}, {}),
    ({"seed": 7, "n": 3}, {}),
    ({"seed": 7, "stop": ["a", "e"]}, {}),
    ({"seed": 7, "stop": "t", "presence_penalty": 0.5, "frequency_penalty": -0.25, "top_p": 0.9}, {}),
    ({"seed": 7, "logit_bias": {"40": 20.0}}, {"logit_bias": {40: 20.0}}),
    (
        {"seed": 7, "extra_body": {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 4}},
        {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 4},
    ),
    (
        {"seed": 7, "extra_body": {"stop_token_ids": list(range(100, 200)), "include_stop_str_in_output": True}},
        {"stop_token_ids": list(range(100, 200)), "include_stop_str_in_output": True},
    ),
]
CASE = pytest.mark.parametrize(("given", "changed"), CASES, ids=lambda case: ", ".join(case))


def expected(engine: Engine, given: dict[str, Any], changed: dict[str, Any], prompt: Any = PLAIN) -> RequestOutput:
    same = {name: value for name, value in given.items() if name != "extra_body"}
    params = SamplingParams(**{"max_tokens": 30, **same, **changed})
    return engine.generate([prompt], params)[0]


def reason(completion: Completion) -> str:
    return "stop" if completion.finish_reason == "stop" else "length"


@CASE
def test_a_chat_is_answered_as_in_process(client: openai.OpenAI, engine: Engine, given: Any, changed: Any) -> None:
    theirs = expected(engine, given, changed)
    ours = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=30, **given)
    assert [choice.message.content for choice in ours.choices] == [answer.text for answer in theirs.outputs]
    assert [choice.finish_reason for choice in ours.choices] == [reason(answer) for answer in theirs.outputs]
    assert [choice.index for choice in ours.choices] == list(range(len(theirs.outputs)))
    assert ours.usage is not None
    assert ours.usage.prompt_tokens == len(theirs.prompt_token_ids)
    assert ours.usage.completion_tokens == sum(len(answer.token_ids) for answer in theirs.outputs)
    assert (ours.model, ours.object) == ("tiny", "chat.completion")


@CASE
def test_a_chat_comes_as_it_is_written(client: openai.OpenAI, engine: Engine, given: Any, changed: Any) -> None:
    theirs = expected(engine, given, changed)
    texts, reasons, chunks = [""] * len(theirs.outputs), [""] * len(theirs.outputs), 0
    usage = None
    for chunk in client.chat.completions.create(
        model="other",
        messages=MESSAGES,
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
        **given,
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            chunks += 1
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [answer.text for answer in theirs.outputs]
    assert reasons == [reason(answer) for answer in theirs.outputs]
    assert chunks >= 2 * len(texts)
    assert usage is not None
    assert usage.completion_tokens == sum(len(answer.token_ids) for answer in theirs.outputs)
    assert usage.prompt_tokens_details is not None


def test_texts_and_tokens_are_continued(client: openai.OpenAI, engine: Engine) -> None:
    prompts: list[Any] = ["the quick fox", "漢字"]
    ids = [chat_tokenizer()(prompt)["input_ids"] for prompt in prompts]
    for given in (prompts, ids, prompts[0], ids[0]):
        ours = client.completions.create(model="tiny", prompt=given, seed=3, n=2)
        asked = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        theirs = [expected(engine, {"seed": 3, "n": 2, "max_tokens": 16}, {}, prompt) for prompt in asked]
        assert [choice.text for choice in ours.choices] == [a.text for output in theirs for a in output.outputs]
        streamed = [""] * len(ours.choices)
        for chunk in client.completions.create(model="tiny", prompt=given, seed=3, n=2, stream=True):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
        assert streamed == [choice.text for choice in ours.choices]


def test_log_probabilities_are_the_engines(client: openai.OpenAI, engine: Engine) -> None:
    theirs = expected(engine, {"seed": 3, "logprobs": 2}, {}).outputs[0]
    assert theirs.logprobs is not None
    asked: dict[str, Any] = {"seed": 3, "max_tokens": 30, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, **asked).choices[0]
    assert whole.logprobs is not None
    content = whole.logprobs.content or []
    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **asked)
    choices = [choice for chunk in stream for choice in chunk.choices]
    streamed = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or []]
    for ours in (content, streamed):
        assert len(ours) == len(theirs.token_ids) - (theirs.finish_reason == "stop")
        for entry, place in zip(ours, theirs.logprobs, strict=False):
            assert entry.logprob == pytest.approx(next(iter(place.values())).logprob, abs=1e-3)
            assert len(entry.top_logprobs) == 2
            assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        assert b"".join(bytes(entry.bytes or []) for entry in ours).decode("utf-8", "replace") == whole.message.content


def test_a_prompt_can_be_repeated_with_its_log_probabilities(client: openai.OpenAI, engine: Engine) -> None:
    theirs = expected(engine, {"seed": 3, "logprobs": 1, "prompt_logprobs": 1, "max_tokens": 4}, {}, "the fox")
    ours = client.completions.create(model="tiny", prompt="the fox", seed=3, echo=True, logprobs=1, max_tokens=4)
    choice = ours.choices[0]
    assert choice.text == f"the fox{theirs.text}"
    assert choice.logprobs is not None
    values = choice.logprobs.token_logprobs or []
    prompt = theirs.prompt_logprobs or []
    assert len(values) == len(prompt) + 4
    assert values[0] is None
    first = prompt[1] or {}
    assert values[1] == pytest.approx(next(iter(first.values())).logprob, abs=1e-3)


@pytest.mark.parametrize("stream", [False, True])
def test_json_follows_a_schema(client: openai.OpenAI, stream: bool) -> None:
    schema = {"enum": ["one", "two"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    answer: Any = client.chat.completions.create(
        model="tiny", messages=MESSAGES, seed=1, max_tokens=200, response_format=form, stream=stream
    )
    if stream:
        text = "".join(choice.delta.content or "" for chunk in answer for choice in chunk.choices)
    else:
        text = answer.choices[0].message.content
    assert json.loads(text) in ("one", "two")


def test_many_streams_at_once(api_server: RunningServer, engine: Engine) -> None:
    prompts = ["fox " * number for number in range(1, 21)]
    theirs = [expected(engine, {"temperature": 0.0}, {}, prompt).text for prompt in prompts]

    async def stream(client: openai.AsyncOpenAI, prompt: str) -> str:
        chunks = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=30, temperature=0.0, stream=True
        )
        return "".join([choice.text async for chunk in chunks for choice in chunk.choices])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{api_server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(stream(client, prompt) for prompt in prompts))

    assert asyncio.run(all_of_them()) == theirs


def test_the_model_has_its_names(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "other"]
    assert client.models.retrieve("other").id == "other"
    with pytest.raises(openai.NotFoundError, match="there is no 'gpt-9'"):
        client.models.retrieve("gpt-9")


def test_lm_eval_scores_a_text(api_server: RunningServer) -> None:
    body = {"model": "tiny", "prompt": [[5, 6, 7, 8]], "max_tokens": 1, "temperature": 0, "logprobs": 1, "seed": 1234}
    found = api_server.http.post("/v1/completions", json={**body, "echo": True}).json()["choices"][0]["logprobs"]
    assert [len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [5] * 4
    assert all(value is not None for value in found["token_logprobs"][1:])
