"""Each sampling setting does in `generate`, in the engine and over HTTP what it does in HuggingFace's `generate`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams
from support.engine.sampling_settings import (
    COMBINED,
    DRAWN,
    ENDS,
    GREEDY,
    VOCABULARY,
    Setting,
    generated,
    ids_of,
    together,
)
from support.server.running_servers import RunningServer
from support.server.scripted import speaking_server, tool_tokenizer
from support.tiny_models import tiny_qwen3

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PROMPTS = [ids_of(text) for text in ("a", "the fox", "over the lazy dog")]
TOKENS = 14


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return tiny_qwen3(eos_token_id=ENDS, num_hidden_layers=1, vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def model(one_thread: None) -> PreTrainedModel:
    twin = tiny_qwen3(eos_token_id=ENDS, num_hidden_layers=1, vocab_size=VOCABULARY)
    options: dict[str, Any] = {"mode": "eager", "page_size": 4, "kv_memory": "6000 tokens", "max_batch_size": 16}
    return compiled_llm.wrap(twin, progress=False, **options)


@pytest.mark.drawn(most=3)
@pytest.mark.parametrize("name", GREEDY)
def test_the_most_likely_tokens_are_huggingfaces(
    name: str, plain: PreTrainedModel, model: PreTrainedModel, engine: Engine, api_server: RunningServer
) -> None:
    if name == "structured_outputs":
        pytest.importorskip("xgrammar")
    setting, none = GREEDY[name], Setting({}, {})
    expected = [generated(plain, prompt, setting, TOKENS) for prompt in PROMPTS]
    assert expected != [generated(plain, prompt, none, TOKENS) for prompt in PROMPTS], "the setting changes the tokens"
    assert [generated(model, prompt, setting, TOKENS) for prompt in PROMPTS] == expected
    params = SamplingParams(**{"max_tokens": TOKENS, "temperature": 0} | setting.params)
    assert [output.token_ids for output in engine.generate(PROMPTS, params)] == expected
    body = {"max_tokens": TOKENS, "temperature": 0} | setting.fields()
    answers = api_server.post(TEXT, prompt=PROMPTS, return_token_ids=True, **body)["choices"]
    assert [answer["token_ids"] for answer in answers] == expected


@pytest.mark.whole
def test_settings_that_are_combined_are_huggingfaces(plain: PreTrainedModel, engine: Engine) -> None:
    """Each pair, and all, as requests of one batch."""
    combined = [together(pair) for pair in itertools.combinations(COMBINED, 2)] + [together(COMBINED)]
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(combined))]
    params = [SamplingParams(max_tokens=TOKENS, temperature=0, **setting.params) for setting in combined]
    for prompt, setting, output in zip(prompts, combined, engine.generate(prompts, params), strict=True):
        assert output.token_ids == generated(plain, prompt, setting, TOKENS), setting.params


@pytest.mark.parametrize("name", DRAWN)
def test_tokens_are_drawn_that_huggingface_would_draw(
    name: str, plain: PreTrainedModel, model: PreTrainedModel, engine: Engine, api_server: RunningServer
) -> None:
    setting, prompt, ids = DRAWN[name], PROMPTS[0], torch.tensor([PROMPTS[0]])
    first: dict[str, Any] = {"max_new_tokens": 1, "do_sample": True, "top_k": 0} | setting.options()
    first["attention_mask"] = torch.ones_like(ids)
    (scores,) = plain.generate(ids, output_scores=True, return_dict_in_generate=True, **first).scores
    chances = scores[0].softmax(dim=-1)
    possible = set((chances > 1e-9).nonzero()[:, 0].tolist())
    likely = set((chances > 0.12).nonzero()[:, 0].tolist())

    def check(drawn: list[int]) -> None:
        assert likely <= set(drawn) <= possible

    rows = range(0, 64, 16)
    check([token for _ in rows for token in model.generate(ids, num_return_sequences=16, **first)[:, -1].tolist()])
    if setting.params:
        params = SamplingParams(n=64, seed=0, max_tokens=1, ignore_eos=True, **setting.params)
        check([answer.token_ids[0] for answer in engine.generate([prompt], params)[0].outputs])
        fields = {"prompt": prompt, "n": 16, "max_tokens": 1, "return_token_ids": True, **setting.fields()}
        bodies = [api_server.post(TEXT, seed=seed, **fields) for seed in rows]
        check([answer["token_ids"][0] for body in bodies for answer in body["choices"]])


OF_TEXTS: dict[str, dict[str, Any]] = {
    "include_stop_str_in_output": {"stop": ["a", "e", "t"], "include_stop_str_in_output": True},
    "skip_special_tokens": {"logit_bias": {"0": 12.0}, "skip_special_tokens": False, "ignore_eos": True},
    "seed": {"seed": 8},
}


@pytest.mark.drawn(most=4)
@pytest.mark.parametrize("name", [*GREEDY, *(name for name in DRAWN if DRAWN[name].params), *OF_TEXTS])
def test_each_endpoint_takes_each_setting(name: str, engine: Engine, api_server: RunningServer) -> None:
    """They give the text that the engine gives."""
    setting = {**GREEDY, **DRAWN}.get(name, Setting({}, OF_TEXTS.get(name, {})))
    biases = {int(token): bias for token, bias in setting.params.get("logit_bias", {}).items()} or None
    params = SamplingParams(**{"max_tokens": TOKENS, "seed": 7, **setting.params, "logit_bias": biases})
    messages = [{"role": "user", "content": "the fox"}]
    fields = {"seed": 7, **setting.fields()}
    length = fields.pop("max_tokens", TOKENS)
    (text, chat) = engine.generate(["the fox", messages], params)
    asked = {"max_tokens": length, **fields}
    assert api_server.post(TEXT, prompt="the fox", **asked)["choices"][0]["text"] == text.text
    assert api_server.post(CHAT, messages=messages, **asked)["choices"][0]["message"]["content"] == chat.text
    output = api_server.post(RESPONSES, input="the fox", max_output_tokens=length, **fields)["output"]
    assert "".join(part["text"] for item in output for part in item["content"]) == chat.text


def test_every_setting_is_tried() -> None:
    """Functions alone cannot be sent."""
    params = [name for setting in (*GREEDY.values(), *DRAWN.values()) for name in setting.params]
    tried = {*params, *OF_TEXTS, "n", "logprobs", "logprob_token_ids", "prompt_logprobs", "prompt_logprobs_start"}
    assert set(SamplingParams.__dataclass_fields__) == tried | {"logits_processors"}


# ---- log-probabilities

Scored = list[tuple[int, float, dict[int, float]]]
"""Of each token: its id, its log-probability, those of the most likely ones."""
MOST = 2


def of_engine(tokens: list[int], entries: Any) -> Scored:
    return [
        (token, own[token].logprob, {other: entry.logprob for other, entry in own.items()})
        for token, own in zip(tokens, entries, strict=True)
    ]


def id_of(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def of_text(found: dict[str, Any]) -> Scored:
    entries = zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
    return [
        (id_of(token), value, {id_of(other): likely for other, likely in (top or {}).items()})
        for token, value, top in entries
    ]


def of_content(content: list[dict[str, Any]], tokens: list[int]) -> Scored:
    """Those of chats and of the Responses API, which names tokens by their texts alone."""
    return [
        (token, entry["logprob"], dict(enumerate(other["logprob"] for other in entry["top_logprobs"])))
        for token, entry in zip(tokens, content, strict=True)
    ]


def of_prompt(entries: list[Any], tokens: list[int]) -> Scored:
    values = [{int(token): entry["logprob"] for token, entry in own.items()} for own in entries]
    return [(token, own[token], own) for token, own in zip(tokens, values, strict=True)]


def streamed(api_server: RunningServer, path: str, **fields: Any) -> list[Any]:
    """The ``logprobs`` of a stream's chunks."""
    choices = [choice for event in api_server.events(path, **fields) for choice in event["choices"]]
    return [choice["logprobs"] for choice in choices if choice["logprobs"]]


