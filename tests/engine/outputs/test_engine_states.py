"""Hidden states that an engine's requests ask for are HuggingFace's, whatever runs beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from compiled_llm.compilation import steps
from compiled_llm.engine.admission.greedy import Greedy
from compiled_llm.engine.admission.policies import POLICIES
from compiled_llm.engine.emitted import KeptSteps, RequestEmitted
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.outputs import RequestOutput
from compiled_llm.requests.sampling_params import SamplingParams
from engine.test_engine import some_prompts
from support.engine.random_requests import adapted
from support.engine.text_tokenizers import byte_level
from support.engine.tiny_engines import greedy, tiny, wrapped
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.noting import note_calls
from support.parity import alone, assert_account_is_empty

LAYERS = 3
ALL = list(range(LAYERS + 1))
ASKED: list[list[int] | None] = [[0, -1], None, [2], ALL, None]


def layers(**config: Any) -> PreTrainedModel:
    return tiny(num_hidden_layers=LAYERS, **config)


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return layers()


pytestmark = pytest.mark.usefixtures("reading")


@pytest.fixture
def model() -> PreTrainedModel:
    return wrapped(2000, layers(), prefill_tokens=16)


def check(plain: PreTrainedModel, output: RequestOutput, asked: Sequence[int]) -> None:
    """Of each answer: what HuggingFace's forward gives of all tokens but the last."""
    for answer in output.outputs:
        text = output.prompt_token_ids + answer.token_ids[:-1]
        with torch.no_grad():
            expected = plain(torch.tensor([text]), output_hidden_states=True).hidden_states
        assert answer.hidden_states is not None
        assert list(answer.hidden_states) == list(asked)
        for number, states in answer.hidden_states.items():
            assert (states.dtype, states.device) == (plain.dtype, torch.device("cpu"))
            torch.testing.assert_close(states, expected[number][0], rtol=1e-4, atol=1e-4)


@pytest.mark.drawn(most=1)
@pytest.mark.core
@pytest.mark.parametrize("mixed", [True, False])
def test_requests_that_ask_have_huggingfaces_and_others_none(plain, model, mixed, seed):
    """Prompts in chunks, which the prefix cache knows the second time."""
    prompts = some_prompts(5, seed, longest=40)
    expected = [alone(plain, prompt, 9) for prompt in prompts]
    with Engine(model, mixed=mixed) as engine:
        for _ in range(2):
            both = zip(prompts, ASKED, strict=True)
            handles = [engine.submit(prompt, greedy(9), hidden_states=asked) for prompt, asked in both]
            outputs = [handle.result(60) for handle in handles]
            assert [output.token_ids for output in outputs] == expected
            for output, asked in zip(outputs, ASKED, strict=True):
                if asked is None:
                    assert output.hidden_states is None
                else:
                    check(plain, output, asked)
                    assert output.cached_tokens == 0
        stats = engine.stats()
    assert stats.cached_tokens > 0, "the others began with pages"
    assert (stats.mixed_steps > 0) is mixed
    assert_account_is_empty(model)


@pytest.mark.usefixtures("one_thread")
def test_tokens_that_are_computed_again_are_kept_once(plain, monkeypatch, seed):
    monkeypatch.setitem(POLICIES, "auto", Greedy)  # more begin than fit: requests are preempted
    model = wrapped(160, layers(), prefill_tokens=16)
    with Engine(model) as engine:
        for output in engine.generate(some_prompts(4, seed, longest=40), greedy(40), hidden_states=[1, -1]):
            check(plain, output, [1, -1])
        assert engine.stats().preemptions > 0
    assert_account_is_empty(model)


def test_steps_of_the_same_rows_are_one_part_also_after_these_got_more_pages(plain, monkeypatch, seed):
    """Each part is put together by itself when a request ends, and here it gets pages every few tokens."""
    begun = note_calls(monkeypatch, KeptSteps, "__init__", lambda *_: None)
    with Engine(wrapped(2000, layers())) as engine:
        for output in engine.generate(some_prompts(4, seed, longest=40), greedy(60), hidden_states=[1, -1]):
            check(plain, output, [1, -1])
    assert len(begun) <= 4, "of the prompts, of the answers, and of what is launched after their end"


@pytest.mark.drawn(most=1)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("nbytes", [0, 5000])
def test_many_leave_the_device_while_their_requests_run(plain, monkeypatch, nbytes, seed):
    """After each step, or every few, also of requests that wait with what they had when they lost their pages."""
    monkeypatch.setitem(POLICIES, "auto", Greedy)
    monkeypatch.setattr("compiled_llm.engine.emitted._EMITTED_ON_DEVICE", nbytes)
    parts = note_calls(monkeypatch, RequestEmitted, "_copy", lambda states: len(states._parts))
    with Engine(wrapped(160, layers(), prefill_tokens=16)) as engine:
        both = zip(some_prompts(4, seed, longest=40), [[1, -1], None, ALL, [0]], strict=True)
        handles = [engine.submit(prompt, greedy(40), hidden_states=asked) for prompt, asked in both]
        for handle, asked in zip(handles, [[1, -1], None, ALL, [0]], strict=True):
            output = handle.result(60)
            if asked is not None:
                check(plain, output, asked)
        assert engine.stats().preemptions > 0
    assert len(parts) > (100 if nbytes == 0 else 10)
    assert max(parts) < 20


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_each_of_several_answers_has_its_own(plain, model, prefix_cache, seed):
    (prompt,) = some_prompts(1, seed, longest=40)
    params = SamplingParams(n=2, seed=seed, temperature=2.0, max_tokens=8)
    with Engine(model, prefix_cache=prefix_cache) as engine:
        (output,) = engine.generate([prompt], params, hidden_states=[-1, 0])
        assert output.outputs[0].token_ids != output.outputs[1].token_ids
        check(plain, output, [-1, 0])


