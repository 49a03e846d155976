"""Prefill of models with latents: new rows attend to keys and values that they expand, others to latents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import compiled_llm
import compiled_llm_ops
from compiled_llm import Engine
from compiled_llm.compilation.program_list import PREFILL, PREFILL_ALONE
from compiled_llm_ops import planned_latent_attention
from compiled_llm_ops.contracts import PlannedBatch
from compiled_llm_ops.contracts.latent import PlannedLatentAttention
from compiled_llm_ops.kernels.latent import latent_tiling
from compiled_llm_ops.reference.backend import Reference, ReferencePlan
from support.engine import tiny_engines
from support.latent_models import ROPE, latent_model, needs_latents
from support.parity import FEW_PAGES, greedy, mixed_prompts, next_turn

pytestmark = needs_latents


def pair(seed: int, **options: Any) -> tuple[Any, Any]:
    options = {**FEW_PAGES, **options}
    return latent_model(seed=seed), compiled_llm.wrap(latent_model(seed=seed), mode="eager", **options)


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Which op of prefill ran, and over how many tokens, padding included, in order; a first call runs each once."""
    ran: list[tuple[str, int]] = []
    for name in ("ragged_attention", "latent_attention"):
        monkeypatch.setattr(compiled_llm_ops, name, _noted(ran, name, getattr(compiled_llm_ops, name)))
    return ran


def _noted(ran: list[tuple[str, int]], name: str, op: Any) -> Any:
    def call(*args: Any) -> Tensor:
        ran.append((name, len(args[0])))
        out: Tensor = op(*args)
        return out

    return call


def test_new_rows_attend_to_what_they_expand_and_continued_ones_to_latents(
    seed: int, attended: list[tuple[str, int]]
) -> None:
    plain, model = pair(seed)
    prompts = torch.randint(3, 128, (3, 23), generator=torch.Generator().manual_seed(seed)).tolist()
    continued, new = prompts[0], prompts[1]
    with Engine(model) as engine:
        engine.generate([[5, 6, 7]], tiny_engines.greedy(2))
        for batch, op in (([continued], "ragged"), ([[*continued[:21], 7]], "latent"), ([continued, new], "latent")):
            attended.clear()
            outputs = engine.generate(batch, tiny_engines.greedy(5))
            assert {name for name, _ in attended} == {f"{op}_attention"}, batch
            for prompt, output in zip(batch, outputs, strict=True):
                expected = greedy(plain, {"input_ids": torch.tensor([prompt])}, 5)[0, len(prompt) :]
                assert output.token_ids == expected.tolist()
        assert [output.cached_tokens for output in outputs] == [20, 0]
    assert max(tokens for _, tokens in attended) <= 3 + 23 + 1, "new tokens, and one of padding"


def test_chunks_after_the_first_attend_to_latents(seed: int, attended: list[tuple[str, int]]) -> None:
    plain, model = pair(seed, prefill_tokens=16)
    inputs = mixed_prompts([40], 128, seed)
    greedy(model, mixed_prompts([3], 128, seed), 2)
    attended.clear()
    torch.testing.assert_close(greedy(model, inputs, 6), greedy(plain, inputs, 6))
    assert list(dict.fromkeys(attended)) == [
        ("ragged_attention", 16),
        ("latent_attention", 16),
        ("latent_attention", 8),
    ]


def test_short_rows_may_be_left_to_latents(
    seed: int, attended: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent_tiling, "EXPANDED_FROM", 6)
    plain, model = pair(seed)
    greedy(model, mixed_prompts([3], 128, seed), 2)
    for length, op in ((5, "latent"), (6, "ragged")):
        attended.clear()
        inputs = mixed_prompts([length, 2], 128, seed)
        torch.testing.assert_close(greedy(model, inputs, 6), greedy(plain, inputs, 6))
        assert {name for name, _ in attended} == {f"{op}_attention"}


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
def test_prefill_is_two_programs_compiled_once_each(seed: int) -> None:
    plain, model = compiled_pair(seed, num_hidden_layers=1)
    inputs = mixed_prompts([9, 30], 128, seed)
    words = torch.randint(3, 128, (2, 5), generator=torch.Generator().manual_seed(seed))
    ours, theirs = (greedy(own, inputs, 4, return_dict_in_generate=True) for own in (model, plain))
    following = [greedy(own, next_turn(inputs, out, words), 4) for own, out in ((model, ours), (plain, theirs))]
    assert torch.equal(*following)
    greedy(model, mixed_prompts([3, 7, 12], 128, seed), 4)
    counts = model.compiled.model_runner().graph_manager.programs.graph_counts()
    assert counts[PREFILL] == counts[PREFILL_ALONE] == 1
    assert model.compiled.stats().recompiles == 0


def compiled_pair(seed: int, **config: Any) -> tuple[Any, Any]:
    model = compiled_llm.wrap(latent_model(seed=seed, **config), mode="compile", **FEW_PAGES)
    return latent_model(seed=seed, **config), model


# ---- by plan


class Stale(Exception):  # noqa: N818
    """A launch has followed the plan of other lengths."""


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a backend that plans attend to latents; tokens of each launch, whose plan has been made for its lengths."""
    launches: list[int] = []
    decided: dict[int, list[list[int]]] = {}

    def decide(plan: ReferencePlan, batch: PlannedBatch) -> None:
        columns = (batch.qo_indptr, batch.indptr, batch.last_page_len)
        decided[plan.tensor.data_ptr()] = [column.tolist() for column in columns]
        assert batch.geometry.rope_size == ROPE

    def attend(*args: Any) -> Tensor:
        own = PlannedLatentAttention(*args)
        found = [column.tolist() for column in (own.qo_indptr, own.indptr, own.last_page_len)]
        if found != decided[own.plan.data_ptr()]:
            raise Stale(f"{found} is planned as {decided[own.plan.data_ptr()]}")
        launches.append(len(own.query_latent))
        return planned_latent_attention(*args)

    monkeypatch.setattr(Reference, "decode_ops", lambda self, device: None)
    monkeypatch.setattr(ReferencePlan, "decide", decide)
    monkeypatch.setattr(compiled_llm_ops, "planned_latent_attention", attend)
    return launches


@pytest.mark.whole
def test_each_decode_step_is_planned_for_its_lengths(seed: int, planned: list[int]) -> None:
    plain, model = pair(seed)
    for lengths in ([5], [4, 8, 1, 19, 11, 16]):
        inputs = mixed_prompts(lengths, 128, seed)
        torch.testing.assert_close(greedy(model, inputs, 12), greedy(plain, inputs, 12))
    drafts = {"input_ids": mixed_prompts([30], 128, seed)["input_ids"]}
    torch.testing.assert_close(greedy(model, drafts, 16, prompt_lookup_num_tokens=3), greedy(plain, drafts, 16))
    assert len(planned) > 3 * 2 * 11


def test_an_engine_of_planned_steps(seed: int, planned: list[int]) -> None:
    plain, model = pair(seed)
    prompts = torch.randint(3, 128, (3, 23), generator=torch.Generator().manual_seed(seed)).tolist()
    with Engine(model) as engine:
        for _ in range(2):
            outputs = engine.generate(prompts, tiny_engines.greedy(9))
            for prompt, output in zip(prompts, outputs, strict=True):
                expected = greedy(plain, {"input_ids": torch.tensor([prompt])}, 9)[0, len(prompt) :]
                assert output.token_ids == expected.tolist()
        assert [output.cached_tokens for output in outputs] == [20, 20, 20]
    assert planned