def test_log_probabilities_are_huggingfaces(plain: PreTrainedModel, engine: Engine, api_server: RunningServer) -> None:
    """Of prompts and answers, whole and streamed, in the engine and from each endpoint."""
    params = {"max_tokens": 9, "seed": 5, "ignore_eos": True}
    scores = {"logprobs": MOST, "prompt_logprobs": MOST}
    chat: list[Any] = [{"role": "user", "content": "the fox"}]
    outputs = engine.generate([PROMPTS[2], chat], SamplingParams(**params, **scores))
    texts = [output.prompt_token_ids + output.token_ids for output in outputs]
    with torch.no_grad():
        tables = [plain(torch.tensor([text])).logits[0].log_softmax(dim=-1) for text in texts]

    def check(scored: Scored, text: int, start: int = 1, end: int | None = None) -> None:
        wanted = range(start, len(texts[text]) if end is None else end)
        assert [token for token, _, _ in scored] == [texts[text][place] for place in wanted]
        for (token, value, top), place in zip(scored, wanted, strict=True):
            expected = tables[text][place - 1]
            assert value == pytest.approx(float(expected[token]), abs=1e-3)
            best = expected.topk(MOST).values.tolist()
            assert sorted(top.values(), reverse=True)[:MOST] == pytest.approx(best, abs=1e-3)
            assert len(top) - MOST in (0, 1)

    begin, begin_chat = begins = [len(output.prompt_token_ids) for output in outputs]
    for text, (output, end) in enumerate(zip(outputs, begins, strict=True)):
        assert output.prompt_logprobs is not None
        check(of_engine(output.prompt_token_ids[1:], output.prompt_logprobs[1:]), text, end=end)
        check(of_engine(output.token_ids, output.outputs[0].logprobs), text, end)

    asked = {**params, "return_tokens_as_token_ids": True}
    echo = {"prompt": PROMPTS[2], "echo": True, "logprobs": MOST, **asked}
    whole, parts = api_server.post(TEXT, **echo)["choices"][0]["logprobs"], streamed(api_server, TEXT, **echo)
    joined = {name: [value for part in parts for value in part[name]] for name in whole}
    for found in (whole, joined):
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        check(of_text(found)[1:], 0)
        assert found["text_offset"] == whole["text_offset"]

    question = {"messages": chat, "logprobs": True, "top_logprobs": MOST, **asked}
    answer = api_server.post(CHAT, **question, prompt_logprobs=MOST)
    content = [entry for part in streamed(api_server, CHAT, **question) for entry in part["content"]]
    for entries in (answer["choices"][0]["logprobs"]["content"], content):
        check(of_content(entries, [id_of(entry["token"]) for entry in entries]), 1, begin_chat)
    for entries, text, end in (
        (answer["prompt_logprobs"], 1, begin_chat),
        (api_server.post(TEXT, prompt=PROMPTS[2], prompt_logprobs=MOST)["choices"][0]["prompt_logprobs"], 0, begin),
    ):
        assert entries[0] is None
        check(of_prompt(entries[1:], texts[text][1:end]), text, end=end)

    asked_end = {"prompt": PROMPTS[2], "prompt_logprobs": MOST, "prompt_logprobs_start": 3}
    places = api_server.post(TEXT, **asked_end)["choices"][0]["prompt_logprobs"]
    assert places[:3] == [None] * 3
    check(of_prompt(places[3:], texts[0][3:begin]), 0, 3, begin)

    include = {"include": ["message.output_text.logprobs"], "top_logprobs": MOST}
    asked = {"input": "the fox", "max_output_tokens": 9, "seed": 5, "ignore_eos": True, **include}
    (part,) = api_server.post(RESPONSES, **asked)["output"][0]["content"]
    check(of_content(part["logprobs"], outputs[1].token_ids), 1, begin_chat)


