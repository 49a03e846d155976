"""Answers as text: streamed while they come, and ended by stop strings; in a thread of its own, not in the loop."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from compiled_llm.engine.admission.greedy import Greedy
from compiled_llm.engine.admission.policies import POLICIES
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.server.engine_process.facts import ready_of
from support.engine.text_tokenizers import byte_level, decode, up_to_stop
from support.engine.tiny_engines import PATIENCE, tiny, wrapped
from support.parity import assert_account_is_empty

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = list(range(3, 23))
VOCABULARY = 380
END = 1


BOTH_WAYS = pytest.mark.usefixtures("reading")


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "asynchronous", True)


@pytest.fixture
def model() -> PreTrainedModel:
    return wrapped(3000, tiny(eos_token_id=END, vocab_size=VOCABULARY))


@pytest.fixture
def engine(model: PreTrainedModel) -> Iterator[Engine]:
    with Engine(model, tokenizer=byte_level()) as engine:
        yield engine
    assert_account_is_empty(model)


def settings(seed: int = 0, **others: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": seed, "max_tokens": 40, "ignore_eos": True, **others})


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "compiled_llm output"]


def test_an_end_that_only_the_tokenizer_names_ends_answers_by_an_option() -> None:
    model, tokenizer = wrapped(1000, tiny(eos_token_id=END, vocab_size=VOCABULARY)), byte_level()
    whole = SamplingParams(temperature=0, max_tokens=8)
    with Engine(model) as engine:
        tokens = engine.generate(PROMPT, whole)[0].outputs[0].token_ids
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(tokens[4])
    end = tokens.index(tokens[4]) + 1
    with Engine(model, tokenizer=tokenizer) as engine:  # as HuggingFace
        assert engine.generate(PROMPT, whole)[0].outputs[0].token_ids == tokens
        assert engine.token_facts.eos_token_ids == {END}
    with Engine(model, tokenizer=tokenizer, tokenizer_eos=True) as engine:
        answer = engine.generate(PROMPT, whole)[0].outputs[0]
        assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == (tokens[:end], "stop", None)
        assert answer.text == tokenizer.decode(tokens[: end - 1])
        goes_on = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        assert engine.generate(PROMPT, goes_on)[0].outputs[0].token_ids == tokens
        later = SamplingParams(temperature=0, max_tokens=8, min_tokens=8)
        assert tokens[4] not in engine.generate(PROMPT, later)[0].outputs[0].token_ids
        ready = ready_of(model, engine, "tiny", tokenizer)
        assert ready.eos_token_ids == ready.form_ends == sorted([END, tokens[4]])
    with Engine(model, tokenizer_eos=True) as engine:  # without a tokenizer there is no other end
        assert engine.generate(PROMPT, whole)[0].outputs[0].token_ids == tokens


def test_prompts_in_vllms_dictionaries_are_those_in_them(engine: Engine) -> None:
    text, params = "abc", settings(max_tokens=4)
    ids = byte_level()(text)["input_ids"]
    given: list[Any] = [
        *({"prompt": text}, {"prompt_token_ids": ids}, {"prompt_token_ids": torch.tensor(ids), "prompt": "of these"}),
        {"prompt": text, "prompt_token_ids": None, "multi_modal_data": None},
    ]
    (expected,) = engine.generate(text, params)
    outputs = [
        *engine.generate(given, params),
        *engine.generate(given[0], params),
        *engine.generate(given[1:2], params),
    ]
    outputs.append(engine.submit(given[1], params).result())
    assert [(output.prompt_token_ids, output.text) for output in outputs] == [(ids, expected.text)] * len(outputs)


def stop_in(tokens: list[int], draw: random.Random) -> str:
    """A string that stands in an answer's text."""
    text = decode(tokens).rstrip("\ufffd")
    start = draw.randrange(len(text) // 3, len(text))
    return text[start : start + draw.randint(1, 4)]


@BOTH_WAYS
def test_answers_end_at_stop_strings(engine, seed):
    draw = random.Random(seed)
    whole = engine.generate([PROMPT] * 8, [settings(number) for number in range(8)])
    for keeps in (False, True):
        stops = [stop_in(output.token_ids, draw) for output in whole]
        params = [
            settings(number, stop=stop if number % 2 else ["\0\0", stop], include_stop_str_in_output=keeps)
            for number, stop in enumerate(stops)
        ]
        submitted = [engine.submit(PROMPT, each) for each in params]
        outputs = [*engine.generate([PROMPT] * 8, params), *(handle.result(PATIENCE) for handle in submitted)]
        for output, first, stop in zip(outputs, whole * 2, stops * 2, strict=True):
            assert (output.token_ids, output.text) == up_to_stop(first.token_ids, stop, keeps)
            assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        for handle, first, stop in zip(submitted, whole, stops, strict=True):  # no token after it is seen
            assert (list(handle), "".join(handle.text())) == up_to_stop(first.token_ids, stop, keeps)
    assert engine.stats().running == 0


@BOTH_WAYS
def test_several_answers_stop_each_for_itself(engine):
    whole = engine.generate(PROMPT, settings(n=3))[0].outputs
    stop = decode(whole[1].token_ids)[5:8]
    outputs = engine.generate(PROMPT, settings(n=3, stop=stop))[0].outputs
    for answer, first in zip(outputs, whole, strict=True):
        assert (answer.token_ids, answer.text) == up_to_stop(first.token_ids, stop)
    handle = engine.submit(PROMPT, settings(n=3, stop=stop))
    texts = ["".join(handle.text(index)) for index in (2, 0, 1)]
    assert texts == [outputs[index].text for index in (2, 0, 1)]
    with pytest.raises(ValueError, match=r"n=3: several answers have no one stream"):
        handle.text()


@BOTH_WAYS
def test_stop_strings_are_looked_for_after_min_tokens(engine):
    whole = engine.generate(PROMPT, settings(min_tokens=12))[0].token_ids
    stop = decode(whole[:6])[2]
    output = engine.generate(PROMPT, settings(min_tokens=12, stop=stop))[0]
    assert len(output.token_ids) > 12
    assert str(output.text).startswith(decode(whole[:12]).rstrip("\ufffd"))


@BOTH_WAYS
def test_tokens_that_end_an_answer_are_not_in_its_text(engine):
    whole = engine.generate(PROMPT, settings())[0].token_ids
    stop = next(token for token in whole[9:] if "\ufffd" not in decode([token]))  # a text of its own
    count = whole.index(stop) + 1
    for keeps in (False, True):
        handle = engine.submit(PROMPT, settings(stop_token_ids=[stop], include_stop_str_in_output=keeps))
        streamed, output = "".join(handle.text()), handle.result(PATIENCE)
        assert (output.token_ids, output.finish_reason, output.stop_reason) == (whole[:count], "stop", stop)
        assert output.text == streamed == decode(whole[: count if keeps else count - 1])
    biased = settings(logit_bias={END: 100.0}, ignore_eos=False, skip_special_tokens=False)
    output = engine.generate(PROMPT, biased)[0]
    assert (output.token_ids, output.text, output.stop_reason) == ([END], "", None)
    kept = settings(logit_bias={END: 100.0}, max_tokens=2, skip_special_tokens=False)
    assert engine.generate(PROMPT, kept)[0].text == "</s></s>"


# ---- streams


@pytest.mark.parametrize("as_text", [True, False])
def test_an_event_loop_is_woken_once_a_step_for_all_its_streams(engine, as_text):
    woken = 0

    async def read(handle: RequestHandle) -> None:
        async for _ in handle.text() if as_text else handle:
            pass

    async def read_all() -> None:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def counted(*arguments: Any) -> Any:
            nonlocal woken
            woken += 1
            return wake(*arguments)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        with engine.paused():
            handles = [engine.submit(PROMPT, settings(number)) for number in range(16)]
        await asyncio.gather(*map(read, handles))

    asyncio.run(read_all())
    assert 0 < woken <= engine.stats().steps + 20


@pytest.mark.whole
def test_a_stream_may_begin_late_and_be_read_again(engine):
    handle = engine.submit(PROMPT, settings())
    text = handle.result(PATIENCE).text
    assert not threads()
    with engine.paused(), pytest.raises(RuntimeError, match="paused, or running, in this thread"):
        "".join(engine.submit(PROMPT, settings()).text())
    stream = handle.text()
    assert "".join(stream) == "".join(stream) == "".join(handle.text()) == text
    assert all(stream)

    async def again() -> str:
        return "".join([piece async for piece in handle.text()])

    assert asyncio.run(again()) == text
    late = engine.submit(PROMPT, settings(max_tokens=400))
    next(iter(late))
    assert "".join(late.text()) == late.result(PATIENCE).text


@pytest.mark.parametrize("stop", [None, "\0\0"])
@pytest.mark.parametrize("end", ["cancelled", "timeout", "closed"])
def test_a_stream_gives_what_a_request_that_ends_early_has(model, end, stop):
    with Engine(model, tokenizer=byte_level()) as engine:
        timeout = 0.05 if end == "timeout" else None
        handle = engine.submit(PROMPT, settings(max_tokens=900, stop=stop), timeout=timeout)
        pieces = iter(handle.text())
        first = next(pieces, "")
        if end != "timeout":
            (handle.cancel if end == "cancelled" else engine.close)()
        text, output = first + "".join(pieces), handle.result(PATIENCE)
        assert (output.finish_reason, output.text) == ("timeout" if end == "timeout" else "cancelled", text)
        assert "".join(handle.text()) == text
    assert not threads()


@pytest.mark.whole
@BOTH_WAYS
def test_a_preempted_answer_goes_on_with_its_text(model, monkeypatch):
    monkeypatch.setitem(POLICIES, "auto", Greedy)
    with Engine(model, tokenizer=byte_level(), prefix_cache=False) as engine:
        params = [settings(number, max_tokens=110, stop="\0\0") for number in range(24)]
        handles = [engine.submit(PROMPT, each) for each in params]
        streamed = ["".join(handle.text()) for handle in handles]
        assert engine.stats().preemptions > 0
        assert streamed == [handle.result(PATIENCE).text for handle in handles]
        assert streamed == [decode(output.token_ids) for output in engine.generate([PROMPT] * 24, params)]


# ---- its thread, and what goes wrong


def test_without_text_there_is_no_thread_and_no_tokenizer_at_work(model):
    with Engine(model, tokenizer=byte_level()) as engine:
        handle = engine.submit(PROMPT, settings())
        assert len(list(handle)) == 40
        asyncio.run(_awaited(engine.submit(PROMPT, settings())))
        engine.generate([PROMPT] * 2, settings())
        assert not threads()
        engine.generate(PROMPT, settings(stop="\0\0"))
        assert len(threads()) == 1
    assert not threads()


async def _awaited(handle: RequestHandle) -> None:
    await handle


def test_text_without_a_tokenizer_is_refused(model):
    with Engine(model) as engine:
        with pytest.raises(ValueError, match=r"stop=\('x',\): stop strings need a tokenizer"):
            engine.submit(PROMPT, settings(stop="x"))
        with pytest.raises(ValueError, match=r"text\(\) needs a tokenizer"):
            engine.submit(PROMPT, settings()).text()
        assert engine.submit(PROMPT, settings()).result(PATIENCE).text is None
