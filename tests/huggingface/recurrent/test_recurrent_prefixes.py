"""Engines keep states after beginnings of prompts: what begins alike later is not computed again, and says the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import compiled_llm
from compiled_llm.engine.admission.greedy import Greedy
from compiled_llm.engine.admission.policies import POLICIES
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.requests.sampling_params import SamplingParams
from support.drawing import BY_READING
from support.engine.random_requests import CAPTURES
from support.engine.tiny_engines import PATIENCE, greedy
from support.huggingface.recurrent_families import recurrent_model
from support.huggingface.recurrent_pairs import (
    of_rows_alone,
    plain_family,
    poison_released_states,
    prompts_of,
    wrapped_family,
)
from support.parity import alone

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]

FAMILY, SIZE, NEW = "Qwen3_5", 4, 8
BASE, LONG, SHARED = 40, 50, 20
OTHERS = ["GraniteMoeHybrid", "Jamba", "Lfm2", "OlmoHybrid"]


@pytest.fixture(params=BY_READING)
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    late = request.param == "read a step late"
    monkeypatch.setattr(Loop, "asynchronous", property(lambda _: late))


@pytest.fixture
def model() -> Any:
    return wrapped_family(FAMILY, prefill_tokens=64)


@pytest.fixture
def engine(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    with Engine(model, max_num_seqs=8) as engine:
        engine.generate([[5]], greedy(1))
        poison_released_states(model, monkeypatch)
        yield engine
    pool = model.compiled.model_runner().pool
    assert (pool.account().used, pool.states.account().used) == (0, 2), "two are spare"
    assert pool.states.available == pool.states.total - 2
    assert pool.states.account().cached == 0, "the engine is closed"


def asked(engine: Engine, prompts: Sequence[Sequence[int]], new: int = NEW, family: str = FAMILY) -> int:
    """Ask for all at once, and compare; return how many tokens of the prompts were not computed."""
    before = engine.stats().cached_tokens
    answers = [output.token_ids for output in engine.generate([list(own) for own in prompts], greedy(new))]
    assert answers == of_rows_alone(family, prompts, new)
    return engine.stats().cached_tokens - before


def begin_alike(seed: int, shared: int, rests: Sequence[int]) -> list[list[int]]:
    beginning, *others = prompts_of([shared, *rests], seed)
    return [beginning + own for own in others]


@pytest.mark.usefixtures("reading")
def test_prompts_that_begin_alike_begin_with_a_state(engine: Engine, seed: int) -> None:
    first, second, third, fourth = begin_alike(seed, BASE, [9, 6, 7, 1])
    assert asked(engine, [first]) == 0
    assert asked(engine, [second]) == 0, "the first one's state is after 48 tokens, and no one knew where they part"
    assert asked(engine, [third]) == BASE
    assert asked(engine, [fourth]) == BASE
    assert asked(engine, [first, second]) == 48 + BASE, "the second's own last border is nearer than a cut is worth"


@pytest.mark.drawn(most=1)
@pytest.mark.usefixtures("reading")
@pytest.mark.parametrize("new", [27, 28, 29, 30])
def test_an_answer_goes_on(engine: Engine, new: int, seed: int) -> None:
    """A chat: each turn has the earlier ones, and begins where the last answer ended, wherever that is in a page."""
    chat, *turns = prompts_of([LONG, 7, 9, 3], seed)
    late = getattr(engine._engine_thread.loop, "asynchronous", False)
    known = 0
    for turn in turns:
        assert asked(engine, [chat], new) == known
        chat = chat + of_rows_alone(FAMILY, [chat], new)[0]
        known = len(chat) - 1 - late
        chat += turn


@pytest.mark.whole
@pytest.mark.usefixtures("reading")
def test_answers_that_end_otherwise_go_on(engine: Engine, seed: int) -> None:
    """With a token that ends them, or cancelled; a state after few new tokens is not kept."""
    (prompt,) = prompts_of([LONG], seed)
    answer = of_rows_alone(FAMILY, [prompt], 30)[0]
    ended = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=[answer[24]]))
    text = prompt + ended[0].token_ids
    assert asked(engine, [[*text, 7, 8]]) in (len(text) - 1, len(text)), "a step was launched before the end was read"
    engine.reset_prefix_cache()
    handle = engine.submit(prompt, greedy(200))
    for _ in zip(range(25), handle.tokens(), strict=False):
        pass
    handle.cancel()
    cancelled = prompt + handle.result(PATIENCE).token_ids
    assert asked(engine, [[*cancelled, 7, 8]]) >= len(cancelled) - 2
    engine.reset_prefix_cache()
    short = prompt + of_rows_alone(FAMILY, [prompt], 12)[0]
    assert [asked(engine, [prompt], 12), asked(engine, [[*short, 7]])] == [0, 48]


@pytest.mark.whole
def test_an_answer_goes_on_in_several_ways_at_once(engine: Engine, seed: int) -> None:
    """All begin with one page that is full in part; each writes into a copy of its own."""
    (prompt, *turns) = prompts_of([LONG, 3, 7, 7, 1], seed)
    asked(engine, [prompt], 29)
    chat = prompt + of_rows_alone(FAMILY, [prompt], 29)[0]
    for _ in range(2):
        assert asked(engine, [chat + turn for turn in turns], 6) == 4 * (len(chat) - 1)
    assert asked(engine, [chat + turns[0] + [9]], 6) == len(chat) - 1


def test_many_that_begin_alike_wait_for_the_first_of_them(engine: Engine, seed: int) -> None:
    first, *others = begin_alike(seed, BASE, [9, 5, 6, 7, 8, 9, 10])
    assert asked(engine, [first]) == 0
    assert asked(engine, others) == BASE * (len(others) - 1)


def test_many_that_come_together_begin_with_what_the_first_of_them_computes(engine: Engine, seed: int) -> None:
    prompts = begin_alike(seed, BASE, [9, 5, 6, 7, 8, 9, 10])
    others = begin_alike(seed + 1, BASE, [1, 9, 18])
    assert asked(engine, prompts[:4] + others + prompts[4:]) == BASE * (len(prompts) - 1 + len(others) - 1)
    same = prompts_of([LONG], seed + 2) * 5
    assert asked(engine, same) == 48 * 4


@pytest.mark.whole
@pytest.mark.parametrize("answered", [True, False], ids=["after the first", "all together"])
def test_64_prompts_share_400_tokens(answered: bool, seed: int) -> None:
    """At least 90% of what they share is not computed again."""
    plain = recurrent_model(FAMILY, max_position_embeddings=512)
    options = {"page_size": 16, "kv_memory": "40000 tokens", "max_batch_size": 64, "prefill_tokens": 2048}
    model = compiled_llm.wrap(plain, mode="eager", progress=False, **options)  # type: ignore[arg-type]
    prompts = begin_alike(seed, 400, [50, *(9 + number % 23 for number in range(64))])
    with Engine(model, max_num_seqs=64) as engine:
        if answered:
            engine.generate(prompts[:1], greedy(2))
        before = engine.stats().cached_tokens
        answers = [output.token_ids for output in engine.generate(prompts[1:], greedy(2))]
        reused = engine.stats().cached_tokens - before
    print(f"{reused} of {64 * 400} tokens")
    assert reused >= 0.9 * 64 * 400
    assert answers[::9] == of_rows_alone(FAMILY, prompts[1::9], 2)


def test_those_that_wait_go_on_if_the_first_is_cancelled(engine: Engine, seed: int) -> None:
    first, *others = begin_alike(seed, BASE, [9, 5, 6])
    asked(engine, [first])
    with engine.paused(weights_stay=True):
        handles = [engine.submit(prompt, greedy(NEW)) for prompt in others]
    handles[0].cancel()
    assert handles[1].result(timeout=PATIENCE).token_ids == of_rows_alone(FAMILY, others[1:], NEW)[0]


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("family", OTHERS)
def test_other_kinds_of_layers(family: str, seed: int) -> None:
    first, second, third = begin_alike(seed, BASE, [9, 6, 7])
    with Engine(wrapped_family(family), max_num_seqs=8) as engine:
        found = [asked(engine, [prompt], family=family) for prompt in (first, second, third, first)]
    assert found == [0, 0, BASE, 48]


def test_answers_to_one_prompt_share_its_state(engine: Engine, seed: int) -> None:
    (prompt,) = prompts_of([LONG], seed)
    expected = of_rows_alone(FAMILY, [prompt], NEW)[0]
    before = engine.stats().cached_tokens
    (output,) = engine.generate([prompt], greedy(NEW, n=3))
    assert [answer.token_ids for answer in output.outputs] == [expected] * 3
    assert engine.stats().cached_tokens - before == 2 * 48


@pytest.mark.usefixtures("reading")
def test_rows_that_lose_their_pages_begin_with_a_state_again(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "auto", Greedy)  # more begin than fit: requests are preempted
    model = wrapped_family(FAMILY, kv_memory="120 tokens")
    prompts = begin_alike(seed, SHARED, [9, 10, 11, 12])
    with Engine(model, max_num_seqs=4) as engine:
        engine.generate([[5]], greedy(1))
        poison_released_states(model, monkeypatch)
        for _ in range(2):
            asked(engine, prompts, 40)
        stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    pool = model.compiled.model_runner().pool
    assert (pool.account().used, pool.states.account()) == (0, (pool.states.total, 2, pool.states.total - 2, 0))


@pytest.mark.whole
def test_entries_run_out_before_pages(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row leaves few entries; the states that were used least recently go, and pages stay."""
    model = wrapped_family(FAMILY, max_batch_size=1)
    texts = prompts_of([LONG] * 8, seed)
    with Engine(model, max_num_seqs=1) as engine:
        engine.generate([[5]], greedy(1))
        poison_released_states(model, monkeypatch)
        states = model.compiled.model_runner().pool.states
        for _ in range(2):
            for text in texts:
                assert asked(engine, [text]) == 0
        assert states.account().cached == states.total - 4, "a row that runs has taken two"
        assert len(model.compiled.model_runner().prefixes) > 8 * 10
        assert asked(engine, texts[-1:]) == 48