def test_named_tokens_have_the_engine_s_log_probabilities(engine: Engine, api_server: RunningServer) -> None:
    """Whole and streamed: the answer's own token, then those that are named, in their order."""
    named, params = [70, 5, 41], {"max_tokens": 4, "seed": 5, "ignore_eos": True}
    chat: list[Any] = [{"role": "user", "content": "the fox"}]
    outputs = engine.generate([PROMPTS[2], chat], SamplingParams(**params, logprob_token_ids=named))
    expected = [of_engine(output.token_ids, output.outputs[0].logprobs) for output in outputs]

    def check(scored: Scored, expected: Scored) -> None:
        for (token, value, others), (own, likely, entries) in zip(scored, expected, strict=True):
            assert token == own
            assert value == pytest.approx(likely, abs=1e-3)
            assert list(others.values()) == pytest.approx(list(entries.values()), abs=1e-3)
            assert set(entries) == {own, *named}

    asked = {**params, "return_tokens_as_token_ids": True, "logprob_token_ids": named}
    text = {"prompt": PROMPTS[2], "logprobs": 0, **asked}
    check(of_text(api_server.post(TEXT, **text)["choices"][0]["logprobs"]), expected[0])
    check([entry for part in streamed(api_server, TEXT, **text) for entry in of_text(part)], expected[0])
    question = {"messages": chat, "logprobs": True, **asked}
    whole = api_server.post(CHAT, **question)["choices"][0]["logprobs"]["content"]
    parts = [entry for part in streamed(api_server, CHAT, **question) for entry in part["content"]]
    for entries in (whole, parts):
        check(of_content(entries, [id_of(entry["token"]) for entry in entries]), expected[1])


# ---- what is not said


def test_a_request_that_says_nothing_is_sampled_as_the_models_generation_config_has_it() -> None:
    own = {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    with speaking_server(tool_tokenizer(), own) as (script, server):
        script.text = "Yes."
        hi = [{"role": "user", "content": "Hi"}]
        bodies: dict[str, Any] = {CHAT: {"messages": hi}, TEXT: {"prompt": "Hi"}, RESPONSES: {"input": "Hi"}}
        for path, body in bodies.items():
            answer = server.post(path, **body)
            assert {name: script.asked[-1].params.get(name) for name in own} == own, path
            server.post(path, **body, temperature=0.2)
            assert {name: script.asked[-1].params.get(name) for name in own} == {**own, "temperature": 0.2}, path
        assert (answer["temperature"], answer["top_p"]) == (0.6, 0.9)


@pytest.mark.whole
def test_without_one_it_takes_the_most_likely_tokens(api_server: RunningServer) -> None:
    def said(**body: Any) -> str:
        text = api_server.post("/v1/completions", prompt="the quick", max_tokens=20, ignore_eos=True, **body)
        return str(text["choices"][0]["text"])

    assert said() == said() == said(temperature=0)
    assert said(seed=1) == said(seed=1, temperature=1) != said()
    assert len({said(top_p=0.999) for _ in range(3)}) > 1
