"""Log-probabilities as harnesses and clients ask for them: of prompts, in streams, of the last chunk."""

from __future__ import annotations

from typing import Any

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
def test_prompts_are_scored_without_an_answer(client: Any, engine: Engine, tokens: bool) -> None:
    prompts: Any = [ids(prompt) for prompt in PROMPTS] if tokens else PROMPTS
    ours = client.completions.create(model="tiny", prompt=prompts, max_tokens=0, echo=True, logprobs=1, temperature=0)
    assert [choice.index for choice in ours.choices] == [0, 1, 2, 3]
    for prompt, choice in zip(PROMPTS, ours.choices, strict=True):
        assert (choice.text, choice.finish_reason) == (prompt, "length")
        found = choice.logprobs
        first, *values = found.token_logprobs
        assert first is None
        assert values == pytest.approx(expected(engine, prompt), abs=1e-3)
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