def test_one_that_is_cancelled_has_those_of_its_tokens(plain, model):
    with Engine(model) as engine:
        handle = engine.submit([5, 6, 7], greedy(400), hidden_states=[-1])
        for _ in zip(range(3), handle, strict=False):
            pass
        handle.cancel()
        output = handle.result(60)
        assert (output.finish_reason, len(output.token_ids) < 400) == ("cancelled", True)
        check(plain, output, [-1])
        waiting = engine.submit([5, 6, 7], greedy(4), timeout=1e-9, hidden_states=[-1]).result(60)
        assert waiting.hidden_states is not None
        assert waiting.hidden_states[-1].shape == (0, plain.config.hidden_size)


def test_an_answer_that_ends_early_has_none_of_what_was_computed_after_it():
    """An end token, and a stop string, which is found while the loop goes on."""
    plain, other = (layers(vocab_size=len(byte_level())) for _ in range(2))
    with Engine(wrapped(2000, other), tokenizer=byte_level()) as engine:
        (whole,) = engine.generate([[5, 6, 7]], greedy(30))
        assert whole.text
        ends: list[dict[str, Any]] = [{"stop_token_ids": [whole.token_ids[5]]}, {"stop": [whole.text[9]]}]
        for end in ends:
            params = SamplingParams(temperature=0.0, max_tokens=300, **end)
            output = engine.submit([5, 6, 7], params, hidden_states=[2]).result(60)
            assert (output.finish_reason, len(output.token_ids) <= 30) == ("stop", True)
            check(plain, output, [2])


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_scored_prompts_have_them_too(plain, model, max_tokens, seed):
    (prompt,) = some_prompts(1, seed, longest=40)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, prompt_logprobs=2)
    with Engine(model) as engine:
        output = engine.submit(prompt, params, hidden_states=ALL).result(60)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(prompt)
    check(plain, output, ALL)


WRONG: dict[str, Any] = {
    "beyond the last": [0, LAYERS + 1],
    "before the first": [-LAYERS - 2],
    "no number": ["last"],
    "a flag": [True],
    "no list": 2,
    "a word": "all",
    "an empty list": [],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_layer_that_is_not_there_is_refused_before_anything_waits(model, name):
    with Engine(model) as engine:
        for call in (engine.submit, engine.generate):
            with pytest.raises(ValueError, match=r"^hidden_states=.*give .*0 for the embeddings to 3 .*-1 to -4"):
                call([5, 6, 7], hidden_states=WRONG[name])
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.finished) == (0, 0, 0)


def test_of_a_model_that_gives_none_the_request_alone_fails(plain, model, monkeypatch):
    monkeypatch.setattr(steps, "emitted", lambda inputs, out: {})
    with Engine(model) as engine:
        asking, other = engine.submit([5, 6], greedy(4), hidden_states=[1]), engine.submit([5, 6, 7], greedy(4))
        with pytest.raises(RuntimeError, match="hidden_states: the forward of this model gives none of layer 1"):
            asking.result(60)
        assert other.result(60).token_ids == alone(plain, [5, 6, 7], 4)


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
def test_compiled_and_captured_steps_give_those_of_each_and_nothing_is_compiled_again(plain, monkeypatch, seed):
    let_a_cpu_capture(monkeypatch)
    model = wrapped(2000, layers(), mode="compile")
    prompts = some_prompts(2, seed, longest=20)
    with Engine(model) as engine:
        for asked in (None, [-1], None, ALL):
            for output in engine.generate(prompts, greedy(9), hidden_states=asked):
                assert output.token_ids == alone(plain, output.prompt_token_ids, 9)
                if asked is not None:
                    check(plain, output, asked)
    assert (model.compiled.stats().recompiles, model.compiled.stats().graph_breaks) == (0, 0)
    assert any(row.states and row.replays for row in model.compiled.cuda_graphs)


@pytest.mark.usefixtures("without_inductor")
def test_compiled_steps_of_an_adapted_model_give_them_after_steps_that_did_not() -> None:
    """What is traced are copies of its modules, made before HuggingFace's hooks for hidden states came."""
    plain, model = adapted(merged=False), wrapped(2000, adapted(merged=False), mode="compile")
    with Engine(model) as engine:
        for asked in (None, [-1]):
            output = engine.submit([5, 6, 7, 8], greedy(4), hidden_states=asked).result(60)
    check(plain, output, [-1])
