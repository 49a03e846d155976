"""Log-probabilities as harnesses and clients ask for them: of prompts, in streams, of the last chunk."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams
from support.server.running_servers import RunningServer, chat_tokenizer

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS = ["the quick fox", "漢", "a" * 700, "over the lazy dog"]
MESSAGES: Any = [{"role": "user", "content": "the fox"}]


def ids(text: str) -> list[int]:
    return list(chat_tokenizer()(text)["input_ids"])


def expected(engine: Engine, prompt: str) -> list[float]:
    """The log-probability of each of the prompt's tokens but the first."""
    (output,) = engine.generate([ids(prompt)], SamplingParams(max_tokens=1, prompt_logprobs=0))
    return [next(iter((place or {}).values())).logprob for place in list(output.prompt_logprobs or ())[1:]]


@pytest.mark.parametrize("tokens", [False, True])
def test_prompts_are_scored_without_an_answer(client: openai.OpenAI, engine: Engine, tokens: bool) -> None:
    prompts: Any = [ids(prompt) for prompt in PROMPTS] if tokens else PROMPTS
    ours = client.completions.create(model="tiny", prompt=prompts, max_tokens=0, echo=True, logprobs=1, temperature=0)
    assert [choice.index for choice in ours.choices] == [0, 1, 2, 3]
    for prompt, choice in zip(PROMPTS, ours.choices, strict=True):
        assert (choice.text, choice.finish_reason) == (prompt, "length")
        found = choice.logprobs
        assert found is not None
        first, *values = found.token_logprobs or []
        assert first is None
        assert values == pytest.approx(expected(engine, prompt), abs=1e-3)
        assert (
            len(found.tokens or []) == len(found.text_offset or []) == len(found.top_logprobs or []) == len(ids(prompt))
        )
    assert ours.usage is not None
    assert (ours.usage.prompt_tokens, ours.usage.completion_tokens) == (sum(len(ids(prompt)) for prompt in PROMPTS), 0)


def test_a_prompt_that_fills_all_positions_is_scored(api_server: RunningServer) -> None:
    longest = api_server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    body = {"prompt": [[5, 6] * (longest // 2)], "max_tokens": 0, "echo": True, "logprobs": 0}
    assert api_server.http.post(TEXT, json=body).status_code == 200
    for more in ({"max_tokens": 1}, {"prompt": [[5] * (longest + 1)]}):
        error = api_server.http.post(TEXT, json={**body, **more}).json()["error"]
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize(("most", "logprobs"), [(0, 0), (5, None), (5, 2)])
def test_a_stream_repeats_the_prompt_with_its_log_probabilities(
    api_server: RunningServer, most: int, logprobs: int | None
) -> None:
    body = {"prompt": PROMPTS, "n": 2, "max_tokens": most, "echo": True, "logprobs": logprobs, "seed": 3}
    whole = api_server.http.post(TEXT, json=body).json()["choices"]
    chunks = [choice for event in api_server.events(TEXT, **body) for choice in event["choices"]]
    for answer in whole:
        parts = [chunk for chunk in chunks if chunk["index"] == answer["index"]]
        assert "".join(part["text"] for part in parts) == answer["text"]
        assert parts[0]["text"] == PROMPTS[answer["index"] // 2]
        if logprobs is None:
            assert all(part["logprobs"] is None for part in parts)
            continue
        for name in ("tokens", "text_offset"):
            assert [entry for part in parts if part["logprobs"] for entry in part["logprobs"][name]] == answer[
                "logprobs"
            ][name]
        values = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["token_logprobs"]]
        assert values[0] is None
        assert values[1:] == pytest.approx(answer["logprobs"]["token_logprobs"][1:], abs=1e-3)


def test_what_a_stream_has_left_to_say_of_no_token_has_no_log_probabilities(api_server: RunningServer) -> None:
    for path, body in (
        (TEXT, {"prompt": "a", "logprobs": 1}),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}),
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


def test_the_chosen_token_is_among_the_likeliest(api_server: RunningServer) -> None:
    body = {"prompt": "the fox", "max_tokens": 5, "echo": True, "seed": 3, "logprobs": 0}
    found = api_server.http.post(TEXT, json=body).json()["choices"][0]["logprobs"]
    assert found["top_logprobs"][0] is None
    assert found["top_logprobs"][1:] == [
        {token: value} for token, value in zip(found["tokens"][1:], found["token_logprobs"][1:], strict=True)
    ]
    body = {"messages": MESSAGES, "max_tokens": 5, "seed": 3, "logprobs": True, "top_logprobs": 0}
    content = api_server.http.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    assert [place["top_logprobs"] for place in content] == [[]] * 5  # as OpenAI's
