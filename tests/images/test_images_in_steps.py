"""Steps that read images, in chunks beside other rows: tokens of HuggingFace's `generate` alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from compiled_llm.compilation.programs import Programs
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.images import shown, shown_prompt
from compiled_llm.engine.images.encoder import encoder_graphs
from compiled_llm.engine.images.encoder.encoder_graphs import EncoderGraphs
from compiled_llm.engine.images.encoder.encoder_step import PROGRAM as ENCODER
from compiled_llm.engine.images.request_images import RequestImages
from compiled_llm.engine.images.shown_step import PROGRAM
from compiled_llm.execution.prefill.extra_memory import ExtraMemory
from compiled_llm.requests.sampling_params import SamplingParams
from support.engine.tiny_engines import PATIENCE, greedy
from support.execution.stand_in_cuda_graphs import NoGuards, StandInGraphCapture, let_a_cpu_capture
from support.images import Part, SampleImage, answer, prompt_of, seeing
from support.parity import assert_account_is_empty

QWEN = "Qwen3VL"
FAMILIES = [QWEN, "Qwen2VL", "Qwen2_5_VL"]
CAT, DOG, WIDE = SampleImage(1), SampleImage(2), SampleImage(3, wide=True)
LONG = tuple(range(40, 60))


@pytest.fixture(autouse=True)
def never_by_huggingface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestImages, "run", None)


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, str]]:
    """Its launches have eight tokens at most, so that chunks cut images."""
    model = seeing(request.param, prefill_tokens=8)
    with Engine(model, mixed=True, images_in_steps=True) as running:
        yield running, request.param
    assert_account_is_empty(model)


def begun(engine: Engine, family: str, parts: tuple[Part, ...], **options: Any) -> Any:
    has_images = any(isinstance(part, SampleImage) for part in parts)
    return engine.submit(prompt_of(family, *parts) if has_images else list(parts), greedy(9), **options)


def assert_answers(engine: Engine, family: str, *prompts: tuple[Part, ...], **options: Any) -> list[int]:
    """All at once; returns how many of their tokens the prefix cache had."""
    handles = [begun(engine, family, parts, **options) for parts in prompts]
    outputs = [handle.result(PATIENCE) for handle in handles]
    assert [own.outputs[0].token_ids for own in outputs] == [answer(family, parts, 9) for parts in prompts]
    return [own.cached_tokens for own in outputs]


def test_chunks_cut_images(engine):
    assert_answers(*engine, (5, WIDE, 7, 8))
    assert_answers(*engine, (*LONG, WIDE, 7, DOG, 8), cache_salt="other")


@pytest.mark.drawn(most=1)
def test_images_and_text_run_in_one_launch(engine):
    before = engine[0].stats().mixed_steps
    assert_answers(*engine, (5, 6), (9, CAT, 7), (7, 8, 9), (CAT, 3, WIDE, 5), (*LONG, 4), (6, WIDE, *LONG))
    assert engine[0].stats().mixed_steps > before


def test_prompts_begin_inside_a_image(engine):
    assert assert_answers(*engine, (4, WIDE, 7, 8)) == [0]
    assert assert_answers(*engine, (4, WIDE, CAT, 9, 8)) == [8]
    assert assert_answers(*engine, (4, WIDE, 7, *LONG)) == [12]


def test_draws_do_not_depend_on_who_computes(seed, monkeypatch):
    """The random number of a token follows from its position."""
    monkeypatch.undo()
    params, drawn = SamplingParams(temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True), []
    for in_steps in (True, False):
        with Engine(seeing(QWEN), images_in_steps=in_steps) as engine:
            drawn.append(engine.submit(prompt_of(QWEN, 5, WIDE, 7, 8), params).result(PATIENCE).outputs[0].token_ids)
    assert drawn[0] == drawn[1]


def test_rows_that_lose_their_pages_show_their_images_again(seed):
    chance = random.Random(seed)
    model = seeing("Qwen2_5_VL", tokens=80, prefill_tokens=16)
    with Engine(model, max_num_seqs=4, admission="greedy", images_in_steps=True) as engine:
        prompts = [
            (number, SampleImage(number % 3, number % 2 == 0), *LONG[: chance.choice([2, 9])]) for number in range(9)
        ]
        assert_answers(engine, "Qwen2_5_VL", *prompts)
        assert engine.stats().preemptions
    assert_account_is_empty(model)


def test_hidden_states_of_text_come_beside_images(engine):
    running, family = engine
    alone = running.submit([5, 6, 7], greedy(3), hidden_states=[1]).result(PATIENCE).outputs[0].hidden_states
    shown = begun(running, family, (*LONG, WIDE, 7))
    beside = running.submit([5, 6, 7], greedy(3), hidden_states=[1]).result(PATIENCE).outputs[0].hidden_states
    assert shown.result(PATIENCE).outputs[0].token_ids == answer(family, (*LONG, WIDE, 7), 9)
    for number, states in alone.items():
        torch.testing.assert_close(beside[number], states)


# ---- what would be found


def differing(*prompts: tuple[Part, ...]) -> list[tuple[Part, ...]]:
    with Engine(seeing(QWEN, prefill_tokens=8), images_in_steps=True) as engine:
        answers = [engine.submit(prompt_of(QWEN, *parts), greedy(20)).result(PATIENCE).outputs[0] for parts in prompts]
        return [own for own, given in zip(prompts, answers, strict=True) if given.token_ids != answer(QWEN, own, 20)]


def test_features_without_those_of_further_layers_would_be_found(monkeypatch):
    prompt = (5, SampleImage(4, wide=True), 7, 8)
    assert differing(prompt) == []
    forward = shown.deep_forward
    monkeypatch.setattr(shown, "deep_forward", lambda *model, deep, **given: forward(*model, deep=deep * 0, **given))
    assert differing(prompt) == [prompt]


def test_one_axis_of_positions_would_be_found(monkeypatch):
    prompt = (5, WIDE, 7, 8)
    monkeypatch.setattr(shown, "_positions_of", lambda own: np.broadcast_to(own.positions, (3, len(own.ids))))
    assert differing(prompt) == [prompt]


def test_features_of_other_tokens_would_be_found(monkeypatch):
    made = shown_prompt.ShownTokens
    monkeypatch.setattr(
        shown_prompt, "ShownTokens", lambda axes, places, features, *rest: made(axes, places, features.flip(1), *rest)
    )
    prompt = (5, WIDE, 7, 8)
    assert differing(prompt) == [prompt]


# ---- captured


@pytest.mark.parametrize("family", FAMILIES)
def test_launches_with_images_are_captured_and_replayed_as_those_of_text(family, monkeypatch):
    """On a CPU, where a replay launches once more: over the tensors that were captured, filled with other images."""
    let_a_cpu_capture(monkeypatch)
    model = seeing(family)
    prompts: list[tuple[Part, ...]] = [(5, CAT, 7), (6, WIDE, 7, 8, 9), (5, 6, 7), (9, CAT, 3, WIDE, 4, DOG, 1)]
    with Engine(model, images_in_steps=True, prefix_cache=False) as engine:
        for _ in range(2):
            for parts in prompts:
                assert_answers(engine, family, parts)
        table = model.compiled.model_runner().state.step_table
        shown = [entry for key, entry in table.entries.items() if key.program == PROGRAM.name]
        assert sum(entry.replays for entry in shown) >= 4
        assert model.compiled.model_runner().prefill.packer.extra_memory.nbytes
        assert not any(key.program for key in table.runnable("prefill"))
    assert_account_is_empty(model)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_warmup_first_images_are_replayed_and_so_they_are_after_sleep(family, monkeypatch):
    """In the next larger of a few sizes; sleep gives the CUDA graphs back, and wake captures them again."""
    let_a_cpu_capture(monkeypatch)
    model = seeing(family)
    monkeypatch.setattr(encoder_graphs, "GraphCapture", lambda device: StandInGraphCapture(model))
    monkeypatch.setattr(encoder_graphs, "TOKENS", (8, 24))
    monkeypatch.setattr(Programs, "guards", lambda *asked: NoGuards())
    with Engine(model, max_num_seqs=4, images_in_steps=True, prefix_cache=False) as engine:
        engine.warmup(2)
        for _ in range(2):
            runner = model.compiled.model_runner()
            shown = [key for key in runner.state.step_table.of("prefill") if key.program]
            assert shown
            assert {key.program for key in shown} == {PROGRAM.name}
            assert_answers(engine, family, (5, CAT, 7))
            assert sum(runner.state.step_table.entries[key].replays for key in shown) == 1
            assert EncoderGraphs.of(runner).replays == 1
            assert_answers(engine, family, (9, WIDE, 3, DOG, 1), (6, 7, 8), (4, CAT, 5))
            before = model.compiled.stats().memory
            assert engine.sleep(graphs=True) > 0
            engine.wake()
            after = model.compiled.stats().memory
            assert [after[part] for part in ("buffers", "encoder_graphs")] == [
                before["buffers"],
                before["encoder_graphs"],
            ]
    assert_account_is_empty(model)


def test_a_replay_over_images_of_an_earlier_launch_would_be_found(monkeypatch):
    let_a_cpu_capture(monkeypatch)
    fill, filled = ExtraMemory.filled, list[Any]()

    def only_first(room: ExtraMemory, extra: Any, *sizes: int) -> Any:
        if not filled:
            filled.append(fill(room, extra, *sizes))
        return filled[0] if filled[0].shown.shape == extra.shown.shape else extra

    monkeypatch.setattr(ExtraMemory, "filled", only_first)
    with Engine(seeing(QWEN), images_in_steps=True, prefix_cache=False) as engine:
        prompts = [(5, SampleImage(number, wide=True), 7, 8) for number in range(4)]
        answers = [engine.submit(prompt_of(QWEN, *parts), greedy(20)).result(PATIENCE).outputs[0] for parts in prompts]
        assert [own.token_ids for own in answers] != [answer(QWEN, parts, 20) for parts in prompts]


# ---- compiled


@pytest.mark.whole
@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_of_images_compile_nothing_after_warmup(family):
    model = seeing(family, mode="cuda-graphs", eager_first=False)
    with Engine(model, images_in_steps=True) as engine:
        engine.warmup(1)
        assert {PROGRAM.name, ENCODER.name} <= model.compiled.model_runner().graph_manager.prefills
        before = model.compiled.stats()
        for parts in ((5, CAT, 7), (5, WIDE, 7, 8, 9), (6, CAT, 3, WIDE, 4, DOG, *LONG), (5, 6, 7)):
            assert begun(engine, family, parts).result(600).outputs[0].token_ids == answer(family, parts, 9)
        after = model.compiled.stats()
    assert (after.graphs, after.recompiles, after.graph_breaks) == (before.graphs, 0, 0)