def test_new_weights_forget_states(engine: Engine, model: Any, seed: int) -> None:
    (prompt,) = prompts_of([LONG], seed)
    asked(engine, [prompt])
    assert asked(engine, [prompt]) == 48
    with torch.no_grad():
        model.get_output_embeddings().weight.neg_()
        for parameter in model.model.layers[0].parameters():
            parameter.mul_(1.5)
    before = engine.stats().cached_tokens
    answer = engine.generate([prompt], greedy(NEW))[0].token_ids
    assert engine.stats().cached_tokens == before
    changed = wrapped_family(FAMILY)
    changed.load_state_dict(model.state_dict())
    assert answer == alone(changed, prompt, NEW, eos_token_id=None)
    assert answer != of_rows_alone(FAMILY, [prompt], NEW)[0]


def test_prompts_that_are_scored_are_computed_whole(engine: Engine, seed: int) -> None:
    (prompt,) = prompts_of([LONG], seed)
    asked(engine, [prompt])
    (output,) = engine.generate([prompt], greedy(NEW, prompt_logprobs=0))
    with torch.no_grad():
        logits = plain_family(FAMILY)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    wanted = [float(logits[at, token]) for at, token in enumerate(prompt[1:])]
    scored: Any = output.prompt_logprobs
    got = [entry[token].logprob for entry, token in zip(scored[1:], prompt[1:], strict=True)]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), atol=1e-4, rtol=1e-4)
    assert output.token_ids == of_rows_alone(FAMILY, [prompt], NEW)[0]


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("mode", ["reduce-overhead", *CAPTURES])
def test_captured_steps_read_kept_states(mode: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU "reduce-overhead" captures nothing."""
    CAPTURES.get(mode, lambda patch: None)(monkeypatch)
    prompts, model = begin_alike(seed, BASE, [9, 6, 7]), wrapped_family(FAMILY, mode, prefill_tokens=64)
    with Engine(model, max_num_seqs=8) as engine:
        assert [asked(engine, [prompt]) for prompt in prompts] == [0, 0, BASE]
        assert asked(engine, prompts[:1], 30) == 48
        chat = prompts[0] + of_rows_alone(FAMILY, prompts[:1], 30)[0]
        assert asked(engine, [[*chat, 7], [*chat, 8, 9]]) == 2 * (len(chat) - 1)
    assert (model.compiled.stats().graph_breaks, model.compiled.stats().recompiles) == (0, 0)
